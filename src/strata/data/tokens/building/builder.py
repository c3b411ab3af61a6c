"""Building a token index: `build_index`.

The result depends on the sources, the tokenizer and the options alone: not on the number of processes, not on
how often the build was killed and started again. Until it is published nothing stands at the output path that
was not there before; a failed build leaves its finished chunks for the next attempt.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

from strata.data.tokens.building import workfolder
from strata.data.tokens.building.merge import Merge
from strata.data.tokens.building.parts import PartOptions, PartSummary, finished_part
from strata.data.tokens.building.pool import Outcome, available_cores, tokenize_here, tokenize_in_processes
from strata.data.tokens.building.records import DEFAULT_MAX_RECORD_BYTES, OnBad, number_at, unit_of
from strata.data.tokens.building.sources import CHUNK_BYTES, Chunk, Source, cut_into_chunks, find_sources
from strata.data.tokens.building.tokenizers import LoadedTokenizer, load_tokenizer
from strata.data.tokens.errors import (
    BuildFailed,
    IndexNotFound,
    InvalidIndex,
    NothingToIndex,
    SourceUnreadable,
    StaleIndex,
    WouldOverwrite,
)
from strata.data.tokens.format import DEFAULT_ENTRY_INTERVAL, FORMAT_VERSION, MAGIC, IndexHeader, IndexMeta
from strata.data.tokens.freshness import Sighting, check_sources, is_note, note_path, write_note
from strata.data.tokens.index import TokenIndex
from strata.errors import StrataError
from strata.files import move_into_place

WORTH_A_PROCESS_BYTES = 1 << 20


class Progress(Protocol):
    """Notified of each chunk that is done; see `progress` for one that draws."""

    def begin(self, *, total_bytes: int, done_bytes: int) -> None: ...
    def advance(self, *, source_bytes: int, tokens: int) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildOptions:
    """What an index depends on besides its sources and its tokenizer, and how many processes make it."""

    text_key: str = "text"
    entry_interval: int = DEFAULT_ENTRY_INTERVAL
    eos: str | int | None = None
    """A token, or its id, to put after each document. None adds nothing to what the tokenizer gives."""
    on_bad: OnBad = "raise"
    workers: int | None = None
    """Processes; None is one per core. Small inputs are done in the calling process."""
    force: bool = False
    """Build even where an index of these files, with these options, stands already."""
    max_record_bytes: int = DEFAULT_MAX_RECORD_BYTES
    chunk_bytes: int = CHUNK_BYTES

    def __post_init__(self) -> None:
        if not self.text_key:
            raise ValueError("text_key must not be empty")
        if self.entry_interval < 1:
            raise ValueError(f"entry_interval must be positive, got {self.entry_interval}")
        if self.on_bad not in ("raise", "skip"):
            raise ValueError(f"on_bad must be 'raise' or 'skip', got {self.on_bad!r}")
        if self.workers is not None and self.workers < 1:
            raise ValueError(f"workers must be positive, got {self.workers}")
        if self.max_record_bytes < 1 or self.chunk_bytes < 1:
            raise ValueError("max_record_bytes and chunk_bytes must be positive")


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildReport:
    """What was built, and how."""

    path: Path
    header: IndexHeader
    meta: IndexMeta
    source_bytes: int
    seconds: float
    reused: bool
    """An index that fits was there already: nothing was done."""
    resumed_chunks: int
    """Chunks an earlier, interrupted build had finished."""
    bad_samples: tuple[str, ...]
    """The first few records that were skipped, each with file, line and reason."""

    def lines(self) -> list[str]:
        """For people: what there is now, and what was left out."""
        header = self.header
        what = (
            f"{header.num_files:,} files, {header.num_records:,} records, {header.total_tokens:,} tokens"
            f" (uint{8 * header.token_bytes}, tokenizer {self.meta.tokenizer})"
        )
        if self.reused:
            return [f"{self.path} is up to date: {what}"]
        speed = self.source_bytes / 1e6 / max(self.seconds, 1e-9)
        lines = [f"{self.path}: {what} in {self.seconds:.1f} s, {speed:.0f} MB/s"]
        if self.resumed_chunks:
            lines.append(f"Continued an interrupted build: {self.resumed_chunks:,} chunks were done already")
        if self.meta.bad_records:
            lines.append(f"Skipped {self.meta.bad_records:,} bad records, the first of them:")
            lines += [f"  {sample}" for sample in self.bad_samples]
        return lines

    def to_json(self) -> dict[str, object]:
        return {
            "path": str(self.path),
            "files": self.header.num_files,
            "records": self.header.num_records,
            "total_tokens": self.header.total_tokens,
            "token_bytes": self.header.token_bytes,
            "tokenizer": self.meta.tokenizer,
            "bad_records": self.meta.bad_records,
            "bad_samples": list(self.bad_samples),
            "source_bytes": self.source_bytes,
            "seconds": self.seconds,
            "reused": self.reused,
            "resumed_chunks": self.resumed_chunks,
        }


def build_index(
    files: Sequence[str | os.PathLike[str]],
    output: str | os.PathLike[str],
    *,
    tokenizer: object = "bytes",
    options: BuildOptions | None = None,
    progress: Progress | None = None,
) -> BuildReport:
    """Tokenize `files` into an index at `output`, and a note about it at `<stem>.json` beside it."""
    options = options or BuildOptions()
    began_s = time.monotonic()
    output = Path(output)
    sources = find_sources(files)
    _check_output(output, sources)
    loaded = load_tokenizer(tokenizer)
    try:
        with workfolder.locked(output) as folder:
            build = _Build(output, folder, sources, loaded, options)
            standing = None if options.force else build.standing_index()
            header, meta = standing or build.run(progress or _Silent())
            workfolder.remove(folder)
    except OSError as error:
        if isinstance(error, StrataError):
            raise
        raise BuildFailed(
            f"Writing the index {output} failed: {error}.",
            hint="Fix this; the same command continues where it stopped.",
        ) from error
    return BuildReport(
        path=output,
        header=header,
        meta=meta,
        source_bytes=sum(source.size_bytes for source in sources),
        seconds=time.monotonic() - began_s,
        reused=standing is not None,
        resumed_chunks=build.resumed_chunks,
        bad_samples=build.bad_samples,
    )


class _Build:
    """One build, holding its work folder."""

    def __init__(
        self,
        output: Path,
        folder: Path,
        sources: list[Source],
        tokenizer: LoadedTokenizer,
        options: BuildOptions,
    ) -> None:
        self.output = output
        self.folder = folder
        self.sources = sources
        self.tokenizer = tokenizer
        self.options = options
        self.eos_id = None if options.eos is None else tokenizer.token_id(str(options.eos))
        self.part_options = PartOptions(
            token_bytes=4 if (self.eos_id or 0) >> 16 else tokenizer.token_bytes,
            text_key=options.text_key,
            eos_id=self.eos_id,
            on_bad=options.on_bad,
            max_record_bytes=options.max_record_bytes,
        )
        self.resumed_chunks = 0
        self.bad_samples: tuple[str, ...] = ()

    def standing_index(self) -> tuple[IndexHeader, IndexMeta] | None:
        """What is at the output already, if building would make the same again."""
        try:
            with TokenIndex(self.output) as index:
                header, meta = index.header, index.meta
                same = (
                    # An object's code may have changed, which no fingerprint tells.
                    self.tokenizer.fingerprint is not None
                    and (meta.tokenizer, meta.tokenizer_fingerprint)
                    == (self.tokenizer.name, self.tokenizer.fingerprint)
                    and (meta.text_key, meta.eos_id) == (self.options.text_key, self.eos_id)
                    and header.entry_interval == self.options.entry_interval
                    and (meta.bad_records == 0 or self.options.on_bad == "skip")
                )
                if same:
                    check_sources(index, [source.path for source in self.sources])
        except (IndexNotFound, InvalidIndex, StaleIndex):
            return None
        return (header, meta) if same else None

    def run(self, progress: Progress) -> tuple[IndexHeader, IndexMeta]:
        self.parts_folder = workfolder.for_plan(self.folder, self._plan())
        chunks = list(cut_into_chunks(self.sources, chunk_bytes=self.options.chunk_bytes))
        merge = Merge(self.parts_folder, token_bytes=self.part_options.token_bytes)
        try:
            self._tokenize_and_merge(chunks, merge, progress)
            self._check_sources_unchanged()
            if merge.tokens == 0:
                raise NothingToIndex(
                    f"There is no text in {len(self.sources)} file(s): nothing to index.",
                    hint="Check the files and --text-key.",
                )
            self.bad_samples = tuple(_described(chunks, merge.parts))
            header, meta = merge.finish(
                self.sources,
                [count for _, count in sorted(Counter(chunk.file_index for chunk in chunks).items())],
                self.tokenizer,
                text_key=self.options.text_key,
                eos_id=self.eos_id,
                entry_interval=self.options.entry_interval,
            )
        except BuildFailed:
            raise  # worth trying again: the next attempt continues with what is finished
        except StrataError:
            workfolder.remove(self.folder)  # a remedy changes the data or the options, and so the plan
            raise
        finally:
            merge.close()
        move_into_place(merge.index_path, self.output, durable=True)
        paths = [source.path for source in self.sources]
        write_note(self.output, header, meta, paths, [Sighting.of(path) for path in paths])
        return header, meta

    def _plan(self) -> bytes:
        """Everything a chunk's tokens depend on."""
        plan = {
            "format": FORMAT_VERSION,
            "sources": [asdict(source) | {"path": str(source.path.resolve())} for source in self.sources],
            "tokenizer": [self.tokenizer.name, self.tokenizer.fingerprint, self.tokenizer.probe],
            "parts": asdict(self.part_options),
            "chunk_bytes": self.options.chunk_bytes,
        }
        return json.dumps(plan).encode()

    def _tokenize_and_merge(self, chunks: list[Chunk], merge: Merge, progress: Progress) -> None:
        ready: dict[int, PartSummary] = {}
        failed: dict[int, StrataError] = {}
        merged_before = merge.next_chunk
        shares = _shares_bytes(chunks)

        def unfinished() -> Iterator[Chunk]:
            for chunk in chunks[merged_before:]:
                if failed:
                    return
                if (part := finished_part(self.parts_folder, chunk.number)) is None:
                    yield chunk
                else:
                    ready[chunk.number] = part
                    self.resumed_chunks += 1
                    progress.advance(source_bytes=shares[chunk.number], tokens=part.tokens)

        def merge_ready() -> None:
            while (part := ready.pop(merge.next_chunk, None)) is not None:
                merge.add(part)

        self.resumed_chunks = merged_before
        progress.begin(total_bytes=sum(shares), done_bytes=sum(shares[:merged_before]))
        with closing(self._outcomes(unfinished(), len(chunks) - merged_before)) as outcomes:
            for chunk, outcome in outcomes:
                if isinstance(outcome, StrataError):
                    failed[chunk.number] = outcome
                else:
                    ready[chunk.number] = outcome
                    progress.advance(source_bytes=shares[chunk.number], tokens=outcome.tokens)
                merge_ready()
        merge_ready()
        if failed:
            raise failed[min(failed)]  # the first in the order of the files, however many processes met one
        assert merge.next_chunk == len(chunks)

    def _outcomes(self, chunks: Iterator[Chunk], count: int) -> Generator[Outcome]:
        processes = min(self.options.workers or self._useful_processes(), count)
        if processes <= 1:
            return tokenize_here(chunks, self.tokenizer, self.part_options, self.parts_folder)
        return tokenize_in_processes(
            chunks, self.tokenizer, self.part_options, self.parts_folder, processes=processes
        )

    def _useful_processes(self) -> int:
        """One per core, but a process must have enough to do to be worth its start."""
        total_bytes = sum(source.size_bytes for source in self.sources)
        return min(available_cores(), 1 + total_bytes // WORTH_A_PROCESS_BYTES)

    def _check_sources_unchanged(self) -> None:
        for source in self.sources:
            now = Sighting.of(source.path)
            if (now.size_bytes, now.mtime_ns) != (source.size_bytes, source.mtime_ns):
                raise SourceUnreadable(
                    source.path,
                    "changed while it was being indexed",
                    hint="Run the command again when the file is complete.",
                )


class _Silent:
    def begin(self, *, total_bytes: int, done_bytes: int) -> None:
        pass

    def advance(self, *, source_bytes: int, tokens: int) -> None:
        pass


def _shares_bytes(chunks: list[Chunk]) -> list[int]:
    """How much of its file each chunk stands for, to show progress."""
    per_file = Counter(chunk.file_index for chunk in chunks)
    return [chunk.source.size_bytes // per_file[chunk.file_index] for chunk in chunks]


def _described(chunks: list[Chunk], parts: list[PartSummary], limit: int = 5) -> Iterator[str]:
    for part in parts:
        source = chunks[part.number].source
        for place, reason in part.bad_samples:
            if limit == 0:
                return
            limit -= 1
            yield f"{source.path}, {unit_of(source)} {number_at(source, place)}: {reason}"


def _check_output(output: Path, sources: Sequence[Source]) -> None:
    """Never write over something that is not ours."""
    note = note_path(output)
    if note == output:
        raise WouldOverwrite(output, "ends with .json, where the index metadata goes")
    inputs = {source.path.resolve() for source in sources}
    for path in (output, note):
        if path.resolve() in inputs:
            raise WouldOverwrite(path, "is one of the data files")
    if output.is_dir():
        raise WouldOverwrite(output, "is a folder")
    if output.exists() and output.stat().st_size:
        with output.open("rb") as file:
            if file.read(len(MAGIC)) != MAGIC:
                raise WouldOverwrite(output, "exists and is not a token index")
    if note.exists() and not is_note(note):
        raise WouldOverwrite(note, "exists and is not index metadata")
