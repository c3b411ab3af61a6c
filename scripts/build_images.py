"""Build the container images of deploy/docker without a container engine, and run the coordinator's.

`make images` needs root, and buildah from Debian. Both images are built as the Dockerfiles say; then the coordinator is
started from its image as its own user: it must refuse to start without a token, and with one answer its health check and
serve the dashboard. `--from-debian` makes the base image out of Debian's packages, where no registry can be reached. How
this machine reaches packages (pip's, npm's and apt's configuration, certificates) is lent to the build and does not end up
in an image. Needs only Python's standard library.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import secrets
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import programs
import progress

ROOT = Path(__file__).resolve().parent.parent
DOCKER = ROOT / "deploy" / "docker"
IMAGES = ("coordinator", "worker")
BASE = "docker.io/library/python:3.11-slim-bookworm"
"""What the Dockerfiles start from."""
BASE_PACKAGES = "python3,python3-venv,python-is-python3,ca-certificates"
START_S = 300.0
"""Patience with a program in an image on a busy machine."""
HOME = Path("/root")
"""Of whoever builds, inside of a build."""


class CannotBuild(Exception):
    """What happened, and what to do about it."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "images", nargs="*", metavar="IMAGE", help=f"{' or '.join(IMAGES)}; both when left out."
    )
    parser.add_argument(
        "--from-debian", action="store_true", help="Make the base image from Debian's packages."
    )
    parser.add_argument("--storage", type=Path, help="Where images are kept, instead of buildah's own place.")
    arguments = parser.parse_args()
    if unknown := set(arguments.images) - set(IMAGES):
        parser.error(f"there is no image {', '.join(sorted(unknown))}; there are {' and '.join(IMAGES)}")
    try:
        build_all(arguments.images or IMAGES, storage=arguments.storage, from_debian=arguments.from_debian)
    except (CannotBuild, progress.ToolFailed) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def build_all(images: tuple[str, ...] | list[str], *, storage: Path | None, from_debian: bool) -> None:
    if os.geteuid() != 0:
        raise CannotBuild(
            "Only root can build images without an engine. With Docker: see docs/operating/deploying.md"
        )
    buildah = Buildah(storage)
    steps: list[tuple[str, Callable[[progress.Step], str]]] = []
    if from_debian and not buildah.has(BASE):
        steps.append(("base image from Debian's packages", lambda _: make_base(buildah)))
    steps += [(f"strata-{image}", partial(buildah.build, image, pull=not from_debian)) for image in images]
    if "coordinator" in images:
        steps.append(("the coordinator runs from its image", lambda _: check_coordinator(buildah)))
    if "worker" in images:
        steps.append(("torchrun runs from the worker's image", lambda _: check_worker(buildah)))
    for number, (title, act) in enumerate(steps, start=1):
        with progress.Step(title, number=number, count=len(steps)) as step:
            step.state = act(step)


