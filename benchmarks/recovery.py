"""torchft, NVRx and Ray Train killed as our own job is killed: from the signal to the next step that is new.

    python -m benchmarks.recovery [--json] [--quick]
    python -m benchmarks.recovery --in-process [--json] [--quick]     those that continue in their processes, and plain torchrun

All may go on with the survivors, so a step counts that is beyond the one in flight at the signal, whoever makes it;
how long it took until the lost worker was back is in the note. NVRx takes no lost rank back: it is started anew for each kill.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import psutil

import strata
from benchmarks.environments import environment
from strata.agent.trace import clear_run, footprints
from strata.bench.recovery import in_process
from strata.bench.recovery import suite as recovery
from strata.bench.table import Row, report

REQUIREMENTS = {
    "torchft": ["torchft==0.2.0"],
    "ray": ["ray[train]==2.60.0"],
    "nvrx": ["nvidia-resiliency-ext==0.4.1"],
}
NVRX_NEEDS = ["defusedxml", "nvidia-ml-py", "pynvml", "packaging", "pyyaml"]
"""But for torch and psutil, which are those of this environment."""
PATIENCE_S = 90.0
PEACE_S = 4.0
SCRIPT = Path(__file__).with_name("recovery_peers.py")

Running = Callable[[Path, str, Path], AbstractContextManager[None]]


def other_projects(
    folder: Path, kills: int, *, only: Sequence[str] = ("torchft", "nvrx", "ray")
) -> Iterator[Row]:
    if "torchft" in only:
        yield _with_replacement("torchft", "torchft DDP, two replica groups", _torchft, folder, kills)
    if "nvrx" in only:
        for settings, title in (("fast", "intervals of 0.1 s"), ("", "as it is")):
            yield _without_replacement(f"NVRx in-process, three ranks, {title}", folder, kills, settings)
    if "ray" in only:
        yield _with_replacement("ray", "Ray Train, elastic from 1 to 2 workers", _ray, folder, kills)


def _with_replacement(project: str, title: str, running: Running, folder: Path, kills: int) -> Row:
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
    back = f"all back after {statistics.median(whole_s):.2f} s"
    return _row(title, next_s, back)


def _without_replacement(title: str, folder: Path, kills: int, settings: str) -> Row:
    python = environment("nvrx", [*REQUIREMENTS["nvrx"], *NVRX_NEEDS])
    next_s: list[float] = []
    failed = 0
    for number in range(kills):
        name = f"nvrx-{os.getpid()}-{settings}{number}"
        place = folder / name
        place.mkdir()
        try:
            with _nvrx(python, name, place, settings):
                next_s.append(_lose(name, place, workers=3)[0])
        except TimeoutError as error:
            failed += 1
            print(error, file=sys.stderr)
        finally:
            clear_run(name)
    if not next_s:
        raise TimeoutError(f"{title}: none of {kills} was recovered from")
    trouble = f", {failed} more not recovered from" if failed else ""
    return _row(title, next_s, f"the lost rank does not come back{trouble}")


def _row(title: str, next_s: Sequence[float], back: str) -> Row:
    return Row(
        name=f"peer: {title}, crash → next new step",
        measured=statistics.median(next_s),
        unit="s",
        note=f"{len(next_s)} kills, {min(next_s):.2f} to {max(next_s):.2f} s; {back}",
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
def _nvrx(python: Path, name: str, folder: Path, settings: str) -> Iterator[None]:
    """Without torchrun, which ends all workers when one of them is lost."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "3"}
    with contextlib.ExitStack() as stack:
        for rank in range(3):
            own = {**variables, "RANK": str(rank), "LOCAL_RANK": str(rank), "NVRX_SETTINGS": settings}
            stack.enter_context(_process([str(python), str(SCRIPT), "nvrx", name, str(folder)], own, folder))
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
    began_s = time.monotonic()
    next_s, at_s = _lose(name, folder, workers=2)
    _until(
        lambda: any(f.born_mono_s > at_s for f in footprints(name)) and len(_recent(name)) == 2,
        began_s + PATIENCE_S,
        folder,
    )
    return next_s, time.monotonic() - at_s


def _lose(name: str, folder: Path, *, workers: int) -> tuple[float, float]:
    """Kill the last worker: seconds until the next new step, and when it was killed."""
    deadline_s = time.monotonic() + PATIENCE_S
    _until(lambda: len(_recent(name)) == workers, deadline_s, folder)
    time.sleep(PEACE_S)
    step = max(f.step for f in footprints(name)) + 1
    at_s = time.monotonic()
    os.kill(int((folder / f"pid-{workers - 1}").read_text()), signal.SIGKILL)
    _until(lambda: any(f.step > step and f.mono_s > at_s for f in footprints(name)), deadline_s, folder)
    return time.monotonic() - at_s, at_s


def _recent(name: str) -> list[float]:
    """The last steps of the workers that are at it now."""
    return [f.mono_s for f in footprints(name) if time.monotonic() - f.mono_s < 1.0]


def _until(happened: Callable[[], bool], deadline_s: float, folder: Path) -> None:
    while not happened():
        if time.monotonic() > deadline_s:
            tail = (folder / "log").read_text(errors="replace")[-2_000:]
            raise TimeoutError(f"The peer made no step within {PATIENCE_S:.0f} s. Its log ends:\n{tail}")
        time.sleep(0.01)


def run_in_process(*, quick: bool = False) -> Iterator[Row]:
    """Those that continue in their processes, and plain torchrun, which does not, in one quarter of an hour."""
    kills = 1 if quick else 6
    with tempfile.TemporaryDirectory(prefix="strata-bench-") as name:
        folder = Path(name)
        yield from in_process.run(quick=quick)
        yield from other_projects(folder, kills, only=("torchft", "nvrx"))
        yield from recovery.plain_torchrun(folder, kills)


def run(*, quick: bool = False) -> Iterator[Row]:
    """Ours, and then the others, on the same machine in the same quarter of an hour."""
    yield from recovery.run(quick=quick)
    with tempfile.TemporaryDirectory(prefix="strata-bench-") as folder:
        yield from other_projects(Path(folder), 1 if quick else 4)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.recovery", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--quick", action="store_true", help="small and fast: shows that it runs")
    parser.add_argument(
        "--in-process", action="store_true", help="only those that continue in their processes"
    )
    arguments = parser.parse_args(argv)
    measured = run_in_process if arguments.in_process else run
    report("Recovery", measured(quick=arguments.quick), as_json=arguments.json)


if __name__ == "__main__":
    main()
