"""Parts, in order, into one index file; durable up to a journaled point, published in one step.

Merged tokens are synced before the journal says so, and only then are their parts removed. After a crash the
files are cut back to what the journal says and merging continues from there. The index appears under its final
name complete and synced, or not at all.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np

from strata.data.tokens.building.parts import PartSummary, records_path, remove_part, tokens_path
from strata.data.tokens.building.sources import Source, combine_digests
from strata.data.tokens.building.tokenizers import LoadedTokenizer
from strata.data.tokens.format import (
    TOKENS_AT,
    IndexedFile,
    IndexEntry,
    IndexHeader,
    IndexMeta,
    identity_of,
)
from strata.files import sync

COMMIT_BYTES = 64 << 20
COPY_BYTES = 8 << 20


class Merge:
    """The growing index of one build, in its work folder."""

    def __init__(self, folder: Path, *, token_bytes: int) -> None:
        self.folder = folder
        self.token_bytes = token_bytes
        self.index_path = folder / "index"
        self.parts = _journaled(folder / "journal")
        self.tokens = sum(part.tokens for part in self.parts)
        self.records = sum(part.records for part in self.parts)
        self._index = _opened_at(self.index_path, TOKENS_AT + self.tokens * token_bytes)
        self._starts = _opened_at(folder / "starts", 8 * self.records)
        self._places = _opened_at(folder / "places", 8 * self.records)
        self._journal = _opened_at(folder / "journal", sum(len(part.to_bytes()) + 1 for part in self.parts))
        self._uncommitted: list[PartSummary] = []
        self._uncommitted_bytes = 0

    @property
    def next_chunk(self) -> int:
        return len(self.parts)

    def add(self, part: PartSummary) -> None:
        """Take in the part of the next chunk."""
        assert part.number == self.next_chunk
        with tokens_path(self.folder, part.number).open("rb") as tokens:
            _append(self._index, tokens, part.tokens * self.token_bytes)
        table = np.fromfile(records_path(self.folder, part.number), "<u8").reshape(-1, 2)
        self._starts.write((table[:, 0] + np.uint64(self.tokens)).astype("<u8").tobytes())
        self._places.write(table[:, 1].astype("<u8").tobytes())
        self.parts.append(part)
        self.tokens += part.tokens
        self.records += part.records
        self._uncommitted.append(part)
        self._uncommitted_bytes += part.tokens * self.token_bytes
        if self._uncommitted_bytes >= COMMIT_BYTES:
            self.commit()

    def commit(self) -> None:
        """Make what was merged durable, say so in the journal, and drop the parts."""
        if not self._uncommitted:
            return
        for file in (self._index, self._starts, self._places):
            sync(file)
        self._journal.writelines(part.to_bytes() + b"\n" for part in self._uncommitted)
        sync(self._journal)
        for part in self._uncommitted:
            remove_part(self.folder, part.number)
        self._uncommitted.clear()
        self._uncommitted_bytes = 0

    def finish(
        self,
        sources: Sequence[Source],
        chunks_per_file: Sequence[int],
        tokenizer: LoadedTokenizer,
        *,
        text_key: str,
        eos_id: int | None,
        entry_interval: int,
    ) -> tuple[IndexHeader, IndexMeta]:
        """Write what follows the tokens, then the header. The file is complete and synced afterwards."""
        self.commit()
        meta = IndexMeta(
            files=self._indexed_files(sources, chunks_per_file),
            tokenizer=tokenizer.name,
            tokenizer_named=tokenizer.named,
            tokenizer_probe=tokenizer.probe,
            tokenizer_fingerprint=tokenizer.fingerprint,
            vocab_size=tokenizer.encoder.vocab_size,
            text_key=text_key,
            eos_id=eos_id,
            tokens_digest=combine_digests(bytes.fromhex(part.tokens_digest) for part in self.parts),
        )
        meta_bytes = meta.to_bytes()
        header = IndexHeader(
            token_bytes=self.token_bytes,
            num_files=len(sources),
            num_records=self.records,
            num_entries=-(-self.tokens // entry_interval),
            total_tokens=self.tokens,
            entry_interval=entry_interval,
            meta_bytes=len(meta_bytes),
            identity=identity_of(meta_bytes),
        )
        self._write_entries(header, meta)
        for file, at in ((self._starts, header.starts_at), (self._places, header.places_at)):
            self._index.seek(at)
            _append(self._index, file, 8 * self.records)
        self._index.seek(header.meta_at)
        self._index.write(meta_bytes)
        self._index.seek(0)
        self._index.write(header.to_bytes())
        self._index.truncate(header.file_bytes)
        sync(self._index)
        return header, meta

    def _indexed_files(
        self, sources: Sequence[Source], chunks_per_file: Sequence[int]
    ) -> tuple[IndexedFile, ...]:
        files = []
        chunk = record = token = 0
        for source, chunks in zip(sources, chunks_per_file, strict=True):
            parts = self.parts[chunk : chunk + chunks]
            files.append(
                IndexedFile(
                    name=source.path.name,
                    kind=source.kind,
                    size_bytes=source.size_bytes,
                    digest=combine_digests(bytes.fromhex(d) for part in parts for d in part.block_digests),
                    first_record=record,
                    first_token=token,
                    bad_records=sum(part.bad_records for part in parts),
                )
            )
            chunk += chunks
            record += sum(part.records for part in parts)
            token += sum(part.tokens for part in parts)
        return tuple(files)

    def _write_entries(self, header: IndexHeader, meta: IndexMeta) -> None:
        """One landmark per interval, a slice of them at a time: a large index has millions of records."""
        self._index.seek(header.entries_at)
        if not header.num_records:
            return
        starts = np.memmap(self.folder / "starts", "<u8", "r", shape=(self.records,))
        places = np.memmap(self.folder / "places", "<u8", "r", shape=(self.records,))
        first_records = np.asarray([file.first_record for file in meta.files])
        for first in range(0, header.num_entries, 1 << 16):
            numbers = np.arange(first, min(first + (1 << 16), header.num_entries), dtype=np.uint64)
            # The last record that starts at or before the token: records without tokens share a start.
            records = np.searchsorted(starts, numbers * np.uint64(header.entry_interval), side="right") - 1
            columns = (
                np.searchsorted(first_records, records, side="right") - 1,
                places[records],
                starts[records],
                records,
            )
            table = np.column_stack([column.astype("<u8") for column in columns])
            assert table.shape[1] * table.itemsize == IndexEntry.SIZE
            self._index.write(table.tobytes())

    def close(self) -> None:
        for file in (self._index, self._starts, self._places, self._journal):
            file.close()


def _journaled(path: Path) -> list[PartSummary]:
    """The parts the journal vouches for. A torn last line vouches for nothing."""
    try:
        lines = path.read_bytes().split(b"\n")[:-1]
    except FileNotFoundError:
        return []
    parts: list[PartSummary] = []
    for line in lines:
        try:
            part = PartSummary.from_bytes(line)
        except (ValueError, TypeError):
            break
        if part.number != len(parts):
            break
        parts.append(part)
    return parts


def _opened_at(path: Path, size_bytes: int) -> BinaryIO:
    """Open for reading and writing, cut to `size_bytes`, standing at its end."""
    file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b")
    file.truncate(size_bytes)
    file.seek(size_bytes)
    return file


def _append(target: BinaryIO, source: BinaryIO, size_bytes: int) -> None:
    """Copy the first `size_bytes` of `source` to where `target` stands, inside the kernel where it can."""
    target.flush()
    source.flush()
    start, copied = target.tell(), 0
    while copied < size_bytes:
        try:
            piece_bytes = os.copy_file_range(
                source.fileno(), target.fileno(), size_bytes - copied, copied, start + copied
            )
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EXDEV):
                raise
            piece = os.pread(source.fileno(), min(size_bytes - copied, COPY_BYTES), copied)
            piece_bytes = os.pwrite(target.fileno(), piece, start + copied)
        if piece_bytes == 0:
            raise OSError(f"a part in {source.name} is shorter than it should be")
        copied += piece_bytes
    target.seek(start + copied)
