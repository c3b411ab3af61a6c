"""The fenced blocks of the documentation, and what is done with each of them.

A block's class comes from its language, or from a comment on the line before it:

    run                  python, bash, console    executed, in the order of the page (the default of these languages)
    run: A → B; C → D    python, bash, console    executed with B in place of A, for what would take long or needs more machines
    file: NAME           any                      written to the page's folder before anything runs; a later block uses it
    parse: REASON        python, bash, console    not executed, and why; compiled, or every command line in it parsed
    valid: KIND          yaml, toml, json         accepted by what reads such files
    rejected: KIND       yaml, toml, json         shown because it is wrong: refused by what reads such files
    output               text                     printed by the blocks before it, but for numbers and ids
    output: exact        text                     printed by the blocks before it
    sample: WHERE FROM   text                     an example of what something prints
    drawing              text                     nothing to execute

A block that is none of these is an error: nothing is skipped silently.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "ARCHITECTURE.md")),
    ROOT / "dashboard" / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
FENCE = re.compile(r"^(?P<indent> *)(?P<ticks>`{3,})(?P<language>[\w-]*) *$")
MARK = re.compile(r"^ *<!-- (?P<name>[a-z]+)(?:: (?P<about>.+))? -->$")

CODE = ("python", "bash", "console")
DATA = ("yaml", "toml", "json")
CLASSES = {
    "run": CODE,
    "file": (*CODE, *DATA),
    "parse": CODE,
    "valid": DATA,
    "rejected": DATA,
    "output": ("text",),
    "sample": ("text",),
    "drawing": ("text",),
}
NEED_A_REASON = ("file", "parse", "valid", "rejected", "sample")


class Unclassified(Exception):
    """A block without a class, or with one that does not fit its language."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    page: str
    line: int
    language: str
    text: str
    name: str
    """Its class."""
    about: str = ""

    @property
    def executed(self) -> str:
        """Its text as it is executed."""
        text = self.text
        for change in filter(None, self.about.split("; ")):
            shown, _, instead = change.partition(" → ")
            if not instead or shown not in text:
                raise Unclassified(f"{self.where}: there is no '{shown}' to be replaced, as in `run: A → B`")
            text = text.replace(shown, instead)
        return text

    @property
    def where(self) -> str:
        return f"{self.page}:{self.line}"

    def __str__(self) -> str:
        return f"{self.where}-{self.language}-{self.name}"


def blocks(page: str, text: str) -> Iterator[Block]:
    lines = text.splitlines()
    number = 0
    while number < len(lines):
        opening = FENCE.match(lines[number])
        if opening is None:
            number += 1
            continue
        closing = opening["indent"] + opening["ticks"]
        end = next((at for at in range(number + 1, len(lines)) if lines[at].rstrip() == closing), None)
        if end is None:
            raise Unclassified(f"{page}:{number + 1}: this block has no end")
        mark = MARK.match(lines[number - 1]) if number else None
        body = "\n".join(line.removeprefix(opening["indent"]) for line in lines[number + 1 : end]) + "\n"
        yield _classified(
            Block(
                page=page,
                line=number + 1,
                language=opening["language"],
                text=body,
                name=mark["name"] if mark else "run",
                about=(mark["about"] or "") if mark else "",
            )
        )
        number = end + 1


def _classified(block: Block) -> Block:
    languages = CLASSES.get(block.name)
    if not block.language:
        raise Unclassified(f"{block.where}: say which language this block is in (text for what is printed)")
    if languages is None:
        raise Unclassified(f"{block.where}: '{block.name}' is not one of {', '.join(CLASSES)}")
    if block.language not in languages:
        raise Unclassified(
            f"{block.where}: a block of {block.language} cannot be of the class '{block.name}'"
        )
    if block.name in NEED_A_REASON and not block.about:
        raise Unclassified(f"{block.where}: '{block.name}' needs to say more, as in `{block.name}: …`")
    return block


def of_page(path: Path) -> list[Block]:
    return list(blocks(path.relative_to(ROOT).as_posix(), path.read_text()))


def every() -> list[Block]:
    return [block for path in PAGES for block in of_page(path)]
