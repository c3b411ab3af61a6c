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

from strata.data.streaming.prefetch import Ahead, FetchesAhead, RangesAhead
from strata.data.tokens.index import TokenIndex
from strata.data.tokens.sequences import SequenceReader

Numbers = NDArray[np.int64]


class TokenDocuments(FetchesAhead):
    """Documents by number, each with its `input_ids`."""

    def __init__(self, index: TokenIndex) -> None:
        self.index = index

    @property
    def is_remote(self) -> bool:
        return bool(getattr(self.index, "is_remote", False))

    def ahead(self) -> Ahead | None:
        return None if self.index.source is None else _DocumentsAhead(self)

    def ahead_of_pieces(self) -> _DocumentsAhead | None:
        return None if self.index.source is None else _DocumentsAhead(self)

    @cached_property
    def lengths(self) -> Numbers:
        """Tokens of each document."""
        return np.diff(self.index.document_starts, append=self.index.total_tokens)

    def __len__(self) -> int:
        return self.index.header.num_records

    def piece(self, document: int, start: int, stop: int) -> Numbers:
        first, end = self.span(document, start, stop)
        return self.index.tokens[first:end].astype(np.int64)

    def span(self, document: int, start: int, stop: int) -> tuple[int, int]:
        """Where tokens [start, stop) of a document are in the index, as far as it has them."""
        first = int(self.index.document_starts[document])
        return first + start, min(first + stop, first + int(self.lengths[document]))

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


class _DocumentsAhead:
    """Documents of a remote index, or pieces of them."""

    def __init__(self, documents: TokenDocuments) -> None:
        self._documents = documents
        self._source: Any = documents.index.source
        self.token_bytes = float(documents.index.header.token_bytes)
        self.sample_bytes = self.token_bytes * documents.index.total_tokens / max(len(documents), 1)

    def fetch(self, samples: Sequence[int], *, in_memory: bool) -> None:
        lengths = self._documents.lengths
        self.fetch_pieces([(each, 0, int(lengths[each])) for each in samples], in_memory=in_memory)

    def fetch_pieces(self, pieces: Sequence[tuple[int, int, int]], *, in_memory: bool) -> None:
        index = self._documents.index
        ranges = [index.range_of(*self._documents.span(*piece)) for piece in pieces]
        self._source.prefetch(ranges, in_memory=in_memory)

    def close(self) -> None:
        pass


class TokenSequences(FetchesAhead):
    """Sequences by number: `input_ids` and `labels`. Every token of the index but the first is a label exactly once."""

    def __init__(self, index: TokenIndex, sequence_length: int) -> None:
        self._reader = SequenceReader(index, sequence_length)

    @property
    def is_remote(self) -> bool:
        return self._reader.index.is_remote

    def ahead(self) -> Ahead | None:
        index, length = self._reader.index, self._reader.seq_length
        if index.source is None:
            return None
        return RangesAhead(
            index.source,
            lambda samples: [index.range_of(each * length, (each + 1) * length + 1) for each in samples],
            sample_bytes=float(length * index.header.token_bytes),
        )

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
        started = np.searchsorted(index.document_starts, token, side="right")
        return np.asarray(started - (token < index.total_tokens))


def tokens(path: str | os.PathLike[str]) -> TokenDocuments:
    """The documents of a token index that `strata index` has built, as a source of a mixture or for packing."""
    return TokenDocuments(TokenIndex(path))
