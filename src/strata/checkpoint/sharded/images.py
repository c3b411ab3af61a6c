"""An image that holds one rank's part of a state: what it tells without its tensors being read.

Needs nothing of PyTorch's distributed checkpoints, which take long to import: the agent of a machine looks at images too.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from strata.checkpoint.catalog.manifest import Manifest
from strata.checkpoint.errors import CheckpointError
from strata.checkpoint.formats.lazy import nest
from strata.checkpoint.image.reading import open_tensors
from strata.checkpoint.sharded.plan import Path, flattened
from strata.stores.protocol import NotFound, StoreError, Truncated


class Unusable(CheckpointError):
    """Something that a checkpoint was to be read from cannot be: `names` says what."""

    code = "unusable_source"

    def __init__(self, error: CheckpointError | StoreError | str, *, names: Collection[str]) -> None:
        super().__init__(getattr(error, "message", str(error)))
        self.names = tuple(names)
        self.is_away = isinstance(error, StoreError) and not isinstance(error, NotFound | Truncated)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageFound:
    """What a rank tells the others about an image in its machine's memory."""

    name: str
    rank: int
    machine: str
    path: str
    manifest: Manifest
    objects: Mapping[Path, Any]


def describe_image(path: str, manifest: Manifest, *, name: str, rank: int, machine: str) -> ImageFound:
    """Look at an image of this machine. Raises `Unusable`."""
    try:
        state = open_tensors(path, manifest)
        objects = {at: value for at, value in flattened(state) if not isinstance(value, torch.Tensor)}
    except (CheckpointError, OSError) as error:
        raise Unusable(str(error), names=[name]) from error
    return ImageFound(name=name, rank=rank, machine=machine, path=path, manifest=manifest, objects=objects)


def nested_state(values: Mapping[Path, Any]) -> dict[str, Any]:
    """A state from its leaves."""
    return nest(
        {".".join(map(str, path)): value for path, value in values.items()},
        {".".join(map(str, path)): path for path in values},
    )
