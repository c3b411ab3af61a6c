"""Settings of the data tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("strata", deadline=None)  # A busy machine is not a failure.
settings.load_profile("strata")


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Indexes that a test keeps are its own."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("STRATA_CACHE_DIR", str(folder))
    return folder
