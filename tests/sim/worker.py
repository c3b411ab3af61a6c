"""A training process: it registers, meets the others, reads its shards, and saves what they trained together.

Written as a generator that yields what it asks for, so that it can be stopped, frozen or killed between any two
questions. A question is asked again until it is answered, under the same ids, as the real library does. One that hears
that another process has taken its place ends; one that was taken for dead, or forgotten, registers again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from typing import Any

from strata.core.cluster import Cluster
from strata.core.data.ledger import DataCommit, RankRecord
from strata.core.faults.failures import Failure
from strata.core.fleet.checkpoints import data_commit
from strata.core.messages import (
    DEFAULT_JOB,
    ArriveAtBarrier,
    BarrierReleased,
    CheckpointId,
    Command,
    DatasetId,
    DeregisterWorker,
    InvalidArgument,
    NotifyCheckpoint,
    PlanEpoch,
    ReconcileCheckpoints,
    Reconciled,
    Registered,
    RegisterWorker,
    ReportFailure,
    ReportRecovery,
    Stale,
    Unknown,
    WorkerId,
    WorkerSpec,
)
from tests.sim.coordinator import Query, Reachable, Request
from tests.sim.world import Network, World

RETRY_S = 1.5
HEARTBEAT_S = 0.6
KEPT = 3
RUN = "run"
HOST = "h"
DATASET = DatasetId("d")

Question = Command | Query | float
"""What a process may wait for: an answer to a command or query, or some seconds."""
Steps = Generator[Question, Any, Any]


class Broken(Exception):
    """The barrier ended without a release."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What every worker of a simulation agrees on."""

    total: int
    epochs: int
    samples_per_step: int
    names_generation: bool
    """Whether arrivals are bound to their generation."""
    names_count: bool
    """Whether barriers name how many they expect, or mean everyone."""
    greets: bool
    """Whether workers also meet at a barrier that knows neither step nor generation, newcomers among them."""


@dataclass(frozen=True, kw_only=True)
class Topology:
    generation: int
    rank: int
    roster: tuple[WorkerId, ...]


@dataclass(frozen=True, kw_only=True)
class Standing:
    """Where training continues from."""

    step: int
    commit: DataCommit
    base: str


class Fabric:
    """What workers tell each other without the coordinator: the collective at the end of a step."""

    def __init__(self) -> None:
        self._records: dict[tuple[int, str, WorkerId], RankRecord] = {}
        self._commits: dict[tuple[int, str], DataCommit] = {}
        self.processes = 0
        self.killed: set[int] = set()
        """Processes whose end an agent may have seen."""
        self.recovered: set[int] = set()
        """Those that a recovery was reported after."""
        self.saved: list[NotifyCheckpoint] = []
        """What is in the store, oldest first, whether or not anybody was told: what uploads and retention work on."""

    def publish(self, checkpoint: NotifyCheckpoint) -> bool:
        """The store's side of a save: only if absent, and not from a generation before the newest one there."""
        newest = max((saved.run_generation for saved in self.saved), default=0)
        known = any(saved.checkpoint_id == checkpoint.checkpoint_id for saved in self.saved)
        if known or checkpoint.run_generation < newest:
            return known
        self.saved.append(checkpoint)
        return True

    def give(self, worker: WorkerId, topology: Topology, standing: Standing, record: RankRecord) -> None:
        known = self._records.setdefault((topology.generation, standing.base, worker), record)
        assert known == record, (
            f"{worker} was given other samples within one generation: {known}, then {record}"
        )

    def gather(self, topology: Topology, standing: Standing) -> DataCommit:
        """What they trained together: the same for each of them."""
        step = (topology.generation, standing.base)
        if step not in self._commits:
            records = [self._records[(*step, worker)] for worker in topology.roster]
            self._commits[step] = standing.commit.next(records, world_size=len(records))
        return self._commits[step]


