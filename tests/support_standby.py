"""Servers that answer as a standby does: they refuse what changes anything, and say who leads. And one that only listens."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc


class Standby(grpc.GenericRpcHandler):  # type: ignore[type-arg]
    """Over gRPC. `leader` is what it says, empty for nobody; `calls` the methods that were asked for."""

    def __init__(self, leader: str = "") -> None:
        self.leader = leader
        self.calls: list[str] = []
        self.tokens: list[str] = []
        self._server = grpc.server(futures.ThreadPoolExecutor(4), handlers=[self])
        self.port = self._server.add_insecure_port("127.0.0.1:0")

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def __enter__(self) -> Standby:
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop(None).wait(10)

    def service(self, handler_call_details: Any) -> Any:
        self.calls.append(handler_call_details.method.rpartition("/")[2])
        self.tokens += [
            value for key, value in handler_call_details.invocation_metadata if key == "authorization"
        ]

        def refuse(_: Any, context: grpc.ServicerContext) -> Any:
            if self.leader:
                context.set_trailing_metadata((("strata-leader", self.leader),))
            led = f"{self.leader} leads" if self.leader else "no coordinator leads"
            context.abort(grpc.StatusCode.UNAVAILABLE, f"This coordinator is a standby; {led}.")

        return grpc.stream_stream_rpc_method_handler(refuse)


class HttpStandby:
    """Over HTTP. `leader` is a URL, empty for nobody."""

    def __init__(self, leader: str = "") -> None:
        self.leader = leader
        self.authorizations: list[str | None] = []
        standby = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                standby.authorizations.append(self.headers.get("Authorization"))
                self.rfile.read(int(self.headers.get("Content-Length", "0")))
                self.send_response(307 if standby.leader else 503)
                self.send_header("Strata-Role", "standby")
                if standby.leader:
                    self.send_header("Location", standby.leader + self.path)
                    self.send_header("Strata-Leader", standby.leader)
                else:
                    self.send_header("Retry-After", "1")
                self.send_header("Content-Length", "0")
                self.end_headers()

            do_DELETE = do_POST

            def do_GET(self) -> None:
                standby.authorizations.append(self.headers.get("Authorization"))
                self.send_response(302)  # As a proxy in front of it would.
                self.send_header("Location", standby.leader + self.path)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> HttpStandby:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)


@contextmanager
def nobody() -> Iterator[int]:
    """A port that is taken, and at which nobody listens."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


@contextmanager
def silent() -> Iterator[int]:
    """A port at which connections are taken by the kernel, and nothing is ever said: as by a process that is stopped."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(64)
        yield listener.getsockname()[1]
