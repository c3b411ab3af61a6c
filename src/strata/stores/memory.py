"""Values in shared memory, which survive the process but not the machine.

Each job has a namespace, a private directory in /dev/shm. A worker that is killed and started again opens the
same name and finds what was there. Namespaces record who owns them: `release` removes one when its job ends,
and `reclaim_orphans` those whose owners have all ended, so memory is not lost to jobs that will never resume.
Opening a store reclaims as well. A limit in bytes counts everything in the namespace, unfinished writes
included, over all processes; replacing a value needs space for both until the old one is freed.

An owner in another PID namespace (a container sharing /dev/shm) cannot be judged from here and counts as alive. Owners,
private folders and locks are those of the images of checkpoints (`strata.shared_memory`, `strata.locks`).
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar

from strata import locks
from strata.processes import Process, live_process
from strata.shared_memory import job_owner, owner_lives, touched_s
from strata.stores.files import FileStore
from strata.stores.keys import RESERVED
from strata.stores.oserrors import store_error
from strata.stores.protocol import AccessDenied, StoreError

log = logging.getLogger("strata.stores")

SHM = "/dev/shm"
ORPHAN_GRACE_S = 600.0
"""How long a namespace without owners waits for its job to come back."""

LOCK_NAME = ".lock"
_DOOMED = ".doomed-"
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
        owner = job_owner() if owner_pid is None else _process(owner_pid)
        with self._opening(), _held_still(self._shm):
            super().__init__(_home(self._shm) / job)
            self._add_owner(owner)

    @property
    def url(self) -> str:
        return f"memory://{self.job}"

    def release(self) -> None:
        """The job has ended: give all of its memory back, whoever wrote it."""
        try:
            _remove(self._shm, lambda job: job == self.job)
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

    @contextlib.contextmanager
    def _opening(self) -> Iterator[None]:
        try:
            yield
        except PermissionError as error:
            if error.filename != str(_home(self._shm)):
                raise self._not_opened(error) from error
            raise AccessDenied(
                f"{error.filename} belongs to another user.",
                tier=self.tier,
                key="",
                hint="Have its owner or an administrator remove it.",
            ) from None
        except OSError as error:
            raise self._not_opened(error) from error

    def _not_opened(self, error: OSError) -> StoreError:
        return store_error(error, tier=self.tier, key="", doing=f"open {self.url} in {self._shm}")

    def _add_owner(self, owner: Process) -> None:
        """Called while no other process looks at the namespaces."""
        owners = self.root / RESERVED / "owners"
        self._make_folder(owners)
        for each in owners.iterdir():
            if not owner_lives(each.name):
                each.unlink(missing_ok=True)
        (owners / owner.token).touch(mode=self.file_mode)


def reclaim_orphans(
    *, shm: str | os.PathLike[str] = SHM, grace_s: float = ORPHAN_GRACE_S, spare: str | None = None
) -> list[str]:
    """Remove the namespaces of this user whose owners have ended and which were not touched for `grace_s`; their
    names."""
    home = _home(Path(shm))
    removed: list[str] = []
    with contextlib.suppress(OSError):
        removed = _remove(Path(shm), lambda job: job != spare and _orphaned(home / job, grace_s))
    for job in removed:
        log.info("memory://%s: reclaimed, because its owners have ended", job)
    return removed


def _home(shm: Path) -> Path:
    """Where this user's namespaces are. It goes when it is left empty."""
    return shm / f"strata-{os.geteuid()}"


@contextlib.contextmanager
def _held_still(shm: Path) -> Iterator[None]:
    """Nobody else adds or removes a namespace of this user meanwhile."""
    home = _home(shm)
    lock = home / LOCK_NAME
    with locks.exclusively_inside(lock, inside=home):
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)  # Whoever waits for it makes another.
            with contextlib.suppress(OSError):
                home.rmdir()


def _remove(shm: Path, is_chosen: Callable[[str], bool]) -> list[str]:
    """Take the chosen namespaces away, each in one rename, so that no one can open half of it; then free them. Also what
    a killed process had started to remove. The names of the chosen."""
    home, doomed = _home(shm), []
    if not home.exists():
        return []
    chosen = []
    with _held_still(shm):
        for job in sorted(os.listdir(home)):
            if job.startswith(_DOOMED):
                doomed.append(home / job)
            elif job != LOCK_NAME and is_chosen(job):
                chosen.append(job)
                doomed.append(home / f"{_DOOMED}{uuid.uuid4().hex}")
                (home / job).rename(doomed[-1])
        for each in doomed:
            shutil.rmtree(each, ignore_errors=True)
    return chosen


def _orphaned(namespace: Path, grace_s: float) -> bool:
    try:
        if any(map(owner_lives, os.listdir(namespace / RESERVED / "owners"))):
            return False
    except FileNotFoundError:
        pass
    return time.time() - touched_s(namespace) >= grace_s


def _process(pid: int) -> Process:
    try:
        return live_process(pid)
    except ProcessLookupError as error:
        raise ValueError(str(error)) from None
