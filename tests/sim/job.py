"""An elastic job around the real protocol: ranks on machines, memory that vanishes, destinations that fail and are slow.

Every start of the job is a `Life`: a coroutine that carries out the protocol's instructions one at a time, and one for
each save that is on its way to the destinations. A `yield` is the end of an instruction: there a life may crash, lose its
machine, be frozen and come back as a zombie, or be told to leave. Which coroutine runs next, and what goes wrong, is
decided by the seed alone.

In every second simulation (odd seeds) the state is sharded: every rank has its part in images of its own, a machine's
memory has many of them, worlds change their size between lives, some have replicas, and copying, marking and uploading
are a coroutine per rank, so that a crash finds each of them somewhere else. The first rank publishes the manifest.

When a life has died, the agents of its machines may take what it left in memory to the destinations, each for itself, while the next life
starts: they die on the way, find destinations away, images damaged or overwritten, and newer generations that have taken over.

Where the state is not sharded, losing a rank or a machine may leave survivors. Those of each machine save the state they have, by
themselves, and some have made a step more than others: a rescue, that may be cut off, frozen and carried out too late.

Checked from outside: every restart continues from the best state that exists (a restart never costs what was saved);
the furthest rescue wins, and is one state wherever it was made;
nobody restores what a superseded process published, what belongs to another run, or what is damaged; training never
starts anew while a checkpoint exists; retention removes only what nobody could need; a run that ends normally has its
final state in every destination; and the history of the checkpoints has every sample exactly once. Of sharded state: what is
restored is one checkpoint's, slice by slice; a save never costs the last complete snapshot, whenever it is cut off; a
manifest lists only parts that are there; nothing is loaded that is not all there; and no save is skipped for ever.

In most simulations agents keep copies of snapshots for other machines (`strata.core.jobs.peers`). They are sent by coroutines of
the machines, which outlive lives: late, in part, over images that are overwritten meanwhile, to copy_tables that are full and machines that are
lost. Checked of them: copies are where another failure domain is, if there is one; nothing that a superseded generation sends is kept; and a
snapshot that the loss of any one machine leaves complete is not given up before there is a newer such one.
"""

from __future__ import annotations

import functools
import hashlib
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable
from copy import deepcopy
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from strata.core.data.audit import Commit, audit_all
from strata.core.data.ledger import DataCommit, LedgerChain, RankRecord
from strata.core.jobs.finishing import Ended, Finishing, Left, Look, Meet, Seen, Wait
from strata.core.jobs.finishing import Write as WriteSnapshot
from strata.core.jobs.job import (
    MEMORY,
    AwaitSave,
    Finished,
    JobProtocol,
    Load,
    LoadReport,
    LoadShards,
    LookAgain,
    Offer,
    Ready,
    Resume,
    Save,
    SaveEnded,
    Skip,
    Source,
    StartAnew,
    Stop,
    Survey,
)
from strata.core.jobs.lineage import Placement, removable
from strata.core.jobs.peers import PEER, Accepted, Copy, CopyTable, Peer, targets
from strata.core.jobs.runs import RENEW_S, SILENT_S, Claim, InUse, Take, Watch, is_superseded, judge
from strata.core.types import CheckpointId

Steps = Generator[None, None, None]

IMAGES = 2
UNITS = frozenset(range(12))
"""What a sharded state consists of. A part has some of them."""
TICK_S = 0.5
INSTRUCTIONS_LIMIT = 60_000
STORY_LINES = 100


class Violation(AssertionError):
    """An invariant does not hold."""


class SimulationFailed(AssertionError):
    """Carries what is needed to see it again."""

    @classmethod
    def of(cls, sim: Simulation, error: BaseException) -> SimulationFailed:
        story = "\n".join(sim.story[-STORY_LINES:])
        return cls(
            f"seed {sim.seed}: {type(error).__name__}: {error}\n\nThe story, up to there:\n{story}\n\n"
            f"See all of it with: python -m tests.sim --job --seed {sim.seed} --story"
        )


def must(condition: bool, what: str) -> None:
    if not condition:
        raise Violation(what)


