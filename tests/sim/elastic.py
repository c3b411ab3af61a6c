"""An elastic job in the world of coordinators, agents and machines: `job`'s lives, whose ranks are processes that register.

A generation of members makes a life: when all of them have met at the coordinator's barrier they choose what to restore, train and save as
`job` does it, by the same protocol. The coordinator does not take part in that, and may be away: it decides who belongs together, and keeps
the registry of what is saved. Who is killed, leaves, or hears that the members have changed ends the life for all, and the survivors save
what they have. A rank 0 that is frozen while the others continue without it is a remnant, and publishes when it wakes.

Checked beside all that `job` and `oracle` check: whatever is published is registered in the end, by whoever published it or by whoever
continues; the registry's newest is the final state; nothing that a superseded generation says of its checkpoints takes effect.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from strata.core.cluster import Cluster
from strata.core.data.ledger import DataCommit
from strata.core.jobs.job import MEMORY, LoadShards, Resume
from strata.core.jobs.lineage import CompletionOrder
from strata.core.jobs.peers import PEER
from strata.core.messages import (
    CheckpointId,
    InvalidArgument,
    JobId,
    NotifyCheckpoint,
    Refused,
    Stale,
    Unknown,
    WorkerId,
)
from tests.sim.coordinator import Request
from tests.sim.job import Checkpoint, Destination, Life, Machine, ShardedLife, Simulation, Upload
from tests.sim.machines import MachineProcess
from tests.sim.oracle import must
from tests.sim.replicas import Front
from tests.sim.worker import RETRY_S, Broken, Standing, Steps, Topology

if TYPE_CHECKING:
    from tests.sim.whole import WholeScenario

ELASTIC = JobId("elastic")
RUN_ID = "run-1"
STEP_S = (0.008, 0.06)
"""How long an instruction of the job takes."""
IDLE_S = 0.2


class ElasticProcess(MachineProcess):
    """One rank."""

    job_id = ELASTIC
    run_id = RUN_ID

    def __init__(self, job: ElasticJob, name: str, machine: str) -> None:
        self.job = job
        self.part: Part | None = None
        self.topology: Topology | None = None
        self.notices: list[NotifyCheckpoint] = []
        self._held: list[NotifyCheckpoint] | None = None
        """What has to wait until it is known what the registry knows."""
        self._reports = Front(job.whole, machine)
        self._reporting = 0
        self.order = CompletionOrder()
        self.existing: dict[CheckpointId, Checkpoint] = {}
        """What its life has found, and what became of that and of its own saves since: it does not look again."""
        super().__init__(job.whole, name, machine)

    @property
    def is_frozen(self) -> bool:
        return self._frozen is not None

    def kill(self) -> None:
        super().kill()
        self.job.lost(self)

    def freeze(self) -> None:
        super().freeze()
        self.job.look_at(self.part)

    def wake(self) -> None:
        super().wake()
        self.job.look_at(self.part)

    def _gave_way(self) -> None:
        super()._gave_way()
        self.job.untold |= {notice.checkpoint_id for notice in self.notices if notice.status == "completed"}

    # --- its life -------------------------------------------------------------------------------------------

    def _generation(self) -> Steps:
        topology: Topology = yield self._topology
        self.topology = topology
        try:
            attempt = self.job.attempt(topology)
            yield from self._barrier("enter", topology.generation * 100 + attempt, topology)
            self.order = CompletionOrder()
            self._held = None
            part = self.job.enter(self, topology, attempt)
            is_told = False
            while not part.life.is_over:
                yield self.world.between(0.2, 0.5)
                if self.leaving:
                    part.life.asked_to_leave = True
                if topology.rank == 0 and part.life.is_training and not is_told:
                    is_told = True
                    yield from self._take_stock(part.life, topology)
                now: Topology = yield self._topology
                if now.generation != topology.generation:
                    break
            self.job.leave(self, "is re-formed")
            if topology.rank == 0 and part.life.is_training and not is_told:
                self.part = part
                yield from self._take_stock(part.life, topology)
                self.part = None
            yield from self._finish_reports()
            return part.life.outcome in ("finished", "stops: unloadable")
        except (Broken, InvalidArgument):
            self.job.leave(self, "is re-formed")
            yield self.world.between(0.01, 0.2)
        except Stale:
            self.job.leave(self, "is re-formed")
            yield 0.05
        except Unknown:
            self.job.leave(self, "is re-formed")
            raise
        return False

    def _take_stock(self, life: Life, topology: Topology) -> Steps:
        """What a start tells the coordinator: what it continues from, and what exists."""
        if self.fabric.killed - self.fabric.recovered:
            yield from self._recover(Standing(step=life.step, commit=DataCommit(), base=""), topology)
        yield from self._finish_reports()
        self._held = []
        try:
            yield from self._reconcile(topology)
        except Stale as stale:
            if stale.cause != "run_generation":
                self._held = None
                raise
        else:
            self.job.untold -= set(self.existing)
        held, self._held = self._held or [], None
        for notice in held:
            self._put(notice)

    def _saved(self) -> list[NotifyCheckpoint]:
        if self._held is not None:
            self._held = []  # What was to be said until now is in the list.
        existing = sorted(self.existing.values(), key=lambda c: c.order)
        return [self._notice(checkpoint, "completed") for checkpoint in existing]

    def _mine(self, notice: NotifyCheckpoint, topology: Topology) -> NotifyCheckpoint:
        """The run's generation fences it, and no other."""
        return replace(super()._mine(notice, topology), generation=0)

    def _run_generation(self, topology: Topology) -> int:
        assert self.part is not None
        assert self.part.life.claim is not None
        return self.part.life.claim.generation

    # --- what it reports, in the background -----------------------------------------------------------------

    def _notice(
        self, checkpoint: Checkpoint, status: str, *, tiers: tuple[str, ...] = ("disk",)
    ) -> NotifyCheckpoint:
        assert self.topology is not None
        return NotifyCheckpoint(
            worker_id=self.worker_id,
            incarnation=self.incarnation,
            generation=0,
            job_id=ELASTIC,
            checkpoint_id=checkpoint.checkpoint_id,
            step=checkpoint.step,
            epoch=0,
            path=f"/c/{checkpoint.checkpoint_id}",
            size_bytes=1,
            status=status,  # type: ignore[arg-type]
            tiers=tiers,
            digest=str(checkpoint.checkpoint_id),
            duration_s=0.0,
            parent_id="",
            data_json=self.job.data_json(checkpoint),
            reason="",
            metadata={},
            run_id=RUN_ID,
            run_generation=checkpoint.generation,
        )

    def report(self, checkpoint: Checkpoint, status: str, tiers: tuple[str, ...], generation: int) -> None:
        notice = replace(self._notice(checkpoint, status, tiers=tiers), run_generation=generation)
        if status == "completed":
            newer = self.order.completed(checkpoint.checkpoint_id, checkpoint.step)
            notice = replace(notice, succeeded_by=newer or "")
            self.existing[checkpoint.checkpoint_id] = checkpoint
        elif status == "removed":
            self.order.removed(checkpoint.checkpoint_id)
            self.existing.pop(checkpoint.checkpoint_id, None)
        if checkpoint.generation != generation:
            notice = replace(notice, saved_generation=checkpoint.generation)
        if self._held is not None:
            self._held.append(notice)
        else:
            self._put(notice)

    def _put(self, notice: NotifyCheckpoint) -> None:
        self.notices.append(notice)
        if len(self.notices) == 1:
            self._send_notice()

    def _send_notice(self) -> None:
        """The first of them, until it is answered."""
        if not self.notices or not self.alive:
            return
        notice = self.notices[0]
        self._reporting += 1
        number = self._reporting

        def answered(answer: object) -> None:
            def hear() -> None:
                if self._reporting == number and self.notices and self.notices[0] is notice:
                    self.job.whole.counts["notices refused"] += isinstance(answer, Refused)
                    del self.notices[0]
                    self._send_notice()

            self._act(hear)

        request = Request(worker=self.machine, what=notice, answer=answered)

        def send() -> None:
            if self._reporting == number and self.notices and self.notices[0] is notice and self.alive:
                self._reports.receive(request)
                self.world.after(RETRY_S * self.world.between(0.7, 1.3), lambda: self._act(send))

        send()

    def _finish_reports(self) -> Steps:
        while self.notices:
            yield 0.2


