"""The recipe `sharding`: every sample of a dataset is read once, shard by shard, and what each shard holds written down.

Rank r of n reads the shards r, r + n, …; each finished shard is a file, so a restarted task reads no shard twice. At the
end `shards.json` has all of them: range, number of samples, bytes, digest. A shard that cannot be read fails the task.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import xxhash

from strata.data.dataset import ElasticDataset
from strata.errors import StrataError
from strata.files import write_file
from strata.launch.context import TaskDataset, current_task
from strata.launch.programs.presence import Presence

READ_AT_ONCE = 256
POLL_S = 0.2


def main() -> None:
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    try:
        task = current_task()
        assert task.dataset is not None, "the recipe needs one"
        folder = task.task_dir / "shards"
        folder.mkdir(parents=True, exist_ok=True)
        with Presence(task) as presence:
            total = _read_share(task.dataset, folder, rank, world, presence)
            if rank == 0:
                _gather(folder, total, presence, task.task_dir / "shards.json")
    except StrataError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        sys.exit(2)


def _read_share(spec: TaskDataset, folder: Path, rank: int, world: int, presence: Presence) -> int:
    """This rank's shards. Returns how many there are altogether."""
    dataset = ElasticDataset(spec.path, spec.format)
    if len(dataset) != spec.total_samples:
        raise StrataError(
            f"'{spec.path}' holds {len(dataset):,} samples; {spec.total_samples:,} are registered.",
            hint="Register it again, without total_samples: they are counted then.",
        )
    total = -(-len(dataset) // spec.shard_size)
    for shard in range(rank, total, world):
        place = folder / f"{shard:08d}.json"
        if not place.exists():
            first = shard * spec.shard_size
            facts = _read_shard(dataset, shard, first, min(first + spec.shard_size, len(dataset)))
            write_file(place, json.dumps(facts), durable=False)
        presence.report(min(total, (shard // world + 1) * world), total)
    return total


def _read_shard(dataset: ElasticDataset, shard: int, first: int, stop: int) -> dict[str, object]:
    digest, size = xxhash.xxh3_128(), 0
    for start in range(first, stop, READ_AT_ONCE):
        for sample in dataset.read(range(start, min(start + READ_AT_ONCE, stop))):
            body = _bytes_of(sample)
            digest.update(body)
            size += len(body)
    return {"id": shard, "start": first, "stop": stop, "bytes": size, "digest": digest.hexdigest()}


def _gather(folder: Path, total: int, presence: Presence, result: Path) -> None:
    """When the last rank is done: one file of all shards."""
    while (done := sum(1 for _ in folder.glob("[0-9]*.json"))) < total:
        presence.report(done, total)
        time.sleep(POLL_S)
    shards = [json.loads(path.read_text()) for path in sorted(folder.glob("[0-9]*.json"))]
    write_file(result, json.dumps({"shards": shards}), durable=False, mode=0o666)
    size = sum(shard["bytes"] for shard in shards)
    print(f"{total:,} shards, {size / 1e6:,.1f} MB read; see {result}", flush=True)


def _bytes_of(sample: Any) -> bytes:
    """The same bytes for the same sample. Written only to be digested: nothing reads them back."""
    match sample:
        case bytes():
            return sample
        case dict():
            return b"".join(_bytes_of(part) for item in sample.items() for part in item)
        case list() | tuple():
            return b"".join(map(_bytes_of, sample))
    as_bytes = getattr(sample, "tobytes", None)  # An array.
    return as_bytes() if as_bytes is not None else repr(sample).encode()


if __name__ == "__main__":
    main()
