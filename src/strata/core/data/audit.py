"""The proof that every sample of an epoch was trained exactly once.

`audit` walks from the newest commit through what each record continues, adds up what the ranks say they trained,
checks that each commit continues the one before it, and says what is missing or there twice. It takes nobody's
word for a total that it can add up itself; where checkpoints are lost, it says how much rests on the record of a
later one.

Two histories meet here. **What is added up** follows `Commit.base_id`, one commit after another: a record holds
everything since its base, so of two saves that overlapped and continue the same base only the newer one counts.
**What training went through** is more than that: the older of the two is an ancestor of the newer one's weights. It
is found through every link there is (the base, the manifest's parents, the unconfirmed checkpoints that a record
names), and the newer record must hold whatever it holds. A checkpoint is **abandoned** (rolled back) when no link
leads to it from the newest one. Where the history's beginning is lost, older checkpoints may have been ancestors
of what is lost, and are not called abandoned.

Pure: commits come in as values.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from strata.core.data.ledger import Coverage, DataCommit, EpochCommit, LedgerError
from strata.core.data.mixture import ENDLESS
from strata.core.data.spans import Spans

FEW = 16
"""Epochs that are alike get a report each up to this many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """One checkpoint, as the audit sees it."""

    checkpoint_id: str
    parent_id: str | None
    """The durable checkpoint before it, according to its manifest."""
    step: int
    data: DataCommit | None
    """None where a checkpoint was made without data: it counts only as a link between its parent and child."""
    trained_from: str | None = None
    """The checkpoint of any tier that training continued from, according to its manifest."""

    @property
    def base_id(self) -> str | None:
        """What its record continues: the record's own word, or the manifest's where the record does not say."""
        return self.data.base if self.data is not None and self.data.base_known else self.parent_id

    @property
    def ancestor_ids(self) -> set[str]:
        """Every checkpoint that training is known to have gone through directly before this one."""
        unconfirmed = self.data.unconfirmed if self.data is not None else ()
        return {name for name in (self.base_id, self.parent_id, self.trained_from, *unconfirmed) if name}


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditReport:
    """What the committed history says about one epoch, or about each of several in a row that are all alike."""

    dataset: str
    epoch: int
    last_epoch: int
    """The same as `epoch`, but for a report on several: everything else is said of each of them."""
    total: int
    samples: int
    """Distinct samples in the committed history."""
    lost: Spans
    """Positions the epoch was closed without."""
    repeated: Spans
    """Positions trained more than once."""
    remaining: Spans
    """Positions of an epoch that is still open, not trained yet."""
    dropped: Spans
    """Positions left out on purpose."""
    commits: tuple[str, ...]
    """The checkpoints whose records were added up, oldest first."""
    abandoned: tuple[str, ...]
    """Checkpoints that were rolled back: training did not go through them on its way to the newest."""
    repeated_by: tuple[str, ...]
    """The checkpoints whose record trained something again."""
    vouched: int
    """Samples known only from a later record, because the checkpoint that trained them is lost."""
    problems: tuple[str, ...]
    """Records that contradict each other."""

    @property
    def clean(self) -> bool:
        """Nothing lost, nothing repeated, no contradiction, so far."""
        return not (self.lost or self.repeated or self.problems)

    @property
    def exact(self) -> bool:
        """Every sample of the epoch exactly once (but for those dropped on purpose)."""
        return self.clean and not self.remaining

    @property
    def is_endless(self) -> bool:
        """A mixture that has not ended: nothing is left of it to wait for."""
        return self.total == ENDLESS and bool(self.remaining)

    @property
    def covered(self) -> Spans:
        """Positions in the committed history."""
        return Spans([(0, self.total)]) - self.lost - self.remaining - self.dropped

    @property
    def reason(self) -> str:
        count = self.last_epoch - self.epoch + 1
        return self._verdict if count == 1 else f"in each of {count:,} epochs: {self._verdict}"

    @property
    def _verdict(self) -> str:
        faults = []
        if self.lost:
            of = "" if self.total == ENDLESS else f" of {self.total:,}"
            faults.append(f"{self.lost.size:,}{of} samples lost (positions {self.lost})")
        if self.repeated:
            who = f" by {', '.join(self.repeated_by[:5])}" if self.repeated_by else ""
            faults.append(
                f"{self.repeated.size:,} samples trained more than once{who} (positions {self.repeated})"
            )
        faults.extend(self.problems)
        if faults:
            return "; ".join(faults)
        if self.total == ENDLESS:
            ended = "" if self.is_endless else ", and the mixture has ended"
            return f"{self.samples:,} samples so far, each exactly once{ended}"
        dropped = f", {self.dropped.size:,} dropped on purpose" if self.dropped else ""
        if self.remaining:
            return (
                f"still open: {self.samples:,} of {self.total:,} samples so far, each exactly once{dropped}"
            )
        return f"{self.samples:,} samples, each exactly once{dropped}"

    def to_json(self) -> dict[str, Any]:
        return {
            "dataset": self.dataset,
            "epoch": self.epoch,
            "last_epoch": self.last_epoch,
            "exact": self.exact,
            "total": self.total,
            "samples": self.samples,
            "lost": self.lost.to_json(),
            "repeated": self.repeated.to_json(),
            "remaining": self.remaining.to_json(),
            "dropped": self.dropped.to_json(),
            "commits": list(self.commits),
            "abandoned": list(self.abandoned),
            "repeated_by": list(self.repeated_by),
            "vouched": self.vouched,
            "problems": list(self.problems),
            "reason": self.reason,
        }


