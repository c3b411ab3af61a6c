"""Token sequences by number, for PyTorch's DataLoader. Everything lives in `strata.trainer.data`."""

from __future__ import annotations

from strata.trainer.data import Rows, SequenceDataset, collate

__all__ = ["Rows", "SequenceDataset", "collate"]
