"""A dataset of files as one numbered sequence of samples.

    reader = DatasetReader("data/*.parquet")
    len(reader), reader.read([0, 17, 4])

Samples are numbered through the files in the order of their paths. Opening looks at each file once (metadata
where a format has it, a scan where not); what it learns is kept in a cache directory and used again until the
file changes. Any sample is then read without reading those before it. Safe to hand to loader processes: each
opens files of its own.
"""

from __future__ import annotations

import logging
import os
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypedDict, Unpack

import numpy as np

from strata.data.errors import DataError
from strata.data.readers.base import Cache, FileIndex, Format, OnBad, OpenFile, ReadOptions, Row, group_rows
from strata.data.readers.formats import ALL_SUFFIXES, format_named, format_of, suffixes_of
from strata.data.readers.mds import INDEX_NAME, MDS, listed
from strata.data.streaming.compressed import DecompressedSource, is_compressed
from strata.data.streaming.index_cache import UnfinishedIndex, load_index, save_index
from strata.data.streaming.sources import FileRef, WatchedSource, find, is_remote, open_source

log = logging.getLogger("strata.data")

SAMPLES_SUFFIX = ".samples"
_MAX_OPEN_FILES = 64
_CACHE_BYTES = 256 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFile:
    """One file of a dataset."""

    path: str
    size_bytes: int
    samples: int
    bad: int = 0
    """Records that were skipped because they cannot be read."""
    version: str = ""
    """Of an object: another version is not read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetFiles:
    """What was found, and how to read it."""

    format: str
    files: tuple[DataFile, ...]
    indexes: tuple[FileIndex, ...] = field(repr=False, compare=False)

    @property
    def total(self) -> int:
        return sum(file.samples for file in self.files)

    @property
    def bad(self) -> int:
        return sum(file.bad for file in self.files)


class Progress(Protocol):
    """Who shows how far reading has come."""

    def begin(self, *, total_bytes: int, done_bytes: int) -> None: ...

    def advance(self, *, done_bytes: int, samples: int) -> None: ...


class DiscoverOptions(TypedDict, total=False):
    """What `discover` takes by name alone."""

    on_bad: OnBad
    max_record_bytes: int
    progress: Progress | None


PathOrPaths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
"""A file, a directory, a glob or a URL of any of these; or several of them, whose samples follow each other."""


def discover(
    path: PathOrPaths,
    format: str | None = None,
    *,
    on_bad: OnBad = "raise",
    max_record_bytes: int = ReadOptions().max_record_bytes,
    progress: Progress | None = None,
) -> DatasetFiles:
    """Find the files of a dataset and count their samples, without loading them.

    `path` is a file, a directory, a glob, or a URL of any of these, or a list of them; or a dataset's own
    index (`.samples`). Without `format`, suffixes decide. `progress` is called with how much of the files was read.
    """
    if on_bad not in ("raise", "skip"):
        raise ValueError(f"on_bad must be 'raise' or 'skip', not {on_bad!r}")
    places = [os.fspath(path)] if isinstance(path, str | os.PathLike) else [os.fspath(each) for each in path]
    if not places:
        raise DataError("No path was given.", hint="Pass a file, a directory, a glob, or a list of them.")
    if places[0].endswith(SAMPLES_SUFFIX) and len(places) == 1:
        from strata.data.streaming.sample_index import load

        return load(places[0])
    text = places[0] if len(places) == 1 else f"{places[0]} and {len(places) - 1:,} more"
    chosen = format_named(format, path=text) if format and format != "auto" else None
    refs = [ref for place in places for ref in find(place, suffixes_of(chosen) if chosen else ALL_SUFFIXES)]
    if twice := [one.path for one, count in Counter(refs).items() if count > 1]:
        raise DataError.at(
            twice[0], "it is listed twice", hint="Its samples would be trained twice: list each file once."
        )
    if any(ref.path.endswith(MDS.suffixes) for ref in refs):
        refs = [ref for ref in refs if os.path.basename(ref.path) != INDEX_NAME]  # It is no shard itself.
    chosen = chosen or format_of((ref.path for ref in refs), path=text)
    options = ReadOptions(on_bad=on_bad, max_record_bytes=max_record_bytes)
    if chosen is MDS:
        found = listed(refs, path=text)
    else:
        if progress is not None:
            progress.begin(total_bytes=sum(ref.size_bytes for ref in refs), done_bytes=0)
        found = [(ref, _index_of(ref, chosen, options, progress)) for ref in refs]
    files = tuple(_file(ref, index) for ref, index in found)
    return DatasetFiles(format=chosen.name, files=files, indexes=tuple(index for _, index in found))


def _index_of(
    ref: FileRef, format: Format, options: ReadOptions, progress: Progress | None = None
) -> FileIndex:
    """How to reach the rows of a file: as it was kept, or from the file itself."""
    index = load_index(ref, format.name, options)
    watched = None
    if index is None:
        source = open_source(ref.path, version=ref.version, size_bytes=ref.size_bytes)
        unfinished = UnfinishedIndex(ref, format.name, options)
        seen_bytes = int(unfinished.arrays["seen_bytes"]) if "seen_bytes" in unfinished.arrays else 0
        if seen_bytes:
            log.info(
                "%s: continuing its index at %s of %s bytes",
                ref.path,
                f"{seen_bytes:,}",
                f"{ref.size_bytes:,}",
            )
        if progress is not None and seen_bytes:
            progress.advance(done_bytes=seen_bytes, samples=0)
        source = watched = WatchedSource(
            source,
            lambda done: progress.advance(done_bytes=done, samples=0) if progress is not None else None,
            seen_bytes=seen_bytes,
        )
        try:
            index = _indexed(format, watched, options, unfinished)
        finally:
            source.close()
        save_index(ref, format.name, options, index)
        unfinished.remove()
    if progress is not None:
        left = ref.size_bytes - (watched.seen_bytes if watched is not None else 0)
        progress.advance(done_bytes=left, samples=index.rows)
    if index.bad:
        log.warning(
            "%s: skipped %s bad records of %s", ref.path, f"{index.bad:,}", f"{index.rows + index.bad:,}"
        )
    return index


class DatasetReader:
    """Samples by number."""

    def __init__(
        self,
        path: PathOrPaths | DatasetFiles,
        format: str | None = None,
        **options: Unpack[DiscoverOptions],
    ) -> None:
        """`path` as for `discover`, whose options apply, or what it returned."""
        found = path if isinstance(path, DatasetFiles) else discover(path, format, **options)
        self.found = found
        self._format = format_named(found.format)
        self._first = np.r_[0, np.cumsum([file.samples for file in found.files])].astype(np.int64)
        self._open: OrderedDict[int, OpenFile] = OrderedDict()
        self._cache = Cache(_CACHE_BYTES)
        self._pid = os.getpid()
        self._set_bytes = sum(file.size_bytes for file in found.files)

    @property
    def files(self) -> tuple[DataFile, ...]:
        return self.found.files

    @property
    def bad(self) -> int:
        """Records that were skipped."""
        return self.found.bad

    @property
    def is_remote(self) -> bool:
        """Whether it is read through a client that does not survive a fork."""
        return any(is_remote(file.path) for file in self.files)

    def __len__(self) -> int:
        return int(self._first[-1])

    def __getitem__(self, sample: int) -> Row:
        return self.read([sample])[0]

    def __getitems__(self, samples: Sequence[int]) -> list[Row]:
        """PyTorch's loaders ask for a whole batch with this."""
        return self.read(samples)

    def read(self, samples: Sequence[int]) -> list[Row]:
        """The samples, in the order asked for; each file is visited once."""
        numbers = [int(sample) for sample in samples]
        if numbers and (min(numbers) < 0 or max(numbers) >= len(self)):
            raise IndexError(f"samples {min(numbers):,} to {max(numbers):,} of a dataset of {len(self):,}")
        answer: list[Row] = [{}] * len(numbers)
        for number, wanted in group_rows(numbers, self._first[:-1]).items():
            rows = self._file(number).read([row for _, row in wanted])
            for (place, _), row in zip(wanted, rows, strict=True):
                answer[place] = row
        return answer

    def compare_digests(self, number: int) -> int:
        """Compare the digests that the format keeps of a file; how many there were. Raises `DataError` for one that differs."""
        verify = getattr(self._file(number), "verify", None)
        return int(verify()) if verify is not None else 0

    def fetch(self, samples: Sequence[int], *, in_memory: bool = True) -> None:
        """Start fetching what these samples need, if it is remote (`strata.data.streaming.prefetch.Ahead`)."""
        if not self.is_remote:
            return
        by_file = group_rows([int(sample) for sample in samples], self._first[:-1])
        sources: dict[int, Any] = {
            number: self._file(number) for number in by_file if is_remote(self.files[number].path)
        }
        for file in sources.values():  # All headers at once: finding a sample may need one.
            file.source.prefetch([(0, getattr(file, "header_bytes", 0))], in_memory=in_memory)
        for number, file in sources.items():
            if (ranges := getattr(file, "ranges", None)) is not None:
                file.source.prefetch(ranges([row for _, row in by_file[number]]), in_memory=in_memory)

    @property
    def sample_bytes(self) -> float:
        return self._set_bytes / max(len(self), 1)

    def file_of(self, sample: int) -> str:
        """The file that holds a sample."""
        return self.files[int(np.searchsorted(self._first, sample, side="right")) - 1].path

    def files_of(self, start: int, stop: int) -> list[str]:
        """The files that hold samples [start, stop)."""
        first, last = np.searchsorted(self._first, [start, max(stop - 1, start)], side="right") - 1
        return [f.path for f in self.files[first : last + 1] if f.samples]

    def close(self) -> None:
        while self._open:
            self._open.popitem()[1].close()

    def _file(self, number: int) -> OpenFile:
        if self._pid != os.getpid():  # A forked loader process: what the parent has open is the parent's.
            self._open, self._cache, self._pid = OrderedDict(), Cache(_CACHE_BYTES), os.getpid()
        if number in self._open:
            self._open.move_to_end(number)
            return self._open[number]
        known = self.files[number]
        source = open_source(
            known.path, version=known.version, size_bytes=known.size_bytes, set_bytes=self._set_bytes
        )
        if source.size_bytes != known.size_bytes:
            source.close()
            raise DataError.at(
                known.path,
                f"it has {source.size_bytes:,} bytes now and had {known.size_bytes:,} when it was counted",
                hint="Data must not change during an epoch: restore it, or register it again.",
                command_hint="Run the command again while the data does not change.",
            )
        index = self.found.indexes[number]
        if "span_bounds" in index.arrays:
            source = DecompressedSource(source, index.arrays)
        self._open[number] = self._format.open(source, index, self._cache)
        if len(self._open) > _MAX_OPEN_FILES:
            self._open.popitem(last=False)[1].close()
        return self._open[number]

    def __getstate__(self) -> dict[str, Any]:
        return {"found": self.found}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["found"])  # type: ignore[misc]


def _indexed(
    format: Format, source: WatchedSource, options: ReadOptions, unfinished: UnfinishedIndex
) -> FileIndex:
    options = replace(options, unfinished=unfinished)
    if not is_compressed(source.path) or not source.size_bytes:
        unfinished.also = lambda: {"seen_bytes": np.array(source.seen_bytes)}
        return format.index(source, options)
    unpacked = DecompressedSource(
        source,
        unfinished=unfinished.arrays,
        extended=lambda: unfinished.keep({}) if unfinished.is_due() else None,
    )
    unfinished.also = lambda: {"seen_bytes": np.array(source.seen_bytes), **unpacked.unfinished()}
    index = format.index(unpacked, options)
    return replace(index, arrays={**index.arrays, **unpacked.arrays()})


def _file(ref: FileRef, index: FileIndex) -> DataFile:
    return DataFile(
        path=ref.path, size_bytes=ref.size_bytes, samples=index.rows, bad=index.bad, version=ref.version
    )
