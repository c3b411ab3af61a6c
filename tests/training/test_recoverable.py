"""A recoverable job through real kills, errors, stops and hangs: survivors stay, and nothing is lost or trained twice."""

from __future__ import annotations

import ast
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from strata.data.history import audit_epochs
from strata.launch.coordinator import CoordinatorProcess
from tests.support import eventually

SCRIPT = Path(__file__).parent / "recoverable_script.py"
LIMIT_S = 240.0


@dataclass(slots=True)
class Job:
    folder: Path
    process: subprocess.Popen[str]

    def log(self) -> list[dict[str, Any]]:
        with suppress(FileNotFoundError):
            lines = (self.folder / "log").read_text().splitlines(keepends=True)
            return [ast.literal_eval(line) for line in lines if line.endswith("\n")]
        return []

    def living(self) -> dict[int, int]:
        """The newest process of each slot."""
        return {line["slot"]: line["pid"] for line in self.log()}

    def pids(self) -> dict[int, list[int]]:
        """All processes that each slot has had."""
        found: dict[int, list[int]] = defaultdict(list)
        for line in self.log():
            if line["pid"] not in found[line["slot"]]:
                found[line["slot"]].append(line["pid"])
        return found

    def await_line(self, matches: Callable[[dict[str, Any]], bool], *, count: int = 1) -> None:
        def found() -> bool:
            assert self.process.poll() is None, self.output()
            return sum(map(matches, self.log())) >= count

        eventually(found, within_s=LIMIT_S)

    def output(self) -> str:
        return (self.folder / "output").read_text()

    def finish(self) -> None:
        assert self.process.wait(LIMIT_S) == 0, self.output()


