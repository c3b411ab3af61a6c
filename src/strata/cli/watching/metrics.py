"""`strata metrics`: what a run has logged, as a table or as CSV."""

from __future__ import annotations

import csv
import sys
from typing import Annotated, Any
from urllib.parse import quote, urlencode

import typer

from strata.cli.common import DEFAULT_API, Api, AsJson, get_facts, get_rows, print_json, print_table
from strata.core.telemetry import histograms
from strata.core.telemetry.histograms import MARK

POINTS = 10_000
RUNS_SHOWN = 20


def metrics(
    run: Annotated[
        str | None, typer.Argument(metavar="RUN", help="A run's id, or a job's name: its latest run.")
    ] = None,
    names: Annotated[list[str] | None, typer.Argument(metavar="NAME", help="Names of metrics. [all]")] = None,
    api: Api = DEFAULT_API,
    json: AsJson = False,
    as_csv: Annotated[
        bool, typer.Option("--csv", help="Print committed values by step as CSV, at most 10,000 per metric.")
    ] = False,
) -> None:
    """Show what a run has logged with job.log; without RUN, list the runs."""
    if run is None:
        _list_runs(api, as_json=json)
        return
    found = get_facts(api, f"/api/runs/{quote(run, safe='')}/metrics", having="metrics")
    wanted = [
        each
        for each in found["metrics"]
        if not names or each["name"] in names or each["name"].rpartition(MARK)[0] in names
    ]
    if as_csv:
        _write_csv(api, found["run"], [each["name"] for each in wanted])
    elif json:
        print_json({**found, "metrics": wanted})
    else:
        rows = [
            (m["name"], _shown(m["last"]), m["last_step"], _shown(m["min"]), _shown(m["max"]), m["count"])
            for m in _in_one_row(wanted)
        ]
        columns = ("=METRIC", ">LAST", ">STEP", ">MIN", ">MAX", ">VALUES")
        print_table(columns, rows, empty="The run has logged no such metric.")


def _list_runs(api: str, *, as_json: bool) -> None:
    found = get_rows(api, f"/api/runs?limit={RUNS_SHOWN}")
    if as_json:
        print_json(found)
        return
    rows = [(each["run"], ", ".join(each["jobs"])) for each in found]
    print_table(("=RUN", "=JOB"), rows, empty="No run has logged anything yet: job.log({...}).")


def _write_csv(api: str, run: str, names: list[str]) -> None:
    writer = csv.writer(sys.stdout)
    writer.writerow(("metric", "step", "time", "value", "low", "high"))
    for name in names:
        query = urlencode({"name": name, "points": POINTS})
        path = f"/api/runs/{quote(run, safe='')}/metrics/series?{query}"
        curve = get_facts(api, path, having="series")["series"][0]["committed"]
        low, high = curve["low"] or curve["values"], curve["high"] or curve["values"]
        writer.writerows(
            (name, *row)
            for row in zip(curve["steps"], curve["times"], curve["values"], low, high, strict=True)
        )


def _in_one_row(metrics: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each histogram with its median, the least and the greatest of all its values."""
    of_histograms, of_numbers = histograms.split([each["name"] for each in metrics])
    part = {name: index for index, name in enumerate(histograms.PARTS)}
    found = [
        {
            **metrics[parts[part["q50"]]],
            "name": f"{name} (histogram)",
            "min": metrics[parts[part["q0"]]]["min"],
            "max": metrics[parts[part["q100"]]]["max"],
        }
        for name, parts in of_histograms.items()
    ]
    rows = [*(metrics[index] for index in of_numbers), *found]
    return sorted(rows, key=lambda each: str(each["name"]))


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.6g}"
