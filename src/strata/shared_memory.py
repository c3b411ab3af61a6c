"""What a job is called in this machine's shared memory: its images of checkpoints, and the moments of its processes.

Every such name is made here, for those who put something there and for those who remove what a job left. Each user has
folders of their own. Needs nothing but Python.
"""

from __future__ import annotations

import os
from pathlib import Path

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