def audit(commits: Sequence[Commit], dataset: str, epoch: int, *, total: int | None = None) -> AuditReport:
    """Add up the committed history of one epoch.

    `commits` stand in the order they were made; the last one is where training is now, and only what its record
    continues counts. `total` is checked against what was committed. Raises `LedgerError` where the history does not know
    the epoch.
    """
    lineage = ancestry(commits)
    chain = [(c, c.data) for c in lineage if c.data is not None]
    found = [(c, e) for c, data in chain if (e := data.find(dataset, epoch)) is not None]
    if not found:
        known = sorted({f"'{e.dataset}' {_span(e.epoch, e.last)}" for _, data in chain for e in data.epochs})
        raise LedgerError(
            f"No checkpoint in the history has trained epoch {epoch} of '{dataset}'.",
            hint=f"Known: {', '.join(known[:10]) or 'no data at all'}.",
        )
    newest = found[-1][1]
    problems = [*_contradictions(chain, dataset, epoch), *_forgotten(chain, commits, dataset, epoch)]
    if total is not None and total != newest.total:
        problems.append(f"the dataset has {total:,} samples, the history was recorded with {newest.total:,}")

    sum_of_parts = Coverage()
    vouched = Spans()
    repeated_by = []
    for commit, part in found:
        vouched |= part.before.covered - sum_of_parts.covered
        so_far = Coverage(
            covered=sum_of_parts.covered | part.before.covered,
            repeated=sum_of_parts.repeated | part.before.repeated,
        )
        sum_of_parts = so_far.plus(part.trained)
        if sum_of_parts.repeated != so_far.repeated:
            repeated_by.append(commit.checkpoint_id)
    whole = Spans([(0, newest.total)])
    if outside := sum_of_parts.covered - whole:
        problems.append(f"positions {outside} do not exist in an epoch of {newest.total:,}")
    open_positions = whole - sum_of_parts.covered - newest.dropped
    closed = newest.closed or any(e.dataset == dataset and e.last > epoch for e in chain[-1][1].epochs)
    return AuditReport(
        dataset=dataset,
        epoch=epoch,
        last_epoch=epoch,
        total=newest.total,
        samples=(sum_of_parts.covered & whole).size,
        lost=open_positions if closed else Spans(),
        repeated=sum_of_parts.repeated,
        remaining=Spans() if closed else open_positions,
        dropped=newest.dropped - sum_of_parts.covered,
        commits=tuple(c.checkpoint_id for c, _ in found),
        abandoned=_abandoned(commits, lineage),
        repeated_by=tuple(repeated_by),
        vouched=vouched.size,
        problems=tuple(problems),
    )


