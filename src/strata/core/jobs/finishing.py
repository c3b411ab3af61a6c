"""Finishing what dead workers began: what the agent of their machine uploads of the snapshots they left in its memory.

A snapshot in shared memory outlives its process. When all workers of a machine have died and are not started again, the agent
takes the newest one to the run's destinations, so that it outlives the machine too. It is the workers' checkpoint that becomes durable,
with its place in the lineage and its data position: nothing is made anew.

Fenced by generation. A destination that a newer generation has claimed, or that has a checkpoint as new, takes nothing: the
workers that continued the run win. It is asked again just before the manifest is put, as for every other publisher. A destination that
belongs to another run is left alone.

Workers come first. From the moment they are started again, nothing that was under way is published: they restore from the image, as if
nothing had been tried.

Sharded state. Each agent has the parts of its machine's ranks. At the destination the agents report which snapshots each rank has; the
newest that every rank of that world has is uploaded, part by part, and the agent of the first rank publishes the manifest. Where ranks
do not report in time, nothing is published, and who is missing is said.

Pure: what was found, what destinations answer and the time arrive as values.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from strata.core.pauses import FIRST_DELAY_S, LONGEST_DELAY_S, pause_after_s
from strata.core.text import counted
from strata.core.types import CheckpointId

PATIENCE_S = 60.0
"""A destination that does not answer, or ranks that do not report, are asked again for so long."""
ABSENCE_S = 5.0
"""Workers that were away for so long, because their machine waits for others, may be away for long."""
UPLOADED, NOT_UPLOADED = "this machine's agent uploaded step", "was not uploaded by the agent"
"""What an agent's lines about its uploads say, so that a filter that leaves out what an agent complains of does not leave out these."""

