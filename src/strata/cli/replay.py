"""`strata replay`: the history a journal holds."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.text import Text

from strata.cli.common import AsJson, console
from strata.coordinator.journal import codec
from strata.coordinator.journal.sqlite import read_story
from strata.core.messages import (
    BarrierArrived,
    BarrierBroken,
    BarrierReleased,
    CheckpointCompleted,
    CheckpointFailed,
    CheckpointRemoved,
    CheckpointStarted,
    CountersRestored,
    DatasetRegistered,
    Event,
    RecoveryRecorded,
    ShardsMoved,
    TaskChanged,
    TaskCreated,
    TaskProgressed,
    ValueDropped,
    ValueRefreshed,
    ValueSwapped,
    VersionsReserved,
    WorkerFailed,
    WorkerForgotten,
    WorkerJoined,
    WorkerLeft,
)
from strata.validation import nearest

DEFAULT_DATA_DIR = Path.home() / ".strata"
STYLES = {
    "WorkerFailed": "bold red",
    "BarrierBroken": "red",
    "CheckpointFailed": "red",
    "WorkerJoined": "green",
}


def replay(
    data_dir: Annotated[
        Path, typer.Option(envvar="STRATA_DATA_DIR", help="The coordinator's data directory.")
    ] = DEFAULT_DATA_DIR,
    json: AsJson = False,
    kind: Annotated[list[str] | None, typer.Option(help="Only events of this kind; may be repeated.")] = None,
    last: Annotated[int | None, typer.Option(min=1, help="Only the newest so many.")] = None,
) -> None:
    """Print what happened, as the coordinator's journal has it. Safe beside a running coordinator."""
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
        moment = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(entry.event.at_s))
        console.print(
            Text.assemble(
                (f"{entry.seq:>7} ", "dim"),
                (f"{moment}  ", "dim"),
                (f"{name:20}", STYLES.get(name, "bold")),
                f" {describe(entry.event)}",
            ),
            soft_wrap=True,
        )


def _wanted(name: str, kinds: list[str] | None) -> bool:
    """What agents agree on in values is no story unless one asks for it."""
    return name in kinds if kinds else name not in ("ValueSwapped", "ValueDropped", "VersionsReserved")


def describe(event: Event) -> str:
    """One event in a sentence."""
    match event:
        case WorkerJoined():
            return f"generation {event.generation}: {event.reason} (incarnation {event.incarnation}, {event.spec.hostname})"
        case WorkerFailed() | WorkerLeft():
            return f"generation {event.generation}: '{event.worker_id}': {event.reason}"
        case WorkerForgotten():
            return f"'{event.worker_id}': {event.reason}"
        case DatasetRegistered():
            return f"'{event.spec.dataset_id}' at {event.spec.path}: {event.reason}"
        case ShardsMoved():
            return f"'{event.dataset_id}' epoch {event.epoch}, plan {event.version}: {event.reason}"
        case BarrierReleased() | BarrierBroken():
            return f"'{event.barrier_id}' at step {event.step}: {event.reason}"
        case CheckpointStarted() | CheckpointCompleted() | CheckpointFailed():
            return f"'{event.checkpoint_id}' (step {event.step}, by '{event.worker_id}'): {event.reason}"
        case CheckpointRemoved():
            return f"'{event.checkpoint_id}': {event.reason}"
        case TaskCreated():
            return f"'{event.spec.task_id}' ({event.spec.name}): {event.reason}"
        case TaskChanged():
            return f"'{event.task_id}' is {event.status}: {event.reason}"
        case TaskProgressed():
            return (
                f"'{event.task_id}', attempt {event.attempt}: step {event.step} of {event.total_steps or '?'}"
            )
        case RecoveryRecorded():
            seconds = sum(event.phases_s.values())
            return f"'{event.job_id}' at step {event.resumed_step} after {seconds:.1f} s: {event.reason}"
        case ValueSwapped() | ValueRefreshed() | ValueDropped():
            return f"'{event.key}': {event.reason}"
        case BarrierArrived() | CountersRestored() | VersionsReserved():
            return event.reason
