"""An elastic job of several processes under real agents: killed, stopped, asked to leave, resized, and taken over.

Steps are held where a test wants to look (`rank_script`), so what is lost and what is restored is known exactly.
"""

from __future__ import annotations

import os
import random
import secrets
import signal
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import strata
from strata.checkpoint.catalog.listing import Catalog
from strata.checkpoint.copying.staging import MARK_NAME, Snapshot, read_snapshot
from strata.core.text import counted
from strata.launch.torchrun import Agent, TorchrunSpec
from strata.shared_memory import ROOT_VARIABLE
from strata.stores import open_store
from tests.checkpoint.states import assert_same
from tests.checkpoint.test_ownership import ISOLATION, can_isolate
from tests.stores.mounts import small_tmpfs
from tests.support import Coordinator, eventually
from tests.support_programs import program
from tests.training.loops import BATCH, SAMPLES, steps_in
from tests.training.rank_script import LOADERS_LOOK_EVERY_S

pytestmark = pytest.mark.timeout(600)

ROOT = Path(__file__).parents[2]
STEPS = 2 * SAMPLES // BATCH
LONG, STEP_S = 20 * BATCH, 0.1
"""So many samples, and so long a step, that a job which is asked to leave does so before it has ended by itself."""
LEFT = 128 + signal.SIGTERM
"""Exit status of an agent that left because it was asked to: schedulers must be able to tell that training has not ended."""
PATIENCE_S = 120.0
"""For anything that happens at once on a machine with nothing else to do."""


@dataclass(frozen=True, slots=True)
class Reached:
    """A rank is about to make a step, having made so many."""

    rank: int
    step: int
    pid: int
    world: int
    generation: int


