"""A page of the documentation followed from top to bottom, as a reader would."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from tests.docs.blocks import PAGES, ROOT, of_page
from tests.docs.session import session

TUTORIALS = ROOT / "docs" / "tutorials"
CONCEPTS = ROOT / "docs" / "concepts"
OPERATING = ROOT / "docs" / "operating"
USED = ("curl", "etcdctl", "openssl")
"""Programs that blocks call, which not every machine has."""


def executed_pages() -> list[Path]:
    return [page for page in PAGES if any(block.name == "run" for block in of_page(page))]


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def follow(page: Path, folder: Path, program: Callable[[str], str]) -> None:
    """Its files are written, its blocks are executed, and what it shows as output is what they have said."""
    found = of_page(page)
    runs = [block for block in found if block.name == "run"]
    text = "\n".join(block.text for block in runs)
    for name in USED:
        if re.search(rf"\b{name}\b", text):
            program(name)
    if "s3" in text:
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
