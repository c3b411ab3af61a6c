"""Which files and buckets the coordinator reads on behalf of whom.

The caller's role decides, when the reading happens: an admin may have nearly any path read, everybody else only what lies inside
the operator's `data_roots`. Some places are read for no caller: what the kernel and the machine keep for themselves, hidden
folders of a home unless a root names them, and the coordinator's own folder, configuration and keys. In that folder lie those
of its tasks: a task's data is read like any other path, its checkpoints for callers that may have them verified.

A path counts as what it leads to, symlinks resolved. What has been opened is checked again by the name the kernel has for
it, so that a link exchanged in between gains nothing. Reads no contents.
"""

from __future__ import annotations

import os
import pwd
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from strata.coordinator.auth.principals import Forbidden, Principal
from strata.core.messages import shorten
from strata.errors import StrataError
from strata.launch.context import CHECKPOINTS_FOLDER, DATA_FOLDER

SYSTEM = ("/proc", "/sys", "/dev", "/etc", "/run/secrets", "/run/credentials")
"""Read for no caller, whatever is configured: `/var/run` leads to `/run`."""
SCHEMES = ("s3", "s3a", "gs", "gcs", "az", "azure")
ENV_FILE = ".env"
HOME_FOLDERS = ("/home", "/Users")
"""Each folder in them is a user's home, whether this machine can name them or not."""
HOW = (
    'An operator sets data_roots = ["/data", "s3://bucket/prefix"] under [coordinator], or STRATA_DATA_ROOTS.'
)
COUNT = "Or pass total_samples: then the coordinator reads nothing."


class PathRefused(Forbidden):
    """The coordinator does not read this for the caller."""

    def __init__(self, message: str, *, hint: str) -> None:
        super().__init__(message, status=403, hint=hint)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadScope:
    """What is read for one caller. Plain texts, so that it can be handed to another process; `resolved` there, where a
    file system that hangs holds up no other caller."""

    role: str
    roots: tuple[str, ...] = ()
    """Folders, and URLs of buckets."""
    private: tuple[str, ...] = ()
    """Files and folders of the coordinator itself."""
    homes: tuple[str, ...] = ()
    tasks: str = ""
    """The folder of the coordinator's own tasks."""
    checkpoints: bool = False
    """Whether this is for verifying checkpoints: those of the coordinator's own tasks are verified for any caller here."""

    def resolved(self) -> ReadScope:
        """The same with symlinks followed, as the checks need it."""
        return replace(
            self,
            roots=tuple(_resolved(root) for root in self.roots),
            private=tuple(os.path.realpath(path) for path in self.private),
            homes=_homes(),
            tasks=os.path.realpath(self.tasks) if self.tasks else "",
        )

    def check(self, path: str) -> None:
        """Refuse a path or URL that may not be read; a pattern by the folder it begins in."""
        text = path.removeprefix("file://")
        if "://" in text:
            self._check_url(text)
        else:
            self.check_resolved(os.path.realpath(_folder_of_pattern(text)), shown=path)

    def check_resolved(self, real: str, *, shown: str = "") -> None:
        """For a path without symlinks. `shown` is what the caller has named: where it leads is not for everyone."""
        name = shorten(shown or real, 200)
        if self.checkpoints and self._is_of_a_task(real, CHECKPOINTS_FOLDER):
            return
        is_env_file = os.path.basename(real) == ENV_FILE
        if self._is_of_a_task(real, DATA_FOLDER) and not is_env_file:
            self._require_admin(name)
            return
        if _is_inside(real, (*SYSTEM, *self.private)) or is_env_file:
            raise PathRefused(
                f"'{name}' is never read: it belongs to the system or to the coordinator itself.",
                hint="Put the data into a separate folder.",
            )
        if _is_inside(real, self.roots):
            return
        self._require_admin(name)
        if self._is_hidden(real):
            raise PathRefused(
                f"'{name}' is in a hidden folder of a home directory, which may hold credentials.",
                hint=f"Move the data, or name the folder. {HOW}",
            )

    def check_opened(self, fd: int, *, shown: str) -> None:
        """The same for a file that is open already: what was opened is what is checked."""
        try:
            real = os.readlink(f"/proc/self/fd/{fd}").removesuffix(" (deleted)")
        except OSError:
            real = os.path.realpath(shown)
        self.check_resolved(real, shown=shown)

    def _check_url(self, url: str) -> None:
        name = shorten(url, 200)
        scheme, _, rest = url.partition("://")
        if scheme not in SCHEMES:
            raise StrataError(
                f"'{name}' is not a location that data is read from.",
                hint="Use a path, or s3://, gs:// or az://.",
            )
        is_plain = not any(part in ("", ".", "..") for part in rest.rstrip("/").split("/"))
        if not (is_plain and _is_inside(url.rstrip("/"), self.roots)):
            self._require_admin(name)

    def _require_admin(self, name: str) -> None:
        if self.role == "admin":
            return
        if not self.roots:
            raise PathRefused(
                f"Only an admin may have the coordinator read '{name}': no data_roots are configured.",
                hint=f"{HOW} {COUNT}",
            )
        raise PathRefused(
            f"'{name}' is outside the data_roots of this coordinator, and only an admin may have it read.",
            hint=f"{HOW} {COUNT}",
        )

    def _is_of_a_task(self, real: str, kind: str) -> bool:
        if not self.tasks or not _is_inside(real, (self.tasks,)):
            return False
        return os.path.relpath(real, self.tasks).split("/")[1:2] == [kind]

    def _is_hidden(self, real: str) -> bool:
        for home in {*self.homes, *_home_above(real)}:
            if _is_inside(real, (home,)):
                below = os.path.relpath(real, home).split("/")
                if any(part.startswith(".") and part != "." for part in below):
                    return True
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadRules:
    """What the operator has decided, and what is the coordinator's own."""

    roots: tuple[str, ...] = ()
    """`data_roots`, as they are written."""
    private: tuple[Path, ...] = ()
    tasks: Path | None = None
    previews: bool = True

    def scope_of(self, caller: Principal, *, checkpoints: bool = False) -> ReadScope:
        """`checkpoints`: whether it is for verifying them, those of the coordinator's own tasks too."""
        return ReadScope(
            role=caller.role,
            roots=self.roots,
            private=tuple(str(path) for path in self.private),
            tasks=str(self.tasks) if self.tasks is not None else "",
            checkpoints=checkpoints,
        )


