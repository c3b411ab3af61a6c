"""torchft and Ray Train killed as our own job is killed: from the signal to the next step that is new.

    python -m benchmarks.recovery [--json] [--quick]

Both may go on with the survivor, so a step counts that is beyond the one in flight at the signal, whoever makes it;
how long it took until the lost worker was back is in the note.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import psutil

import strata
from benchmarks.environments import environment
from strata.bench import recovery
from strata.bench.table import Row, report
from strata.training.trace import clear_run, footprints

REQUIREMENTS = {"torchft": ["torchft==0.2.0"], "ray": ["ray[train]==2.60.0"]}
PATIENCE_S = 180.0
PEACE_S = 4.0
SCRIPT = Path(__file__).with_name("recovery_peers.py")


def other_projects(folder: Path, kills: int) -> Iterator[Row]:
    for project, running in (("torchft", _torchft), ("ray", _ray)):
        title = {
            "torchft": "torchft DDP, two replica groups",
            "ray": "Ray Train, elastic from 1 to 2 workers",
        }[project]
        name = f"{project}-{os.getpid()}"
        place = folder / name
        place.mkdir()
        python = environment(project, REQUIREMENTS[project], with_dependencies=True)
        try:
            with running(python, name, place):
                hurt = [_kill(name, place) for _ in range(kills)]
        finally:
            clear_run(name)
        next_s, whole_s = zip(*hurt, strict=True)
        yield Row(
            name=f"peer: {title}, crash → next new step",
            measured=statistics.median(next_s),
            unit="s",
            note=f"{kills} kills, {min(next_s):.2f} to {max(next_s):.2f} s; all back after {statistics.median(whole_s):.2f} s",
        )


@contextlib.contextmanager
def _torchft(python: Path, name: str, folder: Path) -> Iterator[None]:
    serve = (
        "import sys; from torchft.coordination import LighthouseServer; "
        "s = LighthouseServer(bind='127.0.0.1:0', min_replicas=1, join_timeout_ms=1000, quorum_tick_ms=100, "
        "heartbeat_timeout_ms=1000); print(s.address(), flush=True); sys.stdin.read()"
    )
    with open(folder / "lighthouse.log", "wb") as log:
        lighthouse = subprocess.Popen(
            [str(python), "-c", serve], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
        )
    assert lighthouse.stdout is not None
    variables = {"TORCHFT_LIGHTHOUSE": lighthouse.stdout.readline().strip(), "NUM_REPLICA_GROUPS": "2"}
    torchrun = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--max-restarts=1000",
        "--monitor-interval=0.1",
    ]
    try:
        with contextlib.ExitStack() as stack:
            for group in range(2):
                command = [str(python), *torchrun, str(SCRIPT), "torchft", name, str(folder)]
                stack.enter_context(_process(command, {**variables, "REPLICA_GROUP_ID": str(group)}, folder))
            yield
    finally:
        lighthouse.communicate()


@contextlib.contextmanager
def _ray(python: Path, name: str, folder: Path) -> Iterator[None]:
    variables = {
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_TRAIN_V2_ENABLED": "1",
        "RAY_AUTH_MODE": "disabled",
        "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}",
    }
    with _process([str(python), str(SCRIPT), "ray", name, str(folder)], variables, folder):
        yield


@contextlib.contextmanager
def _process(command: list[str], variables: Mapping[str, str], folder: Path) -> Iterator[None]:
    sources = str(Path(strata.__file__).parents[1])
    settings = {"PYTHONPATH": sources, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    with open(folder / "log", "ab") as log:
        process = subprocess.Popen(
            command,
            env={**os.environ, **settings, **variables},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        yield
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            for below in psutil.Process(process.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    below.kill()
        process.kill()
        process.wait(10)


def _kill(name: str, folder: Path) -> tuple[float, float]:
    """Seconds until the next new step, and until the lost worker makes one."""
    deadline_s = time.monotonic() + PATIENCE_S
    _until(lambda: len(_recent(name)) == 2, deadline_s, folder)
    time.sleep(PEACE_S)
    step = max(f.step for f in footprints(name)) + 1
    at_s = time.monotonic()
    os.kill(int((folder / "pid-1").read_text()), signal.SIGKILL)
    _until(lambda: any(f.step > step and f.mono_s > at_s for f in footprints(name)), deadline_s, folder)
    next_s = time.monotonic() - at_s
    _until(
        lambda: any(f.born_mono_s > at_s for f in footprints(name)) and len(_recent(name)) == 2,
        deadline_s,
        folder,
    )
    return next_s, time.monotonic() - at_s


def _recent(name: str) -> list[float]:
    """The last steps of the workers that are at it now."""
    return [f.mono_s for f in footprints(name) if time.monotonic() - f.mono_s < 1.0]


def _until(happened: Callable[[], bool], deadline_s: float, folder: Path) -> None:
    while not happened():
        if time.monotonic() > deadline_s:
            tail = (folder / "log").read_text(errors="replace")[-2_000:]
            raise TimeoutError(f"The peer made no step within {PATIENCE_S:.0f} s. Its log ends:\n{tail}")
        time.sleep(0.01)


def run(*, quick: bool = False) -> Iterator[Row]:
    """Ours, and then the others, on the same machine in the same quarter of an hour."""
    yield from recovery.run(quick=quick)
    with tempfile.TemporaryDirectory(prefix="strata-bench-") as folder:
        yield from other_projects(Path(folder), 1 if quick else 4)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.recovery", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--quick", action="store_true", help="small and fast: shows that it runs")
    arguments = parser.parse_args(argv)
    report("Recovery", run(quick=arguments.quick), as_json=arguments.json)


if __name__ == "__main__":
    main()
