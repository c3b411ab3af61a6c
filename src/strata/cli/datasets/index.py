"""`strata index`: tokenize text files once into a memory-mapped index that training reads; or, with `--samples`, find the samples
of any dataset once, so that training reads them by number."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from strata.cli.common import AsJson, print_json, size
from strata.core.messages import InvalidArgument
from strata.core.text import counted
from strata.data.reader import discover
from strata.data.readers.base import OnBad
from strata.data.streaming.sample_index import save
from strata.data.tokens.building.builder import BuildOptions, build_index
from strata.data.tokens.building.progress import TerminalProgress
from strata.data.tokens.format import DEFAULT_ENTRY_INTERVAL


def index(
    files: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE",
            help="JSONL, plain text or parquet files, gzipped too; or globs. With --samples, any dataset: files, folders, "
            "globs or URLs.",
        ),
    ],
    output: Annotated[
        str,
        typer.Option(
            "--output", "-o", help="Where to write the index. With --samples, NAME.samples or a URL."
        ),
    ] = "",
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
    samples: Annotated[
        bool, typer.Option("--samples", help="Find the samples of a dataset instead of tokenizing it.")
    ] = False,
    format: Annotated[
        str | None,
        typer.Option(
            "--format", "-f", help="With --samples: format of the files, if their suffix does not imply it."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Tokenize text files into an index. After a crash the same command continues where it stopped.

    With --samples, record where each sample of a dataset starts (in tar and compressed files too), so that samples can be
    read by number. The index is kept in this machine's cache; --output also writes it to one file for other machines.
    """
    if samples:
        _index_samples(files, output, format, on_bad, as_json=as_json)
        return
    if format is not None:
        raise InvalidArgument(
            "--format", "is only for --samples; the format of text files follows from their suffix."
        )
    if not output:
        raise InvalidArgument("--output", "is missing: pass the path to write the index to.")
    options = BuildOptions(
        text_key=text_key, entry_interval=entry_interval, eos=eos, on_bad=on_bad, workers=workers, force=force
    )
    with TerminalProgress() as progress:
        report = build_index(files, Path(output), tokenizer=tokenizer, options=options, progress=progress)
    if as_json:
        print_json(report.to_json())
    else:
        for line in report.lines():
            typer.echo(line)


def _index_samples(
    files: list[str], output: str, format: str | None, on_bad: OnBad, *, as_json: bool
) -> None:
    with TerminalProgress(doing="indexing", unit="samples") as progress:
        found = discover(files, format, on_bad=on_bad, progress=progress)
    size_bytes = save(found, output) if output else 0
    if as_json:
        print_json(
            {
                "format": found.format,
                "files": len(found.files),
                "samples": found.total,
                "bad": found.bad,
                "bytes": sum(file.size_bytes for file in found.files),
                "output": output or None,
            }
        )
        return
    typer.echo(
        f"{counted(found.total, 'sample')} in {counted(len(found.files), f'{found.format} file')}"
        + (f", {counted(found.bad, 'bad record')} skipped" if found.bad else "")
    )
    typer.echo(f"wrote {output} ({size(size_bytes)})" if output else "kept in this machine's cache")
