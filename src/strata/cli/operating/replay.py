"""`strata replay`: the history a journal holds."""

from __future__ import annotations

from typing import Annotated

import msgspec
import typer
from rich.text import Text

from strata.cli.common import DEFAULT_DATA_DIR, AsJson, DataDir, console, timestamp
from strata.coordinator.journal import codec
from strata.coordinator.journal.sqlite import read_story
from strata.core.event_text import describe
from strata.validation import nearest

STYLES = {"error": "bold red", "warning": "yellow", "success": "green"}
"""Of a kind's name, by severity."""


def replay(
    data_dir: DataDir = DEFAULT_DATA_DIR,
    json: AsJson = False,
    kind: Annotated[list[str] | None, typer.Option(help="Only events of this kind; may be repeated.")] = None,
    last: Annotated[int | None, typer.Option(min=1, help="Only the newest N.")] = None,
) -> None:
    """Print the events in the coordinator's journal. Safe beside a running coordinator."""
    for name in kind or ():
        if name not in codec.KINDS:
            raise typer.BadParameter(
                f"'{name}' is not a kind of event; {nearest(name, codec.KINDS)}", param_hint="--kind"
            )
    entries = [e for e in read_story(data_dir) if _wanted(codec.kind_of(e.event), kind)]
    for entry in entries[-last:] if last else entries:
        name = codec.kind_of(entry.event)
        if json:
            line = {"seq": entry.seq, "kind": name, "event": msgspec.to_builtins(entry.event)}
            typer.echo(msgspec.json.encode(line).decode())
            continue
        severity, text = describe(entry.event)
        at = timestamp(entry.event.at_s)
        console.print(
            Text.assemble(
                (f"{entry.seq:>7} ", "dim"),
                (f"{at}  ", "dim"),
                (f"{name:20}", STYLES.get(severity, "bold")),
                f" {text}",
            ),
            soft_wrap=True,
        )


def _wanted(name: str, kinds: list[str] | None) -> bool:
    """What agents agree on in values is no story unless one asks for it."""
    return (
        name in kinds
        if kinds
        else name
        not in (
            "RecordsForgotten",
            "ValueSwapped",
            "ValueDropped",
            "VersionsReserved",
        )
    )
