"""MDS, the shard format of MosaicML Streaming: a folder of shards with an `index.json` that describes them.

The layout, as its documentation gives it. `index.json` lists for each shard its columns with their encodings, how many samples it
has, and the names, sizes and digests of the raw and the compressed file. A raw shard is a number of samples (uint32), the
offset of each sample and of the end (uint32), the columns' description as JSON, and the samples. A sample is the sizes
(uint32) of those columns that have no fixed one, then the values of all columns.

Samples are counted from `index.json` alone; of a raw shard only what is asked for is read. A compressed shard is decoded as a
whole, verified by its digest where there is one, and a bounded number of them stays in memory. Pickled columns are refused:
reading them would run whatever they hold.
"""

from __future__ import annotations

import bz2
import hashlib
import json
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any

import numpy as np
import xxhash

from strata.data.errors import DataError
from strata.data.readers.base import Cache, FileIndex, OpenFile, ReadOptions, Row, arrow
from strata.data.streaming.sources import FileRef, Source, open_source

INDEX_NAME = "index.json"
_DIGESTS: Mapping[str, Callable[[bytes], str]] = {
    "md5": lambda data: hashlib.md5(data, usedforsecurity=False).hexdigest(),
    "sha1": lambda data: hashlib.sha1(data, usedforsecurity=False).hexdigest(),
    "sha256": lambda data: hashlib.sha256(data).hexdigest(),
    "xxh64": lambda data: str(xxhash.xxh64_hexdigest(data)),
    "xxh128": lambda data: str(xxhash.xxh128_hexdigest(data)),
    "xxh3_64": lambda data: str(xxhash.xxh3_64_hexdigest(data)),
    "xxh3_128": lambda data: str(xxhash.xxh3_128_hexdigest(data)),
}
_SCALARS = {
    **{f"uint{bits}": np.dtype(f"<u{bits // 8}") for bits in (8, 16, 32, 64)},
    **{f"int{bits}": np.dtype(f"<i{bits // 8}") for bits in (8, 16, 32, 64)},
    **{f"float{bits}": np.dtype(f"<f{bits // 8}") for bits in (16, 32, 64)},
}
_ARRAY_TYPES = {8: "uint8", 9: "int8", 16: "uint16", 17: "int16", 18: "float16", 32: "uint32", 33: "int32"}
_ARRAY_TYPES |= {34: "float32", 64: "uint64", 65: "int64", 66: "float64"}
_SHAPE_TYPES = (np.dtype("<u1"), np.dtype("<u2"), np.dtype("<u4"), np.dtype("<u8"))


@dataclass(frozen=True, slots=True, kw_only=True)
class MdsFormat:
    name: str = "mds"
    suffixes: tuple[str, ...] = (
        ".mds",
        ".mds.zstd",
        ".mds.zst",
        ".mds.gz",
        ".mds.br",
        ".mds.bz2",
        ".mds.snappy",
    )

    def index(self, source: Source, options: ReadOptions) -> FileIndex:
        raise AssertionError("shards are described by index.json: see `listed`")

    def open(self, source: Source, index: FileIndex, cache: Cache) -> OpenFile:
        return _Shard(source, index, cache)


def listed(refs: Sequence[FileRef], *, path: str) -> list[tuple[FileRef, FileIndex]]:
    """The shards that the `index.json` beside them lists, in its order, folder by folder."""
    folders: dict[str, dict[str, FileRef]] = {}
    for ref in refs:
        folder, _, name = ref.path.rpartition("/")
        folders.setdefault(folder, {})[name] = ref
    found: list[tuple[FileRef, FileIndex]] = []
    for folder, files in sorted(folders.items()):
        place = f"{folder}/{INDEX_NAME}" if folder else INDEX_NAME
        for shard in _shards(place):
            raw, packed = shard["raw_data"], shard.get("zip_data")
            chosen = raw if raw["basename"] in files else packed
            if chosen is None or chosen["basename"] not in files:
                name = (packed or raw)["basename"]
                raise DataError.at(
                    f"{folder}/{name}" if folder else name,
                    f"the file is missing, but {place} lists it",
                    hint="Upload it again, or write the dataset again.",
                )
            ref = files[chosen["basename"]]
            if ref.size_bytes != chosen["bytes"]:
                raise DataError.at(
                    ref.path,
                    f"it has {ref.size_bytes:,} bytes, and {place} says {chosen['bytes']:,}",
                    hint="It is truncated, or belongs to another dataset: upload it again.",
                )
            described = {
                "columns": shard["column_names"],
                "encodings": shard["column_encodings"],
                "sizes": shard["column_sizes"],
                "raw_bytes": raw["bytes"],
                "raw_hashes": raw.get("hashes") or {},
                "hashes": chosen.get("hashes") or {},
                "compression": shard.get("compression") if chosen is packed else None,
            }
            arrays = {"shard": np.frombuffer(json.dumps(described).encode(), np.uint8)}
            found.append((ref, FileIndex(rows=int(shard["samples"]), arrays=arrays)))
    if not found:
        raise DataError.at(path, f"there is no {INDEX_NAME} with shards")
    return found


