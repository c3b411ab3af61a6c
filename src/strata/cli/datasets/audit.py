"""`strata audit`: the proof that every sample of an epoch was trained exactly once.

Exit status: 0 every finished epoch is exact, 1 something is lost, repeated or not finished, 2 the question
could not be answered.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, NoReturn
from urllib.parse import quote

import typer
from rich.table import Table
from rich.text import Text

from strata.cli.common import console, errors, get
from strata.core.data.audit import AuditReport
from strata.core.data.mixture import ENDLESS
from strata.core.data.source_audit import SourceReport
from strata.data.history import audit as audit_one
from strata.data.history import audit_by_source, audit_epochs, commits_of, datasets_in, mixtures_in
from strata.errors import StrataError

EXACT, NOT_EXACT, NO_ANSWER = 0, 1, 2
SHOWN = 5
VERDICTS = {
    "exact": Text("✓ exact", style="green"),
    "open": Text("… open", style="yellow"),
    "not exact": Text("✗ not exact", style="red"),
}


def audit(
    dataset: Annotated[
        str,
        typer.Argument(
            metavar="DATASET",
            help="Id of the dataset, optional if the history has only one; or the run's checkpoint destination.",
        ),
    ] = "",
    source: Annotated[
        str,
        typer.Option(
            "--source",
            "-s",
            help="The job's checkpoint destination (a directory or s3://bucket/prefix), or a coordinator's http://host:3000.",
            envvar=["STRATA_CHECKPOINTS", "CHECKPOINT_BUCKET", "CHECKPOINT_DIR"],
        ),
    ] = "",
    epoch: Annotated[int | None, typer.Option(min=0, help="Audit only this epoch. [all]")] = None,
    by_source: Annotated[
        bool, typer.Option("--by-source", help="For a mixture: samples, tokens and epochs of each source.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Verify from the committed history that each sample was trained exactly once, or list what was not."""
    if not source and ("/" in dataset or os.path.isdir(dataset)):
        dataset, source = "", dataset
    if by_source:
        _audit_by_source(source, dataset, as_json=as_json)
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


def _audit_by_source(source: str, dataset: str, *, as_json: bool) -> NoReturn:
    try:
        if not source or source.startswith(("http://", "https://")):
            raise StrataError(
                "Which run? An audit by source reads the run's checkpoints.",
                hint="Pass their location: strata audit DIR --by-source, or --source s3://bucket/prefix.",
            )
        commits = commits_of(source)
        found = audit_by_source(commits, dataset or None)
        whole = audit_one(commits, dataset or mixtures_in(commits)[0], 0)
    except (StrataError, OSError) as error:
        _complain(str(error), as_json=as_json)
        raise typer.Exit(NO_ANSWER) from error
    passes = whole.clean and all(r.exact for r in found)
    if as_json:
        document = {"exact": passes, "sources": [r.to_json() for r in found], "mixture": whole.to_json()}
        typer.echo(json.dumps(document, indent=2))
    else:
        _print_sources(whole, found)
    raise typer.Exit(EXACT if passes else NOT_EXACT)


