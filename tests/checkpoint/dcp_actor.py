"""Worlds of real processes that save and load sharded state.

    results = run_world(4, "save", folder, steps=[1])

Each rank tells what happened, and a digest of the whole state as its world sees it; a rank that was killed tells
nothing. Ranks are forked from one process that has imported everything once.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import logging
import multiprocessing
import os
import random
import tempfile
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import distributed, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from strata.checkpoint.dcp import StrataStorageReader, StrataStorageWriter
from strata.stores import open_store
from strata.stores.faulty import Fault, FaultyStore, Operation, crash_by_signal
from strata.stores.protocol import Store

DEADLINE_S = 100.0
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload([__name__])


Action: TypeAlias = str | Callable[..., dict[str, Any]]
"""What a rank does: save or load, or a function that gets rank, world, folder and options."""


def run_world(world: int, action: Action, folder: Path, **options: Any) -> list[dict[str, Any] | None]:
    """Let a world of this size act; what each rank has to tell, None for one that died."""
    with tempfile.TemporaryDirectory() as meeting:
        pipes = [_context.Pipe(duplex=False) for _ in range(world)]
        ranks = [
            _context.Process(
                target=_rank,
                args=(pipes[rank][1], f"{meeting}/store", rank, world, action, str(folder), options),
            )
            for rank in range(world)
        ]
        for process, (_, sender) in zip(ranks, pipes, strict=True):
            process.start()
            sender.close()
        results = [_received(receiver) for receiver, _ in pipes]
        for process in ranks:
            process.join(DEADLINE_S)
            if process.is_alive():
                process.kill()
                process.join()
                raise AssertionError(f"a rank did not end: {results}")
    return results


def _received(receiver: Connection) -> dict[str, Any] | None:
    try:
        assert receiver.poll(DEADLINE_S), "a rank did not answer"
        answer: dict[str, Any] = receiver.recv()
        return answer
    except EOFError:
        return None
    finally:
        receiver.close()


class Model(nn.Module):
    """Tied weights, sizes that no number of ranks divides, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(37, 13)
        self.hidden = nn.Sequential(nn.Linear(13, 29), nn.ReLU(), nn.Linear(29, 13, bias=False))
        self.head = nn.Linear(13, 37, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("average", torch.arange(5.0))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.head(self.hidden(self.embedding(tokens)))
        return output


class World:
    """A model that this world has sharded, trained for some steps from a seed, and tensors beside it."""

    def __init__(self, mesh: DeviceMesh, *, seed: int, steps: int) -> None:
        torch.manual_seed(seed)
        self.model = Model()
        for layer in self.model.hidden:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        for step in range(max(steps, 1)):
            tokens = torch.randint(0, 37, (4, 6), generator=torch.Generator().manual_seed(step))
            self.model(tokens).square().mean().backward()
            if steps:
                self.optimizer.step()
            self.optimizer.zero_grad()
        fill = (lambda *shape: torch.randn(*shape)) if steps else torch.zeros
        self.extra: dict[str, Any] = {
            "columns": distribute_tensor(fill(6, 11), mesh, [Shard(1)]),
            "rows": distribute_tensor(fill(2, 3), mesh, [Shard(0)]),  # Fewer rows than ranks.
            "replicated": distribute_tensor(fill(5, 4), mesh, [Replicate()]),
            "plain": [fill(1000).bfloat16() for _ in range(8)],
            "scalar": fill(1)[0],
            "empty": torch.zeros(0, 3),
            "step": steps,
            "name": "run" if steps else "",
            "betas": (0.9, 0.95) if steps else (),
        }

    def state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, **self.extra}

    def load(self, reader: StrataStorageReader) -> None:
        state = self.state()
        dcp.load(state, storage_reader=reader)
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        self.extra = {key: state[key] for key in self.extra}

    def digest(self) -> str:
        """Of the full state, whoever holds which part of it."""
        hasher = hashlib.sha256()
        _digest("", self.state(), hasher)
        return hasher.hexdigest()


def _digest(name: str, value: Any, hasher: Any) -> None:
    if isinstance(value, dict):
        for key in sorted(value):
            _digest(f"{name}.{key}", value[key], hasher)
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            _digest(f"{name}.{number}", item, hasher)
    elif isinstance(value, torch.Tensor):
        full = value.full_tensor() if isinstance(value, DTensor) else value
        raw = full.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        hasher.update(f"{name}{full.dtype}{tuple(full.shape)}".encode() + raw)
    else:
        hasher.update(f"{name}={value!r}".encode())


def _store(folder: str, rank: int, fault: dict[str, Any] | None) -> Store:
    store = open_store(folder)
    if fault is None or fault["rank"] != rank:
        return store
    kind, at, seen = Fault[fault["kind"]], fault["at"], itertools.count()

    def choose(operation: Operation, chance: random.Random) -> Fault | None:
        """At the n-th write or commit of keys that end so."""
        hit = operation.name in ("write", "commit") and operation.key.endswith(fault["key"])
        return kind if hit and next(seen) == at else None

    return FaultyStore(store, choose=choose, crash=crash_by_signal)


def act(rank: int, world: int, action: Action, folder: str, **options: Any) -> dict[str, Any]:
    if not isinstance(action, str):
        return action(rank, world, Path(folder), **options)
    mesh = init_device_mesh("cpu", (world,))
    store = _store(folder, rank, options.get("fault"))
    if action == "load":
        reader = StrataStorageReader(store, step=options.get("step"))
        sharded = World(mesh, seed=99, steps=0)
        sharded.load(reader)
        return {"digest": sharded.digest(), "step": reader.info.step}
    sharded = World(mesh, seed=options.get("seed", 1), steps=2)
    saved: list[str | None] = []
    for step in options["steps"]:
        writer = StrataStorageWriter(store, step=step, generation=options.get("generation", 0))
        try:
            if options.get("asynchronous"):
                saving = dcp.async_save(sharded.state(), storage_writer=writer)
                assert isinstance(saving, Future)
                saving.result()
            else:
                dcp.save(sharded.state(), storage_writer=writer)
        except CheckpointException:
            if step == options["steps"][-1]:
                raise
            saved.append("failed")  # Train on, and save again.
        else:
            saved.append(writer.info.checkpoint_id if writer.info else None)
    return {"digest": sharded.digest(), "saved": saved}


def _rank(
    sender: Connection,
    meeting: str,
    rank: int,
    world: int,
    action: Action,
    folder: str,
    options: dict[str, Any],
) -> None:
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{meeting}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=DEADLINE_S / 2),
    )
    try:
        result = act(rank, world, action, folder, **options)
    except CheckpointException as error:
        result = {"failures": {number: failure for number, (failure, _) in error.failures.items()}}
    except RuntimeError as error:  # What gloo says when another rank has died.
        result = {"lost": str(error)}
    sender.send(result)
    if "lost" not in result:
        with contextlib.suppress(RuntimeError):
            distributed.barrier()  # Who leaves while another is still in its last collective would spoil that.
        distributed.destroy_process_group()
