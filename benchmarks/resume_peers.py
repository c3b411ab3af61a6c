"""One epoch through a schedule of world sizes with the samplers of other projects; runs in their environments.

    python resume_peers.py dlrover|streaming|torchdata|grain|datasets '{"total": 1003, "schedule": [4, 3]}'

Prints `{"lost": …, "repeated": …}` or `{"refused": reason}`. Each peer is driven the way its own documentation and
examples do it. In each world but the last a checkpoint is taken after a few steps, two more steps are trained, and everybody
crashes: those two count for nothing, and the next world resumes from the checkpoint. Knows nothing of Strata.
"""

from __future__ import annotations

import importlib
import json
import logging
import math
import os
import socket
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
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
UNDONE = 2  # Steps after the checkpoint, which are lost with the crash.
BATCH = 5  # Of one rank.
FILES = 24  # Of the corpus that Hugging Face datasets streams.


def phases(schedule: list[int]) -> list[tuple[int, int | None]]:
    """Each world size with its steps."""
    return [*((world, STEPS) for world in schedule[:-1]), (schedule[-1], None)]


def verdict(seen: list[int], total: int) -> dict[str, Any]:
    counts = Counter(seen)
    return {
        "lost": total - sum(1 for sample in counts if 0 <= sample < total),
        "repeated": sum(count - 1 for count in counts.values()),
    }


def train(batches: Iterator[list[int]], steps: int | None, save: Callable[[], Any]) -> tuple[list[int], Any]:
    """What counts as trained, and the state in the checkpoint; what is read after it is lost in the crash."""
    seen: list[int] = []
    state = None
    for done, batch in enumerate(batches, start=1):
        if steps is None or done <= steps:
            seen += batch
        if done == steps:
            state = save()
        if steps is not None and done == steps + UNDONE:
            break
    return seen, state if state is not None else save()


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
            trained, state = train((batch.tolist() for batch in loader), steps, loader.state_dict)
            seen += trained
            after.append(state)
        states = after
    return verdict(seen, total)


def grain(total: int, schedule: list[int]) -> dict[str, Any]:
    """A MapDataset that each process slices for itself, as its guide to several processes does; the iterator's own state."""
    library: Any = importlib.import_module("grain")
    seen: list[int] = []
    states: list[Any] = []
    for world, steps in phases(schedule):
        after = []
        for rank in range(world):
            whole = library.MapDataset.source(Numbers(total)).shuffle(seed=1)
            dataset = whole[rank::world].to_iter_dataset().batch(BATCH)
            reading = iter(dataset)
            if states:
                reading.set_state(states[min(rank, len(states) - 1)])
            trained, state = train((batch.tolist() for batch in reading), steps, reading.get_state)
            seen += trained
            after.append(state)
        states = after
    return verdict(seen, total)


def grain_loader(total: int, schedule: list[int]) -> dict[str, Any]:
    """Its DataLoader with an IndexSampler of `ShardOptions`."""
    library: Any = importlib.import_module("grain.python")
    seen: list[int] = []
    states: list[Any] = []
    for world, steps in phases(schedule):
        after = []
        for rank in range(world):
            sampler = library.IndexSampler(
                total,
                shard_options=library.ShardOptions(shard_index=rank, shard_count=world),
                shuffle=True,
                seed=1,
                num_epochs=1,
            )
            reading = iter(
                library.DataLoader(
                    data_source=Numbers(total), sampler=sampler, operations=[library.Batch(BATCH)]
                )
            )
            if states:
                try:
                    reading.set_state(states[min(rank, len(states) - 1)])
                except ValueError as error:
                    return {"refused": str(error)}
            trained, state = train((batch.tolist() for batch in reading), steps, reading.get_state)
            seen += trained
            after.append(state)
        states = after
    return verdict(seen, total)


