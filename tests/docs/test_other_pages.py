"""README.md, CONTRIBUTING.md and every page without a file of its own here can be followed from top to bottom."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.docs.following import CONCEPTS, OPERATING, TUTORIALS, executed_pages, follow, name_of


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "page",
    [page for page in executed_pages() if page.parent not in (TUTORIALS, CONCEPTS, OPERATING)],
    ids=name_of,
)
def test_a_page_can_be_followed_from_top_to_bottom(
    page: Path, tmp_path: Path, program: Callable[[str], str]
) -> None:
    follow(page, tmp_path, program)
