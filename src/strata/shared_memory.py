"""What a job is called in this machine's shared memory: its images of checkpoints, and the timestamps of its processes.

Every such name is made here, for those who put something there and for those who remove what a job left. All of it lives
below one folder, the root, which `memory_root` decides at each call: processes with different roots behave as if they were
on different machines. Only images too large for a root that nobody has named live on disk instead (`memory_roots`).

Each user has folders of their own, which are there as long as something is in them, and which nobody else may enter. A root
such as /dev/shm is everybody's: where another user was first to take the name of this user's folder, another one is used that
follows from a key in the user's home, so that all processes of the user find it and nobody else can take it beforehand. The
session's folder ($XDG_RUNTIME_DIR) would not do: it goes when its user logs out, and training does not. Needs nothing but
Python.
"""

from __future__ import annotations

import errno
import hashlib
import os
import pwd
import secrets
import shutil
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

from strata.files import write_file
from strata.processes import Process, parent_process, this_process

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
    """Holds a folder for each job's images (`strata.checkpoint.copying.staging`)."""
    return _own_folder(memory_root(root), f"strata-images-{os.getuid()}")


def peers_folder(root: Path | None = None) -> Path:
    """Holds a folder for each agent that keeps copies of other machines' images (`strata.checkpoint.peers`)."""
    return _own_folder(memory_root(root), f"strata-peers-{os.getuid()}")


def folder_name(job: str) -> str:
    """What an elastic job's folders are called, whatever characters its own name has."""
    safe = "".join(c if c.isascii() and (c.isalnum() or c in "-_.") else "_" for c in job)
    return f"job-{safe[:90].lstrip('._-')}"


NOTED = "imports"
"""In a run's folder: what a worker has imported (`strata.rendezvous.preload`)."""
VERIFIED_MODULES = "preload"
"""In a run's folder: what the fork server of the run's next agent here may import (`strata.rendezvous.preload`)."""


def run_folder(job: str, *, root: Path | None = None) -> Path:
    """Where the processes of one run on this machine leave their timestamps (`strata.training.trace`)."""
    return _own_folder(memory_root(root), f"strata-run-{os.getuid()}") / folder_name(job)


def folders_of(job: str, *, root: Path | None = None) -> list[Path]:
    """All that an elastic job has here."""
    images = [images_folder(each) / folder_name(job) for each in memory_roots(root)]
    return [*images, run_folder(job, root=root)]


def make_private(folder: Path, *, inside: Path) -> None:
    """Make a folder, `inside` and those between them, for this user alone. A `PermissionError` names what somebody else
    made first, and who. Jobs that end meanwhile may remove what they leave empty on the way."""
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


def owner_name(found: os.stat_result) -> str:
    """Whose a file is, for messages."""
    try:
        return f"user '{pwd.getpwuid(found.st_uid).pw_name}'"
    except KeyError:
        return f"uid {found.st_uid}"


def _own_folder(root: Path, name: str) -> Path:
    """This user's folder of a root that may be everybody's: by its usual name unless somebody else has that, then by one that
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
    # Without one, whoever creates the usual one gets an error that says whose it is.
    return next((path for path in others if _is_own(path, or_absent=True)), usual)


def _is_own(path: Path, *, or_absent: bool = False) -> bool:
    """A folder of this user. A link is nobody's folder. Asked once: jobs of this user make and remove it meanwhile."""
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
    """Written once, completely, by whoever of this user's processes is first."""
    with suppress(OSError, RuntimeError):
        path = _key_path()
        path.parent.mkdir(mode=0o700, exist_ok=True)
        fresh = path.with_name(f".{path.name}.{secrets.token_hex(6)}")
        write_file(fresh, secrets.token_bytes(32), durable=False)
        with suppress(FileExistsError):
            os.link(fresh, path)
        fresh.unlink()
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
            shutil.rmtree(folder, ignore_errors=True)
            remove_empty(folder)


def own_rack() -> str:
    """What this machine is lost together with, where somebody has said so; empty where nobody has."""
    return os.environ.get(RACK_VARIABLE, "").strip()
