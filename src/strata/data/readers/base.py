"""What every file format promises, and the small shared parts.

A format turns one file into rows that are read by number. `index` looks at the file once and returns what is
needed to reach any row later without looking at the rest: a few arrays, which the reader keeps on disk between
runs. `open` reads rows with it. Bad records raise `DataError` with file and line where they are read, or, with
`on_bad="skip"`, are found while indexing, counted, and then are not rows at all, so that row numbers are stable.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from strata.data.streaming.sources import Source
from strata.errors import MissingDependency

Row = dict[str, Any]
OnBad = Literal["raise", "skip"]
T = TypeVar("T")


class Unfinished(Protocol):
    """Where an index that takes long is kept while it is built, so that an interrupted build continues."""

    @property
    def arrays(self) -> Mapping[str, NDArray[Any]]:
        """What an interrupted build has kept; empty where there was none."""
        ...

    def is_due(self) -> bool:
        """Whether it is worth keeping what there is by now."""
        ...

    def keep(self, arrays: Mapping[str, NDArray[Any]]) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    on_bad: OnBad = "raise"
    """A bad record is an error where it is read, or is skipped and counted."""
    max_record_bytes: int = 64 * 2**20
    """A longer line or record is bad: it is rather a file that is not what it says than a sample."""
    unfinished: Unfinished | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class FileIndex:
    """How to reach each row of one file."""

    rows: int
    bad: int = 0
    arrays: Mapping[str, NDArray[Any]] = field(default_factory=dict)


class OpenFile(Protocol):
    def read(self, rows: Sequence[int]) -> list[Row]:
        """The rows, in the order asked for."""
        ...

    def close(self) -> None: ...


class Format(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def suffixes(self) -> tuple[str, ...]: ...

    def index(self, source: Source, options: ReadOptions) -> FileIndex: ...

    def open(self, source: Source, index: FileIndex, cache: Cache) -> OpenFile: ...


class Cache:
    """Decoded pieces of files (row groups, record batches), the oldest dropped beyond a byte budget."""

    def __init__(self, budget_bytes: int) -> None:
        self._budget_bytes = budget_bytes
        self._used_bytes = 0
        self._kept: OrderedDict[tuple[str, int], tuple[Any, int]] = OrderedDict()

    def get(self, key: tuple[str, int], make: Callable[[], T], size_bytes: Callable[[T], int]) -> T:
        if key in self._kept:
            self._kept.move_to_end(key)
            found: T = self._kept[key][0]
            return found
        made = make()
        size = size_bytes(made)
        self._kept[key] = (made, size)
        self._used_bytes += size
        while self._used_bytes > self._budget_bytes and len(self._kept) > 1:
            _, (_, freed) = self._kept.popitem(last=False)
            self._used_bytes -= freed
        return made


def group_rows(rows: Sequence[int], firsts: NDArray[np.int64]) -> dict[int, list[tuple[int, int]]]:
    """Rows by the piece they are in: piece → (place in the answer, row within the piece). `firsts` holds the
    first row of each piece."""
    pieces = np.searchsorted(firsts, np.asarray(rows, np.int64), side="right") - 1
    grouped: dict[int, list[tuple[int, int]]] = {}
    for place, (row, piece) in enumerate(zip(rows, pieces.tolist(), strict=True)):
        grouped.setdefault(piece, []).append((place, row - int(firsts[piece])))
    return grouped


def arrow(feature: str) -> Any:
    """pyarrow, where it is installed."""
    try:
        import pyarrow
        import pyarrow.ipc
    except ImportError as error:
        raise MissingDependency("pyarrow", extra="data", feature=feature) from error
    return pyarrow
