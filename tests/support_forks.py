"""Processes that run a module, forked from one that has imported what they need: importing torch takes seconds, each time.

    trainers = ForkServer("strata.training.job")
    process = trainers.start("tests.training.live_script", "4", output=path, env={...})
    assert process.wait(60) == 0, path.read_text()

A process begins as `python -m MODULE ARGUMENTS` does, in an environment of its own, and ends as one: its main module is the last
thing on the stack, so exit status, traceback, `atexit` and threads are Python's own. The server has one thread, starts with the first
process that is wanted and ends with whoever started it. What reads its environment while it is imported (OMP_NUM_THREADS, PYTHON...)
sees that of the server; whoever needs another starts an interpreter.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
START_S = 120.0
LONGEST_REQUEST_BYTES = 128 << 10
_OWN_VARIABLES = {"OMP_NUM_THREADS": "1"}


class ForkedProcess:
    """As `subprocess.Popen` has it. The server waits for it and passes its status on."""

    def __init__(self, pid: int, status_fd: int, output: Path) -> None:
        self.pid = pid
        self.output = output
        self.returncode: int | None = None
        self._status_fd = status_fd

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._status_fd], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(f"forked process {self.pid}", timeout or 0.0)
            said = os.read(self._status_fd, 64)
            os.close(self._status_fd)
            # Without the server nobody knows how it has ended.
            self.returncode = int(said) if said else -signal.SIGKILL
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        """All that it has said, once it has ended."""
        self.wait(timeout)
        return self.output.read_text(errors="replace"), None

    def poll(self) -> int | None:
        try:
            return self.wait(0.0)
        except subprocess.TimeoutExpired:
            return None

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


class ForkServer:
    """One for each set of modules that processes need; started with the first of them."""

    def __init__(self, *preload: str) -> None:
        self._preload = preload
        self._lock = threading.Lock()
        self._server: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None

    def start(
        self,
        module: str,
        *arguments: str,
        output: Path,
        errors: Path | None = None,
        env: Mapping[str, str] | None = None,
        cwd: Path = ROOT,
    ) -> ForkedProcess:
        """`python -m MODULE ARGUMENTS`, with what it prints in the new file `output`, and its errors in `errors` or there as well."""
        request = json.dumps(
            {
                "module": module,
                "arguments": arguments,
                "cwd": str(cwd),
                "env": dict(os.environ if env is None else env),
            }
        ).encode()
        assert len(request) < LONGEST_REQUEST_BYTES
        status_fd, theirs = os.pipe()
        for path in filter(None, (output, errors)):
            path.unlink(missing_ok=True)
        with open(output, "ab") as out, open(errors or output, "ab") as err, self._lock:
            server = self._connected()
            socket.send_fds(server, [request], [out.fileno(), err.fileno(), theirs])
            os.close(theirs)
            answer = server.recv(64)
        assert answer, "the server of forks has ended"
        return ForkedProcess(int(answer), status_fd, output)

    def _connected(self) -> socket.socket:
        if self._socket is None or self._server is None or self._server.poll() is not None:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                self._server = subprocess.Popen(
                    [sys.executable, "-m", "tests.support_forks", str(theirs.fileno()), *self._preload],
                    cwd=ROOT,
                    env={**os.environ, **_OWN_VARIABLES},
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(),),
                )
            ours.settimeout(START_S)
            self._socket = ours
            atexit.register(self._close)
        return self._socket

    def _close(self) -> None:
        if self._socket is not None and self._server is not None:
            self._socket.close()
            self._server.wait(START_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    module: str
    arguments: Sequence[str]
    cwd: str
    env: Mapping[str, str]

    def run(self) -> None:
        """Become this process."""
        os.chdir(self.cwd)
        os.environ.clear()
        os.environ.update(self.env)
        sys.argv = [self.module, *self.arguments]
        runpy.run_module(self.module, run_name="__main__", alter_sys=True)


def _serve(client: socket.socket) -> _Request:
    """Fork until nobody asks any more; returns in the processes that are wanted."""
    ends: dict[int, tuple[int, int]] = {}
    while True:
        ready, _, _ = select.select([client.fileno(), *ends], [], [])
        for pidfd in ends.keys() & set(ready):
            pid, status_fd = ends.pop(pidfd)
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            os.close(pidfd)
            with contextlib.suppress(BrokenPipeError):  # Nobody may want to know.
                os.write(status_fd, str(status).encode())
            os.close(status_fd)
        if client.fileno() not in ready:
            continue
        message, fds, _, _ = socket.recv_fds(client, LONGEST_REQUEST_BYTES, 3)
        if not message:
            os._exit(0)
        out, err, status_fd = fds
        pid = os.fork()
        if not pid:
            for other in (status_fd, *ends, *(fd for _, fd in ends.values())):
                os.close(other)
            client.close()
            os.dup2(out, 1)
            os.dup2(err, 2)
            os.close(out)
            os.close(err)
            return _Request(**json.loads(message))
        ends[os.pidfd_open(pid)] = (pid, status_fd)
        os.close(out)
        os.close(err)
        client.send(str(pid).encode())


if __name__ == "__main__":
    for name in sys.argv[2:]:
        importlib.import_module(name)
    assert threading.active_count() == 1, threading.enumerate()
    _serve(socket.socket(fileno=int(sys.argv[1]))).run()
