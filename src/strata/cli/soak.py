"""`strata soak`: load, faults and a watch for leaks, for as long as is asked, and a report."""

from __future__ import annotations

import json as jsonlib
import os
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from strata.cli.common import console, print_json, print_table
from strata.cli.extras import need


def soak(
    minutes: Annotated[float, typer.Option(min=0.1, help="Duration in minutes.")] = 10.0,
    round_seconds: Annotated[
        float,
        typer.Option(min=1.0, help="Seconds per round: one fault, then the clients' histories are checked."),
    ] = 20.0,
    training: Annotated[
        bool, typer.Option("--training/--no-training", help="Also run a small training job.")
    ] = True,
    seed: Annotated[int, typer.Option(help="Seed for the choice of faults.")] = 0,
    folder: Annotated[
        Path | None, typer.Option(help="Folder for its files. [the system's temporary folder]")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Write the report here: Markdown, or JSON for *.json."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Put a coordinator and a job under load, inject faults, and look for leaks. Exit status 0: all checks passed."""
    if training:
        need("torch", "omegaconf", feature="The job that trains (or --no-training)", extra="harness")
    from strata.chaos.soak import Soak

    def tell(text: str) -> None:
        if not json:
            console.print(Text(text))

    with tempfile.TemporaryDirectory(prefix=f"strata-soak-{os.getpid()}-", dir=folder) as place:
        report = Soak(
            folder=Path(place),
            minutes=minutes,
            round_s=round_seconds,
            training=training,
            seed=seed,
            tell=tell,
        ).run()
    if output is not None:
        as_json = jsonlib.dumps(report.to_json(), indent=2) + "\n"
        output.write_text(as_json if output.suffix == ".json" else report.to_markdown())
    if json:
        print_json(report.to_json())
    else:
        rows = [
            (Text("pass", "green") if each.passed else Text("FAIL", "bold red"), each.name, each.found)
            for each in report.verdicts
        ]
        print_table(("", "CHECK", "FOUND"), rows, empty="")
    raise typer.Exit(0 if report.passed else 1)
