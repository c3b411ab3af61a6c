"""Blocks of remote files on this machine's disk, shared by its processes and bounded.

`$STRATA_CACHE_DIR/blocks`, at most `STRATA_CACHE_LIMIT_MB` of it, and never more than half of what the disk has free. A block
is named after one version of one object, so a replaced object is never served from here. It carries a digest: a damaged file
is removed and fetched again. Of several processes that want a block one fetches it, and the others wait for it.

Space is reserved before anything is written, under a lock of the whole cache: an unfinished block counts with its full size.
A process that fetches holds a lock on the unfinished file, which the kernel releases with it, so what a killed process
left is distinguished from what is under way, and removed when space is needed. The least recently used blocks go first.

A cache that cannot be used is no error: then blocks are fetched and not kept.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import xxhash

from strata.data.errors import DataError
from strata.files import make_folder, move_into_place
from strata.locks import exclusively

log = logging.getLogger("strata.data")

LIMIT_MB = 16_384
_DIGEST_BYTES = 16
_PART = ".part"
_LOCK = "lock"
_POLL_S = 0.01
_WAIT_S = 120.0
"""So long a process waits for another that fetches the same block; then it fetches it itself, and does not keep it."""
_TOUCH_S = 30.0
_SWEEP_TO = 0.9

Fetch = Callable[[], memoryview]


class BlockCache:
    """One folder of blocks. Safe to use from several threads and processes."""

    def __init__(self, folder: Path, *, limit_bytes: int) -> None:
        self.folder = folder
        self._root = str(folder)
        self.limit_bytes = limit_bytes
        self._verified: dict[str, tuple[int, int]] = {}
        self._touched_s: dict[str, float] = {}
        self._is_usable = limit_bytes > 0

    def read(self, name: str, size_bytes: int, start: int, stop: int, fetch: Fetch) -> memoryview:
        """Bytes [start, stop) of a block, from the disk or, where it is not there, through `fetch`."""
        found = self._find(name, size_bytes, start, stop)
        if found is not None:
            return found
        return self.fill(name, size_bytes, fetch)[start:stop]

    def has(self, name: str) -> bool:
        return self._is_usable and os.path.exists(self._place(name))

    def fill(self, name: str, size_bytes: int, fetch: Fetch) -> memoryview:
        """Fetch a block and keep it; or wait for the process that does so."""
        deadline_s = time.monotonic() + _WAIT_S
        while self._is_usable and time.monotonic() < deadline_s:
            try:
                part = self._reserve(name, size_bytes + _DIGEST_BYTES)
            except FileNotFoundError:  # The cache was emptied just now.
                time.sleep(_POLL_S)
                continue
            except OSError as error:
                self._give_up(error)
                break
            if part is None:
                break  # There is no space, and cannot be.
            if part >= 0:
                return self._fetch_into(part, name, size_bytes, fetch)
            time.sleep(_POLL_S)
            if (found := self._find(name, size_bytes, 0, size_bytes)) is not None:
                return found
        return fetch()

    def used_bytes(self) -> int:
        """What the files of the cache take, unfinished ones with their full size."""
        used = 0
        for entry in self._entries():
            with suppress(FileNotFoundError):  # Finished or removed meanwhile.
                used += entry.stat().st_size
        return used

    # --- one block ------------------------------------------------------------------------------------------

    def _place(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _find(self, name: str, size_bytes: int, start: int, stop: int) -> memoryview | None:
        if not self._is_usable:
            return None
        path = self._place(name)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._verified.pop(name, None)
            return None
        try:
            status = os.fstat(fd)
            identity = (status.st_ino, status.st_mtime_ns)
            if self._verified.get(name) != identity:
                data = os.pread(fd, size_bytes + _DIGEST_BYTES + 1, 0)
                if not _is_intact(data, size_bytes):
                    log.warning("a cached block was damaged and is fetched again: %s", path)
                    self._verified.pop(name, None)
                    self._remove(Path(path), status.st_ino)
                    return None
                self._verified[name] = identity
                found = memoryview(data)[start:stop]
            else:
                found = memoryview(os.pread(fd, stop - start, start))
                if len(found) != stop - start:
                    return None
            self._touch(name, fd, status.st_mtime_ns)
            return found
        except OSError as error:
            log.debug("a cached block could not be read: %s", error)
            return None
        finally:
            os.close(fd)

    def _touch(self, name: str, fd: int, modified_ns: int) -> None:
        now_s = time.monotonic()
        if now_s - self._touched_s.get(name, -_TOUCH_S) >= _TOUCH_S:
            self._touched_s[name] = now_s
            os.utime(fd, ns=(time.time_ns(), modified_ns))

    def _fetch_into(self, part: int, name: str, size_bytes: int, fetch: Fetch) -> memoryview:
        place = self._place(name)
        unfinished = place + _PART
        is_kept = False
        try:
            data = fetch()
            try:
                os.pwritev(part, [data, xxhash.xxh3_128_digest(data)], 0)
                move_into_place(Path(unfinished), Path(place), durable=False)
                is_kept = True
                status = os.fstat(part)
                self._verified[name] = (status.st_ino, status.st_mtime_ns)
            except FileNotFoundError:
                log.info("the cache was emptied while %s was written", unfinished)
            except OSError as error:  # The disk is full after all, or was taken away.
                self._give_up(error)
            return data
        finally:
            if not is_kept:
                with suppress(OSError):
                    self._remove(Path(unfinished), os.fstat(part).st_ino)
            os.close(part)

    def _give_up(self, error: OSError) -> None:
        log.warning("continuing without a data cache: %s", error)
        self._is_usable = False

    # --- all blocks -----------------------------------------------------------------------------------------

    def _reserve(self, name: str, size_bytes: int) -> int | None:
        """A file of this size to write the block to, locked; -1 where another process writes it or has written it; None where
        there is no space."""
        place = self._place(name)
        unfinished = place + _PART
        if not os.path.isdir(self._root):
            make_folder(self.folder)
        with exclusively(self.folder / _LOCK) as lock:
            if os.path.exists(place):
                return -1
            fd = os.open(unfinished, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(fd)
                return -1
            if os.path.exists(place):  # Since we looked: what was opened may be it, under its new name.
                with suppress(FileNotFoundError):
                    if os.stat(unfinished).st_ino == os.fstat(fd).st_ino:
                        os.unlink(unfinished)
                os.close(fd)
                return -1
            try:
                has_bytes = os.fstat(fd).st_size  # Left by a process that was killed: it is counted already.
                used = _number(lock)
                if used is None or used + size_bytes - has_bytes > self.limit_bytes:
                    used = self._sweep(keep=name + _PART, need_bytes=size_bytes - has_bytes)
                if used + size_bytes - has_bytes > self.limit_bytes:
                    os.unlink(unfinished)
                    _note(lock, used - has_bytes)
                    os.close(fd)
                    return None
                os.ftruncate(fd, size_bytes)
                _note(lock, used + size_bytes - has_bytes)
            except BaseException:
                with suppress(OSError):
                    os.close(fd)
                raise
            return fd

    def _sweep(self, *, keep: str, need_bytes: int) -> int:
        """Count what is there; remove what the dead have left, and the least recently used until enough is free."""
        used, blocks = 0, []
        for entry in self._entries():
            with suppress(FileNotFoundError):
                if entry.name.endswith(_PART) and entry.name != keep and _is_abandoned(entry.path):
                    os.unlink(entry.path)
                    continue
                status = entry.stat()
                used += status.st_size
                if not entry.name.endswith(_PART):
                    blocks.append((status.st_atime_ns, status.st_size, entry.path))
        if used + need_bytes > self.limit_bytes:
            goal = min(int(self.limit_bytes * _SWEEP_TO), self.limit_bytes - need_bytes)
            for _, size_bytes, path in sorted(blocks):
                if used <= goal:
                    break
                with suppress(FileNotFoundError):
                    os.unlink(path)
                used -= size_bytes
        return used

    def _remove(self, path: Path, inode: int) -> None:
        with exclusively(self.folder / _LOCK) as lock:
            status = path.stat()
            if status.st_ino == inode:  # No other file was put in its place.
                path.unlink()
                if (used := _number(lock)) is not None:
                    _note(lock, used - status.st_size)

    def _entries(self) -> list[os.DirEntry[str]]:
        with suppress(FileNotFoundError), os.scandir(self.folder) as files:
            return [entry for entry in files if entry.name != _LOCK]
        return []


def _is_intact(data: bytes, size_bytes: int) -> bool:
    return (
        len(data) == size_bytes + _DIGEST_BYTES
        and xxhash.xxh3_128_digest(memoryview(data)[:size_bytes]) == data[size_bytes:]
    )


def _is_abandoned(path: str) -> bool:
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except OSError:
        return False
    finally:
        os.close(fd)


def _number(fd: int) -> int | None:
    text = os.pread(fd, 32, 0)
    return int(text) if text.strip().isdigit() else None


def _note(fd: int, value: int) -> None:
    os.pwrite(fd, f"{max(0, value):<31}\n".encode(), 0)


def _limit_mb() -> int:
    text = os.environ.get("STRATA_CACHE_LIMIT_MB", "")
    if text and not text.isdigit():
        raise DataError(
            f"STRATA_CACHE_LIMIT_MB is {text!r}, which is not a number of megabytes.",
            hint=f"Set it to a whole number, or unset it (default {LIMIT_MB:,}); 0 disables the cache.",
        )
    return int(text or LIMIT_MB)


_opened: dict[tuple[Path, int], BlockCache] = {}


def cache_dir() -> Path:
    """Where this user's caches of data are: `$STRATA_CACHE_DIR`, else `~/.cache/strata`."""
    if chosen := os.environ.get("STRATA_CACHE_DIR"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "strata"


def block_cache() -> BlockCache:
    """The cache of this machine's user, as the environment says it now."""
    folder = cache_dir() / "blocks"
    limit_bytes = _limit_mb() * 2**20
    key = (folder, limit_bytes)
    if key not in _opened:
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            used = BlockCache(folder, limit_bytes=limit_bytes).used_bytes()
            limit_bytes = min(limit_bytes, used + shutil.disk_usage(folder).free // 2)
        _opened[key] = BlockCache(folder, limit_bytes=limit_bytes)
    return _opened[key]