def _shards(place: str) -> list[dict[str, Any]]:
    source = open_source(place)
    try:
        record = json.loads(source.read(0, source.size_bytes))
        shards = record["shards"]
        for shard in shards:
            if shard["format"] != "mds":
                raise ValueError(f"its shards are {shard['format']!r}, not MDS")
            for key in ("column_names", "column_encodings", "column_sizes", "raw_data", "samples"):
                shard[key]
            for data in (shard["raw_data"], shard.get("zip_data")):
                if data is not None and not (data["basename"] and data["bytes"] >= 0):
                    raise ValueError("a shard has no name")
        return list(shards)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError.at(
            place, f"not the index of an MDS dataset ({type(error).__name__}: {error})"
        ) from error
    finally:
        source.close()


class _Shard:
    def __init__(self, source: Source, index: FileIndex, cache: Cache) -> None:
        self.source = source
        self._cache = cache
        self._rows = index.rows
        self.about: dict[str, Any] = json.loads(index.arrays["shard"].tobytes())
        self._decoders = [_decoder(name, source.path) for name in self.about["encodings"]]
        sizes = self.about["sizes"]
        self._variable = [place for place, each in enumerate(sizes) if each is None]
        self._sizes = struct.Struct(f"<{len(self._variable)}I")
        self._offsets: Any = None
        self._view: Callable[[int, int], bytes | memoryview] = getattr(source, "view", source.read)

    def read(self, rows: Sequence[int]) -> list[Row]:
        offsets = self._header()
        wanted = np.asarray(rows, dtype=np.intp)
        starts, stops = offsets[wanted].tolist(), offsets[wanted + 1].tolist()
        return [
            self._sample(row, *each) for row, each in zip(rows, zip(starts, stops, strict=True), strict=True)
        ]

    def ranges(self, rows: Sequence[int]) -> list[tuple[int, int]]:
        """What of the file will be read for these rows."""
        if self.about["compression"]:
            return [(0, self.source.size_bytes)]
        offsets = self._header()
        wanted = np.asarray(rows, dtype=np.intp)
        starts, lengths = offsets[wanted], offsets[wanted + 1] - offsets[wanted]
        return list(zip(starts.tolist(), lengths.tolist(), strict=True))

    def verify(self) -> int:
        """Read everything and compare every digest that is there; how many were."""
        data = self.source.read(0, self.source.size_bytes)
        compared = self._compare(data, self.about["hashes"])
        if self.about["compression"]:
            compared += self._compare(self._unpacked(data), self.about["raw_hashes"])
        return compared

    def close(self) -> None:
        self.source.close()

    @property
    def header_bytes(self) -> int:
        return 4 + 4 * (self._rows + 1)

    def _bytes(self, offset: int, length: int) -> bytes | memoryview:
        if not self.about["compression"]:
            return self._view(offset, length)
        raw: bytes = self._cache.get((self.source.path, 0), self._whole, len)
        return memoryview(raw)[offset : offset + length]

    def _whole(self) -> bytes:
        data = self.source.read(0, self.source.size_bytes)
        self._compare(data, self.about["hashes"])
        raw = self._unpacked(data)
        self._compare(raw, self.about["raw_hashes"])
        return raw

    def _compare(self, data: bytes, hashes: Mapping[str, str]) -> int:
        known = {kind: digest for kind, digest in hashes.items() if kind in _DIGESTS}
        for kind, digest in known.items():
            if (found := _DIGESTS[kind](data)) != digest:
                raise DataError.at(
                    self.source.path,
                    f"it is damaged: its {kind} is {found}, and index.json says {digest}",
                    hint="Upload the shard again.",
                )
        return len(known)

    def _unpacked(self, data: bytes) -> bytes:
        kind = str(self.about["compression"]).partition(":")[0]
        try:
            match kind:
                case "zstd":
                    pa = arrow("MDS shards compressed with zstd")
                    raw = pa.CompressedInputStream(pa.BufferReader(data), "zstd").read()
                case "gz":
                    raw = zlib.decompress(data, 31)
                case "bz2":
                    raw = bz2.decompress(data)
                case "br":
                    pa = arrow("MDS shards compressed with brotli")
                    raw = pa.CompressedInputStream(pa.BufferReader(data), "brotli").read()
                case "snappy":
                    pa = arrow("MDS shards compressed with snappy")
                    raw = pa.decompress(data, self.about["raw_bytes"], codec="snappy", asbytes=True)
                case _:
                    raise DataError.at(
                        self.source.path,
                        f"the compression '{kind}' of MDS shards is not known here",
                        hint="Write the dataset with zstd, gz, br, bz2 or snappy.",
                    )
        except (OSError, ValueError, zlib.error) as error:
            raise DataError.at(self.source.path, f"the compressed shard is damaged ({error})") from error
        if len(raw) != self.about["raw_bytes"]:
            raise DataError.at(
                self.source.path,
                f"it holds {len(raw):,} bytes, and index.json says {self.about['raw_bytes']:,}",
            )
        return bytes(raw)

    def _header(self) -> Any:
        """Where each sample starts, and the last one ends."""
        if self._offsets is None:
            header = np.frombuffer(self._bytes(0, self.header_bytes), "<u4")
            if len(header) != self._rows + 2 or header[0] != self._rows or np.any(np.diff(header[1:]) < 0):
                raise DataError.at(self.source.path, "its header does not fit index.json: it is damaged")
            self._offsets = header[1:].copy()  # Not a view that keeps a block in memory.
        return self._offsets

    def _sample(self, row: int, start: int, stop: int) -> Row:
        data = self._bytes(start, stop - start)
        try:
            return self._decoded(data, stop - start)
        except (ValueError, IndexError, TypeError, ArithmeticError, struct.error) as error:
            raise DataError.at(
                self.source.path, f"not readable ({error})", line=row + 1, unit="sample"
            ) from error

    def _decoded(self, data: bytes | memoryview, size: int) -> Row:
        if len(data) != size:
            raise ValueError("it goes beyond the end of the shard")
        sizes = list(self.about["sizes"])
        for place, each in zip(self._variable, self._sizes.unpack_from(data), strict=True):
            sizes[place] = each
        at = self._sizes.size
        if at + sum(sizes) != size:
            raise ValueError("the sizes of its columns do not add up")
        row: Row = {}
        for name, decode, each in zip(self.about["columns"], self._decoders, sizes, strict=True):
            row[name] = decode(bytes(data[at : at + each]))
            at += each
        return row


