"""A coordinator in a process of its own, for callers that need one for a while: demonstrations, chaos runs, benchmarks."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from strata.files import make_file_private
from strata.launch.protocol import LaunchFailed

START_S = 90.0
KILLED_S = 60.0
"""How long one may take to end after SIGKILL, on a machine that is busy."""


class CoordinatorProcess:
    """`strata serve` with a data directory of its own. Ports of 0 are picked free."""

    def __init__(self, data_dir: Path, *, grpc_port: int = 0, http_port: int = 0) -> None:
        self.data_dir = data_dir
        self.grpc_port = grpc_port
        self.http_port = http_port
        self.log = data_dir.parent / f"{data_dir.name}.log"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> CoordinatorProcess:
        serving = self.data_dir / "serving.json"
        serving.unlink(missing_ok=True)
        command = [sys.executable, "-m", "strata.cli.main", "serve", "--data-dir", str(self.data_dir)]
        command += ["--grpc-port", str(self.grpc_port), "--http-port", str(self.http_port)]
        make_file_private(self.log)
        with open(self.log, "ab") as output:
            self.process = subprocess.Popen(
                command,
                env={**os.environ, "STRATA_TOKEN": ""},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        deadline_s = time.monotonic() + START_S
        while not (serving.exists() and serving.stat().st_size):
            if self.process.poll() is not None or time.monotonic() > deadline_s:
                raise LaunchFailed(f"The coordinator did not start:\n{self.log.read_text(errors='replace')}")
            time.sleep(0.02)
        ports = json.loads(serving.read_text())
        self.grpc_port, self.http_port = ports["grpc"], ports["http"]
        return self

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.grpc_port}"

    @property
    def api(self) -> str:
        return f"http://localhost:{self.http_port}"

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait(KILLED_S)

    def stop(self) -> None:
        if self.process is None or self.process.poll() is not None:
            return
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.kill()


def free_or_any(port: int) -> int:
    """The well-known port where it is free, else 0: any."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return 0
    return port
