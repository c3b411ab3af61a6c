"""Source files: what they are, how they are cut into chunks, and a digest that notices a changed byte.

Cutting is a pure function of a file's format and size (parquet: of its row groups), so every process and
every later run sees the same chunks. The digest of a file is the digest of the digests of its blocks; each
chunk is answerable for some blocks, so many processes share the work.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import xxhash

from strata.data.tokens.errors import SourceUnreadable
from strata.data.tokens.format import SourceKind
from strata.errors import MissingDependency

BLOCK_BYTES = 8 << 20
"""Size of a digest block. Part of the format: digests in old indexes were made with it."""

CHUNK_BYTES = 8 << 20
"""Size of a chunk of a line-based file."""

_KINDS: dict[str, SourceKind] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".txt": "text",
    ".text": "text",
    ".md": "text",
    ".parquet": "parquet",
    ".pq": "parquet",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One file, as it stood when the build was planned."""

    path: Path
    kind: SourceKind
    gzipped: bool
    size_bytes: int
    mtime_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A piece of work: part of one file."""

    number: int
    file_index: int
    source: Source
    start: int
    """First byte (parquet: row group) whose records belong here."""
    stop: int
    last_of_file: bool
    first_block: int
    """Blocks of the file this chunk is answerable for: [first_block, stop_block)."""
    stop_block: int


def expand_patterns(files: Iterable[str | os.PathLike[str]]) -> list[Path]:
    """The files named, each pattern replaced by what it matches, sorted."""
    paths: list[Path] = []
    for file in files:
        name = os.fspath(file)
        if glob.has_magic(name) and not os.path.exists(name):
            matches = sorted(glob.glob(name, recursive=True))
            if not matches:
                raise SourceUnreadable(name, "no file matches this pattern")
            paths.extend(map(Path, matches))
        else:
            paths.append(Path(name))
    return paths


def find_sources(files: Iterable[str | os.PathLike[str]]) -> list[Source]:
    """The files named, inspected. Missing and repeated ones are errors; none at all is too."""
    paths = expand_patterns(files)
    if not paths:
        raise ValueError("at least one data file is needed")
    seen: set[Path] = set()
    for path in paths:
        if (real := path.resolve()) in seen:
            raise SourceUnreadable(path, "is listed twice", hint="Its text would be trained on twice.")
        seen.add(real)
    return [inspect_source(path) for path in paths]


def inspect_source(path: Path) -> Source:
    try:
        with path.open("rb") as file:
            head = file.read(512)
            status = os.fstat(file.fileno())
    except IsADirectoryError:
        raise SourceUnreadable(
            path, "is a folder", hint=f"List the files in it, for example '{path}/*.jsonl'."
        ) from None
    except OSError as error:
        raise SourceUnreadable(path, error.strerror or str(error), hint="Check the path.") from None
    gzipped = head[:2] == b"\x1f\x8b"
    suffixes = [suffix.lower() for suffix in path.suffixes if suffix.lower() != ".gz"]
    kind = _KINDS.get(suffixes[-1]) if suffixes else None
    if kind is None:
        kind = _sniff(head)
    return Source(
        path=path, kind=kind, gzipped=gzipped, size_bytes=status.st_size, mtime_ns=status.st_mtime_ns
    )


def _sniff(head: bytes) -> SourceKind:
    if head[:4] == b"PAR1":
        return "parquet"
    return "jsonl" if head.removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"{" else "text"


def cut_into_chunks(sources: Sequence[Source], *, chunk_bytes: int = CHUNK_BYTES) -> Iterator[Chunk]:
    """All chunks in order. A gzip stream cannot be entered in the middle, so it is one chunk."""
    number = 0
    for file_index, source in enumerate(sources):
        blocks = _blocks(source.size_bytes)
        if source.kind == "parquet":
            groups = max(1, _row_groups(source.path))
            bounds = [(group, group + 1) for group in range(groups)]
        elif source.gzipped:
            bounds = [(0, source.size_bytes)]
        else:
            bounds = [
                (at, min(at + chunk_bytes, source.size_bytes))
                for at in range(0, source.size_bytes, chunk_bytes)
            ]
            bounds = bounds or [(0, 0)]
        for i, (start, stop) in enumerate(bounds):
            yield Chunk(
                number=number,
                file_index=file_index,
                source=source,
                start=start,
                stop=stop,
                last_of_file=i == len(bounds) - 1,
                first_block=blocks * i // len(bounds),
                stop_block=blocks * (i + 1) // len(bounds),
            )
            number += 1


def _row_groups(path: Path) -> int:
    return int(open_parquet(path).num_row_groups)


def open_parquet(path: Path):  # type: ignore[no-untyped-def]  # pyarrow has no types
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise MissingDependency("pyarrow", extra="data", feature="Reading parquet") from None
    try:
        return pq.ParquetFile(path)
    except (pa.ArrowInvalid, OSError) as error:
        raise SourceUnreadable(
            path, f"is not a readable parquet file ({str(error).splitlines()[0]})"
        ) from None


def digest_blocks(path: Path, first: int, stop: int) -> list[bytes]:
    """The digests of blocks [first, stop) of a file."""
    with path.open("rb", buffering=0) as file:
        return [
            xxhash.xxh3_128_digest(read_fully(file.fileno(), BLOCK_BYTES, block * BLOCK_BYTES))
            for block in range(first, stop)
        ]


def digest_file(path: Path) -> str:
    """The digest of a whole file, as stored in an index."""
    return combine_digests(digest_blocks(path, 0, _blocks(path.stat().st_size)))


def _blocks(size_bytes: int) -> int:
    return -(-size_bytes // BLOCK_BYTES)


def combine_digests(digests: Iterable[bytes]) -> str:
    return xxhash.xxh3_128_hexdigest(b"".join(digests))


def read_fully(fd: int, size_bytes: int, offset: int) -> bytes:
    """`size_bytes` from `offset`, fewer only at the end of the file."""
    pieces = []
    while size_bytes > 0 and (piece := os.pread(fd, size_bytes, offset)):
        pieces.append(piece)
        size_bytes -= len(piece)
        offset += len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)
