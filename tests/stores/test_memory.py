"""The memory store keeps every promise of a store, and gives memory back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from strata.stores.memory import MemoryStore
from tests.stores.conformance import Place, StoreConformance, each_file


class TestMemoryStore(StoreConformance):
    @pytest.fixture
    def place(self, job_name: str) -> Iterator[Place]:
        yield Place(url=f"memory://{job_name}")
        MemoryStore(job_name).release()

    def leftovers(self, place: Place) -> list[str]:
        root = MemoryStore(place.url.removeprefix("memory://")).root
        return [name for name in each_file(Path(root)) if name.startswith(".strata/tmp")]
