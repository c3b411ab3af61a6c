"""What can be checked without a browser: types, the reducer, formatting, forms, the simulation."""

from __future__ import annotations

from tests.dashboard.browser import npx


def test_types_agree() -> None:
    npx("tsc", "--noEmit")


def test_units() -> None:
    npx("vitest", "run", "--reporter=dot", "--pool=threads", "--maxWorkers=1")