@dataclass(eq=False)
class Part:
    """A life and the processes that are its ranks."""

    life: Life
    roster: tuple[WorkerId, ...]
    present: dict[WorkerId, ElasticProcess] = field(default_factory=dict)
    has_begun: bool = False

    @property
    def first(self) -> ElasticProcess | None:
        return self.present.get(self.roster[0])


class ElasticJob(Simulation):
    run_name = RUN_ID

    def __init__(self, whole: WholeScenario, seed: int) -> None:
        self.whole, self.world = whole, whole.world
        super().__init__(seed)
        self.random = whole.world.random
        self.faults_left = 1
        self.total_steps = min(self.total_steps, 24)
        self._parts: dict[tuple[int, int], Part] = {}
        self._open: list[Part] = []
        self._attempts: dict[int, int] = {}
        self._launch = 0
        self._late: set[str] = set()
        self.untold: set[CheckpointId] = set()
        """What was to be told by processes that fell silent, because others had taken their places."""
        self._lost: dict[str, Machine] = {}
        self._data: dict[CheckpointId, str] = {}

    def _begin(self) -> None:
        pass  # Whoever registers begins it.

    @property
    def now_s(self) -> float:
        return self.world.now_s

    def tell(self, text: str) -> None:
        self.world.tell(f"job: {text}")

    def machine(self, name: str) -> Machine:
        """One that is lost, too: members are known by their names."""
        found = next((machine for machine in self.machines if machine.name == name), None)
        return found if found is not None else self._lost[name]

    def lose_machine(self, lost: Machine) -> None:
        self._lost[lost.name] = lost
        super().lose_machine(lost)

    def data_json(self, checkpoint: Checkpoint) -> str:
        name = checkpoint.checkpoint_id
        if name not in self._data:
            self._data[name] = json.dumps(checkpoint.data.to_json())
        return self._data[name]

    def existing(self) -> set[str]:
        """Without what a superseded generation has published since: nobody needs to know of it."""
        found = {str(name) for destination in self.destinations for name in destination.checkpoints}
        return found - self._late

    # --- lives ----------------------------------------------------------------------------------------------

    def attempt(self, topology: Topology) -> int:
        """How many lives these members have had already."""
        return self._attempts.get(topology.generation, 0)

    def enter(self, process: ElasticProcess, topology: Topology, attempt: int) -> Part:
        key = (topology.generation, attempt)
        part = self._parts.get(key)
        if part is None:
            machines = [self._machine_of(worker) for worker in topology.roster]
            if self.lives and all(life.is_over for life in self.lives) and self.chance(0.15):
                self._launch += 1
            kind = ShardedLife if self.is_sharded else Life
            life: Life = kind(self, len(self.lives), f"launch-{self._launch}", machines, len(machines))
            part = self._parts[key] = Part(life=life, roster=topology.roster)
            self.lives.append(life)
            self._open.append(part)
            for agent in self.agents:
                agent.is_given_up |= agent.life.launch == life.launch and agent.machine in machines
            names = ", ".join(m.name for m in machines)
            self.tell(f"{life} (generation {topology.generation}) has ranks on {names} ({life.launch})")
        if not part.life.is_over:
            process.part = part
            part.present[process.worker_id] = process
            part.has_begun = part.has_begun or len(part.present) == len(part.roster)
            self.look_at(part)
        return part

    def _part_of(self, life: Life) -> Part:
        return next(part for part in self._parts.values() if part.life is life)

    def _machine_of(self, worker: WorkerId) -> Machine:
        return self.machine(self.whole.places[str(worker)])

    def leave(self, process: ElasticProcess, why: str) -> None:
        """Without it the others cannot continue."""
        part, process.part = process.part, None
        if part is None or part.present.pop(process.worker_id, None) is None or part.life.is_over:
            return
        first, life = part.first, part.life
        if first is not None and first.is_frozen and not life.rescuing:
            # A remnant: what it was uploading it goes on uploading when it wakes.
            life.tasks = life.tasks[1:]
        elif not part.present:
            life.end(why)
        else:
            left = [self.machine(each.machine) for each in part.present.values() if not each.is_frozen]
            left = [machine for machine in left if machine in self.machines]
            life.lose_ranks(left if self.chance(0.5) else (), why)
        self.look_at(part)

    def lost(self, process: ElasticProcess) -> None:
        """It was killed: the others notice when they wait for it."""
        self.world.after(self.world.between(0.0, 0.5), partial(self.leave, process, "loses a rank"))

    def look_at(self, part: Part | None) -> None:
        """Ranks in lockstep: what one does not do, none does."""
        if part is not None:
            part.life.is_frozen = any(process.is_frozen for process in part.present.values())

    def died(self, life: Life) -> None:
        super().died(life)
        for key, part in self._parts.items():
            if part.life is life:
                self._attempts[key[0]] = max(self._attempts.get(key[0], 0), key[1] + 1)
                self._open.remove(part)

    @property
    def is_over(self) -> bool:
        return any(life.outcome in ("finished", "stops: unloadable") for life in self.lives)

    # --- time -----------------------------------------------------------------------------------------------

    def tick(self) -> None:
        alive = [part for part in self._open if part.has_begun and part.life.is_alive]
        if self.senders and self.chance(0.3):
            machine, task = self.random.choice(self.senders)
            if next(task, task) is task:
                self.senders.remove((machine, task))
        if self.agents and self.chance(0.4 if alive else 1.0):
            self._advance_agent()
        elif alive:
            life = self.random.choice(alive).life
            if life.tasks:
                task = self.random.choice(life.tasks)
                if next(task, task) is task and task in life.tasks:
                    life.tasks.remove(task)
        busy = alive or self.agents or self.senders
        self.world.after(self.world.between(*STEP_S) if busy else IDLE_S, self.tick)

    # --- what it tells the coordinator ----------------------------------------------------------------------

    def fenced(self, life: Life) -> None:
        super().fenced(life)
        first = self._part_of(life).first
        if first is not None:
            seen = [checkpoint for each in self.destinations for checkpoint in life.truth[each.name]]
            first.existing = {c.checkpoint_id: c for c in seen if c.placement.run == RUN_ID}

    def landed(self, life: Life, destination: Destination, checkpoint: Checkpoint) -> None:
        if max(destination.claims, default=0) > checkpoint.generation:
            self._late.add(str(checkpoint.checkpoint_id))

    def published(self, life: Life, destination: Destination, checkpoint: Checkpoint) -> None:
        self.whole.counts["published"] += 1
        if self.faults_left and self.chance(0.06) and len(destination.checkpoints) > 2:
            # A torn write that the store has acknowledged: its digests do not match.
            self.whole.counts["torn writes"] += 1
            self._damage(destination.checkpoints[checkpoint.checkpoint_id], destination.name)

    def ended(self, life: Life, upload: Upload) -> None:
        if upload.reached:
            self._report(life, upload.checkpoint, "completed", tuple(upload.reached))

    def removed(self, life: Life, destination: Destination, checkpoint: Checkpoint) -> None:
        if str(checkpoint.checkpoint_id) not in self.existing():
            self._report(life, checkpoint, "removed", ())

    def _report(self, life: Life, checkpoint: Checkpoint, status: str, tiers: tuple[str, ...]) -> None:
        first = self._part_of(life).first
        if first is not None and first.alive and life.claim is not None:
            first.report(checkpoint, status, tiers, life.claim.generation)

    def restored(self, life: Life, resume: Resume) -> None:
        load = resume.load
        sources = [source.offer for source in load.sources] if isinstance(load, LoadShards) else []
        for offer in sources or [load.offer]:
            name = {MEMORY: "memory", PEER: "a peer"}.get(offer.tier, offer.where)
            self.whole.restores[life.number, name] += 1

    # --- what goes wrong ------------------------------------------------------------------------------------

    def reaches(self, source: Machine, there: Machine) -> bool:
        return not self.whole.roads.is_cut(source.name, there.name)

    def is_within_reach(self, life: Life, destination: Destination) -> bool:
        return not self.whole.roads.is_cut(life.machines[0].name, destination.name)

    def hears_of(self, life: Life, destination: Destination) -> bool:
        is_lost = self.whole.roads.is_cut(destination.name, life.machines[0].name)
        is_lost = is_lost or (bool(self.faults_left) and self.chance(0.03))
        self.whole.counts["answers of a store lost"] += is_lost
        return not is_lost

    def disturb(self) -> None:
        kinds = ["damage", "damage memory", "down", "down", "memory"]
        kinds += ["damage part", "delete images"] if self.is_sharded else []
        kinds += ["damage all"] if self.chance(0.1) else []
        kind = self.random.choice(kinds)
        self.whole.counts[kind] += 1
        if self.lives:
            self.strike(kind)
        # Nobody knows of a damaged snapshot that the one beside it is the last.
        self.copies_given_up |= kind in ("damage memory", "damage part")
        if kind in ("down", "memory"):
            self.world.after(self.world.between(0.5, 6.0), self._repair)

    def _repair(self) -> None:
        for destination in self.destinations:
            destination.is_down = False
        for machine in self.machines:
            machine.memory_fails = False

    def faults_end(self) -> None:
        self.faults_left = 0
        self.save_failures = 0.0
        self._repair()

    def perhaps_lose_a_destination(self) -> None:
        super().perhaps_lose_a_destination()
        if any(destination.is_down for destination in self.destinations):
            self.world.after(self.world.between(0.5, 6.0), self._repair)

    def perhaps_freeze(self, life: Life) -> None:
        first = self._part_of(life).first
        if first is not None and self.faults_left and self.chance(0.12):
            self.counts["zombies"] += 1
            self.tell(f"{life} stands still while it publishes")
            self.whole.stop_short(first)

    def published_too_late(self) -> None:
        self.counts["stale"] += 1
        newest = self._open[-1] if self._open else None
        if self.faults_left and newest is not None and newest.first is not None and self.chance(0.8):
            newest.first.kill()

    # --- the end --------------------------------------------------------------------------------------------

    def check_end(self, cluster: Cluster) -> None:
        if any(life.outcome == "stops: unloadable" for life in self.lives):
            self.whole.counts["unloadable"] += 1
            return
        ranks = [process for process in self.whole.processes.values() if isinstance(process, ElasticProcess)]
        if not self.is_over and all(process.leaving for process in ranks):
            return
        must(self.is_over, "the elastic job has not reached its end")
        self._check_history()
        latest = cluster.checkpoints.latest(ELASTIC, run_id=RUN_ID)
        saved = [checkpoint for each in self.destinations for checkpoint in each.checkpoints.values()]
        if any(c.step == self.total_steps and c.checkpoint_id in self.untold for c in saved):
            return  # Nobody continues from it, who would tell.
        must(
            latest is not None and latest.step == self.total_steps,
            f"the registry's newest is {latest and latest.checkpoint_id}, not the final state",
        )
