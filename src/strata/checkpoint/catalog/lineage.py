"""Where in the history of a run the next checkpoint belongs, read from what its tiers hold."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace

from strata.checkpoint.catalog.manifest import Manifest
from strata.checkpoint.events import MEMORY
from strata.checkpoint.restore import Source
from strata.core.jobs.lineage import Lineage, Placement
from strata.stores.protocol import StoreError

log = logging.getLogger("strata.checkpoint")


def read_lineage(sources: Iterable[Source], *, run: str = "", generation: int = 0) -> Lineage:
    """The lineage of the newest checkpoint in any tier. A tier that cannot be read is left out, with a warning: what is
    saved next is then of a lineage of its own, so that retention leaves the unseen one alone."""
    everything: list[Manifest] = []
    durable: list[Manifest] = []
    is_complete = True
    for source in sources:
        try:
            listed = [entry.manifest for entry in source.list(fresh=False).entries]
            found = [manifest for manifest in listed if not run or manifest.run in ("", run)]
        except StoreError as error:
            log.warning("continuing without the lineage recorded in %s: %s", source.tier, error)
            is_complete = False
            continue
        everything += found
        durable += [] if source.tier == MEMORY else found
    lineage = Lineage(
        run=run,
        # A generation never goes back, so a coordinator that lost its count cannot make new checkpoints look old.
        generation=max([generation, *(manifest.generation for manifest in everything)]),
        sequence=max((manifest.sequence for manifest in everything), default=0),
    )
    newest = max(everything, key=lambda manifest: manifest.order, default=None)
    if newest is not None and is_complete:
        ids = {manifest.checkpoint_id for manifest in durable}
        lineage.go_back_to(newest, durable=newest.checkpoint_id in ids)
    return lineage


def placed(draft: Manifest, placement: Placement) -> Manifest:
    """The draft in its place."""
    return replace(
        draft,
        checkpoint_id=placement.checkpoint_id,
        run=placement.run,
        generation=placement.generation,
        sequence=placement.sequence,
        lineage=placement.lineage,
        parent=placement.parent,
        durable_parent=placement.durable_parent,
    )


def place_next(lineage: Lineage, draft: Manifest, *, durable: bool = True) -> Manifest:
    """The draft as the next of this lineage."""
    now_ms = int(draft.created_at * 1000)
    return placed(draft, lineage.place(draft.checkpoint_id, now_ms=now_ms, durable=durable))
