"""One rank of a job with sharded state: `python -m tests.training.shard_script KIND FOLDER MAX_STEPS [DIE_AT]`.

KIND is `fsdp`, `tp` (data parallel by tensor parallel, `TP` ranks each), `hsdp`, `mixed` (FSDP2 of all sorts of tensors and modules) or `ddp`. Each step's loss goes to `losses-RANK` in the folder, and the
final parameters, gathered, to `final`. With APART in the environment each rank is a machine of its own. With DIE_AT the rank named by `DIES` kills itself in that step.
With FULL=RANK:STEP[:NAME] the destinations, or the one of that name, have no space for that rank's part of that step, and with STOPPED=RANK:STEP that rank stops (SIGSTOP) when it is about to put the manifest of that step.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any, cast

import torch
from torch import distributed, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import TensorDataset

import strata
from strata.stores import Store, open_store
from strata.stores.faulty import Fault, FaultyStore, Operation
from strata.training import ElasticOptions

SAMPLES, BATCH = 96, 12


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 10)
        self.down = nn.Linear(10, 6)
        self.scale: torch.Tensor
        self.register_buffer("scale", torch.full((3,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(torch.tanh(self.up(x))) * self.scale[0]
        return out


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.last = nn.Linear(6, 1)  # Its bias is on one rank alone.
        self.first.bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = self.last(x)
        return out


class Mixed(nn.Module):
    """Tied, frozen, narrow, of one number and of none; compiled, and computed twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.blocks = nn.ModuleList(
            [cast(nn.Module, torch.compile(Block(), backend="eager")), checkpoint_wrapper(Block())]
        )
        self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 6)
        self.two.weight = self.one.weight
        self.narrow = nn.Linear(6, 5, dtype=torch.bfloat16)
        self.last = nn.Linear(5, 1)  # On one rank alone.
        self.first.bias.requires_grad_(False)
        self.nothing = nn.Parameter(torch.empty(0, 3), requires_grad=False)
        self.eight: torch.Tensor
        self.count: torch.Tensor
        self.register_buffer("eight", torch.randn(3, 5).to(torch.float8_e4m3fn))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mask", torch.tensor([True, False]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        x = self.narrow(self.two(torch.tanh(self.one(x))).to(torch.bfloat16)).float()
        out: torch.Tensor = self.last(x + self.eight.float().mean())
        return out


def build(kind: str, world: int) -> tuple[nn.Module, DeviceMesh | None]:
    torch.manual_seed(1)
    if kind == "mixed":
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("shard",))
        mixed = Mixed()
        offload = CPUOffloadPolicy(pin_memory=False)
        fully_shard(mixed.narrow, mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
        for block in mixed.blocks:
            fully_shard(block, mesh=mesh, offload_policy=offload)
        fully_shard(mixed, mesh=mesh, offload_policy=offload)
        return mixed, mesh
    model = Model()
    if kind == "ddp":
        return (nn.parallel.DistributedDataParallel(model) if world > 1 else model), None
    if kind == "tp":
        tp = int(os.environ.get("TP", "2"))
        mesh = init_device_mesh("cpu", (world // tp, tp), mesh_dim_names=("dp", "tp"))
        for block in model.blocks:
            parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
            fully_shard(block, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
        return model, mesh["dp"]
    if kind == "hsdp":
        mesh = (
            init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
            if world > 2
            else init_device_mesh("cpu", (world, 1), mesh_dim_names=("replicate", "shard"))
        )
    else:
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("shard",))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, mesh


class Ema:
    """An average of the weights, kept as they are kept."""

    def __init__(self, model: nn.Module) -> None:
        self.values = {name: value.detach().clone() for name, value in model.named_parameters()}

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        for name, value in model.named_parameters():
            self.values[name].mul_(0.9).add_(value.detach(), alpha=0.1)

    def state_dict(self) -> dict[str, Any]:
        return self.values

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = dict(state)


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def destination(path: Path, rank: int) -> Store:
    """As the environment wants it to be."""

    def is_meant(variable: str, key: str) -> bool:
        who, step, *name = os.environ.get(variable, "-1:0").split(":")
        return int(who) == rank and f"{int(step):08d}-" in key and (not name or name == [path.name])

    def choose(operation: Operation, _: object) -> Fault | None:
        if operation.name != "write":
            return None
        if operation.key.endswith(".part") and is_meant("FULL", operation.key):
            return Fault.NO_SPACE
        if operation.key.endswith(".manifest.json") and is_meant("STOPPED", operation.key):
            signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)  # Nothing more of this thread.
        return None

    return FaultyStore(open_store(path), choose=choose)


def main(kind: str, folder: Path, max_steps: int, die_at: int) -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    distributed.init_process_group("gloo")
    model, mesh = build(kind, world)
    torch.manual_seed(100 + rank)
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad],
        lr=0.02,
        foreach=kind == "hsdp",
        fused=kind == "mixed",
    )
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.97)
    ema = Ema(model)
    inputs = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(0))
    loader = strata.ElasticLoader(
        TensorDataset(inputs, inputs.sum(dim=1, keepdim=True)),
        strata.ElasticSampler(SAMPLES, global_batch_size=BATCH, dataset="numbers"),
    )
    names = os.environ.get("DESTINATIONS", "near,far").split(",")
    checkpoints = [destination(folder / name, rank) for name in names if name]
    with strata.elastic(
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        data=loader,
        mesh=mesh,
        extra={"ema": ema},
        checkpoints=checkpoints,
        max_steps=max_steps,
        options=ElasticOptions(
            save_every=int(os.environ.get("SAVE_EVERY", "4")),
            snapshot_every=int(os.environ.get("SNAPSHOT_EVERY", "1")),
            snapshot_limit_bytes=int(os.environ["LIMIT"]) if "LIMIT" in os.environ else None,
            memory_root=folder / (f"memory-{rank}" if "APART" in os.environ else "memory"),
        ),
    ) as job:
        for batch in job:
            if not (folder / f"draw-{world}-{rank}").exists():
                (folder / f"draw-{world}-{rank}").write_text(str(torch.rand(1).item()))
            if "SETTLED" in os.environ:  # Nothing is skipped, so what was saved is known.
                assert job._manager is not None
                assert job._manager.wait_idle(600)
            x, y = batch.data
            loss = nn.functional.mse_loss(model(x), y) * batch.weight
            loss.backward()
            if job.step + 1 == die_at and rank == int(os.environ.get("DIES", "0")):
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            ema.update(model)
            total = loss.detach().clone()
            distributed.all_reduce(total)
            with (folder / f"losses-{rank}").open("a") as file:
                file.write(json.dumps([job.step + 1, float(total) / world]) + "\n")
        recovery = job.recovery
    state = {name: full(value) for name, value in model.state_dict().items()}
    state |= {f"ema.{name}": full(value) for name, value in ema.values.items()}
    state |= {
        f"optimizer.{number}.{key}": full(value)
        for number, entry in optimizer.state_dict()["state"].items()
        for key, value in entry.items()
    }
    if rank == 0:
        torch.save(state, folder / "final")
        if recovery is not None:
            print(
                f"resumed {recovery.resumed_step} from {recovery.tier}: {'; '.join(recovery.reasons)}",
                flush=True,
            )
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]) if len(sys.argv) > 4 else -1)
