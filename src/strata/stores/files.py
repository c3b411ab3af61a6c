"""Values as plain files under one directory: what the memory and the local store share.

A value is written to a nameless place under `.strata/tmp`, and given its name by one rename, or one link where
the key must be absent: readers see all of it or nothing. A temporary file is locked while its writer lives, so
the next process to open the store can distinguish temporary files of dead writers from work in progress, also across containers,
and removes them. A durable store flushes the file before it gets its name, and then every directory on the way
to it.

The file of a key is `root/key` and nothing else, so other programs can read what is kept here.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import stat
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import ClassVar

from strata.files import sync_folder
from strata.stores.direct import DirectFile, read_into, read_parts
from strata.stores.keys import RESERVED, check_key, check_prefix
from strata.stores.oserrors import store_error
from strata.stores.protocol import (
    AlreadyExists,
    Blob,
    Buffer,
    InvalidKey,
    NoSpace,
    NotFound,
    TakePart,
    Truncated,
)

log = logging.getLogger("strata.stores")

_PUBLISH_ATTEMPTS = 100
_LARGEST_READ_BYTES = 1 << 30


class FileStore:
    """The file-backed half of a store. Subclasses say whether it must outlive the machine, and what they admit."""

    tier: ClassVar[str]
    durable: ClassVar[bool]
    direct: ClassVar[bool]
    file_mode: ClassVar[int]
    dir_mode: ClassVar[int]

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(os.path.abspath(root))
        self._temporary = self.root / RESERVED / "tmp"
        self.clean_up()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    @property
    def url(self) -> str:
        # Only what would end the path of a URL, or be taken for an escape, is escaped: the rest stays readable.
        return "file://" + str(self.root).replace("%", "%25").replace("#", "%23").replace("?", "%3F")

    def path_of(self, key: str) -> Path:
        """Where `key` is, or would be, on this machine."""
        return self.root / check_key(key, tier=self.tier)

    def put(self, key: str, data: Buffer, *, if_absent: bool = False) -> None:
        view = memoryview(data).cast("B")
        with self.open_write(key, size_hint_bytes=len(view), if_absent=if_absent) as writer:
            writer.write(view)
            writer.commit()

    def open_write(
        self, key: str, *, size_hint_bytes: int | None = None, if_absent: bool = False
    ) -> FileWriter:
        path = self.path_of(key)
        if if_absent and os.path.exists(path):
            raise self._exists(key, path)
        return FileWriter(self, key, path, size_hint_bytes=size_hint_bytes or 0, if_absent=if_absent)

    def read(self, key: str, *, offset: int = 0, length: int | None = None) -> bytes:
        if offset < 0 or (length is not None and length < 0):
            raise ValueError(f"offset ({offset}) and length ({length}) must not be negative")
        with self._opened(key) as (fd, size_bytes):
            end = size_bytes if length is None else offset + length
            self._check_range(key, offset, end, size_bytes)
            parts = []
            while offset < end:
                # One large read: fresh memory is slow to touch, so it should be touched once.
                part = os.pread(fd, min(end - offset, _LARGEST_READ_BYTES), offset)
                if not part:
                    self._check_range(key, offset, end, offset)
                parts.append(part)
                offset += len(part)
            return parts[0] if len(parts) == 1 else b"".join(parts)

    def read_into(self, key: str, buffer: memoryview, *, offset: int = 0) -> None:
        if offset < 0:
            raise ValueError(f"offset ({offset}) must not be negative")
        view = buffer.cast("B")
        with self._opened(key) as (fd, size_bytes):
            self._check_range(key, offset, offset + len(view), size_bytes)
            try:
                read_into(fd, view, offset, direct=self.direct)
            except EOFError:  # Another process cut the file short after it was opened.
                self._check_range(key, offset, offset + len(view), os.fstat(fd).st_size)
                raise

    def read_parts(self, key: str, take: TakePart, *, size_bytes: int, part_bytes: int) -> None:
        with self._opened(key) as (fd, has_bytes):
            if has_bytes != size_bytes:
                raise self._truncated(key, has_bytes, f"{size_bytes} bytes were expected", size_bytes)
            try:
                read_parts(fd, take, size_bytes=size_bytes, part_bytes=part_bytes, direct=self.direct)
            except EOFError:
                self._check_range(key, 0, size_bytes, os.fstat(fd).st_size)
                raise

    def stat(self, key: str) -> Blob | None:
        try:
            found = os.stat(self.path_of(key))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise store_error(
                error, tier=self.tier, key=key, doing=f"look up '{key}' in {self.root}"
            ) from error
        return _blob(key, found) if stat.S_ISREG(found.st_mode) else None

    def list(self, prefix: str = "") -> Iterator[Blob]:
        check_prefix(prefix, tier=self.tier)
        folder = prefix.rpartition("/")[0]
        found = [blob for blob in self._walk(folder) if blob.key.startswith(prefix)]
        # Key order is not the order of a walk: 'a-b' comes before 'a/b', and 'a/b' before 'a0'.
        return iter(sorted(found, key=lambda blob: blob.key))

    def delete(self, key: str) -> None:
        path = self.path_of(key)
        try:
            path.unlink()
            if self.durable:
                sync_folder(path.parent)
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            return
        except OSError as error:
            raise store_error(
                error, tier=self.tier, key=key, doing=f"delete '{key}' from {self.root}"
            ) from error
        self._prune(path.parent)

    def free_bytes(self) -> int:
        folder = self.root
        while not os.path.exists(folder) and folder != folder.parent:
            folder = folder.parent
        try:
            space = os.statvfs(folder)
        except OSError as error:
            raise store_error(
                error, tier=self.tier, key="", doing=f"measure the free space of {self.root}"
            ) from error
        return space.f_bavail * space.f_frsize

    def clean_up(self) -> int:
        """Remove the temporary files of writers that have ended; how many there were."""
        removed = 0
        with contextlib.suppress(OSError), os.scandir(self._temporary) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):
                    fd = os.open(entry.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
                    try:
                        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # Fails while the writer lives.
                        os.unlink(entry.path)
                        removed += 1
                    finally:
                        os.close(fd)
        if removed:
            log.info("%s: removed %d unfinished files of writers that have ended", self.url, removed)
        return removed

    # --- writing, for FileWriter ---

    def check_space(self, key: str, size_bytes: int) -> None:
        """Raise `NoSpace` if a value of this size cannot fit, before anything is written."""
        free_bytes = self.free_bytes()
        if size_bytes > free_bytes:
            raise self._no_space(key, size_bytes, free_bytes)

    def reserve(self, fd: int, key: str, size_bytes: int) -> None:
        """Called before the file behind `fd` grows to `size_bytes`; a store with a limit says no here."""

    def create_temporary(self) -> tuple[int, Path]:
        """A new locked file that no reader can see, and its path."""
        self._make_folder(self._temporary)
        while True:
            path = self._temporary / uuid.uuid4().hex
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, self.file_mode)
            fcntl.flock(fd, fcntl.LOCK_EX)
            if os.fstat(fd).st_nlink:
                return fd, path
            os.close(fd)  # Another opener of the store took it for an orphan before it was locked.

    def publish(self, temporary: Path, path: Path, key: str, *, if_absent: bool) -> None:
        """Give a finished temporary file its name; the name `temporary` no longer exists afterwards."""
        for attempt in range(_PUBLISH_ATTEMPTS):
            try:
                self._make_folder(path.parent)
                if if_absent:
                    os.link(temporary, path)
                else:
                    os.rename(temporary, path)
                break
            except FileExistsError:
                raise self._exists(key, path) from None
            except FileNotFoundError:
                # Deleting the folder's last value removed the folder too, between the two lines above.
                if attempt == _PUBLISH_ATTEMPTS - 1:
                    raise
        if self.durable:
            try:
                self._fsync_up(path.parent)
            except OSError:
                if if_absent:  # A caller that sees a failure must be able to retry.
                    path.unlink(missing_ok=True)
                raise
        if if_absent:
            with contextlib.suppress(OSError):  # It is published; a second name that stays is only an orphan.
                os.unlink(temporary)

    # --- inside ---

    @contextlib.contextmanager
    def _opened(self, key: str) -> Iterator[tuple[int, int]]:
        path = self.path_of(key)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                found = os.fstat(fd)
                if not stat.S_ISREG(found.st_mode):
                    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
                yield fd, found.st_size
            finally:
                os.close(fd)
        except (FileNotFoundError, NotADirectoryError):
            raise NotFound(
                f"'{key}' is not in {self.root}.", tier=self.tier, key=key, reason="not found"
            ) from None
        except OSError as error:
            raise store_error(
                error, tier=self.tier, key=key, doing=f"read '{key}' from {self.root}"
            ) from error

    def _check_range(self, key: str, start: int, end: int, size_bytes: int) -> None:
        if start > size_bytes or end > size_bytes:
            raise self._truncated(key, size_bytes, f"bytes {start} to {end} were asked for", end)

    def _truncated(self, key: str, has_bytes: int, wanted: str, end: int) -> Truncated:
        return Truncated(
            f"'{key}' in {self.root} has {has_bytes} bytes; {wanted}.",
            tier=self.tier,
            key=key,
            reason=f"{has_bytes} bytes where {end} were expected",
        )

    def _exists(self, key: str, path: Path) -> AlreadyExists | InvalidKey:
        if os.path.isdir(path):
            return InvalidKey(
                f"'{key}' is a folder of other values in {self.root}.",
                tier=self.tier,
                key=key,
                hint="Choose another key.",
            )
        return AlreadyExists(
            f"'{key}' already exists in {self.root}, and was to be written only if absent.",
            tier=self.tier,
            key=key,
            reason="already exists",
        )

    def _no_space(self, key: str, required_bytes: int, available_bytes: int) -> NoSpace:
        return NoSpace(
            f"Could not write '{key}' to {self.root}: No space left on device "
            f"({required_bytes} bytes needed, {available_bytes} free).",
            tier=self.tier,
            key=key,
            hint="Free some space (df -h shows how much), or keep fewer checkpoints.",
            reason=os.strerror(errno.ENOSPC),
            required_bytes=required_bytes,
            available_bytes=available_bytes,
        )

    def _walk(self, folder: str) -> Iterator[Blob]:
        pending = [folder]
        while pending:
            folder = pending.pop()
            try:
                with os.scandir(self.root / folder) as entries:
                    for entry in entries:
                        key = f"{folder}/{entry.name}" if folder else entry.name
                        if key == RESERVED:
                            continue
                        if entry.is_dir(follow_symlinks=False):
                            pending.append(key)
                            continue
                        with contextlib.suppress(FileNotFoundError):  # Deleted meanwhile.
                            found = entry.stat()
                            if stat.S_ISREG(found.st_mode):
                                yield _blob(key, found)
            except (FileNotFoundError, NotADirectoryError):
                continue
            except OSError as error:
                raise store_error(
                    error, tier=self.tier, key=folder, doing=f"list {self.root / folder}"
                ) from error

    def _make_folder(self, folder: Path) -> None:
        missing = []
        while not folder.is_dir():
            missing.append(folder)
            folder = folder.parent
        for each in reversed(missing):
            with contextlib.suppress(FileExistsError):
                # A store that is made here is its user's alone. Below it, and in a folder that somebody has made for it, modes
                # are as the umask and that folder say.
                is_above = each == self.root or self.root.is_relative_to(each)
                os.mkdir(each, 0o700 if is_above else self.dir_mode)
            if self.durable and (each == self.root or self.root.is_relative_to(each)):
                sync_folder(each.parent)

    def _fsync_up(self, folder: Path) -> None:
        """Flush every directory from `folder` to the root: others may have made some, and not flushed them yet."""
        while True:
            sync_folder(folder)
            if folder == self.root:
                return
            folder = folder.parent

    def _prune(self, folder: Path) -> None:
        with contextlib.suppress(OSError):  # Not empty, or already removed.
            while folder != self.root:
                os.rmdir(folder)
                folder = folder.parent


class FileWriter:
    """A value on its way into a `FileStore`."""

    def __init__(
        self, store: FileStore, key: str, path: Path, *, size_hint_bytes: int, if_absent: bool
    ) -> None:
        store.check_space(key, size_hint_bytes)
        self._store = store
        self._key = key
        self._path = path
        self._if_absent = if_absent
        self._doing = f"write '{key}' to {store.root}"
        try:
            self._fd, self._temporary = store.create_temporary()
        except OSError as error:
            raise store_error(error, tier=store.tier, key=key, doing=self._doing) from error
        self._file = DirectFile(self._fd, direct=store.direct)
        self._open = True
        self._reserved_bytes = self._written_bytes = 0
        with self._failing_aborts():
            self._reserve(size_hint_bytes)

    def write(self, chunk: Buffer) -> None:
        self._check_open()
        view = memoryview(chunk).cast("B")
        with self._failing_aborts():
            self._reserve(self._written_bytes + len(view))
            self._file.write(view)
        self._written_bytes += len(view)

    def commit(self) -> None:
        self._check_open()
        with self._failing_aborts():
            self._file.finish()
            if self._reserved_bytes > self._written_bytes:
                os.ftruncate(self._fd, self._written_bytes)
            if self._store.durable:
                # A flush that failed once may report success the next time, with the pages dropped: never retry.
                os.fsync(self._fd)
            self._store.publish(self._temporary, self._path, self._key, if_absent=self._if_absent)
        self._close()

    def abort(self) -> None:
        if self._open:
            with contextlib.suppress(OSError):
                os.unlink(self._temporary)
            self._close()

    def __enter__(self) -> FileWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()

    def _reserve(self, size_bytes: int) -> None:
        if size_bytes > self._reserved_bytes:
            self._store.reserve(self._fd, self._key, size_bytes)
            self._reserved_bytes = size_bytes

    def __del__(self) -> None:
        if getattr(self, "_open", False):  # Absent if opening failed.
            self.abort()

    @contextlib.contextmanager
    def _failing_aborts(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.abort()
            raise store_error(error, tier=self._store.tier, key=self._key, doing=self._doing) from error
        except BaseException:
            self.abort()
            raise

    def _check_open(self) -> None:
        if not self._open:
            raise ValueError(f"the writer of '{self._key}' is closed")

    def _close(self) -> None:
        self._open = False
        self._file.close()
        os.close(self._fd)


def _blob(key: str, found: os.stat_result) -> Blob:
    return Blob(key=key, size_bytes=found.st_size, modified_s=found.st_mtime)
