"""What a job has in this machine's shared memory: its images of checkpoints, values (`memory://job`), and timestamps.

Every name of it is made here, for those who put something there and for those who remove what a job left. All of it lives
below one folder, the root, which `memory_root` decides at each call: processes with different roots behave as if they were
on different machines. Only images too large for /dev/shm live on disk instead, where no root was named (`memory_roots`).

Each user has folders of their own, which are there as long as something is in them, and which no other user may enter. A root
such as /dev/shm is shared by all: where another user was first to take the name of this user's folder, another one is used that
follows from a key in the user's home, so that all processes of the user find it and no other user can take it beforehand. The
session's folder ($XDG_RUNTIME_DIR) would not do: it goes when its user logs out, and training does not.

What a job has here goes when it ends, by those who started it (`forget_jobs`). Where they could not, any process of the user
removes it after a grace: as soon as no process holds any of it (`strata.locks`), and its owners have ended. Needs nothing but
Python.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import pwd
import re
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from strata import locks
from strata.files import write_file
from strata.processes import Process, parent_process, this_process

log = logging.getLogger("strata.shared_memory")

OWNER_NAME = "owner"
"""In a folder that a process holds: whose end is the end of its job, and who it is."""
GENERATION_NAME = "generation"
"""In a job's folder: the newest generation that has started."""
GRACE_S = 600.0
LONG_GRACE_S = 3600.0
UNKNOWN_GRACE_S = 86_400.0
"""For folders of version 0.1, which have no lock, where their process cannot be seen from here."""
_JOB_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_VALUES = ".values"
"""In a job's folder: its values, and who owns them."""
_ATTEMPTS = 1_000
_NAMES = 8
_RUN_NAME = "run"
ROOT_VARIABLE = "STRATA_MEMORY_ROOT"
RACK_VARIABLE = "STRATA_RACK"
_SHARED_MEMORY = Path("/dev/shm")
# Not /tmp, which may be memory as well, and does not survive a restart of the machine.
_DISK = Path("/var/tmp")


def memory_root(named: str | os.PathLike[str] | None = None) -> Path:
    """The folder below which everything is: the one that was named, by the caller or by STRATA_MEMORY_ROOT, else
    /dev/shm."""
    return memory_roots(named)[0]


def memory_roots(named: str | os.PathLike[str] | None = None) -> list[Path]:
    """Where images may be, the best first. Where a root was named there is no other; else there is a folder on disk for
    what does not fit in /dev/shm."""
    if chosen := named or os.environ.get(ROOT_VARIABLE):
        return [Path(chosen).absolute()]
    on_disk = _DISK if os.access(_DISK, os.W_OK | os.X_OK) else Path(tempfile.gettempdir())
    return [_SHARED_MEMORY, on_disk] if _SHARED_MEMORY.is_dir() else [on_disk]


def images_folder(root: Path | None = None) -> Path:
    """Holds a folder for each job's images (`strata.checkpoint.copying.staging`) and values (`strata.stores.memory`)."""
    return _own_folder(memory_root(root), f"strata-images-{os.getuid()}")


def peers_folder(root: Path | None = None) -> Path:
    """Holds a folder for each agent that keeps copies of other machines' images (`strata.checkpoint.peers`)."""
    return _own_folder(memory_root(root), f"strata-peers-{os.getuid()}")


def job_folder(job: str, *, root: Path | None = None) -> Path:
    """Where a job's images and values are. Each user has a place of their own."""
    if not _JOB_NAME.fullmatch(job):
        raise ValueError(
            f"job name {job!r} must be 1 to 128 letters, digits, '.', '_' or '-', starting with a letter, a digit or '_'"
        )
    return images_folder(root) / job


def folder_name(job: str) -> str:
    """What an elastic job's folders are called, whatever characters its own name has."""
    safe = "".join(c if c.isascii() and (c.isalnum() or c in "-_.") else "_" for c in job)
    return f"job-{safe[:90].lstrip('._-')}"


NOTED = "imports"
"""In a run's folder: what a worker has imported (`strata.agent.preload`)."""
VERIFIED_MODULES = "preload"
"""In a run's folder: what the fork server of the run's next agent here may import (`strata.agent.preload`)."""


def run_folder(job: str, *, root: Path | None = None) -> Path:
    """Where the processes of one run on this machine leave their timestamps (`strata.agent.trace`)."""
    return _own_folder(memory_root(root), f"strata-run-{os.getuid()}") / folder_name(job)


def folders_of(job: str, *, root: Path | None = None) -> list[Path]:
    """All that an elastic job has here."""
    values = [job_folder(job, root=root) / _VALUES] if _JOB_NAME.fullmatch(job) else []
    images = [images_folder(each) / folder_name(job) for each in memory_roots(root)]
    return [*values, *images, run_folder(job, root=root)]


