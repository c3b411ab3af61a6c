"""Servers to be measured, each in a process of its own: the coordinator, and gRPC with nothing behind it."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from strata.launch.coordinator import CoordinatorProcess

HOST = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    cpu_s: float
    rss_bytes: int
    at_mono_s: float

    def cpu_since_s(self, before: Cost) -> float:
        return self.cpu_s - before.cpu_s

    def percent_since(self, before: Cost) -> float:
        """Of one core."""
        return self.cpu_since_s(before) / (self.at_mono_s - before.at_mono_s) * 100


class Served:
    """A coordinator under measurement."""

    def __init__(self, coordinator: CoordinatorProcess) -> None:
        assert coordinator.process is not None
        self.grpc_port = coordinator.grpc_port
        self.http_port = coordinator.http_port
        self._process = psutil.Process(coordinator.process.pid)

    def cost(self) -> Cost:
        times = self._process.cpu_times()
        return Cost(
            cpu_s=times.user + times.system,
            rss_bytes=self._process.memory_info().rss,
            at_mono_s=time.monotonic(),
        )


@contextmanager
def served_coordinator() -> Iterator[Served]:
    """`strata serve`, as a user starts it, with a journal on disk that is thrown away."""
    with tempfile.TemporaryDirectory(prefix="strata-bench-") as folder:
        coordinator = CoordinatorProcess(Path(folder) / "coordinator")
        try:
            yield Served(coordinator.start())
        finally:
            coordinator.stop()


@contextmanager
def bare_grpc_server() -> Iterator[int]:
    """The port of a grpc.aio server that answers one unary method, `Nothing`, with one byte: the limit of any service on it."""
    server = subprocess.Popen(
        [sys.executable, "-m", __spec__.name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert server.stdout is not None
        yield int(server.stdout.readline())
    finally:
        server.communicate()  # Its standard input ends, and with it the server.


async def _serve_nothing() -> None:
    import grpc
    import grpc.aio

    async def answer(request: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> bytes:
        return b"\0"

    handler = grpc.unary_unary_rpc_method_handler(answer)
    server = grpc.aio.server()
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("strata.v1.Coordinator", {"Nothing": handler}),)
    )
    port = server.add_insecure_port(f"{HOST}:0")
    await server.start()
    print(port, flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await server.stop(0)


if __name__ == "__main__":
    import uvloop

    uvloop.run(_serve_nothing())
