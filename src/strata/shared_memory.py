"""What a job is called in this machine's shared memory: its images of checkpoints, and the moments of its processes.

Every such name is made here, for those who put something there and for those who remove what a job left. Each user has
folders of their own, which are there as long as something is in them. Needs nothing but Python.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from contextlib import suppress
from pathlib import Path

_TRIES = 1_000
SHARED_MEMORY = Path("/dev/shm") if Path("/dev/shm").is_dir() else Path("/tmp")


def images_folder(root: Path = SHARED_MEMORY) -> Path:
    """Holds a folder for each job's images (`strata.checkpoint.staging`)."""
    return root / f"strata-images-{os.getuid()}"


def folder_name(job: str) -> str:
    """What an elastic job's folders are called, whatever characters its own name has."""
    safe = "".join(c if c.isascii() and (c.isalnum() or c in "-_.") else "_" for c in job)
    return f"job-{safe[:90].lstrip('._-')}"


def run_folder(job: str) -> Path:
    """Where the processes of one run on this machine leave their moments (`strata.training.trace`)."""
    return SHARED_MEMORY / f"strata-run-{os.getuid()}" / folder_name(job)


def folders_of(job: str) -> list[Path]:
    """All that an elastic job has here."""
    return [images_folder() / folder_name(job), run_folder(job)]


def make_private(folder: Path, *, inside: Path) -> None:
    """Make a folder, `inside` and those between them, for this user alone. A `PermissionError` names what somebody else
    made first. Jobs that end meanwhile may remove what they leave empty on the way."""
    inside.parent.mkdir(parents=True, exist_ok=True)
    between = [around for around in reversed(folder.parents) if around.is_relative_to(inside)]
    for _ in range(_TRIES):
        with suppress(FileNotFoundError):
            for each in (*between, folder):
                with suppress(FileExistsError):
                    each.mkdir(mode=0o700)
                found = os.lstat(each)
                if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
                    raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), str(each))
            return
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(folder))


def remove_empty(folder: Path) -> None:
    """Remove a job's folder and the one that holds all of them, each if nothing is left in it."""
    for each in (folder, folder.parent):
        with suppress(OSError):
            each.rmdir()


def forget_jobs(*jobs: str) -> None:
    """Remove what elastic jobs that will not come back left here."""
    for job in jobs:
        for folder in folders_of(job):
            shutil.rmtree(folder, ignore_errors=True)
            remove_empty(folder)
