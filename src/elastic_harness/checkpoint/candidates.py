"""What training could resume from, best first.

The engine's checkpoints come in the order of the line of training. The same step saved to several tiers is one
candidate, nearest tier first. Files without a manifest, which older programs left, take their place by the time they
were written; among themselves they go by step.
"""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from elastic_harness.checkpoint.config import TIERS, CheckpointTier
from strata.checkpoint.events import CheckpointInfo
from strata.checkpoint.image.plain import plain_files
from strata.stores.protocol import Store, StoreError

log = logging.getLogger("elastic_harness.checkpoint")

_STEP = re.compile(r"checkpoint_step_(\d{8,})\.pt")


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    step: int
    tier: CheckpointTier
    checkpoint_id: str = ""
    """Of the engine's checkpoints."""
    key: str = ""
    """Of a file without a manifest, in its tier's store."""
    saved_at: float = 0.0

    def __str__(self) -> str:
        return f"step {self.step} in {self.tier.name}" + (f" ('{self.key}')" if self.key else "")


def in_order(
    infos: Sequence[CheckpointInfo], files: Iterable[Candidate], tiers: Sequence[CheckpointTier]
) -> list[Candidate]:
    """`infos` as the engine would fall back to them."""
    left = sorted(files, key=lambda file: file.step)
    ordered: list[Candidate] = []
    for _, same_step in itertools.groupby(infos, key=lambda info: info.step):
        copies = [
            Candidate(step=info.step, tier=tier, checkpoint_id=info.checkpoint_id, saved_at=info.created_at)
            for info in same_step
            for tier in tiers
            if tier.name in info.tiers
        ]
        while left and left[-1].saved_at > max(copy.saved_at for copy in copies):
            ordered.append(left.pop())
        ordered += sorted(copies, key=lambda copy: TIERS.index(copy.tier))
    return ordered + left[::-1]


def files_in(store: Store, tier: CheckpointTier) -> list[Candidate]:
    """The checkpoint files of older programs; none where the store cannot be listed."""
    try:
        blobs = plain_files(store)
    except StoreError as error:
        log.warning("passed over while looking for a checkpoint: %s", error)
        return []
    return [
        Candidate(step=int(named[1]), tier=tier, key=blob.key, saved_at=blob.modified_s)
        for blob in blobs
        if (named := _STEP.fullmatch(blob.key))
    ]