@dataclass
class Launch:
    """Agents that were started as one, and their job."""

    folder: Path
    """Of the job: other launches may have the same."""
    endpoint: str = ""
    """Where several agents meet."""
    nodes: tuple[int, int] = (1, 1)
    farther: tuple[Path, ...] = ()
    """Destinations beside the first."""
    script: dict[str, Any] = field(default_factory=dict)
    """The script's options."""
    name: str = field(default_factory=lambda: secrets.token_hex(4))
    run_id: str = ""
    """What its user calls it; by default its name."""
    agents: list[Agent] = field(default_factory=list)

    def start(
        self, *, ranks: int = 2, memory: str = "memory", spec: type[TorchrunSpec] = TorchrunSpec
    ) -> Agent:
        """One agent, which is a machine: those with different memory share none."""
        (self.folder / memory).mkdir(parents=True, exist_ok=True)
        self._control.mkdir(exist_ok=True)
        options = {"control": self._control, **self.script}
        arguments = [f"--checkpoints={folder}" for folder in (self.checkpoints, *self.farther)]
        arguments += [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
        plan = spec(
            run_id=self.run_id or self.name,
            arguments=["-m", "tests.training.rank_script", *arguments],
            nproc=ranks,
            min_nodes=self.nodes[0],
            max_nodes=self.nodes[1],
            rdzv_endpoint=self.endpoint,
            environment={ROOT_VARIABLE: str(self.folder / memory), "PYTHONPATH": str(ROOT)},
        )
        agent = Agent(plan, log=self.folder / f"{self.name}-{len(self.agents)}.log")
        self.agents.append(agent)
        return agent

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    @property
    def _control(self) -> Path:
        return self.folder / f"control-{self.name}"

    @property
    def output(self) -> str:
        return "".join(agent.log.read_text(errors="replace") for agent in self.agents)

    def hold(self, step: int) -> None:
        """Let nobody make more steps than this."""
        self._control.mkdir(parents=True, exist_ok=True)
        fresh = self._control / "hold.new"
        fresh.write_text(str(step))
        fresh.rename(self._control / "hold")

    def release(self) -> None:
        (self._control / "hold").unlink()

    def reached(self) -> list[Reached]:
        try:
            lines = (self._control / "events").read_text().splitlines()
        except FileNotFoundError:
            return []
        return [Reached(*map(int, line.split())) for line in lines]

    def wait_for(self, step: int, *, world: int, generation: int = 0) -> dict[int, int]:
        """Process ids by rank, once all ranks of one world have made so many steps."""

        def everybody() -> dict[int, int]:
            found = [e for e in self.reached() if e.generation >= generation]
            newest = max((e.generation for e in found), default=0)
            ranks = {e.rank: e.pid for e in found if (e.generation, e.step, e.world) == (newest, step, world)}
            return ranks if len(ranks) == world else {}

        found: dict[int, int] = self._eventually(everybody, f"{world} ranks at step {step}")
        return found

    def wait_for_world(self, size: int, *, generation: int) -> None:
        def is_there() -> bool:
            return any(e.world == size and e.generation >= generation for e in self.reached())

        self._eventually(is_there, f"a world of {size}")

    def wait_for_request(self, pids: Iterable[int]) -> None:
        """One of these processes knows that it was asked to leave."""
        files = [self._control / f"asked-{pid}" for pid in pids]
        self._eventually(lambda: any(file.exists() for file in files), "a rank that was asked to leave")

    def wait_for_line(self, text: str, *, count: int = 1) -> list[str]:
        def lines() -> list[str]:
            found = [line for line in self.output.splitlines() if text in line]
            return found if len(found) >= count else []

        found: list[str] = self._eventually(lines, f"{count} lines with {text!r}")
        return found

    def wait_for_snapshot(self, step: int, *, memory: str = "memory") -> None:
        self._eventually(lambda: step in snapshot_steps(self.folder / memory), f"the snapshot of step {step}")

    def wait_for_checkpoint(self, step: int) -> None:
        self._eventually(lambda: step in steps_in(self.checkpoints), f"the checkpoint of step {step}")

    def ended(self) -> list[int]:
        """The exit status of each agent, once all have ended by themselves."""
        self._eventually(lambda: not any(agent.is_running for agent in self.agents), "the end")
        return [agent.process.returncode for agent in self.agents]

    def kill(self) -> None:
        for agent in self.agents:
            agent.kill()

    def _eventually(self, condition: Callable[[], Any], what: str) -> Any:
        return eventually(condition, within_s=PATIENCE_S, what=lambda: f"{what}\n{self.output[-6000:]}")


Start = Callable[..., Launch]


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Start]:
    """Launches of one job; whatever is left of them at the end is killed."""
    launches: list[Launch] = []

    def create(**options: Any) -> Launch:
        launches.append(Launch(tmp_path, **options))
        return launches[-1]

    yield create
    for each in launches:
        each.kill()


@pytest.fixture(scope="module")
def meeting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Where agents of several machines find each other."""
    server = Coordinator(tmp_path_factory.mktemp("coordinator")).start()
    yield server.address
    server.stop()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What two ranks learn that nobody hurts."""
    calm = Launch(tmp_path_factory.mktemp("calm"))
    calm.start()
    try:
        assert calm.ended() == [0], calm.output
    finally:
        calm.kill()
    return learned(calm.checkpoints)


def learned(folder: Path) -> dict[str, Any]:
    """Weights and optimizer of the newest durable checkpoint."""
    newest = Catalog(open_store(folder)).list().entries[0].manifest
    state = torch.load(folder / newest.parts[0].key, weights_only=True)
    return {name: state[name] for name in ("model_state_dict", "optimizer_state_dict")}


def assert_exact(folder: Path) -> None:
    for epoch in range(2):
        report = strata.audit(folder, "numbers", epoch)
        assert report.exact, report.reason


def snapshots(root: Path) -> list[Snapshot]:
    found = [read_snapshot(mark.parent) for mark in root.rglob(MARK_NAME)]
    return [snapshot for snapshot in found if snapshot is not None]


def identities(root: Path) -> set[str]:
    return {snapshot.manifest.checkpoint_id for snapshot in snapshots(root)}


def snapshot_steps(root: Path) -> list[int]:
    return sorted(snapshot.manifest.step for snapshot in snapshots(root))


