"""Streaming a dataset from a real SeaweedFS server beside bare obstore: `python -m benchmarks.streaming`.

The same objects are fetched by obstore alone, in ranges of a block with as many threads as Strata uses, and read as samples by an
`ElasticLoader`: from a cold cache in order, from a cold cache shuffled, again from the warm one, and without a cache. Every figure is the median of
several runs, taken in turn; bytes are those of the samples.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from operator import itemgetter
from pathlib import Path

import numpy as np

from tests.support_datasets import mds
from tests.support_seaweed import seaweed

SAMPLE_BYTES = 32 * 1024
SHARD_SAMPLES = 512


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with seaweed(folder / "seaweed") as server:
            os.environ |= server.environment() | {"STRATA_CACHE_DIR": str(folder / "cache")}
            _measure(folder / "cache", args.megabytes, args.runs)


def _measure(cache: Path, megabytes: int, runs: int) -> None:
    from strata.data.streaming.sources import forget_fetched
    from strata.stores import open_store

    rng = np.random.default_rng(0)
    count = megabytes * 2**20 // SAMPLE_BYTES
    samples = [{"x": rng.bytes(SAMPLE_BYTES)} for _ in range(count)]
    files = mds(samples, {"x": ("bytes", None)}, shard_samples=SHARD_SAMPLES)
    store = open_store("s3://bench")
    for name, data in files.items():
        store.put(f"data/{name}", data)
    shards = {name: len(data) for name, data in files.items() if name.endswith(".mds")}

    def cold() -> None:
        forget_fetched()
        shutil.rmtree(cache, ignore_errors=True)
        os.environ.pop("STRATA_CACHE_LIMIT_MB", None)

    def without() -> None:
        cold()
        os.environ["STRATA_CACHE_LIMIT_MB"] = "0"

    cases: dict[str, tuple[Callable[[], None], Callable[[], float]]] = {
        "obstore alone": (lambda: None, lambda: _bare(shards)),
        "cold cache, in order": (cold, lambda: _epoch(shuffle=False)),
        "cold cache, shuffled": (cold, lambda: _epoch(shuffle=True)),
        "warm cache, shuffled": (forget_fetched, lambda: _epoch(shuffle=True)),
        "warm cache, in order": (forget_fetched, lambda: _epoch(shuffle=False)),
        "no cache, in order": (without, lambda: _epoch(shuffle=False)),
        "first batch, cold": (cold, _first_batch),
    }
    found: dict[str, list[float]] = {name: [] for name in cases}
    processor_s: dict[str, list[float]] = {name: [] for name in cases}
    for number in range(runs + 1):  # In turn, so that what else the machine does falls on all of them.
        for name, (prepare, run) in cases.items():
            prepare()
            started_s = time.process_time()
            took_s = run()
            if number:  # The first round only warms up the process, its connections and the server.
                found[name].append(took_s)
                processor_s[name].append(time.process_time() - started_s)
    bare = statistics.median(found["obstore alone"])
    for name, each in found.items():
        middle = statistics.median(each)
        if "first" in name:
            print(f"{name:24} {middle:8.2f} s   (slowest {max(each):.2f})", flush=True)
        else:
            speed = megabytes * 1.048576 / middle
            print(
                f"{name:24} {speed:8.0f} MB/s   {bare / middle:5.2f} of obstore alone"
                f"   {statistics.median(processor_s[name]):.3f} s of processor time",
                flush=True,
            )
    print(f"load average {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores")


def _bare(shards: dict[str, int]) -> float:
    import obstore
    from obstore.store import S3Store

    from strata.data.streaming.sources import BLOCK_BYTES, FETCH_THREADS

    client = S3Store("bench", client_options={"allow_http": True}, virtual_hosted_style_request=False)
    ranges = [
        (f"data/{name}", at, min(at + BLOCK_BYTES, size))
        for name, size in shards.items()
        for at in range(0, size, BLOCK_BYTES)
    ]
    started_s = time.monotonic()
    with ThreadPoolExecutor(FETCH_THREADS) as pool:
        for data in pool.map(
            lambda each: obstore.get_range(client, each[0], start=each[1], end=each[2]), ranges
        ):
            assert len(data)
    return time.monotonic() - started_s


def _loader(*, shuffle: bool):  # type: ignore[no-untyped-def]
    from strata.data import ElasticDataset, ElasticLoader, ElasticSampler

    dataset = ElasticDataset("s3://bench/data", transform=itemgetter("x"))
    sampler = ElasticSampler(len(dataset), global_batch_size=64, shuffle=shuffle)
    return ElasticLoader(dataset, sampler, collate_fn=list)


def _epoch(*, shuffle: bool) -> float:
    loader = _loader(shuffle=shuffle)
    started_s = time.monotonic()
    total = sum(len(each) for batch in loader for each in batch.data)
    assert total % SAMPLE_BYTES == 0
    return time.monotonic() - started_s


def _first_batch() -> float:
    started_s = time.monotonic()
    assert len(next(iter(_loader(shuffle=True))).data) == 64
    return time.monotonic() - started_s


if __name__ == "__main__":
    main()
