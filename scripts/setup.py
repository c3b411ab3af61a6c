"""Make the virtual environment and see to what else the commands need. Needs only Python and its standard library.

Python packages come pinned from constraints.txt; the dashboard is built when its sources have changed. With `--tests`,
programs that tests use are installed as Debian packages where this user may do that; otherwise it says what is missing
and which tests are left out. With CI=true a missing part is a failure.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path

import build_dashboard

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
STAMP = VENV / ".installed"
OLDEST = (3, 11)


@dataclass(frozen=True)
class Program:
    name: str
    package: str
    tests: str


TEST_PROGRAMS = (
    Program("etcd", "etcd-server", "tests of rendezvous through etcd (marker: etcd)"),
    Program("strace", "strace", "tests that make fsync fail (marker: strace)"),
    Program("chromium", "chromium", "tests of the dashboard in a browser (marker: browser)"),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tests", action="store_true", help="also see to the programs that tests use")
    arguments = parser.parse_args()
    if sys.version_info < OLDEST:
        return fail(
            f"Strata needs Python {OLDEST[0]}.{OLDEST[1]} or newer; this is {sys.version.split()[0]}.",
            "Install a newer one and run: make PYTHON=/path/to/python3.11",
        )
    if not sys.platform.startswith("linux"):
        print("note: Strata is made for Linux; shared memory and direct I/O are not available here.")
    install_packages()
    status = build_the_dashboard()
    return (install_programs() if arguments.tests else 0) or status


def install_packages() -> None:
    wanted = fingerprint()
    if STAMP.exists() and STAMP.read_text() == wanted:
        return
    if not (VENV / "bin" / "python").exists():
        print("Making the virtual environment in .venv …", flush=True)
        venv.create(VENV, with_pip=True)
    print("Installing the pinned packages (a few minutes the first time) …", flush=True)
    command = [VENV / "bin" / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*command, "-c", "constraints.txt", "-e", ".[dev]"], cwd=ROOT, check=True)
    STAMP.write_text(wanted)


def build_the_dashboard() -> int:
    if not build_dashboard.is_current() and build_dashboard.find_node(VENV / "bin") is None:
        print("Installing Node from PyPI, since this machine has none …", flush=True)
        command = [VENV / "bin" / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*command, build_dashboard.NODE_PACKAGE], cwd=ROOT, check=False)
    try:
        build_dashboard.build(bin_folder=VENV / "bin")
    except build_dashboard.CannotBuild as error:
        if os.environ.get("CI") == "true":
            return fail("The dashboard could not be built.", str(error))
        print(f"missing: the dashboard. {error}")
    return 0


def fingerprint() -> str:
    digest = hashlib.sha256(sys.version.encode())
    for name in ("pyproject.toml", "constraints.txt", "setup.py", "src/strata/checkpoint/stream.c"):
        digest.update((ROOT / name).read_bytes())
    return digest.hexdigest()


def install_programs() -> int:
    missing = [program for program in TEST_PROGRAMS if shutil.which(program.name) is None]
    apt = apt_command()
    if missing and apt:
        names = [program.package for program in missing]
        print(f"Installing Debian packages: {', '.join(names)} …", flush=True)
        quiet = {"stdout": subprocess.DEVNULL, "env": {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}}
        subprocess.run([*apt, "update", "-qq"], check=False, **quiet)
        subprocess.run([*apt, "install", "-y", "-qq", *names], check=False, **quiet)
        missing = [program for program in TEST_PROGRAMS if shutil.which(program.name) is None]
    for program in missing:
        print(f"missing: {program.name} (Debian package {program.package}). Left out: {program.tests}.")
    if missing and os.environ.get("CI") == "true":
        return fail("With CI=true every part must be there.", "Install the packages named above.")
    return 0


def apt_command() -> list[str] | None:
    if shutil.which("apt-get") is None:
        return None
    if os.geteuid() == 0:
        return ["apt-get"]
    if shutil.which("sudo") and subprocess.run(["sudo", "-n", "true"], capture_output=True).returncode == 0:
        return ["sudo", "-n", "apt-get"]
    return None


def fail(what: str, next_step: str) -> int:
    print(f"error: {what}\nwhat to do: {next_step}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
