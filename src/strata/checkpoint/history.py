"""Where in the history of a run the next checkpoint belongs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from strata.checkpoint.events import MEMORY
from strata.checkpoint.manifest import CheckpointId, Manifest
from strata.checkpoint.restore import Source


@dataclass(slots=True)
class Line:
    """The end of the line of checkpoints that training is on."""

    sequence: int = 0
    generation: int = 0
    parent: CheckpointId | None = None
    """Always one in a lasting tier: what is only in memory comes and goes."""

    @classmethod
    def read(cls, sources: Iterable[Source]) -> Line:
        """What there is in all tiers. Raises where a tier cannot be read: a checkpoint that did not know what came
        before it would be taken for older than it is."""
        line = cls()
        newest: Manifest | None = None
        for source in sources:
            for entry in source.list(fresh=False).entries:
                line.sequence = max(line.sequence, entry.manifest.sequence)
                line.generation = max(line.generation, entry.manifest.generation)
                if source.tier != MEMORY and (newest is None or newest.order < entry.manifest.order):
                    newest = entry.manifest
        line.parent = newest.checkpoint_id if newest else None
        return line

    def extend(self, draft: Manifest, *, lasting: bool) -> Manifest:
        """The draft with its place in the history, and the line extended by it. A generation never goes back, so a
        coordinator that lost its count cannot make new checkpoints look old."""
        self.sequence += 1
        self.generation = max(self.generation, draft.generation)
        placed = replace(draft, sequence=self.sequence, generation=self.generation, parent=self.parent)
        if lasting:
            self.parent = placed.checkpoint_id
        return placed

    def retract(self, placed: Manifest) -> None:
        """The newest checkpoint did not come to be: go on from the one before."""
        if self.parent == placed.checkpoint_id:
            self.parent = placed.parent
