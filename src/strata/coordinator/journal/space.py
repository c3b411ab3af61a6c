"""Space on the disk of the journal: how much there is, and a reserve for what must be recorded when there is none.

The reserve is a private file whose blocks are really allocated. Below as much free space again the disk counts as full: the
engine then refuses changes, while what must be recorded (a worker that fails, one that leaves) still fits. When a write
fails all the same, the reserve is given up and the write repeated. As soon as there is space the reserve is allocated
again, and the disk counts as full no longer. Every change of state is logged once.

A quota of the file system is no part of what `statvfs` shows; it is noticed when a write, or the reserve, meets it.
"""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from pathlib import Path

log = logging.getLogger("strata.coordinator.journal")

RESERVE_BYTES = 16 << 20
FILE_NAME = "reserve"


class Space:
    is_closed = is_blocked = False
    """There is the reserve; and a write that fails in spite of it ends the coordinator."""

    def __init__(self, folder: Path, *, reserve_bytes: int = RESERVE_BYTES) -> None:
        self.folder = folder
        self.reserve_bytes = reserve_bytes
        self.low_bytes = reserve_bytes
        """With less than this free, beside the reserve, the disk counts as full."""
        self.is_full = False
        self.free_bytes = 0
        self.total_bytes = 0
        self._path = folder / FILE_NAME
        self._is_held = self._is_allocated()
        self.look()

    def look(self) -> None:
        """Measure, and allocate the reserve where it is missing and there is space. Cheap enough for once a second."""
        self._measure()
        # A little more than it takes to become full, or the state would flutter.
        enough_bytes = self.low_bytes + self.low_bytes // 2 if self.is_full else self.low_bytes
        if not self._is_held and self.free_bytes >= enough_bytes + self.reserve_bytes:
            self._is_held = self._allocate()
            self._measure()
        self._become(full=not self._is_held or self.free_bytes < enough_bytes)

    def has(self, size_bytes: int) -> bool:
        """Whether there is as much as this beside the reserve and what changes need. Nothing changes."""
        self._measure()
        return self.free_bytes - size_bytes >= self.low_bytes

    def explain(self) -> tuple[str, str]:
        return (
            f"The coordinator's disk is full: {megabytes(self.free_bytes)} are free in {self.folder}, and changes need "
            f"{megabytes(self.low_bytes)}.",
            "Free some space there; changes are accepted again automatically. Reading, heartbeats and running "
            "training continue.",
        )

    def release(self) -> bool:
        """A write has failed for lack of space: give the reserve up. False where it is given up already."""
        if not self._is_held:
            return False
        with suppress(FileNotFoundError):
            self._path.unlink()
        self._is_held = False
        self._measure()
        self._become(full=True)
        return True

    def _become(self, *, full: bool) -> None:
        if full and not self.is_full:
            log.error(
                "the disk of %s is full (%s free): changes are refused until there is space",
                self.folder,
                megabytes(self.free_bytes),
            )
        elif self.is_full and not full:
            log.warning(
                "there is space on the disk of %s again (%s free): changes are accepted",
                self.folder,
                megabytes(self.free_bytes),
            )
        self.is_full = full

    def _measure(self) -> None:
        with suppress(OSError):  # A disk that does not answer for a moment: what was known last counts.
            found = os.statvfs(self.folder)
            self.free_bytes = found.f_bavail * found.f_frsize
            self.total_bytes = found.f_blocks * found.f_frsize

    def _is_allocated(self) -> bool:
        """Whether an earlier coordinator left the reserve, with all of its blocks."""
        with suppress(OSError):
            found = self._path.lstat()
            return found.st_size == self.reserve_bytes and found.st_blocks * 512 >= self.reserve_bytes
        return False

    def _allocate(self) -> bool:
        with suppress(FileNotFoundError):
            self._path.unlink()
        try:
            fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError:
            return False
        try:
            os.posix_fallocate(fd, 0, self.reserve_bytes)
        except OSError:
            with suppress(OSError):
                self._path.unlink()
            return False
        finally:
            os.close(fd)
        return True


def megabytes(count: int) -> str:
    return f"{count / 1e6:,.1f} MB"
