"""Values in shared memory, which survive the process but not the machine.

Each job has a namespace, a private directory in /dev/shm. A worker that is killed and started again opens the
same name and finds what was there. Namespaces record who owns them: `release` removes one when its job ends,
and `reclaim_orphans` those whose owners are all gone, so memory is not lost to jobs that nobody will resume.
Opening a store reclaims as well. A limit in bytes counts everything in the namespace, unfinished writes
included, over all processes; replacing a value needs room for both until the old one is gone.

An owner in another PID namespace (a container sharing /dev/shm) cannot be judged from here and counts as alive.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import shutil
import stat
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

from strata.stores.files import FileStore
from strata.stores.keys import RESERVED
from strata.stores.oserrors import store_error
from strata.stores.protocol import AccessDenied, StoreError

log = logging.getLogger("strata.stores")

SHM = "/dev/shm"
ORPHAN_GRACE_S = 600.0
"""How long a namespace without owners waits for its job to come back."""

_JOB_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")


class MemoryStore(FileStore):
    """The namespace of one job.

    `owner_pid` is whose death makes the namespace an orphan. Under torchrun that is the agent, which outlives
    the workers it restarts; elsewhere this process.
    """

    tier: ClassVar[str] = "MEMORY"
    durable: ClassVar[bool] = False
    direct: ClassVar[bool] = False
    file_mode: ClassVar[int] = 0o600
    dir_mode: ClassVar[int] = 0o700

    def __init__(
        self,
        job: str,
        *,
        limit_bytes: int | None = None,
        owner_pid: int | None = None,
        shm: str | os.PathLike[str] = SHM,
    ) -> None:
        if not _JOB_NAME.fullmatch(job):
            raise ValueError(
                f"job name {job!r} must be 1 to 128 letters, digits, '.', '_' or '-', not starting with '.'"
            )
        if limit_bytes is not None and limit_bytes <= 0:
            raise ValueError(f"limit_bytes ({limit_bytes}) must be positive")
        self.job = job
        self.limit_bytes = limit_bytes
        self._shm = Path(shm)
        reclaim_orphans(shm=shm, spare=job)
        super().__init__(_home(self._shm) / job)
        self._take_ownership(_default_owner() if owner_pid is None else owner_pid)

    @property
    def url(self) -> str:
        return f"memory://{self.job}"

    def release(self) -> None:
        """The job has ended: give all of its memory back, whoever wrote it."""
        try:
            with _locked(self._shm) as home:
                if home is not None:
                    _remove(home, self.job)
        except OSError as error:
            raise store_error(error, tier=self.tier, key="", doing=f"release {self.url}") from error

    def free_bytes(self) -> int:
        free_bytes = super().free_bytes()
        if self.limit_bytes is None:
            return free_bytes
        return max(0, min(free_bytes, self.limit_bytes - self._used_bytes()))

    def reserve(self, fd: int, key: str, size_bytes: int) -> None:
        if self.limit_bytes is None:
            return
        lock = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            available_bytes = self.limit_bytes - (self._used_bytes() - os.fstat(fd).st_size)
            if size_bytes > available_bytes:
                raise self._no_space(key, size_bytes, available_bytes)
            os.ftruncate(fd, size_bytes)  # Counts from now on, for everybody.
        finally:
            os.close(lock)

    def _used_bytes(self) -> int:
        """Everything in the namespace, by inode: a value that gets its name meanwhile is met twice, never missed."""
        sizes_bytes: dict[int, int] = {}
        for start in (self._temporary, self.root):
            for folder, _, names in os.walk(start):
                for name in names:
                    with contextlib.suppress(FileNotFoundError):
                        found = os.lstat(os.path.join(folder, name))
                        sizes_bytes[found.st_ino] = found.st_size
        return sum(sizes_bytes.values())

    def _take_ownership(self, pid: int) -> None:
        try:
            with _locked(self._shm, create=True) as home:
                assert home is not None
                owners = home / self.job / RESERVED / "owners"
                self._make_folder(owners)
                for owner in owners.iterdir():
                    if not _alive(owner.name):
                        owner.unlink(missing_ok=True)
                (owners / _identity(pid)).touch(mode=self.file_mode)
        except OSError as error:
            raise store_error(
                error, tier=self.tier, key="", doing=f"open {self.url} in {self._shm}"
            ) from error


def reclaim_orphans(
    *, shm: str | os.PathLike[str] = SHM, grace_s: float = ORPHAN_GRACE_S, spare: str | None = None
) -> list[str]:
    """Remove the namespaces of this user whose owners are gone and which nobody touched for `grace_s`; their
    names."""
    removed = []
    with contextlib.suppress(OSError), _locked(Path(shm)) as home:
        if home is not None:
            for job in sorted(os.listdir(home)):
                if job != spare and _orphaned(home / job, grace_s):
                    _remove(home, job)
                    removed.append(job)
                    log.info("memory://%s: reclaimed, its owners are gone", job)
    return removed


def _home(shm: Path) -> Path:
    """Where this user's namespaces are. Checked, since anybody may create names in /dev/shm."""
    home = shm / f"strata-{os.geteuid()}"
    with contextlib.suppress(FileNotFoundError):
        found = os.lstat(home)
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
            raise AccessDenied(
                f"{home} belongs to somebody else.",
                tier=MemoryStore.tier,
                key="",
                hint="Have its owner or an administrator remove it.",
            )
    return home