def damage(snapshot: Snapshot) -> None:
    with open(snapshot.path, "r+b") as file:
        file.seek(snapshot.path.stat().st_size // 2)
        file.write(b"damage")


def manifests(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.manifest.json")}


@contextmanager
def stopped(agent: Agent) -> Iterator[None]:
    """An agent and everything below it, as in a machine that hangs for a while."""
    processes = [psutil.Process(agent.process.pid)]
    processes += processes[0].children(recursive=True)
    for process in processes:
        process.suspend()
    try:
        yield
    finally:
        for process in processes:
            process.resume()


class OnAnotherMachine(TorchrunSpec):
    """In a process namespace of its own: nobody here can tell who lives there, nor they who lives here."""

    def command(self, *, log_dir: Path | None = None, python: str | None = None) -> list[str]:
        return [program("unshare"), *ISOLATION, *super().command(log_dir=log_dir, python=python)]


def resumed(output: str) -> list[str]:
    """What was printed about each start, from the step on."""
    return [
        line.partition("resumed at step ")[2].partition(" (")[0]
        for line in output.splitlines()
        if "resumed at step " in line
    ]


# --- killed -----------------------------------------------------------------------------------------------------


def test_a_killed_rank_costs_the_steps_since_the_snapshot_and_nothing_else(
    launch: Start, undisturbed: dict[str, Any]
) -> None:
    seed = random.randrange(10**6)
    chance = random.Random(seed)
    print(f"seed {seed}")
    job = launch(script={"snapshot_every": 3, "save_every": 8})
    kills = (chance.randrange(4, 8), chance.randrange(9, STEPS))
    job.hold(kills[0])
    job.start()
    expected = []
    for generation, (at, until) in enumerate(zip(kills, (kills[1], STEPS), strict=True), 1):
        pids = job.wait_for(at, world=2, generation=generation)
        saved = max(step for step in range(at + 1) if step % 3 == 0 or step % 8 == 0)
        job.wait_for_snapshot(saved)
        os.kill(pids[chance.randrange(2)], signal.SIGKILL)
        job.hold(until)
        expected.append(f"{saved} from MEMORY, {counted(at - saved, 'step')} lost")
    assert job.ended() == [0], job.output
    assert resumed(job.output) == expected
    assert_exact(job.checkpoints)
    assert_same(learned(job.checkpoints), undisturbed)


def test_machines_fall_back_to_each_others_snapshots_and_then_to_the_durable_tier(
    launch: Start, meeting: str, undisturbed: dict[str, Any]
) -> None:
    machines = ("memory-a", "memory-b")

    def crash(at: int, *, generation: int, script: dict[str, Any]) -> Launch:
        """Two machines train up to a step and lose their power."""
        job = launch(endpoint=meeting, nodes=(2, 2), script=script)
        job.hold(at)
        for memory in machines:
            job.start(ranks=1, memory=memory)
        job.wait_for(at, world=2, generation=generation)
        for memory in machines:
            job.wait_for_snapshot(at, memory=memory)
        job.kill()
        return job

    def of(memory: str, step: int) -> Snapshot:
        return next(s for s in snapshots(job.folder / memory) if s.manifest.step == step)

    job = crash(7, generation=1, script={})
    damage(of("memory-a", 7))
    job = crash(11, generation=2, script={})
    assert resumed(job.output) == ["7 from MEMORY, 0 steps lost"]

    of("memory-a", 11).path.with_name(MARK_NAME).unlink()  # As if it had not been finished.
    damage(of("memory-b", 11))
    job = crash(14, generation=3, script={})
    assert resumed(job.output) == ["10 from MEMORY, 1 step lost"]

    for memory in machines:
        for snapshot in snapshots(job.folder / memory):
            damage(snapshot)
    job.wait_for_checkpoint(12)
    job = launch(endpoint=meeting, nodes=(2, 2))
    for memory in machines:
        job.start(ranks=1, memory=memory)
    assert job.ended() == [0, 0], job.output
    assert resumed(job.output) == ["12 from NVME, 2 steps lost"]
    assert_exact(job.checkpoints)
    assert_same(learned(job.checkpoints), undisturbed)


def test_loader_processes_do_not_delay_the_survivors(launch: Start) -> None:
    """They hold the sockets of the rank they load for, and look after it only so often."""
    job = launch(script={"loader_workers": 2})
    job.hold(5)
    job.start()
    pids = job.wait_for(5, world=2)
    job.wait_for_snapshot(5)
    survivor = psutil.Process(pids[0])
    killed_s = time.monotonic()
    os.kill(pids[1], signal.SIGKILL)
    job.release()
    psutil.wait_procs([survivor], timeout=PATIENCE_S)
    assert time.monotonic() - killed_s < LOADERS_LOOK_EVERY_S, job.output
    assert job.ended() == [0], job.output
    assert resumed(job.output) == ["5 from MEMORY, 0 steps lost"]
    assert_exact(job.checkpoints)


# --- resized, and asked to leave ---------------------------------------------------------------------------------


def test_three_machines_then_two_then_three_train_each_sample_once(launch: Start, meeting: str) -> None:
    job = launch(endpoint=meeting, nodes=(2, 3), script={"samples": LONG, "step_s": STEP_S})
    job.hold(4)
    *_, lost = [job.start(ranks=1, memory=memory) for memory in ("a", "b", "c")]
    job.wait_for(4, world=3)
    job.wait_for_snapshot(4, memory="a")
    job.hold(9)
    lost.kill()
    job.wait_for(9, world=2, generation=2)
    job.start(ranks=1, memory="d")  # It has the others asked to leave and rejoin.
    job.wait_for_world(3, generation=3)
    job.release()
    statuses = job.ended()
    assert [statuses[n] for n in (0, 1, 3)] == [0, 0, 0], job.output
    assert_exact(job.checkpoints)


def test_when_all_ranks_are_asked_to_stop_they_save_everywhere_and_leave_nothing_in_memory(
    launch: Start,
) -> None:
    far = launch().folder / "far"
    job = launch(farther=(far,), script={"samples": LONG, "step_s": STEP_S, "save_every": 1_000})
    job.hold(5)
    agent = job.start()
    job.wait_for(5, world=2)
    agent.process.send_signal(signal.SIGTERM)
    assert job.ended() == [LEFT], job.output
    (step,) = steps_in(job.checkpoints)
    assert step > 5
    assert steps_in(far) == [step]
    assert list((job.folder / "memory").iterdir()) == []
    again = launch(farther=(far,), script={"samples": LONG, "save_every": 1_000})
    again.start()
    assert again.ended() == [0], again.output
    assert resumed(again.output) == [f"{step} from NVME, 0 steps lost"]
    assert_exact(job.checkpoints)


def test_one_machine_asked_to_stop_keeps_its_images_and_the_other_continues(
    launch: Start, meeting: str
) -> None:
    job = launch(endpoint=meeting, nodes=(1, 2), script={"samples": LONG, "step_s": STEP_S})
    job.hold(5)
    staying, leaving = [job.start(ranks=1, memory=memory) for memory in ("staying", "leaving")]
    pids = job.wait_for(5, world=2)
    leaving.process.send_signal(signal.SIGTERM)
    job.wait_for_request(pids.values())  # Both are held until then, so that the job does not end before.
    job.release()
    job.wait_for_world(1, generation=2)
    job.ended()
    assert staying.process.returncode == 0, staying.tail()
    assert leaving.process.returncode == LEFT, leaving.tail()
    assert snapshot_steps(job.folder / "leaving")
    assert not snapshot_steps(job.folder / "staying")
    assert_exact(job.checkpoints)


def test_a_loop_left_on_all_ranks_ends_with_its_state_durable(launch: Start) -> None:
    job = launch(script={"break_at": 5, "save_every": 1_000})
    job.start()
    assert job.ended() == [0], job.output
    assert steps_in(job.checkpoints) == [5]
    assert list((job.folder / "memory").iterdir()) == []


# --- two of them ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("run_id", ["", "same"], ids=["an id of its own", "the same id"])
def test_a_second_live_launch_is_refused_and_not_restarted_repeatedly(launch: Start, run_id: str) -> None:
    first = launch(run_id=run_id)
    first.hold(3)
    first.start()
    pids = first.wait_for(3, world=2)
    second = launch(run_id=run_id)
    second.start()
    said = second.wait_for_line("is in use by another live job")
    assert f"process {pids[0]} on {socket.gethostname()}" in said[0]
    assert second.ended() == [1], second.output
    assert not second.reached()
    assert second.output.count("waiting: ") <= 2, second.output
    first.release()
    assert first.ended() == [0], first.output
    assert not resumed(first.output)
    assert_exact(first.checkpoints)


def test_a_launch_that_was_taken_over_while_it_was_stopped_publishes_nothing_more(launch: Start) -> None:
    if not can_isolate():
        pytest.skip("process namespaces cannot be made here (are you root?)")
    zombie = launch()
    zombie.hold(6)
    agent = zombie.start()
    zombie.wait_for(6, world=2)
    zombie.wait_for_checkpoint(4)
    zombie.wait_for_snapshot(6)
    with stopped(agent):
        heir = launch()
        heir.hold(10)
        heir.start(spec=OnAnotherMachine)
        heir.wait_for(10, world=2, generation=2)
        heir.wait_for_checkpoint(8)
        heir.wait_for_snapshot(10)
        durable, in_memory = manifests(heir.checkpoints), identities(heir.folder / "memory")
        zombie.release()
    assert zombie.ended() == [1], zombie.output
    assert "generation 2 of this run has started" in zombie.output
    assert len({event.pid for event in zombie.reached()}) == 2, "it was started again and trained"
    assert manifests(heir.checkpoints) == durable
    assert identities(heir.folder / "memory") <= in_memory, "it kept a snapshot"
    heir.release()
    assert heir.ended() == [0], heir.output
    # What is in memory belongs to a process that may be alive.
    assert resumed(heir.output) == ["4 from NVME, 2 steps lost"]
    assert_exact(heir.checkpoints)


# --- with little memory, and with a coordinator -----------------------------------------------------------------


def test_images_that_do_not_fit_cost_snapshots_and_one_warning(launch: Start) -> None:
    job = launch(script={"width": 20_000})
    with small_tmpfs(job.folder / "small", size_bytes=1 << 20):
        job.start(memory="small")
        assert job.ended() == [0], job.output
    assert steps_in(job.checkpoints)[0] == STEPS
    assert job.output.count("there is no space for an image") == 1
    assert_exact(job.checkpoints)


def test_the_coordinator_knows_the_run_and_the_checkpoints_that_exist(
    launch: Start, coordinator: Coordinator
) -> None:
    job = launch(script={"job": "told", "coordinator": coordinator.address, "save_every": 2})
    job.hold(6)
    job.start()
    job.wait_for(6, world=2)
    job.wait_for_checkpoint(6)
    job.hold(14)
    coordinator.kill()
    job.wait_for(14, world=2)
    coordinator.start()

    def connected() -> list[str]:
        ranks = [w["run_id"] for w in coordinator.get("/api/workers") if w["connected"]]
        return ranks if len(ranks) == 2 else []

    runs = eventually(connected, within_s=PATIENCE_S, what="both ranks at the coordinator that came back")
    job.release()
    assert job.ended() == [0], job.output
    kept = [entry.manifest for entry in Catalog(open_store(job.checkpoints)).list().entries]

    def completed() -> set[tuple[str, str, int]]:
        known = [c for c in coordinator.get("/api/checkpoints") if c["status"] == "completed"]
        return {(c["id"], c["run_id"], c["generation"]) for c in known}

    expected = {(m.checkpoint_id, m.run, 1) for m in kept}
    assert len(expected) == 3
    assert completed() == expected
    assert set(runs) == {kept[0].run}
