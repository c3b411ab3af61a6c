"""Where in the history of a run the next checkpoint belongs."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

from strata.checkpoint.events import MEMORY, CheckpointInfo
from strata.checkpoint.manifest import CheckpointId, Manifest
from strata.checkpoint.restore import Source
from strata.stores.protocol import StoreError

log = logging.getLogger("strata.checkpoint")


@dataclass(slots=True)
class Line:
    """The end of the line of checkpoints that training is on."""

    sequence: int = 0
    generation: int = 0
    parent: CheckpointId | None = None
    lasting_parent: CheckpointId | None = None

    @classmethod
    def read(cls, sources: Iterable[Source]) -> Line:
        """What there is in all tiers. One that cannot be read is left out, with a warning: the clock still makes what
        is saved next newer than what is there."""
        line = cls()
        everything: list[Manifest] = []
        lasting: list[Manifest] = []
        for source in sources:
            try:
                found = [entry.manifest for entry in source.list(fresh=False).entries]
            except StoreError as error:
                log.warning("going on without the history in %s: %s", source.tier, error)
                continue
            everything += found
            lasting += [] if source.tier == MEMORY else found
        line.sequence = max((manifest.sequence for manifest in everything), default=0)
        line.generation = max((manifest.generation for manifest in everything), default=0)
        line.parent = _newest(everything)
        line.lasting_parent = _newest(lasting)
        return line

    def extend(self, draft: Manifest, *, lasting: bool) -> Manifest:
        """The draft with its place in the history, and the line extended by it.

        The sequence counts on from the highest that was seen, and is at least the time in milliseconds, for the case
        that something was not seen. A generation never goes back, so a coordinator that lost its count cannot make
        new checkpoints look old.
        """
        self.sequence = max(self.sequence + 1, int(draft.created_at * 1000))
        self.generation = max(self.generation, draft.generation)
        placed = replace(
            draft,
            sequence=self.sequence,
            generation=self.generation,
            parent=self.parent,
            lasting_parent=self.lasting_parent,
        )
        self.parent = placed.checkpoint_id
        if lasting:
            self.lasting_parent = placed.checkpoint_id
        return placed

    def go_back_to(self, info: CheckpointInfo) -> None:
        """Training goes on from this checkpoint."""
        is_lasting = any(tier != MEMORY for tier in info.tiers)
        self.parent = info.checkpoint_id
        self.lasting_parent = info.checkpoint_id if is_lasting else info.lasting_parent

    def retract(self, placed: Manifest, *, tiers: Collection[str]) -> None:
        """The newest checkpoint reached these tiers only: where it did not come to be, the one before counts."""
        if self.lasting_parent == placed.checkpoint_id and all(tier == MEMORY for tier in tiers):
            self.lasting_parent = placed.lasting_parent
        if self.parent == placed.checkpoint_id and not tiers:
            self.parent = placed.parent


def _newest(manifests: Iterable[Manifest]) -> CheckpointId | None:
    newest = max(manifests, key=lambda manifest: manifest.order, default=None)
    return newest.checkpoint_id if newest else None