def problems_of_roots(roots: Iterable[str], private: Iterable[Path]) -> list[str]:
    """What is wrong with configured roots."""
    own = tuple(os.path.realpath(path) for path in private)
    problems = []
    for root in roots:
        if "://" in root:
            scheme, _, rest = root.partition("://")
            if scheme not in SCHEMES or not rest.strip("/"):
                problems.append(
                    f"data_roots: '{root}' is not a bucket; write s3://bucket/prefix, gs://… or az://…"
                )
        elif not os.path.isabs(os.path.expanduser(root)):
            problems.append(f"data_roots: '{root}' is not an absolute path")
        elif _is_inside(_resolved(root), (*SYSTEM, *own)):
            problems.append(
                f"data_roots: '{root}' belongs to the system or to the coordinator, and is never read"
            )
    return problems


def _resolved(root: str) -> str:
    return root.rstrip("/") if "://" in root else os.path.realpath(os.path.expanduser(root))


def _is_inside(path: str, roots: Iterable[str]) -> bool:
    return any(path == root or path.startswith(root.rstrip("/") + "/") for root in roots)


def _folder_of_pattern(text: str) -> str:
    """The part of a pattern before its first magic character, as a folder; a path that exists is none."""
    first = min((text.find(c) for c in "*?[" if c in text), default=-1)
    if first < 0 or os.path.lexists(text):
        return text
    return os.path.dirname(text[:first]) or "."


def _homes() -> tuple[str, ...]:
    named = {entry.pw_dir for entry in pwd.getpwall()} | {os.path.expanduser("~")}
    return tuple(sorted({os.path.realpath(home) for home in named if home.strip("/")} - {"/"}))


def _home_above(real: str) -> list[str]:
    return [
        f"{folder}/{real.removeprefix(folder + '/').partition('/')[0]}"
        for folder in HOME_FOLDERS
        if real.startswith(folder + "/")
    ]