def make_private(folder: Path, *, inside: Path) -> None:
    """Make a folder, `inside` and those between them, for this user alone. A `PermissionError` names what another user
    made first, and which. Jobs that end meanwhile may remove what they leave empty on the way."""
    inside.parent.mkdir(parents=True, exist_ok=True)
    between = [around for around in reversed(folder.parents) if around.is_relative_to(inside)]
    for _ in range(_ATTEMPTS):
        with suppress(FileNotFoundError):
            for each in (*between, folder):
                with suppress(FileExistsError):
                    each.mkdir(mode=0o700)
                found = os.lstat(each)
                if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
                    raise PermissionError(errno.EPERM, f"it belongs to {owner_name(found)}", str(each))
                if stat.S_IMODE(found.st_mode) & 0o077:
                    each.chmod(0o700)
            return
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(folder))


@contextmanager
def exclusively_inside(path: Path, *, inside: Path) -> Iterator[int]:
    """As `locks.exclusively`, for a file in a folder of this user alone, below `inside` or that folder itself. Folders are made
    where there are none, and others may remove them as soon as they are empty. A `PermissionError` names what another user
    made first."""
    for _ in range(_ATTEMPTS):
        make_private(path.parent, inside=inside)
        with ExitStack() as stack:
            try:
                fd = stack.enter_context(locks.exclusively(path))
            except FileNotFoundError:  # The folder was removed as empty by a process that left just now.
                continue
            yield fd
            return
    raise FileNotFoundError(errno.ENOENT, "removed repeatedly by another process", str(path.parent))


def owner_name(found: os.stat_result) -> str:
    """Whose a file is, for messages."""
    try:
        return f"user '{pwd.getpwuid(found.st_uid).pw_name}'"
    except KeyError:
        return f"uid {found.st_uid}"


def _own_folder(root: Path, name: str) -> Path:
    """This user's folder of a root that may be shared by all: by its usual name unless another user has that, then by one that
    only this user can work out, and by that one as long as it is there."""
    usual = root / name
    if _is_own(usual):
        return usual
    others = [root / f"{name}-{suffix}" for suffix in _suffixes(_read_key(), name)]
    for path in others:
        if _is_own(path):
            return path
    if _is_own(usual, or_absent=True):
        return usual
    others = others or [root / f"{name}-{suffix}" for suffix in _suffixes(_make_key(), name)]
    # Without one, the caller that creates the usual one gets an error that says whose it is.
    return next((path for path in others if _is_own(path, or_absent=True)), usual)


def _is_own(path: Path, *, or_absent: bool = False) -> bool:
    """A folder of this user. A link does not count as one. Asked once: jobs of this user make and remove it meanwhile."""
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return or_absent
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()


def _suffixes(key: bytes | None, name: str) -> list[str]:
    """Several: a name can be seen as long as it is in use, and be taken afterwards."""
    if key is None:
        return []
    return [hashlib.sha256(b"%s %s %d" % (key, name.encode(), n)).hexdigest()[:16] for n in range(_NAMES)]


def _key_path() -> Path:
    return Path.home() / ".strata" / "folder-key"


def _read_key() -> bytes | None:
    with suppress(OSError, RuntimeError):  # There is no home, or nothing in it: the usual case.
        return _key_path().read_bytes()
    return None


def _make_key() -> bytes | None:
    """Written once, completely, by the first of this user's processes."""
    with suppress(OSError, RuntimeError):
        path = _key_path()
        path.parent.mkdir(mode=0o700, exist_ok=True)
        write_file(path, secrets.token_bytes(32), durable=False, if_absent=True)
    return _read_key()


def job_owner() -> Process:
    """Whose end is the end of this process's job: the launcher's under torchrun, else its own."""
    return parent_process() if "TORCHELASTIC_RUN_ID" in os.environ else this_process()


def owner_lives(token: str) -> bool:
    """Whether a process may still be there, by its token; one that cannot be seen from here may. False for what is no token."""
    try:
        return not Process.parse(token).has_ended()
    except ValueError:
        return False


def touched_s(folder: Path) -> float:
    """When anything in a folder was changed last. Raises `FileNotFoundError` where others are changing it now."""
    return max(path.lstat().st_mtime for path in [folder, *folder.rglob("*")])


def remove_empty(folder: Path) -> None:
    """Remove a job's folder and the one that holds all of them, each if nothing is left in it."""
    for each in (folder, folder.parent):
        with suppress(OSError):
            each.rmdir()


def remove_tree(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)


def folders_in(folder: Path) -> list[Path]:
    """Of jobs, their processes or their images. None where it is not there: another process of the job may just have taken
    it over, or ended."""
    try:
        return sorted(path for path in folder.iterdir() if path.is_dir() and path.name[0] != ".")
    except (FileNotFoundError, NotADirectoryError):
        return []


