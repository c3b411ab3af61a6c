"""How many unary calls a second a gRPC server answers: driven by h2load where it is installed."""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess
import tempfile
import time

from strata.bench.coordinator.serving import HOST
from strata.bench.coordinator.swarm import SERVICE, Connection, framed
from strata.errors import StrataError

CONNECTIONS = 8
CALLS_IN_FLIGHT = 16
"""On each connection."""


def driver() -> str:
    return "h2load" if shutil.which("h2load") else "the swarm client"


async def calls_per_second(port: int, method: str, request: bytes, *, calls: int) -> float:
    h2load = shutil.which("h2load")
    if h2load is None:
        return await _by_swarm(port, method, request, calls)
    return await _by_h2load(h2load, port, method, request, calls)


async def _by_h2load(h2load: str, port: int, method: str, request: bytes, calls: int) -> float:
    with tempfile.NamedTemporaryFile() as body:
        body.write(framed(request))
        body.flush()
        command = [h2load, "--requests", str(calls), "--clients", str(CONNECTIONS)]
        command += ["--max-concurrent-streams", str(CALLS_IN_FLIGHT), "--data", body.name]
        command += ["--header", "te: trailers", "--header", "content-type: application/grpc"]
        command.append(f"http://{HOST}:{port}{SERVICE}{method}")
        process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
        said = (await process.communicate())[0].decode()
    rate = re.search(r"([\d.]+) req/s", said)
    answered = re.search(r"(\d+) 2xx", said)
    if rate is None or answered is None or int(answered[1]) != calls:
        raise StrataError(f"h2load did not get {calls} answers from {method}: {said}")
    return float(rate[1])


async def _by_swarm(port: int, method: str, request: bytes, calls: int) -> float:
    connections = [await Connection.open(HOST, port) for _ in range(CONNECTIONS)]
    left = iter(range(calls))

    async def ask(connection: Connection) -> None:
        for _ in left:
            await connection.unary(method, request)

    began_s = time.perf_counter()
    await asyncio.gather(*(ask(connection) for connection in connections for _ in range(CALLS_IN_FLIGHT)))
    elapsed_s = time.perf_counter() - began_s
    for connection in connections:
        connection.close()
    return calls / elapsed_s
