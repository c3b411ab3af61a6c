"""What the metadata of PyTorch's own distributed checkpoints is made of, beyond its public types."""

from __future__ import annotations

from typing import Any, Final

import torch

from strata.torch_compat import require

require("checkpoints")

from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo  # noqa: E402
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING as MemoryFormat  # noqa: E402


def _layout(name: str) -> torch.layout:
    """`torch.strided` and the like, by name."""
    known: Any = torch.serialization._get_layout(name)  # type: ignore[no-untyped-call]
    assert isinstance(known, torch.layout)
    return known


PRIVATE_GLOBALS: Final[dict[tuple[str, str], Any]] = {
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): StorageInfo,
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"): MemoryFormat,
    ("torch.serialization", "_get_layout"): _layout,
}
"""What the pickled metadata names beside public types, by module and name."""

__all__ = ["PRIVATE_GLOBALS", "MemoryFormat", "StorageInfo"]
