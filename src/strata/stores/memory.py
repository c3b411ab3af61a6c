"""Values in shared memory, which survive the process but not the machine.

They are below the root of all memory (STRATA_MEMORY_ROOT, else /dev/shm), in the folder of their job, for this user alone
(`strata.shared_memory`). A worker that is killed and started again opens the same name and finds what was there. `release`
removes them when their job ends, as does a process that forgets the job; those whose owners have all ended go after a grace,
when any process opens memory of any job. A limit in bytes counts all of them, unfinished writes included, over all processes;
replacing a value needs space for both until the old one is freed.

An owner in another PID namespace (a container sharing /dev/shm) cannot be judged from here and counts as alive.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from typing import ClassVar

from strata.processes import Process, live_process
from strata.shared_memory import (
    job_folder,
    job_owner,
    memory_root,
    own_values,
    remove_dead_jobs,
    remove_values,
)
from strata.stores.files import FileStore
from strata.stores.oserrors import store_error
from strata.stores.protocol import AccessDenied


class MemoryStore(FileStore):
    """The values of one job.

    `owner_pid` is whose death makes them orphans. Under torchrun that is the agent, which outlives the workers it restarts;
    elsewhere this process. `shm` is another root than that of all memory.
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
        shm: str | os.PathLike[str] | None = None,
    ) -> None:
        if limit_bytes is not None and limit_bytes <= 0:
            raise ValueError(f"limit_bytes ({limit_bytes}) must be positive")
        root = memory_root(shm)
        self.job = job
        self.limit_bytes = limit_bytes
        self._folder = job_folder(job, root=root)
        owner = job_owner() if owner_pid is None else _process(owner_pid)
        try:
            super().__init__(own_values(self._folder, owner))
        except OSError as error:
            if error.errno != errno.EPERM:
                raise store_error(
                    error, tier=self.tier, key="", doing=f"open {self.url} in {root}"
                ) from error
            raise AccessDenied(
                f"{error.filename}: {error.strerror}.",
                tier=self.tier,
                key="",
                hint="Have its owner or an administrator remove it.",
            ) from None
        remove_dead_jobs(root=root, keep=job)

    @property
    def url(self) -> str:
        return f"memory://{self.job}"

    def release(self) -> None:
        """The job has ended: give all of its memory back, whichever process wrote it."""
        try:
            remove_values(self._folder, even_owned=True)
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
        """All of them, by inode: a value that gets its name meanwhile is met twice, never missed."""
        sizes_bytes: dict[int, int] = {}
        for start in (self._temporary, self.root):
            for folder, _, names in os.walk(start):
                for name in names:
                    with contextlib.suppress(FileNotFoundError):
                        found = os.lstat(os.path.join(folder, name))
                        sizes_bytes[found.st_ino] = found.st_size
        return sum(sizes_bytes.values())


def _process(pid: int) -> Process:
    try:
        return live_process(pid)
    except ProcessLookupError as error:
        raise ValueError(str(error)) from None
