"""Recovery without a restart: from the loss of a rank to the next new step of those that survive, and of its replacement.

    python -m strata.bench.recovery.in_process [--json] [--device cuda] [--kills 30] [--spares]

A recoverable job (`recoverable_job`) under `strata torchrun` loses one rank after the other by SIGKILL. On a device also one
rank by itself, with NCCL, which leaves and enters again: NCCL takes no two ranks on one device. `--spares` compares jobs without and
with a process that stands by, with replicated and with sharded state. Needs nothing but torch, psutil and xxhash.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from strata.bench.table import Row, report
from strata.launch.torchrun import Agent, TorchrunSpec
from strata.shared_memory import forget_jobs

SCRIPT = Path(__file__).with_name("recoverable_job.py")
PATIENCE_S = 120.0
PEACE_S = 3.0
"""Of training between two losses."""


@dataclass(frozen=True, slots=True)
class Line:
    at_s: float
    pid: int
    step: int
    what: str


@dataclass(frozen=True, slots=True)
class Loss:
    survivor_s: float
    """Until a process that was there before has made a step that no process had made."""
    replacement_s: float | None
    """Until a new process has made a step."""
    lost: int
    """Steps that were made again."""


def run(*, kills: int = 30, quick: bool = False) -> Iterator[Row]:
    """On the CPU: three ranks, one of them killed."""
    losses = _measure(3 if quick else kills, 3, 3_000_000, device="cpu", backend="gloo")
    yield from _rows("3 ranks, one killed", losses, median_s=0.25, worst_s=0.6, replacement_s=1.2)


def run_spares(*, kills: int = 12) -> Iterator[Row]:
    """On the CPU: three ranks, one of them killed. One job without a spare and one with, which lose ranks in turns."""
    for kind in ("ddp", "fsdp"):
        losses: dict[int, list[Loss]] = {0: [], 1: []}
        with contextlib.ExitStack() as running:
            jobs = {
                spares: running.enter_context(
                    _training(3, 3_000_000, spares=spares, is_sharded=kind == "fsdp")
                )
                for spares in losses
            }
            for number in range(kills):
                for spares, job in jobs.items():
                    if (loss := job.lose(number)) is not None:
                        losses[spares].append(loss)
        for spares, found in losses.items():
            with_spares = "a spare stands by" if spares else "no spare"
            for what, times in (
                ("survivors' next new step", [loss.survivor_s for loss in found]),
                ("all train again", [s for loss in found if (s := loss.replacement_s) is not None]),
            ):
                yield Row(
                    name=f"in process: {kind}, 3 ranks, one killed, {with_spares} → {what}, median",
                    measured=statistics.median(times),
                    unit="s",
                    better="lower",
                    note=f"{len(times)} losses, {min(times):.2f} to {max(times):.2f} s",
                )


def run_gpu(*, kills: int = 8, state_bytes: int = 6_000_000_000) -> Iterator[Row]:
    size = f"{state_bytes / 1e9:.3g} GB"
    two = _measure(kills, 2, state_bytes, device="cuda", backend="gloo")
    yield from _rows(f"{size}, gloo with CUDA tensors", two, median_s=0.5, worst_s=None, replacement_s=None)
    alone = _measure(kills, 1, state_bytes, device="cuda", backend="cpu:gloo,cuda:nccl")
    yield from _rows(f"{size}, NCCL, a rank by itself", alone, median_s=1.3, worst_s=None, replacement_s=None)


def _rows(
    label: str, losses: list[Loss], *, median_s: float, worst_s: float | None, replacement_s: float | None
) -> Iterator[Row]:
    if not losses:
        raise RuntimeError(f"{label}: nothing was recovered from")
    times = [loss.survivor_s for loss in losses]
    spread = f"{len(times)} losses, {min(times):.2f} to {max(times):.2f} s"
    yield Row(
        name=f"in process: {label} → survivors' next new step, median",
        measured=statistics.median(times),
        unit="s",
        target=median_s,
        better="lower",
        note=spread,
    )
    if worst_s is not None:
        yield Row(
            name=f"in process: {label} → survivors' next new step, worst",
            measured=max(times),
            unit="s",
            target=worst_s,
            better="lower",
            note=spread,
        )
    back = [loss.replacement_s for loss in losses if loss.replacement_s is not None]
    if back and replacement_s is not None:
        yield Row(
            name=f"in process: {label} → its replacement trains, median",
            measured=statistics.median(back),
            unit="s",
            target=replacement_s,
            better="lower",
            note=f"{min(back):.2f} to {max(back):.2f} s",
        )
    yield Row(
        name=f"in process: {label}, steps made again, median",
        measured=float(statistics.median(loss.lost for loss in losses)),
        unit="steps",
        target=0.0,
        better="lower",
        note=f"at most {max(loss.lost for loss in losses)}",
    )


def _measure(kills: int, workers: int, state_bytes: int, *, device: str, backend: str) -> list[Loss]:
    with _training(workers, state_bytes, device=device, backend=backend) as job:
        found = [job.lose(number) for number in range(kills)]
    return [loss for loss in found if loss is not None]


@dataclass(frozen=True, slots=True)
class _Job:
    folder: Path
    agent: Agent

    def lose(self, number: int) -> Loss | None:
        workers = self.agent.spec.nproc
        _await_calm(self.folder, self.agent, workers)
        return _lose(self.folder, self.agent, workers, number % workers)


@contextlib.contextmanager
def _training(
    workers: int,
    state_bytes: int,
    *,
    device: str = "cpu",
    backend: str = "gloo",
    spares: int = 0,
    is_sharded: bool = False,
) -> Iterator[_Job]:
    name = f"in-process-{os.getpid()}-{workers}-{spares}-{int(is_sharded)}"
    with tempfile.TemporaryDirectory(prefix="strata-bench-") as made:
        folder = Path(made)
        arguments = [str(SCRIPT), name, str(folder), str(state_bytes), device, backend]
        arguments += ["fsdp"] if is_sharded else []
        spec = TorchrunSpec(run_id=name, nproc=workers, rdzv_endpoint="", arguments=arguments, spares=spares)
        agent = Agent(spec, log=folder / "log")
        try:
            yield _Job(folder, agent)
        finally:
            agent.kill()
            forget_jobs(name)


def _await_calm(folder: Path, agent: Agent, workers: int) -> None:
    """Until all ranks have trained for a while, and those that stand by have had as long to start."""
    everyone = workers + agent.spec.spares
    deadline_s = time.monotonic() + PATIENCE_S
    while agent.is_running and time.monotonic() < deadline_s:
        now_s = time.monotonic()
        recent = {
            line.pid
            for line in last_lines(folder)
            if line.at_s > now_s - 0.5 and line.what.startswith("step")
        }
        began_s = [line.at_s for line in last_lines(folder) if line.what.startswith("resumed")][-workers:]
        is_calm = len(recent) == len(began_s) == workers and now_s - max(began_s) > PEACE_S
        if is_calm and len(agent.workers()) == everyone:
            return
        time.sleep(0.1)
    raise RuntimeError(f"the job does not train. Its log ends:\n{agent.tail()}")


def _lose(folder: Path, agent: Agent, workers: int, slot: int) -> Loss | None:
    pids = sorted({line.pid for line in last_lines(folder) if line.at_s > time.monotonic() - PEACE_S / 2})
    at_s = time.monotonic()
    if workers == 1:
        (folder / "leave").touch()
    else:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pids[slot % len(pids)], signal.SIGKILL)
    deadline_s = at_s + PATIENCE_S
    while time.monotonic() < deadline_s and agent.is_running:
        after = [line for line in last_lines(folder) if line.at_s > at_s]
        again = [line for line in after if line.what.startswith("resumed")]
        if again:
            began_s = again[0].at_s
            made = [
                line for line in last_lines(folder) if line.at_s < began_s and line.what.startswith("step")
            ]
            furthest = max(line.step for line in made)
            new = [line for line in after if line.at_s > began_s and line.what.startswith("step")]
            survivors = [line.at_s - at_s for line in new if line.pid in pids and line.step > furthest]
            others = [line.at_s - at_s for line in new if line.pid not in pids]
            if survivors and (others or workers == 1):
                replacement_s = min(others) if others else None
                return Loss(min(survivors), replacement_s, max(0, furthest - again[0].step))
        time.sleep(0.05)
    return None


def last_lines(folder: Path) -> list[Line]:
    """The last ones."""
    path = folder / "steps"
    if not path.exists():
        return []
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 400_000))
        texts = (
            file.read().decode().split("\n")[1:-1]
            if file.tell() > 400_000
            else path.read_text().split("\n")[:-1]
        )
    found = []
    for text in texts:
        at_s, pid, step, what = text.split(" ", 3)
        found.append(Line(float(at_s), int(pid), int(step), what))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--state-bytes", type=int, default=6_000_000_000)
    parser.add_argument("--spares", action="store_true")
    arguments = parser.parse_args()
    if arguments.spares:
        rows = run_spares(kills=arguments.kills)
    elif arguments.device == "cpu":
        rows = run(kills=arguments.kills)
    else:
        rows = run_gpu(kills=arguments.kills, state_bytes=arguments.state_bytes)
    report("Recovery without a restart", rows, as_json=arguments.json)


if __name__ == "__main__":
    main()
