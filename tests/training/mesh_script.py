"""One rank of a job whose ranks read the same data in pairs: `python -m tests.training.mesh_script FOLDER CASE`.

It says what it has seen, or why it was refused.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from strata.errors import StrataError
from strata.training.data_world import DataWorld
from tests.support_ranks import join, say
from tests.training.loops import Loop

SAMPLES, BATCH = 60, 7
"""Slices of one batch differ in size, so their weights do."""


def train(folder: Path, mesh: DeviceMesh | None, **sampler: Any) -> dict[str, Any]:
    loop = Loop(
        folder / "checkpoints",
        samples=SAMPLES,
        mesh=mesh,
        sampler={"global_batch_size": BATCH, **sampler},
        unreachable_timeout_s=60.0,
        memory_root=folder / "memory",
    )
    seen = []
    with loop.job as job:
        for batch in job:
            seen.append([*batch.data[1].flatten().tolist(), batch.weight])
            loop.backward(batch)
            for parameter in loop.model.parameters():
                assert parameter.grad is not None
                if mesh is not None:
                    distributed.all_reduce(parameter.grad, group=mesh.get_group())
                    parameter.grad /= mesh.size()
            loop.optimizer.step()
            loop.optimizer.zero_grad()
    return {"seen": seen, "weights": loop.weights.tolist()}


def differing_records() -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["dp"]
    world = DataWorld(mesh)
    world.join(Loop([]).loader)
    same = world.gather([{"rank": world.rank}])
    assert same == [[{"rank": 0}], [{"rank": 1}]], same
    world.gather([{"rank": world.rank, "runs": int(distributed.get_rank() == 3)}])
    raise AssertionError("rank 3 had another record")


def run(case: str, folder: Path) -> dict[str, Any]:
    rank = distributed.get_rank()
    if case == "differing-records":
        return differing_records()
    if case == "outside":
        return train(folder, DeviceMesh("cpu", torch.tensor([0, 1])))
    if case == "two-dimensions":
        whole = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("replicate", "shard", "tp"))
        world = DataWorld(whole["replicate", "shard"])
        world.join(Loop([]).loader)
        return {"data": (world.rank, world.size)}
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["dp"]
    if case == "some-without":
        return train(folder, mesh if rank != 2 else None)
    return train(folder, mesh, seed=7 if case == "differing-seeds" and rank == 1 else 0)


def main() -> None:
    folder, case = Path(sys.argv[1]), sys.argv[2]
    join(folder)
    try:
        result = run(case, folder)
    except StrataError as error:
        result = {"refused": str(error)}
    say(folder, result)


if __name__ == "__main__":
    main()
