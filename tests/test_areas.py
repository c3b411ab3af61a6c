"""`scripts/run_tests.py` runs every file of tests once, whatever the parts that areas are dealt out in."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RUNNER = runpy.run_path(str(ROOT / "scripts" / "run_tests.py"))


def test_every_file_is_in_one_part() -> None:
    dealt = [name for part in RUNNER["areas"]() for name in part.arguments]
    there = [str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(dealt) == sorted(there)


def test_what_is_large_is_an_area() -> None:
    assert {part.name.partition(" ")[0] for part in RUNNER["areas"](list(RUNNER["LONGEST"]))} == set(
        RUNNER["LONGEST"]
    )


def test_an_area_that_is_not_there_is_named_beside_those_that_are() -> None:
    with pytest.raises(ValueError, match=r"there is no area tests/none; there are: .*tests/data/tokens"):
        RUNNER["areas"](["tests/none"])
