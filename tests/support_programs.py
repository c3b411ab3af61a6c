"""The external programs that tests run: only those that `scripts/programs.py` declares, and where they are."""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

import programs as programs  # noqa: E402


def program(name: str) -> str:
    """The path of a declared program. Where it is missing the test is skipped; in CI it fails, unless it is optional."""
    declared = programs.DECLARED[name]
    found = _find(name)
    if found is not None:
        return found
    missing = f"needs {name} ({declared.origin})"
    if os.environ.get("CI") == "true" and declared.is_promised:
        pytest.fail(f"{missing}: in CI it must be there. Run: make setup-test")
    pytest.skip(missing)


@functools.cache
def _find(name: str) -> str | None:
    return programs.find(name)


def require_root(what: str) -> None:
    """For tests of what only root may do. In CI they are not left out."""
    if os.geteuid() != 0:
        if os.environ.get("CI") == "true":
            pytest.fail(f"needs root: {what}")
        pytest.skip(f"needs root: {what}")
