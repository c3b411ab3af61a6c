"""The socket of a supervisor: workers of its user are listened to, other users of the machine are not."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from strata.sockets import connect_to_path, is_own_peer, listen_privately
from tests.strangers import as_stranger, needs_root, open_folder
from tests.support import eventually


def inject(names: list[str]) -> list[str]:
    """Send a line to every socket; those that took it."""
    taken = []
    for name in names:
        with socket.socket(socket.AF_UNIX) as connection:
            try:
                connection.connect("\0" + name[1:] if name.startswith("@") else name)
                connection.sendall(b'{"rank": 0, "stream": "stdout"}\nforged line\n')
                connection.shutdown(socket.SHUT_WR)
                connection.recv(1)  # Until it has been read, or thrown away.
                taken.append(name)
            except OSError:
                continue
    return taken


def is_reachable(name: str) -> bool:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(name)
    return True


folder = pytest.fixture(open_folder)


def unix_sockets(pid: int) -> list[str]:
    """Names at which a process listens, abstract ones with @."""
    inodes = set()
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # It was closed meanwhile.
            target = os.readlink(path)
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    rows = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    return [row[7] for row in rows if row[6] in inodes and len(row) > 7]


@pytest.fixture
def run_dir(folder: Path) -> Iterator[Path]:
    """Of a supervisor that runs; long enough that no socket could be named by it."""
    run_dir = folder / ("long" * 25) / "run-1"
    run_dir.mkdir(parents=True)
    supervisor = subprocess.Popen(
        [
            *(sys.executable, "-m", "strata.launch.supervisor", str(run_dir)),
            *(sys.executable, "-c", "import signal; signal.pause()"),
        ]
    )
    try:
        eventually((run_dir / "supervisor.json").exists, within_s=30)
        yield run_dir
    finally:
        supervisor.send_signal(signal.SIGTERM)
        supervisor.wait(30)
    assert not (run_dir / "socket").exists()


def pid_of(run_dir: Path) -> int:
    return int(json.loads((run_dir / "supervisor.json").read_text())["pid"])


def output(run_dir: Path) -> str:
    return "".join(path.read_text() for path in run_dir.glob("output-*.jsonl"))


def send_line(run_dir: Path, text: str) -> None:
    with connect_to_path(run_dir / "socket") as connection:
        connection.sendall(b'{"rank": 0, "stream": "stdout"}\n' + text.encode() + b"\n")


@needs_root
def test_another_user_cannot_inject_lines_whatever_the_modes(run_dir: Path) -> None:
    names = [*unix_sockets(pid_of(run_dir)), str(run_dir / "socket")]
    assert not [name for name in names if name.startswith("@")]
    assert not as_stranger(inject, names)
    # Even where somebody has opened the folder and the socket, the kernel says whose process it is.
    (run_dir / "socket").chmod(0o777)
    short = run_dir.parents[1] / "s"
    short.symlink_to(run_dir / "socket")
    assert as_stranger(is_reachable, str(short))
    as_stranger(inject, [str(short)])
    send_line(run_dir, "own line")
    eventually(lambda: "own line" in output(run_dir), within_s=60)
    assert "forged line" not in output(run_dir)


AGENT = """
import os, signal, sys, threading
from strata.agent import supervised
from strata.agent.supervised import SUPERVISOR_VARIABLE, report_failure
from strata.core.faults.failures import WorkerError

supervised.REPORT_S = 60.0  # It waits as long as a supervisor on a busy machine may need to look again.
error = WorkerError(type="ValueError", message="a bad batch", traceback="ValueError: a bad batch")
address = os.environ[SUPERVISOR_VARIABLE]
os.kill(os.getppid(), signal.SIGSTOP)
worker = threading.Thread(target=report_failure, args=(address, error), kwargs={"exit_code": 1})
worker.start()
worker.join(1)
if worker.is_alive():
    os.kill(os.getppid(), signal.SIGCONT)
    worker.join()
LINE
os.kill(os.getppid(), signal.SIGCONT)
sys.exit(1)
"""


def test_what_a_worker_failed_with_is_known_before_its_agent_says_that_it_ended(tmp_path: Path) -> None:
    """However long the supervisor has not looked: it reads of a socket later than of a pipe."""
    line = "print('failed (exitcode: 1) local_rank: 0 (pid: 7) of binary: x', file=sys.stderr, flush=True)"
    agent = [sys.executable, "-c", AGENT.replace("LINE", line)]
    command = [sys.executable, "-m", "strata.launch.supervisor", str(tmp_path), *agent]
    assert subprocess.run(command, timeout=120, check=False).returncode == 0
    cause = json.loads((tmp_path / "ended.json").read_text())["cause"]
    assert "ValueError: a bad batch" in cause["message"]


def test_a_socket_has_a_path_of_any_length_and_one_user(tmp_path: Path) -> None:
    path = tmp_path / ("x" * 200) / "socket"
    path.parent.mkdir()
    with listen_privately(path) as listener, connect_to_path(path):
        assert path.stat().st_mode & 0o777 == 0o600
        with pytest.raises(OSError, match="in use"):
            listen_privately(path)
        accepted, _ = listener.accept()
        with accepted:
            assert is_own_peer(accepted)
    path.unlink()
    with pytest.raises(FileNotFoundError):
        connect_to_path(path)


def test_a_socket_that_nobody_listens_at_refuses(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
    with pytest.raises(ConnectionRefusedError):
        connect_to_path(tmp_path / "socket")
