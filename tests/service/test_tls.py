"""TLS and mutual TLS: coordinator, worker library, rendezvous values and command line."""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from strata import TrainingOrchestrator
from strata.rpc.cas import CoordinatorCasClient
from strata.rpc.tls import TlsError
from strata.worker.errors import CoordinatorUnavailable
from tests.cli.running import strata
from tests.support import Coordinator
from tests.support_programs import program


class Authority:
    """A throwaway certificate authority."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self.cert = folder / f"{name}.pem"
        self._key = folder / f"{name}.key"
        _openssl(
            "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", f"/CN={name}",
            "-keyout", str(self._key), "-out", str(self.cert),
        )  # fmt: skip

    def issue(self, name: str, role: str = "worker") -> tuple[Path, Path]:
        """Certificate and key for `name`, valid for this machine's loopback; the unit is the role."""
        cert, key, request = (self._folder / f"{name}.{end}" for end in ("pem", "key", "csr"))
        extra = self._folder / f"{name}.ext"
        extra.write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\n")
        _openssl(
            "req",
            "-newkey",
            "rsa:2048",
            "-nodes",
            "-subj",
            f"/OU={role}/CN={name}",
            "-keyout",
            str(key),
            "-out",
            str(request),
        )
        _openssl(
            "x509", "-req", "-in", str(request), "-CA", str(self.cert), "-CAkey", str(self._key),
            "-CAcreateserial", "-days", "2", "-extfile", str(extra), "-out", str(cert),
        )  # fmt: skip
        return cert, key


def _openssl(*arguments: str) -> None:
    subprocess.run([program("openssl"), *arguments], check=True, capture_output=True, timeout=60)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"), "strata-test")


@pytest.fixture(scope="module")
def mutual(authority: Authority, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Coordinator]:
    """A coordinator on every address, without a token: client certificates are what lets callers in."""
    cert, key = authority.issue("server")
    env = {
        "STRATA_TLS_CERT": str(cert),
        "STRATA_TLS_KEY": str(key),
        "STRATA_TLS_CLIENT_CA": str(authority.cert),
    }
    folder = tmp_path_factory.mktemp("mutual")
    server = Coordinator(folder / "data", "--host", "0.0.0.0", env=env).start()
    yield server
    server.stop()
    assert "Traceback" not in "".join(server.output), "".join(server.output)


@pytest.fixture
def known(authority: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
    cert, key = authority.issue("worker")
    monkeypatch.setenv("STRATA_TLS_CA", str(authority.cert))
    monkeypatch.setenv("STRATA_TLS_CERT", str(cert))
    monkeypatch.setenv("STRATA_TLS_KEY", str(key))


def https(server: Coordinator) -> str:
    return f"https://127.0.0.1:{server.http_port}"


@pytest.mark.usefixtures("known")
def test_worker_with_a_certificate_takes_part(mutual: Coordinator) -> None:
    with TrainingOrchestrator(f"https://127.0.0.1:{mutual.grpc_port}") as worker:
        worker.register_worker("w")
        assert worker.wait_connected(30)
        assert worker.barrier("b", participants=1).participants == 1
    with TrainingOrchestrator(mutual.address) as worker:  # The authority alone asks for TLS.
        worker.register_worker("w")


@pytest.mark.usefixtures("known")
def test_values_and_command_line_speak_tls_too(mutual: Coordinator) -> None:
    client = CoordinatorCasClient(mutual.address, timeout_s=20)
    assert client.cas("key", b"value", None)[0]
    client.close()
    ran = strata("workers", "--json", "--api", https(mutual))
    assert (ran.code, json.loads(ran.out)) == (0, [])


def test_callers_without_a_certificate_stay_outside(
    mutual: Coordinator, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STRATA_TLS_CA", str(authority.cert))
    worker = TrainingOrchestrator(mutual.address, timeout_s=2.0)
    with pytest.raises(CoordinatorUnavailable):
        worker.register_worker("w")
    worker.close()
    assert strata("workers", "--api", https(mutual)).code == 3
    context = ssl.create_default_context(cafile=str(authority.cert))
    with (
        pytest.raises(OSError),
        urllib.request.urlopen(https(mutual) + "/api/health", context=context) as answer,
    ):
        answer.read()


def test_certificates_of_strangers_are_refused_both_ways(
    mutual: Coordinator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, authority: Authority
) -> None:
    stranger = Authority(tmp_path, "stranger")
    cert, key = stranger.issue("impostor")
    monkeypatch.setenv("STRATA_TLS_CERT", str(cert))
    monkeypatch.setenv("STRATA_TLS_KEY", str(key))
    for trusted in (authority.cert, stranger.cert):
        monkeypatch.setenv("STRATA_TLS_CA", str(trusted))
        worker = TrainingOrchestrator(mutual.address, timeout_s=2.0)
        with pytest.raises(CoordinatorUnavailable):
            worker.register_worker("w")
        worker.close()


def test_plain_callers_get_nothing_and_break_nothing(mutual: Coordinator) -> None:
    worker = TrainingOrchestrator(mutual.address, timeout_s=1.0)
    with pytest.raises(CoordinatorUnavailable):
        worker.register_worker("w")
    worker.close()
    for port in (mutual.http_port, mutual.grpc_port):
        with socket.create_connection(("127.0.0.1", port), timeout=30) as wire:
            wire.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            with contextlib.suppress(ConnectionResetError):
                assert b"200" not in wire.recv(1_000)


def test_files_that_cannot_be_used_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRATA_TLS_CA", str(tmp_path / "none.pem"))
    with pytest.raises(TlsError, match="cannot be read"):
        TrainingOrchestrator("127.0.0.1:1")
    ran = strata("workers", "--api", "https://127.0.0.1:1")
    assert ran.code == 1
    assert "STRATA_TLS_CA" in ran.err
    monkeypatch.delenv("STRATA_TLS_CA")
    monkeypatch.setenv("STRATA_TLS_CERT", str(tmp_path / "c.pem"))
    with pytest.raises(TlsError, match="belong together"):
        TrainingOrchestrator("127.0.0.1:1")


@pytest.mark.parametrize("broken", ["missing", "garbage", "key of another"])
def test_coordinator_with_unusable_certificates_says_so(
    tmp_path: Path, authority: Authority, broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cert, key = authority.issue(f"own-{broken.split()[0]}")
    if broken == "missing":
        key = tmp_path / "none.key"
    elif broken == "garbage":
        cert = tmp_path / "garbage.pem"
        cert.write_text("this is not a certificate")
    else:
        key = authority.issue("other")[1]
    monkeypatch.setenv("STRATA_TLS_CERT", str(cert))
    monkeypatch.setenv("STRATA_TLS_KEY", str(key))
    ran = strata("serve", "--data-dir", str(tmp_path / "data"), "--grpc-port", "0", "--http-port", "0")
    assert ran.code in (1, 2)
    assert "error: " in ran.err
    assert str(key if broken != "garbage" else cert) in ran.err
