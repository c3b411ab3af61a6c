"""A chunk's tokens on disk, before they are merged: complete and checked, or not there.

Writing a part is the whole work of a tokenizing process. Its summary is published last, under its final name,
so a part whose summary exists was finished; its digests tell a part that a power failure tore.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import xxhash

from strata.data.tokens.building.records import DEFAULT_MAX_RECORD_BYTES, ChunkReader, OnBad
from strata.data.tokens.building.sources import Chunk, digest_blocks
from strata.data.tokens.building.tokenizers import Encoder, Ids
from strata.data.tokens.errors import BuildFailed, TokenDataError
from strata.files import fresh_file


@dataclass(frozen=True, slots=True, kw_only=True)
class PartOptions:
    """What a chunk's tokens depend on, besides the chunk and the tokenizer."""

    token_bytes: int
    text_key: str = "text"
    eos_id: int | None = None
    on_bad: OnBad = "raise"
    max_record_bytes: int = DEFAULT_MAX_RECORD_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class PartSummary:
    """The outcome of one chunk."""

    number: int
    tokens: int
    records: int
    tokens_digest: str
    records_digest: str
    block_digests: list[str]
    bad_records: int
    bad_samples: list[tuple[int, str]]

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> PartSummary:
        return cls(**json.loads(data))


def tokens_path(folder: Path, number: int) -> Path:
    return folder / f"{number:08d}.tokens"


def records_path(folder: Path, number: int) -> Path:
    return folder / f"{number:08d}.records"


def summary_path(folder: Path, number: int) -> Path:
    return folder / f"{number:08d}.json"


def write_part(
    chunk: Chunk,
    encoder: Encoder,
    options: PartOptions,
    folder: Path,
    *,
    alive: Callable[[], None] = lambda: None,
) -> PartSummary:
    """Tokenize a chunk into `folder`. `alive` is called now and then; what it raises ends the work."""
    reader = ChunkReader(
        chunk, text_key=options.text_key, on_bad=options.on_bad, max_record_bytes=options.max_record_bytes
    )
    # Plain text is one document per file, however many records it is cut into.
    eos_each = None if chunk.source.kind == "text" else options.eos_id
    dtype = np.dtype("<u2" if options.token_bytes == 2 else "<u4")
    tokens_digest, records_digest = xxhash.xxh3_128(), xxhash.xxh3_128()
    tokens = records = 0
    with ExitStack() as stack:  # The summary gets its name last.
        summary_file, records_file, tokens_file = (
            stack.enter_context(fresh_file(final(folder, chunk.number), durable=False, mode=0o666))
            for final in (summary_path, records_path, tokens_path)
        )
        for batch in reader:
            alive()
            ids, lengths = _encode(encoder, batch.texts, eos_each, chunk)
            starts = np.cumsum([tokens, *lengths], dtype=np.uint64)[:-1]
            table = np.column_stack((starts, np.asarray(batch.places, np.uint64))).astype("<u8").tobytes()
            packed = ids.astype(dtype, copy=False).data
            tokens_file.write(packed)
            records_file.write(table)
            tokens_digest.update(packed)
            records_digest.update(table)
            tokens += len(ids)
            records += len(lengths)
        if chunk.source.kind == "text" and options.eos_id is not None and chunk.last_of_file:
            packed = np.asarray([options.eos_id], dtype).data
            tokens_file.write(packed)
            tokens_digest.update(packed)
            tokens += 1
        summary = PartSummary(
            number=chunk.number,
            tokens=tokens,
            records=records,
            tokens_digest=tokens_digest.hexdigest(),
            records_digest=records_digest.hexdigest(),
            block_digests=[
                d.hex() for d in digest_blocks(chunk.source.path, chunk.first_block, chunk.stop_block)
            ],
            bad_records=reader.bad_records,
            bad_samples=reader.bad_samples,
        )
        summary_file.write(summary.to_bytes())
    return summary


def _encode(encoder: Encoder, texts: list[str], eos_id: int | None, chunk: Chunk) -> tuple[Ids, list[int]]:
    try:
        return encoder.encode_texts(texts, eos_id)
    except (TokenDataError, MemoryError, KeyboardInterrupt):
        raise
    except Exception as error:  # a tokenizer is foreign code: name what it was given
        raise BuildFailed(
            f"The tokenizer raised {type(error).__name__} on text from {chunk.source.path}: {error}."
        ) from error


def finished_part(folder: Path, number: int) -> PartSummary | None:
    """The part an earlier run left, if it exists and is intact."""
    try:
        summary = PartSummary.from_bytes(summary_path(folder, number).read_bytes())
        tokens_digest = _digest(tokens_path(folder, number))
        records_digest = _digest(records_path(folder, number))
    except (OSError, ValueError, TypeError):
        return None
    is_intact = (tokens_digest, records_digest) == (summary.tokens_digest, summary.records_digest)
    return summary if is_intact else None


def _digest(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while data := file.read(8 << 20):
            digest.update(data)
    return digest.hexdigest()


def remove_part(folder: Path, number: int) -> None:
    """Summary first: a part without it does not exist."""
    for final in (summary_path, records_path, tokens_path):
        final(folder, number).unlink(missing_ok=True)
