"""A real coordinator in a process of its own, and small ways to talk to it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
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
        self._env = {**os.environ, "STRATA_TOKEN": "", "STRATA_LAUNCHER": "none", **(env or {})}
        self.grpc_port = 0
        self.http_port = 0
        self.process: subprocess.Popen[str] | None = None
        self.output: list[str] = []

    def start(self) -> Coordinator:
        command = [sys.executable, "-m", "strata.cli.main", "serve", "--data-dir", str(self.data_dir)]
        command += ["--grpc-port", str(self.grpc_port), "--http-port", str(self.http_port), *self._arguments]
        (self.data_dir / "serving.json").unlink(missing_ok=True)
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=self._env
        )
        served = threading.Event()
        threading.Thread(target=self._read, args=(self.process, served), daemon=True).start()
        assert served.wait(START_S), "the coordinator did not start:\n" + "".join(self.output)
        assert self.process.poll() is None, "the coordinator ended:\n" + "".join(self.output)
        ports = json.loads((self.data_dir / "serving.json").read_text())
        self.grpc_port, self.http_port = ports["grpc"], ports["http"]
        return self

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
        self.process.wait(10)

    def stop(self) -> int:
        if self.process is None or self.process.poll() is not None:
            return self.process.returncode if self.process else 0
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(10)
            raise

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(self.url + path, timeout=20) as answer:
            return json.load(answer)

    def post(self, path: str, body: object) -> tuple[int, Any]:
        """Status and parsed answer; refusals are answers too."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(
            self.url + path, data=data, headers={"Content-Type": "application/json"}, method="POST"
        )
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.load(error)


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
