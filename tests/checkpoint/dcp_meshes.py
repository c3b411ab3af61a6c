"""One state laid out over ranks in many ways, saved and loaded by Strata and by PyTorch's own files side by side.

Runs in the ranks of a world (`dcp_actor.run_world`). What a rank loads must be, bit for bit, its share of the state, and
the same from both.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from strata.checkpoint.dcp import StrataStorageReader, StrataStorageWriter

SHAPES = {
    "even": (8, 8),
    "uneven": (5, 7),
    "few": (2, 3),  # Fewer rows than ranks: shards of no size on some.
    "cube": (3, 5, 4),
    "long": (9, 2, 3),
    "vector": (6,),
    "one": (1,),
    "empty": (0, 4),
    "scalar": (),
}

LAYOUTS: dict[str, tuple[tuple[int, ...], tuple[Placement, ...]]] = {
    "rows": ((4,), (Shard(0),)),
    "columns": ((4,), (Shard(1),)),
    "replicated": ((4,), (Replicate(),)),
    "grid": ((2, 2), (Shard(0), Shard(1))),
    "grid, turned": ((2, 2), (Shard(1), Shard(0))),
    "rows twice": ((2, 2), (Shard(0), Shard(0))),
    "hybrid": ((2, 2), (Replicate(), Shard(0))),
    "one by four": ((1, 4), (Shard(0), Shard(1))),
}
SMALLER: dict[str, tuple[tuple[int, ...], tuple[Placement, ...]]] = {
    "rows of 2": ((2,), (Shard(0),)),
    "columns of 2": ((2,), (Shard(1),)),
    "2 by 1": ((2, 1), (Shard(0), Shard(1))),
    "replicated on 2": ((2,), (Replicate(),)),
}


def values() -> dict[str, torch.Tensor]:
    torch.manual_seed(5)
    return {
        name: torch.randn(shape, dtype=torch.float64 if name == "cube" else torch.float32)
        for name, shape in SHAPES.items()
    }


def laid_out(shape: Sequence[int], placements: Sequence[Placement], *, is_filled: bool) -> dict[str, Any]:
    """The state over a mesh. A tensor that has no such dimension is sharded along its first, one without any not at all."""
    mesh = init_device_mesh("cpu", tuple(shape))
    state: dict[str, Any] = {}
    for name, value in values().items():
        fitting = [_fitting(placement, value.ndim) for placement in placements]
        content = value if is_filled else torch.full_like(value, -1)
        state[name] = distribute_tensor(content, mesh, fitting)
    state["plain"] = torch.arange(11) if is_filled else torch.zeros(11, dtype=torch.int64)
    state["nested"] = {"list": [3, {"name": "run"}] if is_filled else [0, {"name": ""}]}
    return state


def _fitting(placement: Placement, dimensions: int) -> Placement:
    if isinstance(placement, Shard):
        return Shard(min(placement.dim, dimensions - 1)) if dimensions else Replicate()
    return placement


def save_each(rank: int, world: int, folder: Path, *, layouts: Sequence[str]) -> dict[str, Any]:
    """Every layout through both writers, the last one asynchronously."""
    for name in layouts:
        state = laid_out(*_layout(name), is_filled=True)
        for kind in ("strata", "dcp"):
            writer: Any = _writer(kind, folder / kind / name)
            if name == layouts[-1]:
                saving = dcp.async_save(state, storage_writer=writer)
                assert isinstance(saving, Future)
                saving.result()
            else:
                dcp.save(state, storage_writer=writer)
    return {}


def load_each(
    rank: int, world: int, folder: Path, *, saved: Sequence[str], layouts: Sequence[str]
) -> dict[str, Any]:
    """Each saved layout into each layout through both readers: what came out otherwise than it should."""
    wrong = []
    for source in saved:
        for target in layouts:
            expected = laid_out(*_layout(target), is_filled=True)
            for kind in ("strata", "dcp"):
                state = laid_out(*_layout(target), is_filled=False)
                dcp.load(state, storage_reader=_reader(kind, folder / kind / source))
                wrong += [f"{source} → {target}, {kind}: {name}" for name in _differing(state, expected)]
    return {"wrong": wrong, "pairs": len(saved) * len(layouts)}


def save_models(rank: int, world: int, folder: Path) -> dict[str, Any]:
    """A model that is tensor-parallel and sharded by FSDP2 over the other dimension."""
    state = get_model_state_dict(_model((2, 2), seed=3))
    for kind in ("strata", "dcp"):
        dcp.save(state, storage_writer=_writer(kind, folder / kind))
    return {"full": _full(state)}


def load_models(rank: int, world: int, folder: Path, *, mesh: tuple[int, ...]) -> dict[str, Any]:
    found = {}
    for kind in ("strata", "dcp"):
        state = get_model_state_dict(_model(mesh, seed=9))
        dcp.load(state, storage_reader=_reader(kind, folder / kind))
        found[kind] = _full(state)
    return found


def _model(shape: tuple[int, ...], *, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 5))
    if len(shape) == 1:
        fully_shard(model, mesh=init_device_mesh("cpu", shape))
        return model
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    return model


def _full(state: dict[str, Any]) -> dict[str, list[Any]]:
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).tolist()
        for name, value in state.items()
    }


def _differing(state: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    found = []
    for name, value in expected.items():
        mine = state[name]
        if isinstance(value, DTensor):
            same = torch.equal(mine.to_local(), value.to_local())
        elif isinstance(value, torch.Tensor):
            same = torch.equal(mine, value)
        else:
            same = mine == value
        if not same:
            found.append(name)
    return found


def _layout(name: str) -> tuple[tuple[int, ...], tuple[Placement, ...]]:
    return LAYOUTS[name] if name in LAYOUTS else SMALLER[name]


def _writer(kind: str, folder: Path) -> Any:
    return StrataStorageWriter(folder, step=1) if kind == "strata" else dcp.FileSystemWriter(folder)


def _reader(kind: str, folder: Path) -> Any:
    return StrataStorageReader(folder) if kind == "strata" else dcp.FileSystemReader(folder)
