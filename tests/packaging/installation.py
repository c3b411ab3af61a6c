"""The package as users get it: built from a copy of the sources, installed into an environment of its own.

What the package depends on is not downloaded again: it is linked from the environment of the tests, distribution by
distribution, as the metadata of the wheel asks for it. What is not asked for is not there.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support_programs import program

ROOT = Path(__file__).parent.parent.parent
BUILD = (
    "import sys; sys.path.insert(0, 'scripts'); import build_backend; build_backend.build_{kind}(sys.argv[1])"
)


def checkout(target: Path) -> Path:
    """A copy of what is under version control, with the dashboard that the set-up has built."""
    listed = subprocess.run(
        [program("git"), "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    for name in listed.stdout.splitlines():
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, target / name)
    shutil.copytree(ROOT / "src/strata/dashboard", target / "src/strata/dashboard")
    return target


def build(kind: str, sources: Path, target: Path, **variables: str) -> Path:
    """A wheel or an sdist, by the hooks that pip calls. Without Node: the dashboard is there already."""
    target.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "PATH": os.defpath, "CI": "true", **variables}
    done = subprocess.run(
        [sys.executable, "-c", BUILD.format(kind=kind), str(target)],
        cwd=sources,
        env=environment,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (made,) = (path for path in target.iterdir() if path.suffix in (".whl", ".gz"))
    return made


def install(wheel: Path, target: Path, *, extras: Iterable[str] = ()) -> Path:
    """The folder of programs of a new environment that has the wheel and what it depends on, and nothing else."""
    venv.create(target, with_pip=False)
    python = target / "bin" / "python"
    (site,) = target.glob("lib/python3*/site-packages")
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "--python",
            str(python),
            "install",
            "--no-deps",
            "--no-index",
            str(wheel),
        ],
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (described,) = metadata.distributions(name="strata-runtime", path=[str(site)])
    for distribution in _closure(described, set(extras)):
        _link(distribution, site)
    return target / "bin"


def _closure(root: metadata.Distribution, extras: set[str]) -> list[metadata.Distribution]:
    found: dict[str, metadata.Distribution] = {}
    asked: set[tuple[str, str]] = set()
    waiting: list[tuple[metadata.Distribution, str]] = [(root, extra) for extra in {"", *extras}]
    while waiting:
        distribution, extra = waiting.pop()
        for text in distribution.requires or ():
            requirement = Requirement(text)
            name = canonicalize_name(requirement.name)
            if requirement.marker and not requirement.marker.evaluate({"extra": extra}):
                continue
            its = root if name == "strata-runtime" else metadata.distribution(name)
            if name != "strata-runtime":
                found[name] = its
            for wanted in {"", *requirement.extras}:
                if (name, wanted) not in asked:
                    asked.add((name, wanted))
                    waiting.append((its, wanted))
    return list(found.values())


def _link(distribution: metadata.Distribution, site: Path) -> None:
    tops = {path.parts[0] for path in distribution.files or () if path.parts[0] not in ("..", "__pycache__")}
    for top in tops:
        there = Path(str(distribution.locate_file(top)))
        if (site / top).is_symlink() or (site / top).is_dir():
            _merge(there, site / top)  # A namespace that several distributions share.
        elif there.exists():
            (site / top).symlink_to(there)


def _merge(there: Path, here: Path) -> None:
    if here.resolve() == there.resolve() or not there.is_dir():
        return
    if here.is_symlink():
        first = here.resolve()
        here.unlink()
        here.mkdir()
        for path in first.iterdir():
            (here / path.name).symlink_to(path)
    for path in there.iterdir():
        if not (here / path.name).exists():
            (here / path.name).symlink_to(path)
