"""The proof that every sample of an epoch was trained exactly once.

`audit` walks from the newest commit through its parents, adds up what the ranks say they trained, checks that
each commit continues the one before it, and says what is missing or there twice. It takes nobody's word for a
total that it can add up itself; where checkpoints are gone, it says how much rests on the record of a later one. Branches that were rolled back do not count. Pure: commits come in as values.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from strata.core.ledger import Coverage, DataCommit, LedgerError
from strata.core.spans import Spans


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """One checkpoint, as the audit sees it."""

    checkpoint_id: str
    parent_id: str | None
    step: int
    data: DataCommit | None
    """None where a checkpoint was made without data: it counts only as a link between its parent and child."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditReport:
    """What the committed history says about one epoch."""

    dataset: str
    epoch: int
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
    """Checkpoints that were rolled back: not ancestors of the newest."""
    repeated_by: tuple[str, ...]
    """The checkpoints whose record trained something again."""
    vouched: int
    """Samples known only from a later record, because the checkpoint that trained them is gone."""
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
    def reason(self) -> str:
        told = []
        if self.lost:
            told.append(f"{self.lost.size:,} of {self.total:,} samples lost (positions {self.lost})")
        if self.repeated:
            who = f" by {', '.join(self.repeated_by[:5])}" if self.repeated_by else ""
            told.append(
                f"{self.repeated.size:,} samples trained more than once{who} (positions {self.repeated})"
            )
        told.extend(self.problems)
        if told:
            return "; ".join(told)
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

    `commits` stand in the order they were made; the last one is where training is now, and only its ancestors
    count. `total` is checked against what was committed. Raises `LedgerError` where the history does not know
    the epoch.
    """
    lineage = ancestry(commits)
    chain = [(c, c.data) for c in lineage if c.data is not None]
    found = [(c, e) for c, data in chain if (e := data.find(dataset, epoch)) is not None]
    if not found:
        known = sorted({f"'{e.dataset}' epoch {e.epoch}" for _, data in chain for e in data.epochs})
        raise LedgerError(
            f"No checkpoint in the history has trained epoch {epoch} of '{dataset}'.",
            hint=f"It knows {', '.join(known[:10]) or 'no data at all'}.",
        )
    newest = found[-1][1]
    problems = [*_contradictions(chain, dataset, epoch)]
    if total is not None and total != newest.total:
        problems.append(f"the dataset has {total:,} samples, the history was made with {newest.total:,}")

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
    closed = newest.closed or any(e.dataset == dataset and e.epoch > epoch for e in chain[-1][1].epochs)
    on_chain = {c.checkpoint_id for c in lineage}
    return AuditReport(
        dataset=dataset,
        epoch=epoch,
        total=newest.total,
        samples=(sum_of_parts.covered & whole).size,
        lost=open_positions if closed else Spans(),
        repeated=sum_of_parts.repeated,
        remaining=Spans() if closed else open_positions,
        dropped=newest.dropped - sum_of_parts.covered,
        commits=tuple(c.checkpoint_id for c, _ in found),
        abandoned=tuple(c.checkpoint_id for c in commits if c.checkpoint_id not in on_chain),
        repeated_by=tuple(repeated_by),
        vouched=vouched.size,
        problems=tuple(problems),
    )


def audit_all(commits: Sequence[Commit], dataset: str) -> list[AuditReport]:
    """One report per epoch of `dataset` that the history knows."""
    records = [c.data for c in ancestry(commits) if c.data is not None]
    epochs = sorted({e.epoch for data in records for e in data.epochs if e.dataset == dataset})
    return [audit(commits, dataset, epoch) for epoch in epochs] or [audit(commits, dataset, 0)]


def ancestry(commits: Sequence[Commit]) -> list[Commit]:
    """The newest commit and its ancestors, oldest first, as far back as they are still kept."""
    if not commits:
        return []
    by_id = {c.checkpoint_id: c for c in commits}
    chain = [commits[-1]]
    seen = {commits[-1].checkpoint_id}
    while (parent := by_id.get(chain[-1].parent_id or "")) is not None:
        if parent.checkpoint_id in seen:
            raise LedgerError(f"Checkpoint '{parent.checkpoint_id}' is its own ancestor.")
        chain.append(parent)
        seen.add(parent.checkpoint_id)
    return chain[::-1]


def _contradictions(chain: Sequence[tuple[Commit, DataCommit]], dataset: str, epoch: int) -> Iterable[str]:
    """Where a commit does not continue the one before it."""
    for (before, known), (commit, data) in pairwise(chain):
        theirs, ours = known.find(dataset, epoch), data.find(dataset, epoch)
        if ours is None:
            if theirs is not None:
                yield f"{commit.checkpoint_id} has forgotten what {before.checkpoint_id} committed"
            continue
        if forgotten := known.coverage(dataset, epoch).covered - ours.before.covered:
            yield f"{commit.checkpoint_id} has forgotten positions {forgotten} of {before.checkpoint_id}"
        if theirs is not None and theirs.total != ours.total:
            yield (
                f"the epoch had {theirs.total:,} samples in {before.checkpoint_id}, "
                f"{ours.total:,} in {commit.checkpoint_id}"
            )
