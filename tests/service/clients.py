"""Ways to talk to a coordinator that are not Strata's own worker library."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import grpc

from strata.rpc import coordinator_pb2 as pb
from strata.rpc import coordinator_pb2_grpc

SERVICE = "/strata.v1.Coordinator/"


@contextlib.contextmanager
def channel(address: str) -> Iterator[grpc.Channel]:
    """A connection of its own: without this option channels of one process share one."""
    with grpc.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)]) as opened:
        yield opened


@contextlib.contextmanager
def stub(address: str) -> Iterator[Any]:
    with channel(address) as opened:
        yield coordinator_pb2_grpc.CoordinatorStub(opened)


def trailers_of(error: Any) -> dict[str, Any]:
    return dict(error.trailing_metadata() or ())


def refusal(call: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[grpc.StatusCode, str, str, str]:
    """Status, Strata's code, message and hint of a call that must be refused."""
    try:
        answer = call(*args, **kwargs)
    except grpc.RpcError as error:
        trailers = trailers_of(error)
        return (
            error.code(),
            trailers.get("strata-code", ""),
            error.details() or "",
            trailers.get("strata-hint-bin", b"").decode(),
        )
    raise AssertionError(f"it was accepted: {answer}")


def raw_call(opened: grpc.Channel, method: str) -> Any:
    """A unary call that sends bytes as they are: for messages no stub would make."""
    return opened.unary_unary(SERVICE + method, request_serializer=bytes, response_deserializer=bytes)


class RawSession:
    """A Session stream spoken by hand. What the coordinator says is gathered as it comes."""

    def __init__(
        self, opened: grpc.Channel, *, read: bool = True, metadata: tuple[tuple[str, str], ...] = ()
    ) -> None:
        self._outgoing: list[pb.WorkerMessage] = []
        self._more = threading.Condition()
        self._over = False
        self.received: list[pb.CoordinatorMessage] = []
        self.error: grpc.RpcError | None = None
        self.ended = threading.Event()
        calls: Any = coordinator_pb2_grpc.CoordinatorStub(opened)
        self._call = calls.Session(self._messages(), metadata=metadata)
        if read:
            threading.Thread(target=self._read, daemon=True).start()

    def send(self, **body: Any) -> None:
        with self._more:
            self._outgoing.append(pb.WorkerMessage(**body))
            self._more.notify()

    def hello(self, worker_id: str, incarnation: int = 0) -> RawSession:
        self.send(hello=pb.Hello(worker_id=worker_id, incarnation=incarnation))
        return self

    def wait_for(self, body: str, *, within_s: float = 30.0) -> Any:
        """The first message of this kind."""
        with self._more:
            found = self._more.wait_for(lambda: self._of(body) or self.ended.is_set(), within_s)
            assert found, f"no {body} within {within_s} s"
            messages = self._of(body)
        assert messages, f"the session ended before a {body} came: {self.error}"
        return getattr(messages[0], body)

    def close(self) -> None:
        with self._more:
            self._over = True
            self._more.notify()
        self._call.cancel()

    def _of(self, body: str) -> list[pb.CoordinatorMessage]:
        return [m for m in self.received if m.WhichOneof("body") == body]

    def _messages(self) -> Iterator[pb.WorkerMessage]:
        while True:
            with self._more:
                self._more.wait_for(lambda: self._outgoing or self._over)
                if self._over:
                    return
                message = self._outgoing.pop(0)
            yield message

    def _read(self) -> None:
        try:
            for message in self._call:
                with self._more:
                    self.received.append(message)
                    self._more.notify_all()
        except grpc.RpcError as error:
            self.error = error
        finally:
            with self._more:
                self.ended.set()
                self._more.notify_all()


def metric(url: str, name: str) -> float:
    """One series of a coordinator's Prometheus page, with its labels as written there; zero before it is there."""
    with urllib.request.urlopen(url + "/metrics", timeout=30) as answer:
        for line in answer.read().decode().splitlines():
            if line.startswith(name + " "):
                return float(line.split()[1])
    return 0.0


@dataclass(frozen=True, kw_only=True)
class ReceivedEvent:
    id: str
    kind: str
    data: Any
    at_mono_s: float


class EventStream:
    """A reader of /api/events. Use as a context manager; listening has started when it is entered."""

    def __init__(self, port: int, *, last_event_id: str | None = None) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        self._headers = {"Last-Event-ID": last_event_id} if last_event_id else {}
        self.received: list[ReceivedEvent] = []
        self.raw = b""
        self._more = threading.Condition()
        self._greeted = threading.Event()

    def __enter__(self) -> EventStream:
        self._connection.request("GET", "/api/events", headers=self._headers)
        self._response = self._connection.getresponse()
        assert self._response.status == 200
        threading.Thread(target=self._read, daemon=True).start()
        assert self._greeted.wait(30), "the event stream did not begin"
        return self

    def __exit__(self, *_: object) -> None:
        if self._connection.sock is not None:
            with contextlib.suppress(OSError):
                self._connection.sock.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def wait_for(
        self, kind: str, matches: Callable[[Any], bool] = lambda data: True, *, within_s: float = 30.0
    ) -> ReceivedEvent:
        def found() -> ReceivedEvent | None:
            return next((e for e in self.received if e.kind == kind and matches(e.data)), None)

        with self._more:
            event = self._more.wait_for(found, within_s)
            assert event is not None, (
                f"no {kind} within {within_s} s; received {[e.kind for e in self.received]}"
            )
            return event

    def _read(self) -> None:
        block: dict[str, str] = {}
        with contextlib.suppress(OSError, ValueError, AttributeError, http.client.HTTPException):
            while line := self._response.readline():
                now_s = time.monotonic()
                with self._more:
                    self.raw += line
                    text = line.decode().rstrip("\n")
                    if text:
                        key, _, value = text.partition(": ")
                        block[key] = value
                        continue
                    if "event" in block:
                        self.received.append(
                            ReceivedEvent(
                                id=block["id"],
                                kind=block["event"],
                                data=json.loads(block["data"]),
                                at_mono_s=now_s,
                            )
                        )
                        self._more.notify_all()
                    block = {}
                    self._greeted.set()
