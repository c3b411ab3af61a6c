"""Listings of what the coordinator knows: tables for people, `--json` for programs."""

from __future__ import annotations

import time
from typing import Annotated, Any
from urllib.parse import quote

import typer
from rich.text import Text

from strata.cli.common import (
    DEFAULT_API,
    Api,
    AsJson,
    LiteralGroup,
    ago,
    console,
    delete,
    duration,
    get_facts,
    get_rows,
    print_json,
    print_table,
    size,
    styled,
)

JOBS_SHOWN = 10
BAR_WIDTH = 20
GOODPUT_PARTS = (
    ("training", "█", "green"),
    ("checkpoint", "▓", "cyan"),
    ("recovery", "▒", "red"),
    ("waiting", "░", "yellow"),
)
"""Each with a shade of its own: colour alone says nothing to some, and to none in a file."""


def status(api: Api = DEFAULT_API, json: AsJson = False) -> None:
    """Show whether the coordinator is up, and the state of the fleet."""
    state = get_facts(api, "/api/status", having="generation")
    metrics = get_facts(api, "/api/metrics", having="coordinator_rps")
    times = get_rows(api, "/api/goodput")
    if json:
        print_json({**state, "metrics": metrics, "goodput": times})
        return
    rows = [
        ("coordinator", f"{state['address']} (version {state['version']}, up {duration(state['uptime'])})"),
        ("workers", f"{metrics['active_workers']} active of {metrics['total_workers']}"),
        ("generation", state["generation"]),
        ("requests", f"{metrics['coordinator_rps']:.0f}/s"),
        ("barrier p99", _measured(metrics["barrier_latency_p99"], "ms")),
        ("shard assignment", _measured(metrics["shard_assignment_time"], "ms")),
        ("checkpoint throughput", _measured(metrics["checkpoint_throughput"], "MB/s")),
    ]
    storage = state.get("storage")
    if storage is not None:
        full = ", FULL: changes are refused until there is space" if storage["is_full"] else ""
        rows.append(("disk", f"{size(storage['free_bytes'])} free{full}"))
    present = [spent for spent in times if spent["job_id"] in state["jobs"]][-JOBS_SHOWN:]
    rows += [(f"job {spent['job_id']}", goodput_bar(spent)) for spent in present]
    print_table(("", ""), rows, empty="")
    if present:
        console.print(goodput_legend())


def workers(api: Api = DEFAULT_API, json: AsJson = False) -> None:
    """List the workers and their state."""
    found = get_rows(api, "/api/workers")
    if json:
        print_json(found)
        return
    now_s = time.time()
    rows = [
        (
            w["id"],
            styled(w["status"]),
            "-" if w["rank"] is None else w["rank"],
            f"{w['ip']}:{w['port']}",
            w["gpu_count"],
            w["assigned_shards"],
            f"{w['current_epoch']}/{w['current_step']}",
            w["current_task"] or "-",
            ago(w["last_heartbeat"], now_s),
            f"{w['resources']['cpu_percent']:.0f} %" if w["resources"] else "-",
            _trouble(w),
        )
        for w in found
    ]
    columns = (
        "=WORKER",
        "STATUS",
        ">RANK",
        "=ADDRESS",
        ">GPUS",
        ">SHARDS",
        ">EPOCH/STEP",
        "=TASK",
        ">HEARTBEAT",
        ">CPU",
        "REASON",
    )
    print_table(columns, rows, empty="No workers have registered yet.")


def _trouble(worker: dict[str, Any]) -> str:
    """Why a worker is slow or lost; nothing of one that is well."""
    if worker["slow"]:
        return f"slow: {worker['reason']}"
    return str(worker["reason"]) if worker["status"] == "failed" else "-"


datasets_app = typer.Typer(
    name="datasets", cls=LiteralGroup, help="List the registered datasets.", invoke_without_command=True
)


@datasets_app.callback()
def datasets(context: typer.Context, api: Api = DEFAULT_API, json: AsJson = False) -> None:
    """List the registered datasets."""
    if context.invoked_subcommand is not None:
        return
    found = get_rows(api, "/api/datasets")
    if json:
        print_json(found)
        return
    rows = [
        (d["id"], d["format"], f"{d['total_samples']:,}", f"{d['shard_count']:,}", d["shuffle"], d["path"])
        for d in found
    ]
    print_table(
        ("=DATASET", "FORMAT", ">SAMPLES", ">SHARDS", "SHUFFLED", "=PATH"),
        rows,
        empty="No datasets are registered yet.",
    )


@datasets_app.command("rm")
def remove_datasets(
    dataset_ids: Annotated[
        list[str], typer.Argument(metavar="ID", help="Ids of datasets, as `strata datasets` shows them.")
    ],
    api: Api = DEFAULT_API,
) -> None:
    """Unregister datasets. Their files are not touched."""
    for dataset_id in dataset_ids:
        delete(api, f"/api/datasets/{quote(dataset_id, safe='')}")
        console.print(f"Removed {dataset_id}.", markup=False, highlight=False)


