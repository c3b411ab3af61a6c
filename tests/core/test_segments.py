"""Segments: each row is taken once and in order, whoever is killed when; what is removed is the oldest."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from strata.coordinator.archive import Outbox
from strata.core.telemetry import segments
from strata.core.telemetry.segments import (
    Position,
    Segment,
    StoredSegment,
    cut,
    expired,
    fresh,
    next_of,
)


def test_a_segment_is_sealed_when_it_is_large_or_old() -> None:
    half = segments.SEGMENT_BYTES // 2
    assert (cut([half], age_s=0).rows, cut([half], age_s=0).is_sealed) == (1, False)
    assert (cut([half, half, 1], age_s=0).rows, cut([half, half, 1], age_s=0).is_sealed) == (2, True)
    assert cut([1], age_s=segments.SEGMENT_S).is_sealed
    assert not cut([], age_s=segments.SEGMENT_S).is_sealed


def test_a_reader_takes_what_is_new_and_follows_the_seal() -> None:
    growing = Segment(number=3, is_sealed=False, rows=(b"a", b"b"))
    rows, then = fresh(Position(3, 1), growing)
    assert (rows, then) == ((b"b",), Position(3, 2))
    assert fresh(then, growing) == ((), then)
    sealed = Segment(number=3, is_sealed=True, rows=(b"a", b"b", b"c"))
    assert fresh(then, sealed) == ((b"c",), Position(4))
    with pytest.raises(ValueError, match="not the one"):
        fresh(Position(4), sealed)


def test_a_reader_continues_at_the_oldest_there_is() -> None:
    assert next_of(None, [7, 5, 6]) == Position(5)
    assert next_of(Position(5, 2), [5, 6]) == Position(5, 2)
    assert next_of(Position(5, 2), [8, 9]) == Position(8)
    assert next_of(Position(5, 2), [3, 4]) is None
    assert next_of(None, []) is None


def test_the_oldest_beyond_the_limits_expire() -> None:
    stored = [StoredSegment(key=str(n), size_bytes=10, modified_s=float(n)) for n in (3, 1, 2, 4)]
    assert expired(stored, limit_bytes=25, keep_s=None, now_s=5) == ["1", "2"]
    assert expired(stored, limit_bytes=100, keep_s=2.5, now_s=5) == ["1", "2"]
    assert expired(stored, limit_bytes=100, keep_s=None, now_s=5) == []


class Killed(Exception):
    pass


@pytest.mark.parametrize("seed", range(25))
def test_every_row_is_taken_once_and_in_order_whoever_is_killed_when(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A writer that may die between any two steps, with its real outbox, and two readers, one of them late."""
    random = Random(seed)
    monkeypatch.setattr(segments, "SEGMENT_BYTES", 40)
    monkeypatch.setattr("strata.coordinator.archive.SEGMENT_BYTES", 40)
    store: dict[int, Segment] = {}
    outbox = Outbox(tmp_path / "archive.sqlite")
    written: list[bytes] = []
    readers: list[tuple[list[bytes], list[Position]]] = [([], []), ([], [])]

    def killed_here() -> None:
        if random.random() < 0.2:
            raise Killed

    def upload() -> None:
        while (due := outbox.due("logs")) is not None:
            killed_here()
            store[due.segment.number] = due.segment
            killed_here()
            outbox.written("logs", due)
            if not due.segment.is_sealed:
                return

    def read(which: int) -> None:
        taken, positions = readers[which]
        while (position := next_of(positions[-1] if positions else None, store)) is not None:
            rows, then = fresh(position, store[position.number])
            if then == position or random.random() < 0.2:
                return  # Nothing new; or killed before it was on disk, with the rows.
            taken += rows
            positions.append(then)

    for step in range(80):
        match random.choice(["add", "add", "upload", "read", "restart"] + ["late"] * (step > 60)):
            case "add":
                written.append(b"%d:%d" % (len(written), random.randrange(10**9)))
                outbox.put("logs", [written[-1]])
            case "upload":
                # Some are sealed by their age, whatever has come since.
                monkeypatch.setattr(segments, "SEGMENT_S", random.choice([-1.0, 1e9, 1e9]))
                try:
                    upload()
                except Killed:
                    outbox.close()
                    outbox = Outbox(tmp_path / "archive.sqlite")
            case "restart":
                outbox.close()
                outbox = Outbox(tmp_path / "archive.sqlite")
            case "read":
                read(0)
            case "late":
                read(1)
        for taken, _ in readers:
            assert taken == written[: len(taken)], f"seed {seed}"
    monkeypatch.setattr(segments, "SEGMENT_S", 1e9)
    random.random = lambda: 1.0  # type: ignore[method-assign] # Nobody is killed any more.
    upload()
    for which, (taken, _) in enumerate(readers):
        read(which)
        assert taken == written, f"seed {seed}"
    outbox.close()
