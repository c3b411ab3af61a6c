"""Faults that really happen, one after the other under one agent: each is one incident, of the right class and rank."""

from __future__ import annotations

import ast
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from strata.agent.evidence import OomKills, processes_killed
from strata.core.faults.failures import FailureClass
from tests.support_programs import program

RIGHT = 0.95
WITHIN_S = 900.0

PROGRAM = """
import ctypes, os, resource, signal, socket, sys, time
import torch, torch.distributed as dist

def kill(number):
    def end():
        signal.signal(number, signal.SIG_DFL) if number != signal.SIGKILL else None
        os.kill(os.getpid(), number)
        time.sleep(60)
    return end

def throw(error):
    raise error

def save_to_a_full_disk():
    with open('/dev/full', 'w') as file:
        file.write('x' * 100_000)

def read_from_a_failing_one():
    open('/proc/self/mem', 'rb').read(1)

def connect_to_nobody():
    with socket.socket() as held:  # As long as it is taken nobody else can listen there.
        held.bind(('127.0.0.1', 0))
        socket.create_connection(held.getsockname(), timeout=5)

def wait_for_nobody():
    with socket.socket() as server:
        server.bind(('127.0.0.1', 0)); server.listen()
        with socket.create_connection(server.getsockname(), timeout=0.2) as mine:
            mine.recv(1)

def write_to_nobody():
    reading, writing = os.pipe()
    os.close(reading)
    os.write(writing, b'x')

def bucket_at(port):
    os.environ.update(AWS_ENDPOINT_URL=f'http://127.0.0.1:{port}', AWS_REGION='us-east-1')
    os.environ.update(AWS_ACCESS_KEY_ID='somebody', AWS_SECRET_ACCESS_KEY='else', AWS_ALLOW_HTTP='true')
    from strata.stores.urls import open_store
    open_store('s3://bucket/run').read('checkpoint')

def read_from_a_bucket_that_is_away():
    with socket.socket() as held:
        held.bind(('127.0.0.1', 0))
        bucket_at(held.getsockname()[1])

def read_from_a_bucket_that_refuses():
    import http.server, threading
    class Refuses(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(403)
            self.send_header('Content-Length', '0')
            self.end_headers()
        do_HEAD = do_GET
    server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), Refuses)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    bucket_at(server.server_address[1])

def hang():
    from strata.training.watchdog import Watchdog
    Watchdog(timeout_s=0.4, policy='restart', name='this rank')
    time.sleep(60)

def run_out_of_files():
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    held = [open('/dev/null') for _ in range(100)]

FAULTS = {
    'SIGKILL': kill(signal.SIGKILL),
    'SIGSEGV': lambda: ctypes.string_at(0),
    'SIGABRT': os.abort,
    'SIGTERM': kill(signal.SIGTERM),
    'SIGBUS': kill(signal.SIGBUS),
    'SIGFPE': kill(signal.SIGFPE),
    'SIGILL': kill(signal.SIGILL),
    'SIGQUIT': kill(signal.SIGQUIT),
    'ctrl-c': lambda: throw(KeyboardInterrupt()),
    'os._exit': lambda: os._exit(3),
    'sys.exit': lambda: sys.exit(3),
    'sys.exit with words': lambda: sys.exit('no such preset'),
    'asks to be started again': lambda: os._exit(75),
    'ValueError': lambda: int('forty-one'),
    'ModuleNotFoundError': lambda: __import__('no_such_module_anywhere'),
    'KeyError': lambda: {}['lr'],
    'ZeroDivisionError': lambda: 1 / 0,
    'AssertionError': lambda: throw(AssertionError('loss is not finite')),
    'FileNotFoundError': lambda: open('/no/such/corpus.txt'),
    'PermissionError': lambda: os.kill(1, 9) if os.getuid() else throw(PermissionError(13, 'Permission denied')),
    'wrong shapes': lambda: torch.ones(2, 3) @ torch.ones(2, 3),
    'index out of range': lambda: torch.ones(3)[7],
    'RecursionError': lambda: (lambda f: f(f))(lambda f: f(f)),
    'SyntaxError': lambda: compile('def broken(:', 'config.py', 'exec'),
    'UnicodeDecodeError': lambda: b'\\xff\\xfe'.decode('utf-8'),
    'too many open files': run_out_of_files,
    'MemoryError': lambda: bytearray(1 << 62),
    "torch's allocator": lambda: torch.empty(1 << 50),
    'full disk': save_to_a_full_disk,
    'failing disk': read_from_a_failing_one,
    'S3 that is away': read_from_a_bucket_that_is_away,
    'S3 that refuses': read_from_a_bucket_that_refuses,
    'connection refused': connect_to_nobody,
    'unknown host': lambda: socket.getaddrinfo('no-such-host.invalid', 80),
    'timeout': wait_for_nobody,
    'broken pipe': write_to_nobody,
    'hang': hang,
    'CUDA error': lambda: throw(RuntimeError('CUDA error: an illegal memory access was encountered')),
}

if os.environ.get('TORCHELASTIC_RESTART_COUNT') is not None:
    number = int(os.environ['TORCHELASTIC_RESTART_COUNT'])
    if number < len(FAULTS):
        dist.init_process_group('gloo')
        dist.barrier()
        if dist.get_rank() == number % 2:
            list(FAULTS.values())[number]()
        dist.barrier()  # Broken for whoever is left: the consequence, which must not be blamed.
        time.sleep(60)
"""

