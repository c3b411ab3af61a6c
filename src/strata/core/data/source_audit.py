"""The proof by source: what of each source of a mixture was trained, in which of its epochs, and how often.

The draws of a source among consecutive positions are consecutive, so the positions that an audit of the mixture found
covered, lost or repeated are spans of draws of each source, and an epoch of a source is a span too. Nothing is drawn
again: it is arithmetic on the mixture's plan. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from strata.core.data.audit import AuditReport
from strata.core.data.mixture import Leaf, MixturePlan
from strata.core.data.spans import Spans


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceReport:
    """What the committed history says about one source."""

    source: str
    size: int
    """Samples in one epoch of it."""
    samples: int
    """Trained, over all its epochs."""
    epochs: int
    """Epochs of it that are complete: every sample exactly once in each."""
    begun: int
    """Samples of the epoch that is not."""
    lost: Spans
    """Draws that were left out: draw `n` belongs to epoch `n // size`."""
    repeated: Spans
    """Draws that were trained more than once."""
    share: float
    """Of all samples of the mixture."""
    documents: int | None = None
    tokens: int | None = None
    """Trained, where the source could say."""

    @property
    def exact(self) -> bool:
        """Within each epoch of the source nothing lost and nothing repeated, so far."""
        return not self.lost and not self.repeated

    @property
    def reason(self) -> str:
        faults = []
        if self.lost:
            faults.append(f"{self.lost.size:,} samples lost in {self._epochs(self.lost)}")
        if self.repeated:
            faults.append(
                f"{self.repeated.size:,} samples trained more than once in {self._epochs(self.repeated)}"
            )
        if faults:
            return "; ".join(faults)
        if not self.epochs:
            return f"{self.begun:,} of {self.size:,} samples so far, each exactly once"
        of = f", and {self.begun:,} of {self.size:,} of the next" if self.begun else ""
        return f"{self.epochs:,} epoch{'' if self.epochs == 1 else 's'}, each sample exactly once in each{of}"

    def _epochs(self, draws: Spans) -> str:
        first, last = int(draws.bounds[0, 0]) // self.size, (int(draws.bounds[-1, 1]) - 1) // self.size
        return f"epoch {first}" if first == last else f"epochs {first}–{last:,}"

    def to_json(self) -> dict[str, Any]:
        return {
            "source": self.source,
            "exact": self.exact,
            "size": self.size,
            "samples": self.samples,
            "share": self.share,
            "epochs": self.epochs,
            "begun": self.begun,
            "documents": self.documents,
            "tokens": self.tokens,
            "lost": self.lost.to_json(),
            "repeated": self.repeated.to_json(),
            "reason": self.reason,
        }


def by_source(
    report: AuditReport, plan: MixturePlan, measured: Mapping[str, Sequence[int]] | None = None
) -> list[SourceReport]:
    """What an audit of a mixture means for each of its sources, in their order. `measured`: documents and tokens of each
    up to where the mixture is, as its checkpoint has them."""
    covered = plan.draws_of(report.covered)
    lost = plan.draws_of(report.lost)
    repeated = plan.draws_of(report.repeated)
    everything = sum(spans.size for spans in covered)
    known = measured or {}
    found = []
    for at, leaf in enumerate(plan.leaves):
        complete, begun = _epochs(covered[at], leaf)
        documents, tokens = known.get(leaf.name, (None, None))
        found.append(
            SourceReport(
                source=leaf.name,
                size=leaf.size,
                samples=covered[at].size,
                epochs=complete,
                begun=begun,
                lost=lost[at],
                repeated=repeated[at],
                share=covered[at].size / everything if everything else 0.0,
                documents=documents,
                tokens=tokens,
            )
        )
    return found


def _epochs(covered: Spans, leaf: Leaf) -> tuple[int, int]:
    """How many epochs are complete, and how many samples of others there are."""
    complete = 0
    for start, stop in covered.bounds.tolist():
        complete += max(0, stop // leaf.size - -(-start // leaf.size))
    return complete, covered.size - complete * leaf.size
