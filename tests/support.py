"""A real coordinator in a process of its own, and small ways to talk to it."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import tarfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

START_S = 60.0


class Coordinator:
    """`strata serve` on free ports; it can be killed, and started again on the same ports and journal.

    Tasks only wait there, unless `env` names a launcher: most tests are about what is said, not about what runs.
    """

    def __init__(self, data_dir: Path, *arguments: str, env: dict[str, str] | None = None) -> None:
        self.data_dir = data_dir
        self._arguments = arguments
        self._env = {
            **os.environ,
            "STRATA_TOKEN": "",
            "STRATA_LAUNCHER": "none",
            "STRATA_DISK_RESERVE_MB": "1",
            **(env or {}),
        }
        self.grpc_port = 0
        self.http_port = 0
        self.process: subprocess.Popen[str] | None = None
        self.output: list[str] = []
        self._held: list[socket.socket] = []
        self._reader: threading.Thread | None = None

    def start(self) -> Coordinator:
        self._hold_ports()
        command = [sys.executable, "-m", "strata.cli.main", "serve", "--data-dir", str(self.data_dir)]
        command += ["--grpc-port", str(self.grpc_port), "--http-port", str(self.http_port), *self._arguments]
        (self.data_dir / "serving.json").unlink(missing_ok=True)
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=self._env
        )
        served = threading.Event()
        self._reader = threading.Thread(target=self._read, args=(self.process, served), daemon=True)
        self._reader.start()
        assert served.wait(START_S), "the coordinator did not start:\n" + "".join(self.output)
        assert self.process.poll() is None, "the coordinator ended:\n" + "".join(self.output)
        ports = json.loads(self._served_at())
        self.grpc_port, self.http_port = ports["grpc"], ports["http"]
        self._release_ports()
        return self

    def _served_at(self) -> str:
        """One of several that loses its lease on a busy machine starts again within its process, and is nowhere for a moment."""
        deadline_s = time.monotonic() + START_S
        while True:
            with suppress(FileNotFoundError):
                return (self.data_dir / "serving.json").read_text()
            assert time.monotonic() < deadline_s, "it serves nowhere:\n" + "".join(self.output)
            time.sleep(0.02)

    def _hold_ports(self) -> None:
        """While it is down nobody else may get its ports: they are taken, and nobody listens there. A listener that
        reuses addresses, as the coordinator does, still gets them."""
        for port in () if self._held else filter(None, (self.grpc_port, self.http_port)):
            holder = socket.socket()
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._held.append(holder)
            with suppress(OSError):  # Somebody has it after all: the coordinator will say so.
                holder.bind(("127.0.0.1", port))

    def _release_ports(self) -> None:
        for holder in self._held:
            holder.close()
        self._held.clear()

    def _read(self, process: subprocess.Popen[str], served: threading.Event) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self.output.append(line)
            if "Ctrl-C stops" in line:
                served.set()
        process.stdout.close()
        served.set()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.grpc_port}"

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http_port}"

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait(60)
        self._hold_ports()

    def ended(self) -> int:
        """The exit status of one that ends, once all it said has been read as well."""
        assert self.process is not None
        assert self._reader is not None
        code = self.process.wait(60)
        self._reader.join(60)
        return code

    def stop(self) -> int:
        self._release_ports()
        if self.process is None or self.process.poll() is not None:
            return self.process.returncode if self.process else 0
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.ended()
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(60)
            raise

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(self.url + path, timeout=30) as answer:
            return json.load(answer)

    def post(self, path: str, body: object, *, token: str = "") -> tuple[int, Any]:
        """Status and parsed answer; refusals are answers too."""
        return self.call("POST", path, body, token=token)

    def call(self, method: str, path: str, body: object = None, *, token: str = "") -> tuple[int, Any]:
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self.url + path, data=data, headers={"Content-Type": "application/json"}, method=method
        )
        if token:
            request.add_header("Authorization", f"Bearer {token}")
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                text = answer.read()
                is_json = answer.headers.get_content_type() == "application/json"
                return answer.status, json.loads(text) if text and is_json else text
        except urllib.error.HTTPError as error:
            with error:
                text = error.read()
                return error.code, json.loads(text) if text else text


def unpack(archive: tarfile.TarFile, folder: Path) -> None:
    """Debian's Python 3.11 has no filters yet, and later versions want one."""
    archive.extraction_filter = getattr(tarfile, "data_filter", None)
    archive.extractall(folder)


def kill_together(first: int, *others: int) -> None:
    """SIGKILL for all of these. The loss of the first may have ended others by themselves."""
    os.kill(first, signal.SIGKILL)
    for pid in others:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def eventually(
    condition: Callable[[], Any],
    *,
    within_s: float,
    what: str | Callable[[], str] = "",
    every_s: float = 0.02,
) -> Any:
    """The first true value of `condition`; fails when there is none in time. For states that are only visible
    by asking; where there is an event to wait for, wait for that."""
    deadline_s = time.monotonic() + within_s
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline_s:
            missing = what() if callable(what) else what
            raise AssertionError(f"not within {within_s} s: {missing or condition}")
        time.sleep(every_s)


def run_in(checkpoints: Path) -> str:
    """What the run that keeps its checkpoints in a folder is called in shared memory."""
    record = checkpoints / "run.json"
    return f"run-{json.loads(record.read_text())['run']}" if record.exists() else "none"


CLONE_NEWUTS = 0x04000000


def may_name_machines() -> bool:
    """Whether processes of this user may have host names of their own."""
    code = f"import ctypes, socket; assert not ctypes.CDLL(None).unshare({CLONE_NEWUTS}); socket.sethostname('x')"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


def as_machine(name: str) -> Callable[[], None]:
    """To be called in a new process: it, and what it starts, are on a machine of this name."""
    libc = ctypes.CDLL(None)

    def rename() -> None:
        libc.unshare(CLONE_NEWUTS)
        socket.sethostname(name)

    return rename
