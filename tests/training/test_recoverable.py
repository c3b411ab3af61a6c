"""A recoverable job through real kills, errors, stops and hangs: survivors stay, and nothing is lost or trained twice."""

from __future__ import annotations

import ast
import os
import random
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch

from strata.coordinator.journal.sqlite import read_story
from strata.core.jobs.regroup import SPARE_LOSSES, Limits
from strata.core.messages import WorkerFailed, WorkerJoined
from strata.data.history import audit_epochs
from strata.launch.coordinator import CoordinatorProcess
from strata.torch_compat.aborting import ProcessGroups
from strata.training.recoverable import EXIT_STUCK, _Recovery
from tests.support import Coordinator, as_machine, eventually
from tests.support_programs import program

SCRIPT = Path(__file__).parent / "recoverable_script.py"
LIMIT_S = 240.0
SNAPSHOT_EVERY = 20
"""As the script has it."""


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

    def spares(self) -> list[int]:
        """All that were started, oldest first."""
        return [line["pid"] for line in self.log() if "spare" in line]

    def await_spare(self, number: int = 1) -> int:
        """The process of the spare that was started as this one."""
        self.await_line(lambda line: "spare" in line, count=number)
        return self.spares()[number - 1]

    def await_line(self, matches: Callable[[dict[str, Any]], bool], *, count: int = 1) -> None:
        def found() -> bool:
            has_ended = self.process.poll() is not None
            if sum(map(matches, self.log())) >= count:
                return True
            assert not has_ended, self.output()
            return False

        eventually(found, within_s=LIMIT_S)

    def output(self) -> str:
        return (self.folder / "output").read_text()

    def release(self) -> None:
        """A job that was `held` may end."""
        (self.folder / "held").unlink()

    def finish(self) -> None:
        assert self.process.wait(LIMIT_S) == 0, self.output()


def held(folder: Path) -> Path:
    """Of a job that is not to end before it is released."""
    folder.mkdir()
    (folder / "held").touch()
    return folder