@contextlib.contextmanager
def _locked(shm: Path, *, create: bool = False) -> Iterator[Path | None]:
    """This user's directory of namespaces, held still; None if there is none. It goes when it is left empty."""
    home = _home(shm)
    while True:
        if create:
            with contextlib.suppress(FileExistsError):
                os.mkdir(home, MemoryStore.dir_mode)
        try:
            fd = os.open(home, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            if create:
                continue
            yield None
            return
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            if not _is(fd, home):
                continue  # It was left empty and removed while this process waited for the lock.
            yield home
            with contextlib.suppress(OSError):
                os.rmdir(home)
            return
        finally:
            os.close(fd)


def _is(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.lstat(path))
    except FileNotFoundError:
        return False


def _remove(home: Path, job: str) -> None:
    """Take the namespace away in one rename, then free it, so that no one can open half of it."""
    doomed = home / f".doomed-{uuid.uuid4().hex}"
    try:
        os.rename(home / job, doomed)
    except FileNotFoundError:
        return
    shutil.rmtree(doomed, ignore_errors=True)


def _orphaned(namespace: Path, grace_s: float) -> bool:
    if namespace.name.startswith(".doomed-"):
        return True  # Its remover was killed half-way.
    try:
        if any(_alive(owner) for owner in os.listdir(namespace / RESERVED / "owners")):
            return False
    except FileNotFoundError:
        pass
    touched_s = max((path.lstat().st_mtime for path in (namespace, *namespace.rglob("*"))), default=0.0)
    return time.time() - touched_s >= grace_s


def _default_owner() -> int:
    return os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else os.getpid()


def _identity(pid: int) -> str:
    """A process, told apart from any later one with the same number: PID, start time, PID namespace."""
    return f"{pid}-{_start_ticks(pid)}-{os.stat('/proc/self/ns/pid').st_ino}"


def _alive(identity: str) -> bool:
    try:
        pid, start_ticks, pid_namespace = (int(part) for part in identity.split("-"))
        return pid_namespace != os.stat("/proc/self/ns/pid").st_ino or _start_ticks(pid) == start_ticks
    except (ValueError, StoreError):
        return False


def _start_ticks(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        raise ValueError(f"there is no process {pid}") from None
    if fields[0] in "ZX":
        raise ValueError(f"process {pid} has ended")
    return int(fields[19])