def checkpoints(api: Api = DEFAULT_API, json: AsJson = False) -> None:
    """List the known checkpoints, newest first."""
    found = get_rows(api, "/api/checkpoints")
    if json:
        print_json(found)
        return
    rows = [
        (
            c["id"],
            styled(c["status"]),
            f"{c['step']:,}",
            c["epoch"],
            size(c["size"]),
            "-" if c["throughput_mb_s"] is None else f"{c['throughput_mb_s']:.0f} MB/s",
            ", ".join(c["tiers"]),
            c["worker_id"],
            ago(c["created_at"]),
            c["path"],
        )
        for c in found
    ]
    columns = (
        "=CHECKPOINT",
        "STATUS",
        ">STEP",
        ">EPOCH",
        ">SIZE",
        ">SPEED",
        "TIERS",
        "=BY",
        ">CREATED",
        "=PATH",
    )
    print_table(columns, rows, empty="No checkpoints have been saved yet.")


def barriers(api: Api = DEFAULT_API, json: AsJson = False) -> None:
    """List the barriers and the workers they wait for."""
    found = get_rows(api, "/api/barriers")
    if json:
        print_json(found)
        return
    rows = [
        (
            b["name"],
            b["step"],
            styled(b["status"]),
            f"{b['arrived']}/{b['total']}",
            ago(b["created_at"]),
            _some(b["missing"]),
            b["reason"],
        )
        for b in found
    ]
    print_table(
        ("=BARRIER", ">STEP", "STATUS", ">ARRIVED", ">OPENED", "MISSING", "REASON"),
        rows,
        empty="No barrier has been reached yet.",
    )


def recoveries(api: Api = DEFAULT_API, json: AsJson = False) -> None:
    """List the recoveries and the duration of each phase, newest first."""
    found = get_rows(api, "/api/recoveries")
    if json:
        print_json(found)
        return
    phases = ("detect", "abort", "regroup", "rendezvous", "spawn", "load", "first_step")
    rows = [
        (
            ago(r["at"]),
            r["job_id"],
            f"{r['resumed_step']:,}",
            r["lost_steps"],
            f"{r['total_s']:.2f} s",
            *(f"{r['phases_s'][p]:.2f}" if p in r["phases_s"] else "-" for p in phases),
            r["tier"],
            f"{r['world_before']}→{r['world_after']}",
            r.get("who_survived") or "-",
            r.get("cause") or "-",
        )
        for r in found
    ]
    columns = (
        ">WHEN",
        "=JOB",
        ">STEP",
        ">LOST",
        ">TOTAL",
        *(f">{p.upper()}" for p in phases),
        "FROM",
        "WORLD",
        "WHO",
        "CAUSE",
    )
    print_table(columns, rows, empty="No job has had to recover yet.")


def tasks(api: Api = DEFAULT_API, json: AsJson = False) -> None:
    """List the submitted tasks, newest first."""
    found = get_rows(api, "/api/tasks")
    if json:
        print_json(found)
        return
    times = {spent["task_id"]: spent for spent in get_rows(api, "/api/goodput")}
    rows = [
        (
            t["id"],
            t["name"],
            t["type"],
            styled(t["status"]),
            f"{t['progress']:.0f} %",
            t["worker_count"],
            goodput_bar(times.get(t["id"]), width=10),
            t["reason"],
        )
        for t in found
    ]
    print_table(
        ("=TASK", "NAME", "TYPE", "STATUS", ">PROGRESS", ">WORKERS", "TIME", "REASON"),
        rows,
        empty="No tasks have been submitted yet.",
    )
    if any(t["id"] in times for t in found):
        console.print(goodput_legend())


def _measured(value: float | None, unit: str) -> str:
    return "not measured yet" if value is None else f"{value:.1f} {unit}"


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "") or "-"


def goodput_bar(goodput: dict[str, Any] | None, *, width: int = BAR_WIDTH) -> Text:
    """`████████▓▒░  93 %`: one shade for each part, and the share that was training."""
    if goodput is None or not goodput["total_s"]:
        return Text("not measured yet", style="dim")
    text, at = Text(), 0
    passed_s = 0.0
    for part, shade, style in GOODPUT_PARTS:
        passed_s += goodput[f"{part}_s"]
        until = round(passed_s / goodput["total_s"] * width)
        text.append(shade * (until - at), style=style)
        at = until
    return text.append(f" {goodput['goodput'] * 100:.0f} %")


def goodput_legend() -> Text:
    return Text("  ").join(Text.assemble((shade, style), f" {part}") for part, shade, style in GOODPUT_PARTS)
