"""Documents into sequences of a fixed length: which pieces of which documents stand in which sequence.

A document longer than a sequence is cut every `sequence_length` tokens, nowhere else; what is left of it is a piece like
any shorter document. Pieces are packed greedily, longest first, each where the least space is left that it fits into,
among the documents of one window: consecutive documents with about `WINDOW_SEQUENCES` sequences of tokens. So the
packing depends on the lengths alone, a sequence needs no more than one window, and every token of every document stands
in exactly one sequence. What is not filled is padding. Pure.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

WINDOW_SEQUENCES = 128

Numbers = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """The pieces of every sequence: those of sequence `s` are `first[s]` up to `first[s + 1]`."""

    sequence_length: int
    first: Numbers
    document: Numbers
    chunk: NDArray[np.int32]
    """Which part of its document a piece is: its tokens begin at `chunk * sequence_length`."""
    length: NDArray[np.int32]
    tokens: NDArray[np.int32]
    """Of each sequence."""
    documents: NDArray[np.int32]
    """That end in each sequence: over all sequences, every document once."""

    def __len__(self) -> int:
        return len(self.tokens)


def pack_lengths(
    lengths: ArrayLike, sequence_length: int, *, window_sequences: int = WINDOW_SEQUENCES
) -> Packing:
    """Pack documents of these lengths. Those without tokens stand nowhere."""
    sizes = np.asarray(lengths, np.int64)
    if sequence_length < 1:
        raise ValueError(f"sequence_length must be positive, got {sequence_length}")
    if sizes.size and int(sizes.min()) < 0:
        raise ValueError("a document cannot have a negative length")
    chunks = -(-sizes // sequence_length)
    document = np.repeat(np.arange(len(sizes), dtype=np.int64), chunks)
    begins = np.cumsum(chunks) - chunks
    chunk = np.arange(len(document), dtype=np.int64) - np.repeat(begins, chunks)
    length = np.minimum(sizes[document] - chunk * sequence_length, sequence_length)
    # A window ends with the document that fills it.
    window = ((np.cumsum(sizes) - sizes) // (window_sequences * sequence_length))[document]
    order = np.lexsort((document, -length, window))
    sequence = np.empty(len(document), np.int64)
    made = 0
    open_in = -1
    spaces: list[tuple[int, int]] = []
    for piece, size, of in zip(order.tolist(), length[order].tolist(), window[order].tolist(), strict=True):
        if of != open_in:
            open_in, spaces = of, []  # Of the window's sequences: what is left in each, and its number.
        at = bisect_left(spaces, (size, -1))
        if at == len(spaces):
            number, left = made, sequence_length - size
            made += 1
        else:
            space, number = spaces.pop(at)
            left = space - size
        sequence[piece] = number
        if left:
            insort(spaces, (left, number))
    order = np.lexsort((chunk, document, sequence))
    first = np.searchsorted(sequence[order], np.arange(made + 1))
    return Packing(
        sequence_length=sequence_length,
        first=first.astype(np.int64),
        document=document[order],
        chunk=chunk[order].astype(np.int32),
        length=length[order].astype(np.int32),
        tokens=np.bincount(sequence, weights=length, minlength=made).astype(np.int32),
        documents=np.bincount(sequence[chunk + 1 == chunks[document]], minlength=made).astype(np.int32),
    )
