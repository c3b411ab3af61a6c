"""A small real training job, to be killed: `python -m tests.data.trainer --help`.

Forks one process per rank after importing torch once. Each reads real files through a loader process that
prefetches, meets the others over gloo, and takes part in an elastic job at a real coordinator. The state holds, beside
the weights, which samples were learned from, in which order: evidence that does not come from the ledger.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import distributed

import strata
from strata.data import ElasticDataset, ElasticIterableDataset, ElasticLoader, ElasticSampler
from strata.training.job import ElasticOptions

DATASET = "d"
GLOBAL_BATCH = 24
SAVE_EVERY, SNAPSHOT_EVERY = 4, 3
SEED = 11


class Learned:
    """The samples that the weights have learned from."""

    def __init__(self) -> None:
        self.ids: list[int] = []

    def state_dict(self) -> dict[str, Any]:
        return {"ids": torch.tensor(self.ids)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.ids = state["ids"].tolist()


def decode(row: dict[str, Any]) -> tuple[int, torch.Tensor]:
    return row["id"], torch.tensor(row["x"], dtype=torch.float32)


def build_loader(args: argparse.Namespace, rank: int) -> ElasticLoader:
    dataset = ElasticDataset(args.data, transform=decode)
    sampler = ElasticSampler(
        len(dataset),
        global_batch_size=GLOBAL_BATCH,
        seed=SEED,
        rank=rank,
        world_size=args.world,
        dataset=DATASET,
    )
    options: dict[str, Any] = {"num_workers": 1, "prefetch_factor": 4, "persistent_workers": True}
    if args.kind == "iterable":
        return ElasticLoader(ElasticIterableDataset(dataset, sampler), commit="explicit", **options)
    return ElasticLoader(dataset, sampler, commit="explicit", **options)


def train(rank: int, args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    os.environ["LOCAL_RANK"] = str(rank)
    distributed.init_process_group(
        "gloo", init_method=f"file://{args.meet}", rank=rank, world_size=args.world
    )
    loader = build_loader(args, rank)
    model = torch.nn.Linear(4, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    learned = Learned()
    job = strata.elastic(
        model=model,
        optimizer=optimizer,
        data=loader,
        checkpoints=args.checkpoints,
        extra={"learned": learned},
        epochs=1,
        job=args.job,
        coordinator=args.coordinator,
        data_path=str(args.data),
        data_format="jsonl",
        options=ElasticOptions(save_every=SAVE_EVERY, snapshot_every=SNAPSHOT_EVERY, keep_count=1_000),
    )
    with job:
        print(f"ready rank={rank} pid={os.getpid()} position={loader.position}", flush=True)
        for batch in job:
            if rank == 0:
                print(f"step {job.step}", flush=True)
                hold(args.hold, job.step)
            ids, x = batch.data
            (model(x).mean() * batch.weight).backward()
            assert model.weight.grad is not None
            distributed.all_reduce(model.weight.grad)
            model.weight.grad /= args.world
            optimizer.step()
            optimizer.zero_grad()
            everyone: list[list[int]] = [[] for _ in range(args.world)]
            distributed.all_gather_object(everyone, ids.tolist() if len(batch.step) else [])
            learned.ids += [sample for mine in everyone for sample in mine]
    distributed.destroy_process_group()


def hold(folder: Path, step: int) -> None:
    """Go no further while the file `hold-STEP` is there: the test decides how far training gets."""
    while (folder / f"hold-{step}").exists():
        time.sleep(0.01)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--world", type=int, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--checkpoints", type=Path, required=True)
    parser.add_argument("--meet", type=Path, required=True)
    parser.add_argument("--hold", type=Path, required=True)
    parser.add_argument("--job", required=True)
    parser.add_argument("--coordinator", required=True)
    parser.add_argument("--kind", choices=["map", "iterable"], default="map")
    args = parser.parse_args()
    children = []
    for rank in range(args.world):
        pid = os.fork()
        if pid == 0:
            try:
                train(rank, args)
            except BaseException as error:  # When a peer is killed, gloo says so in one of several ways.
                print(f"rank {rank} ended: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
                os._exit(1)
            os._exit(0)
        children.append(pid)
    failures = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
    sys.exit(1 if any(failures) else 0)


if __name__ == "__main__":
    main()
