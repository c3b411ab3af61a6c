"""A real etcd on free ports with a data folder of its own, for tests."""

from __future__ import annotations

import contextlib
import json
import random
import socket
import ssl
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.support_network import Network
from tests.support_programs import program

PORTS_FROM, PORTS_UPTO = (
    22_000,
    32_000,
)  # Below are those of Ray's workers, above those the system gives out by itself.
_reserved: list[socket.socket] = []


def free_port() -> int:
    """A port that stays free until it is used, and again between two uses.

    The system gives it to nobody by itself, and no other test that asks here gets it, in this process or in one that
    runs beside it: a name is taken with it, which is free again when the process ends.
    """
    for port in random.SystemRandom().sample(range(PORTS_FROM, PORTS_UPTO), k=1_000):
        name = socket.socket(socket.AF_UNIX)
        try:
            name.bind(f"\0strata-tests-port-{port}")
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", port))
        except OSError:
            name.close()
            continue
        _reserved.append(name)
        return port
    raise AssertionError("no free port")


@contextlib.contextmanager
def port_of_nobody() -> Iterator[int]:
    """Connections to it are refused as long as this lasts: it is taken, and nobody listens."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


class EtcdServer:
    """A member; alone, unless `EtcdCluster` says who else there is. `options`: further arguments."""

    def __init__(
        self,
        folder: Path,
        *,
        name: str = "n0",
        options: Sequence[str] = (),
        fsync: bool = False,
        host: str = "127.0.0.1",
        namespace: str = "",
    ) -> None:
        """`namespace`: of the network, where it has the address `host`."""
        self.host = host
        self.namespace = namespace
        self.folder = folder
        self.name = name
        self.port, self.peer_port = free_port(), free_port()
        self.scheme = "http"
        self.tls: ssl.SSLContext | None = None
        """How it is asked for its health, where `scheme` is https."""
        self.members = f"{name}=http://{host}:{self.peer_port}"
        self.options = [*([] if fsync else ["--unsafe-no-fsync"]), *options]
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        return f"{self.host}:{self.port}"

    def start(self) -> None:
        self.begin()
        self.wait()

    def begin(self) -> None:
        client, peer = f"{self.scheme}://{self.endpoint}", f"http://{self.host}:{self.peer_port}"
        command = [
            program("etcd"),
            f"--name={self.name}",
            f"--data-dir={self.folder / 'data'}",
            f"--listen-client-urls={client}",
            f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster={self.members}",
            *self.options,
        ]
        if self.namespace:
            command = [program("ip"), "netns", "exec", self.namespace, *command]
        with open(self.folder / "etcd.log", "ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)

    def wait(self) -> None:
        assert self.process is not None
        deadline_s = time.monotonic() + 60
        while not self.healthy():
            assert self.process.poll() is None, (self.folder / "etcd.log").read_text()
            assert time.monotonic() < deadline_s, "etcd did not become healthy"
            time.sleep(0.05)

    def healthy(self) -> bool:
        try:
            url = f"{self.scheme}://{self.endpoint}/health"
            with urllib.request.urlopen(url, timeout=10, context=self.tls) as answer:
                return b'"true"' in answer.read()
        except OSError:
            return False

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait(timeout=60)
        self.process = None

    def stop(self) -> None:
        if self.process is not None:
            self.process.terminate()
            self.process.wait(timeout=60)
            self.process = None


class EtcdCluster:
    """Several members on this machine. Use as a context manager."""

    def __init__(
        self, folder: Path, *, members: int = 3, fsync: bool = False, network: Network | None = None
    ) -> None:
        """`network`: each member is on a machine of its own there."""
        self.members = []
        for number in range(members):
            (folder / f"n{number}").mkdir(parents=True)
            place: dict[str, Any] = {}
            if network is not None:
                place = {"host": network.address(number), "namespace": network.namespace(number)}
            self.members.append(EtcdServer(folder / f"n{number}", name=f"n{number}", fsync=fsync, **place))
        everyone = ",".join(member.members for member in self.members)
        for member in self.members:
            member.members = everyone

    def __enter__(self) -> EtcdCluster:
        for member in self.members:
            member.begin()
        for member in self.members:
            member.wait()
        return self

    def __exit__(self, *_: object) -> None:
        for member in self.members:
            member.stop()

    @property
    def endpoints(self) -> str:
        return ",".join(member.endpoint for member in self.members)

    def leader(self) -> EtcdServer:
        """The member that leads etcd itself."""
        for member in self.members:
            if member.process is not None:
                request = urllib.request.Request(
                    f"http://{member.endpoint}/v3/maintenance/status", data=b"{}", method="POST"
                )
                with urllib.request.urlopen(request, timeout=10) as answer:
                    status = json.load(answer)
                if status.get("leader") == status["header"]["member_id"]:
                    return member
        raise AssertionError("etcd has no leader")