def datasets(total: int, schedule: list[int]) -> dict[str, Any]:
    """A streamed dataset of JSON lines in several files, divided with `split_dataset_by_node`; its own state."""
    library: Any = importlib.import_module("datasets")
    split: Any = importlib.import_module("datasets.distributed").split_dataset_by_node
    library.disable_progress_bars()
    seen: list[int] = []
    states: list[Any] = []
    with tempfile.TemporaryDirectory() as folder:
        names = []
        for number in range(FILES):
            names.append(f"{folder}/{number:02}.jsonl")
            rows = range(total * number // FILES, total * (number + 1) // FILES)
            Path(names[-1]).write_text("".join(json.dumps({"id": i}) + "\n" for i in rows))
        for world, steps in phases(schedule):
            after = []
            for rank in range(world):
                whole = library.load_dataset(
                    "json", data_files=names, split="train", streaming=True, cache_dir=folder
                )
                dataset = split(whole, rank=rank, world_size=world)
                if states:
                    dataset.load_state_dict(states[min(rank, len(states) - 1)])
                trained, state = train(_batches(dataset), steps, dataset.state_dict)
                seen += trained
                after.append(state)
            states = after
    return verdict(seen, total)


def _batches(rows: Any) -> Iterator[list[int]]:
    batch: list[int] = []
    for row in rows:
        batch.append(row["id"])
        if len(batch) == BATCH:
            yield batch
            batch = []
    if batch:
        yield batch


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
        step_in_epoch += steps or 0
        for rank in range(world):
            sampler = ElasticDistributedSampler(Numbers(total), num_replicas=world, rank=rank, seed=1)
            if state is not None:
                sampler.load_state_dict(state)
            loader: Any = DataLoader(Numbers(total), batch_size=BATCH, sampler=sampler)  # type: ignore[arg-type]
            after = step_in_epoch
            trained, saved = train(
                (batch.tolist() for batch in loader),
                steps,
                lambda sampler=sampler, after=after: sampler.state_dict(after, BATCH),  # type: ignore[misc]
            )
            seen += trained
        state = saved
    return verdict(seen, total)


def streaming(total: int, schedule: list[int]) -> dict[str, Any]:
    """MosaicML Streaming's dataset and loader in one process for each rank, resumed with the loader's `state_dict`. It wants a
    constant global batch: here one that every world size divides."""
    global_batch = math.lcm(*schedule) * max(1, BATCH * schedule[0] // math.lcm(*schedule))
    seen: list[int] = []
    state: Any = None
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, __file__, "streaming-corpus", folder, str(total)], check=True)
        for number, (world, steps) in enumerate(phases(schedule)):
            with socket.create_server(("127.0.0.1", 0)) as probe:
                port = probe.getsockname()[1]
            question = {
                "folder": folder,
                "phase": number,
                "batch": global_batch // world,
                "steps": steps,
                "state": state,
                "nodes": 1,
            }
            ranks = [
                subprocess.Popen(
                    [sys.executable, __file__, "streaming-rank", json.dumps(question)],
                    env={
                        **os.environ,
                        "RANK": str(rank),
                        "LOCAL_RANK": str(rank),
                        "WORLD_SIZE": str(world),
                        "LOCAL_WORLD_SIZE": str(world),
                        "MASTER_ADDR": "127.0.0.1",
                        "MASTER_PORT": str(port),
                        "OMP_NUM_THREADS": "1",
                    },
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
                for rank in range(world)
            ]
            try:
                for rank in ranks:
                    output, errors = rank.communicate(timeout=600)
                    if rank.returncode:
                        raise SystemExit(errors.strip()[-2000:])
                    answer = json.loads(output.splitlines()[-1])
                    seen += answer["seen"]
                    state = answer["state"]
            finally:
                for rank in ranks:
                    rank.kill()
    return verdict(seen, total)


def streaming_corpus(folder: str, total: int) -> None:
    with _streaming().MDSWriter(out=f"{folder}/mds", columns={"id": "int"}, size_limit=1 << 10) as writer:
        for i in range(total):
            writer.write({"id": i})


def streaming_rank(
    *, folder: str, phase: int, batch: int, steps: int | None, state: Any, nodes: int
) -> dict[str, Any]:
    library = _streaming()
    dataset = library.StreamingDataset(
        local=f"{folder}/mds",
        shuffle=True,
        shuffle_seed=1,
        batch_size=batch,
        num_canonical_nodes=nodes,
    )
    loader = library.StreamingDataLoader(dataset, batch_size=batch)
    if state is not None:
        loader.load_state_dict(state)
    trained, saved = train((each["id"].tolist() for each in loader), steps, loader.state_dict)
    return {"seen": trained, "state": saved}


def _streaming() -> Any:
    from streaming_package import import_streaming  # type: ignore[import-not-found, unused-ignore]

    return import_streaming()


PEERS = {
    "torchdata": torchdata,
    "grain": grain,
    "grain-loader": grain_loader,
    "datasets": datasets,
    "dlrover": dlrover,
    "streaming": streaming,
}

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    if sys.argv[1] == "streaming-corpus":
        streaming_corpus(sys.argv[2], int(sys.argv[3]))
    elif sys.argv[1] == "streaming-rank":
        print(json.dumps(streaming_rank(**json.loads(sys.argv[2]))), flush=True)
        os._exit(0)  # As a crash does: what the library tidies up at the end is not waited for.
    else:
        print(json.dumps(PEERS[sys.argv[1]](**json.loads(sys.argv[2]))))
