"""Settings of the data tests."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Indexes that a test keeps are its own."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("STRATA_CACHE_DIR", str(folder))
    return folder
