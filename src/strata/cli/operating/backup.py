"""`strata backup`, `strata restore`, `strata rebuild`: a copy of what a coordinator keeps, a coordinator from it, and its list of
checkpoints from their manifests."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from strata.cli.common import DEFAULT_API, DEFAULT_DATA_DIR, Api, DataDir, console, get, get_rows, timestamp
from strata.coordinator.backup import back_up
from strata.coordinator.backup import restore as restore_backup
from strata.errors import StrataError


def backup(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The backup to write, such as strata.tar.gz.")],
    data_dir: DataDir = DEFAULT_DATA_DIR,
    history: Annotated[bool, typer.Option(help="Also copy the log and the metrics of runs.")] = True,
) -> None:
    """Back up a coordinator, even while it runs, into one file: journal, tokens, recipes, log, metrics. Protect the file
    like a password. Checkpoints and the folders of tasks are not included."""
    made = back_up(data_dir, file, history=history)
    console.print(
        f"{file}: {len(made.files)} files, {made.size_bytes / 1e6:,.1f} MB before compression. "
        f"Restore it with: strata restore {file} --data-dir DIR",
        markup=False,
        soft_wrap=True,
    )


def restore(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A file written by `strata backup`.")],
    data_dir: DataDir = DEFAULT_DATA_DIR,
) -> None:
    """Restore a data directory from a backup, and verify it. The directory must be empty or not exist yet."""
    found = restore_backup(file, data_dir)
    console.print(
        f"Restored {data_dir} as of {timestamp(found.created_at_s)}, from the coordinator on {found.host}. Later changes "
        "are not included: workers register again by themselves, and checkpoints are found by their manifests. Start "
        f"it with: strata serve --data-dir {data_dir}",
        markup=False,
        soft_wrap=True,
    )


def rebuild(
    destinations: Annotated[
        list[str],
        typer.Argument(
            metavar="DESTINATION", help="The job's checkpoint destinations: folders, s3://bucket/prefix."
        ),
    ],
    job: Annotated[str, typer.Option(help="Name of the job, as `strata checkpoints` will show it.")],
    api: Api = DEFAULT_API,
) -> None:
    """Rebuild a coordinator's list of checkpoints from their manifests, for a job that is not running. A running job does
    so by itself."""
    from strata.checkpoint.manager import CheckpointManager, Memory
    from strata.training.link import checkpoint_facts, report_existing
    from strata.worker.orchestrator import TrainingOrchestrator

    live = [
        worker["id"]
        for worker in get_rows(api, "/api/workers")
        if worker["job_id"] == job and worker["connected"]
    ]
    if live:
        raise StrataError(
            f"Job '{job}' is running ({', '.join(live[:3])}).", hint="It reports its checkpoints by itself."
        )
    with CheckpointManager(destinations, memory=Memory(job=f"rebuild-{os.getpid()}")) as manager:
        found = sorted(manager.all_checkpoints(), key=lambda info: info.order)
    address = str(get(api, "/api/status")["address"])
    for run in dict.fromkeys(info.run for info in found):
        infos = [info for info in found if info.run == run]
        facts: dict[str, Any] = {"run_id": run, "run_generation": max(info.generation for info in infos)}
        with TrainingOrchestrator(address, job_id=job) as orchestrator:
            orchestrator.register_worker(f"rebuild-{os.getpid()}", **facts)
            unknown = report_existing(
                orchestrator, {info.checkpoint_id: checkpoint_facts(info) for info in infos}, facts
            )
        console.print(
            f"run {run or '-'}: {len(infos)} checkpoints, up to step {infos[-1].step}; {unknown} were added",
            markup=False,
            soft_wrap=True,
        )
    if not found:
        raise StrataError(f"There are no checkpoints in {', '.join(destinations)}.", hint="Check the name.")
