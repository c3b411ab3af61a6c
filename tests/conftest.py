"""Fixtures for every test, and the watch over what tests leave behind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import Coordinator


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[Coordinator]:
    server = Coordinator(tmp_path / "coordinator").start()
    yield server
    server.stop()
