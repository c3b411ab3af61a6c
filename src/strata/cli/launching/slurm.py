"""`strata slurm`: write a batch script that trains over the nodes of a Slurm cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from strata.cli.common import errors
from strata.config import ConfigError
from strata.launch.recipes_builtin import TRAINER
from strata.worker.address import coordinator_address, split_addresses


def slurm(
    target: Annotated[
        Path, typer.Argument(metavar="TARGET", help="The trainer's YAML file, or a script of your own (.py).")
    ],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="ARGUMENTS", help="section.key=value, or the script's own arguments, after --."
        ),
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name of job and rendezvous. [the file's name]")] = None,
    nodes: Annotated[int, typer.Option(help="Nodes to request.")] = 1,
    min_nodes: Annotated[
        int, typer.Option(help="Training continues while at least this many nodes are left.")
    ] = 1,
    workers: Annotated[int, typer.Option(help="Workers on each node: one per GPU.")] = 1,
    gpus: Annotated[int, typer.Option(help="GPUs of each node.")] = 0,
    cpus: Annotated[int, typer.Option(help="Cores of each node; 0: the cluster's default.")] = 0,
    memory: Annotated[str, typer.Option(help="Memory of each node, such as 64G.")] = "",
    time: Annotated[
        str, typer.Option(help="Time limit, such as 12:00:00; the job is requeued when it is reached.")
    ] = "",
    partition: Annotated[str, typer.Option(help="Slurm partition.")] = "",
    account: Annotated[str, typer.Option(help="Slurm account.")] = "",
    warning: Annotated[int, typer.Option(help="Seconds before the limit at which workers save.")] = 120,
    python: Annotated[
        str, typer.Option(help="Python interpreter on the nodes, with Strata installed.")
    ] = "python3",
    setup: Annotated[str, typer.Option(help="File to source first, such as .venv/bin/activate.")] = "",
    coordinator: Annotated[
        str | None,
        typer.Option(
            help="host:port of the coordinator's gRPC service; several separated by commas. [COORDINATOR_ADDR]"
        ),
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="File to write. [stdout]")] = None,
) -> None:
    """Write an sbatch script: an agent per node, a checkpoint before the time limit, then requeue."""
    from strata.coordinator.auth.peers import is_loopback
    from strata.launch.slurm import SlurmOptions, sbatch_script
    from strata.launch.torchrun import TorchrunSpec

    problems = []
    if target.suffix not in (".yaml", ".yml", ".py"):
        problems.append(f"'{target}' is neither a trainer's YAML file nor a Python script")
    elif not target.is_file():
        problems.append(f"there is no file '{target}'")
    try:
        address = coordinator_address(coordinator)
    except ValueError as error:
        problems.append(str(error))
        address = ""
    if problems:
        raise ConfigError(problems)
    path = str(target.absolute())
    trainer = [path] if target.suffix == ".py" else ["-m", TRAINER, "--config", path]
    run_id = name or target.stem
    spec = TorchrunSpec(
        run_id=run_id,
        arguments=[*trainer, *(arguments or [])],
        rdzv_endpoint=address,
        max_restarts=100,
        environment={"COORDINATOR_ADDR": address, "STRATA_JOB_ID": run_id},
    )
    options = SlurmOptions(
        nodes=nodes,
        min_nodes=min_nodes,
        workers_per_node=workers,
        gpus_per_node=gpus,
        cpus_per_node=cpus,
        memory=memory,
        time=time,
        partition=partition,
        account=account,
        warning_s=warning,
        python=python,
        setup=setup,
    )
    script = sbatch_script(spec, options)
    if any(is_loopback(each.rpartition(":")[0]) for each in split_addresses(address)):
        note = f"note: on each node, {address} is that node itself; pass an address that all nodes can reach with --coordinator."
        errors.print(Text(note, style="yellow"), soft_wrap=True)
    if output is None:
        typer.echo(script, nl=False)
        return
    output.write_text(script)
    output.chmod(0o755)
    typer.echo(f"Written to {output}. Submit it with: sbatch {output}")
