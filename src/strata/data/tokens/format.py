"""The bytes of a token index, format 1. Pure: no file is opened here.

One file, little-endian, written once and never changed:

    0      header   `IndexHeader`, then zeros to 4096
    4096   tokens   total_tokens of uint16 or uint32, packed, no gaps between documents
           entries  one `IndexEntry` per entry_interval tokens
           starts   uint64 per record: its first token
           places   uint64 per record: where it begins in its source file (byte; in parquet: row)
           meta     JSON: sources with sizes and digests, tokenizer, options

Sections begin at multiples of 64, so every place follows from the counts in the header. A record is what can
be found again in a source: one line of JSONL, one row of parquet, a few KiB of whole lines of plain text.
The bytes depend on the content and names of the sources and on the options, never on times or directories.
"""

from __future__ import annotations

import json
import struct
from dataclasses import asdict, dataclass
from typing import ClassVar, Literal

import msgspec
import xxhash

import strata
from strata.data.tokens.errors import InvalidIndex

MAGIC = b"STRATOKS"
FORMAT_VERSION = 1
TOKENS_AT = 4096
DEFAULT_ENTRY_INTERVAL = 10_000

SourceKind = Literal["jsonl", "text", "parquet"]


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexHeader:
    """The counts from which every place in the file follows."""

    version: int = FORMAT_VERSION
    num_files: int = 0
    num_entries: int = 0
    num_records: int = 0
    total_tokens: int = 0
    entry_interval: int = DEFAULT_ENTRY_INTERVAL
    token_bytes: int = 4
    meta_bytes: int = 0
    identity: bytes = bytes(16)
    """Digest of the meta section: two indexes with the same identity hold the same tokens."""

    _FIELDS: ClassVar[struct.Struct] = struct.Struct("<8sIIIIQQQQ16s")
    _CHECK: ClassVar[struct.Struct] = struct.Struct("<Q")
    SIZE: ClassVar[int] = _FIELDS.size + _CHECK.size

    def to_bytes(self) -> bytes:
        fields = self._FIELDS.pack(
            MAGIC,
            self.version,
            self.token_bytes,
            self.num_files,
            self.entry_interval,
            self.num_entries,
            self.num_records,
            self.total_tokens,
            self.meta_bytes,
            self.identity,
        )
        return fields + self._CHECK.pack(xxhash.xxh3_64_intdigest(fields))

    @classmethod
    def from_bytes(cls, data: bytes) -> IndexHeader:
        """Raises `InvalidIndex` (a `ValueError`) for anything but a whole header of this format."""
        if data[: len(MAGIC)] != MAGIC:
            raise InvalidIndex(
                "Not a token index: bad magic number.", hint="Is this the path given to --output?"
            )
        if len(data) < cls.SIZE:
            raise InvalidIndex(f"Token index cut short: {len(data)} bytes of a {cls.SIZE}-byte header.")
        (version,) = struct.unpack_from("<I", data, len(MAGIC))
        if version > FORMAT_VERSION:
            raise InvalidIndex(
                f"Token index has format version {version}, written by a newer Strata; this is Strata {strata.__version__}, "
                f"which reads up to version {FORMAT_VERSION}.",
                hint="Upgrade Strata here, or build the index again with this version.",
            )
        if version != FORMAT_VERSION:
            raise InvalidIndex(f"Unknown format version {version} of a token index.", hint="Build it again.")
        (check,) = cls._CHECK.unpack_from(data, cls._FIELDS.size)
        if check != xxhash.xxh3_64_intdigest(data[: cls._FIELDS.size]):
            raise InvalidIndex("Token index header is damaged: checksum differs.", hint="Build it again.")
        (
            _,
            _,
            token_bytes,
            num_files,
            entry_interval,
            num_entries,
            num_records,
            total_tokens,
            meta_bytes,
            identity,
        ) = cls._FIELDS.unpack_from(data)
        if token_bytes not in (2, 4) or not entry_interval:
            raise InvalidIndex(
                "Token index header is damaged: its numbers are impossible.", hint="Build it again."
            )
        return cls(
            version=version,
            token_bytes=token_bytes,
            num_files=num_files,
            entry_interval=entry_interval,
            num_entries=num_entries,
            num_records=num_records,
            total_tokens=total_tokens,
            meta_bytes=meta_bytes,
            identity=identity,
        )

    @property
    def entries_at(self) -> int:
        return _aligned(TOKENS_AT + self.total_tokens * self.token_bytes)

    @property
    def starts_at(self) -> int:
        return _aligned(self.entries_at + self.num_entries * IndexEntry.SIZE)

    @property
    def places_at(self) -> int:
        return _aligned(self.starts_at + 8 * self.num_records)

    @property
    def meta_at(self) -> int:
        return _aligned(self.places_at + 8 * self.num_records)

    @property
    def file_bytes(self) -> int:
        return self.meta_at + self.meta_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexEntry:
    """A landmark: the record that holds the first token of one interval."""

    file_index: int
    byte_offset: int
    cumulative_tokens: int
    """Tokens before this record, in the whole index."""
    record: int = 0

    _FIELDS: ClassVar[struct.Struct] = struct.Struct("<QQQQ")
    SIZE: ClassVar[int] = _FIELDS.size

    def to_bytes(self) -> bytes:
        return self._FIELDS.pack(self.file_index, self.byte_offset, self.cumulative_tokens, self.record)

    @classmethod
    def from_bytes(cls, data: bytes) -> IndexEntry:
        if len(data) < cls.SIZE:
            raise InvalidIndex(f"Token index entry cut short: {len(data)} of {cls.SIZE} bytes.")
        file_index, byte_offset, cumulative_tokens, record = cls._FIELDS.unpack_from(data)
        return cls(
            file_index=file_index, byte_offset=byte_offset, cumulative_tokens=cumulative_tokens, record=record
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexedFile:
    """One source, as it was when it was indexed."""

    name: str
    kind: SourceKind
    size_bytes: int
    digest: str
    first_record: int
    first_token: int
    bad_records: int


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexMeta:
    """What is not needed to read tokens, but to tell what they are."""

    files: tuple[IndexedFile, ...]
    tokenizer: str
    """Its name, or how it describes itself."""
    tokenizer_named: bool
    """Whether that name loads it again."""
    tokenizer_probe: str
    """Digest of what it makes of a fixed text, empty where it cannot encode that."""
    tokenizer_fingerprint: str | None
    """Digest of all of it, where it can be had."""
    vocab_size: int | None
    text_key: str
    eos_id: int | None
    tokens_digest: str
    """Digest of the digests of the tokens, chunk by chunk as they were built."""

    @property
    def bad_records(self) -> int:
        return sum(file.bad_records for file in self.files)

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self), sort_keys=True, ensure_ascii=False).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> IndexMeta:
        try:
            return msgspec.json.decode(data, type=cls)
        except (ValueError, RecursionError, msgspec.MsgspecError) as error:
            raise InvalidIndex(
                f"Token index metadata is damaged: {error}.", hint="Build it again."
            ) from error


def identity_of(meta: bytes) -> bytes:
    return xxhash.xxh3_128_digest(meta)


def _aligned(position: int) -> int:
    return (position + 63) & ~63
