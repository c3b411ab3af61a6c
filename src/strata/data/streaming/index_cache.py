"""Indexes of dataset files, kept between runs.

`$STRATA_CACHE_DIR`, else `~/.cache/strata`. An entry belongs to one file as it was (path, size, version or time of change)
and one way of reading it; a changed file simply has another name here. A cache that cannot be read or written is no
error, only slower. Entries are written completely or not at all.
"""

from __future__ import annotations

import hashlib
import logging
import os
import zipfile
from pathlib import Path

import numpy as np

from strata.data.readers.base import FileIndex, ReadOptions
from strata.data.streaming.block_cache import cache_dir
from strata.data.streaming.sources import FileRef, is_remote
from strata.files import fresh_file

log = logging.getLogger("strata.data")

VERSION = 2
WORTH_KEEPING_BYTES = 2**20  # Smaller files are read faster than their index is looked up.


def load_index(ref: FileRef, format: str, options: ReadOptions) -> FileIndex | None:
    path = _entry(ref, format, options)
    try:
        with np.load(path, allow_pickle=False) as saved:
            arrays = {name: saved[name] for name in saved.files}
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None
    rows, bad = arrays.pop("counts", np.array([-1, 0])).tolist()
    return FileIndex(rows=rows, bad=bad, arrays=arrays) if rows >= 0 else None


def save_index(ref: FileRef, format: str, options: ReadOptions, index: FileIndex) -> None:
    if ref.size_bytes < WORTH_KEEPING_BYTES and not is_remote(ref.path):
        return
    path = _entry(ref, format, options)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with fresh_file(path, durable=False) as file:
            arrays = {**index.arrays, "counts": np.array([index.rows, index.bad])}
            np.savez(file, **arrays)  # type: ignore[arg-type]
    except OSError as error:
        log.debug("index of %s was not cached: %s", ref.path, error)


def _entry(ref: FileRef, format: str, options: ReadOptions) -> Path:
    place = ref.path if is_remote(ref.path) else os.path.abspath(ref.path)
    identity = (
        VERSION,
        place,
        ref.size_bytes,
        ref.version or ref.modified_s,
        format,
        options.on_bad,
        options.max_record_bytes,
    )
    return cache_dir() / "index" / f"{hashlib.sha256(repr(identity).encode()).hexdigest()[:32]}.npz"
