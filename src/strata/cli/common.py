"""What all commands share: talking to the coordinator's API, printing tables or JSON, and help pages."""

from __future__ import annotations

import copy
import json
import os
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text
from typer.core import TyperGroup

from strata.api import DEFAULT_API as DEFAULT_API
from strata.api import Unreachable as Unreachable
from strata.api import delete as delete
from strata.api import events as events
from strata.api import get as get
from strata.api import get_facts as get_facts
from strata.api import get_rows as get_rows
from strata.api import post as post
from strata.api import post_facts as post_facts
from strata.api import printable as printable
from strata.config import environment, read_env_file
from strata.errors import StrataError

Api = Annotated[
    str,
    typer.Option(
        "--api",
        envvar="STRATA_API_URL",
        help="Address of the coordinator's HTTP API; several separated by commas.",
        show_default=True,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
DataDir = Annotated[
    Path,
    typer.Option(
        envvar="STRATA_DATA_DIR", help="The coordinator's data directory. [~/.strata]", show_default=False
    ),
]
DEFAULT_DATA_DIR = Path.home() / ".strata"

_WRAPPED = re.compile(r"(?<!\n)\n(?!\n)")
"""Where a docstring is wrapped within a paragraph: the terminal wraps it by itself."""
MIN_COLUMN = 10
"""To which a column of prose may shrink."""

console = Console(highlight=False)
errors = Console(stderr=True, highlight=False)


def adopt_dotenv(env_file: Path | None = None) -> None:
    """What a file that the user names says counts, below the environment; of a `.env` in the working directory what may be
    anybody's to say."""
    for name, value in (environment() if env_file is None else read_env_file(env_file)).items():
        os.environ.setdefault(name, value)


def print_json(value: object, *, in_one_line: bool = False) -> None:
    sys.stdout.write(json.dumps(value, indent=None if in_one_line else 2, ensure_ascii=False) + "\n")


def print_table(columns: Sequence[str], rows: Sequence[Sequence[object]], *, empty: str) -> None:
    """Cells are data, not markup: names from elsewhere are printed as they are. `>` stands before a column of numbers, `=`
    before one that is copied (ids, paths): it is neither broken nor shortened. Others are broken on a narrow terminal, and
    nothing where no terminal is: a line for each row."""
    if not rows:
        console.print(Text(empty, style="dim"))
        return
    table = Table(box=None, header_style="bold", pad_edge=False)
    cells = [[cell if isinstance(cell, Text) else Text(str(cell)) for cell in row] for row in rows]
    least = 0
    for number, column in enumerate(columns):
        name, is_copied = column.lstrip(">="), column.startswith("=")
        widest = max(len(name), *(row[number].cell_len for row in cells))
        kept = widest if is_copied or not console.is_terminal else min(widest, MIN_COLUMN)
        least += kept + 2
        table.add_column(
            name,
            justify="right" if column.startswith(">") else "left",
            overflow="fold",
            no_wrap=kept == widest,
            min_width=kept,
        )
    for row in cells:
        table.add_row(*row)
    before = console.width
    try:
        console.width = max(
            before, least
        )  # Rich takes columns away that do not fit, whatever width it is asked for.
        console.print(table, crop=False, soft_wrap=False)
    finally:
        console.width = before


def say_error(error: StrataError) -> None:
    errors.print(Text.assemble(("error: ", "bold red"), error.message), soft_wrap=True)
    hint = getattr(error, "command_hint", "") or error.hint
    if hint:
        errors.print(Text.assemble(("what to do: ", "bold"), hint), soft_wrap=True)


def ago(at_s: float, now_s: float | None = None) -> str:
    return duration(max(0.0, (time.time() if now_s is None else now_s) - at_s)) + " ago"


def timestamp(at_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at_s))


def duration(seconds: float) -> str:
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 172_800 else f"{seconds / 86_400:.1f} d"


def size(count: float) -> str:
    for unit in ("B", "KB", "MB", "GB", "TB"):
        if count < 1000 or unit == "TB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError("unreachable")


STATUS_STYLES = {
    "active": "green",
    "training": "green",
    "completed": "green",
    "complete": "green",
    "running": "green",
    "failed": "bold red",
    "broken": "bold red",
    "waiting": "yellow",
    "in_progress": "yellow",
    "recovering": "yellow",
    "pending": "yellow",
}


def styled(status: str) -> Text:
    return Text(status, style=STATUS_STYLES.get(status, ""))


class LiteralGroup(TyperGroup):
    """For `typer.Typer(cls=LiteralGroup)`: help pages, of the group and of the commands directly in it, that show their
    texts as they are written. Typer renders help through rich, which takes `[coordinator]` for a style and swallows it;
    what is escaped is a copy, made when a page is shown. Paragraphs are wrapped by the terminal, not where the source is."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        command = super().get_command(ctx, cmd_name)
        # A group inside shows itself and its commands in the same way.
        return command if command is None or isinstance(command, LiteralGroup) else _escaped(command)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        TyperGroup.format_help(_escaped(self), ctx, formatter)


def _escaped(command: Any) -> Any:
    shown = copy.copy(command)
    shown.params = [copy.copy(parameter) for parameter in command.params]
    for each in (shown, *shown.params):
        for name in ("help", "short_help", "epilog"):
            text = getattr(each, name, None)
            if text:
                setattr(each, name, escape(_WRAPPED.sub(" ", text)))
    return shown
