"""One simulated run: a small fleet trains a short epoch or two while everything that can go wrong does.

Faults come at moments the seed decides, and end. After that, training must reach its end, and the history of the
checkpoints must hold every sample of every epoch exactly once (I1).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import partial
from typing import Any

from strata.core.cluster import Cluster, Limits
from strata.core.fleet.barriers import BarrierLimits
from strata.core.fleet.checkpoints import data_commit
from strata.core.fleet.membership import MembershipLimits
from strata.core.fleet.retention import RetentionLimits
from strata.core.messages import DEFAULT_JOB, DatasetSpec, RegisterDataset
from tests.sim.coordinator import Request, SimCoordinator
from tests.sim.oracle import Oracle, must
from tests.sim.worker import DATASET, Fabric, Plan, Process
from tests.sim.world import Action, Network, World

FAULTS_END_S = 16.0
LIMIT_S = 400.0
STORY_LINES = 80


class SimulationFailed(AssertionError):
    """Carries what is needed to see it again."""

    def __init__(self, world: World, error: Exception, *, kind: str = "") -> None:
        self.seed = world.seed
        story = "\n".join(world.story[-STORY_LINES:])
        super().__init__(
            f"seed {world.seed}: {error}\n\nThe story, up to there:\n{story}\n\n"
            f"See all of it with: python -m tests.sim --seed {world.seed} --story {kind}".rstrip()
        )

    def __reduce__(self) -> tuple[Any, ...]:
        """Simulations run in processes of their own, too."""
        return _again, (self.seed, str(self))


def _again(seed: int, text: str) -> SimulationFailed:
    failure = SimulationFailed.__new__(SimulationFailed)
    Exception.__init__(failure, text)
    failure.seed = seed
    return failure


@dataclass(frozen=True, kw_only=True)
class Result:
    seed: int
    ended_s: float
    crashes: int
    releases: int
    breaks: int
    stale: int
    storage_refusals: int
    incarnations: int
    incidents: int
    forgotten: int
    fingerprint: str
    """Of the whole story: two runs of one seed are the same run."""


class Scenario:
    options = ""
    """Of `python -m tests.sim`, to see it again."""

    def __init__(self, seed: int) -> None:
        self.world = world = World(seed)
        self.network = Network(world)
        self.fabric = Fabric()
        self.oracle = Oracle(lambda: {str(saved.checkpoint_id) for saved in self.fabric.saved})
        limits = Limits(
            membership=MembershipLimits(
                heartbeat_timeout_s=2.5, disconnect_grace_s=0.5, forget_failed_after_s=world.between(3, 60)
            ),
            barriers=BarrierLimits(timeout_s=10.0),
            # With a clock that is set, what is old is forgotten long before its time.
            retention=RetentionLimits(
                checkpoints_s=world.between(0.5, 20),
                barriers_s=world.between(30, 60),
                always_kept=world.random.randint(8, 14),
                slack_s=world.between(0, 2),
                look_every_s=1.0,
            ),
        )
        self._coordinate(limits)
        self.plan = Plan(
            total=world.random.randint(15, 50),
            epochs=world.random.randint(1, 2),
            samples_per_step=world.random.randint(2, 6),
            names_generation=world.chance(0.5),
            names_count=world.chance(0.5),
            greets=world.chance(0.4),
        )
        self.processes: dict[str, Process] = {}
        self.zombies: list[Process] = []
        self.crashes = 0
        self._names = [f"w{number}" for number in range(world.random.randint(1, 5))]
        self._spec = DatasetSpec(
            dataset_id=DATASET,
            path="/d",
            format="jsonl",
            total_samples=self.plan.total,
            shard_size=world.random.randint(2, 11),
            shuffle=False,
            seed=0,
        )

    def _coordinate(self, limits: Limits) -> None:
        self.coordinator = SimCoordinator(self.world, self.network, limits, self.oracle)

    def run(self) -> Result:
        try:
            self._begin()
            ended = self.world.run(until=self._is_over, limit_s=LIMIT_S)
            must(
                ended, f"training did not end within {LIMIT_S} s, though all faults ended at {FAULTS_END_S} s"
            )
            self._check_history()
        except SimulationFailed:
            raise
        except Exception as error:  # A failure without its seed and story is worth nothing.
            raise SimulationFailed(self.world, error, kind=self.options) from error
        story = "\n".join(self.world.story).encode()
        return Result(
            seed=self.world.seed,
            ended_s=self.world.now_s,
            crashes=self.crashes,
            releases=self.oracle.releases,
            breaks=self.oracle.breaks,
            stale=self.oracle.stale,
            storage_refusals=self.oracle.storage_refusals,
            incarnations=self.oracle.account.registered,
            incidents=self.oracle.incidents,
            forgotten=self.oracle.forgotten,
            fingerprint=hashlib.sha256(story).hexdigest(),
        )

    # --- the cast -------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        world = self.world
        world.tell(f"{self.plan}, shards of {self._spec.shard_size}")
        self._register_dataset()  # Alone and undisturbed: the network is still perfect.
        world.after(0.05, self._faults_begin)
        for name in self._names:
            world.after(world.between(0.05, 2.0), partial(self._start, name))

    def _register_dataset(self) -> None:
        registration = Request(worker="", what=RegisterDataset(spec=self._spec), answer=lambda _: None)
        self.coordinator.receive(registration)

    def _start(self, name: str) -> None:
        """Unless it runs, or has run to its end."""
        process = self.processes.get(name)
        if process is None or not (process.alive or process.finished):
            self.processes[name] = Process(
                self.world, self.network, self.coordinator, self.plan, self.fabric, name
            )

    def _is_over(self) -> bool:
        return (
            len(self.processes) >= len(self._names)
            and self.world.now_s > 3.0
            and all(process.finished for process in self.processes.values())
            and not any(zombie.alive for zombie in self.zombies)
        )

    # --- what goes wrong ------------------------------------------------------------------------------------

    def _faults_begin(self) -> None:
        world = self.world
        self.network.loss = world.random.choice([0.0, 0.0, 0.02, 0.1])
        self.network.doubling = world.random.choice([0.0, 0.02, 0.15])
        for _ in range(world.random.randint(0, 12)):
            world.after(world.between(0.5, FAULTS_END_S - 4.0), self._fault)
        world.after(FAULTS_END_S, self._faults_end)

    def _fault(self) -> None:
        faults: list[Action] = [
            self._crash_coordinator,
            self._crash_coordinator,
            self._kill_worker,
            self._kill_worker,
            self._freeze_worker,
            self._freeze_worker,
            self._replace_worker,
            self._flap_stream,
            self._cut_off_worker,
            self._new_worker,
            self._scale_down,
            self._set_wall_clock,
            self._fill_disk,
        ]
        self.world.random.choice(faults)()

    def _faults_end(self) -> None:
        self.world.tell("the faults end")
        self.network.loss = self.network.doubling = 0.0
        self.network.cut_off.clear()
        self._coordinators_recover()
        for process in (*self.zombies, *self.processes.values()):
            process.wake()
        for name in list(self.processes):
            self._start(name)

    def _coordinators_recover(self) -> None:
        self.coordinator.free_disk()
        self.coordinator.start()

    def _crash_coordinator(self) -> None:
        self.crashes += 1
        self.coordinator.crash()
        self.world.after(self.world.between(0.05, 3.0), self.coordinator.start)

    def _somebody(self) -> Process | None:
        alive = [process for process in self.processes.values() if process.alive]
        return self.world.random.choice(alive) if alive else None

    def _kill_worker(self) -> None:
        process = self._somebody()
        if process is not None:
            process.kill()
            name = str(process.worker_id)
            if self.world.chance(0.7):
                self.world.after(self.world.between(0.05, 4.0), lambda: self._start(name))

    def _freeze_worker(self) -> None:
        process = self._somebody()
        if process is not None:
            process.freeze()
            self.world.after(self.world.between(0.2, 7.0), process.wake)

    def _replace_worker(self) -> None:
        """It hangs, somebody starts another in its place, and later it wakes."""
        process = self._somebody()
        if process is not None:
            self._replace(process)
            self.world.after(self.world.between(0.2, 7.0), process.wake)

    def _replace(self, process: Process) -> None:
        process.freeze()
        self.zombies.append(process)
        name = str(process.worker_id)
        del self.processes[name]
        self._start(name)

    def _flap_stream(self) -> None:
        process = self._somebody()
        if process is not None and process.incarnation:
            process.flap()

    def _cut_off_worker(self) -> None:
        process = self._somebody()
        if process is not None:
            name = str(process.worker_id)
            self.world.tell(f"{name} is cut off")
            self.network.cut_off.add(name)
            self.world.after(self.world.between(0.5, 6.0), lambda: self.network.cut_off.discard(name))

    def _new_worker(self) -> None:
        name = f"new{len(self.processes)}"
        self._names.append(name)
        self._start(name)

    def _scale_down(self) -> None:
        process = self._somebody()
        if process is not None:
            self.world.tell(f"{process.worker_id} is asked to leave")
            process.leaving = True

    def _fill_disk(self) -> None:
        self.coordinator.fill_disk()
        self.world.after(self.world.between(0.2, 4.0), self.coordinator.free_disk)

    def _set_wall_clock(self) -> None:
        jump_s = self.world.random.choice([-1e6, -100.0, 100.0, 1e6])
        self.world.tell(f"the wall clock jumps by {jump_s:g} s")
        self.coordinator.wall_s += jump_s

    # --- the end --------------------------------------------------------------------------------------------

    def _check_history(self) -> None:
        """I1: the committed history holds every sample exactly once, as far as training went."""
        cluster = self._final()
        latest = cluster.checkpoints.latest(DEFAULT_JOB)
        everyone_left_early = all(process.leaving for process in self._planned())
        if latest is None:
            must(everyone_left_early, "nothing was ever committed")
            return
        commit = data_commit(latest.data_json)
        for epoch in range(self.plan.epochs):
            coverage = commit.coverage(DATASET, epoch)
            must(not coverage.repeated, f"I1: epoch {epoch} trained {coverage.repeated} more than once")
            whole = coverage.covered.size == self.plan.total
            must(whole or everyone_left_early, f"I1: epoch {epoch} lacks samples: it has {coverage.covered}")

    def _planned(self) -> list[Process]:
        """Who trains what the coordinator shares out."""
        return list(self.processes.values())

    def _final(self) -> Cluster:
        """What is durable."""
        self.coordinator.crash()
        self.coordinator.start()
        assert self.coordinator.cluster is not None
        return self.coordinator.cluster


def simulate(seed: int) -> Result:
    return Scenario(seed).run()
