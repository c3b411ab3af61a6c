"""`strata backup` and `strata restore`: a copy of what a coordinator keeps, and a coordinator from it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from strata.cli.common import console, timestamp
from strata.coordinator.backup import back_up
from strata.coordinator.backup import restore as restore_backup

DataDir = Annotated[
    Path,
    typer.Option(
        envvar="STRATA_DATA_DIR", help="The coordinator's data directory.", show_default="~/.strata"
    ),
]
DEFAULT_DATA_DIR = Path.home() / ".strata"


def backup(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The backup to write, such as strata.tar.gz.")],
    data_dir: DataDir = DEFAULT_DATA_DIR,
    history: Annotated[bool, typer.Option(help="Also copy the log and the metrics of runs.")] = True,
) -> None:
    """Copy what a coordinator keeps into one file, while it runs: journal, tokens, recipes, log, metrics. Keep it as you would keep a
    password; checkpoints and the folders of tasks are not in it."""
    made = back_up(data_dir, file, history=history)
    console.print(
        f"{file}: {len(made.files)} files, {made.size_bytes / 1e6:,.1f} MB before compression. "
        f"Restore it with: strata restore {file} --data-dir DIR",
        markup=False,
        soft_wrap=True,
    )


def restore(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="What `strata backup` has written.")],
    data_dir: DataDir = DEFAULT_DATA_DIR,
) -> None:
    """Make a data directory from a backup, verified. It must not exist yet, or be empty."""
    found = restore_backup(file, data_dir)
    console.print(
        f"{data_dir} is as the coordinator on {found.host} was at {timestamp(found.created_at_s)}. What it acknowledged since is "
        f"not in it: workers register again by themselves, and checkpoints are found by their manifests. "
        f"Start it with: strata serve --data-dir {data_dir}",
        markup=False,
        soft_wrap=True,
    )
