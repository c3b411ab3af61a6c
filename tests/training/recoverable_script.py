"""A rank of a recoverable job: `recoverable_script.py FOLDER KIND MAX_STEPS`.

The gradients of kind `ddp` are sums of whole numbers, so the parameters are the same bit for bit whoever computed them: what they
are at the end says which samples were trained, and how often. `fsdp` is an FSDP2 model with Adam and dropout, and `tensor` the same
model in tensor parallel. `adam` is a small network under DDP, whose parameters depend on who computed what.

With SCHEDULE in the environment, a list of `[world, first, end]`, nothing is recovered: so many ranks train these steps of kind `adam`,
and hand their state on.

With PLAIN in the environment nothing recovers in its process. With PEERS (`peer`, `peer:2`), snapshots are copied to other machines as well.

What it does is written to FOLDER/log, a line each, also that it is a spare or waits; FOLDER/faults-SLOT may hold Python that is run after every step.
While there is FOLDER/held, the second half of the steps is slow: what a test waits for comes before the end.
"""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

import strata
from strata.agent.channel import WorkerChannel
from strata.training import ElasticOptions
from strata.training.recoverable import Run

SAMPLES, BATCH = 4096, 32
FOLDER, KIND, MAX_STEPS = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
STEP_S = float(os.environ.get("STEP_S", "0.01"))
HELD_STEP_S = 0.2
LOADER_PROCESSES = int(os.environ.get("LOADER_PROCESSES", "0"))
GROUP_TIMEOUT_S = os.environ.get("GROUP_TIMEOUT_S")


class Numbers(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, number: int) -> torch.Tensor:
        if LOADER_PROCESSES:
            loader_fault()
        return torch.tensor([float(number % 13), float(number % 7), 1.0, float(number)], dtype=torch.float64)


def loader_fault() -> None:
    """FOLDER/loader-fault holds the slot whose loader process is to end without a word."""
    path = FOLDER / "loader-fault"
    with suppress(FileNotFoundError):
        if path.read_text() == os.environ.get("STRATA_SLOT"):
            path.unlink(missing_ok=True)
            os._exit(3)


class Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.weight).sum(dim=1)


