"""`strata doctor`: everything that keeps training from working on this machine, in one go.

Exit status: 0 nothing fails, 1 something does.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer
from rich.text import Text

from strata.cli.common import AsJson, console, print_json, print_table
from strata.diagnostics import CheckResult, Targets, run_all

STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red", "skip": "dim"}


def doctor(
    coordinator: Annotated[
        str | None,
        typer.Option(envvar="COORDINATOR_ADDR", help="HOST:PORT of the coordinator's gRPC service to check."),
    ] = None,
    api: Annotated[
        str | None,
        typer.Option(
            envvar=["COORDINATOR_URL", "STRATA_API_URL"],
            help="HTTP address of the coordinator to check.",
        ),
    ] = None,
    etcd: Annotated[
        str | None, typer.Option(envvar="ETCD_ENDPOINT", help="HOST:PORT of the etcd server to check.")
    ] = None,
    checkpoint_dir: Annotated[
        str | None, typer.Option(help="Folder for local checkpoints. [the current folder]")
    ] = None,
    s3_bucket: Annotated[
        str | None,
        typer.Option(help="Bucket to check: one small object is written, read, listed and removed."),
    ] = None,
    s3_region: Annotated[str | None, typer.Option(envvar="AWS_REGION", help="The bucket's region.")] = None,
    port: Annotated[
        list[int] | None,
        typer.Option(help="Port that must be free; may be repeated. [29500, 50051, 3000]"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check GPU, etcd, ports, disk, S3, environment, coordinator, clock and limits, and say how to fix what is wrong."""
    targets = Targets(
        coordinator=coordinator,
        api=api,
        etcd=etcd,
        checkpoint_dir=checkpoint_dir,
        s3_bucket=s3_bucket.removeprefix("s3://").strip("/") if s3_bucket else None,
        s3_region=s3_region,
        ports=tuple(port or ()),
    )
    results = list(run_all(targets))
    failed = [result for result in results if result.verdict == "fail"]
    if as_json:
        print_json({"ok": not failed, "checks": [asdict(result) for result in results]})
    else:
        _print(results)
    raise typer.Exit(1 if failed else 0)


def _print(results: list[CheckResult]) -> None:
    print_table(
        ("check", "verdict", "found"),
        [(r.name, Text(r.verdict, style=STYLES[r.verdict]), r.found) for r in results],
        empty="nothing was checked",
    )
    for verdict in ("fail", "warn"):
        for result in results:
            if result.verdict == verdict and result.fix:
                console.print(
                    Text.assemble("\n", (f"{result.name}: ", STYLES[verdict]), result.fix), soft_wrap=True
                )
    counts = {verdict: sum(result.verdict == verdict for result in results) for verdict in STYLES}
    console.print(Text("\n" + ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count)))
