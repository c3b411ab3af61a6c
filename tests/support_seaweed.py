"""A real SeaweedFS S3 server on loopback, for any test or benchmark that wants one.

    with seaweed(tmp_path) as server:
        store = open_store("s3://bucket", **server.options())

The fixture in `tests/stores/conftest.py` shares one per session. Buckets come into being on first write.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support_programs import program

ACCESS_KEY = "strata"
READER_KEY = "reader"  # May read and list, not write.
WRITER_KEY = "writer"  # May write, not read, list or delete.
SECRET_KEY = "not-a-secret"
_START_TIMEOUT_S = 120.0
# A test run that is killed, or times out hard, must not leave its server behind.
_DIES_WITH_PARENT = ("--pdeathsig", "KILL", "--")
_GRPC_OFFSET = 10_000  # SeaweedFS listens for gRPC this far above each port it is given.
_LOWEST_PORT = 22_000  # Ray's workers are below.


@dataclass(frozen=True, slots=True, kw_only=True)
class Seaweed:
    endpoint: str
    process: subprocess.Popen[bytes]

    def options(self, access_key: str = ACCESS_KEY, **more: Any) -> dict[str, Any]:
        """Keyword arguments for `open_store`."""
        return {
            "endpoint": self.endpoint,
            "access_key_id": access_key,
            "secret_access_key": SECRET_KEY,
            "region": "us-east-1",
            **more,
        }

    def environment(self) -> dict[str, str]:
        """The same as environment variables."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            "AWS_REGION": "us-east-1",
        }


@contextlib.contextmanager
def seaweed(folder: Path) -> Iterator[Seaweed]:
    """Start a server that keeps everything under `folder`, wait until it answers, stop it at the end."""
    folder.mkdir(parents=True, exist_ok=True)
    identities = [
        _identity(ACCESS_KEY, ["Admin", "Read", "Write", "List", "Tagging"]),
        _identity(READER_KEY, ["Read", "List"]),
        _identity(WRITER_KEY, ["Write"]),
    ]
    (folder / "s3.json").write_text(json.dumps({"identities": identities}))
    (folder / "data").mkdir(exist_ok=True)
    with contextlib.ExitStack() as reserved:
        master, volume, filer, s3 = _reserve_ports(4, reserved)
        yield from _serve(folder, master=master, volume=volume, filer=filer, s3=s3)


def _serve(folder: Path, *, master: int, volume: int, filer: int, s3: int) -> Iterator[Seaweed]:
    command = [
        program("setpriv"),
        *_DIES_WITH_PARENT,
        program("weed"),
        "server",
        f"-dir={folder / 'data'}",
        "-ip=127.0.0.1",
        "-ip.bind=127.0.0.1",
        f"-master.port={master}",
        f"-volume.port={volume}",
        "-filer",
        f"-filer.port={filer}",
        "-s3",
        f"-s3.port={s3}",
        "-s3.port.iceberg=0",
        "-s3.port.lance=0",
        f"-s3.config={folder / 's3.json'}",
        "-volume.max=50",
        "-master.volumeSizeLimitMB=1024",
    ]
    with open(folder / "weed.log", "wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder)
    try:
        _wait_until_ready(process, s3, folder / "weed.log")
        yield Seaweed(endpoint=f"http://127.0.0.1:{s3}", process=process)
    finally:
        process.kill()  # Asked politely it takes seconds, and nobody needs its data any more.
        process.wait(60)


def _identity(name: str, actions: list[str]) -> dict[str, Any]:
    return {"name": name, "credentials": [{"accessKey": name, "secretKey": SECRET_KEY}], "actions": actions}


def _wait_until_ready(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline_s = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline_s:
        if process.poll() is not None:
            break
        if _status(port, "GET", "/") == 403 and _bucket_can_be_written(port):
            return
        time.sleep(0.05)  # A server tells nobody when it is ready; it has to be asked.
    raise AssertionError(f"SeaweedFS did not start:\n{log.read_text(errors='replace')[-3000:]}")


def _status(port: int, method: str, path: str) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request(method, path)
        return connection.getresponse().status
    except (OSError, http.client.HTTPException):
        return 0
    finally:
        connection.close()


def _bucket_can_be_written(port: int) -> bool:
    """The front answers before there are volumes behind it."""
    from obstore import put
    from obstore.store import S3Store

    client = S3Store(
        "ready",
        endpoint=f"http://127.0.0.1:{port}",
        access_key_id=ACCESS_KEY,
        secret_access_key=SECRET_KEY,
        region="us-east-1",
        client_options={"allow_http": True, "timeout": "10s"},
        retry_config={"max_retries": 0},
    )
    try:
        put(client, "probe", b"x")
    except Exception:
        return False
    return True


def _reserve_ports(count: int, until: contextlib.ExitStack) -> list[int]:
    """Ports that stay free, and whose gRPC twins do, until a server takes them.

    They are below those that the system gives out by itself. A name is taken with each, so that no other test, here or in
    a process beside this one, gets it as well.
    """
    first_of_system = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    candidates = range(_LOWEST_PORT, first_of_system - _GRPC_OFFSET)
    found: list[int] = []
    for port in random.SystemRandom().sample(candidates, k=len(candidates)):
        with contextlib.ExitStack() as names:
            try:
                for each in (port, port + _GRPC_OFFSET):
                    name = names.enter_context(socket.socket(socket.AF_UNIX))
                    name.bind(f"\0strata-tests-port-{each}")
                    with socket.socket() as probe:
                        probe.bind(("127.0.0.1", each))
            except OSError:
                continue
            until.enter_context(names.pop_all())
        found.append(port)
        if len(found) == count:
            return found
    raise AssertionError("there are not enough free ports")
