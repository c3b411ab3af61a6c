"""Files and folders that are there with all of their content or not at all.

What is written goes to a hidden name beside its place, and gets its name by one rename: readers see the old content or the
new, and who fails half-way leaves the old. With `durable`, the content is flushed before it gets its name, and then its
folder, so a file that has its name survives the machine. Without, it survives the process, which is enough for shared memory
and for what can be made again.

Stores (`strata.stores.files`) keep unfinished values in a place of their own, for they must tell those of the dead from those
of the living; they flush folders with `sync_folder`.

`RangeFile` makes a file object of what is read by its ranges, wherever it is. `is_on_network` says which files another machine
keeps.

Files are their user's alone, unless they are meant for others too (`mode`, less what the umask takes away). Needs nothing but
Python.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, BinaryIO


def write_file(
    path: Path, content: bytes | str, *, durable: bool, mode: int = 0o600, if_absent: bool = False
) -> None:
    """Give a file this content; text is UTF-8. With `if_absent` only the first writer does, and others get `FileExistsError`."""
    with fresh_file(path, durable=durable, mode=mode, if_absent=if_absent) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextlib.contextmanager
def fresh_file(
    path: Path, *, durable: bool, mode: int = 0o600, if_absent: bool = False
) -> Iterator[BinaryIO]:
    """A file to be written, which takes its place when the block is left; not if that is by an exception."""
    fresh = _beside(path)
    try:
        with open(fresh, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            yield file
            if durable:
                sync(file)
        move_into_place(fresh, path, durable=durable, if_absent=if_absent)
    except BaseException:
        with contextlib.suppress(OSError):
            fresh.unlink()
        raise


@contextlib.contextmanager
def fresh_folder(path: Path, *, mode: int = 0o700, overwrite: bool = False) -> Iterator[Path]:
    """A folder to be filled, which gets its name when the block is left; not if that is by an exception. It is durable if the
    caller flushes the files in it. It takes the place of an empty folder; of anything else only if it may `overwrite` it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = _beside(path)
    fresh.mkdir(mode=mode)
    try:
        yield fresh
        for folder, _, _ in os.walk(fresh, topdown=False):
            sync_folder(Path(folder))
        if overwrite and path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif overwrite:
            path.unlink(missing_ok=True)
        move_into_place(fresh, path, durable=True)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def make_folder(folder: Path) -> None:
    """With its parents, if it is not there yet; also while other processes make and remove it, where `Path.mkdir` may raise."""
    while True:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            return
        except FileExistsError:
            with contextlib.suppress(FileNotFoundError):  # It has just been removed.
                if not stat.S_ISDIR(folder.stat().st_mode):
                    raise


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.urandom(6).hex()}")


def move_into_place(fresh: Path, path: Path, *, durable: bool, if_absent: bool = False) -> None:
    """Give what is finished its name, in place of what has it. What is to be durable has been flushed."""
    if if_absent:
        os.link(fresh, path)
        fresh.unlink()
    else:
        os.replace(fresh, path)
    if durable:
        sync_folder(path.parent)


def make_file_private(path: Path) -> None:
    """See to it that a file is there that only its user may read, before something is written to it. Raises `OSError`."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        if os.fstat(fd).st_mode & 0o077 and os.fstat(fd).st_uid == os.geteuid():
            os.fchmod(fd, 0o600)
    finally:
        os.close(fd)


def sync(file: IO[bytes]) -> None:
    """Flush what was written to an open file to its device."""
    file.flush()
    os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Flush the names in a folder to its device."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class RangeFile(io.RawIOBase):
    """Bytes that `read(start_bytes, size_bytes)` gives, as the file object that other libraries want."""

    def __init__(self, read: Callable[[int, int], bytes | bytearray | memoryview], size_bytes: int) -> None:
        self._read = read
        self._size_bytes = size_bytes
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size_bytes}[whence]
        if base + offset < 0:
            raise ValueError("a position before the start of the file")
        self._at = base + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        data = self._read(self._at, max(0, min(len(view), self._size_bytes - self._at)))
        view[: len(data)] = data
        self._at += len(data)
        return len(data)


NETWORK_FILE_SYSTEMS = frozenset(
    {
        *(
            "9p",
            "afs",
            "beegfs",
            "ceph",
            "cifs",
            "fuse.ceph",
            "fuse.gcsfuse",
            "fuse.glusterfs",
            "fuse.goofys",
        ),
        *("fuse.juicefs", "fuse.mount-s3", "fuse.s3fs", "fuse.sshfs", "glusterfs", "gpfs", "lustre", "ncpfs"),
        *("nfs", "nfs4", "ocfs2", "orangefs", "pvfs2", "smb3", "smbfs", "virtiofs", "wekafs"),
    }
)


def is_on_network(path: str, *, mounts: str = "/proc/self/mounts") -> bool:
    """Whether a file is kept by another machine than this one: by the kind of file system it is on. False where that is not
    known, and for what is no path."""
    if not path.startswith("/"):
        return False
    kind, longest = "", 0
    try:
        with open(mounts, encoding="utf-8", errors="surrogateescape") as lines:
            for line in lines:
                _, point, found, *_ = line.split(" ")
                point = point.replace("\\040", " ").rstrip("/") + "/"
                if f"{path}/".startswith(point) and len(point) >= longest:
                    kind, longest = found, len(point)
    except (OSError, ValueError):
        return False
    return kind in NETWORK_FILE_SYSTEMS
