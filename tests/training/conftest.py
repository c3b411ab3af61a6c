"""Every test has a memory root of its own, which must be empty when it ends well."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def memory_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "memory"
    root.mkdir()
    monkeypatch.setenv("STRATA_MEMORY_ROOT", str(root))
    return root
