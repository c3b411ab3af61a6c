"""Azurite, Azure's own emulator of blob storage, on loopback: a real server that speaks the protocol.

    with azurite(tmp_path) as server:
        store = open_store(f"az://{server.container}", **server.options())

It comes from npm, with the exact versions of `tests/azurite/package-lock.json`: `make azurite` installs it. Where it is missing,
tests that need it are left out.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import http.client
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest

from tests.support_programs import ROOT, program

ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""Which its documentation publishes for everybody."""
_SCRIPT = ROOT / "tests" / "azurite" / "node_modules" / "azurite" / "dist" / "src" / "blob" / "main.js"
_START_TIMEOUT_S = 60.0
_VERSION = "2021-12-02"


@dataclass(frozen=True, slots=True, kw_only=True)
class Azurite:
    port: int
    container: str

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}/{ACCOUNT}"

    def options(self, **more: Any) -> dict[str, Any]:
        """Keyword arguments for `open_store`."""
        return {"account_name": ACCOUNT, "account_key": KEY, "endpoint": self.endpoint, **more}

    def environment(self) -> dict[str, str]:
        return {
            "AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT,
            "AZURE_STORAGE_ACCOUNT_KEY": KEY,
            "AZURE_STORAGE_ENDPOINT": self.endpoint,
        }


@contextlib.contextmanager
def azurite(folder: Path) -> Iterator[Azurite]:
    """Start a server that keeps everything in memory, wait until it answers, stop it at the end."""
    if not _SCRIPT.exists():
        pytest.skip("needs Azurite (npm package azurite). Run: make azurite")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    log = folder / "azurite.txt"
    with open(log, "wb") as output:
        process = subprocess.Popen(
            [
                *(program("setpriv"), "--pdeathsig", "KILL", "--"),
                *(program("node"), str(_SCRIPT), "--inMemoryPersistence", "--skipApiVersionCheck"),
                *("--disableTelemetry", "--silent", "--blobPort", str(port)),
            ],
            stdout=output,
            stderr=output,
            cwd=folder,
        )
    try:
        server = Azurite(port=port, container="strata-tests")
        deadline_s = time.monotonic() + _START_TIMEOUT_S
        while not _make_container(server):
            if process.poll() is not None or time.monotonic() > deadline_s:
                raise AssertionError(f"Azurite did not start:\n{log.read_text(errors='replace')[-3000:]}")
            time.sleep(0.1)  # A server tells nobody when it is ready; it has to be asked.
        yield server
    finally:
        process.kill()
        process.wait(60)


def _make_container(server: Azurite) -> bool:
    """Signed by the account's key; a container does not come into being by itself."""
    date = formatdate(usegmt=True)
    named = f"x-ms-date:{date}\nx-ms-version:{_VERSION}\n/{ACCOUNT}/{ACCOUNT}/{server.container}\nrestype:container"
    signature = hmac.new(base64.b64decode(KEY), ("PUT" + "\n" * 12 + named).encode(), hashlib.sha256).digest()
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=5)
    try:
        connection.request(
            "PUT",
            f"/{ACCOUNT}/{server.container}?restype=container",
            headers={
                "x-ms-date": date,
                "x-ms-version": _VERSION,
                "Content-Length": "0",
                "Authorization": f"SharedKey {ACCOUNT}:{base64.b64encode(signature).decode()}",
            },
        )
        status = connection.getresponse().status
    except OSError:
        return False
    finally:
        connection.close()
    if status not in (201, 409):
        raise AssertionError(f"Azurite answered {status} when a container was created")
    return True