def audit_all(commits: Sequence[Commit], dataset: str) -> list[AuditReport]:
    """One report per epoch of `dataset` that the history knows, oldest first; where more than a few in a row are
    alike in every record, one for all of them."""
    entries = _entries(ancestry(commits), dataset)
    if not entries:
        return [audit(commits, dataset, 0)]
    newest = max(e.last for e in entries)
    # No record tells the epochs between two edges apart; but the newest is open where an older one is lost.
    edges = sorted({newest, *(edge for e in _entries(commits, dataset) for edge in (e.epoch, e.last + 1))})
    reports = []
    for first, end in pairwise(edges):
        if not any(e.epoch <= first <= e.last for e in entries):
            continue
        report = audit(commits, dataset, first)
        if end - first > FEW:
            reports.append(replace(report, last_epoch=end - 1))
        else:
            reports += [replace(report, epoch=epoch, last_epoch=epoch) for epoch in range(first, end)]
    return reports


def ancestry(commits: Sequence[Commit]) -> list[Commit]:
    """The newest commit and those that its record continues, oldest first, as far back as they are still kept."""
    if not commits:
        return []
    by_id = {c.checkpoint_id: c for c in commits}
    chain = [commits[-1]]
    seen = {commits[-1].checkpoint_id}
    while (base := by_id.get(chain[-1].base_id or "")) is not None:
        if base.checkpoint_id in seen:
            raise LedgerError(f"Checkpoint '{base.checkpoint_id}' is its own ancestor.")
        chain.append(base)
        seen.add(base.checkpoint_id)
    return chain[::-1]


def _abandoned(commits: Sequence[Commit], lineage: Sequence[Commit]) -> tuple[str, ...]:
    by_id = {c.checkpoint_id: c for c in commits}
    reached: set[str] = set()
    ahead = [lineage[-1].checkpoint_id]
    while ahead:
        name = ahead.pop()
        if name in by_id and name not in reached:
            reached.add(name)
            ahead += by_id[name].ancestor_ids
    oldest = lineage[0]
    beginning_is_lost = oldest.base_id is not None
    known_from = next(i for i, c in enumerate(commits) if c is oldest) if beginning_is_lost else 0
    return tuple(c.checkpoint_id for c in commits[known_from:] if c.checkpoint_id not in reached)


def _contradictions(chain: Sequence[tuple[Commit, DataCommit]], dataset: str, epoch: int) -> Iterable[str]:
    """Where a commit does not continue the one before it."""
    for (before, known), (commit, data) in pairwise(chain):
        theirs, ours = known.find(dataset, epoch), data.find(dataset, epoch)
        if ours is None:
            if theirs is not None:
                yield f"{commit.checkpoint_id} has forgotten what {before.checkpoint_id} committed"
            continue
        committed = known.coverage(dataset, epoch).covered
        if forgotten := committed - ours.before.covered:
            yield f"{commit.checkpoint_id} has forgotten positions {forgotten} of {before.checkpoint_id}"
        # A parent that only the manifest names may be an older one: a save between the two was lost.
        says_so = data.base_known and data.base == before.checkpoint_id
        if says_so and (invented := ours.before.covered - committed):
            yield (
                f"{commit.checkpoint_id} says that {before.checkpoint_id} had trained positions {invented}, "
                "which it had not"
            )
        if theirs is not None and theirs.total != ours.total:
            yield (
                f"the epoch had {theirs.total:,} samples in {before.checkpoint_id}, "
                f"{ours.total:,} in {commit.checkpoint_id}"
            )


def _forgotten(
    chain: Sequence[tuple[Commit, DataCommit]], commits: Sequence[Commit], dataset: str, epoch: int
) -> Iterable[str]:
    """Where a commit lacks what a checkpoint held that its training went through but its record does not continue."""
    by_id = {c.checkpoint_id: c.data for c in commits}
    for commit, data in chain:
        for name in sorted(commit.ancestor_ids - {commit.base_id}):
            passed = by_id.get(name)
            if passed is None:
                continue
            held = passed.coverage(dataset, epoch).covered
            if forgotten := held - data.coverage(dataset, epoch).covered:
                yield f"{commit.checkpoint_id} has forgotten positions {forgotten} of {name}"


def _entries(commits: Iterable[Commit], dataset: str) -> list[EpochCommit]:
    return [e for c in commits if c.data is not None for e in c.data.epochs if e.dataset == dataset]


def _span(first: int, last: int) -> str:
    return f"epoch {first}" if first == last else f"epochs {first}–{last:,}"