@contextmanager
def job(
    folder: Path,
    kind: str,
    *,
    workers: int,
    steps: int,
    flags: Sequence[str] = (),
    namespace: str | None = None,
    host: str | None = None,
    **variables: str,
) -> Iterator[Job]:
    """An agent and its workers: a machine of its own, with memory of its own below `memory` or `folder`. `namespace` is that
    of its network, and `host` its name, if it has one of its own."""
    folder.mkdir(exist_ok=True)
    root = Path(__file__).parents[2]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")])),
        "CUDA_VISIBLE_DEVICES": "",  # Several workers would have one device, and NCCL refuses that.
    }
    memory = variables.pop("memory", str(folder))
    Path(memory).mkdir(exist_ok=True)
    command = [sys.executable, "-m", "strata.cli.main", "torchrun", f"--nproc-per-node={workers}", *flags]
    if namespace is not None:
        command = [program("ip"), "netns", "exec", namespace, *command]
    with open(folder / "output", "a") as output:
        process = subprocess.Popen(
            [*command, str(SCRIPT), str(folder), kind, str(steps)],
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
            env={**environment, "STRATA_MEMORY_ROOT": memory, **variables},
            preexec_fn=as_machine(host) if host is not None else None,
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
    if gloo_lost_the_last(running):
        return
    output = running.output()
    pids = running.pids()
    assert sum(map(len, pids.values())) <= len(pids) + sum(killed.values()) + output.count(
        "and is replaced"
    ), output
    assert "are restarted" not in output


def assert_only_these_were_replaced(running: Job, killed: set[int]) -> None:
    """And whom gloo had lost."""
    if gloo_lost_the_last(running):
        return
    replaced = {pid for pids in running.pids().values() for pid in pids[:-1]}
    assert replaced <= killed | lost_by_gloo(running), running.output()
    assert "are restarted" not in running.output()


def lost_by_gloo(running: Job) -> set[int]:
    return set(map(int, re.findall(rf"pid (\d+)\) ended with status {EXIT_STUCK}", running.output())))


def gloo_lost_the_last(running: Job) -> bool:
    """Whoever was left when another was killed: then nobody has stayed, and all are started again."""
    is_restarted = "are restarted: no worker of this machine is left" in running.output()
    return is_restarted and bool(lost_by_gloo(running))


def workers_of(running: Job) -> list[int]:
    """Their numbers, also of those that are still starting: the children of those that the agent has them forked by."""
    return [worker for server in children(running.process.pid) for worker in children(server)]


def children(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*"):
        with suppress(OSError):  # The thread has ended.
            found += map(int, (task / "children").read_text().split())
    return found


def inject(running: Job, slot: int, program: str) -> None:
    """Python that a worker runs after every step, until it removes `path`."""
    path = running.folder / "fault"
    path.write_text(textwrap.dedent(program))
    path.rename(running.folder / f"faults-{slot}")


def kill_at_random(running: Job, *, seed: int, kills: int) -> set[int]:
    """Kill so many workers at moments that have nothing to do with what they do, but one is always left that trains: their
    numbers."""
    chance, killed = random.Random(seed), set[int]()
    running.await_line(lambda line: "resumed" in line)
    while len(killed) < kills:
        time.sleep(chance.choice((0.05, 0.2, 0.6, 1.5)))
        if running.process.poll() is not None or any("finished" in line for line in running.log()):
            break
        living = [pid for pid in workers_of(running) if pid not in killed]
        training = {line["pid"] for line in running.log() if "resumed" in line}.intersection(living)
        if living and training - {pid := chance.choice(living)}:
            with suppress(ProcessLookupError):  # It has ended by itself.
                os.kill(pid, signal.SIGKILL)
                killed.add(pid)
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
    assert_only_these_were_replaced(running, killed)


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
    with job(tmp_path / "job", "ddp", workers=2, steps=100_000) as running:
        inject(running, 1, "if step >= 25: raise ValueError('a bug')")
        assert running.process.wait(LIMIT_S) == 1, running.output()
    assert "not started again: the same error came back" in running.output()


@pytest.mark.timeout(600)
def test_without_restarts_left_a_lost_rank_ends_the_run_as_failed(tmp_path: Path) -> None:
    with job(tmp_path / "job", "ddp", workers=2, steps=100, flags=["--max-restarts=0"]) as running:
        inject(running, 1, "import os\nif step == 25: path.unlink(); os.kill(os.getpid(), 9)")
        assert running.process.wait(LIMIT_S) == 128 + signal.SIGKILL, running.output()


@pytest.mark.timeout(600)
def test_stopped_rank_is_waited_for_and_continues(tmp_path: Path) -> None:
    with job(held(tmp_path / "job"), "ddp", workers=2, steps=150) as running:
        running.await_line(lambda line: "resumed" in line, count=2)
        pid = running.living()[1]
        os.kill(pid, signal.SIGSTOP)
        time.sleep(2.0)  # What is tested is that nothing happens meanwhile.
        os.kill(pid, signal.SIGCONT)
        running.release()
        running.finish()
    assert {slot: len(pids) for slot, pids in running.pids().items()} == {0: 1, 1: 1}
    assert_exact(running.folder)


@pytest.mark.timeout(600)
def test_rank_that_hangs_while_another_is_lost_is_left_behind_and_replaced(tmp_path: Path) -> None:
    with job(tmp_path / "job", "ddp", workers=3, steps=600, TIMEOUT_S="15") as running:
        inject(running, 2, "import time\nif step == 30: path.unlink(); time.sleep(600)")
        inject(running, 1, "import os\nif step == 30: path.unlink(); os.kill(os.getpid(), 9)")
        running.finish()
    assert "it did not leave within 15 s" in running.output()
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
            job(held(folder), "ddp", **options, memory=str(tmp_path / "a"), MACHINE="a") as first,
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
            first.release()
            first.finish()
            lost_by_gloo = first.output().count("and is replaced")
            after = {line["pid"] for line in first.log() if line["machine"] == "a"}
            assert len(of_a) <= len(after) <= 2 + lost_by_gloo, first.output()
    finally:
        coordinator.stop()
    assert_exact(folder)


def assert_nobody_is_left(running: Job) -> None:
    """Of all processes that the run has had."""
    for pid in {line["pid"] for line in running.log()}:
        with suppress(ProcessLookupError):
            os.kill(pid, 0)
            pytest.fail(f"process {pid} is left:\n{running.output()}")


@pytest.mark.timeout(600)
def test_spare_takes_the_rank_of_a_lost_worker_and_another_stands_by(tmp_path: Path) -> None:
    with job(held(tmp_path / "job"), "ddp", workers=3, steps=600, flags=["--spares=1"]) as running:
        spare = running.await_spare()
        inject(running, 1, "import os\npath.unlink(); os.kill(os.getpid(), 9)")
        running.await_spare(2)
        running.await_line(lambda line: line.get("world") == 3 and line["pid"] == spare)
        running.release()
        running.finish()
    assert running.pids()[1][1:] == [spare], running.output()
    assert f"a spare (pid {spare}) replaces rank 1" in running.output()
    entered = [line for line in running.log() if line["pid"] == spare and "entered" in line]
    assert {(line["slot"], line["local"]) for line in entered} == {(1, 1)}
    # Whoever has not left in time enters later.
    assert (entered[-1]["rank"], entered[-1]["world"]) == (1, 3)
    assert next(line["spare"] for line in running.log() if "spare" in line) == "3"  # Beyond all ranks.
    assert_exact(running.folder)
    assert_nobody_is_left(running)


@pytest.mark.timeout(600)
def test_sharded_ranks_continue_at_once_with_a_spare_bit_for_bit(tmp_path: Path) -> None:
    wanted = undisturbed(tmp_path / "undisturbed", "fsdp", workers=2, steps=300)
    with job(held(tmp_path / "killed"), "fsdp", workers=2, steps=300, flags=["--spares=1"]) as running:
        spare = running.await_spare()
        inject(running, 0, "import os\npath.unlink(); os.kill(os.getpid(), 9)")
        running.await_line(lambda line: "resumed" in line and line["pid"] == spare)
        running.release()
        running.finish()
    assert_same(weights(running.folder), wanted)
    assert_exact(running.folder)
    assert running.pids()[0][1:] == [spare], running.output()
    assert {line["world"] for line in running.log() if "world" in line} == {2}
    assert_nobody_is_left(running)


@pytest.mark.timeout(600)
def test_only_worker_of_a_machine_is_lost_and_its_spare_continues(tmp_path: Path) -> None:
    with job(held(tmp_path / "job"), "ddp", workers=1, steps=400, flags=["--spares=1"]) as running:
        spare = running.await_spare()
        inject(running, 0, "import os\npath.unlink(); os.kill(os.getpid(), 9)")
        running.await_line(lambda line: "resumed" in line and line["pid"] == spare)
        running.release()
        running.finish()
    assert running.pids()[0][1:] == [spare], running.output()
    assert "are restarted" not in running.output()
    assert_exact(running.folder)


@pytest.mark.timeout(600)
def test_spares_that_are_killed_disturb_nobody_and_are_given_up_in_the_end(tmp_path: Path) -> None:
    with job(tmp_path / "job", "ddp", workers=2, steps=100_000, flags=["--spares=1"]) as running:
        for number in range(1, SPARE_LOSSES + 1):
            os.kill(running.await_spare(number), signal.SIGKILL)
        eventually(lambda: "no more are started" in running.output(), within_s=LIMIT_S)
        assert {line["entered"] for line in running.log() if "entered" in line} == {0}
        inject(running, 1, "import os\npath.unlink(); os.kill(os.getpid(), 9)")
        running.await_line(lambda line: line.get("world") == 2, count=4)
        running.await_line(lambda line: "resumed" in line and line["pid"] == running.pids()[1][1])
        running.process.send_signal(signal.SIGTERM)
        assert running.process.wait(LIMIT_S) in (0, 143), running.output()
    assert len(running.spares()) == SPARE_LOSSES
    assert running.pids()[1][1] not in running.spares()
    assert_exact(running.folder)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("end", ["asked to stop", "fails"])
def test_spares_end_with_the_run(tmp_path: Path, end: str) -> None:
    with job(tmp_path / "job", "ddp", workers=2, steps=100_000, flags=["--spares=2"]) as running:
        running.await_line(
            lambda line: "resumed" in line, count=2
        )  # Who has not begun to train has nothing to save.
        running.await_spare(2)
        if end == "fails":
            inject(running, 1, "raise ValueError('a bug')")
            assert running.process.wait(LIMIT_S) == 1, running.output()
        else:
            running.process.send_signal(signal.SIGTERM)
            assert running.process.wait(LIMIT_S) in (0, 143), running.output()
            assert "is saved, ending" in running.output()
    assert_nobody_is_left(running)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_no_sample_is_lost_or_repeated_when_workers_and_spares_are_killed(tmp_path: Path, kind: str) -> None:
    wanted = undisturbed(tmp_path / "undisturbed", kind, workers=2 if kind == "fsdp" else 1, steps=400)
    with job(tmp_path / "killed", kind, workers=2, steps=400, flags=["--spares=1"]) as running:
        # However long a spare takes to start, there are steps left to be killed in.
        inject(running, 0, "import time\nwhile step == 20 and path.exists(): time.sleep(0.02)")
        running.await_spare()
        (running.folder / "faults-0").unlink()
        killed = kill_at_random(running, seed=4, kills=5)
        running.finish()
    assert killed
    assert_same(weights(running.folder), wanted)
    assert_exact(running.folder)
    assert_nobody_is_left(running)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_machine_beyond_those_of_the_world_stands_by_and_takes_a_lost_ones_place(
    tmp_path: Path, kind: str
) -> None:
    folder = tmp_path / "job"
    coordinator = CoordinatorProcess(tmp_path / "coordinator").start()
    flags = [
        *("--nnodes=2" if kind == "fsdp" else "--nnodes=1:2", f"--rdzv-endpoint={coordinator.address}"),
        *("--rdzv-id=three", "--local-addr=127.0.0.1"),
    ]
    options: dict[str, Any] = {"workers": 1, "steps": 1000, "flags": flags, "GLOO_SOCKET_IFNAME": "lo"}

    def machine(name: str) -> Any:
        return job(folder, kind, **options, memory=str(tmp_path / name), MACHINE=name)

    try:
        held(folder)
        with machine("a") as first, machine("b") as second:
            first.await_line(lambda line: line.get("world") == 2, count=2)
            with machine("c") as third:
                third.await_line(lambda line: line["machine"] == "c" and "wait" in line)
                first.await_line(lambda line: "resumed" in line, count=2)
                second.process.kill()  # Its worker ends with it.
                second.process.wait()
                third.await_line(lambda line: line["machine"] == "c" and "resumed" in line)
                first.release()
                first.finish()
                third.finish()
    finally:
        coordinator.stop()
    output = first.output()
    assert "this one is on standby until one of them is lost" in output
    waited = {line["pid"] for line in first.log() if "wait" in line and line["machine"] == "c"}
    entered = {line["pid"] for line in first.log() if "entered" in line and line["machine"] == "c"}
    assert entered <= waited, output  # The process that stood by is the one that trains.
    of_a = {line["pid"] for line in first.log() if line["machine"] == "a"}
    assert len(of_a) <= 1 + output.count("and is replaced"), output
    assert_exact(folder)
    assert_nobody_is_left(first)


@pytest.mark.timeout(600)
def test_machine_that_was_not_needed_ends_with_the_run(tmp_path: Path) -> None:
    coordinator = CoordinatorProcess(tmp_path / "coordinator").start()
    flags = [f"--rdzv-endpoint={coordinator.address}", "--rdzv-id=one", "--local-addr=127.0.0.1"]
    options: dict[str, Any] = {"workers": 1, "steps": 300, "flags": flags, "GLOO_SOCKET_IFNAME": "lo"}
    try:
        with job(tmp_path / "job", "ddp", **options, memory=str(tmp_path / "a"), MACHINE="a") as first:
            # Before it has begun, for else it might end first.
            inject(first, 0, "import time\nwhile step and path.exists(): time.sleep(0.02)")
            first.await_line(lambda line: "resumed" in line)
            with job(tmp_path / "job", "ddp", **options, memory=str(tmp_path / "b"), MACHINE="b") as second:
                second.await_line(lambda line: "wait" in line)
                (first.folder / "faults-0").unlink()
                first.finish()
                second.finish()
    finally:
        coordinator.stop()
    assert "this machine was on standby and not needed" in first.output()
    assert not any("entered" in line for line in first.log() if line["machine"] == "b")
    assert_nobody_is_left(first)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("kind", "slot"), [("ddp", 0), ("ddp", 1), ("fsdp", 1)])
def test_who_survives_stays_the_same_worker_whatever_its_rank(tmp_path: Path, kind: str, slot: int) -> None:
    coordinator = Coordinator(tmp_path / "coordinator").start()
    try:
        options: dict[str, Any] = {"COORDINATOR_ADDR": coordinator.address, "STRATA_JOB_ID": "survives"}
        with job(tmp_path / "job", kind, workers=3, steps=100_000, **options) as running:
            running.await_line(lambda line: "resumed" in line, count=3)
            names = {f"survives-rank{number}" for number in range(3)}

            def workers() -> dict[str, int] | None:
                found = {w["id"]: w["incarnation"] for w in coordinator.get("/api/workers")}
                return found if found.keys() == names else None

            def recoveries() -> list[dict[str, Any]]:
                return list(coordinator.get("/api/recoveries"))

            def has_begun() -> bool:
                """Who is lost before the first step was made leaves nothing to recover."""
                return all(w["current_step"] for w in coordinator.get("/api/workers"))

            lost = f"survives-rank{slot}"
            before: dict[str, int] = eventually(workers, within_s=LIMIT_S)

            def workers_afterwards() -> dict[str, int] | None:
                """A new process registers beside its first steps, of which the others may report sooner."""
                found = workers()
                return found if found and found[lost] != before[lost] else None

            eventually(has_begun, within_s=LIMIT_S)
            pid = running.living()[slot]
            os.kill(pid, signal.SIGKILL)

            def has_recovered() -> bool:
                made = recoveries()
                return any(lost in r["joined"] for r in made) and made[0]["world_after"] == 3

            eventually(has_recovered, within_s=LIMIT_S, what=lambda: str(recoveries()))
            after = eventually(workers_afterwards, within_s=LIMIT_S)
            processes = coordinator.get("/api/jobs/survives/goodput")["processes"]
            made = recoveries()[::-1]
    finally:
        coordinator.stop()
    if "is stuck in an aborted collective" in running.output():
        pytest.skip("gloo has lost a survivor's send, and it was replaced")
    assert {name for name in names if after[name] != before[name]} == {lost}
    assert processes <= 4  # A survivor is no new process.
    story = [entry.event for entry in read_story(coordinator.data_dir)]
    joins = [e.spec.worker_id for e in story if isinstance(e, WorkerJoined)]
    assert sorted(joins) == sorted([*names, lost])
    ended = {e.worker_id for e in story if isinstance(e, WorkerFailed)}
    assert ended <= {lost}  # Unless its replacement was faster.
    # Whoever has not left in time is missed at first, and there later.
    assert lost in made[0]["lost"]
    assert made[0]["survived"] + len(made[0]["lost"]) == 3
    joined = next(recovery for recovery in made if recovery["joined"])
    assert joined["joined"] == [lost]
    assert joined["survived"] == joined["world_after"] - 1
    # Its connection may have ended long before its process.
    killed = f"rank {slot} ({socket.gethostname()}, pid {pid}) was killed by SIGKILL"
    assert made[0]["cause"] in (killed, f"rank {slot} has ended")
    for recovery in made:  # Reported by one that has survived it.
        assert recovery["worker_id"] != lost
        assert set(recovery["phases_s"]) >= {"abort", "regroup", "load", "first_step"}


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
@pytest.mark.parametrize(("workers", "steps", "seed"), [(3, 5_000, 11), (8, 5_000, 12)])
def test_hundred_kills_at_random_times(tmp_path: Path, workers: int, steps: int, seed: int) -> None:
    with job(tmp_path / "killed", "ddp", workers=workers, steps=steps, STEP_S="0.02") as running:
        killed = kill_at_random(running, seed=seed, kills=100)
        assert running.process.wait(3000) == 0, running.output()
    lost = sorted(line["lost"] for line in running.log() if "lost" in line)
    print(
        f"{len(killed)} of {workers} ranks were killed, {len(lost_by_gloo(running))} lost by gloo; steps lost at {len(lost)} "
        f"entries: {lost[-1]} at most, in all but {len(lost) - lost.count(0)} of them none"
    )
    assert len(killed) == 100
    wanted = undisturbed(tmp_path / "undisturbed", "ddp", workers=1, steps=steps)
    assert_same(weights(running.folder), wanted)
    assert_exact(running.folder)
    assert_only_these_were_replaced(running, killed)
    assert median(lost) == 0
    assert lost[-1] <= 2 * SNAPSHOT_EVERY, lost  # A snapshot that was under way when a rank died may be lost.


def test_rank_that_an_abort_cannot_free_is_watched_meanwhile() -> None:
    """An abort waits for a group that is still being made, which may be for ever."""
    watched: list[bool] = []

    class Stuck(ProcessGroups):
        def abort(self) -> None:
            watched.extend(timer.is_alive() for timer in recovery._late)

    recovery = _Recovery[None](lambda run: None, Limits(), None, None)
    recovery._groups = Stuck()
    recovery._observe({"kind": "leave", "reason": "a rank was lost"})
    recovery._stop_watching()
    assert watched == [True, True]
