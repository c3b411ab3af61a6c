"""A small real training job, to be killed: `python -m tests.data.trainer --help`.

Forks one process per rank after importing torch once. Each reads real files through a loader process that
prefetches, meets the others over gloo, and rank 0 writes real checkpoints. The state holds, beside the weights, how
often and in which order every sample was learned from: evidence that does not come from the ledger.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from strata.checkpoint import CheckpointManager
from strata.core.order import EpochOrder
from strata.data import DataLedger, ElasticDataset, ElasticIterableDataset, ElasticLoader, ElasticSampler

GLOBAL_BATCH = 24
SAVE_EVERY = 4
SEED = 11


def decode(row: dict[str, Any]) -> tuple[int, torch.Tensor]:
    return row["id"], torch.tensor(row["x"], dtype=torch.float32)


def train(rank: int, world: int, args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{args.meet}", rank=rank, world_size=world)
    dataset = ElasticDataset(args.data, transform=decode)
    sampler = ElasticSampler(
        len(dataset), global_batch_size=GLOBAL_BATCH, seed=SEED, rank=rank, world_size=world, dataset="d"
    )
    options: dict[str, Any] = {"num_workers": 1, "prefetch_factor": 4, "persistent_workers": True}
    loader = (
        ElasticLoader(ElasticIterableDataset(dataset, sampler), **options)
        if args.kind == "iterable"
        else ElasticLoader(dataset, sampler, **options)
    )
    ledger = DataLedger(loader)
    weights = torch.zeros(4)
    learned: list[int] = []
    with CheckpointManager(args.checkpoints if rank == 0 else [], keep_count=1_000) as manager:
        restored: list[Any] = [None]
        if rank == 0 and manager.get_latest() is not None:
            found = manager.restore()
            restored = [(found.state, found.info.data, any(tier != "MEMORY" for tier in found.info.tiers))]
        distributed.broadcast_object_list(restored, src=0)
        if restored[0] is not None:
            state, position, lasting = restored[0]
            weights, learned = state["weights"], state["learned"].tolist()
            ledger.restore(position, lasting=lasting)
        print(f"ready rank={rank} pid={os.getpid()} position={loader.position}", flush=True)
        step = -(-len(learned) // GLOBAL_BATCH)
        while loader.epoch == 0:
            for batch in loader:
                ids, x = batch.data
                gradient = x.mean(dim=0) * batch.weight
                distributed.all_reduce(gradient)
                weights = weights - 0.01 * gradient / world
                everyone: list[list[int]] = [[] for _ in range(world)]
                distributed.all_gather_object(everyone, ids.tolist() if len(batch.step) else [])
                learned += [sample for mine in everyone for sample in mine]
                step += 1
                if step % SAVE_EVERY == 0 or loader.epoch:
                    position = ledger.commit()
                    if rank == 0:
                        manager.save(
                            {"weights": weights, "learned": torch.tensor(learned)}, step, position=position
                        ).result(60)
                if rank == 0:
                    print(f"step {step}", flush=True)
    if rank == 0:
        calm = EpochOrder(total=len(dataset), seed=SEED)[:].tolist()
        assert learned == calm, "the weights have learned something else than a calm run would"
        print("done", flush=True)
    distributed.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--world", type=int, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--checkpoints", type=Path, required=True)
    parser.add_argument("--meet", type=Path, required=True)
    parser.add_argument("--kind", choices=["map", "iterable"], default="map")
    args = parser.parse_args()
    children = []
    for rank in range(args.world):
        pid = os.fork()
        if pid == 0:
            try:
                train(rank, args.world, args)
            except BaseException as error:  # When a peer is killed, gloo says so in one of several ways.
                print(f"rank {rank} ended: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
                os._exit(1)
            os._exit(0)
        children.append(pid)
    failures = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
    sys.exit(1 if any(failures) else 0)


if __name__ == "__main__":
    main()
