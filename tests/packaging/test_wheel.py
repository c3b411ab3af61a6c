"""What is released: the same bytes from the same sources, and commands that work with what the package itself asks for."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
import subprocess
import tarfile
import urllib.request
import zipfile
from pathlib import Path

import pytest
import yaml

import strata
from tests.packaging.installation import ROOT, build, checkout, install
from tests.support import unpack

pytestmark = pytest.mark.timeout(900)  # The first test of a session builds and installs what the others use.

TRAINING = ("demo", "chaos", "torchrun train.py", "run train.py")
"""Commands that start training processes."""


@pytest.fixture(scope="session")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkout(tmp_path_factory.mktemp("sources") / "strata")


@pytest.fixture(scope="session")
def wheel(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", sources, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="session")
def sdist(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("sdist", sources, tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="session")
def bare(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment into which `pip install strata-runtime` was done: no torch, no Node."""
    return install(wheel, tmp_path_factory.mktemp("bare") / "environment")


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def run(programs: Path, words: str, *, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": f"{programs}{os.pathsep}{os.defpath}", "HOME": str(cwd), "LANG": "C.UTF-8"}
    return subprocess.run(
        [str(programs / "strata"), *words.split()],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


# --- the same bytes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_two_builds_of_the_same_sources_are_equal(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """On another day, in another folder, by somebody whose files nobody else may read."""
    first: Path = request.getfixturevalue(kind)
    elsewhere = checkout(tmp_path / "somewhere" / "else")
    for path in elsewhere.rglob("*"):
        path.chmod(path.stat().st_mode & 0o700)
        os.utime(path, (1_000_000_000, 1_000_000_000))
    second = build(kind, elsewhere, tmp_path / "built")
    assert (second.name, digest(second)) == (first.name, digest(first))


def test_the_time_of_the_release_is_that_of_its_files(sources: Path, tmp_path: Path) -> None:
    released = build("sdist", sources, tmp_path, SOURCE_DATE_EPOCH="1800000000")
    with tarfile.open(released) as archive:
        assert {member.mtime for member in archive} == {1_800_000_000}


def test_a_source_distribution_builds_the_same_wheel_without_node(
    sdist: Path, wheel: Path, tmp_path: Path
) -> None:
    with tarfile.open(sdist) as archive:
        unpack(archive, tmp_path)
    (unpacked,) = (path for path in tmp_path.iterdir() if path.is_dir())
    assert digest(build("wheel", unpacked, tmp_path / "built")) == digest(wheel)


def test_a_wheel_has_the_dashboard_the_types_and_nothing_of_a_checkout(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert {"strata/dashboard/index.html", "strata/py.typed", "elastic_harness/py.typed"} <= set(names)
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {
        "strata",
        "elastic_harness",
        "dtruntime",
    }
    assert names[-1].endswith(".dist-info/RECORD"), "where the format wants it"


# --- one version --------------------------------------------------------------------------------------------


def test_every_place_that_shows_a_version_shows_the_same(wheel: Path) -> None:
    assert wheel.name.startswith(f"strata_runtime-{strata.__version__}-")
    (newest, *_) = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert re.fullmatch(rf"{re.escape(strata.__version__)} - (unreleased|20\d\d-[01]\d-[0-3]\d)", newest)
    tags = {
        tag
        for path in [*ROOT.glob("deploy/kubernetes*/*.yaml"), ROOT / "README.md", *ROOT.glob("docs/**/*.md")]
        for tag in re.findall(r"\bstrata-(?:coordinator|worker):(\S+)", path.read_text())
    }
    kustomization = yaml.safe_load((ROOT / "deploy/kubernetes/kustomization.yaml").read_text())
    assert tags | {image["newTag"] for image in kustomization["images"]} == {strata.__version__}


# --- what an installation without extras can do ------------------------------------------------------------


def test_an_installation_without_extras_says_its_version_and_its_commands(bare: Path, tmp_path: Path) -> None:
    assert run(bare, "--version", cwd=tmp_path).stdout == f"strata {strata.__version__}\n"
    shown = run(bare, "--help", cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    missing = subprocess.run([str(bare / "python"), "-c", "import torch"], capture_output=True, text=True)
    assert "No module named 'torch'" in missing.stderr


@pytest.mark.parametrize("words", TRAINING)
def test_what_needs_an_extra_names_it_in_one_sentence(bare: Path, tmp_path: Path, words: str) -> None:
    (tmp_path / "train.py").write_text("print('never reached')")
    said = run(bare, words, cwd=tmp_path)
    assert said.returncode == 1
    assert re.fullmatch(
        r"error: .* needs the package 'torch', which is not installed\.\n"
        r"what to do: Install it with: pip install 'strata-runtime\[(torch|harness)\]'\n",
        said.stderr,
    ), said.stderr
    assert said.stdout == ""


def test_an_import_that_fails_in_the_middle_of_a_command_names_the_extra_too(
    bare: Path, tmp_path: Path
) -> None:
    said = run(bare, "bench checkpoint --quick", cwd=tmp_path)
    assert said.returncode == 1
    assert "Traceback" not in said.stderr
    assert "pip install 'strata-runtime[torch]'" in said.stderr


def test_the_coordinator_serves_its_api_and_dashboard_without_torch(bare: Path, tmp_path: Path) -> None:
    data_dir = tmp_path / "coordinator"
    with subprocess.Popen(
        [str(bare / "strata"), "serve", "--data-dir", str(data_dir), "--grpc-port=0", "--http-port=0"],
        cwd=tmp_path,
        env={"PATH": os.defpath, "HOME": str(tmp_path), "LANG": "C.UTF-8"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as coordinator:
        try:
            assert coordinator.stdout is not None
            said = list(itertools.takewhile(lambda line: "Ctrl-C stops" not in line, coordinator.stdout))
            assert coordinator.poll() is None, "".join(said)
            url = f"http://127.0.0.1:{json.loads((data_dir / 'serving.json').read_text())['http']}"
            assert run(bare, f"status --api {url}", cwd=tmp_path).returncode == 0
            with urllib.request.urlopen(url, timeout=30) as page:
                assert b'<div id="root">' in page.read()
        finally:
            coordinator.terminate()
    assert coordinator.returncode == 0


# --- with extras --------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_demonstration_runs_from_the_installed_wheel(wheel: Path, tmp_path: Path) -> None:
    programs = install(wheel, tmp_path / "environment", extras=["harness"])
    environment = {"PATH": f"{programs}{os.pathsep}{os.defpath}", "HOME": str(tmp_path), "LANG": "C.UTF-8"}
    done = subprocess.run(
        [str(programs / "strata"), "demo", "--once", "--steps", "200"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Verified" in done.stdout
    assert "recovered" in done.stdout
