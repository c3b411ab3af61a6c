"""A page of README.md or docs/ followed from top to bottom, as a reader would."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from tests.docs.blocks import PAGES, ROOT, of_page
from tests.docs.session import session

TUTORIALS = ROOT / "docs" / "tutorials"
CONCEPTS = ROOT / "docs" / "concepts"


def executed_pages() -> list[Path]:
    return [page for page in PAGES if any(block.name == "run" for block in of_page(page))]


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def follow(page: Path, folder: Path, program: Callable[[str], str]) -> None:
    """Its files are written, its blocks are executed, and what it shows as output is what they have said."""
    found = of_page(page)
    runs = [block for block in found if block.name == "run"]
    if any(re.search(r"\bcurl\b", block.text) for block in runs):
        program("curl")
    if any("s3" in block.text for block in runs):
        program("weed")
    with session(name_of(page), runs, folder) as running:
        for block in found:
            if block.name == "file":
                running.write(block)
        for block in found:
            if block.name == "run":
                running.run(block)
            elif block.name == "output":
                running.expect(
                    block.text.strip().splitlines(), where=block.where, exact=block.about == "exact"
                )