def _print_sources(whole: AuditReport, found: Sequence[SourceReport]) -> None:
    _say(f"Committed history of {whole.dataset}: {whole.reason}")
    _print_whole(
        ("source", ">samples", ">share", ">documents", ">tokens", ">epochs", ">lost", ">repeated", "verdict"),
        [
            (
                r.source,
                f"{r.samples:,}",
                f"{r.share:.2%}",
                "—" if r.documents is None else f"{r.documents:,}",
                "—" if r.tokens is None else f"{r.tokens:,}",
                f"{r.epochs + r.begun / r.size:,.2f}",
                f"{r.lost.size:,}",
                f"{r.repeated.size:,}",
                VERDICTS["exact" if r.exact else "not exact"],
            )
            for r in found
        ],
    )
    for r in found:
        _say(f"{r.source}: {r.reason}")


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
    if not found:
        of = f"epoch {epoch} of dataset '{dataset}'" if epoch is not None else f"dataset '{dataset}'"
        _complain(
            f"No history of {of}: it begins with the first checkpoint of a job that trains on it.",
            as_json=as_json,
        )
        raise typer.Exit(NO_ANSWER)
    clean = all(r["exact"] or _is_open(r) for r in found)
    passes = all(r["exact"] for r in found) if epoch is not None else clean
    if as_json:
        typer.echo(json.dumps({"exact": passes, "epochs": found}, indent=2))
    else:
        _print_whole(
            ("job", ">epoch", ">samples", ">of", "verdict"),
            [
                (
                    r["job_id"],
                    str(r["epoch"]),
                    f"{r['samples']:,}",
                    "—" if r["total"] == ENDLESS else f"{r['total']:,}",
                    VERDICTS["exact" if r["exact"] else "open" if _is_open(r) else "not exact"],
                )
                for r in found
            ],
        )
        for r in found:
            _say(f"{r['job_id']}, epoch {r['epoch']}: {r['reason']}")
    raise typer.Exit(EXACT if passes else NOT_EXACT)


def _is_open(row: Mapping[str, Any]) -> bool:
    """Clean so far. A finished epoch that is neither exact nor has lost or repeated anything contradicts itself."""
    return bool(row["remaining"]) and not row["lost"] and not row["repeated"]


def _reports(source: str, dataset: str, epoch: int | None) -> list[AuditReport]:
    if not source:
        raise StrataError(
            "No history to read.", hint="Pass the checkpoint destination: --source DIR or s3://bucket/prefix."
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
    if reports[-1].is_endless:
        return all(r.clean for r in reports)
    if epoch is not None or len(reports) == 1:
        return reports[-1].exact
    return all(r.exact for r in reports[:-1]) and reports[-1].clean


def _print(reports: list[AuditReport]) -> None:
    _say(f"Committed history of {reports[0].dataset}")
    _print_whole(
        (">epoch", ">samples", ">of", ">lost", ">repeated", ">commits", "verdict"),
        [
            (
                _epochs(r),
                f"{r.samples:,}",
                "—" if r.total == ENDLESS else f"{r.total:,}",
                f"{r.lost.size:,}",
                f"{r.repeated.size:,}",
                f"{len(r.commits):,}",
                VERDICTS["exact" if r.exact else "open" if r.clean else "not exact"],
            )
            for r in reports
        ],
    )
    for r in reports:
        _say(f"epoch {_epochs(r)}: {r.reason}")
    last = reports[-1]
    if last.abandoned:
        more = f", the newest {SHOWN}" if len(last.abandoned) > SHOWN else ""
        _say(f"{len(last.abandoned):,} rolled-back checkpoint(s) do not count{more}:")
        for name in last.abandoned[-SHOWN:]:
            _say(f"  {name}")
    if last.vouched:
        _say(
            f"{last.vouched:,} samples are confirmed by a later checkpoint only: the one that recorded them was removed."
        )


def _epochs(report: AuditReport) -> str:
    many = report.last_epoch > report.epoch
    return f"{report.epoch:,}–{report.last_epoch:,}" if many else str(report.epoch)


def _say(line: str) -> None:
    """One line, which only the terminal may break: an id in it can be copied."""
    console.print(Text(line), soft_wrap=True)


def _print_whole(columns: Sequence[str], rows: Iterable[Sequence[str | Text]]) -> None:
    """A table as wide as its cells are: none is broken or cut."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in columns:
        table.add_column(
            column.lstrip(">"), justify="right" if column.startswith(">") else "left", no_wrap=True
        )
    for row in rows:
        table.add_row(*(cell if isinstance(cell, Text) else Text(cell) for cell in row))
    width = console.measure(table, options=console.options.update(max_width=10_000)).maximum
    console.print(table, width=width, crop=False, soft_wrap=True)


def _complain(message: str, *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps({"error": message}))
    else:
        errors.print(Text.assemble(("error: ", "red"), message), soft_wrap=True)