@contextmanager
def job(
    folder: Path, kind: str, *, workers: int, steps: int, flags: Sequence[str] = (), **variables: str
) -> Iterator[Job]:
    """An agent and its workers: a machine of its own, with memory of its own below `memory` or `folder`."""
    folder.mkdir(exist_ok=True)
    root = Path(__file__).parents[2]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")])),
    }
    memory = variables.pop("memory", str(folder))
    Path(memory).mkdir(exist_ok=True)
    with open(folder / "output", "a") as output:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "strata.cli.main", "torchrun", f"--nproc-per-node={workers}", *flags),
                *(str(SCRIPT), folder, kind, str(steps)),
            ],
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
            env={**environment, "STRATA_MEMORY_ROOT": memory, **variables},
        )
    try:
        yield Job(folder, process)
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def weights(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = torch.load(folder / "final.pt", weights_only=True)
    return found


def undisturbed(folder: Path, kind: str, *, workers: int, steps: int) -> dict[str, torch.Tensor]:
    with job(folder, kind, workers=workers, steps=steps, STEP_S="0") as running:
        running.finish()
    return weights(folder)


def assert_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name in wanted:
        assert torch.equal(found[name], wanted[name]), name


def assert_exact(folder: Path) -> None:
    reports = audit_epochs(str(folder / "checkpoints"), "numbers")
    assert reports
    assert all(report.clean for report in reports), [report.reason for report in reports]
    assert all(report.exact for report in reports[:-1]), [report.reason for report in reports]


def assert_survivors_stayed(running: Job, killed: Mapping[int, int]) -> None:
    """Each process is a first one, or replaces one that was killed, or one that gloo had lost (`torch_compat.aborting`)."""
    output = running.output()
    pids = running.pids()
    assert sum(map(len, pids.values())) <= len(pids) + sum(killed.values()) + output.count(
        "and is replaced"
    ), output
    assert "are restarted" not in output


def inject(running: Job, slot: int, program: str) -> None:
    """Python that a worker runs after every step, until it removes `path`."""
    path = running.folder / "fault"
    path.write_text(textwrap.dedent(program))
    path.rename(running.folder / f"faults-{slot}")


def kill_at_random(running: Job, *, seed: int, kills: int) -> dict[int, int]:
    """Kill workers at moments that have nothing to do with what they do: how many were killed in each slot."""
    chance, killed = random.Random(seed), defaultdict[int, int](int)
    running.await_line(lambda line: "resumed" in line)
    for _ in range(kills):
        time.sleep(chance.choice((0.05, 0.2, 0.6, 1.5)))
        if running.process.poll() is not None or any("finished" in line for line in running.log()):
            break
        slot, pid = chance.choice(sorted(running.living().items()))
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            killed[slot] += 1
    return killed


@pytest.mark.timeout(600)
def test_survivors_stay_and_no_sample_is_lost_or_repeated(tmp_path: Path) -> None:
    wanted = undisturbed(tmp_path / "undisturbed", "ddp", workers=1, steps=400)
    with job(tmp_path / "killed", "ddp", workers=3, steps=400) as running:
        killed = kill_at_random(running, seed=1, kills=5)
        running.finish()
    assert killed
    assert_same(weights(running.folder), wanted)
    assert_exact(running.folder)
    assert_survivors_stayed(running, killed)


@pytest.mark.timeout(600)
def test_no_step_is_lost_when_one_of_three_is_killed(tmp_path: Path) -> None:
    with job(tmp_path / "job", "ddp", workers=3, steps=120) as running:
        inject(running, 1, "import os\nif step == 37: path.unlink(); os.kill(os.getpid(), 9)")
        running.finish()
    survivor = next(line for line in running.log() if line.get("resumed"))
    assert survivor["lost"] == 0
    assert survivor["resumed"] >= 37
    assert_survivors_stayed(running, {1: 1})


@pytest.mark.timeout(600)
def test_sharded_job_recovers_in_its_processes_bit_for_bit(tmp_path: Path) -> None:
    wanted = undisturbed(tmp_path / "undisturbed", "fsdp", workers=2, steps=90)
    with job(tmp_path / "killed", "fsdp", workers=2, steps=90) as running:
        inject(running, 1, "import os\nif step == 47: path.unlink(); os.kill(os.getpid(), 9)")
        running.finish()
    assert_same(weights(running.folder), wanted)
    assert_exact(running.folder)
    assert_survivors_stayed(running, {1: 1})
    again = {line["resumed"] for line in running.log() if line.get("resumed")}
    assert again
    assert again <= {20, 40}, again  # A snapshot that was under way when a rank died may be lost.
    assert {line["world"] for line in running.log() if "world" in line} == {2}


@pytest.mark.timeout(600)
def test_error_of_a_rank_is_shown_with_its_place_and_the_others_stay(tmp_path: Path) -> None:
    with job(tmp_path / "job", "ddp", workers=3, steps=100) as running:
        inject(running, 2, "if step == 25: path.unlink(); raise ValueError('a bad batch')")
        running.finish()
    assert "ValueError: a bad batch" in running.output()
    assert "rank 2 (" in running.output()
    assert running.output().index("ValueError: a bad batch") < running.output().index("resumed at step")
    assert_survivors_stayed(running, {2: 1})
    assert_exact(running.folder)


@pytest.mark.timeout(600)
def test_error_that_comes_back_ends_the_run(tmp_path: Path) -> None:
    with job(tmp_path / "job", "ddp", workers=2, steps=100) as running:
        inject(running, 1, "if step >= 25: raise ValueError('a bug')")
        assert running.process.wait(LIMIT_S) == 1
    assert "not started again: the same error came back" in running.output()


@pytest.mark.timeout(600)
def test_without_restarts_left_a_lost_rank_ends_the_run_as_failed(tmp_path: Path) -> None:
    with job(tmp_path / "job", "ddp", workers=2, steps=100, flags=["--max-restarts=0"]) as running:
        inject(running, 1, "import os\nif step == 25: path.unlink(); os.kill(os.getpid(), 9)")
        assert running.process.wait(LIMIT_S) == 128 + signal.SIGKILL, running.output()


@pytest.mark.timeout(600)
def test_stopped_rank_is_waited_for_and_continues(tmp_path: Path) -> None:
    with job(tmp_path / "job", "ddp", workers=2, steps=150) as running:
        running.await_line(lambda line: "resumed" in line, count=2)
        pid = running.living()[1]
        os.kill(pid, signal.SIGSTOP)
        time.sleep(2.0)  # What is tested is that nothing happens meanwhile.
        os.kill(pid, signal.SIGCONT)
        running.finish()
    assert {slot: len(pids) for slot, pids in running.pids().items()} == {0: 1, 1: 1}
    assert_exact(running.folder)


@pytest.mark.timeout(600)
def test_rank_that_hangs_while_another_is_lost_is_left_behind_and_replaced(tmp_path: Path) -> None:
    with job(tmp_path / "job", "ddp", workers=3, steps=600, TIMEOUT_S="4") as running:
        inject(running, 2, "import time\nif step == 30: path.unlink(); time.sleep(600)")
        inject(running, 1, "import os\nif step == 30: path.unlink(); os.kill(os.getpid(), 9)")
        running.finish()
    assert "it did not leave within 4 s" in running.output()
    assert "rank 2 was asked to leave and has not" in running.output()
    assert "in faults" in running.output()  # Where it hangs.
    assert_survivors_stayed(running, {1: 1, 2: 1})
    assert_exact(running.folder)


@pytest.mark.timeout(600)
def test_workers_of_other_machines_stay_when_one_is_lost_and_when_a_machine_is(tmp_path: Path) -> None:
    folder = tmp_path / "job"
    coordinator = CoordinatorProcess(tmp_path / "coordinator").start()
    endpoint = coordinator.address
    flags = ["--nnodes=1:2", f"--rdzv-endpoint={endpoint}", "--rdzv-id=two", "--local-addr=127.0.0.1"]
    options: dict[str, Any] = {"workers": 2, "steps": 600, "flags": flags, "GLOO_SOCKET_IFNAME": "lo"}
    try:
        with (
            job(folder, "ddp", **options, memory=str(tmp_path / "a"), MACHINE="a") as first,
            job(folder, "ddp", **options, memory=str(tmp_path / "b"), MACHINE="b") as second,
        ):
            first.await_line(lambda line: line.get("world") == 4, count=4)
            first.await_line(lambda line: "resumed" in line, count=4)
            inject(
                first, 1, "import os\nif os.environ['MACHINE'] == 'b': path.unlink(); os.kill(os.getpid(), 9)"
            )
            first.await_line(lambda line: line.get("world") == 4, count=8)
            of_a = {line["pid"] for line in first.log() if line["machine"] == "a"}
            second.process.kill()  # Its workers end with it.
            second.process.wait()
            first.finish()
            lost_by_gloo = first.output().count("and is replaced")
            after = {line["pid"] for line in first.log() if line["machine"] == "a"}
            assert len(of_a) <= len(after) <= 2 + lost_by_gloo, first.output()
    finally:
        coordinator.stop()
    assert_exact(folder)


@pytest.mark.timeout(600)
def test_asked_to_stop_a_recoverable_job_saves_and_ends(tmp_path: Path) -> None:
    with job(tmp_path / "job", "ddp", workers=2, steps=100_000) as running:
        running.await_line(lambda line: "resumed" in line, count=2)
        running.process.send_signal(signal.SIGTERM)
        assert running.process.wait(LIMIT_S) in (0, 143), running.output()
    assert "is saved, ending" in running.output()
    assert_exact(running.folder)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("workers", "seed"), [(3, 11), (8, 12)])
def test_hundred_kills_at_random_moments(tmp_path: Path, workers: int, seed: int) -> None:
    steps = 20_000 if workers == 3 else 8_000
    with job(tmp_path / "killed", "ddp", workers=workers, steps=steps, STEP_S="0.005") as running:
        killed = kill_at_random(running, seed=seed, kills=100)
        assert sum(killed.values()) >= 80
        running.process.wait(3000)
    wanted = undisturbed(tmp_path / "undisturbed", "ddp", workers=1, steps=steps)
    assert_same(weights(running.folder), wanted)
    assert_exact(running.folder)
    assert_survivors_stayed(running, killed)
