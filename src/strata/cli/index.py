"""`strata index`: tokenize text files once into a memory-mapped index that training reads."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from strata.cli.common import AsJson, print_json
from strata.data.tokens.builder import BuildOptions, build_index
from strata.data.tokens.format import DEFAULT_ENTRY_INTERVAL
from strata.data.tokens.progress import TerminalProgress


def index(
    files: Annotated[
        list[str],
        typer.Argument(metavar="FILE", help="JSONL, plain text or parquet files, gzipped too; or patterns."),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="Where to write the index.")],
    tokenizer: Annotated[
        str,
        typer.Option(
            "--tokenizer", "-t", help="Path of a tokenizer.json, a name on the hub, or 'bytes' (built in)."
        ),
    ] = "bytes",
    text_key: Annotated[str, typer.Option(help="Field or column that holds the text.")] = "text",
    eos: Annotated[str | None, typer.Option(help="Token, or its id, to put after each document.")] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes. Defaults to one per core.")] = None,
    on_bad: Annotated[
        Literal["raise", "skip"], typer.Option(help="Stop at a bad record, or skip and count it.")
    ] = "raise",
    entry_interval: Annotated[
        int, typer.Option(min=1, help="Tokens between index entries.")
    ] = DEFAULT_ENTRY_INTERVAL,
    force: Annotated[bool, typer.Option("--force", help="Build even if an up-to-date index exists.")] = False,
    as_json: AsJson = False,
) -> None:
    """Tokenize text files into an index. After a crash the same command continues where it stopped."""
    options = BuildOptions(
        text_key=text_key, entry_interval=entry_interval, eos=eos, on_bad=on_bad, workers=workers, force=force
    )
    with TerminalProgress() as progress:
        report = build_index(files, output, tokenizer=tokenizer, options=options, progress=progress)
    if as_json:
        print_json(report.to_json())
    else:
        for line in report.lines():
            typer.echo(line)
