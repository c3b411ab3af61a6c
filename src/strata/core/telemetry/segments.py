"""Numbered segments of rows in object storage: one writes, others read along, and none of them loses or repeats a row.

A stream belongs to one writer, and its segments are numbered. Only the newest grows: it is written again, whole, with more rows
behind those that it had, until it is **sealed**; a sealed one never changes. Which rows a sealed segment has is decided, and
durable at its writer, before it is written: a writer that was killed in between writes the same again. So a reader that
remembers how many rows of which segment it has taken (`Position`) takes each row once, in order, whenever it looks.

What is removed is removed from the oldest on (`expired`). A reader whose segment was removed continues at the next there is.
Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

SEGMENT_BYTES = 1 << 20
"""A segment with so many bytes of rows is sealed."""
SEGMENT_S = 600.0
"""So is one whose first row is so old: idle streams have few objects, and busy ones no more than one in so much time."""


@dataclass(frozen=True, slots=True, order=True)
class Position:
    """How far a reader is: the segment it reads, and how many of its rows it has taken."""

    number: int
    rows: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    number: int
    is_sealed: bool
    rows: tuple[bytes, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """How many of the rows that wait belong to the present segment, and whether no more will."""

    rows: int
    is_sealed: bool


def cut(sizes_bytes: Sequence[int], *, age_s: float) -> Cut:
    """`sizes_bytes`: of the rows since the last sealed segment, oldest first; `age_s`: of the first of them."""
    total = 0
    for count, size in enumerate(sizes_bytes, 1):
        total += size
        if total >= SEGMENT_BYTES:
            return Cut(rows=count, is_sealed=True)
    return Cut(rows=len(sizes_bytes), is_sealed=bool(sizes_bytes) and age_s >= SEGMENT_S)


def fresh(position: Position, segment: Segment) -> tuple[tuple[bytes, ...], Position]:
    """The rows that a reader at `position` has not taken, and where it is then."""
    if segment.number != position.number:
        raise ValueError(f"segment {segment.number} is not the one to be read, {position.number}")
    rows = segment.rows[position.rows :]
    if segment.is_sealed:
        return rows, Position(segment.number + 1)
    return rows, Position(segment.number, max(position.rows, len(segment.rows)))


def next_of(position: Position | None, numbers: Iterable[int]) -> Position | None:
    """Where a reader continues, given the segments there are; None where there is nothing for it."""
    later = sorted(number for number in numbers if position is None or number >= position.number)
    if not later:
        return None
    return position if position is not None and later[0] == position.number else Position(later[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredSegment:
    key: str
    size_bytes: int
    modified_s: float


def expired(
    stored: Iterable[StoredSegment], *, limit_bytes: int, keep_s: float | None, now_s: float
) -> list[str]:
    """Keys of the segments that are too old, and of the oldest beyond the limit."""
    newest_first = sorted(stored, key=lambda each: (each.modified_s, each.key), reverse=True)
    total, found = 0, []
    for each in newest_first:
        total += each.size_bytes
        is_old = keep_s is not None and each.modified_s < now_s - keep_s
        if is_old or total > limit_bytes:
            found.append(each.key)
    return found[::-1]
