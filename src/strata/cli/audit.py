"""`strata audit`: the proof that every sample of an epoch was trained exactly once.

Exit status: 0 every finished epoch is exact, 1 something is lost, repeated or not finished, 2 the question
could not be answered.
"""

from __future__ import annotations

import json
from typing import Annotated, NoReturn
from urllib.parse import quote

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from strata.cli.common import get, print_table
from strata.core.audit import AuditReport
from strata.data.history import audit as audit_one
from strata.data.history import audit_epochs, commits_of, datasets_in
from strata.errors import StrataError

EXACT, NOT_EXACT, NO_ANSWER = 0, 1, 2


def audit(
    dataset: Annotated[
        str, typer.Argument(help="The dataset's id. May be left out where the history has only one.")
    ] = "",
    source: Annotated[
        str,
        typer.Option(
            "--source",
            "-s",
            help="Where the job keeps its checkpoints: a directory, s3://bucket/prefix, or a coordinator's "
            "http://host:3000.",
            envvar=["STRATA_CHECKPOINTS", "CHECKPOINT_BUCKET"],
        ),
    ] = "",
    epoch: Annotated[int | None, typer.Option(min=0, help="One epoch; all of them when left out.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Prove from the committed history that each sample was trained exactly once, or list what was not."""
    if source.startswith(("http://", "https://")):
        _ask_coordinator(source, dataset, epoch, as_json=as_json)
    try:
        reports = _reports(source, dataset, epoch)
    except (StrataError, OSError) as error:
        _complain(str(error), as_json=as_json)
        raise typer.Exit(NO_ANSWER) from error
    if as_json:
        typer.echo(
            json.dumps({"exact": _passes(reports, epoch), "epochs": [r.to_json() for r in reports]}, indent=2)
        )
    else:
        _print(reports)
    raise typer.Exit(EXACT if _passes(reports, epoch) else NOT_EXACT)


def _ask_coordinator(api: str, dataset: str, epoch: int | None, *, as_json: bool) -> NoReturn:
    """What the coordinator's registry of checkpoints proves."""
    if not dataset:
        _complain("Which dataset? Name one: strata audit DATASET", as_json=as_json)
        raise typer.Exit(NO_ANSWER)
    query = f"?epoch={epoch}" if epoch is not None else ""
    try:
        found = get(api, f"/api/datasets/{quote(dataset, safe='')}/audit{query}")
    except StrataError as error:
        _complain(str(error), as_json=as_json)
        raise typer.Exit(NO_ANSWER) from error
    clean = all(not r["lost"] and not r["repeated"] for r in found)
    passes = all(r["exact"] for r in found) if epoch is not None else clean
    if as_json:
        typer.echo(json.dumps({"exact": passes, "epochs": found}, indent=2))
    else:
        rows = [(r["job_id"], r["epoch"], f"{r['samples']:,}/{r['total']:,}", r["reason"]) for r in found]
        print_table(("JOB", ">EPOCH", ">SAMPLES", "PROOF"), rows, empty="")
    raise typer.Exit(EXACT if passes else NOT_EXACT)


def _reports(source: str, dataset: str, epoch: int | None) -> list[AuditReport]:
    if not source:
        raise StrataError(
            "No history to read.", hint="Say where the checkpoints are: --source DIR or s3://bucket/prefix."
        )
    commits = commits_of(source)
    if not dataset:
        known = datasets_in(commits)
        if len(known) != 1:
            names = ", ".join(known) or "none"
            raise StrataError(
                f"Which dataset? The history has {names}.", hint="Name one: strata audit DATASET"
            )
        dataset = known[0]
    return audit_epochs(commits, dataset) if epoch is None else [audit_one(commits, dataset, epoch)]


def _passes(reports: list[AuditReport], epoch: int | None) -> bool:
    """An epoch asked for by number must be exact; of all epochs the last may still be open."""
    if epoch is not None or len(reports) == 1:
        return reports[-1].exact
    return all(r.exact for r in reports[:-1]) and reports[-1].clean


def _print(reports: list[AuditReport]) -> None:
    console = Console()
    table = Table(title=f"Committed history of {escape(reports[0].dataset)}", title_justify="left")
    table.add_column("epoch", justify="right")
    for name in ("samples", "of", "lost", "repeated", "commits"):
        table.add_column(name, justify="right")
    table.add_column("verdict")
    for r in reports:
        verdict = (
            "[green]✓ exact[/]" if r.exact else "[yellow]… open[/]" if r.clean else "[red]✗ not exact[/]"
        )
        table.add_row(
            str(r.epoch),
            f"{r.samples:,}",
            f"{r.total:,}",
            f"{r.lost.size:,}",
            f"{r.repeated.size:,}",
            f"{len(r.commits):,}",
            verdict,
        )
    console.print(table)
    for r in reports:
        console.print(f"epoch {r.epoch}: {escape(r.reason)}", highlight=False)
    last = reports[-1]
    if last.abandoned:
        console.print(
            f"{len(last.abandoned):,} rolled-back checkpoint(s) do not count: {escape(', '.join(last.abandoned[:5]))}",
            highlight=False,
        )
    if last.vouched:
        console.print(
            f"{last.vouched:,} samples rest on the record of a later checkpoint: the one that trained them is gone.",
            highlight=False,
        )


def _complain(message: str, *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps({"error": message}))
    else:
        Console(stderr=True).print(f"[red]error:[/] {escape(message)}", highlight=False)
