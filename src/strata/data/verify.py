"""Whether every sample of a dataset can be read, and is what its digests say.

Reads everything once, in order, file by file. Damage in one file does not hide damage in the next.
"""

from __future__ import annotations

from dataclasses import dataclass

from strata.data.errors import DataError
from strata.data.reader import DatasetReader, Progress

_ROWS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    path: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    samples: int
    """That could be read."""
    digests: int
    """That were compared."""
    damaged: tuple[Damage, ...] = ()
    """The first problem of each file that has one."""


def verify_dataset(reader: DatasetReader, *, progress: Progress | None = None) -> VerifyReport:
    samples = digests = 0
    damaged = []
    if progress is not None:
        progress.begin(total_bytes=sum(file.size_bytes for file in reader.files), done_bytes=0)
    first = 0
    for number, file in enumerate(reader.files):
        try:
            digests += reader.compare_digests(number)
            for start in range(first, first + file.samples, _ROWS):
                rows = reader.read(range(start, min(start + _ROWS, first + file.samples)))
                samples += len(rows)
                if progress is not None:
                    progress.advance(
                        done_bytes=file.size_bytes * len(rows) // file.samples, samples=len(rows)
                    )
        except DataError as error:
            damaged.append(Damage(path=file.path, reason=error.message))
        first += file.samples
    return VerifyReport(samples=samples, digests=digests, damaged=tuple(damaged))
