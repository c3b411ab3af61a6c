"""Trainers that people already use, whose processes are killed at any moment, stopped, and started with another number of ranks:
every sample exactly once, by the ledger and by what the models were really given."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytest.importorskip("pytorch_lightning")

from strata.data.history import audit_epochs
from tests.integrations.trainer_script import SAMPLES
from tests.support import eventually

ROOT = Path(__file__).parents[2]
EPOCHS = 3
WAIT_S = 240
STEPS_BETWEEN_KILLS = 20
"""At most, so that the job does not end before its last kill, however fast the machine is."""


class Run:
    """`strata torchrun` with so many workers."""

    def __init__(self, framework: str, folder: Path, *, workers: int) -> None:
        self.folder = folder
        for old in folder.glob("pid-*"):
            old.unlink()
        (folder / "held").touch()
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "strata.cli.main", "torchrun", f"--nproc-per-node={workers}"),
                *("-m", "tests.integrations.trainer_script", framework, str(folder), str(EPOCHS)),
            ],
            cwd=ROOT,
            env={**os.environ, "STRATA_TOKEN": "", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.lines: list[str] = []
        self._reading = threading.Thread(target=self._read)
        self._reading.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        self.lines.extend(iter(self.process.stdout.readline, ""))

    @property
    def text(self) -> str:
        return "".join(self.lines)

    def steps(self) -> int:
        """Lines about steps, of all starts and ranks."""
        return sum(path.read_text().count("\n") for path in (self.folder / "seen").glob("*"))

    def await_steps(self, more: int, *, or_until_s: float | None = None) -> None:
        before = self.steps()
        eventually(
            lambda: (
                self.steps() >= before + more
                or (or_until_s is not None and time.monotonic() >= or_until_s)
                or self.process.poll() is not None
            ),
            within_s=WAIT_S,
            what=lambda: f"{more} more steps; printed so far:\n{self.text}",
        )
        assert self.process.poll() is None, self.text

    def kill_a_worker(self, choice: random.Random) -> None:
        """At any moment after the first step of this start: while it trains, saves, or comes back from the kill before."""
        self.await_steps(1)
        self.await_steps(
            choice.randint(1, STEPS_BETWEEN_KILLS), or_until_s=time.monotonic() + choice.uniform(0, 2)
        )
        with suppress(ProcessLookupError):
            os.kill(int(choice.choice(sorted(self.folder.glob("pid-*"))).read_text()), signal.SIGKILL)

    def end(self, *, number: int | None = None) -> str:
        """What it has printed when it ends; before that it gets a signal, if any. Without one it is held no longer."""
        if number is not None:
            self.process.send_signal(number)
        else:
            (self.folder / "held").unlink()
        eventually(
            lambda: self.process.poll() is not None,
            within_s=WAIT_S,
            what=lambda: f"its end; printed so far:\n{self.text}",
        )
        self._reading.join(60)
        assert self.process.returncode == (0 if number is None else 128 + number), self.text
        return self.text

    def close(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(60)
        self._reading.join(60)


def trained(folder: Path) -> dict[int, list[int]]:
    """The samples of each epoch as the models were given them, less what was rolled back: a start that resumed at some step undoes
    what earlier ones had trained after it."""
    rows: list[tuple[int, int, int, list[int]]] = []
    for path in (folder / "seen").glob("*"):
        generation = int(path.name.partition("-")[0])
        for line in path.read_text().splitlines():
            epoch, step, *numbers = map(int, line.split())
            rows.append((generation, epoch, step, numbers))
    first = {generation: min(row[2] for row in rows if row[0] == generation) for generation, *_ in rows}
    found: dict[int, list[int]] = {}
    for generation, epoch, step, numbers in rows:
        if all(step < first[later] for later in first if later > generation):
            found.setdefault(epoch, []).extend(numbers)
    return found


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("kills", "then"), [(1, 1), pytest.param(3, 3, marks=pytest.mark.slow)], ids=["2 to 1", "2 to 3"]
)
@pytest.mark.parametrize("framework", ["huggingface", "lightning", "fabric", "accelerate"])
def test_kills_a_preemption_and_a_resize_lose_and_repeat_nothing(
    framework: str, kills: int, then: int, tmp_path: Path
) -> None:
    seed = random.randrange(1 << 30)
    choice = random.Random(seed)
    print(f"seed {seed}")
    run = Run(framework, tmp_path, workers=2)
    try:
        for _ in range(kills):
            run.kill_a_worker(choice)
        run.await_steps(4)
        assert "is saved, ending" in run.end(number=signal.SIGTERM)
    finally:
        run.close()
    run = Run(framework, tmp_path, workers=then)
    try:
        run.kill_a_worker(choice)
        run.end()
    finally:
        run.close()

    reports = audit_epochs(tmp_path / "checkpoints", "data")
    assert sum(report.last_epoch - report.epoch + 1 for report in reports) == EPOCHS
    assert all(report.exact for report in reports), [report.reason for report in reports]
    seen = trained(tmp_path)
    assert sorted(seen) == list(range(EPOCHS))
    for report in reports:
        for epoch in range(report.epoch, report.last_epoch + 1):
            assert len(seen[epoch]) == len(set(seen[epoch])) == SAMPLES - report.dropped.size
