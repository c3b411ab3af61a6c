"""The formats a dataset may have, by name and by suffix."""

from __future__ import annotations

from collections.abc import Iterable

from strata.data.errors import DataError
from strata.data.readers.base import Format
from strata.data.readers.columnar import ARROW, PARQUET
from strata.data.readers.delimited import CSV, TSV
from strata.data.readers.mds import MDS
from strata.data.readers.npy import NPY
from strata.data.readers.tar import WEBDATASET
from strata.data.readers.text import JSONL, TEXT
from strata.data.readers.tfrecord import TFRECORD
from strata.data.streaming import compressed

FORMATS: tuple[Format, ...] = (PARQUET, CSV, TSV, JSONL, ARROW, WEBDATASET, MDS, TFRECORD, NPY, TEXT)
NAMES = tuple(format.name for format in FORMATS)
_ALIASES = {"json": "jsonl", "ndjson": "jsonl", "feather": "arrow", "ipc": "arrow", "tar": "webdataset"}
_ALIASES |= {"wds": "webdataset", "mosaicml": "mds", "tfrecords": "tfrecord", "txt": "text", "numpy": "npy"}
_COMPRESSIBLE = (CSV, TSV, JSONL, TEXT, WEBDATASET)


def suffixes_of(format: Format) -> tuple[str, ...]:
    """The endings of files of a format, compressed ones too where they can be read by number."""
    if format not in _COMPRESSIBLE:
        return format.suffixes
    return format.suffixes + tuple(one + packed for one in format.suffixes for packed in compressed.SUFFIXES)


ALL_SUFFIXES = tuple(suffix for format in FORMATS for suffix in suffixes_of(format))


def format_named(name: str, *, path: str = "") -> Format:
    wanted = name.lower().lstrip(".")
    wanted = _ALIASES.get(wanted, wanted)
    for format in FORMATS:
        if format.name == wanted:
            return format
    raise DataError.at(
        path, f"the format '{name[:80]}' is not known", hint=f"Known formats: {', '.join(NAMES)}."
    )


def format_of(paths: Iterable[str], *, path: str) -> Format:
    """The one format that all files have by their suffix."""
    found = {
        format.name: format for p in paths for format in FORMATS if p.lower().endswith(suffixes_of(format))
    }
    if len(found) == 1:
        return next(iter(found.values()))
    raise DataError.at(
        path,
        f"there are files of several formats ({', '.join(sorted(found))})"
        if found
        else "the format cannot be determined",
        hint=f"Pass format=, one of {', '.join(NAMES)}.",
        command_hint=f"Pass --format, one of {', '.join(NAMES)}.",
    )
