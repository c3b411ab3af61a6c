"""The documents of a token index as a map-style dataset: what `strata.tokens` gives.

A document is a record of the sources that the index was built from. `sequences` reads the same tokens in sequences of a
fixed length that go across documents; `strata.data.pack` packs documents into sequences that do not. Needs no torch.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from strata.data.tokens.index import TokenIndex
from strata.data.tokens.sequences import SequenceReader

Numbers = NDArray[np.int64]


class TokenDocuments:
    """Documents by number, each with its `input_ids`."""

    def __init__(self, index: TokenIndex) -> None:
        self.index = index

    @property
    def is_remote(self) -> bool:
        return bool(getattr(self.index, "is_remote", False))

    @cached_property
    def lengths(self) -> Numbers:
        """Tokens of each document."""
        return np.diff(self.index.document_starts, append=self.index.total_tokens)

    def __len__(self) -> int:
        return self.index.header.num_records

    def piece(self, document: int, start: int, stop: int) -> Numbers:
        first = int(self.index.document_starts[document])
        end = min(first + stop, first + int(self.lengths[document]))
        return self.index.tokens[first + start : end].astype(np.int64)

    def prepare(self, documents: Numbers) -> None:
        """Called before a batch is read."""
        self.index.let_go(int(self.lengths[documents].sum()) * self.index.header.token_bytes)

    def __getitem__(self, document: int) -> dict[str, Numbers]:
        if not 0 <= document < len(self):
            raise IndexError(f"document {document} of {len(self):,}")
        return {"input_ids": self.piece(document, 0, int(self.lengths[document]))}

    def tokens_of(self, samples: Numbers) -> Numbers:
        return self.lengths[samples]

    def documents_of(self, samples: Numbers) -> Numbers:
        return np.ones(len(samples), np.int64)

    def sequences(self, sequence_length: int) -> TokenSequences:
        return TokenSequences(self.index, sequence_length)

    def __getstate__(self) -> dict[str, Any]:
        return {"index": self.index}


class TokenSequences:
    """Sequences by number: `input_ids` and `labels`. Every token of the index but the first is a label exactly once."""

    def __init__(self, index: TokenIndex, sequence_length: int) -> None:
        self._reader = SequenceReader(index, sequence_length)

    def __len__(self) -> int:
        return self._reader.count

    def __getitem__(self, sequence: int) -> dict[str, Numbers]:
        return self.__getitems__([sequence])[0]

    def __getitems__(self, sequences: Sequence[int]) -> list[dict[str, Numbers]]:
        inputs, labels = self._reader.read(np.asarray(sequences, np.int64))
        return [{"input_ids": mine, "labels": theirs} for mine, theirs in zip(inputs, labels, strict=True)]

    def tokens_of(self, samples: Numbers) -> Numbers:
        length = self._reader.seq_length
        return np.minimum(self._reader.index.total_tokens - 1 - samples * length, length)

    def documents_of(self, samples: Numbers) -> Numbers:
        """Those whose last token is predicted in the sequence."""
        first = samples * self._reader.seq_length + 1
        return self._ended_before(first + self.tokens_of(samples)) - self._ended_before(first)

    def _ended_before(self, token: Numbers) -> Numbers:
        index = self._reader.index
        begun = np.searchsorted(index.document_starts, token, side="right")
        return np.asarray(begun - (token < index.total_tokens))


def tokens(path: str | os.PathLike[str]) -> TokenDocuments:
    """The documents of a token index that `strata index` has built, as a source of a mixture or for packing."""
    return TokenDocuments(TokenIndex(path))
