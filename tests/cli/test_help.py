"""Every help page shows its texts as they are written, and `--version` says the one version there is."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

import strata
from strata.cli.main import app

BRACKETED = re.compile(r"\[[^\[\]]+\]")
WIDE = {"COLUMNS": "500", "TERMINAL_WIDTH": "500"}
"""So that no text is broken across lines."""


def commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    yield path, command
    for name, inside in getattr(command, "commands", {}).items():
        yield from commands(inside, (*path, name))


PAGES = [(path, command) for path, command in commands(get_command(app)) if path != ("torchrun",)]
"""torchrun shows its own help."""


def page(*path: str) -> str:
    result = CliRunner().invoke(app, [*path, "--help"], env=WIDE)
    assert result.exit_code == 0, result.output
    return " ".join(result.output.split())


def texts(command: Any) -> Iterator[str]:
    yield command.help or ""
    for parameter in command.params:
        yield getattr(parameter, "help", None) or ""


@pytest.mark.parametrize(
    ("path", "command"), PAGES, ids=lambda value: " ".join(value) if isinstance(value, tuple) else ""
)
def test_a_help_page_swallows_nothing_that_stands_in_brackets(path: tuple[str, ...], command: Any) -> None:
    shown = page(*path)
    assert [word for text in texts(command) for word in BRACKETED.findall(text) if word not in shown] == []


@pytest.mark.parametrize("path", [path for path, _ in PAGES], ids=" ".join)
def test_the_usage_names_arguments_in_capitals_and_brackets_them_once(path: tuple[str, ...]) -> None:
    result = CliRunner().invoke(app, [*path, "--help"], env=WIDE)
    usage = next(line for line in result.output.splitlines() if "Usage:" in line)
    arguments = usage.partition("[OPTIONS]")[2]
    assert arguments == arguments.upper()
    assert not re.search(r"\[\[|\.\.\.[]}]", arguments)


@pytest.mark.parametrize(
    "group", [path for path, command in PAGES if hasattr(command, "commands")], ids=" ".join
)
def test_a_group_shows_the_first_line_of_each_of_its_commands(group: tuple[str, ...]) -> None:
    shown = page(*group)
    inside = [
        command
        for path, command in commands(get_command(app))
        if path[:-1] == group and path and not command.hidden
    ]
    assert inside
    for command in inside:
        assert (command.help or "").partition("\n")[0] in shown


def test_words_in_brackets_are_shown_where_rich_knows_them_as_styles() -> None:
    shown = page("serve")
    assert "TOML file with a [coordinator] table, and [notify]." in shown
    assert "What runs tasks: local, ray or none. [local]" in shown


@pytest.mark.parametrize("path", [path for path, _ in PAGES], ids=" ".join)
def test_a_help_page_is_the_same_for_every_user(path: tuple[str, ...]) -> None:
    shown = page(*path)
    assert str(Path.home()) not in shown
    assert "default: (" not in shown


def test_the_version_is_the_packages() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.output) == (0, f"strata {strata.__version__}\n")