def build(run: Run) -> tuple[nn.Module, torch.optim.Optimizer, DeviceMesh | None]:
    torch.manual_seed(3)
    if KIND == "ddp":
        replicated = DistributedDataParallel(Weighted())
        return replicated, torch.optim.SGD(replicated.parameters(), lr=1.0), None
    model, mesh = network(dropout=0.0 if KIND == "adam" else 0.2), None
    if KIND == "fsdp":
        fully_shard(model)
    elif KIND == "tensor":
        whole = init_device_mesh("cpu", (1, run.world_size), mesh_dim_names=("dp", "tp"))
        parallelize_module(model, whole["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        mesh = whole["dp"]
    torch.manual_seed(100 + run.rank)
    wrapped = DistributedDataParallel(model) if KIND == "adam" else model
    return wrapped, torch.optim.AdamW(model.parameters(), lr=1e-3), mesh


def network(*, dropout: float = 0.0) -> nn.Sequential:
    exact = torch.float64
    return nn.Sequential(nn.Linear(4, 16, dtype=exact), nn.Dropout(dropout), nn.Linear(16, 1, dtype=exact))


def note(**what: Any) -> None:
    """One write, so that lines of several processes do not mix."""
    with open(FOLDER / "log", "a") as file:
        who = {
            "pid": os.getpid(),
            "slot": int(os.environ.get("STRATA_SLOT", "0")),
            "machine": os.environ.get("MACHINE"),
        }
        file.write(repr({**who, **what}) + "\n")


def note_arrival(entrance: str) -> None:
    """That it is a spare, or waits, once its agent knows that it does."""
    send = WorkerChannel.send

    def noting(self: WorkerChannel, kind: str, **fields: Any) -> None:
        send(self, kind, **fields)
        if kind == "arrived":
            note(**{entrance: os.environ["RANK"]})

    WorkerChannel.send = noting  # type: ignore[method-assign]


def faults(step: int) -> None:
    path = FOLDER / f"faults-{os.environ.get('STRATA_SLOT', '0')}"
    try:
        program = path.read_text()
    except FileNotFoundError:  # There is none; or the same slot of another machine has just removed it.
        return
    exec(program, {"step": step, "folder": FOLDER, "path": path})  # noqa: S102


def train(run: Run) -> None:
    note(
        entered=run.generation,
        rank=run.rank,
        local=run.local_rank,
        world=run.world_size,
        restarts=run.restarts,
        reason=run.reason,
    )
    data = run.keep("data", Numbers)
    sampler = strata.ElasticSampler(SAMPLES, global_batch_size=BATCH, dataset="numbers", seed=5)
    loader = strata.ElasticLoader(data, sampler, num_workers=LOADER_PROCESSES)
    model, optimizer, mesh = build(run)
    options = ElasticOptions(snapshot_every=20, save_every=int(os.environ.get("SAVE_EVERY", "100")))
    peers = [name] if (name := os.environ.get("PEERS")) else []
    with strata.elastic(
        model=model,
        optimizer=optimizer,
        data=loader,
        checkpoints=[*peers, str(FOLDER / "checkpoints")],
        max_steps=MAX_STEPS,
        mesh=mesh,
        options=options,
    ) as job:
        recovery = job.recovery
        lost, tier = (recovery.lost_steps, recovery.tier) if recovery is not None else (0, "")
        note(resumed=job.step, lost=lost, tier=tier)
        for batch in job:
            loss = model(batch.data).sum() / max(len(batch.data), 1)
            (loss * batch.weight).backward()
            optimizer.step()
            optimizer.zero_grad()
            is_held = job.step >= MAX_STEPS // 2 and (FOLDER / "held").exists()
            time.sleep(HELD_STEP_S if is_held else STEP_S)
            faults(job.step)
    weights = {
        name: tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        for name, tensor in model.state_dict().items()
    }
    if distributed.get_rank() == 0:
        torch.save(weights, FOLDER / "final.pt")
    note(finished=job.step)


def train_plainly() -> None:
    """As a script does that knows nothing of recovery: whoever is left is started again."""
    distributed.init_process_group("gloo")
    train(
        Run(
            rank=distributed.get_rank(),
            world_size=distributed.get_world_size(),
            local_rank=int(os.environ["LOCAL_RANK"]),
            generation=0,
            restarts=0,
        )
    )
    distributed.destroy_process_group()


def follow(schedule: list[tuple[int, int, int]]) -> None:
    distributed.init_process_group("gloo")
    rank, epoch = distributed.get_rank(), SAMPLES // BATCH
    data = Numbers()
    state: list[dict[str, Any]] = [{}, {}]
    torch.manual_seed(3)
    for world, first, end in schedule:
        group = distributed.new_group(list(range(world)))
        if rank < world:
            model = network()
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            if first:
                model.load_state_dict(state[0])
                optimizer.load_state_dict(state[1])
            wrapped = DistributedDataParallel(model, process_group=group)
            sampler = strata.ElasticSampler(SAMPLES, global_batch_size=BATCH, dataset="numbers", seed=5)
            sampler.set_world(rank, world)
            for number in range(first, end):
                step, ids = next(sampler.batches(at=(number // epoch, number % epoch * BATCH)))
                rows = torch.stack([data[sample] for sample in ids])
                ((wrapped(rows).sum() / len(rows)) * step.weight).backward()
                optimizer.step()
                optimizer.zero_grad()
            state = [model.state_dict(), optimizer.state_dict()]
        distributed.broadcast_object_list(state)
    if rank == 0:
        torch.save({f"module.{name}": tensor for name, tensor in state[0].items()}, FOLDER / "final.pt")
    distributed.destroy_process_group()


if __name__ == "__main__":
    if entrance := os.environ.get("STRATA_ENTRANCE"):
        note_arrival(entrance)
    if "SCHEDULE" in os.environ:
        follow(json.loads(os.environ["SCHEDULE"]))
    elif "PLAIN" in os.environ:
        train_plainly()
    else:
        recover = strata.recoverable(
            timeout_s=float(os.environ.get("TIMEOUT_S", "60")),
            group_timeout_s=float(GROUP_TIMEOUT_S) if GROUP_TIMEOUT_S else None,
        )
        recover(train)()
