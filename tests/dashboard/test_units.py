"""What can be checked without a browser: types, the reducer, formatting, forms, the simulation."""

from __future__ import annotations

import pytest

from tests.dashboard.browser import npx

pytestmark = pytest.mark.timeout(600)


def test_types_agree() -> None:
    npx("tsc", "--noEmit")


def test_units() -> None:
    npx("vitest", "run", "--reporter=dot", "--pool=threads", "--maxWorkers=1")
