"""The protocol of an elastic job: what it restores, when it saves, what a save continues, and when it may end.

Every rank of a job holds a `JobProtocol` and gives it the same inputs in the same order: what the ranks have reported to each
other. So all of them decide alike, without a leader, and what one decides the others know. The training process only
carries out instructions and reports their outcome.

Starting. Each rank says what it could load (`Survey`). A destination that did not answer is asked again, and is fatal in
the end: "there is no checkpoint" is believed only of a destination that said so. The best offer of any rank and tier is
loaded; one that cannot be is struck out and the next best is taken, until none is left.

Generations. Each start of a run is a generation, claimed at its destinations before any rank looks. A process of an
earlier one that is still alive (a zombie) is refused when it publishes. What it published nevertheless, between looking
and writing, is identified by its fence: the newest checkpoint that the later generation had seen when it took over.

Sharded state. Every rank keeps its own part of a checkpoint in its machine's memory; a snapshot exists where the parts in
all memories together make it up. A load names every copy there is, nearest first, and each rank reads the slices it needs
from the nearest that has them; what proves to be damaged is struck out, part by part, and all of it is read again: never
a mixture of steps. A save begins on all ranks or on none, and says which snapshot all of them keep meanwhile: the last
complete one, or the one that training was resumed from, which may have been made by a world of another size.

Copies on peers. Agents keep copies of snapshots for other machines (`core.jobs.peers`): they are offered like images in memory, by a
rank of the machine that has them, or by the first rank where none of the ranks is there. A save of sharded state waits for its turn
until the copies of the last complete snapshot have arrived, so that there always is one whose parts are all somewhere else as well.

Saving. A save has its place in the lineage before a byte of it is copied. It is confirmed or failed when that is known,
which is when the ranks next exchange news: a failed one was never an ancestor of anything that says so.

Rescuing. Ranks that survive a lost one save their live state where that is known to be complete (`core.jobs.live`), each machine
for itself and without a word to the others, as the newest snapshot of their generation. It is found like any other, by the
next start.

Ending. A run ends normally when its final state is in every destination. Otherwise it fails and says what is missing.

Pure: no clock, no I/O, no collectives.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from strata.core.jobs.lineage import Lineage, Placement, fallback_order
from strata.core.jobs.peers import PEER
from strata.core.pauses import FIRST_DELAY_S, LONGEST_DELAY_S, pause_after_s
from strata.core.types import CheckpointId

MEMORY = "MEMORY"
FINAL_ATTEMPTS = 3

Order = tuple[int, int]
"""Generation, then sequence within it."""


# --- what ranks report to each other ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """A copy of a checkpoint that one rank could load."""

    checkpoint_id: CheckpointId
    run: str
    """The run it belongs to; empty where it was made before runs had names."""
    step: int
    generation: int
    sequence: int
    lineage: str
    parent: CheckpointId | None
    durable_parent: CheckpointId | None
    tier: str
    where: str
    """The destination, or the file of an image in memory."""
    distance: int
    """0 is this machine's memory; destinations count from 1, near to far."""
    is_sharded: bool = False
    part: str = ""
    """Of a sharded checkpoint in memory: what of it this image holds. Images of one name hold the same."""
    parts: tuple[str, ...] = ()
    """What all of such a checkpoint consists of. Empty for a complete copy."""
    holder: str = ""
    """The machine whose agent has it, where that is not the one of the rank that offers it. It is fetched before it is loaded."""

    @property
    def nearness(self) -> tuple[int, bool, bool]:
        """What is nearer comes first: a machine's own images, what its agent keeps, what others' do, destinations."""
        return (self.distance, bool(self.holder), self.tier == PEER)

    @property
    def order(self) -> Order:
        return (self.generation, self.sequence)

    @property
    def is_durable(self) -> bool:
        return self.distance > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Fence:
    """What a generation had seen when it took over: whatever an earlier one published after that does not count."""

    generation: int
    seen: Order

    def refuses(self, offer: Offer) -> bool:
        return offer.is_durable and offer.generation < self.generation and offer.order > self.seen


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """What one rank knows when a job starts."""

    machine: str
    """Ranks with the same one share memory."""
    offers: tuple[Offer, ...] = ()
    unreachable: tuple[str, ...] = ()
    """Destinations that did not answer, each with the reason."""
    unreadable: tuple[str, ...] = ()
    """Checkpoints that are there, and whose manifest is damaged."""
    removed: tuple[CheckpointId, ...] = ()
    """Checkpoints whose payload was deleted from every destination: they are not wanted from memory either."""
    destinations: tuple[str, ...] = ()
    generation: int = 0
    """What this rank has claimed at the destinations."""
    fences: tuple[Fence, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """The outcome of one rank's part in a load."""

    error: str = ""
    fault: Literal["none", "copy", "away", "state"] = "none"
    """`copy`: these bytes cannot be used, others may. `away`: the destination does not answer now; an older checkpoint is
    no replacement for what it has. `state`: they are intact and do not fit; older ones will not either."""
    struck: tuple[str, ...] = ()
    """Of a sharded checkpoint: the sources (`Source.name`), or the parts of destinations, that cannot be used. With none,
    nothing is left to read some slice from. What is `away` is a destination, not a part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveEnded:
    """The outcome of a save to the destinations; of a sharded one, reported once, by the rank that publishes it."""

    checkpoint_id: CheckpointId
    is_durable: bool
    """It is in one destination at least."""
    missing: tuple[str, ...] = ()
    """Destinations it did not reach, each with the reason."""
    superseded: str = ""
    """It was refused because a newer generation has taken over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """What one rank says before a sharded save."""

    has_image: bool
    """There is an image to copy to (or memory of another kind, where there never is one), and no copy is under way: the
    snapshot that one makes may turn out to be the last complete one."""
    held: frozenset[CheckpointId] = frozenset()
    """The snapshots in its memory."""
    kept: frozenset[CheckpointId] = frozenset()
    """Those of them that can be kept while a new one is made, each by itself: there is another image to copy to. Which of
    them is kept, the save says."""
    busy: frozenset[str] = frozenset()
    """Destinations that an earlier save is still on its way to."""
    part: str = ""
    """What of the state it has. Ranks with the same one are replicas: a snapshot that one of them holds is not missing.
    Empty where no rank has a replica."""
    has_one_image: bool = False
    """There is space for one image only: what is in it cannot be kept."""
    sending: frozenset[CheckpointId] = frozenset()
    """Snapshots whose copies are on their way to other machines, and worth waiting for."""


# --- instructions -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class LookAgain:
    after_s: float
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StartAnew:
    reason: str
    reasons: tuple[str, ...] = ()
    """Why nothing of what was offered could be used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """One rank loads a copy; those whose machine has it in memory load it from there; all others receive it."""

    offer: Offer
    source: int
    mapped: tuple[int, ...]
    """Ranks other than the source that load from their own machine's memory, each from the image named in `images`."""
    images: tuple[str, ...]
    receivers: tuple[int, ...]
    may_tear: bool
    """A copy that turns out to be damaged may leave the live state half overwritten: another will be loaded over it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A copy that slices of a sharded checkpoint can be read from."""

    rank: int
    """Who has found it, and reads it for those who cannot."""
    machine: str
    """Whose memory it is in; empty for a destination."""
    offer: Offer

    @property
    def name(self) -> str:
        return f"{self.machine}:{self.offer.where}" if self.machine else self.offer.where


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadShards:
    """Every rank reads the slices it needs, each from the nearest source that has it."""

    offer: Offer
    """The nearest copy."""
    sources: tuple[Source, ...]
    """Memory, then destinations, near to far."""
    struck: tuple[str, ...]
    """Parts of destinations that are not to be read."""
    may_tear: bool
    """As in `Load`."""

    def seen_from(self, machine: str) -> list[Source]:
        """The sources, nearest first: this machine's memory, that of others, what is fetched from elsewhere, destinations."""
        return sorted(
            self.sources,
            key=lambda s: (
                s.offer.distance,
                bool(s.offer.holder),
                bool(s.machine) and s.machine != machine,
                s.offer.nearness,
            ),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    load: Load | LoadShards
    is_durable: bool
    """The checkpoint is in a destination, wherever it was loaded from."""
    reasons: tuple[str, ...]
    """Why anything newer or nearer was not used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    placement: Placement
    step: int
    durable: bool
    """Meant for the destinations; otherwise a snapshot in memory."""
    final: bool
    destinations: tuple[str, ...] | None = None
    """The only ones it is for: the others are busy. None for all."""
    keep: CheckpointId | None = None
    """Of a sharded save: the snapshot whose images no rank may overwrite. Any other may go."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Skip:
    """No save now: the reason. A durable one that was due is made up for at the next occasion; the final one is asked for
    again."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AwaitSave:
    checkpoint_id: CheckpointId


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """The state of this step is in every destination."""

    step: int


StopKind = Literal["unreachable", "unloadable", "mismatch", "superseded", "final"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """The job must end with an error."""

    kind: StopKind
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """What the news of saves changes."""

    confirmed: tuple[CheckpointId, ...] = ()
    failed: tuple[CheckpointId, ...] = ()
    stop: Stop | None = None


_Copy = tuple[int, CheckpointId, str]
"""Rank, checkpoint, where: one copy that can be struck out."""


class JobProtocol:
    def __init__(
        self,
        *,
        run: str,
        save_every: int,
        snapshot_every: int,
        patience_s: float,
        final_attempts: int = FINAL_ATTEMPTS,
    ) -> None:
        """`patience_s` is how long a destination that does not answer is asked again while the job starts."""
        if save_every < 1:
            raise ValueError(f"save_every ({save_every}) must be at least 1")
        if snapshot_every < 0:
            raise ValueError(f"snapshot_every ({snapshot_every}) must not be negative; 0 makes no snapshots")
        self.save_every = save_every
        self.snapshot_every = snapshot_every
        self.destinations: tuple[str, ...] = ()
        self.lineage = Lineage(run=run)
        self._patience_s = patience_s
        self._waited_s = 0.0
        self._waits = 0
        self._machines: tuple[str, ...] = ()
        self._offers: dict[_Copy, Offer] = {}
        self._unreadable: tuple[str, ...] = ()
        self._order: list[CheckpointId] = []
        self._struck: set[_Copy] = set()
        self._away: set[_Copy] = set()
        self._reasons: list[str] = []
        self._struck_parts: dict[CheckpointId, set[str]] = {}
        self._load: Load | LoadShards | None = None
        self._seen: Order = (0, 0)
        self._newest: tuple[CheckpointId, int] | None = (
            None  # Of the durable saves: which, and at which step.
        )
        self._outcome: SaveEnded | None = None  # Of that one.
        self._is_owed = False  # One was due and could not begin.
        self._saved_step = 0  # Of the newest save, or of what was resumed.
        self._left_out: dict[CheckpointId, tuple[str, ...]] = {}  # By durable saves under way.
        self._resumed: CheckpointId | None = None  # A snapshot, and no newer one is complete.
        self._made: list[CheckpointId] = []  # Sharded ones that may still be in memory, oldest first.
        self._final_attempts_left = final_attempts

    @property
    def generation(self) -> int:
        return self.lineage.generation

    @property
    def fence(self) -> Fence:
        """What this generation has seen, once all ranks have reported."""
        return Fence(generation=self.generation, seen=self._seen)

    # --- starting -------------------------------------------------------------------------------------------

    def surveyed(self, surveys: Sequence[Survey]) -> LookAgain | Load | LoadShards | StartAnew | Stop:
        """Every rank has looked, in rank order."""
        if unreachable := tuple(reason for survey in surveys for reason in survey.unreachable):
            return self._wait_for(unreachable)
        self._offers.clear()
        self._away.clear()
        self._unreadable = tuple(reason for survey in surveys for reason in survey.unreadable)
        for reason in self._unreadable:
            self._note(reason)
        removed = {checkpoint_id for survey in surveys for checkpoint_id in survey.removed}
        fences = [fence for survey in surveys for fence in survey.fences]
        self.destinations = tuple(name for survey in surveys for name in survey.destinations)
        self._machines = tuple(survey.machine for survey in surveys)
        for rank, survey in enumerate(surveys):
            for offer in survey.offers:
                if offer.holder in self._machines:
                    continue  # A rank is there, and offers it as its own.
                if offer.run not in ("", self.lineage.run):
                    self._note(f"step {offer.step} in {offer.tier}: it belongs to another run")
                elif offer.checkpoint_id in removed:
                    self._note(f"step {offer.step} in {offer.tier}: its payload was removed")
                elif any(fence.refuses(offer) for fence in fences):
                    self._note(f"step {offer.step} in {offer.tier}: a superseded process published it")
                else:
                    self._offers[rank, offer.checkpoint_id, offer.where] = offer
        everything = [o for survey in surveys for o in survey.offers if o.run in ("", self.lineage.run)]
        claimed = max((survey.generation for survey in surveys), default=0)
        seen = max((offer.generation for offer in everything), default=0)
        if claimed and seen > claimed:
            reason = f"generation {seen} of this run has saved already; this start is generation {claimed}"
            return Stop(kind="superseded", reasons=(reason,))
        self._leave_out_incomplete()
        self.lineage.generation = claimed or seen + 1
        self.lineage.sequence = max((offer.sequence for offer in everything), default=0)
        published = [offer.order for offer in self._offers.values() if offer.is_durable]
        self._seen = max(published, default=(0, 0))
        self._order = [offer.checkpoint_id for offer in fallback_order(self._offers.values())]
        return self._choose()

    def _leave_out_incomplete(self) -> None:
        """A sharded checkpoint that memory has in part, and no destination has, is none."""
        for checkpoint_id in {offer.checkpoint_id for offer in self._offers.values()}:
            copies = {c: o for c, o in self._offers.items() if o.checkpoint_id == checkpoint_id}
            if missing := _missing_parts(copies.values()):
                some = next(iter(copies.values()))
                self._note(
                    f"step {some.step} in {some.tier}: {missing} of its {len(some.parts)} parts are missing"
                )
                for copy in copies:
                    del self._offers[copy]

    def _wait_for(self, unreachable: tuple[str, ...]) -> LookAgain | Stop:
        if self._waited_s >= self._patience_s:
            return Stop(kind="unreachable", reasons=unreachable)
        self._waits += 1
        delay_s = pause_after_s(self._waits, first_s=FIRST_DELAY_S, longest_s=LONGEST_DELAY_S)
        self._waited_s += delay_s
        return LookAgain(after_s=delay_s, reason="; ".join(unreachable))

    def loaded(
        self, reports: Sequence[LoadReport]
    ) -> LookAgain | Load | LoadShards | Resume | StartAnew | Stop:
        """Every rank has carried out its part of the last load, in rank order."""
        load = self._load
        assert load is not None
        misfits = tuple(report.error for report in reports if report.fault == "state")
        if misfits:
            return Stop(kind="mismatch", reasons=(*self._reasons, misfits[0]))
        broken = [rank for rank, report in enumerate(reports) if report.fault in ("copy", "away")]
        broken.sort(key=lambda rank: reports[rank].fault != "away")  # What is away is not given up.
        if broken:
            for rank in broken:
                error = reports[rank].error
                if isinstance(load, LoadShards):
                    self._strike_sources(load, reports[rank])
                    self._note(f"step {load.offer.step}, read by rank {rank}: {error}")
                else:
                    self._strike(rank, load, self._away if reports[rank].fault == "away" else self._struck)
                    self._note(f"step {load.offer.step} in {load.offer.tier} of rank {rank}: {error}")
            return self._choose()
        chosen = load.offer
        copies = {c: o for c, o in self._offers.items() if o.checkpoint_id == chosen.checkpoint_id}
        in_destinations = {offer.where for offer in copies.values() if offer.is_durable}
        damaged = {offer.where for copy, offer in copies.items() if copy in self._struck}
        if self._struck_parts.get(chosen.checkpoint_id):
            damaged = in_destinations
        self.lineage.go_back_to(chosen, durable=bool(in_destinations))
        self._resumed, self._saved_step = chosen.checkpoint_id, chosen.step
        if in_destinations:
            missing = tuple(
                f"{name}: {'it is damaged' if name in in_destinations else 'not available yet'}"
                for name in self.destinations
                if name not in in_destinations - damaged
            )
            self._newest = (chosen.checkpoint_id, chosen.step)
            self._outcome = SaveEnded(checkpoint_id=chosen.checkpoint_id, is_durable=True, missing=missing)
        return Resume(load=load, is_durable=bool(in_destinations), reasons=tuple(self._reasons))

    def _choose(self) -> LookAgain | Load | LoadShards | StartAnew | Stop:
        left = {copy: offer for copy, offer in self._offers.items() if copy not in self._struck}
        has_durable = bool(self._unreadable) or any(offer.is_durable for offer in self._offers.values())
        if not left:
            if has_durable:
                return Stop(kind="unloadable", reasons=tuple(self._reasons))
            return StartAnew(reason=self._nothing_there(), reasons=tuple(self._reasons))
        offered = {
            checkpoint_id
            for checkpoint_id in {offer.checkpoint_id for offer in left.values()}
            if not _missing_parts(offer for offer in left.values() if offer.checkpoint_id == checkpoint_id)
        }
        if not offered:
            self._struck.update(left)
            return self._choose()
        best = next(checkpoint_id for checkpoint_id in self._order if checkpoint_id in offered)
        copies = {c: o for c, o in left.items() if o.checkpoint_id == best and c not in self._away}
        if not copies:
            return self._wait_for(tuple(self._reasons[-1:]))
        if next(iter(copies.values())).is_sharded:
            if _missing_parts(copies.values()):
                return self._wait_for(tuple(self._reasons[-1:]))
            return self._load_shards(copies, may_tear=has_durable)
        (source, _, _), chosen = min(copies.items(), key=lambda item: (item[1].nearness, item[0][0]))
        images: dict[str, str] = {}
        for (rank, _, where), offer in sorted(copies.items(), key=lambda item: item[1].nearness):
            if not offer.is_durable and not offer.holder:
                images.setdefault(self._machines[rank], where)
        ranks = [rank for rank in range(len(self._machines)) if rank != source]
        mapped = tuple(rank for rank in ranks if self._machines[rank] in images)
        self._load = Load(
            offer=chosen,
            source=source,
            mapped=mapped,
            images=tuple(images[self._machines[rank]] for rank in mapped),
            receivers=tuple(rank for rank in ranks if rank not in mapped),
            may_tear=has_durable,
        )
        return self._load

    def _load_shards(self, copies: Mapping[_Copy, Offer], *, may_tear: bool) -> LoadShards:
        here = {copy: offer for copy, offer in copies.items() if not offer.holder}
        is_damaged = any(self._struck_parts.get(offer.checkpoint_id) for offer in here.values())
        if here and not is_damaged and not _missing_parts(here.values()):
            copies = here  # Nothing has to be fetched.
        sources = [
            Source(rank=rank, machine="" if offer.is_durable else self._machines[rank], offer=offer)
            for (rank, _, _), offer in copies.items()
        ]
        sources.sort(key=lambda source: (source.offer.nearness, source.rank))
        chosen = sources[0].offer
        self._load = load = LoadShards(
            offer=chosen,
            sources=tuple(sources),
            struck=tuple(sorted(self._struck_parts.get(chosen.checkpoint_id, ()))),
            may_tear=may_tear,
        )
        return load

    def _strike_sources(self, load: LoadShards, report: LoadReport) -> None:
        """Leave out what a rank has named. One that has named nothing new has nothing left to read from: the checkpoint
        cannot be loaded, unless something of it is only away."""
        checkpoint_id = load.offer.checkpoint_id
        copies = {copy: source for source in load.sources for copy in [_copy_of(source)]}
        named = {copy for copy, source in copies.items() if source.name in report.struck}
        if report.fault == "away":
            durable = {copy for copy, source in copies.items() if source.offer.is_durable}
            self._away.update(named or durable or copies)
            return
        self._struck.update(named)
        parts = set(report.struck) - {source.name for source in copies.values()}
        if not named and parts <= set(load.struck):
            is_waiting = any(copy[1] == checkpoint_id for copy in self._away)
            (self._away if is_waiting else self._struck).update(copies)
        self._struck_parts.setdefault(checkpoint_id, set()).update(parts)

    def _strike(self, rank: int, load: Load, struck: set[_Copy]) -> None:
        """The copy that a rank could not load: its own, or the one of its machine's memory."""
        if rank == load.source:
            struck.add((rank, load.offer.checkpoint_id, load.offer.where))
            return
        machine, image = self._machines[rank], load.images[load.mapped.index(rank)]
        for copy in self._offers:
            if copy[1:] == (load.offer.checkpoint_id, image) and self._machines[copy[0]] == machine:
                struck.add(copy)

    def _nothing_there(self) -> str:
        answered = f"{', '.join(self.destinations)} answered: no checkpoint" if self.destinations else ""
        return answered or "there is no durable destination, and memory holds no snapshot"

    def _note(self, reason: str) -> None:
        if reason not in self._reasons:
            self._reasons.append(reason)

    # --- saving ---------------------------------------------------------------------------------------------

    def due(self, step: int) -> Literal["durable", "snapshot"] | None:
        """What is to be saved after this step. A durable save that failed or was skipped is made up for at the next
        occasion."""
        if self.destinations and step % self.save_every == 0:
            return "durable"
        every = self.snapshot_every or (0 if self.destinations else self.save_every)
        if not every or step % every:
            return None
        is_owed = self._is_owed or (self._outcome is not None and not self._outcome.is_durable)
        return "durable" if is_owed else "snapshot"

    def save(
        self, checkpoint_id: CheckpointId, *, step: int, now_ms: int, durable: bool, final: bool = False
    ) -> Save:
        """Begin a save; the id and the time are those of one rank, the same for all."""
        durable = durable and bool(self.destinations)
        placement = self.lineage.place(checkpoint_id, now_ms=now_ms, durable=durable)
        self._saved_step = step
        if durable:
            self._newest, self._outcome, self._is_owed = (checkpoint_id, step), None, False
            self._left_out[checkpoint_id] = ()
        return Save(placement=placement, step=step, durable=durable, final=final)

    def rescue(self, checkpoint_id: CheckpointId, *, step: int) -> Save:
        """Place the snapshot that a rank makes alone of its live state, because others of this generation are lost.

        Ranks of several machines may do so, at steps that differ by what some had still to make: all begin to count at the last
        save, which they have made together, so the furthest step is the newest. Clocks would not do. The id is the same on all.
        """
        return self.save(
            checkpoint_id,
            step=step,
            now_ms=self.lineage.sequence + 1 + step - self._saved_step,
            durable=False,
        )

    def save_shards(
        self,
        checkpoint_id: CheckpointId,
        ready: Sequence[Ready],
        *,
        step: int,
        now_ms: int,
        durable: bool,
        final: bool = False,
    ) -> Save | Skip:
        """Begin a sharded save on all ranks, or on none. It is for the destinations that no rank is busy with."""
        busy = frozenset().union(*(rank.busy for rank in ready))
        free = tuple(name for name in self.destinations if name not in busy)
        is_durable = durable and bool(free)
        keep, reason = None, _without_image(ready)
        if not reason:
            keep = self._last_complete(ready)
            reason = _unable_to_keep(ready, keep) or ("" if final else _being_sent(ready, keep))
        if durable and self.destinations and (reason or not is_durable):
            self._is_owed = True
        if reason:
            return Skip(reason=reason)
        if keep in self._made:
            self._resumed = None  # What was resumed from makes way now, and not before.
        save = self.save(checkpoint_id, step=step, now_ms=now_ms, durable=is_durable, final=final)
        self._made.append(checkpoint_id)
        if is_durable:
            self._left_out[checkpoint_id] = tuple(name for name in self.destinations if name in busy)
        return replace(save, destinations=free if busy else None, keep=keep)

    def _last_complete(self, ready: Sequence[Ready]) -> CheckpointId | None:
        """The snapshot that a crash would go back to, while none is being made. One image is no place to keep it in."""
        held = frozenset[CheckpointId]().union(*(rank.held for rank in ready))
        self._made = [checkpoint_id for checkpoint_id in self._made if checkpoint_id in held]
        complete = [checkpoint_id for checkpoint_id in self._made if _is_complete(checkpoint_id, ready)]
        last = complete[-1] if complete else self._resumed
        holders = [rank for rank in ready if last in rank.held]
        return None if not holders or any(rank.has_one_image for rank in holders) else last

    def learn(self, news: Sequence[SaveEnded]) -> Learned:
        """Saves have ended, one way or the other."""
        confirmed, failed = [], []
        for ended in news:
            left_out = self._left_out.pop(ended.checkpoint_id, ())
            if ended.superseded:
                return Learned(stop=Stop(kind="superseded", reasons=(ended.superseded,)))
            if ended.is_durable:
                self.lineage.confirm(ended.checkpoint_id)
                confirmed.append(ended.checkpoint_id)
            else:
                self.lineage.fail(ended.checkpoint_id)
                failed.append(ended.checkpoint_id)
            if self._newest is not None and self._newest[0] == ended.checkpoint_id:
                named = {name for name in left_out for text in ended.missing if text.startswith(f"{name}:")}
                busy = tuple(f"{name}: busy with an earlier save" for name in left_out if name not in named)
                self._outcome = replace(ended, missing=(*ended.missing, *busy))
        return Learned(confirmed=tuple(confirmed), failed=tuple(failed))

    # --- ending ---------------------------------------------------------------------------------------------

    def finish(
        self,
        step: int,
        checkpoint_id: CheckpointId,
        *,
        now_ms: int,
        ready: Sequence[Ready] | None = None,
    ) -> Save | AwaitSave | Skip | Finished | Stop:
        """Training has ended at this step: what is still to be done. Asked again after each of it, with the news.

        `ready` is what all ranks say where the state is sharded. The final save is for every destination: it waits for
        the saves under way.
        """
        if not self.destinations:
            return Finished(step=step)
        if self._newest is not None and self._newest[1] == step:
            if self._outcome is None:
                return AwaitSave(checkpoint_id=self._newest[0])
            if not self._outcome.missing:
                return Finished(step=step)
            if not self._final_attempts_left:
                return Stop(kind="final", reasons=self._outcome.missing)
        if ready is None:
            self._final_attempts_left -= 1
            return self.save(checkpoint_id, step=step, now_ms=now_ms, durable=True, final=True)
        if any(rank.busy for rank in ready):
            return self._await_earlier("the destinations are busy with earlier saves")
        save = self.save_shards(checkpoint_id, ready, step=step, now_ms=now_ms, durable=True, final=True)
        if isinstance(save, Skip):
            return self._await_earlier(save.reason)
        self._final_attempts_left -= 1
        return save

    def _await_earlier(self, reason: str) -> AwaitSave | Skip:
        under_way = next(iter(self._left_out), None)
        return Skip(reason=reason) if under_way is None else AwaitSave(checkpoint_id=under_way)


def _missing_parts(copies: Iterable[Offer]) -> int:
    """How many parts of a checkpoint none of these copies has."""
    copies = list(copies)
    if any(not offer.parts for offer in copies):
        return 0
    return len({part for offer in copies for part in offer.parts} - {offer.part for offer in copies})


def _copy_of(source: Source) -> _Copy:
    return (source.rank, source.offer.checkpoint_id, source.offer.where)


def _is_complete(checkpoint_id: CheckpointId, ready: Sequence[Ready]) -> bool:
    """Whether the memories of all ranks together have this snapshot, which they have made."""
    parts = [rank.part or f"rank {number}" for number, rank in enumerate(ready)]
    there = {part for part, rank in zip(parts, ready, strict=True) if checkpoint_id in rank.held}
    return there == set(parts)


def _without_image(ready: Sequence[Ready]) -> str:
    """Why a sharded save cannot begin."""
    ranks = [rank for rank, each in enumerate(ready) if not each.has_image]
    return f"the images of earlier saves are still in use ({_ranks(ranks)})" if ranks else ""


def _unable_to_keep(ready: Sequence[Ready], keep: CheckpointId | None) -> str:
    """Why a sharded save cannot begin: the last complete snapshot stays until there is another."""
    ranks = [rank for rank, each in enumerate(ready) if keep in each.held - each.kept]
    return f"the only free image has the last complete snapshot ({_ranks(ranks)})" if ranks else ""


def _being_sent(ready: Sequence[Ready], keep: CheckpointId | None) -> str:
    """Why a sharded save had better not begin: a machine that is lost now would take the last complete snapshot with it."""
    ranks = [rank for rank, each in enumerate(ready) if keep in each.sending]
    return f"the last snapshot is still being sent to other machines ({_ranks(ranks)})" if ranks else ""


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {', '.join(map(str, ranks[:8]))}{' and others' if len(ranks) > 8 else ''}"
