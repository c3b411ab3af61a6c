"""A dataset over a token index that can stop and resume anywhere, with any number of workers.

    dataset = ResumableDataset("data/train.jsonl", "data/train.index", tokenizer, seq_length=1024)
    loader = create_dataloader(dataset, batch_size=8, num_workers=2)
    for batch in loader:                        # {"input_ids": (8, 1024), "labels": (8, 1024)}, int64
        ...                                     # labels[t] is the token after input_ids[t]; -100 is ignored
        checkpoint["data"] = loader.state_dict()

Nothing is tokenized or scanned here: tokens come from the index. Before it is used the index is compared with
the data files and the tokenizer; one that no longer fits is refused with the command that rebuilds it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Unpack

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from strata.data.loading.loader import MoreLoaderOptions
from strata.data.tokens.building.sources import expand_patterns
from strata.data.tokens.building.tokenizers import BYTES_NAME, load_tokenizer
from strata.data.tokens.dataset import TokenDataset, TokenLoader
from strata.data.tokens.errors import IndexNotFound, StaleIndex
from strata.data.tokens.freshness import (
    COMMAND,
    build_command,
    check_sources,
    check_tokenizer,
    rebuild_command,
)
from strata.data.tokens.index import TokenIndex
from strata.data.tokens.sequences import DatasetState, SequenceReader
from strata.trainer.error_translation import reading_data, respelt
from strata.trainer.errors import DataLoadingError
from strata.trainer.validation import other_tokenizer

log = logging.getLogger("strata.trainer")

__all__ = ["DatasetState", "ResumableDataset", "create_dataloader"]

PathLike = str | os.PathLike[str]
Rows = dict[str, Tensor]


class ResumableDataset(TokenDataset):
    """Sequences of `seq_length` tokens in the order of (seed, epoch), this rank's share of them.

    `tokenizer` may be None: it is only compared with the one the index was built with. Rank and world size
    come from `torch.distributed` or torchrun's environment unless both are given. `drop_last` leaves out the
    last global batch of an epoch when it is not full. `verify=False` trusts the index without looking at the
    data files, which then need not exist on this machine.
    """

    index_command: ClassVar[str] = COMMAND
    """How this class's users build an index, for suggestions."""

    def __init__(
        self,
        data_files: PathLike | Iterable[PathLike],
        index_file: PathLike | TokenIndex,
        tokenizer: object = None,
        seq_length: int = 1024,
        *,
        text_key: str | None = None,
        seed: int = 0,
        shuffle: bool = True,
        rank: int | None = None,
        world_size: int | None = None,
        drop_last: bool = False,
        verify: bool = True,
    ) -> None:
        names = [data_files] if isinstance(data_files, str | os.PathLike) else data_files
        with reading_data(index_command=self.index_command):
            self.data_files = expand_patterns(names)
            index = self._open(index_file, tokenizer)
            if verify:
                _verify(index, self.data_files, tokenizer, text_key)
        super().__init__(
            index,
            seq_length=seq_length,
            seed=seed,
            shuffle=shuffle,
            rank=rank,
            world_size=world_size,
            drop_last=drop_last,
        )

    def _open(self, index_file: PathLike | TokenIndex, tokenizer: object) -> TokenIndex:
        if isinstance(index_file, TokenIndex):
            return index_file
        try:
            return TokenIndex(index_file)
        except IndexNotFound:
            name = os.fspath(tokenizer) if isinstance(tokenizer, str | os.PathLike) else "gpt2"
            files = [str(path) for path in self.data_files]
            command = build_command(files, Path(index_file), tokenizer=name)
            raise DataLoadingError.index_not_found(
                files[0] if files else str(index_file), command=respelt(command, self.index_command)
            ) from None

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        with reading_data(index_command=self.index_command):
            super().load_state_dict(state)


def create_dataloader(
    dataset: TokenDataset,
    batch_size: int,
    num_workers: int = 0,
    *,
    fill_last: bool = False,
    **options: Unpack[MoreLoaderOptions],
) -> TokenLoader:
    """Batches of `input_ids` and `labels`, prefetched by `num_workers` processes, in the same order whatever
    their number. `fill_last` gives every rank the same number of equal batches, filled up with sequences
    whose labels are all -100. Other options (`pin_memory`, `persistent_workers`, `prefetch_factor`, …) are
    those of PyTorch's DataLoader.
    """
    return TokenLoader(dataset, batch_size, num_workers=num_workers, fill_last=fill_last, **options)


def _verify(index: TokenIndex, data_files: list[Path], tokenizer: object, text_key: str | None) -> None:
    if data_files:
        check_sources(index, data_files)
    if text_key is not None and text_key != index.meta.text_key:
        raise StaleIndex(
            index.path,
            data_files[0] if data_files else index.path,
            f"it holds the texts under {index.meta.text_key!r}, not {text_key!r}",
            rebuild=rebuild_command(index, data_files, text_key=text_key),
        )
    if tokenizer is None:
        return
    # A name on the hub would have to be downloaded to be compared: training does not need it.
    if not isinstance(tokenizer, str) or tokenizer == BYTES_NAME or os.path.exists(tokenizer):
        check_tokenizer(index, load_tokenizer(tokenizer), data_files)
        return
    other = other_tokenizer(index, tokenizer)
    if other.is_certain:
        raise StaleIndex(
            index.path,
            data_files[0] if data_files else index.path,
            f"it {other.reason}",
            rebuild=build_command(
                [str(path) for path in data_files],
                index.path,
                tokenizer=tokenizer,
                text_key=index.meta.text_key,
            ),
        )
    if other.reason:
        log.warning("the index %s %s; they are not compared", index.path, other.reason)


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
