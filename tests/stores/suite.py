"""What the parts of the conformance suite share: a place to open stores at, and what is known about each kind."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from strata.stores import Store, open_store


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    url: str
    options: dict[str, Any] = field(default_factory=dict)


SOAK = int(os.environ.get("STRATA_SOAK", "1"))
"""How many times longer than usual the random tests run; their seed is `STRATA_SEED`."""


class StoreSuite:
    """A subclass gives a `place` fixture: a fresh place that `open_store` opens, here and in other processes. The sizes
    say when that store goes from one request or write to many."""

    large_bytes = 40 << 20
    kill_rounds = 12
    threads_in_race = 8
    processes_in_race = 4
    machine_examples = 25
    shows_half_writes = False
    """Whether `unfinished` can be seen: then writers are killed until one was caught half-way."""

    @pytest.fixture
    def place(self) -> Place:
        raise NotImplementedError

    @pytest.fixture
    def store(self, place: Place) -> Store:
        return self.open(place)

    def open(self, place: Place) -> Store:
        return open_store(place.url, **place.options)

    def unfinished(self, place: Place) -> list[str]:
        """What aborted or dead writers have left behind, if this can be seen."""
        return []


def each_file(root: os.PathLike[str]) -> Iterator[str]:
    for folder, _, names in os.walk(root):
        for name in names:
            yield os.path.relpath(os.path.join(folder, name), root)