def is_left(folder: Path) -> bool:
    """Whether a folder of a job is not held. Where it has no lock, as in version 0.1, the process it is named after must have
    ended or have let go of it; where that process cannot be seen from here, time decides."""
    if (held := locks.is_held(folder)) is not None:
        return not held
    try:
        process = Process.parse(folder.name.partition(".")[0])
    except ValueError:
        return True
    if process.is_elsewhere():
        with suppress(OSError):
            return time.time() - touched_s(folder) > UNKNOWN_GRACE_S
        return False
    return process.has_ended()


def remove_dead_jobs(*, root: Path | None = None, keep: str = "", grace_s: float = GRACE_S) -> list[str]:
    """Remove what jobs have in memory whose processes and owners have all ended, at least `grace_s` ago."""
    removed = []
    for job in folders_in(images_folder(root)):
        with suppress(OSError):  # It changes while it is looked at: others are at it.
            if job.name != keep and _job_is_dead(job, grace_s) and remove_job(job):
                removed.append(job.name)
                log.info("removed the memory of job %s, which has ended", job.name)
    return removed


def remove_job(job: Path) -> bool:
    """Remove a dead job's folder; False where it has come back to life meanwhile."""
    for folder in folders_in(job):
        lock = locks.take(folder)
        if lock is None and locks.is_held(folder) is not None:
            return False
        remove_held(folder)
        if lock is not None:
            lock.release()
    if not remove_values(job):
        return False
    with suppress(OSError):
        (job / GENERATION_NAME).unlink(missing_ok=True)
    remove_empty(job)
    return not job.exists()


def remove_held(folder: Path) -> None:
    """Remove a folder that is held; its lock goes last, so that one that is half removed is still known to be held."""
    with suppress(OSError):
        for path in folder.iterdir():
            if path.name != locks.LOCK_NAME:
                remove_tree(path) if path.is_dir() else path.unlink(missing_ok=True)
    remove_tree(folder)


def _job_is_dead(job: Path, grace_s: float) -> bool:
    """Whether what a job has in memory is orphaned: its processes have ended and so have their owners, or they have
    long since ended although an owner lives (the rank they belonged to is on another machine now)."""
    folders = folders_in(job)
    if not all(is_left(folder) for folder in folders) or _values_are_owned(job):
        return False
    is_owned = any(_owner_lives(folder) for folder in folders)
    return time.time() - touched_s(job) > (LONG_GRACE_S if is_owned else grace_s)


def _owner_lives(folder: Path) -> bool:
    try:
        return owner_lives((folder / OWNER_NAME).read_text(errors="replace").partition("\n")[0])
    except OSError:
        return False


def own_values(job: Path, owner: Process) -> Path:
    """The folder of a job's values, which from now on stay at least as long as this owner lives."""
    values, owners = job / _VALUES / "values", job / _VALUES / "owners"
    with _values_locked(job):
        for folder in (values, owners):
            make_private(folder, inside=job.parent)
        for each in owners.iterdir():
            if not owner_lives(each.name):
                each.unlink(missing_ok=True)
        (owners / owner.token).touch(mode=0o600)
    return values


def remove_values(job: Path, *, even_owned: bool = False) -> bool:
    """Take a job's values away in one rename, so that no process can open half of them, and free them; also what a killed process
    had started to remove. False, and nothing is removed, where an owner lives."""
    if not any(job.glob(f"{_VALUES}*")):
        return True
    with _values_locked(job):
        if not even_owned and _values_are_owned(job):
            return False
        with suppress(FileNotFoundError):
            (job / _VALUES).rename(job / f"{_VALUES}-{secrets.token_hex(6)}")
    return True


@contextmanager
def _values_locked(job: Path) -> Iterator[None]:
    """No other process opens or removes a job's values meanwhile. Those that were renamed are freed at the end."""
    lock = job / f"{_VALUES}.lock"
    with exclusively_inside(lock, inside=job.parent):
        try:
            yield
        finally:
            for renamed in job.glob(f"{_VALUES}-*"):
                remove_tree(renamed)
            lock.unlink(missing_ok=True)  # A process that waits for it makes another.
            remove_empty(job)


def _values_are_owned(job: Path) -> bool:
    with suppress(FileNotFoundError):
        return any(map(owner_lives, os.listdir(job / _VALUES / "owners")))
    return False


def note_run(job: str, run: str, *, root: Path | None = None) -> None:
    """Write down under which name a job keeps its images: that of its run, which another launch may continue."""
    folder = run_folder(job, root=root)
    make_private(folder, inside=folder.parent)
    write_file(folder / _RUN_NAME, run, durable=False)


def forget_jobs(*jobs: str) -> None:
    """Remove what elastic jobs that will not come back left here."""
    for job in jobs:
        names = [job]
        with suppress(OSError):
            names.append((run_folder(job) / _RUN_NAME).read_text())
        for folder in [folder for name in names for folder in folders_of(name)]:
            remove_tree(folder)
            remove_empty(folder)


def own_rack() -> str:
    """What this machine is lost together with, where that is set; else empty."""
    return os.environ.get(RACK_VARIABLE, "").strip()
