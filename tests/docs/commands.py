"""Command lines from the documentation: found in shell text, and parsed by the programs they call, without running them.

    python -m tests.docs.commands strata serve --host 0.0.0.0

ends with status 0 if the real command line accepts the words.
"""

from __future__ import annotations

import functools
import os
import re
import shlex
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
ELLIPSES = ("…", "...")
"""Stand for what the reader fills in."""
_ENDS = {"&&", "||", "|", ";", "&"}
_REDIRECTS = re.compile(r"[<>]")


class Refused(Exception):
    """The program does not accept these words."""


def command_lines(shell: str) -> Iterator[list[str]]:
    """The simple commands of a piece of shell, as words. Here-documents are no commands."""
    text = re.sub(r"<<'?(\w+)'?\n.*?\n\1\n", "\n", shell, flags=re.DOTALL)
    text = re.sub(r"\\\n\s*", " ", text)
    for line in text.splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars="&|;<>")
        lexer.whitespace_split = True
        lexer.commenters = "#"
        words: list[str] = []
        for word in lexer:
            if word in _ENDS:
                yield from _simple(words)
                words = []
            else:
                words.append(word)
        yield from _simple(words)


def _simple(words: list[str]) -> Iterator[list[str]]:
    """Without assignments before it and redirections after it."""
    while words and re.match(r"\w+=", words[0]):
        words = words[1:]
    end = next((at for at, word in enumerate(words) if _REDIRECTS.search(word)), len(words))
    words = [word for word in words[:end] if word not in ELLIPSES]
    if words:
        yield words


def parse(words: list[str]) -> None:
    """Refuse what the program would refuse. Programs that are not ours are taken at their word, torchrun excepted."""
    match words:
        case ["strata", "torchrun", *rest]:
            _torchrun(rest, ours=True)
        case ["strata", *rest]:
            _strata(rest)
        case ["torchrun", *rest]:
            _torchrun(rest, ours=False)
        case ["make", *rest]:
            _make(rest)
        case ["pip", "install", *rest]:
            _extras(rest)
        case [program, *_] if program.startswith("./"):
            if not (ROOT / program).is_file():
                raise Refused(f"{program} does not exist")


@functools.cache
def _command_line() -> Any:
    import typer

    from strata.cli.main import app

    return typer.main.get_command(app)


def _strata(words: list[str]) -> None:
    command = _command_line()
    options = {name for option in command.params for name in option.opts}
    while words and words[0] in options:  # Those of `strata` itself, each with a value.
        words = words[2:]
        if words in ([], ["…"]):
            return
    while hasattr(command, "commands"):
        if not words or words[0] not in command.commands:
            raise Refused(f"strata has no command '{' '.join(words[:1])}'")
        name, *words = words
        command = command.commands[name]
    try:
        command.make_context(name, list(words))
    except Exception as error:  # Whatever the command line calls a wrong call.
        raise Refused(f"strata {name} {shlex.join(words)}: {getattr(error, 'message', error)}") from error


def is_command(words: list[str]) -> bool:
    """Whether the words name a command or a family of commands, and say no more."""
    command = _command_line()
    for word in words:
        command = getattr(command, "commands", {}).get(word)
        if command is None:
            return False
    return True


def _torchrun(words: list[str], *, ours: bool) -> None:
    from torch.distributed.run import get_args_parser

    from strata.launch.arguments import parse as parse_ours

    if all(word.startswith("-") for word in words):
        words = [*words, "train.py"]  # The reader's.
    before = dict(os.environ)
    try:
        if ours:
            parse_ours(words)
        else:
            get_args_parser().parse_args(words)
    except SystemExit as error:
        raise Refused(f"torchrun {shlex.join(words)}") from error
    finally:  # The parser prepares the environment of what it would start.
        os.environ.clear()
        os.environ.update(before)


def _make(words: list[str]) -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    unknown = [word for word in words if "=" not in word and word not in targets]
    if unknown:
        raise Refused(f"the Makefile has no target {', '.join(unknown)}")


def _extras(words: list[str]) -> None:
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    asked = re.findall(r"strata-runtime\[([\w,]+)\]", " ".join(words))
    unknown = {extra for extras in asked for extra in extras.split(",")} - set(known)
    if unknown:
        raise Refused(f"the package has no extra {', '.join(sorted(unknown))}")


if __name__ == "__main__":
    try:
        parse(sys.argv[1:])
    except Refused as error:
        sys.exit(f"refused: {error}")
