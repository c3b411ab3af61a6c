"""Indexes of dataset files, kept between runs.

`$STRATA_CACHE_DIR`, else `~/.cache/strata`. An entry belongs to one file as it was (path, size, version or time of change)
and one way of reading it; a changed file simply has another name here. An index that takes long is kept unfinished too, and
continued after a crash. A cache that cannot be read or written is no
error, only slower. Entries are written completely or not at all.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
import zipfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from strata.data.readers.base import FileIndex, ReadOptions
from strata.data.streaming.block_cache import cache_dir
from strata.data.streaming.sources import FileRef, is_remote
from strata.files import fresh_file

log = logging.getLogger("strata.data")

VERSION = 2
KEEP_EVERY_S = 2.0
"""So often an unfinished index is kept, unless that takes long."""
_COST_LIMIT = 20.0
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


class UnfinishedIndex:
    """What is known of one file while its index is built. Kept now and then, as often as costs little; removed at the end."""

    def __init__(self, ref: FileRef, format: str, options: ReadOptions) -> None:
        self._path = _entry(ref, format, options).with_suffix(".part.npz")
        self._is_kept = ref.size_bytes >= WORTH_KEEPING_BYTES
        self._kept_s = time.monotonic()
        self._took_s = 0.0
        self.also: Callable[[], Mapping[str, NDArray[Any]]] = dict
        """More to keep each time: what was learned of a compressed file, how far it was read."""
        self.arrays: Mapping[str, NDArray[Any]] = {}
        try:
            with np.load(self._path, allow_pickle=False) as saved:
                self.arrays = {name: saved[name] for name in saved.files}
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
            pass

    def is_due(self) -> bool:
        wait_s = max(KEEP_EVERY_S, _COST_LIMIT * self._took_s)
        return self._is_kept and time.monotonic() - self._kept_s >= wait_s

    def keep(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        began_s = time.monotonic()
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with fresh_file(self._path, durable=False) as file:
                np.savez(file, **{**arrays, **self.also()})  # type: ignore[arg-type]
        except OSError as error:
            log.debug("an unfinished index was not cached: %s", error)
            self._is_kept = False
        self._kept_s = time.monotonic()
        self._took_s = self._kept_s - began_s

    def remove(self) -> None:
        with suppress(OSError):
            self._path.unlink()


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
