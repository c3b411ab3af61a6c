"""Does an index still fit its sources? And how is it built again when it does not?

Beside an index `train.index` stands `train.json`: for people (`files`, `total_tokens`), and for this question
a note of each source's path, size and modification time. Sources that match the note are taken as unchanged
without reading them. Otherwise their bytes decide: a file that was only touched or copied is accepted, and
recorded so that it is not read again; a changed one is refused. A lost or foreign note costs time, never truth.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from strata.data.tokens.building.sources import digest_file
from strata.data.tokens.building.tokenizers import LoadedTokenizer
from strata.data.tokens.errors import SourceUnreadable, StaleIndex
from strata.data.tokens.format import DEFAULT_ENTRY_INTERVAL, IndexHeader, IndexMeta
from strata.data.tokens.index import TokenIndex
from strata.files import write_file

COMMAND = "strata index"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sighting:
    """A source whose bytes are known to be those that were indexed."""

    path: str
    size_bytes: int
    mtime_ns: int

    @classmethod
    def of(cls, path: Path) -> Sighting:
        try:
            status = path.stat()
        except OSError as error:
            raise SourceUnreadable(path, error.strerror or str(error), hint="Check the path.") from None
        return cls(path=str(path.resolve()), size_bytes=status.st_size, mtime_ns=status.st_mtime_ns)


def note_path(index: Path) -> Path:
    return index.with_suffix(".json")


def write_note(
    index: Path, header: IndexHeader, meta: IndexMeta, files: Sequence[Path], sightings: Sequence[Sighting]
) -> None:
    note = {
        "index": index.name,
        "identity": header.identity.hex(),
        "files": [str(path) for path in files],
        "total_tokens": header.total_tokens,
        "total_records": header.num_records,
        "bad_records": meta.bad_records,
        "token_bytes": header.token_bytes,
        "tokenizer": meta.tokenizer,
        "text_key": meta.text_key,
        "sightings": [asdict(sighting) for sighting in sightings],
    }
    write_file(
        note_path(index), json.dumps(note, indent=2, ensure_ascii=False) + "\n", durable=True, mode=0o666
    )


def is_note(path: Path) -> bool:
    return _noted(path) is not None


def _noted(path: Path) -> tuple[str, list[Sighting]] | None:
    try:
        note = json.loads(path.read_bytes())
        return note["identity"], [Sighting(**sighting) for sighting in note["sightings"]]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def check_sources(index: TokenIndex, files: Sequence[Path]) -> None:
    """Raise `StaleIndex` unless the index was built from exactly these files as they are now."""
    indexed = index.meta.files

    def stale(path: Path, reason: str) -> StaleIndex:
        return StaleIndex(index.path, path, reason, rebuild=rebuild_command(index, files))

    names = ", ".join(file.name for file in indexed[:4]) + (", …" if len(indexed) > 4 else "")
    if len(files) != len(indexed):
        raise stale(files[0], f"it was built from {len(indexed)} files ({names}), not from {len(files)}")
    noted = _noted(note_path(index.path))
    known: Sequence[Sighting | None] = [None] * len(files)
    if noted is not None and noted[0] == index.identity and len(noted[1]) == len(files):
        known = noted[1]
    sightings = [Sighting.of(path) for path in files]
    if sightings == known:
        return
    for path, sighting, seen, file in zip(files, sightings, known, indexed, strict=True):
        if sighting == seen:
            continue
        if sighting.size_bytes == file.size_bytes and digest_file(path) == file.digest:
            continue
        if path.name != file.name:
            raise stale(path, f"it was built from {names}, not from {path}")
        change = (
            "its bytes differ"
            if sighting.size_bytes == file.size_bytes
            else f"{sighting.size_bytes:,} bytes, {file.size_bytes:,} when indexed"
        )
        raise stale(path, f"{path} has changed since it was built ({change})")
    with suppress(OSError):  # a folder that cannot be written to: the next reader reads the sources again
        write_note(index.path, index.header, index.meta, files, sightings)


def check_tokenizer(index: TokenIndex, tokenizer: LoadedTokenizer, files: Sequence[Path]) -> None:
    """Raise `StaleIndex` if this tokenizer visibly behaves otherwise than the one the index was built with."""
    meta = index.meta
    if tokenizer.probe and meta.tokenizer_probe and tokenizer.probe != meta.tokenizer_probe:
        raise StaleIndex(
            index.path,
            files[0] if files else index.path,
            f"it was tokenized with {meta.tokenizer}, not with {tokenizer.name}",
            rebuild=rebuild_command(index, files, tokenizer=tokenizer),
        )


def rebuild_command(
    index: TokenIndex,
    files: Sequence[Path],
    *,
    tokenizer: LoadedTokenizer | None = None,
    text_key: str | None = None,
) -> str:
    """What builds this index again from `files`: a command line, or Python for a tokenizer without a name."""
    meta = index.meta
    key = text_key or meta.text_key
    name = meta.tokenizer if tokenizer is None else tokenizer.name
    named = meta.tokenizer_named if tokenizer is None else tokenizer.named
    paths = [str(path) for path in files]
    if not named:
        extra = f", text_key={key!r}" if key != "text" else ""
        return f"IndexBuilder(tokenizer{extra}).build({paths}, {str(index.path)!r})"
    return build_command(
        paths,
        index.path,
        tokenizer=name,
        text_key=key,
        eos_id=meta.eos_id,
        entry_interval=index.header.entry_interval,
        skip_bad=meta.bad_records > 0,
    )


def build_command(
    files: Sequence[str],
    output: Path | str,
    *,
    tokenizer: str,
    text_key: str = "text",
    eos_id: int | None = None,
    entry_interval: int = DEFAULT_ENTRY_INTERVAL,
    skip_bad: bool = False,
) -> str:
    """The command line that builds this index."""
    words = [*files, "--tokenizer", tokenizer, "--output", str(output)]
    if text_key != "text":
        words += ["--text-key", text_key]
    if eos_id is not None:
        words += ["--eos", str(eos_id)]
    if entry_interval != DEFAULT_ENTRY_INTERVAL:
        words += ["--entry-interval", str(entry_interval)]
    if skip_bad:
        words += ["--on-bad", "skip"]
    return f"{COMMAND} {shlex.join(words)}"
