"""What can be checked without a browser: types, the reducer, formatting, forms, the simulation."""

from __future__ import annotations

import subprocess

from tests.dashboard.browser import ROOT, build_dashboard


def run(*command: str) -> None:
    node = build_dashboard.find_node(ROOT / ".venv" / "bin")
    assert node is not None
    build_dashboard.install_modules(node)
    said = subprocess.run(
        [str(node / "npx"), "--no-install", *command],
        cwd=build_dashboard.SOURCES,
        env={**build_dashboard.environment(node), "CI": "true"},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert said.returncode == 0, said.stdout + said.stderr


def test_types_agree() -> None:
    run("tsc", "--noEmit")


def test_units() -> None:
    run("vitest", "run", "--reporter=dot", "--pool=threads", "--maxWorkers=1")
