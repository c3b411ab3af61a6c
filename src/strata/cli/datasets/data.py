"""`strata data`: what is in a dataset, before training on it.

Exit status of `verify`: 0 everything can be read, 1 something cannot, and is named.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Annotated, Any, Literal

import numpy as np
import typer
from rich.text import Text

from strata.cli.common import AsJson, LiteralGroup, console, print_json, print_table, size
from strata.core.data.order import EpochOrder
from strata.core.text import counted
from strata.data.errors import DataError
from strata.data.preview import Limits, describe
from strata.data.reader import DatasetReader
from strata.data.readers.base import OnBad
from strata.data.tokens.building.progress import TerminalProgress
from strata.data.verify import Damage, verify_dataset

app = typer.Typer(
    name="data",
    cls=LiteralGroup,
    help="Inspect a dataset: a file, a folder, a glob, or a URL in object storage.",
    no_args_is_help=True,
)
Places = Annotated[
    list[str], typer.Argument(metavar="URL", help="Files, folders, globs or URLs, or an index NAME.samples.")
]
Kind = Annotated[
    str | None, typer.Option("--format", "-f", help="Format of the files, if their suffix does not imply it.")
]
OnBadRecord = Annotated[
    Literal["raise", "skip"], typer.Option("--on-bad", help="Stop at a bad record, or skip and count it.")
]
Count = Annotated[int, typer.Option("--count", "-n", min=1, max=1000, help="Number of samples.")]
SHOWN_FILES = 10
LINE_CHARS = 160


@app.command()
def stat(places: Places, format: Kind = None, on_bad: OnBadRecord = "raise", as_json: AsJson = False) -> None:
    """Show format, files, samples, bytes and fields."""
    reader = _open(places, format, on_bad)
    files = reader.files
    total_bytes = sum(file.size_bytes for file in files)
    fields = _fields(reader)
    if as_json:
        print_json(
            {
                "format": reader.found.format,
                "samples": len(reader),
                "bad": reader.bad,
                "bytes": total_bytes,
                "files": [
                    {"path": file.path, "bytes": file.size_bytes, "samples": file.samples} for file in files
                ],
                "fields": fields,
            }
        )
        return
    typer.echo(
        f"{counted(len(reader), 'sample')} in {counted(len(files), f'{reader.found.format} file')}, {size(total_bytes)}"
        + (f"; {counted(reader.bad, 'bad record')} skipped" if reader.bad else "")
    )
    if files and len(reader):
        per_file = [file.samples for file in files]
        typer.echo(
            f"{size(total_bytes / len(reader))} a sample; {min(per_file):,} to {max(per_file):,} samples a file"
        )
    print_table(
        ("field", "kind", "example"),
        [(f["field"], f["kind"], f["example"]) for f in fields],
        empty="no samples",
    )
    typer.echo("")
    print_table(
        ("=file", ">samples", ">size"),
        [(file.path, f"{file.samples:,}", size(file.size_bytes)) for file in files[:SHOWN_FILES]],
        empty="no files",
    )
    if len(files) > SHOWN_FILES:
        typer.echo(f"and {len(files) - SHOWN_FILES:,} more files")


@app.command()
def head(
    places: Places,
    count: Count = 5,
    format: Kind = None,
    on_bad: OnBadRecord = "raise",
    as_json: AsJson = False,
) -> None:
    """Show the first samples."""
    reader = _open(places, format, on_bad)
    _show(reader, range(min(count, len(reader))), as_json=as_json)


@app.command()
def sample(
    places: Places,
    count: Count = 5,
    seed: Annotated[int, typer.Option(help="Seed of the shuffled epoch to read from.")] = 0,
    format: Kind = None,
    on_bad: OnBadRecord = "raise",
    as_json: AsJson = False,
) -> None:
    """Show random samples: the ones that training with the same seed reads first."""
    reader = _open(places, format, on_bad)
    order = EpochOrder(total=len(reader), seed=seed)
    _show(reader, order.take(np.arange(min(count, len(reader)))).tolist(), as_json=as_json)


@app.command()
def verify(
    places: Places, format: Kind = None, on_bad: OnBadRecord = "raise", as_json: AsJson = False
) -> None:
    """Read everything once, and verify checksums where the format has them."""
    reader = _open(places, format, on_bad)
    with TerminalProgress(doing="verifying", unit="samples") as progress:
        report = verify_dataset(reader, progress=progress)
    if as_json:
        print_json(
            {
                "intact": not report.damaged,
                "samples": report.samples,
                "digests": report.digests,
                "damaged": [{"path": each.path, "reason": each.reason} for each in report.damaged],
            }
        )
    else:
        for damage in report.damaged:
            _say(damage)
        verdict = "intact" if not report.damaged else f"{counted(len(report.damaged), 'file')} damaged"
        digests = f", {counted(report.digests, 'digest')} compared" if report.digests else ""
        typer.echo(f"{counted(report.samples, 'sample')} read{digests}: {verdict}")
    raise typer.Exit(1 if report.damaged else 0)


def _say(damage: Damage) -> None:
    console.print(Text.assemble(("✗ ", "red"), damage.reason), soft_wrap=True)


def _open(places: list[str], format: str | None, on_bad: OnBad) -> DatasetReader:
    with TerminalProgress(doing="looking", unit="samples") as progress:
        return DatasetReader(places, format, on_bad=on_bad, progress=progress)


def _fields(reader: DatasetReader) -> list[dict[str, str]]:
    if not len(reader):
        return []
    return [
        {"field": name, "kind": _kind(about), "example": _short(about)}
        for name, about in _described(reader[0]).items()
    ]


def _described(row: dict[str, Any]) -> dict[str, dict[str, Any]]:
    limits = Limits(image_bytes=0, thumbnail_pixels=1)
    return {str(name): describe(value, limits) for name, value in row.items()}


def _kind(about: dict[str, Any]) -> str:
    shape = "×".join(map(str, about.get("shape", ())))
    match about["kind"]:
        case "image":
            pixels = (
                f" {about['width']}×{about['height']}" if "width" in about else f" {shape}" if shape else ""
            )
            return f"image ({about['format']}{pixels})"
        case "array":
            return f"array ({about['dtype']} {shape})"
        case kind:
            return str(kind)


def _short(about: dict[str, Any]) -> str:
    if about["kind"] == "image":
        return f"{about['bytes']:,} bytes" if "bytes" in about else "pixels"
    value = about.get("value")
    text = value if isinstance(value, str) else json.dumps(_plain(value), ensure_ascii=False)
    text = " ".join(text.split())
    return text if len(text) <= LINE_CHARS else f"{text[: LINE_CHARS - 1]}…"


def _plain(value: Any) -> Any:
    """What `describe` says of nested values, less what it says about them."""
    if isinstance(value, dict):
        inner = value.get("value") if "kind" in value else value
        return (
            {name: _plain(each) for name, each in inner.items()} if isinstance(inner, dict) else _plain(inner)
        )
    return [_plain(each) for each in value] if isinstance(value, list) else value


def _show(reader: DatasetReader, numbers: Iterable[int], *, as_json: bool) -> None:
    wanted = list(numbers)
    rows = reader.read(wanted)
    if as_json:
        print_json(
            [{"sample": number, "fields": _described(row)} for number, row in zip(wanted, rows, strict=True)]
        )
        return
    if not rows:
        raise DataError.at(reader.files[0].path if reader.files else "", "there are no samples")
    for number, row in zip(wanted, rows, strict=True):
        console.print(Text(f"sample {number:,}", style="bold"))
        print_table(
            ("field", "kind", "value"),
            [(name, _kind(about), _short(about)) for name, about in _described(row).items()],
            empty="no fields",
        )
