"""Documents packed into sequences of a fixed length, as a map-style dataset.

    packed = strata.data.pack(strata.tokens("web.index"), 4096)
    loader = strata.ElasticLoader(packed, strata.ElasticSampler(len(packed), global_batch_size=256))

Which pieces stand in which sequence is decided by `strata.core.data.packing` from the lengths of the documents, once; a
sequence is then a sample like any other: it has a position, and every reader gets the same. A sample has `input_ids`,
`labels` (the next token of the same document, -100 where there is none), `position_ids` (from 0 in each piece) and
`document_ids` (0, 1, 2, … in each sequence, -1 for padding), int64 each. `cu_seqlens` and `document_mask` make of the last
what variable-length attention and FlexAttention want. Needs no torch but for those two.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from strata.core.data.packing import Numbers, Packing, pack_lengths
from strata.data.composing.mapping import MappedDataset, Several
from strata.data.errors import DataError
from strata.data.loading.steps import SizedDataset
from strata.data.streaming.prefetch import Ahead, FetchesAhead, ahead_of

if TYPE_CHECKING:
    import torch

log = logging.getLogger("strata.data")

IGNORED_LABEL = -100
READ_AT_ONCE = 1_024

Tokens = NDArray[np.int64]


@runtime_checkable
class Documents(Protocol):
    """A dataset of documents whose lengths are known and which can be read in pieces."""

    @property
    def lengths(self) -> Numbers: ...

    def piece(self, document: int, start: int, stop: int) -> Tokens:
        """Tokens [start, stop) of a document, as far as it has them."""
        ...


class PiecesAhead(Protocol):
    """How to fetch pieces of documents before they are read."""

    @property
    def token_bytes(self) -> float: ...

    def fetch_pieces(self, pieces: Sequence[tuple[int, int, int]], *, in_memory: bool) -> None:
        """Document, first token and last token but one of each, as for `piece`."""
        ...

    def close(self) -> None: ...


class _PackedAhead:
    def __init__(self, packing: Packing, pieces: PiecesAhead) -> None:
        self._packing = packing
        self._pieces = pieces
        self.sample_bytes = packing.sequence_length * pieces.token_bytes

    def fetch(self, samples: Sequence[int], *, in_memory: bool) -> None:
        wanted = [each for sequence in samples for each in pieces_of(self._packing, sequence)]
        self._pieces.fetch_pieces(wanted, in_memory=in_memory)

    def close(self) -> None:
        self._pieces.close()


def pieces_of(packing: Packing, sequence: int) -> list[tuple[int, int, int]]:
    """Document, first token and end of each piece of a sequence; one token more, where there is one: it is the label of the
    piece's last one."""
    parts = range(int(packing.first[sequence]), int(packing.first[sequence + 1]))
    found = []
    for part in parts:
        start = int(packing.chunk[part]) * packing.sequence_length
        found.append((int(packing.document[part]), start, start + int(packing.length[part]) + 1))
    return found


class PackedDocuments(FetchesAhead):
    """Sequences of packed documents, by number."""

    def __init__(self, documents: Documents, packing: Packing) -> None:
        self._documents = documents
        self.packing = packing

    @property
    def is_remote(self) -> bool:
        return bool(getattr(self._documents, "is_remote", False))

    def ahead(self) -> Ahead | None:
        make: Callable[[], PiecesAhead | None] | None = getattr(self._documents, "ahead_of_pieces", None)
        pieces = make() if make is not None else None
        return None if pieces is None else _PackedAhead(self.packing, pieces)

    @property
    def sequence_length(self) -> int:
        return self.packing.sequence_length

    def __len__(self) -> int:
        return len(self.packing)

    def tokens_of(self, samples: Numbers) -> Numbers:
        return self.packing.tokens[samples].astype(np.int64)

    def documents_of(self, samples: Numbers) -> Numbers:
        return self.packing.documents[samples].astype(np.int64)

    def __getitem__(self, sequence: int) -> dict[str, Tokens]:
        length = self.packing.sequence_length
        row = {
            "input_ids": np.zeros(length, np.int64),
            "labels": np.full(length, IGNORED_LABEL, np.int64),
            "position_ids": np.zeros(length, np.int64),
            "document_ids": np.full(length, -1, np.int64),
        }
        at = 0
        for number, (document, start, stop) in enumerate(pieces_of(self.packing, sequence)):
            tokens = self._documents.piece(document, start, stop)
            size = stop - start - 1
            end = at + size
            row["input_ids"][at:end] = tokens[:size]
            row["labels"][at : at + len(tokens) - 1] = tokens[1:]
            row["position_ids"][at:end] = np.arange(size)
            row["document_ids"][at:end] = number
            at = end
        return row

    def __getitems__(self, sequences: Sequence[int]) -> list[dict[str, Tokens]]:
        prepare: Callable[[Numbers], None] | None = getattr(self._documents, "prepare", None)
        if prepare is not None:
            first = self.packing.first
            parts = [self.packing.document[first[s] : first[s + 1]] for s in sequences]
            prepare(np.concatenate(parts) if parts else np.empty(0, np.int64))
        return [self[sequence] for sequence in sequences]


