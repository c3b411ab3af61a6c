"""The folder beside an index in which it is being built: `train.index.partial/`.

One build at a time holds it, by a lock that goes with its process. What a killed build left in it is reused only
by one with the same plan. It is removed once the index is published.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import xxhash

from strata.files import make_folder

log = logging.getLogger(__name__)

LOCK = "lock"


@contextmanager
def locked(output: Path) -> Iterator[Path]:
    """The work folder for `output`, held by this process alone. Waits for another build of the same index."""
    folder = output.with_name(f"{output.name}.partial")
    lock = _acquire(folder)
    try:
        yield folder
    finally:
        os.close(lock)


def _acquire(folder: Path) -> int:
    while True:
        make_folder(folder)
        path = folder / LOCK
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except FileNotFoundError:
            continue  # the holder has just removed the folder
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = os.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"
                log.warning("Another process (pid %s) is building this index: waiting for it.", holder)
                fcntl.flock(fd, fcntl.LOCK_EX)
            if os.path.exists(path) and os.path.samestat(os.fstat(fd), os.stat(path)):
                os.truncate(fd, 0)
                os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
                return fd
        except FileNotFoundError:
            pass  # removed between the two looks
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)  # the lock of a folder that is no more


def for_plan(folder: Path, plan: bytes) -> Path:
    """The place for the parts of one plan; those of any other are removed. Only while holding the lock.

    Plans have places of their own, so that a process of a killed build, which may live for another moment,
    cannot leave a part of its plan among ours.
    """
    place = folder / xxhash.xxh3_128_hexdigest(plan)
    for entry in folder.iterdir():
        if entry.is_dir() and entry != place:
            shutil.rmtree(entry, ignore_errors=True)
    place.mkdir(exist_ok=True)
    return place


def remove(folder: Path) -> None:
    """Only while holding the lock. It goes last: from then on the folder may be another build's."""
    lock = folder / LOCK
    with suppress(OSError):  # What stays does no harm; a folder that is not empty is in use.
        for entry in folder.iterdir():
            if entry.is_dir():
                shutil.rmtree(entry, ignore_errors=True)
            elif entry != lock:
                entry.unlink()
        lock.unlink()
        folder.rmdir()