class Process:
    job_id = DEFAULT_JOB
    run_id = RUN

    def __init__(
        self,
        world: World,
        network: Network,
        coordinator: Reachable,
        plan: Plan,
        fabric: Fabric,
        name: str,
    ) -> None:
        self.world, self.network, self.coordinator = world, network, coordinator
        self.plan, self.fabric = plan, fabric
        self.worker_id = WorkerId(name)
        self.incarnation = 0
        self.alive = True
        self.leaving = False
        self.finished = False
        self._frozen: list[Callable[[], None]] | None = None
        self._asked = 0
        self._born = world.random.getrandbits(64)
        """No two processes share it, however many there are of one name: the library's calls are random numbers of 128 bits."""
        fabric.processes += 1
        self.pid = fabric.processes
        self._steps = self._life()
        world.tell(f"{name} starts")
        world.after(0.0, lambda: self._resume(None))
        world.after(HEARTBEAT_S, self._beat)

    # --- being stopped, frozen and woken --------------------------------------------------------------------

    def kill(self) -> None:
        self.world.tell(f"{self.worker_id} is killed")
        self.alive = False
        self.fabric.killed.add(self.pid)
        if self.world.chance(0.7):  # Otherwise its agent is lost with it.
            self.world.after(self.world.between(0.0, 3.0), self._report_end)
        if self.world.chance(0.8):  # Otherwise nobody notices, and only its silence tells.
            worker, incarnation = self.worker_id, self.incarnation
            drop = self.world.between(0.001, 0.1)
            self.world.after(drop, lambda: self.coordinator.dropped(worker, incarnation))

    def _report_end(self) -> None:
        """What the agent of its machine saw, said until it is answered."""
        failure = Failure(host=HOST, pid=self.pid, at_s=self.world.now_s, exit_code=-9)
        command = ReportFailure(
            failures=(failure,), launch="launch", job_id=self.job_id, decision="restart", reason="killed"
        )
        told = False

        def answered(_: object) -> None:
            nonlocal told
            told = True

        def say() -> None:
            if not told:
                agent = f"agent of {self.worker_id}"
                request = Request(worker=agent, what=command, answer=answered)
                self.network.send(agent, lambda: self.coordinator.receive(request))
                self.world.after(RETRY_S * self.world.between(0.7, 1.3), say)

        say()

    def freeze(self) -> None:
        if self._frozen is None:
            self.world.tell(f"{self.worker_id} freezes")
            self._frozen = []

    def wake(self) -> None:
        if self._frozen is not None:
            self.world.tell(f"{self.worker_id} wakes")
            backlog, self._frozen = self._frozen, None
            for action in backlog:
                self._act(action)

    def flap(self) -> None:
        """The stream drops under a process that is well, and comes back."""
        worker, incarnation = self.worker_id, self.incarnation
        self.world.tell(f"the stream of {worker} drops")
        self.coordinator.dropped(worker, incarnation)
        again = self.world.between(0.05, 1.2)
        self.world.after(again, lambda: self._act(lambda: self._send_beat(connects=True)))

    def _act(self, action: Callable[[], None]) -> None:
        if not self.alive:
            return
        if self._frozen is not None:
            self._frozen.append(action)
        else:
            action()

    # --- asking ---------------------------------------------------------------------------------------------

    def _resume(self, value: object) -> None:
        def go() -> None:
            try:
                question = (
                    self._steps.throw(value) if isinstance(value, Exception) else self._steps.send(value)
                )
            except StopIteration:
                self.world.tell(f"{self.worker_id} has finished")
                self.finished = True
                self.alive = False
                return
            self._asked += 1
            if isinstance(question, float):
                self.world.after(question, lambda: self._resume(None))
            else:
                self._ask(question, self._asked)

        self._act(go)

    def _ask(self, what: Command | Query, number: int) -> None:
        def answered(answer: object) -> None:
            def hear() -> None:
                if self._asked == number and not self.finished:
                    self._asked += 1  # A second answer to the same question is ignored.
                    self._resume(answer)

            self._act(hear)

        def again() -> None:
            if self._asked == number:
                self._ask(what, number)

        request = Request(worker=self.worker_id, what=what, answer=answered)
        self.network.send(self.worker_id, lambda: self.coordinator.receive(request))
        self.world.after(RETRY_S * self.world.between(0.7, 1.3), lambda: self._act(again))

    def _beat(self) -> None:
        if self.alive:
            self._act(lambda: self._send_beat(connects=False))
            self.world.after(HEARTBEAT_S, self._beat)

    def _send_beat(self, *, connects: bool) -> None:
        if self.incarnation:
            worker, incarnation = self.worker_id, self.incarnation
            self.network.send(worker, lambda: self.coordinator.beat(worker, incarnation, connects=connects))

    # --- the life of a worker -------------------------------------------------------------------------------

    def _life(self) -> Steps:
        registrations = 0
        while True:
            registrations += 1
            self.incarnation = 0
            spec = WorkerSpec(
                worker_id=self.worker_id,
                job_id=self.job_id,
                hostname=HOST,
                port=1,
                gpu_count=0,
                memory_bytes=0,
                metadata={"pid": str(self.pid)},
            )
            try:
                registration_id = f"{self._born}-{registrations}"
                reply = yield RegisterWorker(spec=spec, registration_id=registration_id)
                assert isinstance(reply, Registered)
                self.incarnation = reply.incarnation
                self._send_beat(connects=True)
                while not (yield from self._generation()) and not self.leaving:
                    pass
                reason = "scaled down" if self.leaving else "trained to the end"
                yield DeregisterWorker(worker_id=self.worker_id, incarnation=self.incarnation, reason=reason)
            except (Stale, Unknown) as refusal:
                self.world.tell(f"{self.worker_id} hears that it is out ({refusal.cause}): {refusal}")
                if refusal.cause != "superseded":
                    yield 0.1
                    continue
                self.coordinator.listener.superseded(self.worker_id, born=str(self._born))
                self._gave_way()
            return

    def _gave_way(self) -> None:
        """It ends, because another process has its place."""

    def _generation(self) -> Steps:
        """Train until the members change. True when there is nothing left to train."""
        if self.plan.greets:
            yield self._arrival("hello", 0, generation=0, expected=0, timeout_s=2.0)
        topology: Topology = yield self._topology
        try:
            if topology.rank == 0:
                yield from self._reconcile(topology)
            yield from self._barrier("begin", topology.generation, topology)
            standing: Standing = yield self._standing
            if topology.rank == 0 and self.fabric.killed - self.fabric.recovered:
                yield from self._recover(standing, topology)
            while not self.leaving:
                epoch = self._epoch(standing.commit)
                if epoch is None:
                    return True
                yield PlanEpoch(
                    worker_id=self.worker_id,
                    incarnation=self.incarnation,
                    generation=topology.generation,
                    dataset_id=DATASET,
                    epoch=epoch,
                )
                standing = yield from self._step(standing, epoch, topology)
        except (Broken, InvalidArgument):
            yield self.world.between(0.01, 0.2)
        except Stale:
            yield 0.05  # Of this generation, perhaps of this incarnation: the next question tells.
        return False

    def _recover(self, standing: Standing, topology: Topology) -> Steps:
        """The run continues after somebody was killed."""
        killed = set(self.fabric.killed)
        yield ReportRecovery(
            worker_id=self.worker_id,
            incarnation=self.incarnation,
            phases_s={"detect": 0.5},
            resumed_step=standing.step,
            lost_steps=0,
            tier="local",
            world_before=len(topology.roster),
            world_after=len(topology.roster),
            reason="",
        )
        self.fabric.recovered |= killed

    def _reconcile(self, topology: Topology) -> Steps:
        """Tell which checkpoints exist; those that nobody was told of are told now."""
        reply = Reconciled(made=False, revision=0, removed=0, unknown=())
        while not reply.made:
            existing = self._saved()
            reply = yield ReconcileCheckpoints(
                worker_id=self.worker_id,
                incarnation=self.incarnation,
                job_id=self.job_id,
                run_id=self.run_id,
                run_generation=self._run_generation(topology),
                present=tuple(saved.checkpoint_id for saved in existing),
                revision=reply.revision,
            )
            assert isinstance(reply, Reconciled)
        newer = ""
        for saved in reversed(existing):
            if saved.checkpoint_id in reply.unknown:
                late = self._mine(saved, topology)
                yield replace(late, saved_generation=saved.run_generation, succeeded_by=newer)
            newer = saved.checkpoint_id

    def _saved(self) -> list[NotifyCheckpoint]:
        """What exists, oldest first."""
        return list(self.fabric.saved)

    def _run_generation(self, topology: Topology) -> int:
        return topology.generation

    def _step(self, standing: Standing, epoch: int, topology: Topology) -> Steps:
        spans: list[tuple[int, int]] = yield self._reading(epoch, topology)
        record = RankRecord(dataset=DATASET, epoch=epoch, total=self.plan.total, rank=topology.rank)
        for start, stop in spans:
            record = record.with_span(start, stop)
        yield self.world.between(0.0, 0.3)
        self.fabric.give(self.worker_id, topology, standing, record)
        yield from self._barrier("trained", standing.step, topology)
        commit = self.fabric.gather(topology, standing)
        base = f"g{topology.generation}-s{standing.step + 1}"
        if topology.rank == 0:
            yield from self._save(standing.step + 1, epoch, commit, base, topology)
        yield from self._barrier("saved", standing.step, topology)
        return Standing(step=standing.step + 1, commit=commit, base=base)

    def _save(
        self, step: int, epoch: int, commit: DataCommit, checkpoint_id: str, topology: Topology
    ) -> Steps:
        notice = NotifyCheckpoint(
            worker_id=self.worker_id,
            incarnation=self.incarnation,
            generation=topology.generation,
            job_id=DEFAULT_JOB,
            checkpoint_id=CheckpointId(checkpoint_id),
            step=step,
            epoch=epoch,
            path=f"/c/{checkpoint_id}",
            size_bytes=1,
            status="in_progress",
            tiers=(),
            digest=checkpoint_id,
            duration_s=0.0,
            parent_id="",
            data_json=json.dumps(commit.to_json()),
            reason="",
            metadata={},
            run_id=RUN,
            run_generation=topology.generation,
        )
        yield notice
        yield self.world.between(0.0, 0.2)
        completed = replace(notice, status="completed", tiers=("local",))
        if not self.fabric.publish(completed):
            raise Broken  # A later generation has saved: this process is a remnant.
        yield completed
        yield from self._afterwards(topology)

    def _afterwards(self, topology: Topology) -> Steps:
        """An older checkpoint reaches another tier, late; the oldest is removed, and not always is it told; a remnant of
        an earlier generation says something; after an outage all that exists is told again."""
        saved = self.fabric.saved
        if self.world.chance(0.25):
            late = replace(self.world.random.choice(saved), tiers=("s3",))
            yield replace(self._mine(late, topology), saved_generation=late.run_generation)
        if len(saved) > KEPT and self.world.chance(0.5):
            removed = replace(saved.pop(0), status="removed", reason=f"keep {KEPT}")
            if self.world.chance(0.7):
                yield self._mine(removed, topology)
        if self.world.chance(0.2):
            yield from self._say_too_late(topology)
        if self.world.chance(0.2):
            yield from self._reconcile(topology)

    def _say_too_late(self, topology: Topology) -> Steps:
        """What a process of an earlier generation of the run would say, in the name of a worker that is current."""
        newest = self.fabric.saved[-1]
        zombie = replace(
            self._mine(newest, topology),
            checkpoint_id=CheckpointId(f"late-{self._born % 10_000}-{self._asked}"),
            run_generation=newest.run_generation - 1,
        )
        try:
            yield zombie
        except Stale as stale:
            if stale.cause != "run_generation":
                raise

    def _mine(self, notice: NotifyCheckpoint, topology: Topology) -> NotifyCheckpoint:
        """Said by this worker, about a checkpoint that another may have made."""
        return replace(
            notice,
            worker_id=self.worker_id,
            incarnation=self.incarnation,
            generation=topology.generation,
            run_generation=self._run_generation(topology),
        )

    def _barrier(self, name: str, step: int, topology: Topology) -> Steps:
        outcome = yield self._arrival(
            name,
            step,
            generation=topology.generation if self.plan.names_generation else 0,
            expected=len(topology.roster) if self.plan.names_count else 0,
            timeout_s=6.0,
        )
        if not isinstance(outcome, BarrierReleased):
            raise Broken
        if set(outcome.arrived) != set(topology.roster):
            raise Broken  # It met others than those it shares its generation with.

    def _arrival(
        self, name: str, step: int, *, generation: int, expected: int, timeout_s: float
    ) -> ArriveAtBarrier:
        return ArriveAtBarrier(
            worker_id=self.worker_id,
            incarnation=self.incarnation,
            generation=generation,
            barrier_id=name,
            step=step,
            expected=expected,
            call_id=f"{self.worker_id}-{self._born}-{self._asked}",
            timeout_s=timeout_s,
        )

    # --- questions ------------------------------------------------------------------------------------------

    def _topology(self, cluster: Cluster) -> Topology:
        member = cluster.membership.admit(self.worker_id, incarnation=self.incarnation)
        roster = cluster.membership.roster(member.spec.job_id)
        return Topology(
            generation=cluster.membership.job_generations[member.spec.job_id],
            rank=roster[self.worker_id],
            roster=tuple(roster),
        )

    def _standing(self, cluster: Cluster) -> Standing:
        latest = cluster.checkpoints.latest(DEFAULT_JOB)
        if latest is None:
            return Standing(step=0, commit=DataCommit(), base="none")
        return Standing(
            step=latest.step, commit=data_commit(latest.data_json), base=str(latest.checkpoint_id)
        )

    def _epoch(self, commit: DataCommit) -> int | None:
        for epoch in range(self.plan.epochs):
            if commit.coverage(DATASET, epoch).covered.size < self.plan.total:
                return epoch
        return None

    def _reading(self, epoch: int, topology: Topology) -> Query:
        """The next samples of this worker, according to the coordinator and to it alone."""

        def ask(cluster: Cluster) -> list[tuple[int, int]]:
            cluster.membership.admit(
                self.worker_id, incarnation=self.incarnation, generation=topology.generation
            )
            spans, left = [], self.plan.samples_per_step
            for shard in cluster.datasets.shards_of(self.worker_id, (DEFAULT_JOB, DATASET, epoch)):
                start = shard.start + shard.done
                stop = min(shard.stop, start + left)
                if start < stop:
                    spans.append((start, stop))
                    left -= stop - start
            return spans

        return ask
