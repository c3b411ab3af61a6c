"""Elastic training for any loop: resume, save, follow the fleet, leave in good order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from strata.errors import require_linux
from strata.lazy_names import lazy_names

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    from strata.agent.trace import Recovery as Recovery
    from strata.agent.trace import Tracer as Tracer
    from strata.checkpoint.destinations import Destination
    from strata.data.loading.adapt import AnyData
    from strata.sinks import Sink
    from strata.training.job import ElasticJob as ElasticJob
    from strata.training.job import ElasticOptions as ElasticOptions
    from strata.training.job import Preempted as Preempted
    from strata.training.state import Stateful

_HOMES = {
    "ElasticJob": ".job",
    "ElasticOptions": ".job",
    "Preempted": ".job",
    "Recovery": "strata.agent.trace",
    "Tracer": "strata.agent.trace",
}

__all__ = sorted([*_HOMES, "elastic"])
__getattr__, __dir__ = lazy_names(__name__, _HOMES)


def elastic(
    *,
    model: torch.nn.Module,
    optimizer: Stateful,
    data: AnyData,
    global_batch_size: int | None = None,
    checkpoints: Destination | Sequence[Destination] | None = None,
    scheduler: Stateful | None = None,
    extra: Mapping[str, Stateful] | None = None,
    epochs: int | None = None,
    max_steps: int | None = None,
    mesh: DeviceMesh | None = None,
    options: ElasticOptions | None = None,
    job: str | None = None,
    coordinator: str | None = None,
    sinks: Sequence[Sink] = (),
    config: Mapping[str, Any] | None = None,
    on_restored: Callable[[Mapping[str, Any]], None] | None = None,
    data_path: str = "",
    data_format: str = "samples",
    data_metadata: Mapping[str, str] | None = None,
) -> ElasticJob:
    """A training loop that outlives its machines.

        with strata.elastic(model=model, optimizer=optimizer, data=loader, checkpoints="runs/a", epochs=3) as job:
            for batch in job:
                loss = criterion(model(batch.data)) * batch.weight
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()

    Entering restores the newest state that any machine or destination has; the loop trains from the exact next step and
    ends when `epochs` or `max_steps` are reached. After `break` the job may be iterated again; leaving the block saves the
    final state to every destination, or raises an error that names the missing ones.

    model: as usual: plain, DDP, FSDP2, HSDP or tensor parallel, also as Accelerate and Lightning Fabric return it.
    optimizer, scheduler: anything with `state_dict` and `load_state_dict`; Accelerate's and Fabric's wrappers are unwrapped.
    data: what training reads; the job keeps its position and its ledger. An `ElasticLoader`; a plain `DataLoader` or torchdata's
        `StatefulDataLoader`, whose sampling is replaced by one that is exact; a dataset; an iterable dataset with `state_dict`
        and `load_state_dict`; or paths, globs and URLs of files.
    global_batch_size: for data without a batch size (datasets, paths). It takes precedence over the batch size of a
        `DataLoader`, which is per rank.
    checkpoints: destinations, nearest first: a folder, `s3://bucket/prefix`, or a list of them. `[]` keeps the state in
        memory only. `peer` (or `peer:2`) among them copies snapshots to the memory of one (or two) other machines. The run's
        identity is stored in the destinations: the same ones continue the same run.
    mesh: the dimensions of a device mesh along which data differs, such as `mesh["dp"]`; by default all ranks read different
        data. Ranks that differ along others (a tensor-parallel group) read the same batches, which count once.
    extra: further objects to save with the state, by name.
    options: `ElasticOptions`: how often to save, how many to keep, what to do when a save fails, deadlines.
    job: a display name. A destination records it, and refuses a job with another name.
    coordinator: its address; by default from `COORDINATOR_ADDR` or `COORDINATOR_URL`; without these, no coordinator is used.
    sinks: further destinations of logged metrics: `strata.sinks.TensorBoard(folder)`, `WeightsAndBiases`, `MLflow`.
    config: the configuration of the loop, shown on the page of the run and in comparisons; values that look like secrets are
        not sent.
    on_restored: called with the restored state, before the first step.
    data_path, data_format, data_metadata: what the dashboard shows of the data.

    The job has `step` (optimizer steps over all restarts), `restored` (whether it continues from a checkpoint),
    `recovery` (what this start recovered from: phases, steps lost, tier; or None), `run` and `generation`,
    `evaluate(loader, measure)`, which reads other data without disturbing any of this, and
    `log({"loss": loss, "eval": {"accuracy": x}})`, which keeps values by step in the coordinator's history of the run.
    """
    require_linux()
    from strata.training.job import ElasticJob

    return ElasticJob(
        model=model,
        optimizer=optimizer,
        data=data,
        global_batch_size=global_batch_size,
        checkpoints=checkpoints,
        scheduler=scheduler,
        extra=extra,
        epochs=epochs,
        max_steps=max_steps,
        mesh=mesh,
        options=options,
        job=job,
        coordinator=coordinator,
        sinks=sinks,
        config=config,
        on_restored=on_restored,
        data_path=data_path,
        data_format=data_format,
        data_metadata=data_metadata,
    )
