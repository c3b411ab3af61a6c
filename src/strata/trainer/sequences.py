"""Token sequences by number, for PyTorch's DataLoader."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from strata.data.tokens.sequences import SequenceReader

Rows = dict[str, Tensor]


class SequenceDataset(Dataset[Rows]):
    """Reads whole batches at once: `DataLoader` asks for all numbers of a batch in one call."""

    def __init__(self, reader: SequenceReader) -> None:
        self._reader = reader

    def __len__(self) -> int:
        return self._reader.count

    def __getitem__(self, number: int) -> Rows:
        return self.__getitems__([number])[0]

    def __getitems__(self, numbers: list[int]) -> list[Rows]:
        inputs, labels = self._reader.read(np.asarray(numbers, np.int64))
        return [{"input_ids": torch.from_numpy(inputs), "labels": torch.from_numpy(labels)}]


def collate(batch: list[Rows]) -> Rows:
    """A batch has been read as one; a rank without work in a step has one that weighs nothing."""
    return batch[0]