@functools.cache
def units_of(part: str) -> frozenset[int]:
    """What of the state a part has; "1/3" is the second of three, "" is all of it."""
    number, count = map(int, part.split("/")) if part else (0, 1)
    return frozenset(range(len(UNITS) * number // count, len(UNITS) * (number + 1) // count))


@dataclass(slots=True)
class Checkpoint:
    """One copy of a checkpoint: its manifest, and what a load would give."""

    placement: Placement
    step: int
    trained: tuple[int, ...]
    """The state: every batch that made it, in order."""
    data: DataCommit
    intact: bool = True
    has_payload: bool = True
    looked: int = 0
    """The newest generation that had looked at the destination when this was published there."""
    parts: tuple[str, ...] = ()
    """Of a sharded one: what all of it consists of."""
    part: str = ""
    """What of it this image has."""
    damaged: set[str] = field(default_factory=set)
    """Of a sharded one in a destination: its parts that are not intact."""

    def units(self, *, intact: bool) -> frozenset[int]:
        """What of the state this copy has, or can be read of it."""
        if not intact or self.intact:
            return units_of(self.part)
        return frozenset[int]().union(
            *(units_of(p) for p in self.parts if not self.part and p not in self.damaged)
        )

    @property
    def checkpoint_id(self) -> CheckpointId:
        return self.placement.checkpoint_id

    @property
    def generation(self) -> int:
        return self.placement.generation

    @property
    def lineage(self) -> str:
        return self.placement.lineage

    @property
    def parent(self) -> CheckpointId | None:
        return self.placement.parent

    @property
    def durable_parent(self) -> CheckpointId | None:
        return self.placement.durable_parent

    @property
    def order(self) -> tuple[int, int]:
        return (self.placement.generation, self.placement.sequence)

    def copy(self, **changes: Any) -> Checkpoint:
        values = {
            name: getattr(self, name) for name in ("placement", "step", "trained", "data", "parts", "part")
        }
        return Checkpoint(**{**values, **changes})

    def offer(self, *, tier: str, where: str, distance: int, holder: str = "") -> Offer:
        placement = self.placement
        return Offer(
            checkpoint_id=placement.checkpoint_id,
            run=placement.run,
            step=self.step,
            generation=placement.generation,
            sequence=placement.sequence,
            lineage=placement.lineage,
            parent=placement.parent,
            durable_parent=placement.durable_parent,
            tier=tier,
            where=where,
            distance=distance,
            is_sharded=bool(self.parts),
            part=self.part,
            parts=self.parts if self.part else (),
            holder=holder,
        )


@dataclass(slots=True, eq=False)
class Destination:
    name: str
    distance: int
    slowness: int
    """How many instructions an upload takes."""
    checkpoints: dict[CheckpointId, Checkpoint] = field(default_factory=dict)
    parts: set[tuple[CheckpointId, str]] = field(default_factory=set)
    """Of sharded checkpoints: what has been uploaded."""
    claims: dict[int, Claim] = field(default_factory=dict)
    held: dict[tuple[int, int], set[CheckpointId]] = field(default_factory=dict)
    """What agents have reported: by generation and rank, the snapshots in memory."""
    is_down: bool = False
    looked: int = 0
    """The newest generation that has looked here."""


@dataclass(slots=True, eq=False)
class Image:
    """A place in memory for one rank's part."""

    content: Checkpoint | None = None
    """Marked: it is all there."""
    is_written: bool = False
    readers: int = 0
    """Uploads from it."""

    @property
    def is_free(self) -> bool:
        return not self.is_written and not self.readers

    @property
    def checkpoint_id(self) -> CheckpointId | None:
        return self.content.checkpoint_id if self.content is not None else None


Slot = list[Image]
"""The images of one rank."""


@dataclass(slots=True, eq=False)
class Machine:
    name: str
    images: dict[int, list[Checkpoint]] = field(default_factory=dict)
    """In memory, by the life that holds them; gone with the machine, not with the life."""
    slots: dict[int, list[Slot]] = field(default_factory=dict)
    """The same where the state is sharded: a slot for each rank, and those that nobody has taken over."""
    generation: int = 0
    """The newest that has looked here."""
    memory_fails: bool = False
    rack: str = ""
    copy_table: CopyTable = field(default_factory=lambda: CopyTable(0))
    """What its agent keeps for others,"""
    copies: dict[Copy, Checkpoint] = field(default_factory=dict)
    """and what is in it."""
    sending: dict[tuple[int, CheckpointId], int] = field(default_factory=dict)
    """Snapshots whose copies are on their way, by life: how many."""

    @property
    def peer(self) -> Peer:
        return Peer(machine=self.name, agent=self.name, rack=self.rack)

    def in_copy_table(self) -> list[tuple[Copy, Checkpoint]]:
        """All that is complete."""
        found = [copy for copies in self.copy_table.complete.values() for copy in copies]
        return [(copy, self.copies[copy]) for copy in found]

    def kept(self) -> list[Checkpoint]:
        """Everything that is in its memory."""
        slots = [slot for of_life in self.slots.values() for slot in of_life]
        sharded = [image.content for slot in slots for image in slot if image.content is not None]
        copy_table = [checkpoint for _, checkpoint in self.in_copy_table()]
        return [image for held in self.images.values() for image in held] + sharded + copy_table


@dataclass(slots=True, eq=False)
class Upload:
    save: Save
    checkpoint: Checkpoint
    reached: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    superseded: str = ""
    writers: dict[str, set[int]] = field(default_factory=dict)
    """Of a sharded save: ranks that are not finished with a destination, where the first one publishes."""
    failures: dict[str, str] = field(default_factory=dict)
    last_complete: tuple[int, int] | None = None
    """Of a sharded save: the snapshot in memory that a crash would have gone back to when it began."""


class Life:
    """One start of the job: all its ranks, in lockstep wherever they exchange something."""

    def __init__(
        self, sim: Simulation, number: int, launch: str, machines: list[Machine], ranks: int
    ) -> None:
        self.sim = sim
        self.number = number
        self.launch = launch
        self.machines = [machines[rank % len(machines)] for rank in range(ranks)]
        self.protocols = [sim.make_protocol() for _ in range(min(ranks, 2))]
        """The first rank's and another's: all of them are told the same."""
        self.ledger = LedgerChain()
        self.claim: Claim | None = None
        self.step = 0
        self.trained: tuple[int, ...] = ()
        self.unrecorded: list[int] = []
        self.is_frozen = False
        self.is_training = False
        self.is_saving = False
        self.is_finishing = False
        self.rescuing = 0
        """Machines whose survivors are not done with it."""
        self.renewed_s = 0.0
        self.is_over = False
        self.asked_to_leave = False
        self.outcome = ""
        self.news: list[SaveEnded] = []
        self.uploading: dict[str, Upload | None] = {}
        self.waiting: dict[str, deque[Upload]] = {d.name: deque() for d in sim.destinations}
        self.in_flight: dict[CheckpointId, Upload] = {}
        self._saves = 0
        self._loaded: Checkpoint | None = None
        self.lineage = ""
        """Of what this life continues."""
        self.truth: dict[str, list[Checkpoint]] = {}
        """What there was, in each place, when this life looked."""
        self.found_damaged: set[tuple[CheckpointId, str]] = set()
        """Checkpoint and destination: what it could not load."""
        self.tasks: list[Steps] = [
            self._main(),
            self._keep_claim(),
            *(self._upload_to(d) for d in sim.destinations),
        ]

    def __str__(self) -> str:
        return f"life {self.number}"

    @property
    def is_alive(self) -> bool:
        return not self.is_over and not self.is_frozen

    def end(self, outcome: str) -> None:
        if not self.is_over:
            self.is_over, self.outcome = True, outcome
            self.sim.tell(f"{self} {outcome}")
            self.sim.died(self)

    # --- starting -------------------------------------------------------------------------------------------

    def _main(self) -> Steps:
        for phase in (self._take_generation, self._restore, self._train):
            yield from phase()
            if self.is_over:
                return

    def _take_generation(self) -> Steps:
        farthest = self.sim.destinations[-1]
        newest: Claim | None = None
        looked_s = self.sim.now_s
        waited_s = 0.0
        changed = False
        while True:
            yield
            if farthest.is_down:
                waited_s += TICK_S
                if waited_s > 20:
                    self.end("gave up: it could not read the claim")
                    return
                continue
            found = farthest.claims[max(farthest.claims)] if farthest.claims else None
            if found != newest:
                changed = newest is not None and found is not None and found.generation == newest.generation
                newest, looked_s = found, self.sim.now_s
            holder = self.sim.life_of(found)
            gone = None if holder is None or self.sim.holders_are_remote else holder.is_over
            decision = judge(
                found,
                launch=self.launch,
                holder_has_ended=gone,
                changed=changed,
                unchanged_s=self.sim.now_s - looked_s,
            )
            if isinstance(decision, InUse):
                self.sim.check_in_use(self, decision.claim)
                self.end("was refused: the run is in use")
                return
            if isinstance(decision, Watch):
                continue
            assert isinstance(decision, Take)
            self.sim.check_taken_over(self, newest)
            yield
            if decision.generation in farthest.claims:
                continue  # Somebody else was quicker.
            fences = newest.fences if newest is not None else ()
            self.claim = Claim(
                generation=decision.generation, launch=self.launch, holder=str(self.number), fences=fences
            )
            farthest.claims[decision.generation] = self.claim
            for destination in self.sim.destinations[:-1]:
                yield
                destination.claims[decision.generation] = self.claim
            self.sim.tell(f"{self} is generation {decision.generation}: {decision.reason}")
            return

    def _restore(self) -> Steps:
        assert self.claim is not None
        instruction: Any = LookAgain(after_s=0.0, reason="")
        while isinstance(instruction, LookAgain):
            for _ in range(int(instruction.after_s / TICK_S)):
                yield
            surveys = []
            for rank, machine in enumerate(self.machines):
                yield
                surveys.append(self._survey(rank, machine))
            instruction = self._agreed([p.surveyed(surveys) for p in self.protocols])
            if not isinstance(instruction, LookAgain | Stop):
                self.sim.fenced(self)
                self.sim.perhaps_lose_a_destination()
            while isinstance(instruction, Load | LoadShards):
                self.sim.tell(
                    f"{self} loads {instruction.offer.checkpoint_id} from {instruction.offer.where}"
                )
                self.sim.check_load(self, instruction)
                reports = []
                for rank in range(len(self.machines)):
                    yield
                    reports.append(self._load(rank, instruction))
                instruction = self._agreed([p.loaded(reports) for p in self.protocols])
        if isinstance(instruction, Stop):
            self.sim.check_stopped(self, instruction)
            self.end(f"stops: {instruction.kind}")
            return
        if isinstance(instruction, StartAnew):
            self.sim.check_new_beginning(self)
            self.sim.tell(f"{self} starts anew: {instruction.reason}")
            return
        assert isinstance(instruction, Resume)
        loaded = self._restored()
        self.step, self.trained, self.lineage = loaded.step, loaded.trained, loaded.lineage
        self.sim.counts["resumed from agent"] += (
            instruction.load.offer.is_durable and loaded.checkpoint_id in self.sim.made_durable
        )
        self.ledger.restore(loaded.data, checkpoint_id=loaded.checkpoint_id, durable=instruction.is_durable)
        self.sim.check_restored(self, loaded)
        sources = instruction.load.sources if isinstance(instruction.load, LoadShards) else ()
        tiers = {source.offer.tier for source in sources} | {instruction.load.offer.tier}
        self.sim.counts["restored from peers"] += self.sim.needed_peers(self, loaded)
        self.sim.tell(f"{self} resumes at step {self.step} from {', '.join(sorted(tiers))}")
        self.sim.restored(self, instruction)

    def _survey(self, rank: int, machine: Machine) -> Survey:
        offers = self._offers_in_memory(rank, machine)
        if rank:
            return Survey(machine=machine.name, offers=tuple(offers))
        unreachable = [d.name for d in self.sim.destinations if d.is_down]
        claims = [c for d in self.sim.destinations for c in d.claims.values()]
        found: dict[CheckpointId, list[Checkpoint]] = {}
        assert self.claim is not None
        for destination in self.sim.destinations:
            self.truth[destination.name] = list(destination.checkpoints.values())
            if not unreachable:
                destination.looked = max(destination.looked, self.claim.generation)
            for checkpoint in destination.checkpoints.values():
                found.setdefault(checkpoint.checkpoint_id, []).append(checkpoint)
                offers.append(
                    checkpoint.offer(tier="DISK", where=destination.name, distance=destination.distance)
                )
        assert self.claim is not None
        return Survey(
            machine=machine.name,
            offers=tuple(offers),
            unreachable=tuple(unreachable),
            removed=tuple(i for i, copies in found.items() if not any(c.has_payload for c in copies)),
            destinations=tuple(d.name for d in self.sim.destinations),
            generation=self.claim.generation,
            fences=tuple({f for c in claims for f in c.fences}),
        )

    def _offers_in_memory(self, rank: int, machine: Machine) -> list[Offer]:
        if self.machines.index(machine) != rank:
            return []
        self._take_over_images(machine)
        self.truth[machine.name] = list(self.images_on(machine))
        return [
            image.offer(tier=MEMORY, where=f"{machine.name}:{n}", distance=0)
            for n, image in enumerate(self.images_on(machine))
        ] + self._offers_on_shelves(rank, machine)

    def _offers_on_shelves(self, rank: int, machine: Machine) -> list[Offer]:
        """What the agent of this machine keeps; the first rank asks those of all others too."""
        offers = []
        for each in self.sim.machines if rank == 0 else [machine]:
            if each not in self.sim.machines:
                continue  # It was lost just now.
            assert self.claim is not None
            each.copy_table.fence(self.sim.run_name, self.claim.generation)
            found = each.in_copy_table()
            if each is not machine and each in self.machines:
                found = found[:1]  # Offered by a rank that is there: it must not be counted twice.
            else:
                self.truth.setdefault(each.name, []).extend(checkpoint for _, checkpoint in found)
            offers += [
                checkpoint.offer(
                    tier=PEER,
                    where=f"peer {copy.slot}#{copy.checkpoint_id}@{each.name}",
                    distance=0,
                    holder="" if each is machine else each.name,
                )
                for copy, checkpoint in found
            ]
        return offers

    def in_copy_table(self, where: str) -> Checkpoint | None:
        """What is kept there now."""
        slot, _, rest = where.removeprefix("peer ").partition("#")
        name, _, holder = rest.partition("@")
        for machine in self.sim.machines:
            for copy, checkpoint in machine.in_copy_table():
                if (machine.name, copy.slot, copy.checkpoint_id) == (holder, slot, name):
                    return checkpoint
        return None

    def _copy_of(self, rank: int, load: Load) -> Checkpoint | None:
        """What a rank would read for this load."""
        wanted = load.offer.checkpoint_id
        if rank == load.source and load.offer.is_durable:
            destination = next(d for d in self.sim.destinations if d.name == load.offer.where)
            return destination.checkpoints.get(wanted)
        where = load.offer.where if rank == load.source else load.images[load.mapped.index(rank)]
        if where.startswith("peer "):
            return self.in_copy_table(where)
        return next((i for i in self.images_on(self.machines[rank]) if i.checkpoint_id == wanted), None)

    def _restored(self) -> Checkpoint:
        assert self._loaded is not None
        return self._loaded

    def _load(self, rank: int, load: Any) -> LoadReport:
        assert isinstance(load, Load)
        if rank in load.receivers:
            return LoadReport()
        if (
            load.offer.is_durable
            and next(d for d in self.sim.destinations if d.name == load.offer.where).is_down
        ):
            return LoadReport(error="out of reach", fault="away")
        found = self._copy_of(rank, load)
        if found is None or not found.has_payload or not found.intact:
            self.found_damaged.add((load.offer.checkpoint_id, load.offer.where))
            return LoadReport(error="damaged or missing", fault="copy")
        if rank == load.source:
            self._loaded = found.copy(looked=found.looked)
        return LoadReport()

    def _agreed(self, instructions: list[Any]) -> Any:
        must(all(each == instructions[0] for each in instructions), f"ranks of {self} decided differently")
        return instructions[0]

    # --- training -------------------------------------------------------------------------------------------

    def _train(self) -> Steps:
        sim = self.sim
        self.is_training = True
        while self.step < sim.total_steps and not self.asked_to_leave:
            yield
            batch = self.step
            self.trained = (*self.trained, batch)
            self.unrecorded.append(batch)
            self.step += 1
            due = self._agreed([p.due(self.step) for p in self.protocols])
            if due is not None:
                self.is_saving = True
                yield from self._save(durable=due == "durable")
                self.is_saving = False
                if self.is_over:
                    return
        self.is_saving = True
        yield from self._finish()

    # --- surviving ------------------------------------------------------------------------------------------

    def lose_ranks(self, survivors: Iterable[Machine], why: str) -> None:
        """Nobody can go on. Ranks that are left save what they have, one on each of these machines, and end."""
        machines = list(dict.fromkeys(survivors))
        if not machines or not self.is_training or self.rescuing or isinstance(self, ShardedLife):
            self.end(why)
            return
        self.sim.tell(
            f"{self} {why}, and survivors on {', '.join(m.name for m in machines)} save what they have"
        )
        self.rescuing = len(machines)
        # Where the gradients of all had arrived, some have made the next step, and some have not.
        may_be_ahead = not self.is_saving and self.step < self.sim.total_steps
        self.tasks = [
            self._rescue_on(machine, why, steps_more=int(may_be_ahead and self.sim.chance(0.5)))
            for machine in machines
        ]

    def _rescue_on(self, machine: Machine, why: str, *, steps_more: int) -> Steps:
        protocol, ledger = deepcopy(self.protocols[-1]), deepcopy(self.ledger)
        step = self.step + steps_more
        made = tuple(range(self.step, step))
        save = protocol.rescue(CheckpointId(f"{step:04d}-{self.number}-rescue"), step=step)
        checkpoint = Checkpoint(
            placement=save.placement,
            step=step,
            trained=(*self.trained, *made),
            data=ledger.commit(
                self.sim.records([*self.unrecorded, *made], len(self.machines)),
                save.placement.checkpoint_id,
                durable=False,
                world_size=len(self.machines),
            ),
        )
        for _ in range(self.sim.random.randint(1, 12)):
            yield
        if machine in self.sim.machines and not machine.memory_fails:
            self.sim.counts["rescued"] += 1
            self._keep_image(machine, checkpoint)
            self.sim.tell(f"step {step} of {self} is rescued on {machine.name}")
        self.rescuing -= 1
        if not self.rescuing:
            self.end(why)

    def _keep_claim(self) -> Steps:
        """The thread that renews the claim."""
        farthest, renewed_s = self.sim.destinations[-1], 0.0
        while True:
            yield
            if self.claim is not None and not farthest.is_down and self.sim.now_s - renewed_s >= RENEW_S:
                renewed_s = self.renewed_s = self.sim.now_s
                self.claim = replace(self.claim, count=self.claim.count + 1)
                farthest.claims[self.claim.generation] = self.claim

    def _exchange(self) -> Stop | None:
        """All ranks hear what rank 0's saves came to."""
        news, self.news = self.news, []
        learned = self._agreed([p.learn(news) for p in self.protocols])
        for checkpoint_id in learned.confirmed:
            self.ledger.confirm(checkpoint_id)
        for checkpoint_id in learned.failed:
            self.ledger.fail(checkpoint_id)
        stop: Stop | None = learned.stop
        return stop

    def _save(self, *, durable: bool) -> Steps:
        yield
        stop = self._exchange()
        if stop is not None:
            self.sim.check_stopped(self, stop)
            self.end("stops: superseded")
            return
        order = self._begin_save(self._new_id(), self.sim.now_ms(), durable=durable)
        if order is not None:
            yield from self._carry_out(order)

    def _begin_save(self, name: CheckpointId, now_ms: int, *, durable: bool) -> Save | None:
        order: Save = self._agreed(
            [p.save(name, step=self.step, now_ms=now_ms, durable=durable) for p in self.protocols]
        )
        return order

    def _new_id(self) -> CheckpointId:
        self._saves += 1
        return CheckpointId(f"{self.step:04d}-{self.number}-{self._saves}")

    def _carry_out(self, order: Save) -> Steps:
        must(
            self.lineage in ("", order.placement.lineage),
            f"{self} resumed the lineage {self.lineage} and saves in {order.placement.lineage}",
        )
        records = self.sim.records(self.unrecorded, len(self.machines))
        self.unrecorded = []
        data = self.ledger.commit(
            records, order.placement.checkpoint_id, durable=order.durable, world_size=len(self.machines)
        )
        checkpoint = Checkpoint(placement=order.placement, step=self.step, trained=self.trained, data=data)
        if order.final:
            self.sim.final_saves.add(checkpoint.checkpoint_id)
        self.sim.tell(
            f"{self} saves {checkpoint.checkpoint_id}{' finally' if order.final else ''}"
            f"{'' if order.durable else ' in memory'} (parent {order.placement.parent})"
        )
        yield from self._copy(order, checkpoint)

    def _copy(self, order: Save, checkpoint: Checkpoint) -> Steps:
        for machine in dict.fromkeys(self.machines):
            yield
            if not machine.memory_fails:
                self._keep_image(machine, checkpoint.copy())
                if any(i.generation == checkpoint.generation for i in self.images_on(machine)[:-1]):
                    self.sim.settle(machine, checkpoint.generation)
        first = self.machines[0]
        image = next((i for i in self.images_on(first) if i.checkpoint_id == checkpoint.checkpoint_id), None)
        if image is not None:
            self.sim.send(
                self,
                first,
                image,
                slot=first.name,
                holders={m.name for m in self.machines},
                is_there=lambda: any(i is image for held in first.images.values() for i in held),
            )
        if order.durable:
            upload = Upload(save=order, checkpoint=checkpoint)
            self.in_flight[checkpoint.checkpoint_id] = upload
            self._pass_on(upload, 0)

    def images_on(self, machine: Machine) -> list[Checkpoint]:
        return machine.images.setdefault(self.number, [])

    def _take_over_images(self, machine: Machine) -> None:
        """What the dead have left; of several, the set with the newest."""
        own = self.images_on(machine)
        dead = [n for n in machine.images if n != self.number and self.sim.lives[n].is_over]
        for number in sorted(dead, key=lambda n: max((i.order for i in machine.images[n]), default=(0, 0))):
            own[:] = machine.images.pop(number) or own

    def _keep_image(self, machine: Machine, image: Checkpoint) -> None:
        if machine.generation > image.generation:
            return  # Fenced: a newer generation has looked here.
        images = self.images_on(machine)
        while len(images) >= IMAGES:
            images.remove(min(images, key=lambda i: i.order))
        images.append(image)

    # --- the pipeline ---------------------------------------------------------------------------------------

    def _pass_on(self, upload: Upload, number: int) -> None:
        """To the next destination, or to its end."""
        if number == len(self.sim.destinations):
            self._ended(upload)
            return
        queue = self.waiting[self.sim.destinations[number].name]
        for overtaken in [waiting for waiting in queue if not waiting.save.final]:
            queue.remove(overtaken)
            overtaken.missing.append(f"{self.sim.destinations[number].name}: overtaken")
            self._pass_on(overtaken, number + 1)
        queue.append(upload)

    def _ended(self, upload: Upload) -> None:
        checkpoint_id = upload.checkpoint.checkpoint_id
        del self.in_flight[checkpoint_id]
        self.sim.ended(self, upload)
        self.news.append(
            SaveEnded(
                checkpoint_id=checkpoint_id,
                is_durable=bool(upload.reached),
                missing=tuple(upload.missing),
                superseded=upload.superseded,
            )
        )

    def _upload_to(self, destination: Destination) -> Steps:
        queue = self.waiting[destination.name]
        while True:
            yield
            if not queue:
                continue
            upload = queue.popleft()
            yield from self._publish(upload, destination)
            self._pass_on(upload, self.sim.destinations.index(destination) + 1)

    def _publish(self, upload: Upload, destination: Destination) -> Steps:
        sim = self.sim
        for _ in range(destination.slowness):
            yield
        if destination.is_down or sim.chance(sim.save_failures) or not sim.is_within_reach(self, destination):
            upload.missing.append(f"{destination.name}: failed")
            return
        yield from self._publish_manifest(upload, destination)

    def _publish_manifest(self, upload: Upload, destination: Destination) -> Steps:
        sim = self.sim
        newest = max(destination.claims, default=0)
        if is_superseded(upload.checkpoint.generation, list(destination.claims)):
            upload.superseded = f"{destination.name}: superseded"
            return
        must(
            newest <= upload.checkpoint.generation,
            f"{self} publishes {upload.checkpoint.checkpoint_id} in {destination.name}, which generation {newest} has claimed",
        )
        sim.perhaps_freeze(self)
        yield  # Here a newer generation may take over, look, and write its fence.
        # A copy of what a newer generation has seen elsewhere is no surprise to it.
        looked = sim.first_looked.setdefault(upload.checkpoint.checkpoint_id, destination.looked)
        published = upload.checkpoint.copy(looked=looked)
        base = published.data.base
        must(
            base is None or base in sim.ever_durable,
            f"{published.checkpoint_id} continues {base}, which never existed",
        )
        sim.check_parts(self, destination, published)
        sim.ever_durable.add(published.checkpoint_id)
        if looked > published.generation:
            sim.published_too_late()
        destination.checkpoints[published.checkpoint_id] = published
        sim.landed(self, destination, published)
        if not sim.hears_of(self, destination):
            # It is there, and whoever wrote it does not know, nor looks what could be removed.
            sim.unheard += 1
            upload.missing.append(f"{destination.name}: no answer")
            return
        upload.reached.append(destination.name)
        sim.tell(f"{published.checkpoint_id} of {self} is in {destination.name}")
        sim.published(self, destination, published)
        if is_superseded(upload.checkpoint.generation, list(destination.claims)):
            upload.superseded = f"{destination.name}: superseded"
            return  # Its retention would remove what the newer generation continues from.
        yield
        for gone in self._removable(destination):
            yield
            sim.check_removal(self, destination, gone)
            destination.checkpoints.pop(gone.checkpoint_id, None)
            destination.parts.difference_update((gone.checkpoint_id, part) for part in gone.parts)
            sim.removed(self, destination, gone)

    def _removable(self, destination: Destination) -> list[Checkpoint]:
        own = [c for c in destination.checkpoints.values() if c.placement.run in ("", self.sim.run_name)]
        damaged = {c.checkpoint_id for c in own if not c.intact and c.checkpoint_id in self.sim.known_damaged}
        return removable(own, keep_count=self.sim.keep_count, in_use=set(self.in_flight), damaged=damaged)

    # --- ending ---------------------------------------------------------------------------------------------

    def _finish(self) -> Steps:
        self.is_finishing = True
        while True:
            yield
            stop = self._exchange()
            if stop is not None:
                self.sim.check_stopped(self, stop)
                self.end("stops: superseded")
                return
            name, now_ms = self._new_id(), self.sim.now_ms()
            instruction = self._next_to_finish(name, now_ms)
            if isinstance(instruction, Save):
                yield from self._carry_out(instruction)
            elif isinstance(instruction, Finished):
                self.sim.check_finished(self)
                assert self.claim is not None
                if not self.asked_to_leave:
                    for machine in self.machines:
                        machine.copy_table.forget(self.sim.run_name, self.claim.generation)
                        self.images_on(machine).clear()
                        machine.slots.pop(self.number, None)
                self._mark_ended()
                superseded = self.sim.has_newer(self)
                self.end("left" if self.asked_to_leave or superseded else "finished")
                return
            elif isinstance(instruction, Stop):
                self.sim.check_stopped(self, instruction)
                self.end(f"stops: {instruction.kind}")
                return
            elif isinstance(instruction, AwaitSave):
                must(instruction.checkpoint_id in self.in_flight or bool(self.news), f"{self} awaits nothing")
            else:
                self._check_skipped(instruction)

    def _next_to_finish(self, name: CheckpointId, now_ms: int) -> Any:
        return self._agreed([p.finish(self.step, name, now_ms=now_ms) for p in self.protocols])

    def _check_skipped(self, skip: Any) -> None:
        raise Violation(f"{self} was told {skip}")

    def _mark_ended(self) -> None:
        farthest = self.sim.destinations[-1]
        assert self.claim is not None
        if not farthest.is_down:
            farthest.claims[self.claim.generation] = replace(self.claim, ended=True)


class ShardedLife(Life):
    """The same with a part of the state on every rank."""

    def __init__(
        self, sim: Simulation, number: int, launch: str, machines: list[Machine], ranks: int
    ) -> None:
        super().__init__(sim, number, launch, machines, ranks)
        replicas = 2 if ranks % 2 == 0 and sim.chance(0.3) else 1
        count = ranks // replicas
        self.parts = [f"{rank % count}/{count}" for rank in range(ranks)]
        self.tasks = [self._main(), self._keep_claim()]
        self.slots: list[Slot] = []
        """By rank."""
        self.state: list[dict[int, Checkpoint]] = [{} for _ in range(ranks)]
        """By rank: what each unit of its state was read from."""
        self.resumed: CheckpointId | None = None
        self.uploads: list[Upload] = []
        """Those that some rank is not finished with; one that has failed may be over before."""
        self.is_owed = False
        """A durable save was due and did not begin."""

    # --- starting -------------------------------------------------------------------------------------------

    def _offers_in_memory(self, rank: int, machine: Machine) -> list[Offer]:
        """The images are shared out among the ranks of their machine, those of other worlds as well."""
        own = machine.slots.setdefault(self.number, [])
        here = [r for r, each in enumerate(self.machines) if each is machine]
        if rank == here[0]:
            for number in [n for n in machine.slots if n != self.number and self.sim.lives[n].is_over]:
                own.extend(machine.slots.pop(number))
            for image in self._images_of(machine):
                image.is_written, image.readers = False, 0
            self.truth[machine.name] = [i.content for i in self._images_of(machine) if i.content is not None]
        return [
            image.content.offer(tier=MEMORY, where=f"image {n}", distance=0)
            for n, image in enumerate(self._images_of(machine))
            if image.content is not None and here[n % len(here)] == rank
        ] + (self._offers_on_shelves(rank, machine) if rank == here[0] else [])

    def _images_of(self, machine: Machine) -> list[Image]:
        return [image for slot in machine.slots[self.number] for image in slot]

    def _load(self, rank: int, load: Any) -> LoadReport:
        assert isinstance(load, LoadShards)
        for unit in sorted(units_of(self.parts[rank])):
            for source in load.seen_from(self.machines[rank].name):
                report = self._read(rank, unit, source, load.struck)
                if report is not None:
                    break
            else:
                return LoadReport(error=f"nothing is left to read {unit} from", fault="copy")
            if report.fault != "none":
                return report
        return LoadReport()

    def _read(self, rank: int, unit: int, source: Source, struck: tuple[str, ...]) -> LoadReport | None:
        """None: this one does not have it."""
        if source.machine:
            machine = next(m for m in self.machines if m.name == source.machine)
            if source.offer.tier == PEER:
                image = self.in_copy_table(source.offer.where)
            else:
                image = self._images_of(machine)[int(source.offer.where.removeprefix("image "))].content
            if image is None:
                return LoadReport(error="deleted", fault="copy", struck=(source.name,))
            if unit not in units_of(image.part):
                return None
            if not image.intact:
                return LoadReport(error="damaged", fault="copy", struck=(source.name,))
            self.state[rank][unit] = image
            return LoadReport()
        destination = next(d for d in self.sim.destinations if d.name == source.offer.where)
        if destination.is_down:
            return LoadReport(error="out of reach", fault="away", struck=(source.name,))
        found = destination.checkpoints.get(source.offer.checkpoint_id)
        if found is None or not found.has_payload:
            self.found_damaged.add((source.offer.checkpoint_id, destination.name))
            return LoadReport(error="missing", fault="copy", struck=(source.name,))
        part = next(part for part in found.parts if unit in units_of(part))
        if (name := f"{destination.name}/{part}") in struck:
            return None
        if part in found.damaged:
            self.found_damaged.add((found.checkpoint_id, destination.name))
            return LoadReport(error="damaged", fault="copy", struck=(name,))
        self.state[rank][unit] = found
        return LoadReport()

    def _restored(self) -> Checkpoint:
        read = [copy for units in self.state for copy in units.values()]
        must(
            len({copy.checkpoint_id for copy in read}) == 1,
            f"{self} restored a mixture: {sorted({copy.checkpoint_id for copy in read})}",
        )
        for rank, units in enumerate(self.state):
            must(
                set(units) == units_of(self.parts[rank]),
                f"rank {rank} of {self} restored a part of its state",
            )
        self.resumed = read[0].checkpoint_id
        for machine, units in zip(self.machines, self.state, strict=True):
            self.sim.check_nearest(self, machine, units)
        self.sim.counts["filled"] += len({bool(copy.part) for copy in read}) == 2
        return read[0].copy(looked=max(copy.looked for copy in read), part="")

    def _train(self) -> Steps:
        for machine in dict.fromkeys(self.machines):
            slots = machine.slots[self.number]
            # What was loaded is overwritten last wherever somebody takes it over.
            slots.sort(key=lambda slot: any(i.checkpoint_id == self.resumed for i in slot), reverse=True)
            slots.extend([] for _ in range(self.machines.count(machine) - len(slots)))
        taken: Counter[str] = Counter()
        for machine in self.machines:
            slot = machine.slots[self.number][taken[machine.name]]
            taken[machine.name] += 1
            slot.extend(Image() for _ in range(self.sim.images_per_rank - len(slot)))
            self.slots.append(slot)
        yield from super()._train()

    # --- saving ---------------------------------------------------------------------------------------------

    def _ready(self, rank: int) -> Ready:
        slot = self.slots[rank]
        free = [image for image in slot if image.is_free]
        held = {i.content.checkpoint_id for i in slot if i.content is not None and not i.is_written}
        return Ready(
            has_image=bool(free) and not any(image.is_written for image in slot),
            held=frozenset(held),
            kept=frozenset(name for name in held if any(image.checkpoint_id != name for image in free)),
            busy=frozenset(
                name for upload in self.uploads for name, ranks in upload.writers.items() if rank in ranks
            ),
            part=self.parts[rank],
            has_one_image=len(slot) == 1,
            sending=frozenset(
                name for number, name in self.machines[rank].sending if number == self.number and name in held
            ),
        )

    def _begin_save(self, name: CheckpointId, now_ms: int, *, durable: bool) -> Save | None:
        must(durable or not self.is_owed, f"{self} has forgotten a durable save that was skipped")
        ready = [self._ready(rank) for rank in range(len(self.machines))]
        order: Save | Skip = self._agreed(
            [
                p.save_shards(name, ready, step=self.step, now_ms=now_ms, durable=durable)
                for p in self.protocols
            ]
        )
        self.is_owed = (durable or self.is_owed) and not (isinstance(order, Save) and order.durable)
        if isinstance(order, Save):
            is_busy = any(ranks for upload in self.uploads for ranks in upload.writers.values())
            must(order.durable or not self.is_owed or is_busy, f"{self} saves in memory alone")
            return order
        self._check_skipped(order)
        return None

    def _check_skipped(self, skip: Any) -> None:
        """There is something to wait for, or it would be so for ever."""
        assert isinstance(skip, Skip)
        self.sim.counts["skipped"] += 1
        must(
            bool(self.in_flight)
            or any(not image.is_free for slot in self.slots for image in slot)
            or any(machine.sending for machine in self.machines),
            f"{self} skips a save although nothing is under way: {skip.reason}",
        )

    def _copy(self, order: Save, checkpoint: Checkpoint) -> Steps:
        checkpoint.parts = tuple(dict.fromkeys(self.parts))
        upload = Upload(save=order, checkpoint=checkpoint)
        upload.last_complete = self.sim.last_complete(self)
        if order.durable:
            names = order.destinations or [d.name for d in self.sim.destinations]
            upload.writers = {name: set(range(len(self.parts))) for name in names}
            self.in_flight[checkpoint.checkpoint_id] = upload
            self.uploads = [u for u in self.uploads if any(u.writers.values())] + [upload]
            self.tasks.append(self._publish_shards(upload))
        for rank, slot in enumerate(self.slots):
            choices = [i for i in slot if i.is_free and (order.keep is None or i.checkpoint_id != order.keep)]
            must(bool(choices), f"{self} begins a save although rank {rank} has no image for it")
            image = min(choices, key=lambda i: i.content.order if i.content is not None else (0, 0))
            image.is_written = True
            image.readers = int(order.durable)
            self.tasks.append(self._save_part(rank, image, upload))
        if order.keep not in (None, self.resumed):
            self._forget_other_worlds()
        yield

    def _forget_other_worlds(self) -> None:
        """There is a complete snapshot of this one: what nobody has taken over is removed."""
        for machine in self.machines:
            slots = machine.slots[self.number]
            slots[:] = [slot for slot in slots if any(slot is own for own in self.slots)]
            assert self.claim is not None
            self.sim.settle(machine, self.claim.generation)

    def _save_part(self, rank: int, image: Image, upload: Upload) -> Steps:
        """Copy, mark, upload."""
        machine, part, sim = self.machines[rank], self.parts[rank], self.sim
        yield
        sim.overwrite(self, image, upload)
        for _ in range(sim.random.randint(1, 4)):
            yield
        writes = self.parts.index(part) == rank
        if not machine.memory_fails and machine.generation <= upload.checkpoint.generation:
            image.content = content = upload.checkpoint.copy(part=part)
            if writes:
                sim.send(
                    self,
                    machine,
                    content,
                    slot=f"{machine.name}/{rank}",
                    holders={m.name for m, p in zip(self.machines, self.parts, strict=True) if p == part},
                    is_there=lambda: image.content is content,
                )
        image.is_written = False
        for name, writers in upload.writers.items():
            destination = next(d for d in sim.destinations if d.name == name)
            for _ in range(destination.slowness if writes else 0):
                yield
            if writes and (destination.is_down or sim.chance(sim.save_failures / len(self.parts))):
                upload.failures.setdefault(name, f"{name}: part {part} failed")
            elif writes:
                destination.parts.add((upload.checkpoint.checkpoint_id, part))
            if rank:
                writers.discard(rank)
        image.readers = 0

    def _publish_shards(self, upload: Upload) -> Steps:
        """The first rank, when all parts are there."""
        checkpoint = upload.checkpoint
        for name, writers in upload.writers.items():
            destination = next(d for d in self.sim.destinations if d.name == name)
            while name not in upload.failures and not all(
                (checkpoint.checkpoint_id, part) in destination.parts for part in checkpoint.parts
            ):
                yield
            if (
                name in upload.failures
                or destination.is_down
                or not self.sim.is_within_reach(self, destination)
            ):
                upload.missing.append(upload.failures.get(name, f"{name}: failed"))
            else:
                yield from self._publish_manifest(upload, destination)
            writers.discard(0)
        self._ended(upload)

    # --- ending ---------------------------------------------------------------------------------------------

    def _next_to_finish(self, name: CheckpointId, now_ms: int) -> Any:
        ready = [self._ready(rank) for rank in range(len(self.machines))]
        return self._agreed([p.finish(self.step, name, now_ms=now_ms, ready=ready) for p in self.protocols])


class MachineAgent:
    """What the agent of a machine does when its workers have died: it finishes what they began, unless they come back."""

    def __init__(self, sim: Simulation, life: Life, machine: Machine) -> None:
        self.sim = sim
        self.life = life
        self.machine = machine
        self.is_given_up = False
        self.task: Steps = self._work()

    def __str__(self) -> str:
        return f"the agent of {self.life} on {self.machine.name}"

    def _images(self) -> list[Checkpoint]:
        """What is in memory under the life's name, or was taken over, and of its generation."""
        generation = self.life.claim.generation if self.life.claim is not None else 0
        return [copy for copy in self.machine.kept() if copy.generation == generation]

    def _ranks_of(self, copy: Checkpoint) -> tuple[int, ...]:
        if not isinstance(self.life, ShardedLife):
            return ()
        here = [r for r, machine in enumerate(self.life.machines) if machine is self.machine]
        return tuple(r for r in here if self.life.parts[r] == copy.part)

    def _left(self) -> list[Left]:
        found: dict[CheckpointId, Left] = {}
        for copy in self._images():
            before = found.get(copy.checkpoint_id)
            found[copy.checkpoint_id] = Left(
                checkpoint_id=copy.checkpoint_id,
                run=copy.placement.run,
                step=copy.step,
                generation=copy.generation,
                sequence=copy.placement.sequence,
                destinations=tuple(d.name for d in self.sim.destinations),
                ranks=tuple(sorted({*(before.ranks if before else ()), *self._ranks_of(copy)})),
                world_size=len(self.life.machines),
            )
        return list(found.values())

    def _work(self) -> Steps:
        yield
        left = self._left()
        if not left:
            return
        finishing = Finishing(left, now_s=self.sim.now_s, patience_s=10.0)
        while True:
            yield
            if self.is_given_up:
                finishing.give_up("workers are started again")
            instruction = finishing.decide(self.sim.now_s)
            if isinstance(instruction, Ended):
                for outcome in instruction.outcomes:
                    self.sim.counts["finished by agent"] += outcome.result == "saved"
                    self.sim.counts["agent refused"] += outcome.result == "refused"
                    self.sim.tell(f"{self}: {outcome}")
                return
            if isinstance(instruction, Wait):
                continue
            destination = next(d for d in self.sim.destinations if d.name == instruction.destination)
            if destination.is_down:
                finishing.away(destination.name, "out of reach", now_s=self.sim.now_s)
            elif isinstance(instruction, Look):
                finishing.saw(destination.name, self._look(destination))
            elif isinstance(instruction, Meet):
                for copy in self._images():
                    for rank in self._ranks_of(copy):
                        held = destination.held.setdefault((instruction.generation, rank), set())
                        held.add(copy.checkpoint_id)
                yield
                known = {r: held for (g, r), held in destination.held.items() if g == instruction.generation}
                finishing.met(
                    destination.name, {r: list(held) for r, held in known.items()}, now_s=self.sim.now_s
                )
            else:
                yield from self._write(finishing, instruction, destination)

    def _look(self, destination: Destination) -> Seen:
        own = [c for c in destination.checkpoints.values() if c.placement.run == self.sim.run_name]
        newest = max(own, key=lambda c: c.order, default=None)
        return Seen(
            run=self.sim.run_name,
            claimed=max(destination.claims, default=0),
            newest=newest.order if newest is not None else None,
            newest_step=newest.step if newest is not None else None,
        )

    def _write(self, finishing: Finishing, write: WriteSnapshot, destination: Destination) -> Steps:
        sim, wanted = self.sim, write.snapshot.checkpoint_id
        for _ in range(destination.slowness):
            yield
        copies = [copy for copy in self._images() if copy.checkpoint_id == wanted]
        is_fenced = self.machine.generation > write.snapshot.generation
        if self.is_given_up or is_fenced or len(copies) < max(1, len(write.snapshot.ranks)):
            finishing.give_up("workers are at work with the image again")
            return
        if not all(copy.intact for copy in copies):
            finishing.damaged(wanted, "damaged")
            return
        must(
            all(
                (wanted in destination.held.get((write.snapshot.generation, rank), ()))
                for rank in range(write.snapshot.world_size)
            )
            or not write.snapshot.ranks,
            f"{self} writes {wanted} without knowing that every rank has it",
        )
        if destination.is_down or sim.chance(sim.save_failures):
            finishing.away(destination.name, "failed", now_s=sim.now_s)
            return
        destination.parts.update((wanted, copy.part) for copy in copies if copy.part)
        parts = copies[0].parts
        if parts and 0 not in write.snapshot.ranks:
            if wanted in destination.checkpoints:
                finishing.wrote(destination.name, write.snapshot)
            else:
                finishing.away(destination.name, "the first rank's agent has not published", now_s=sim.now_s)
            return
        if any((wanted, part) not in destination.parts for part in parts):
            finishing.away(destination.name, "parts are missing", now_s=sim.now_s)
            return
        newest = max(destination.claims, default=0)
        refusal = finishing.admit(write.snapshot, claimed=newest, is_there=wanted in destination.checkpoints)
        if refusal == "superseded":
            finishing.refused(destination.name, refusal)
            return
        if refusal is not None:
            finishing.away(destination.name, refusal, now_s=sim.now_s)
            return
        must(
            newest <= write.snapshot.generation,
            f"{self} publishes {wanted} in {destination.name}, which generation {newest} has claimed",
        )
        yield  # Here a newer generation may take over, look, and write its fence.
        looked = sim.first_looked.setdefault(wanted, destination.looked)
        # As it was when it was verified: what becomes of the image afterwards does not matter.
        published = copies[0].copy(looked=looked, part="")
        base = published.data.base
        must(base is None or base in sim.ever_durable, f"{wanted} continues {base}, which never existed")
        sim.check_parts(self.life, destination, published)
        sim.ever_durable.add(wanted)
        if looked > published.generation:
            sim.published_too_late()
        if wanted not in destination.checkpoints:
            destination.checkpoints[wanted] = published
            sim.made_durable.add(wanted)
        if is_superseded(write.snapshot.generation, list(destination.claims)):
            finishing.refused(destination.name, "superseded")
            return
        finishing.wrote(destination.name, write.snapshot)


class Simulation:
    """A run from its first start to its end, whatever happens in between."""

    run_name = "run-1"

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.random = Random(seed)
        self.story: list[str] = []
        self.instructions = 0
        self.clock_s = 0.0
        self.unheard = 0
        """How often a destination's answer was lost."""
        pick = self.random.randint
        self.total_steps = pick(12, 40)
        self.samples_per_step = pick(2, 5)
        self.epoch_samples = pick(10, 60)
        self.save_every = pick(2, 8)
        self.snapshot_every = pick(0, 4)
        self.keep_count = pick(1, 3)
        self.save_failures = self.random.choice([0.0, 0.05, 0.3])
        self.holders_are_remote = self.chance(0.5)
        names = ["disk", "s3"][: pick(1, 2)]
        self.destinations = [
            Destination(name=name, distance=n + 1, slowness=pick(0, 4 + 30 * n))
            for n, name in enumerate(names)
        ]
        self.machines = [Machine(name=f"m{n}") for n in range(pick(1, 3))]
        self.machines_made = len(self.machines)
        self.peer_copies = self.random.choice([0, 1, 1, 1, 2])
        self.copy_table_bytes = self.random.choice([100, 100, 100, 3])
        """An image has one."""
        self.has_racks = self.chance(0.3)
        self.senders: list[tuple[Machine, Steps]] = []
        """Of the machines' agents."""
        self.copies_given_up = False
        self.final_saves: set[CheckpointId] = set()
        """Some copy was refused, given up or lost: what was safe may not be any longer."""
        for machine in self.machines:
            self._furnish(machine)
        self.lives: list[Life] = []
        self.agents: list[MachineAgent] = []
        self.fenced_generations: set[int] = set()
        self.known_damaged: set[CheckpointId] = set()
        self.unwanted: set[CheckpointId] = set()
        self.ever_durable: set[str] = set()
        self.first_looked: dict[CheckpointId, int] = {}
        self.made_durable: set[CheckpointId] = set()
        """By agents."""
        self.saw_down = False
        self.faults_left = pick(0, 12)
        self.is_sharded = seed % 2 == 1
        self.images_per_rank = 1 if self.is_sharded and self.chance(0.1) else IMAGES
        self.counts = dict.fromkeys(
            (
                "crashes",
                "machines lost",
                "zombies",
                "damages",
                "outages",
                "resumed",
                "anew",
                "stopped",
                "stale",
                "removed",
                "skipped",
                "resharded",
                "filled",
                "older",
                "rescued",
                "rescued furthest",
                "copies",
                "copies refused",
                "copies cut off",
                "restored from peers",
                "finished by agent",
                "resumed from agent",
                "agent refused",
                "agents killed",
            ),
            0,
        )
        self._place_foreign_checkpoint()
        self._begin()

    def _begin(self) -> None:
        self.start_life(launch="launch-0")

    # --- chance and time ------------------------------------------------------------------------------------

    @property
    def now_s(self) -> float:
        return self.clock_s

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def tell(self, text: str) -> None:
        self.story.append(f"{self.now_s:8.1f}  {text}")

    def now_ms(self) -> int:
        """The clock of some rank 0: machines disagree."""
        return int(self.now_s * 1000) + self.random.randint(-2000, 2000) + 10_000

    def make_protocol(self) -> JobProtocol:
        return JobProtocol(
            run=self.run_name,
            save_every=self.save_every,
            snapshot_every=self.snapshot_every,
            patience_s=20.0,
        )

    def records(self, batches: Iterable[int], world_size: int) -> list[RankRecord]:
        """What each rank trained of these steps: every rank has a slice of each."""
        found: dict[tuple[int, int], RankRecord] = {}
        for batch in batches:
            start = batch * self.samples_per_step
            for sample in range(start, start + self.samples_per_step):
                epoch, position = divmod(sample, self.epoch_samples)
                rank = sample % world_size
                known = found.get((epoch, rank)) or RankRecord(
                    dataset="data", epoch=epoch, total=self.epoch_samples, rank=rank
                )
                found[epoch, rank] = known.with_span(position, position + 1)
        return list(found.values())

    # --- the run --------------------------------------------------------------------------------------------

    def run(self) -> dict[str, int]:
        try:
            while not any(life.outcome in ("finished", "stops: unloadable") for life in self.lives):
                self.instructions += 1
                must(self.instructions < INSTRUCTIONS_LIMIT, "the run does not come to its end")
                self._advance()
            if not any(life.outcome == "stops: unloadable" for life in self.lives):
                self._check_history()
        except Exception as error:
            raise SimulationFailed.of(self, error) from error
        return self.counts

    def _advance(self) -> None:
        if self.faults_left and self.chance(0.02):
            self.faults_left -= 1
            self._fault()
        if not self.faults_left:
            self.save_failures = 0.0
            for destination in self.destinations:
                destination.is_down = False
            for machine in self.machines:
                machine.memory_fails = False
        for life in self.lives:
            if life.is_frozen and (not self.faults_left or self.chance(0.01)):
                life.is_frozen = False
                self.tell(f"{life} wakes up")
        alive = [life for life in self.lives if life.is_alive]
        self.clock_s += TICK_S / 4
        if self.senders and self.chance(0.3):
            machine, task = self.random.choice(self.senders)
            try:
                next(task)
            except StopIteration:
                self.senders.remove((machine, task))
        if self.agents and self.chance(0.4):
            self._advance_agent()
            return
        current = self.lives[-1]
        if current.is_over and self.agents and self.chance(0.9):
            self._advance_agent()  # Nobody is in a hurry to start the run again.
            return
        if current.is_over and current.outcome != "finished":
            self.start_life(launch=current.launch if self.chance(0.6) else f"launch-{len(self.lives)}")
            return
        if current.is_frozen and self.chance(0.05):
            self.start_life(launch=current.launch if self.chance(0.5) else f"launch-{len(self.lives)}")
            return
        if not alive:
            return
        life = self.random.choice(alive)
        task = self.random.choice(life.tasks)
        try:
            next(task)
        except StopIteration:
            life.tasks.remove(task)

    def died(self, life: Life) -> None:
        """The agents of its machines finish its work, some of them after a while only."""
        if life.outcome == "finished" or life.claim is None:
            return
        for machine in dict.fromkeys(life.machines):
            if machine in self.machines and self.chance(0.6):
                self.agents.append(MachineAgent(self, life, machine))

    def _advance_agent(self) -> None:
        agent = self.random.choice(self.agents)
        if agent.machine not in self.machines or (self.faults_left and self.chance(0.01)):
            self.counts["agents killed"] += 1
            self.tell(f"{agent} is lost")
            self.agents.remove(agent)
            return
        try:
            next(agent.task)
        except StopIteration:
            self.agents.remove(agent)

    def start_life(self, *, launch: str) -> None:
        is_idle = all(life.is_over for life in self.lives) and not self.agents
        if is_idle and self.faults_left and self.chance(0.15):
            self._remove_newest()
        least = len(self.machines) if self.is_sharded and self.chance(0.6) else 1
        machines = self.random.sample(self.machines, self.random.randint(least, len(self.machines)))
        ranks = self.random.randint(len(machines), len(machines) + 2)
        kind = ShardedLife if self.is_sharded else Life
        life: Life = kind(self, len(self.lives), launch, machines, ranks)
        self.lives.append(life)
        for agent in self.agents:
            # A restart by the same agent. Those of another launch know nothing of it.
            agent.is_given_up |= agent.life.launch == launch and agent.machine in machines
        names = ", ".join(m.name for m in machines)
        self.tell(f"{life} starts with {ranks} ranks on {names} ({launch})")

    def life_of(self, claim: Claim | None) -> Life | None:
        return None if claim is None else self.lives[int(claim.holder)]

    # --- faults ---------------------------------------------------------------------------------------------

    def _fault(self) -> None:
        kind = self.random.choice(
            [
                "crash",
                "crash",
                "crash",
                "rank",
                "rank",
                "machine",
                "freeze",
                "damage",
                "damage memory",
                *(["damage all"] if self.chance(0.2) else []),
                *(["damage part", "delete images"] if self.is_sharded else []),
                *(["peer"] if self.peer_copies else []),
                "down",
                "memory",
                "leave",
            ]
        )
        self.strike(kind)

    def strike(self, kind: str) -> None:
        current = self.lives[-1]
        if kind == "crash" and current.is_alive:
            self.counts["crashes"] += 1
            current.end("crashes")
        elif kind == "rank" and current.is_alive:
            current.lose_ranks(current.machines, "loses a rank")
        elif kind == "machine":
            self.lose_machine(self.random.choice(self.machines))
        elif kind == "freeze" and current.is_alive:
            self.counts["zombies"] += 1
            current.is_frozen = True
            self.tell(f"{current} stands still")
        elif kind == "damage":
            # One destination at most is damaged: with all copies gone there is nothing to prove.
            near = self.destinations[0]
            found = [c for c in near.checkpoints.values() if c.placement.run == self.run_name]
            if found and (len(self.destinations) > 1 or len(found) > 1):
                self._damage(max(found, key=lambda c: c.order), near.name)
        elif kind == "damage all":
            for destination in self.destinations:
                for copy in destination.checkpoints.values():
                    self._damage(copy, destination.name)
        elif kind == "damage memory":
            images = [image for machine in self.machines for image in machine.kept()]
            if images:
                self._damage(self.random.choice(images), "memory")
        elif kind == "damage part":
            self._damage_part_everywhere()
        elif kind == "delete images":
            machine = self.random.choice(self.machines)
            self.tell(f"the images of {machine.name} are deleted")
            self.copies_given_up = True
            for image in [i for slots in machine.slots.values() for slot in slots for i in slot]:
                if image.content is not None:  # Somebody may be about to read it.
                    image.content.intact, image.content = False, None
        elif kind == "down":
            destination = self.random.choice(self.destinations)
            destination.is_down = not destination.is_down
            self.counts["outages"] += destination.is_down
            self.saw_down = True
            self.tell(f"{destination.name} is {'out of reach' if destination.is_down else 'back'}")
        elif kind == "memory":
            machine = self.random.choice(self.machines)
            machine.memory_fails = not machine.memory_fails
            self.copies_given_up = True
        elif kind == "peer":
            self.lose_copies(self.random.choice(self.machines))
        elif kind == "leave" and current.is_alive:
            current.asked_to_leave = True
            self.tell(f"{current} is asked to leave")

    def lose_copies(self, machine: Machine) -> None:
        """An agent ends, and another starts in its place: what it kept is lost."""
        self._lose_copies(machine)
        machine.copy_table, machine.copies = CopyTable(self.copy_table_bytes), {}
        machine.copy_table.fence(self.run_name, machine.generation)
        self.copies_given_up = True
        self.tell(f"the agent of {machine.name} ends, with all copies")

    def _lose_copies(self, machine: Machine) -> None:
        for copy in machine.copies.values():  # Somebody may be about to read it.
            copy.intact = False

    def lose_machine(self, lost: Machine) -> None:
        """Another comes in its place, under another name."""
        self.counts["machines lost"] += 1
        self.tell(f"machine {lost.name} is lost")
        self.machines.remove(lost)
        self._lose_copies(lost)
        for life in self.lives:
            if lost in life.machines and not life.is_over:
                left = [machine for machine in life.machines if machine in self.machines]
                life.lose_ranks(left if self.chance(0.5) else (), f"is lost with {lost.name}")
        self.machines.append(Machine(name=f"m{self.machines_made}"))
        self.machines_made += 1
        self._furnish(self.machines[-1])
        self.senders = [(machine, task) for machine, task in self.senders if machine is not lost]
        self.copies_given_up = True

    # --- copies on other machines -----------------------------------------------------------------------------

    def _furnish(self, machine: Machine) -> None:
        """Give a new machine what its agent needs; some have copies of another run."""
        machine.copy_table = CopyTable(self.copy_table_bytes)
        machine.rack = self.random.choice(["r1", "r2"]) if self.has_racks else ""
        if self.peer_copies and self.chance(0.2):
            foreign = Copy(
                run="run-2",
                slot="foreign",
                checkpoint_id=CheckpointId("foreign"),
                generation=99,
                sequence=1,
                size_bytes=1,
            )
            machine.copy_table.begin(foreign)
            machine.copy_table.finish(foreign)
            machine.copies[foreign] = self._foreign()

    def send(
        self,
        life: Life,
        machine: Machine,
        image: Checkpoint,
        *,
        slot: str,
        holders: set[str],
        is_there: Callable[[], bool],
    ) -> None:
        """A machine's agent has heard of a snapshot."""
        if not self.peer_copies or machine not in self.machines:
            return
        key = (life.number, image.checkpoint_id)
        machine.sending[key] = machine.sending.get(key, 0) + 1
        self.senders.append((machine, self._send(key, machine, image, slot, holders, is_there)))

    def _send(
        self,
        key: tuple[int, CheckpointId],
        machine: Machine,
        image: Checkpoint,
        slot: str,
        holders: set[str],
        is_there: Callable[[], bool],
    ) -> Steps:
        yield
        is_patient = not (self.faults_left and self.chance(0.1))
        if not is_patient:  # Nobody waits for it any longer.
            self._sent(machine, key)
            self.copies_given_up = True
        refusing: set[str] = set()
        roster = [each.peer for each in self.machines]
        chosen = targets(machine.name, holders, roster, copies=self.peer_copies)
        self._check_placed(machine, holders, chosen, roster)
        for peer in chosen:
            there = next((each for each in self.machines if each.name == peer.machine), None)
            outcome = (
                "lost" if there is None else (yield from self._copy_to(machine, there, image, slot, is_there))
            )
            if outcome != "complete":
                refusing.add(peer.machine)
                self.copies_given_up = True
        if is_patient:
            self._sent(machine, key)

    def _sent(self, machine: Machine, key: tuple[int, CheckpointId]) -> None:
        machine.sending[key] -= 1
        if not machine.sending[key]:
            del machine.sending[key]

    def _copy_to(
        self, source: Machine, there: Machine, image: Checkpoint, slot: str, is_there: Callable[[], bool]
    ) -> Generator[None, None, str]:
        copy = Copy(
            run=image.placement.run,
            slot=slot,
            checkpoint_id=image.checkpoint_id,
            generation=image.generation,
            sequence=image.placement.sequence,
            size_bytes=1,
        )
        copy_table, safe = there.copy_table, self.safe()
        answer = copy_table.begin(copy)
        if not isinstance(answer, Accepted):
            self.counts["copies refused"] += 1
            self.tell(f"{there.name} refuses {slot} of {copy.checkpoint_id}: {answer.reason}")
            return "refused"
        if (
            copy.checkpoint_id not in self.final_saves
        ):  # The last one is durable, or the run fails: it waits for no copies.
            self.check_safe(safe, f"the arrival of {copy.checkpoint_id} at {there.name}")
        if answer.is_there:
            return "complete"
        for _ in range(self.random.randint(1, 12)):
            yield
            is_cut = not image.intact or (bool(self.faults_left) and self.chance(0.02))
            is_cut = is_cut or not self.reaches(source, there)
            if is_cut or not is_there() or there not in self.machines or there.copy_table is not copy_table:
                # What was sent is not what its digests say, or not all of it; who is lost has nothing.
                copy_table.abandon(copy)
                self.counts["copies cut off"] += 1
                return "cut off"
        if copy_table.finish(copy) is not None:
            return "refused"
        there.copies[copy] = image.copy(looked=there.generation)
        self.counts["copies"] += 1
        self.tell(f"{slot} of {copy.checkpoint_id} is with {there.name}")
        return "complete"

    def reaches(self, source: Machine, there: Machine) -> bool:
        return True

    def landed(self, life: Life, destination: Destination, checkpoint: Checkpoint) -> None:
        """A manifest is in a destination, whether or not its writer hears of it."""

    def published(self, life: Life, destination: Destination, checkpoint: Checkpoint) -> None:
        """Its writer knows."""

    def is_within_reach(self, life: Life, destination: Destination) -> bool:
        """Whether a request of it gets there."""
        return True

    def hears_of(self, life: Life, destination: Destination) -> bool:
        """Whether it gets the answer."""
        return True

    def ended(self, life: Life, upload: Upload) -> None:
        """A save is over, in all destinations."""

    def removed(self, life: Life, destination: Destination, checkpoint: Checkpoint) -> None:
        """Retention has taken one out of it."""

    def restored(self, life: Life, resume: Resume) -> None:
        """A life continues."""

    def _check_placed(
        self, machine: Machine, holders: set[str], chosen: list[Peer], roster: list[Peer]
    ) -> None:
        must(
            not {peer.machine for peer in chosen} & {machine.name, *holders},
            f"a copy of what {machine.name} has is sent to one who has it",
        )
        domains = {peer.machine: peer.domain for peer in roster}
        have = {domains.get(name, name) for name in holders} | {peer.domain for peer in chosen}
        must(
            len(have) > 1 or len({peer.domain for peer in roster}) == 1,
            f"all copies of {machine.name} are in one failure domain, and there are others",
        )

    def needed_peers(self, life: Life, loaded: Checkpoint) -> bool:
        """Whether it could not have been restored but for copies."""
        copy_tables = {
            id(checkpoint) for machine in self.machines for _, checkpoint in machine.in_copy_table()
        }
        without = [
            copy
            for copies in life.truth.values()
            for copy in copies
            if copy.checkpoint_id == loaded.checkpoint_id and id(copy) not in copy_tables
        ]
        return not complete(without, intact=True)

    def settle(self, machine: Machine, generation: int) -> None:
        if machine in self.machines:
            machine.copy_table.settle(self.run_name, generation)

    def safe(self) -> tuple[int, int] | None:
        """The newest snapshot that the loss of any one machine would leave complete in the others' memories, as far as marks tell:
        nobody reads images again while they are kept, so what is damaged meanwhile is found by who loads it."""
        units: dict[tuple[int, int], dict[str, set[int]]] = {}
        for machine in self.machines:
            for copy in machine.kept():
                if copy.placement.run == self.run_name:
                    held = units.setdefault(copy.order, {})
                    held.setdefault(machine.name, set()).update(copy.units(intact=False))
        return max(
            (
                order
                for order, held in units.items()
                if all(
                    set().union(*(u for name, u in held.items() if name != lost.name)) >= UNITS
                    for lost in self.machines
                )
            ),
            default=None,
        )

    def check_safe(self, before: tuple[int, int] | None, what: str) -> None:
        """What no single loss could have cost stays so, within a generation, unless something has gone wrong with copies."""
        newest = max((m.generation for m in self.machines), default=0)
        is_sure = self.is_sharded and self.peer_copies and self.images_per_rank > 1
        is_sure = is_sure and before is not None and before[0] == newest
        if before is None or not is_sure or self.copies_given_up:
            return
        after = self.safe()
        must(after is not None and after >= before, f"{what} costs {before}, which was safe; now {after} is")

    def perhaps_lose_a_destination(self) -> None:
        """Just when it is needed."""
        if self.faults_left and self.chance(0.05):
            destination = self.random.choice(self.destinations)
            destination.is_down = self.saw_down = True
            self.counts["outages"] += 1
            self.tell(f"{destination.name} is out of reach")

    def perhaps_freeze(self, life: Life) -> None:
        """Between being admitted and publishing: the zombie that nobody can refuse in time."""
        if self.faults_left and life is self.lives[-1] and self.chance(0.1 if self.is_sharded else 0.03):
            self.counts["zombies"] += 1
            life.is_frozen = True
            self.tell(f"{life} stands still while it publishes")

    def published_too_late(self) -> None:
        """A zombie was quicker than its refusal. The best moment for the newer generation to crash."""
        self.counts["stale"] += 1
        newest = self.lives[-1]
        if self.faults_left and newest.is_alive and self.chance(0.8):
            newest.end("crashes")

    def _remove_newest(self) -> None:
        """Somebody deletes the payload of the newest checkpoint, to go back to the one before it."""
        stored = [
            c for d in self.destinations for c in d.checkpoints.values() if c.placement.run == self.run_name
        ]
        if len({c.checkpoint_id for c in stored}) > 1:
            newest = max(stored, key=lambda c: c.order).checkpoint_id
            self.unwanted.add(newest)
            for copy in stored:
                copy.has_payload = copy.has_payload and copy.checkpoint_id != newest
            self.tell(f"the payload of {newest} is removed")

    def _damage(self, copy: Checkpoint, where: str, unit: int | None = None) -> None:
        """Of a sharded one in a destination, the part that has this unit, or any."""
        self.counts["damages"] += 1
        copy.intact = False
        part = copy.part
        if copy.parts and not part:
            part = self.random.choice([p for p in copy.parts if unit is None or unit in units_of(p)])
            copy.damaged.add(part)
        self.tell(f"{f'{part} of ' if part else ''}{copy.checkpoint_id} in {where} is damaged")

    def _damage_part_everywhere(self) -> None:
        """All copies of one part of the newest checkpoint, if there is another."""
        copies = [(c, m.name) for m in self.machines for c in m.kept()]
        copies += [(c, d.name) for d in self.destinations for c in d.checkpoints.values()]
        own = [(c, where) for c, where in copies if c.placement.run == self.run_name]
        if len({c.checkpoint_id for c, _ in own}) < 2:
            return
        newest = max(own, key=lambda each: each[0].order)[0].checkpoint_id
        unit = self.random.choice(sorted(UNITS))
        for copy, where in own:
            if copy.checkpoint_id == newest and unit in units_of(copy.part):
                self._damage(copy, where, unit)

    def _place_foreign_checkpoint(self) -> None:
        """Somebody has copied a checkpoint of another run into the folder; it looks newer than anything."""
        self.destinations[0].checkpoints[CheckpointId("foreign")] = self._foreign()

    def _foreign(self) -> Checkpoint:
        foreign = Placement(
            checkpoint_id=CheckpointId("foreign"), run="run-2", generation=99, sequence=1, lineage="foreign"
        )
        return Checkpoint(placement=foreign, step=9999, trained=(9,), data=DataCommit())

    # --- what must hold -------------------------------------------------------------------------------------

    def fenced(self, life: Life) -> None:
        """A generation has looked: it writes down what it saw."""
        fence = life.protocols[0].fence
        assert life.claim is not None
        must(fence.generation == life.claim.generation, "the claimed generation does not travel")
        life.claim = life.claim.with_fence(fence)
        for destination in self.destinations:
            if life.claim.generation in destination.claims:
                destination.claims[life.claim.generation] = life.claim
        self.fenced_generations.add(life.claim.generation)
        for machine in life.machines:
            machine.generation = max(machine.generation, life.claim.generation)
            machine.copy_table.fence(self.run_name, life.claim.generation)

    def has_newer(self, life: Life) -> bool:
        assert life.claim is not None
        return max(self.destinations[-1].claims) > life.claim.generation

    def _is_stale(self, copy: Checkpoint) -> bool:
        """Published by a superseded process, after a newer one had looked, which wrote down what it had seen."""
        return any(copy.generation < g <= copy.looked for g in self.fenced_generations)

    def _offered(self, life: Life) -> list[Checkpoint]:
        """Every copy there was when this life looked, damaged or not, that it may use and that nobody has removed since; of
        sharded ones, if all of it is there."""
        stored = {d.name: d.checkpoints for d in self.destinations}
        return complete(
            copy
            for place, copies in life.truth.items()
            for copy in copies
            if copy.checkpoint_id in stored.get(place, {copy.checkpoint_id: copy})
            and copy.checkpoint_id not in self.unwanted
            and not self._is_stale(copy)
            and copy.placement.run == self.run_name
        )

    def check_load(self, life: Life, load: Load | LoadShards) -> None:
        if isinstance(load, Load):
            return
        there = frozenset[int]().union(*(units_of(source.offer.part) for source in load.sources))
        must(there == UNITS, f"{life} loads {load.offer.checkpoint_id}, which is not all there")

    def check_nearest(self, life: Life, machine: Machine, read: dict[int, Checkpoint]) -> None:
        """What this machine's memory has is read from there, then what that of others has."""
        distances = {id(c): 1 for m in life.machines for c in life.truth[m.name]}
        distances |= {id(c): 0 for c in life.truth[machine.name]}
        images = [c for m in dict.fromkeys(life.machines) for c in life.truth[m.name]]
        for unit, copy in read.items():
            same = [c for c in images if c.checkpoint_id == copy.checkpoint_id]
            nearest = min((distances[id(c)] for c in same if unit in c.units(intact=True)), default=2)
            must(
                distances.get(id(copy), 2) <= nearest,
                f"{life} reads {unit} of {copy.checkpoint_id} from afar, although memory has it",
            )

    def overwrite(self, life: ShardedLife, image: Image, upload: Upload) -> None:
        """The mark of an image is removed. From here on, a crash must not cost more than what is being made."""
        before, safe = self.last_complete(life), self.safe()
        image.content = None
        if not life.is_finishing:
            self.check_safe(safe, f"a save of {life}")
        if before is None or (upload.last_complete is not None and before < upload.last_complete):
            return  # Images were deleted after it had been settled what this save keeps: they cost it, not the save.
        must(
            self.images_per_rank == 1 or self.last_complete(life) == before,
            f"{life} overwrites a part of {before}, the last complete snapshot",
        )

    def last_complete(self, life: ShardedLife) -> tuple[int, int] | None:
        """The newest snapshot that is all there in the memories of a life's machines, of those that it has made or continues."""
        assert life.claim is not None
        images = [i for m in life.machines for slot in m.slots[life.number] for i in slot]
        kept = [
            i.content
            for i in images
            if i.content is not None
            and (i.content.generation == life.claim.generation or i.checkpoint_id == life.resumed)
        ]
        return max((copy.order for copy in complete(kept)), default=None)

    def check_parts(self, life: Life, destination: Destination, published: Checkpoint) -> None:
        missing = [p for p in published.parts if (published.checkpoint_id, p) not in destination.parts]
        must(
            not missing, f"{life} publishes {published.checkpoint_id} in {destination.name} without {missing}"
        )

    def check_restored(self, life: Life, loaded: Checkpoint) -> None:
        self.counts["resumed"] += 1
        must(loaded.placement.run == self.run_name, f"{life} restored what belongs to another run")
        must(loaded.intact, f"{life} restored a damaged checkpoint")
        is_of_this_world = not isinstance(life, ShardedLife) or set(life.parts) == set(loaded.parts)
        self.counts["resharded"] += not is_of_this_world
        must(
            loaded.trained == tuple(range(loaded.step)),
            f"the state of {loaded.checkpoint_id} is not its step's",
        )
        if self.has_newer(life):
            return  # It may start where it likes: what it publishes does not count.
        must(
            not self._is_stale(loaded),
            f"{life} restored what a superseded process published: {loaded.checkpoint_id}",
        )
        stored = {c.checkpoint_id for d in self.destinations for c in life.truth[d.name]}
        must(
            loaded.checkpoint_id not in self.unwanted & stored,
            f"{life} restored what its user has removed",
        )
        offered = self._offered(life)
        same = [copy for copy in offered if copy.checkpoint_id == loaded.checkpoint_id]
        must(
            all((copy.step, copy.trained) == (loaded.step, loaded.trained) for copy in same),
            f"{life} restored {loaded.checkpoint_id}, of which there are copies of another state",
        )
        further = [
            copy.checkpoint_id
            for copy in complete(offered, intact=True)
            if copy.order > loaded.order or (copy.generation == loaded.generation and copy.step > loaded.step)
        ]
        self.counts["rescued furthest"] += loaded.checkpoint_id.endswith("rescue") and any(
            copy.generation == loaded.generation and copy.step < loaded.step for copy in offered
        )
        must(
            not further or self.counts["damages"] > 0,  # Then it is told by descent, below.
            f"{life} resumed from {loaded.checkpoint_id} although {further} are further",
        )
        self.counts["older"] += any(copy.order > loaded.order for copy in offered)
        best = best_by_descent(offered, complete(offered, intact=True))
        must(
            best is None or loaded.order >= best.order,
            f"{life} resumed from {loaded.checkpoint_id} although {best and best.checkpoint_id} is intact",
        )

    def check_new_beginning(self, life: Life) -> None:
        self.counts["anew"] += 1
        if self.has_newer(life):
            return
        offered = self._offered(life)
        stored = [c.checkpoint_id for d in self.destinations for c in life.truth[d.name] if c in offered]
        must(not stored, f"{life} starts anew although {stored} exist")
        must(not complete(offered, intact=True), f"{life} starts anew although memory has a state")

    def check_stopped(self, life: Life, stop: Stop) -> None:
        self.counts["stopped"] += 1
        if stop.kind == "unreachable":
            must(self.saw_down, f"{life} found a destination out of reach that never was")
        elif self.has_newer(life):
            pass  # What it wanted to load may have been removed since.
        elif stop.kind == "unloadable":
            intact = [c.checkpoint_id for c in complete(self._offered(life), intact=True)]
            must(not intact, f"{life} gave up although {intact} could be loaded")
        elif stop.kind == "superseded":
            assert life.claim is not None
            newest = max(self.destinations[-1].claims)
            must(newest > life.claim.generation, f"{life} was called superseded and is not")
        elif stop.kind == "final":
            pass
        else:
            raise Violation(f"{life} stopped: {stop}")

    def check_in_use(self, life: Life, claim: Claim) -> None:
        holder = self.life_of(claim)
        assert holder is not None
        must(not holder.is_over or self.holders_are_remote, f"{life} was refused for a dead holder")

    def check_taken_over(self, life: Life, newest: Claim | None) -> None:
        holder = self.life_of(newest)
        if holder is not None and newest is not None and newest.launch != life.launch and not newest.ended:
            was_awake = holder.is_alive and self.now_s - holder.renewed_s < SILENT_S / 2
            must(not was_awake, f"{life} took the run from {holder}, which is alive")

    def check_removal(self, life: Life, destination: Destination, gone: Checkpoint) -> None:
        self.counts["removed"] += 1
        must(gone.placement.run == self.run_name, f"{life} removes what belongs to another run")
        must(gone.checkpoint_id not in life.in_flight, f"{life} removes what it is still uploading")
        left = [
            c
            for c in destination.checkpoints.values()
            if c.placement.run == self.run_name
            and c.checkpoint_id not in (gone.checkpoint_id, *self.known_damaged)
        ]
        newer = [c for c in left if c.order > gone.order]
        must(
            len(newer) >= self.keep_count,
            f"{life} removes {gone.checkpoint_id} from {destination.name}, which leaves {len(newer)} newer",
        )

    def check_finished(self, life: Life) -> None:
        for destination in [] if self.has_newer(life) else self.destinations:
            final = [
                c
                for c in destination.checkpoints.values()
                if c.step == life.step
                and c.placement.run == self.run_name
                and c.trained == life.trained
                and (c.checkpoint_id, destination.name) not in life.found_damaged
            ]
            must(bool(final), f"{life} ended at step {life.step}, which is not in {destination.name}")

    def _check_history(self) -> None:
        """The audit of what is left in each destination, beside what the final state was really trained on."""
        for destination in self.destinations:
            own = [c for c in destination.checkpoints.values() if c.placement.run == self.run_name]
            own.sort(key=lambda c: c.order)
            related = [c for c in own if c.lineage == own[-1].lineage]
            cut_short = self.counts["stale"] + self.counts["stopped"] + self.unheard
            must(
                len(related) <= 2 * self.keep_count + 3 + cut_short,
                f"{destination.name} grows without bound",
            )
            must(
                own[-1].trained == tuple(range(self.total_steps)),
                "the newest checkpoint is not the final state",
            )
            commits = [
                Commit(
                    checkpoint_id=c.checkpoint_id,
                    parent_id=c.durable_parent,
                    trained_from=c.parent,
                    step=c.step,
                    data=c.data,
                )
                for c in own
            ]
            covered = 0
            for report in audit_all(commits, "data"):
                must(report.clean, f"epoch {report.epoch} in {destination.name}: {report.reason}")
                covered += report.samples * (report.last_epoch - report.epoch + 1)
            must(covered == self.total_steps * self.samples_per_step, f"the ledger has {covered} samples")


def complete(copies: Iterable[Checkpoint], *, intact: bool = False) -> list[Checkpoint]:
    """The copies of those checkpoints that all of them together make up, or that can be read from them."""
    copies = list(copies)
    there: dict[CheckpointId, frozenset[int]] = {}
    for copy in copies:
        known = there.get(copy.checkpoint_id, frozenset())
        there[copy.checkpoint_id] = known | copy.units(intact=intact)
    return [copy for copy in copies if there[copy.checkpoint_id] == UNITS]


def best_by_descent(offered: list[Checkpoint], usable: list[Checkpoint]) -> Checkpoint | None:
    """What a restart must at least continue from, told without following links: the newest; or, if that is not usable,
    the newest usable one of its generation, which it descends from; or else the oldest there is."""
    if not usable:
        return None
    newest = max(offered, key=lambda c: c.order)
    same = [c for c in usable if c.generation == newest.generation and c.lineage == newest.lineage]
    return max(same or [min(usable, key=lambda c: c.order)], key=lambda c: c.order)


def simulate(seed: int) -> dict[str, int]:
    return Simulation(seed).run()


def fingerprint(seed: int) -> str:
    simulation = Simulation(seed)
    simulation.run()
    return hashlib.sha256("\n".join(simulation.story).encode()).hexdigest()[:16]
