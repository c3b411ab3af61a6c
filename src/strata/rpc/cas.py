"""The coordinator's compare-and-swap values, who is present and what failed, for callers that block (torchrun's agents).

Of several coordinators the one that leads is asked (`strata.leader`). A swap whose outcome is unknown is not sent to another one: who
asked for it reads first.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc

from strata.core.messages import ReportFailure, ReportHandover, ReportHealth
from strata.leader import LEADER_METADATA, ROLE_METADATA, Coordinators
from strata.rpc import coordinator_pb2 as pb
from strata.rpc import wire
from strata.rpc.presence import AgentPresence
from strata.rpc.stubs import Stubs
from strata.rpc.tls import channel_credentials

AWAY = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)
LEAST_ATTEMPT_S = 0.5
NEVER_SENT = "failed to connect to all addresses"
"""What gRPC says of a call for which there was no connection."""


class HostRefused(Exception):
    """This machine is out of use: why, and what to do when it is fixed."""


class CoordinatorCasClient:
    """Raises `ConnectionError` when no coordinator that leads answers in time; the outcome is then unknown. `address` is HOST:PORT, or
    several of them between commas."""

    def __init__(self, address: str, *, timeout_s: float) -> None:
        self._credentials = channel_credentials(secure=False)
        self._coordinators = Coordinators(address.split(","), follows_unlisted=self._credentials is not None)
        self._channels: dict[str, tuple[grpc.Channel, Stubs]] = {}
        self._opening = threading.Lock()
        self._timeout_s = timeout_s
        token = os.environ.get("STRATA_TOKEN")
        self._metadata = (("authorization", f"Bearer {token}"),) if token else ()

    def get(self, key: str) -> tuple[bytes, str] | None:
        answer = self._call("ReadValue", pb.ReadValueRequest(key=key))
        return (answer.value, str(answer.version)) if answer.version else None

    def cas(
        self, key: str, value: bytes, expected_token: str | None, *, soft: bool = False
    ) -> tuple[bool, bytes | None, str | None]:
        request = pb.SwapValueRequest(
            key=key, value=value, expected_version=int(expected_token or 0), soft=soft
        )
        answer = self._call("SwapValue", request)
        if not answer.version:
            return answer.swapped, None, None
        return answer.swapped, answer.value, str(answer.version)

    def report_failure(self, command: ReportFailure) -> None:
        """Raises `ConnectionError` where it may not have arrived; it may be said again."""
        self._call("ReportFailure", wire.failure_report(command))

    def notify_checkpoint(self, notice: pb.NotifyCheckpointRequest) -> None:
        """Raises `ConnectionError` where it may not have arrived; it may be said again."""
        self._call("NotifyCheckpoint", notice)

    def announce_drain(self, host: str, *, within_s: float, reason: str, source: str) -> None:
        """This machine goes. Raises `ConnectionError` where that may not have arrived; it may be said again."""
        self._call(
            "AnnounceDrain",
            pb.AnnounceDrainRequest(host=host, within_s=within_s, reason=reason, source=source),
        )

    def report_handover(self, command: ReportHandover) -> None:
        self._call("ReportHandover", wire.handover_report(command))

    def report_health(self, command: ReportHealth) -> str:
        """Why this machine is not to join; empty where it is fit. A coordinator of an earlier version says nothing."""
        request = wire.health_report(command)
        try:
            answer = self._ask("ReportHealth", request)
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                return ""
            raise _connection_error(error) from None
        return str(answer.unfit)

    def admit(self, host: str) -> None:
        """Raises `HostRefused` for a machine that is out of use. A coordinator of an earlier version refuses none."""
        request = pb.AdmitHostRequest(host=host)
        try:
            self._ask("AdmitHost", request)
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
                raise HostRefused(error.details()) from None
            if error.code() is not grpc.StatusCode.UNIMPLEMENTED:
                raise _connection_error(error) from None

    def join(
        self, key: str, *, node: str, run_id: str, host: str, on_leave: Callable[[str, float | None], None]
    ) -> AgentPresence:
        """Be there, as `node`, among those who share the value under `key`; `on_leave` is called, on another thread, when this
        machine is taken out of use, or goes: why, and within how many seconds."""

        search = self._coordinators.search()

        def open_stream(messages: Iterator[pb.AgentMessage]) -> object:
            waits = not self._coordinators.are_several
            call: object = self._stubs(search.address).current.method("Presence")(
                messages, metadata=self._metadata, wait_for_ready=waits
            )
            return call

        def ended(error: Any) -> bool:
            if error is None:
                return search.failed("the stream ended")
            return error.code() in AWAY and search.failed(_text(error), leader=_leader(error))

        return AgentPresence(
            open_stream,
            key=key,
            node=node,
            run_id=run_id,
            host=host,
            on_leave=on_leave,
            on_notice=search.worked,
            on_end=ended,
        )

    def close(self) -> None:
        for channel, _ in self._channels.values():
            channel.close()

    def _call(self, method: str, request: Any) -> Any:
        try:
            return self._ask(method, request)
        except grpc.RpcError as error:
            raise _connection_error(error) from None

    def _ask(self, method: str, request: Any) -> Any:
        """Once each of the coordinators that may lead. Raises `ConnectionError` where none of several does."""
        deadline_s = time.monotonic() + self._timeout_s
        search = self._coordinators.search()
        while True:
            remaining_s = max(LEAST_ATTEMPT_S, deadline_s - time.monotonic())
            try:
                answer = self._stubs(search.address).call(
                    method, request, timeout=min(remaining_s, self._timeout_s), metadata=self._metadata
                )
            except grpc.RpcError as error:
                if error.code() not in AWAY:
                    raise
                is_next = search.failed(_text(error), leader=_leader(error))
                if not self._coordinators.are_several or (method == "SwapValue" and not _did_nothing(error)):
                    raise
                if not is_next:
                    raise ConnectionError(f"unavailable: {search.report()}") from None
                continue
            search.worked()
            return answer

    def _stubs(self, address: str) -> Stubs:
        with self._opening:
            if address not in self._channels:
                ping_ms, answer_ms = (2_000, 2_000) if self._coordinators.are_several else (10_000, 5_000)
                options = [
                    ("grpc.max_reconnect_backoff_ms", 1000),
                    ("grpc.initial_reconnect_backoff_ms", 100),
                    ("grpc.keepalive_time_ms", ping_ms),
                    ("grpc.keepalive_timeout_ms", answer_ms),
                ]
                if self._credentials is None:
                    channel = grpc.insecure_channel(address, options=options)
                else:
                    channel = grpc.secure_channel(address, self._credentials, options=options)
                self._channels[address] = channel, Stubs(channel)
            return self._channels[address][1]


def _text(error: Any) -> str:
    return f"{error.code().name.lower()}: {error.details()}"


def _connection_error(error: Any) -> ConnectionError:
    return ConnectionError(_text(error))


def _leader(error: Any) -> str:
    return str(dict(error.trailing_metadata() or ()).get(LEADER_METADATA, ""))


def _did_nothing(error: Any) -> bool:
    """Whether it is certain that the call has changed nothing: it was a standby's to answer, or never sent."""
    trailers = dict(error.trailing_metadata() or ())
    is_standby = LEADER_METADATA in trailers or trailers.get(ROLE_METADATA) == "standby"
    return is_standby or str(error.details()).startswith(NEVER_SENT)