Order = tuple[int, int]
"""Generation, then sequence within it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """A snapshot that dead workers have left here: all of it, or the parts of some ranks."""

    checkpoint_id: CheckpointId
    run: str
    step: int
    generation: int
    sequence: int
    destinations: tuple[str, ...]
    ranks: tuple[int, ...] = ()
    """Of a sharded one: whose parts are here."""
    world_size: int = 1

    @property
    def order(self) -> Order:
        return (self.generation, self.sequence)

    @property
    def is_sharded(self) -> bool:
        return bool(self.ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What a destination answered."""

    run: str
    """Whose it is; empty where it is no run's."""
    claimed: int = 0
    """The newest generation that has started."""
    newest: Order | None = None
    """Of the run's checkpoints there."""
    newest_step: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """Ask a destination whose it is, and what it has."""

    destination: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Meet:
    """Report at a destination which snapshots the ranks of this machine have, and read what others report."""

    destination: str
    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Write:
    destination: str
    snapshot: Left


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    until_s: float
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of the snapshot at one destination."""

    destination: str
    result: Literal["saved", "known", "refused", "failed", "given up"]
    reason: str
    step: int
    steps_saved: int | None = None
    """How many steps further than what was there; None where nothing was."""

    def __str__(self) -> str:
        if self.result != "saved":
            return f"{self.destination}: {self.reason}"
        before = (
            "nothing was there" if self.steps_saved is None else f"{counted(self.steps_saved, 'step')} more"
        )
        return f"{self.destination}: {self.reason} ({before})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    outcomes: tuple[Outcome, ...]


@dataclass(slots=True)
class _Destination:
    name: str
    seen: Seen | None = None
    held: dict[int, frozenset[CheckpointId]] = field(default_factory=dict)
    """Of a sharded run: what each rank that has reported has."""
    outcome: Outcome | None = None
    again_s: float = 0.0
    waits: int = 0
    reason: str = ""


class Finishing:
    """One attempt to finish, from the death of the workers to its end."""

    def __init__(self, left: Iterable[Left], *, now_s: float, patience_s: float = PATIENCE_S) -> None:
        """`left` are the snapshots of one run, of which those of its newest generation count."""
        found = sorted(left, key=lambda each: each.order, reverse=True)
        self._left = [each for each in found if each.generation == found[0].generation]
        self._struck: dict[CheckpointId, str] = {}
        self._until_s = now_s + patience_s
        names = self._left[0].destinations if self._left else ()
        self._destinations = {name: _Destination(name) for name in names}
        self._given_up = ""

    def decide(self, now_s: float) -> Look | Meet | Write | Wait | Ended:
        """Near to far, one at a time: what is at hand is durable first. One that is away keeps none of the others waiting."""
        if self._given_up:
            for each in self._open():
                self._end(each, "given up", self._given_up)
        waiting = [each for each in self._open() if each.again_s > now_s]
        for each in self._open():
            if each in waiting:
                continue
            instruction = self._next(each)
            if instruction is not None:
                return instruction
        if waiting:
            first = min(waiting, key=lambda each: each.again_s)
            return Wait(until_s=first.again_s, reason=first.reason)
        outcomes = [each.outcome for each in self._destinations.values() if each.outcome is not None]
        return Ended(outcomes=tuple(outcomes))

    def _next(self, at: _Destination) -> Look | Meet | Write | None:
        """What is to be done at a destination; None where that is over."""
        seen, newest = at.seen, self._left[0]
        if seen is None:
            return Look(destination=at.name)
        if seen.run != newest.run:
            owner = f"run {seen.run[:8]}" if seen.run else "no run"
            self._end(at, "refused", f"it belongs to {owner}, not to run {newest.run[:8]}")
            return None
        if seen.claimed > newest.generation:
            self._end(
                at,
                "refused",
                f"generation {seen.claimed} of the run has started, this is generation {newest.generation}",
            )
            return None
        if newest.is_sharded and self._unreported(at):
            return Meet(destination=at.name, generation=newest.generation)
        chosen = self._chosen(at)
        if chosen is None:
            return None
        if seen.newest is not None and seen.newest >= chosen.order:
            self._end(at, "known", f"step {seen.newest_step:,} is there already", step=chosen.step)
            return None
        return Write(destination=at.name, snapshot=chosen)

    def _unreported(self, at: _Destination) -> list[int]:
        return [rank for rank in range(self._left[0].world_size) if rank not in at.held]

    def _chosen(self, at: _Destination) -> Left | None:
        """The newest that is all there."""
        intact = [each for each in self._left if each.checkpoint_id not in self._struck]
        for each in intact:
            if all(each.checkpoint_id in held for held in at.held.values()):
                return each
        reasons = "; ".join(self._struck.values())
        self._end(at, "failed", reasons or "no snapshot is in the memory of all ranks")
        return None

    def admit(
        self, snapshot: Left, *, claimed: int, is_there: bool
    ) -> Literal["given up", "superseded", "known"] | None:
        """Why the manifest of a snapshot may not be put, asked just before: by the newest generation that has started, and whether
        another process has published the same meanwhile. None where it may."""
        if self._given_up:
            return "given up"
        if claimed > snapshot.generation:
            return "superseded"
        return "known" if is_there else None

    # --- what became of it --------------------------------------------------------------------------------------

    def saw(self, destination: str, seen: Seen) -> None:
        self._destinations[destination].seen = seen

    def met(self, destination: str, held: Mapping[int, Sequence[CheckpointId]], *, now_s: float) -> None:
        """What the ranks that have reported have."""
        at = self._destinations[destination]
        at.held = {rank: frozenset(ids) for rank, ids in held.items()}
        if missing := self._unreported(at):
            ranks = ", ".join(map(str, missing))
            self._again(
                at,
                f"no agent has reported what rank {ranks} of {self._left[0].world_size} has in memory",
                now_s,
            )

    def away(self, destination: str, reason: str, *, now_s: float) -> None:
        """It did not answer, or failed half-way."""
        at = self._destinations[destination]
        at.seen = None  # What it said may not be so any more.
        self._again(at, reason, now_s)

    def refused(self, destination: str, reason: str) -> None:
        """By the publisher: a newer generation has started meanwhile."""
        self._end(self._destinations[destination], "refused", reason)

    def damaged(self, checkpoint_id: CheckpointId, reason: str) -> None:
        """What is in memory is not what was saved: the one before it is taken."""
        self._struck[checkpoint_id] = reason

    def wrote(self, destination: str, snapshot: Left) -> None:
        at = self._destinations[destination]
        before = at.seen.newest_step if at.seen is not None else None
        at.outcome = Outcome(
            destination=destination,
            result="saved",
            reason=f"step {snapshot.step:,} is saved",
            step=snapshot.step,
            steps_saved=None if before is None else max(0, snapshot.step - before),
        )

    def give_up(self, reason: str) -> None:
        """Workers are started again, or there is no more time to wait: what is not published by now is not to be."""
        self._given_up = reason

    @property
    def is_given_up(self) -> bool:
        return bool(self._given_up)

    def _open(self) -> list[_Destination]:
        return [each for each in self._destinations.values() if each.outcome is None]

    def _again(self, at: _Destination, reason: str, now_s: float) -> None:
        at.waits += 1
        delay_s = pause_after_s(at.waits, first_s=FIRST_DELAY_S, longest_s=LONGEST_DELAY_S)
        at.reason, at.again_s = reason, now_s + delay_s
        if now_s >= self._until_s:
            self._end(at, "failed", reason)

    def _end(
        self,
        at: _Destination,
        result: Literal["known", "refused", "failed", "given up"],
        reason: str,
        *,
        step: int | None = None,
    ) -> None:
        newest = self._left[0].step if step is None else step
        at.outcome = Outcome(destination=at.name, result=result, reason=reason, step=newest)
