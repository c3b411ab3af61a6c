"""How the objects of a checkpoint are called in a store, and the parts of a training state in it.

A checkpoint is a payload `<stem>.pt` (or `.bin`, where the caller gave bytes) and, beside it, `<stem>.manifest.json`. A
stem strategy turns step and checkpoint id into the stem. The default is unique for every save, so two writers
never meet. A strategy may leave the id out, for names people type; where such a name is taken already, the id is
added, because a payload is never overwritten.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import TypeAlias

from strata.checkpoint.catalog.manifest import BYTES, SUFFIX, CheckpointId
from strata.processes import Process, this_process

MODEL, OPTIMIZER, SCHEDULER = "model_state_dict", "optimizer_state_dict", "lr_scheduler_state_dict"
NAMED = "named"
"""In the metadata of a checkpoint whose name a user has chosen: retention leaves it alone."""

Stem: TypeAlias = Callable[[int, CheckpointId], str]

_numbers = itertools.count(1)
_STEP = re.compile(r"checkpoint_step_(\d{8,})\.pt")
_ID = re.compile(r"(\d{8,})-([0-9a-f]{6}-[0-9a-z]+-[0-9a-z]+)-([0-9a-z]+)")


def new_id(step: int) -> CheckpointId:
    """Unique among all saves of all processes of all machines: this process's token and its own count."""
    return CheckpointId(f"{step:08d}-{this_process().token}-{next(_numbers):02d}")


def writer_of(key: str) -> Process | None:
    """The process that wrote a key, where the name tells."""
    found = _ID.search(key)
    return Process.parse(found[2]) if found else None


def unique_stem(step: int, checkpoint_id: CheckpointId) -> str:
    """`ckpt-00000512-7c2f9a-4d2-1x9kq2-01`"""
    return f"ckpt-{checkpoint_id}"


def step_stem(step: int, checkpoint_id: CheckpointId) -> str:
    """`checkpoint_step_00000512`"""
    return f"checkpoint_step_{step:08d}"


def step_of(key: str) -> int | None:
    """The step that a payload named by `step_stem` is of; None for any other name."""
    found = _STEP.fullmatch(key)
    return int(found[1]) if found else None


def payload_key(stem: str, payload_format: str) -> str:
    return stem + (".bin" if payload_format == BYTES else ".pt")


def manifest_key(stem: str) -> str:
    return stem + SUFFIX


def manifest_beside(payload: str) -> str:
    """Where the manifest of a payload is that has a name of its own."""
    return manifest_key(payload.removesuffix(".pt"))


def claim_key(stem: str) -> str:
    return stem + ".claim"
