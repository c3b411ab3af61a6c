"""A coordinator in a process of its own, for benchmarks: free ports, a throw-away journal, and what it costs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import psutil

from strata.errors import StrataError

START_S = 60.0
STOP_S = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    cpu_s: float
    rss_bytes: int
    at_mono_s: float


class ServedCoordinator:
    """`strata serve`, as a user starts it. Use as a context manager."""

    host = "127.0.0.1"

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="strata-bench-")
        self._data_dir = Path(self._folder.name) / "coordinator"
        command = [sys.executable, "-m", "strata.cli.main", "serve", "--data-dir", str(self._data_dir)]
        command += ["--host", self.host, "--grpc-port", "0", "--http-port", "0"]
        environ = {name: value for name, value in os.environ.items() if not name.startswith("STRATA_")}
        self._log = (Path(self._folder.name) / "log").open("w+")
        self._process = subprocess.Popen(command, stdout=self._log, stderr=self._log, env=environ)
        self._watched = psutil.Process(self._process.pid)
        self.grpc_port, self.http_port = self._ports()

    def cost(self) -> Cost:
        times = self._watched.cpu_times()
        return Cost(
            cpu_s=times.user + times.system,
            rss_bytes=self._watched.memory_info().rss,
            at_mono_s=time.monotonic(),
        )

    def close(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()
        self._folder.cleanup()

    def __enter__(self) -> ServedCoordinator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _ports(self) -> tuple[int, int]:
        """It writes them down once it serves."""
        deadline_s = time.monotonic() + START_S
        while time.monotonic() < deadline_s and self._process.poll() is None:
            try:
                ports = json.loads((self._data_dir / "serving.json").read_text())
                return ports["grpc"], ports["http"]
            except (FileNotFoundError, ValueError):
                time.sleep(0.02)
        self._log.seek(0)
        said = self._log.read()[-2_000:]
        self.close()
        raise StrataError(f"The coordinator to measure did not start: {said}")
