"""The local store keeps every promise of a store, on a disk and on tmpfs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.stores.conformance import StoreConformance
from tests.stores.suite import Place, each_file


class _OnDirectory(StoreConformance):
    kill_rounds = 15

    def unfinished(self, place: Place) -> list[str]:
        return [
            name
            for name in each_file(Path(place.url.removeprefix("file://")))
            if name.startswith(".strata/tmp")
        ]


class TestLocalStoreOnDisk(_OnDirectory):
    shows_half_writes = True

    @pytest.fixture
    def place(self, tmp_path: Path) -> Place:
        return Place(url=f"file://{tmp_path}/values")


class TestLocalStoreOnTmpfs(_OnDirectory):
    large_bytes = 18 << 20
    kill_rounds = 4

    @pytest.fixture
    def place(self, shm_folder: Path) -> Place:
        return Place(url=f"file://{shm_folder}/values")
