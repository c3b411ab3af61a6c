"""Tar files in the WebDataset layout: files that share a name up to the first dot are one sample.

    n01440764/0001.jpg, n01440764/0001.cls, n01440764/0001.json   →   {"__key__": "n01440764/0001", "jpg": …}

Only headers are read to index one. Text, JSON, class numbers and NumPy arrays are decoded by their suffix;
everything else stays bytes.
"""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from strata.data.errors import DataError
from strata.data.readers.base import Cache, FileIndex, OpenFile, ReadOptions, Row
from strata.data.streaming.sources import Source, refuse_compressed
from strata.files import RangeFile

_BUFFER_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class TarFormat:
    name: str = "webdataset"
    suffixes: tuple[str, ...] = (".tar",)

    def index(self, source: Source, options: ReadOptions) -> FileIndex:
        refuse_compressed(source)
        keys: list[str] = []
        first: list[int] = []  # Of each sample, its first member.
        suffixes: list[str] = []
        places: list[tuple[int, int]] = []
        bad = 0
        at = 0
        unfinished = options.unfinished
        if unfinished is not None and "tar_at" in unfinished.arrays:
            kept = unfinished.arrays
            at, first = int(kept["tar_at"]), kept["tar_first"].tolist()
            places = [(offset, size) for offset, size in kept["tar_places"].tolist()]
            keys, suffixes = _unpacked(kept["tar_keys"]), _unpacked(kept["tar_suffixes"])
        try:
            file = RangeFile(source.read, source.size_bytes)
            file.seek(at)
            with tarfile.open(fileobj=io.BufferedReader(file, _BUFFER_BYTES), mode="r:") as archive:
                for member in archive:
                    if unfinished is not None and unfinished.is_due():
                        unfinished.keep(
                            {
                                "tar_at": np.array(member.offset),
                                "tar_first": np.array(first, np.int64),
                                "tar_places": np.array(places, np.int64).reshape(-1, 2),
                                "tar_keys": _packed(keys),
                                "tar_suffixes": _packed(suffixes),
                            }
                        )
                    archive.members = []  # type: ignore[attr-defined]  # tarfile would keep every header in memory.
                    folder, _, name = member.name.rpartition("/")
                    if not member.isreg() or name.startswith("."):
                        continue
                    stem, _, suffix = name.partition(".")
                    key = f"{folder}/{stem}" if folder else stem
                    if not keys or keys[-1] != key:
                        keys.append(key)
                        first.append(len(places))
                    if member.offset_data + member.size > source.size_bytes:
                        raise tarfile.ReadError(f"'{member.name}' goes beyond the end of the file")
                    suffixes.append(suffix.lower())
                    places.append((member.offset_data, member.size))
        except (tarfile.TarError, EOFError, ValueError) as error:
            if options.on_bad == "raise" or not source.size_bytes:
                raise DataError.at(
                    source.path, f"damaged or not a tar file ({error})", line=len(places) + 1, unit="member"
                ) from error
            bad = 1  # What was cut off takes its sample with it.
            if keys:
                del places[first[-1] :], suffixes[first[-1] :], keys[-1], first[-1]
        return FileIndex(
            rows=len(keys),
            bad=bad,
            arrays={
                "first": np.array([*first, len(places)], np.int64),
                "places": np.array(places, np.int64).reshape(-1, 2),
                "keys": _packed(keys),
                "suffixes": _packed(suffixes),
            },
        )

    def open(self, source: Source, index: FileIndex, cache: Cache) -> OpenFile:
        return _Tar(source, index)


class _Tar:
    def __init__(self, source: Source, index: FileIndex) -> None:
        self.source = source
        self._first = index.arrays["first"]
        self._places = index.arrays["places"]
        self._keys = _unpacked(index.arrays["keys"])
        self._suffixes = _unpacked(index.arrays["suffixes"])

    def read(self, rows: Sequence[int]) -> list[Row]:
        return [self._sample(row) for row in rows]

    def ranges(self, rows: Sequence[int]) -> list[tuple[int, int]]:
        found = []
        for row in rows:
            first, last = self._places[int(self._first[row])], self._places[int(self._first[row + 1]) - 1]
            found.append((int(first[0]), int(last[0] + last[1] - first[0])))
        return found

    def _sample(self, row: int) -> Row:
        sample: Row = {"__key__": self._keys[row]}
        for member in range(int(self._first[row]), int(self._first[row + 1])):
            offset, size = self._places[member].tolist()
            suffix = self._suffixes[member]
            try:
                sample[suffix] = decode(suffix, self.source.read(offset, size))
            except ValueError as error:
                name = f"{self._keys[row]}.{suffix}"
                raise DataError.at(
                    f"{self.source.path}:{name}", f"not readable as {suffix} ({error})"
                ) from error
        return sample

    def close(self) -> None:
        self.source.close()


def decode(suffix: str, data: bytes) -> Any:
    """A member by its suffix; ValueError where its content is something else."""
    match suffix.rpartition(".")[2]:
        case "json":
            return json.loads(data)
        case "txt" | "text" | "transcript":
            return data.decode()
        case "cls" | "cls2" | "class" | "count" | "index" | "inx" | "id":
            return int(data)
        case "npy":
            return np.load(io.BytesIO(data), allow_pickle=False)
        case _:
            return data


def _packed(texts: Sequence[str]) -> np.ndarray[Any, Any]:
    return np.frombuffer(json.dumps(list(texts)).encode(), np.uint8)


def _unpacked(packed: np.ndarray[Any, Any]) -> list[str]:
    texts: list[str] = json.loads(packed.tobytes())
    return texts


WEBDATASET = TarFormat()