CLASSES: dict[str, FailureClass] = {
    **dict.fromkeys(("SIGKILL", "SIGSEGV", "SIGABRT", "SIGBUS", "SIGFPE", "SIGILL", "SIGQUIT"), "unknown"),
    "os._exit": "unknown",
    **dict.fromkeys(("SIGTERM", "ctrl-c", "asks to be started again"), "preemption"),
    **dict.fromkeys(("MemoryError", "torch's allocator"), "oom"),
    **dict.fromkeys(("full disk", "failing disk", "S3 that is away", "S3 that refuses"), "storage"),
    **dict.fromkeys(("connection refused", "unknown host", "timeout", "broken pipe"), "network"),
    "hang": "hang",
    "CUDA error": "gpu",
}
"""All others are errors of the program. Of the GPU's there is only the text: this machine may have none."""


@pytest.fixture(scope="module")
def incidents(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("faults")
    (folder / "faults.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "strata.launch.agent", "--nproc-per-node=2", "--rdzv-id=faults"]
    env = {name: value for name, value in os.environ.items() if not name.startswith("COORDINATOR")}
    env |= {
        "STRATA_DATA_DIR": str(folder / "data"),
        "STRATA_POLICY": "user_error=continue,same_fingerprint=1000",
        "OMP_NUM_THREADS": "1",
    }
    with open(folder / "log", "wb") as log:
        end = subprocess.run(
            [*command, str(folder / "faults.py")], env=env, stdout=log, stderr=log, timeout=WITHIN_S
        )
    said = (folder / "log").read_text(errors="replace")
    assert end.returncode == 0, said[-5_000:]
    path = folder / "data" / "incidents" / "faults.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def names() -> list[str]:
    """The keys of `FAULTS`, in order."""
    tree = ast.parse(PROGRAM)
    faults = next(
        node.value for node in tree.body if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict)
    )
    assert isinstance(faults, ast.Dict)
    return [str(key.value) for key in faults.keys if isinstance(key, ast.Constant)]


@pytest.mark.timeout(1_000)
def test_every_fault_is_one_incident_of_the_right_class_and_the_right_rank(
    incidents: list[dict[str, Any]],
) -> None:
    faults = names()
    assert len(faults) >= 30
    assert len(incidents) == len(faults)
    wrong = {
        name: (found["failure_class"], found["text"])
        for name, found in zip(faults, incidents, strict=True)
        if found["failure_class"] != CLASSES.get(name, "user_error")
    }
    assert len(wrong) <= (1 - RIGHT) * len(faults), wrong
    ranks = {
        name: found["text"]
        for number, (name, found) in enumerate(zip(faults, incidents, strict=True))
        if found["rank"] != number % 2
    }
    assert not ranks


@pytest.mark.timeout(1_000)
def test_the_evidence_names_the_frame_the_signal_and_the_stacks(incidents: list[dict[str, Any]]) -> None:
    found: dict[str, dict[str, Any]] = dict(zip(names(), incidents, strict=True))
    assert "was killed by SIGKILL" in found["SIGKILL"]["text"]
    raised = next(
        f["error"] for f in found["ValueError"]["failures"] if f["rank"] == found["ValueError"]["rank"]
    )
    assert (raised["type"], "faults.py:" in raised["where"][-1]) == ("ValueError", True)
    assert "int('forty-one')" in raised["traceback"]
    hung = next(f["error"] for f in found["hang"]["failures"] if f["rank"] == found["hang"]["rank"])
    assert "is stuck itself" in hung["message"]
    assert "in hang" in hung["traceback"]
    assert found["KeyError"]["fingerprint"].startswith("user_error/KeyError/faults.py:")


# --- the kernel's own: a control group without memory ----------------------------------------------------------

GREEDY = """
import os, sys, time
import torch.distributed as dist
dist.init_process_group('gloo')
dist.barrier()
if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':
    if dist.get_rank() == 1:
        with open(sys.argv[1] + '/cgroup.procs', 'w') as file:
            file.write(str(os.getpid()))
        held = []
        while True:
            held.append(bytearray(os.urandom(1 << 20)) * 16)
    dist.barrier()
    time.sleep(60)
"""
GREEDY_LIMIT_BYTES = 512 << 20


@pytest.fixture
def small_group() -> Iterator[Path]:
    """A control group with little memory, inside this process's own."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        number, controllers, own = line.split(":", 2)
        if "memory" in controllers.split(","):
            group = Path(f"/sys/fs/cgroup/memory{own}/strata-greedy-{os.getpid()}")
            limits = {"memory.limit_in_bytes": GREEDY_LIMIT_BYTES, "memory.swappiness": 0}
        elif number == "0":
            group = Path(f"/sys/fs/cgroup{own}/strata-greedy-{os.getpid()}")
            limits = {"memory.max": GREEDY_LIMIT_BYTES, "memory.swap.max": 0}
        else:
            continue
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            for name, value in limits.items():
                if (group / name).exists():
                    (group / name).write_text(str(value))
            if not any((group / name).exists() for name in limits):
                continue
            yield group
            return
        finally:
            group.rmdir()
    pytest.skip("this user may not limit the memory of a control group")


@pytest.mark.timeout(600)
def test_a_worker_that_the_kernel_kills_in_its_control_group_ran_out_of_memory(
    small_group: Path, tmp_path: Path
) -> None:
    (tmp_path / "greedy.py").write_text(GREEDY)
    command = [sys.executable, "-m", "strata.launch.agent", "--nproc-per-node=2", "--rdzv-id=greedy"]
    env = {name: value for name, value in os.environ.items() if not name.startswith("COORDINATOR")}
    env |= {"STRATA_DATA_DIR": str(tmp_path / "data"), "OMP_NUM_THREADS": "1"}
    end = subprocess.run(
        [*command, str(tmp_path / "greedy.py"), str(small_group)],
        env=env,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert end.returncode == 0, end.stderr[-5_000:]
    (line,) = (tmp_path / "data" / "incidents" / "greedy.jsonl").read_text().splitlines()
    found = json.loads(line)
    assert (found["failure_class"], found["rank"]) == ("oom", 1)
    assert next(f for f in found["failures"] if f["rank"] == 1)["oom_killed"]


def test_a_worker_that_somebody_killed_did_not_run_out_of_memory_because_another_process_did(
    small_group: Path,
) -> None:
    if processes_killed() is None:
        pytest.skip("the kernel's log cannot be read here")
    kills = OomKills()
    greedy = f"""
with open({str(small_group / "cgroup.procs")!r}, "w") as file:
    file.write("0")
held = []
while True:
    held.append(bytearray(b"x" * (1 << 24)))
"""
    other = subprocess.Popen([sys.executable, "-c", greedy])
    worker = subprocess.Popen([program("sleep"), "600"])
    try:
        assert other.wait(120) == -signal.SIGKILL
    finally:
        worker.kill()
        other.kill()
    assert worker.wait(120) == -signal.SIGKILL
    assert not kills.take(worker.pid)
    assert kills.take(other.pid)
