"""Every token of every document stands in exactly one sequence, cut only where it must be, and little is padding."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.core.data.packing import pack_lengths


@given(st.lists(st.integers(0, 90), max_size=80), st.integers(1, 33), st.integers(1, 4))
def test_every_token_stands_in_exactly_one_sequence(lengths: list[int], length: int, window: int) -> None:
    packing = pack_lengths(lengths, length, window_sequences=window)
    seen: set[tuple[int, int]] = set()
    for sequence in range(len(packing)):
        pieces = range(int(packing.first[sequence]), int(packing.first[sequence + 1]))
        assert len(pieces) > 0
        size = sum(int(packing.length[piece]) for piece in pieces)
        assert 0 < size <= length
        assert size == packing.tokens[sequence]
        for piece in pieces:
            start = int(packing.chunk[piece]) * length
            tokens = {(int(packing.document[piece]), start + i) for i in range(int(packing.length[piece]))}
            assert not tokens & seen
            seen |= tokens
    assert seen == {(document, i) for document, size in enumerate(lengths) for i in range(size)}
    assert int(packing.documents.sum()) == sum(size > 0 for size in lengths)


def test_documents_that_fit_are_never_cut() -> None:
    draw = random.Random(4)
    packing = pack_lengths([draw.randint(1, 64) for _ in range(5_000)], 64)
    assert not packing.chunk.any()
    assert len(packing.document) == 5_000


def test_a_sequence_needs_no_more_than_one_window() -> None:
    draw = random.Random(5)
    lengths = [draw.randint(1, 100) for _ in range(20_000)]
    packing = pack_lengths(lengths, 128)
    first = packing.document[packing.first[:-1]]
    last = packing.document[packing.first[1:] - 1]
    before = np.cumsum(lengths)
    assert int((before[last] - before[first]).max()) <= 129 * 128


@pytest.mark.parametrize("length", [512, 2_048])
def test_little_of_a_sequence_is_padding(length: int) -> None:
    draw = random.Random(6)
    lengths = [min(int(draw.lognormvariate(5, 1.2)) + 1, 50_000) for _ in range(30_000)]
    packing = pack_lengths(lengths, length)
    assert int(packing.tokens.sum()) == sum(lengths)
    assert packing.tokens.mean() / length > 0.98


def test_what_cannot_be_packed_is_refused() -> None:
    with pytest.raises(ValueError, match="must be positive"):
        pack_lengths([3], 0)
    with pytest.raises(ValueError, match="negative"):
        pack_lengths([3, -1], 4)
    assert len(pack_lengths([], 4)) == 0