class Buildah:
    """The commands of buildah that are used here, with isolation that needs neither an engine nor namespaces."""

    def __init__(self, storage: Path | None) -> None:
        found = programs.find("buildah")
        if found is None:
            raise CannotBuild("buildah is missing. Install it: apt-get install buildah")
        # This driver works on every file system, where overlays do not.
        self._command = [found, "--storage-driver", os.environ.get("STORAGE_DRIVER", "vfs")]
        if storage is not None:
            self._command += ["--root", str(storage / "images"), "--runroot", str(storage / "run")]
        self._environment = {**os.environ, "BUILDAH_ISOLATION": "chroot"}
        self._log = Path(tempfile.gettempdir()) / f"strata-images-{os.getpid()}.log"

    def build(self, image: str, step: progress.Step, *, pull: bool) -> str:
        """How large it is."""
        dockerfile = DOCKER / f"Dockerfile.{image}"

        def watch(line: str) -> None:
            if match := re.search(r"STEP (\d+)/(\d+)", line):
                step.state = f"instruction {match[1]} of {match[2]}"

        progress.run(
            [
                *self._command,
                "bud",
                "--network=host",
                "--format=docker",  # The other one has no health checks.
                "--pull" if pull else "--pull-never",
                *(f"--volume={mount}" for mount in lent_files()),
                f"--ignorefile={dockerfile}.dockerignore",
                f"--file={dockerfile}",
                f"--tag=strata-{image}",
                str(ROOT),
            ],
            log=self._log,
            watch=watch,
            env=self._environment,
        )
        return f"{self.size_bytes(f'strata-{image}') / 1e6:,.0f} MB"

    def ask(self, *arguments: str) -> str:
        done = subprocess.run(
            [*self._command, *arguments], env=self._environment, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise CannotBuild(f"'buildah {arguments[0]}' failed: {done.stderr.strip()}")
        return done.stdout.strip()

    def has(self, image: str) -> bool:
        return bool(self.ask("images", "--quiet", "--filter", f"reference={image}"))

    def size_bytes(self, image: str) -> int:
        """Of the files that a container of it starts with."""
        with self.container(image) as name:
            root = Path(self.ask("mount", name))
            return sum(path.lstat().st_size for path in root.rglob("*") if not path.is_symlink())

    @contextmanager
    def container(self, image: str) -> Iterator[str]:
        name = self.ask("from", "--pull-never", image)
        try:
            yield name
        finally:
            self.ask("rm", name)

    def start(self, container: str, *command: str, environment: dict[str, str]) -> subprocess.Popen[str]:
        """As an engine would: with the image's user, environment and folder."""
        variables = [f"--env={name}={value}" for name, value in environment.items()]
        return subprocess.Popen(
            [*self._command, "run", "--network=host", *variables, container, "--", *command],
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def configuration(self, image: str) -> dict[str, object]:
        found: dict[str, object] = json.loads(self.ask("inspect", "--type=image", image))["Docker"]["config"]
        return found


def make_base(buildah: Buildah) -> str:
    """Debian with its own Python 3.11, under the name of the image that the Dockerfiles start from."""
    debootstrap = programs.find("debootstrap")
    if debootstrap is None:
        raise CannotBuild("debootstrap is missing. Install it: apt-get install debootstrap")
    name = buildah.ask("from", "scratch")
    try:
        root = buildah.ask("mount", name)
        progress.run(
            [debootstrap, "--variant=minbase", f"--include={BASE_PACKAGES}", "bookworm", root],
            log=Path(tempfile.gettempdir()) / f"strata-base-{os.getpid()}.log",
        )
        buildah.ask("commit", "--quiet", name, BASE)
        return "done"
    finally:
        buildah.ask("rm", name)


def lent_files() -> list[str]:
    """How packages are reached, as `host:container:ro`: files and folders of configuration that this machine has, and the
    local folders that pip looks into."""
    home = Path.home()
    lent = {
        Path("/etc/pip.conf"): Path("/etc/pip.conf"),
        home / ".config/pip/pip.conf": HOME / ".config/pip/pip.conf",
        Path("/etc/npmrc"): Path("/etc/npmrc"),
        home / ".npmrc": HOME / ".npmrc",
        Path("/etc/apt/apt.conf.d"): Path("/etc/apt/apt.conf.d"),
        Path("/etc/apt/sources.list.d"): Path("/etc/apt/sources.list.d"),
        Path("/etc/ssl/certs"): Path("/etc/ssl/certs"),
    }
    settings = [path.read_text() for path in lent if path.name == "pip.conf" and path.is_file()]
    local = set(re.findall(r"(?:(?<==)|(?<=\s)|(?<=file://))/[^\s:]+", " ".join(settings)))
    # The files of a package index lie beside its pages.
    folders = [path.parent if path.name == "simple" else path for path in map(Path, sorted(local))]
    lent |= {path: path for path in folders if path.is_dir()}
    return [f"{here}:{there}:ro" for here, there in lent.items() if here.exists()]


def check_coordinator(buildah: Buildah) -> str:
    """What it answered. It runs as an engine runs it, except that its network and processes are this machine's."""
    configuration = buildah.configuration("strata-coordinator")
    command = [*_words(configuration["Entrypoint"]), *_words(configuration["Cmd"])]
    http_port, grpc_port = _free_ports(2)
    environment = {"STRATA_HTTP_PORT": str(http_port), "STRATA_GRPC_PORT": str(grpc_port)}
    with buildah.container("strata-coordinator") as name:
        refused = buildah.start(name, *command, environment=environment)
        said = _output(refused)
        if refused.returncode == 0 or "token" not in said:
            raise CannotBuild(f"Without a token the coordinator should refuse to start. It said: {said}")
        environment["STRATA_TOKEN"] = secrets.token_hex(32)
        running = buildah.start(name, *command, environment=environment)
        try:
            api = f"http://127.0.0.1:{http_port}"
            health = _fetch_when_ready(f"{api}/api/health", running)
            probing = buildah.start(name, *_probe(configuration), environment=environment)
            said = _output(probing)
            if probing.returncode:
                raise CannotBuild(f"The image's health check fails: {said}")
            if '<div id="root">' not in _fetch(api):
                raise CannotBuild("The image has no dashboard.")
            _fetch(f"{api}/api/dashboard", expected=401)  # Not without the token.
        finally:
            running.terminate()
            _output(running)
    return f"{json.loads(health)['status']}, with dashboard"


def check_worker(buildah: Buildah) -> str:
    with buildah.container("strata-worker") as name:
        configuration = buildah.configuration("strata-worker")
        asked = buildah.start(name, *_words(configuration["Entrypoint"]), "--help", environment={})
        said = _output(asked)
        if asked.returncode or "--rdzv-backend" not in said.replace("_", "-"):
            raise CannotBuild(f"torchrun does not start in the worker's image: {said}")
        script = "import torch, obstore, omegaconf, elastic_harness.train, strata; print(torch.__version__)"
        imported = buildah.start(name, "python", "-c", script, environment={})
        said = _output(imported)
        if imported.returncode:
            raise CannotBuild(f"The worker's image lacks something: {said}")
        return f"torch {said.strip().splitlines()[-1]}"


def _output(process: subprocess.Popen[str]) -> str:
    """All it said until it ended. One that does not end is ended, and that is an error."""
    try:
        said, _ = process.communicate(timeout=START_S)
    except subprocess.TimeoutExpired as error:
        process.kill()
        said, _ = process.communicate()
        raise CannotBuild(f"A program did not end within {START_S:.0f} s. It said: {said}") from error
    return said


def _words(value: object) -> list[str]:
    return [str(word) for word in value] if isinstance(value, list) else []


def _probe(configuration: dict[str, object]) -> list[str]:
    healthcheck = configuration.get("Healthcheck")
    if not isinstance(healthcheck, dict):
        raise CannotBuild("The coordinator's image has no health check.")
    return _words(healthcheck["Test"])[1:]  # The first word is CMD.


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


def _fetch(url: str, *, expected: int = 200) -> str:
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            status, text = answer.status, str(answer.read(), "utf-8")
    except urllib.error.HTTPError as error:
        status, text = error.code, str(error.read(), "utf-8")
    if status != expected:
        raise CannotBuild(f"{url} answered {status} instead of {expected}: {text[:200]}")
    return text


def _fetch_when_ready(url: str, process: subprocess.Popen[str]) -> str:
    deadline_s = time.monotonic() + START_S
    while True:
        try:
            return _fetch(url)
        except (urllib.error.URLError, ConnectionError) as error:
            if process.poll() is not None or time.monotonic() > deadline_s:
                process.terminate()
                said = _output(process)
                raise CannotBuild(f"The coordinator does not answer ({error}). It said: {said}") from error
        time.sleep(0.1)


if __name__ == "__main__":
    sys.exit(main())
