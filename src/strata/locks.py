"""Who holds a folder, known by a lock that the kernel releases with the process.

A process number says nothing across process namespaces that share a file system; a lock does. It is a POSIX record lock:
a process that is forked off (a data loader's worker, which may outlive a killed rank) does not inherit it. Such a lock is
dropped when its process closes any descriptor of the file, so the code here looks first whether this process holds
a lock file before it opens it; no other code may open one.

A folder is created with its lock held already, and may be renamed while it is held. Folders of version 0.1 have no lock.
Needs nothing but Python.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

LOCK_NAME = "lock"
_FLOCK = struct.Struct("hhqqi4x")  # struct flock: type, whence, start, length, pid

_held: dict[tuple[int, int], int] = {}
"""The lock files that this process holds, by device and inode, each with the descriptor that holds it."""
_mutex = threading.RLock()


class FolderLock:
    """A folder that this process holds."""

    def __init__(self, folder: Path, key: tuple[int, int]) -> None:
        self.folder = folder
        self._key = key

    def rename(self, to: Path) -> None:
        self.folder.rename(to)
        self.folder = to

    def release(self) -> None:
        """Let go of the folder, and leave it as it is."""
        with _mutex:
            fd = _held.pop(self._key, None)
            if fd is not None:
                os.close(fd)


def create(folder: Path) -> FolderLock:
    """Hold a folder that is there, and that no process has held before."""
    fresh = folder / f"{LOCK_NAME}.new"
    with _mutex:
        fd = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            fresh.rename(folder / LOCK_NAME)  # No process has ever seen it unlocked.
        except BaseException:
            os.close(fd)
            raise
        return _register(folder, fd)


def take(folder: Path) -> FolderLock | None:
    """Hold a folder that is no longer held; None where that cannot be: it is held, has no lock, or was removed."""
    path = folder / LOCK_NAME
    with _mutex:
        try:
            if _key(os.stat(path)) in _held:
                return None
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Not if others have renamed or removed it meanwhile.
            is_there = _key(os.stat(path)) == _key(os.fstat(fd))
        except OSError:
            is_there = False
        if not is_there:
            os.close(fd)
            return None
        return _register(folder, fd)


def is_held(folder: Path) -> bool | None:
    """Whether a process holds a folder, this one or another; None where it has no lock. Where that cannot be told (out of file
    descriptors, say) it counts as held. Asking holds nothing, so it never stops a process that takes the folder over."""
    path = folder / LOCK_NAME
    with _mutex:
        try:
            if _key(os.stat(path)) in _held:
                return True
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError:
            return True
        try:
            asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
            found: int = _FLOCK.unpack(fcntl.fcntl(fd, fcntl.F_GETLK, asked))[0]
        finally:
            os.close(fd)
    return found != fcntl.F_UNLCK


@contextlib.contextmanager
def exclusively(path: Path) -> Iterator[int]:
    """A small file, made where there is none, that no other process looks at meanwhile: its descriptor."""
    with _mutex:
        fd = _open_locked(path)
        try:
            yield fd
        finally:
            os.close(fd)


def _open_locked(path: Path) -> int:
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX)
            with contextlib.suppress(FileNotFoundError):
                if _key(os.stat(path)) == _key(os.fstat(fd)):
                    return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)  # Others have removed it meanwhile.


def _register(folder: Path, fd: int) -> FolderLock:
    key = _key(os.fstat(fd))
    _held[key] = fd
    return FolderLock(folder, key)


def _key(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino


def _forget() -> None:
    """A forked child holds nothing; closing what it inherited leaves its parent's locks alone."""
    global _mutex
    _mutex = threading.RLock()
    for fd in _held.values():
        os.close(fd)
    _held.clear()


os.register_at_fork(after_in_child=_forget)
