"""Help pages that show their texts as they are written: what stands in brackets is text, never markup.

Typer renders help through rich, which takes `[coordinator]` for a style and swallows it. The texts of the commands
themselves stay as they are: what is escaped is a copy, made when a page is shown.
"""

from __future__ import annotations

import copy
from typing import Any  # Typer's commands are click's in older versions and its own in newer ones.

from rich.markup import escape
from typer.core import TyperGroup


class LiteralGroup(TyperGroup):
    """For `typer.Typer(cls=LiteralGroup)`: holds for the group and for the commands directly in it."""

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
                setattr(each, name, escape(text))
    return shown
