"""`strata bench`: each result beside its target, and beside the limits of this machine. Other projects: `benchmarks/`."""

from __future__ import annotations

from itertools import chain
from typing import Annotated

import typer

from strata.cli.common import AsJson, LiteralGroup

app = typer.Typer(
    cls=LiteralGroup,
    name="bench",
    help="Benchmark this machine: each result next to its target, and next to other tools or the hardware's limit.",
    no_args_is_help=True,
)

Quick = Annotated[bool, typer.Option("--quick", help="Small and fast: a smoke test, not a measurement.")]

Gpu = Annotated[bool, typer.Option("--gpu", help="Keep the state on a CUDA device instead of the CPU.")]


Peers = Annotated[
    bool, typer.Option("--peers", hidden=True, help="Moved: see `python -m benchmarks` in a checkout.")
]


@app.command()
def coordinator(as_json: AsJson = False, quick: Quick = False) -> None:
    """Heartbeats, barriers, shard plans, and 1,000 workers with open dashboards. Takes about five minutes."""
    from strata.bench.coordinator import suite

    suite.main(json=as_json, quick=quick)


@app.command()
def scale(
    as_json: AsJson = False,
    quick: Quick = False,
    workers: Annotated[int, typer.Option(min=20, max=20_000, help="Number of workers.")] = 10_000,
) -> None:
    """One coordinator with 10,000 workers: registration, heartbeats, a barrier, a lost rack. Takes several minutes."""
    from strata.bench.coordinator import crowd
    from strata.bench.table import report

    count = (500 if quick else workers) // crowd.RANKS_EACH * crowd.RANKS_EACH
    rows = crowd.run(workers=count, rack=max(crowd.RANKS_EACH, count // 20), watch_s=2.0 if quick else 20.0)
    report("Scale", rows, as_json=as_json)


@app.command()
def data(as_json: AsJson = False, quick: Quick = False, peers: Peers = False) -> None:
    """Building and reading token indexes, mixtures, packing, and resuming in the middle of an epoch."""
    _check_moved("--peers" if peers else "", "benchmarks.data")
    from strata.bench.data import mixture, resume, tokens
    from strata.bench.table import report

    indices = tokens.run(tokens=5_000_000, text_mb=2) if quick else tokens.run()
    sizes = {"draws": 200_000, "documents": 1_000, "batches": 10} if quick else {}
    report("Data", chain(indices, mixture.run(**sizes), resume.run()), as_json=as_json)


@app.command()
def checkpoint(as_json: AsJson = False, quick: Quick = False, gpu: Gpu = False) -> None:
    """Saving, staging and restoring, compared with the disk's own speed and other libraries."""
    from strata.bench.checkpoint import suite

    _check_device(gpu)
    suite.main(json=as_json, quick=quick, gpu=gpu)


@app.command()
def sharded(as_json: AsJson = False, quick: Quick = False, gpu: Gpu = False) -> None:
    """Sharded state saved by two ranks and loaded by three, compared with PyTorch's distributed checkpoints."""
    if gpu:
        from strata.bench.checkpoint import sharded_gpu

        _check_device(gpu)
        sharded_gpu.main(json=as_json, quick=quick)
        return
    from strata.bench.checkpoint import sharded

    sharded.main(json=as_json, quick=quick)


@app.command()
def peers(as_json: AsJson = False, quick: Quick = False) -> None:
    """Snapshot copies in other machines' memory: sending, restoring, losing a machine, compared with plain TCP and S3."""
    from strata.bench.checkpoint import peer_memory
    from strata.bench.table import report

    report("Copies in other machines' memory", peer_memory.run(quick=quick), as_json=as_json)


@app.command()
def recovery(as_json: AsJson = False, quick: Quick = False, peers: Peers = False, gpu: Gpu = False) -> None:
    """Time from losing a process or a node to the next step, compared with plain torchrun."""
    _check_moved("--peers" if peers else "", "benchmarks.recovery")
    if gpu:
        from strata.bench.recovery import gpu as on_gpu

        _check_device(gpu)
        on_gpu.main(as_json=as_json, quick=quick)
        return
    from strata.bench.recovery import suite

    suite.main(as_json=as_json, quick=quick)


@app.command(hidden=True)
def dashboard(as_json: AsJson = False, quick: Quick = False) -> None:
    """Moved: the dashboard is measured in a browser, from a checkout."""
    _check_moved("strata bench dashboard", "benchmarks.dashboard")


def _check_moved(asked: str, module: str) -> None:
    """What needs other projects or a browser is not in the package."""
    if asked:
        raise typer.BadParameter(
            f"This benchmark runs from a checkout of Strata: python -m {module}", param_hint=asked
        )


def _check_device(gpu: bool) -> None:
    if gpu:
        import torch

        if not torch.cuda.is_available():
            raise typer.BadParameter("PyTorch finds no CUDA device on this machine.", param_hint="--gpu")