def _decoder(encoding: str, path: str) -> Callable[[bytes], Any]:
    kind, _, rest = encoding.partition(":")
    if kind in _SCALARS:
        return lambda data: np.frombuffer(data, _SCALARS[kind], 1)[0].item()
    match kind:
        case "bytes" | "jpeg" | "png":  # Images stay what they are: a caller that wants pixels decodes them.
            return bytes
        case "str":
            return bytes.decode
        case "int":
            return lambda data: int(np.frombuffer(data, "<i8", 1)[0])
        case "str_int":
            return lambda data: int(data.decode())
        case "str_float":
            return lambda data: float(data.decode())
        case "str_decimal":
            return _decimal
        case "json":
            return json.loads
        case "pil":
            return _raw_image
        case "ndarray":
            return _array_decoder(rest)
        case _:
            hint = "Pickled values run code when they are read: write the column as json, ndarray or bytes."
            raise DataError.at(
                path, f"columns encoded as '{encoding}' are not read", hint=hint if kind == "pkl" else ""
            )


def _decimal(data: bytes) -> Decimal:
    try:
        return Decimal(data.decode())
    except InvalidOperation as error:
        raise ValueError("not a decimal number") from error


def _raw_image(data: bytes) -> Row:
    """Pixels without a file around them: width, height and the length of the mode's name, the mode, the pixels."""
    width, height, length = np.frombuffer(data, "<u4", 3).tolist()
    return {
        "width": width,
        "height": height,
        "mode": data[12 : 12 + length].decode(),
        "pixels": data[12 + length :],
    }


def _array_decoder(described: str) -> Callable[[bytes], Any]:
    """`dtype:d,d,d`, `dtype` or nothing: what is not said in the encoding stands before the values."""
    name, _, dimensions = described.partition(":")
    shape = tuple(int(each) for each in dimensions.split(",")) if dimensions else None
    fixed = _SCALARS[name] if name else None

    def decode(data: bytes) -> Any:
        at, dtype, dims = 0, fixed, shape
        if dtype is None:
            dtype, at = _SCALARS[_ARRAY_TYPES[data[0]]], 1
        if dims is None:
            kind, count = _SHAPE_TYPES[data[at] & 3], data[at] >> 2
            dims = tuple(np.frombuffer(data, kind, count, at + 1).tolist())
            at += 1 + count * kind.itemsize
        return np.frombuffer(data, dtype, offset=at).reshape(dims).copy()

    return decode


MDS = MdsFormat()
