"""One epoch through a schedule of world sizes with the samplers of other projects; runs in their environments.

    python resume_peers.py dlrover|streaming|torchdata '{"total": 1003, "schedule": [4, 3]}'

Prints `{"lost": …, "repeated": …}` or `{"refused": reason}`. Each peer is driven the way its own documentation and
examples do it, and changes its world only at a step boundary, right after a checkpoint. Knows nothing of Strata.
"""

from __future__ import annotations

import importlib
import json
import logging
import math
import sys
import types
import warnings
from collections import Counter
from pathlib import Path
from typing import Any


class Numbers:
    """A dataset whose samples are their own numbers."""

    def __init__(self, total: int) -> None:
        self.total = total

    def __len__(self) -> int:
        return self.total

    def __getitem__(self, index: int) -> int:
        return index


STEPS = 6  # In each world but the last, which continues to the end of the epoch.
BATCH = 5  # Of one rank.


def phases(schedule: list[int]) -> list[tuple[int, int | None]]:
    """Each world size with its steps."""
    return [*((world, STEPS) for world in schedule[:-1]), (schedule[-1], None)]


def verdict(seen: list[int], total: int) -> dict[str, Any]:
    counts = Counter(seen)
    return {
        "lost": total - sum(1 for sample in counts if 0 <= sample < total),
        "repeated": sum(count - 1 for count in counts.values()),
    }


def torchdata(total: int, schedule: list[int]) -> dict[str, Any]:
    """StatefulDataLoader over DistributedSampler: every rank loads the state of its predecessor, a new one that of
    the last rank."""
    from torch.utils.data import DistributedSampler
    from torchdata.stateful_dataloader import StatefulDataLoader

    seen: list[int] = []
    states: list[dict[str, Any]] = []
    for world, steps in phases(schedule):
        after = []
        for rank in range(world):
            sampler: Any = DistributedSampler(Numbers(total), num_replicas=world, rank=rank, seed=1)  # type: ignore[arg-type]
            loader = StatefulDataLoader(Numbers(total), batch_size=BATCH, sampler=sampler)
            if states:
                loader.load_state_dict(states[min(rank, len(states) - 1)])
            for done, batch in enumerate(loader, start=1):
                seen += batch.tolist()
                if done == steps:
                    break
            after.append(loader.state_dict())
        states = after
    return verdict(seen, total)


def dlrover(total: int, schedule: list[int]) -> dict[str, Any]:
    """ElasticDistributedSampler, given the step within the epoch and the batch of one rank, as its examples do."""
    from dlrover.trainer.torch.elastic.sampler import (  # type: ignore[import-not-found, unused-ignore]
        ElasticDistributedSampler,
    )
    from torch.utils.data import DataLoader

    logging.disable(logging.CRITICAL)
    seen: list[int] = []
    state: dict[str, int] | None = None
    step_in_epoch = 0
    for world, steps in phases(schedule):
        for rank in range(world):
            sampler = ElasticDistributedSampler(Numbers(total), num_replicas=world, rank=rank, seed=1)
            if state is not None:
                sampler.load_state_dict(state)
            batches: Any = DataLoader(Numbers(total), batch_size=BATCH, sampler=sampler)  # type: ignore[arg-type]
            for done, batch in enumerate(batches, start=1):
                seen += batch.tolist()
                if done == steps:
                    break
        step_in_epoch += steps or 0
        state = sampler.state_dict(step_in_epoch, BATCH)
    return verdict(seen, total)


def streaming(total: int, schedule: list[int]) -> dict[str, Any]:
    """MosaicML Streaming's partition, resumed with the number of samples seen and the first number of nodes. It wants
    a constant global batch: here one that every world size divides."""
    get_partitions = _streaming_partitions()
    global_batch = math.lcm(*schedule) * max(1, BATCH * schedule[0] // math.lcm(*schedule))
    seen: list[int] = []
    sample_in_epoch = 0
    for world, steps in phases(schedule):
        try:
            partition = get_partitions(
                "relaxed",
                total,
                schedule[0],
                world,
                1,
                1,
                global_batch // world,
                sample_in_epoch,
                schedule[0] if sample_in_epoch else None,
            )
        except ValueError as error:
            return {"refused": str(error)}
        taken = partition if steps is None else partition[:, :, :, :steps]
        seen += [sample for sample in taken.flatten().tolist() if sample >= 0]
        sample_in_epoch += (steps or 0) * global_batch
    return verdict(seen, total)


def _streaming_partitions() -> Any:
    """The partition module alone: the package itself wants every cloud's client."""
    found = next(
        Path(folder) / "streaming" for folder in sys.path if (Path(folder) / "streaming" / "base").is_dir()
    )
    for name, folder in (("streaming", found), ("streaming.base", found / "base")):
        package = types.ModuleType(name)
        package.__path__ = [str(folder)]
        sys.modules[name] = package
    return importlib.import_module("streaming.base.partition").get_partitions


PEERS = {"torchdata": torchdata, "dlrover": dlrover, "streaming": streaming}

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    print(json.dumps(PEERS[sys.argv[1]](**json.loads(sys.argv[2]))))
