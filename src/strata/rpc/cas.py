"""The coordinator's compare-and-swap values, who is present and what failed, for callers that block (torchrun's agents)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import grpc

from strata.core.messages import ReportFailure, ReportHandover, ReportHealth
from strata.rpc import coordinator_pb2 as pb
from strata.rpc import wire
from strata.rpc.presence import AgentPresence
from strata.rpc.stubs import Stubs
from strata.rpc.tls import channel_credentials


class HostRefused(Exception):
    """This machine is out of use: why, and what to do when it is fixed."""


class CoordinatorCasClient:
    """Raises `ConnectionError` when the coordinator does not answer in time; the outcome is then unknown."""

    def __init__(self, address: str, *, timeout_s: float) -> None:
        options = [
            ("grpc.max_reconnect_backoff_ms", 1000),
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.keepalive_time_ms", 10_000),
            ("grpc.keepalive_timeout_ms", 5_000),
        ]
        credentials = channel_credentials(secure=False)
        if credentials is None:
            self._channel = grpc.insecure_channel(address, options=options)
        else:
            self._channel = grpc.secure_channel(address, credentials, options=options)
        self._stubs = Stubs(self._channel)
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
            answer = self._stubs.call(
                "ReportHealth", request, timeout=self._timeout_s, metadata=self._metadata
            )
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                return ""
            raise ConnectionError(f"{error.code().name.lower()}: {error.details()}") from None
        return str(answer.unfit)

    def admit(self, host: str) -> None:
        """Raises `HostRefused` for a machine that is out of use. A coordinator of an earlier version refuses none."""
        request = pb.AdmitHostRequest(host=host)
        try:
            self._stubs.call("AdmitHost", request, timeout=self._timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
                raise HostRefused(error.details()) from None
            if error.code() is not grpc.StatusCode.UNIMPLEMENTED:
                raise ConnectionError(f"{error.code().name.lower()}: {error.details()}") from None

    def join(
        self, key: str, *, node: str, run_id: str, host: str, on_leave: Callable[[str, float | None], None]
    ) -> AgentPresence:
        """Be there, as `node`, among those who share the value under `key`; `on_leave` is called, on another thread, when this
        machine is taken out of use, or goes: why, and within how many seconds."""

        def open_stream(messages: Iterator[pb.AgentMessage]) -> object:
            call: object = self._stubs.current.method("Presence")(
                messages, metadata=self._metadata, wait_for_ready=True
            )
            return call

        return AgentPresence(open_stream, key=key, node=node, run_id=run_id, host=host, on_leave=on_leave)

    def close(self) -> None:
        self._channel.close()

    def _call(self, method: str, request: Any) -> Any:
        try:
            return self._stubs.call(method, request, timeout=self._timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            raise ConnectionError(f"{error.code().name.lower()}: {error.details()}") from None
