"""How docstrings of this project name parameters, for the reference: lines of `name: what it is` become a list."""

from __future__ import annotations

import re
from typing import Any

import griffe

NAMED = re.compile(r"^(?P<names>[a-z_]+(?:, [a-z_]+)*): (?P<about>.+)$")


class ParametersAsLists(griffe.Extension):
    """Changes how docstrings read, not what they say."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = as_lists(obj.docstring.value)


def as_lists(text: str) -> str:
    return "\n\n".join(map(_as_list, text.split("\n\n")))


def _as_list(paragraph: str) -> str:
    """A paragraph whose every line names something, or continues the line before it by being indented."""
    lines = paragraph.splitlines()
    if not lines or not NAMED.match(lines[0]):
        return paragraph
    if not all(NAMED.match(line) or line.startswith("    ") for line in lines):
        return paragraph
    return "\n".join(
        f"- {names(found['names'])}: {found['about']}" if (found := NAMED.match(line)) else line
        for line in lines
    )


def names(text: str) -> str:
    return ", ".join(f"`{name}`" for name in text.split(", "))