def pack(dataset: SizedDataset | Documents, sequence_length: int) -> PackedDocuments:
    """Pack the documents of a token index (`strata.tokens`), or of any map-style dataset of token ids: samples are
    sequences of ids, or mappings with `input_ids`. A dataset without `lengths` (one number of tokens per sample) is read
    once to learn them."""
    documents = dataset if isinstance(dataset, Documents) else _Samples(dataset)
    return PackedDocuments(documents, pack_lengths(documents.lengths, sequence_length))


class _Samples:
    """Any dataset of token ids as documents; where samples are split, each part is one."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._read: dict[int, tuple[Tokens, ...]] = {}
        known = getattr(dataset, "lengths", None)
        if known is not None and not isinstance(dataset, MappedDataset):
            self.lengths: Numbers = np.asarray(known, np.int64)
            if len(self.lengths) != len(dataset):
                raise DataError(
                    f"The dataset has {len(dataset):,} samples and {len(self.lengths):,} lengths.",
                    hint="`lengths` must have the number of tokens of each sample.",
                )
            self._sample = np.arange(len(dataset), dtype=np.int64)
            self._part = np.zeros(len(dataset), np.int64)
        else:
            self._learn_lengths()

    @property
    def is_remote(self) -> bool:
        return bool(getattr(self._dataset, "is_remote", False))

    def ahead_of_pieces(self) -> PiecesAhead | None:
        inner = ahead_of(self._dataset)
        return None if inner is None else _SamplesAhead(self._sample, self.lengths, inner)

    def _learn_lengths(self) -> None:
        total = len(self._dataset)
        log.info("reading %s samples once to measure their lengths", f"{total:,}")
        rows: list[tuple[int, int, int]] = []
        for first in range(0, total, READ_AT_ONCE):
            samples = range(first, min(first + READ_AT_ONCE, total))
            for sample, parts in zip(samples, self._parts(samples), strict=True):
                rows += [(sample, part, len(tokens)) for part, tokens in enumerate(parts)]
        found = np.asarray(rows, np.int64).reshape(-1, 3)
        self._sample, self._part, self.lengths = found[:, 0], found[:, 1], found[:, 2]

    def _parts(self, samples: Sequence[int]) -> list[tuple[Tokens, ...]]:
        many = getattr(self._dataset, "__getitems__", None)
        rows = many(list(samples)) if many is not None else [self._dataset[sample] for sample in samples]
        return [
            tuple(_token_ids(each, sample) for each in (row if isinstance(row, Several) else (row,)))
            for sample, row in zip(samples, rows, strict=True)
        ]

    def prepare(self, documents: Numbers) -> None:
        """Read at once what the pieces of a batch are from."""
        samples = np.unique(self._sample[documents]).tolist()
        self._read = dict(zip(samples, self._parts(samples), strict=True))

    def piece(self, document: int, start: int, stop: int) -> Tokens:
        sample = int(self._sample[document])
        parts = self._read.get(sample) or self._parts([sample])[0]
        part = int(self._part[document])
        tokens = parts[part] if part < len(parts) else np.empty(0, np.int64)
        if len(tokens) != self.lengths[document]:
            raise DataError(
                f"Sample {sample:,} has {len(tokens):,} tokens now, and had {self.lengths[document]:,}.",
                hint="Samples that are packed must not change: no random augmentation, no other data.",
            )
        return tokens[start:stop]


class _SamplesAhead:
    """Pieces of documents that are samples, or parts of samples, of another dataset."""

    def __init__(self, samples: Numbers, lengths: Numbers, inner: Ahead) -> None:
        self._samples = samples
        self._inner = inner
        self.token_bytes = inner.sample_bytes / max(float(lengths.mean()) if len(lengths) else 1.0, 1.0)

    def fetch_pieces(self, pieces: Sequence[tuple[int, int, int]], *, in_memory: bool) -> None:
        samples = np.unique(self._samples[[document for document, _, _ in pieces]]).tolist()
        self._inner.fetch(samples, in_memory=in_memory)

    def close(self) -> None:
        self._inner.close()


def _token_ids(row: Any, sample: int) -> Tokens:
    ids = row.get("input_ids") if isinstance(row, Mapping) else row
    array = np.asarray(ids) if ids is not None else np.empty(0)
    if ids is None or array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise DataError(
            f"Sample {sample:,} is not a document of token ids.",
            hint="Packing needs sequences of ids, or mappings with 'input_ids'.",
        )
    return array.astype(np.int64)


def cu_seqlens(document_ids: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Where the documents of a batch begin and end when its rows stand one after the other, and how long the longest is:
    what attention over variable lengths takes. Padding counts as a document of its own. int32, on the same device."""
    import torch

    rows = document_ids.reshape(-1, document_ids.shape[-1])
    begins = torch.ones_like(rows, dtype=torch.bool)
    begins[:, 1:] = rows[:, 1:] != rows[:, :-1]
    edges = torch.nonzero(begins.reshape(-1)).reshape(-1)
    edges = torch.cat([edges, edges.new_tensor([rows.numel()])])
    return edges.to(torch.int32), int((edges[1:] - edges[:-1]).max()) if rows.numel() else 0


def document_mask(
    document_ids: torch.Tensor,
) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
    """For `create_block_mask` of FlexAttention: each token sees those before it in its own document."""

    def mask(batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return (document_ids[batch, query] == document_ids[batch, key]) & (query >= key)

    return mask
