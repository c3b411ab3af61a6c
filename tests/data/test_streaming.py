"""Datasets read in place from a real S3 server, through a cache that is bounded, shared, and may be lost or damaged."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

import strata
from strata.data import DataError, DatasetReader, ElasticDataset, ElasticLoader, ElasticSampler, discover
from strata.data.streaming import block_cache as caches
from strata.data.streaming import sources
from strata.data.tokens.building.builder import build_index
from strata.data.tokens.dataset import TokenDataset, TokenLoader
from strata.data.tokens.errors import InvalidIndex
from strata.data.tokens.index import TokenIndex
from strata.locks import exclusively
from strata.stores import open_store
from tests.support import eventually
from tests.support_datasets import in_members, lines, mds, tar
from tests.support_s3_proxy import s3_proxy
from tests.support_seaweed import Seaweed, seaweed

pytestmark = pytest.mark.s3
ROOT = Path(__file__).parents[2]
BUCKET = "s3://streams"
BLOCK_BYTES = 64 * 1024
ROWS: list[dict[str, Any]] = [{"id": i, "text": f"{i:05d} " * (20 + i % 40)} for i in range(2_000)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seaweed]:
    with seaweed(tmp_path_factory.mktemp("seaweed")) as running:
        yield running


@pytest.fixture(autouse=True)
def small_blocks(server: Seaweed, monkeypatch: pytest.MonkeyPatch, own_cache: Path) -> None:
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sources, "BLOCK_BYTES", BLOCK_BYTES)
    sources._store_of.cache_clear()


def upload(folder: str, files: dict[str, bytes]) -> str:
    store = open_store(BUCKET)
    for name, data in files.items():
        store.put(f"{folder}/{name}", data)
    return f"{BUCKET}/{folder}"


def parquet() -> bytes:
    buffer = io.BytesIO()
    pa.parquet.write_table(pa.Table.from_pylist(ROWS), buffer, row_group_size=100)
    return buffer.getvalue()


def as_mds(compression: str | None) -> dict[str, bytes]:
    samples = [{"id": np.int64(row["id"]).tobytes(), "text": str(row["text"]).encode()} for row in ROWS]
    columns: dict[str, tuple[str, int | None]] = {"id": ("int", 8), "text": ("str", None)}
    return mds(samples, columns, shard_samples=300, compression=compression)


FORMATS: dict[str, Callable[[], dict[str, bytes]]] = {
    "parquet": lambda: {"a.parquet": parquet()},
    "jsonl": lambda: {"a.jsonl": lines(ROWS[:900]), "b.jsonl": lines(ROWS[900:])},
    "jsonl.gz": lambda: {"a.jsonl.gz": in_members(lines(ROWS), 10**9, "gz")},
    "jsonl.zst": lambda: {"a.jsonl.zst": in_members(lines(ROWS), 100_000, "zst")},
    "webdataset": lambda: {"a.tar": tar([{"json": json.dumps(row).encode()} for row in ROWS])},
    "mds": lambda: as_mds(None),
    "mds.zstd": lambda: as_mds("zstd"),
}


def plain(row: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = row.get("json", row)
    return found


@pytest.mark.parametrize("kind", FORMATS)
def test_every_format_is_read_in_place_and_once(kind: str, own_cache: Path) -> None:
    url = upload(f"formats/{kind}", FORMATS[kind]())
    reader = DatasetReader(url)
    wanted = [1999, 0, 301, 299, 1234]
    assert [plain(row) for row in reader.read(wanted)] == [ROWS[i] for i in wanted]
    assert [plain(row) for row in reader.read(range(len(ROWS)))] == ROWS
    # All of it is on this machine now: a reader of another process needs the server no more.
    for file in reader.files:
        open_store(BUCKET).delete(file.path.removeprefix(f"{BUCKET}/"))
    assert [plain(row) for row in DatasetReader(reader.found).read(wanted)] == [ROWS[i] for i in wanted]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_shuffled_loader_fetches_ahead_and_loses_nothing(num_workers: int) -> None:
    url = upload("loader", FORMATS["jsonl.gz"]())
    dataset = ElasticDataset(url, transform=itemgetter("id"))
    sampler = ElasticSampler(len(dataset), global_batch_size=64, seed=3)
    loader = ElasticLoader(dataset, sampler, num_workers=num_workers)
    assert sorted(i for batch in loader for i in batch.data.tolist()) == list(range(len(ROWS)))


def test_the_first_batch_reads_only_what_it_needs(own_cache: Path) -> None:
    url = upload("cold", as_mds(None))
    dataset = ElasticDataset(url)
    assert dataset[0]["id"] == 0
    total = sum(file.size_bytes for file in dataset.reader.files)
    index_bytes = len(as_mds(None)["index.json"])
    used = caches.BlockCache(own_cache / "blocks", limit_bytes=10**9).used_bytes()
    assert used <= index_bytes + 3 * (BLOCK_BYTES + 16) < total


def test_the_cache_never_takes_more_than_its_limit(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = upload("limit", FORMATS["mds"]())
    monkeypatch.setattr(caches, "_limit_mb", lambda: 0.4)
    limit_bytes = int(0.4 * 2**20)
    reader = DatasetReader(url)
    assert sum(file.size_bytes for file in reader.files) > limit_bytes
    cache = caches.BlockCache(own_cache / "blocks", limit_bytes=limit_bytes)

    def used_bytes() -> int:
        """At one moment: what is fetched ahead makes way for itself meanwhile."""
        with exclusively(cache.folder / "lock"):
            return cache.used_bytes()

    for first in range(0, len(ROWS), 40):
        assert [row["id"] for row in reader.read(range(first, first + 40))] == list(range(first, first + 40))
        assert used_bytes() <= limit_bytes
    random = np.random.default_rng(1).permutation(len(ROWS))[:200].tolist()
    assert [row["id"] for row in reader.read(random)] == random
    assert used_bytes() <= limit_bytes


def test_without_a_cache_everything_is_still_read(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = upload("uncached", FORMATS["jsonl"]())
    monkeypatch.setenv("STRATA_CACHE_LIMIT_MB", "0")
    assert [row["id"] for row in DatasetReader(url).read([5, 1500])] == [5, 1500]
    assert not blocks(own_cache)
    monkeypatch.setenv("STRATA_CACHE_LIMIT_MB", "much")
    with pytest.raises(DataError, match="STRATA_CACHE_LIMIT_MB is 'much'"):
        DatasetReader(url)[0]


@contextlib.contextmanager
def counted(
    server: Seaweed, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[], list[tuple[str, int]]]]:
    """The ranges that objects are asked for meanwhile: file and bytes of each."""
    with s3_proxy(server.endpoint) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        sources._store_of.cache_clear()

        def asked() -> list[tuple[str, int]]:
            sources.forget_fetched()
            ranges = [
                (request.path.rpartition("/")[2], request.headers["range"].removeprefix("bytes=").split("-"))
                for request in proxy.seen
                if request.method == "GET" and "range" in request.headers
            ]
            return [(file, int(last) - int(first) + 1) for file, (first, last) in ranges]

        yield asked


@pytest.mark.parametrize("limit", ["none", "smaller than the dataset"])
@pytest.mark.parametrize("kind", ["mds", "webdataset"])
def test_a_shuffled_read_that_no_cache_holds_fetches_only_its_samples(
    kind: str, limit: str, server: Seaweed, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = upload(f"exactly/{kind}", FORMATS[kind]())
    found = discover(url)
    sources.forget_fetched()
    if limit == "none":
        monkeypatch.setenv("STRATA_CACHE_LIMIT_MB", "0")
    else:
        monkeypatch.setattr(caches, "_limit_mb", lambda: 0.25)
    others = set(threading.enumerate())
    with counted(server, monkeypatch) as asked:
        dataset = ElasticDataset(found, transform=plain)
        sampler = ElasticSampler(len(dataset), global_batch_size=50, seed=1)
        loader = ElasticLoader(dataset, sampler, collate_fn=list)
        seen = [row["id"] for _, batch in zip(range(8), loader, strict=False) for row in batch.data]
        assert len(set(seen)) == len(seen) == 400
        # What fetches ahead ends after the batch that it is at, and would find no thread for the rest of it.
        eventually(lambda: not fetching_ahead(others), within_s=60, what="the end of fetching ahead")
        announced = 400 + 64 * 50  # Batches that the loader had fetched ahead when it was left.
        ranges = asked()
        of_samples = sum(size for _, size in ranges if size <= 2_048)
        assert sum(size for _, size in ranges) - of_samples <= 20 * BLOCK_BYTES, "whole blocks for samples"
        # One that is wanted before what was fetched ahead has come, and one that a slow server did not answer, are asked for again.
        again = len(ROWS) // 20
        assert len(ranges) <= min(announced, len(ROWS)) + again, "what was fetched ahead was fetched again"


def fetching_ahead(others: set[threading.Thread]) -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name == "strata-prefetch" and each not in others]


def test_what_is_read_out_of_order_is_not_read_ahead(
    own_cache: Path, server: Seaweed, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = np.random.default_rng(1).bytes(20 * BLOCK_BYTES)
    url = upload("ahead", {"x.bin": data}) + "/x.bin"
    with counted(server, monkeypatch) as asked:
        source = sources.StoredSource(url)
        for offset in (0, 7 * BLOCK_BYTES, 3 * BLOCK_BYTES + 5):
            assert source.read(offset, 100) == data[offset : offset + 100]
            assert source.read(offset + 100, 100) == data[offset + 100 : offset + 200]
        assert asked() == [("x.bin", BLOCK_BYTES)] * 3
        at = 10 * BLOCK_BYTES
        for offset in range(at, at + BLOCK_BYTES, 1_000):
            source.read(offset, 1_000)
        assert len(asked()) == 3 + 1 + sources.READ_AHEAD_BLOCKS + 1, (
            "a run from front to back is fetched ahead"
        )


def test_without_a_disk_a_run_is_read_ahead_into_memory(
    server: Seaweed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STRATA_CACHE_LIMIT_MB", "0")
    data = np.random.default_rng(1).bytes(20 * BLOCK_BYTES)
    url = upload("memory-alone", {"x.bin": data}) + "/x.bin"
    with counted(server, monkeypatch) as asked:
        source = sources.StoredSource(url)
        read = b"".join(source.read(offset, 1_000) for offset in range(0, len(data), 1_000))
        assert read == data
        assert sum(size for _, size in asked()) <= len(data) + BLOCK_BYTES


def blocks(cache: Path) -> list[Path]:
    return sorted(
        path for path in (cache / "blocks").glob("*") if path.suffix != ".part" and path.name != "lock"
    )


def test_a_damaged_block_is_fetched_again(own_cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    url = upload("damaged", FORMATS["jsonl"]())
    found = DatasetReader(url).found
    assert DatasetReader(found).read(range(len(ROWS))) == ROWS
    sources.forget_fetched()  # All blocks are written, and are read from there.
    damaged = blocks(own_cache)
    for number, path in enumerate(damaged):
        data = bytearray(path.read_bytes())
        if number % 3 == 0:
            data[len(data) // 2] ^= 1
        path.write_bytes(data[:-5] if number % 3 == 1 else data)
    with caplog.at_level(logging.WARNING):
        assert DatasetReader(found).read(range(len(ROWS))) == ROWS
    assert "damaged and is fetched again" in caplog.text


def test_an_object_that_was_replaced_is_an_error_that_names_it(own_cache: Path) -> None:
    data = lines(ROWS)
    url = upload("replaced", {"a.jsonl": data})
    reader = DatasetReader(url)
    assert reader[0] == ROWS[0]
    for path in blocks(own_cache):
        path.unlink()
    upload("replaced", {"a.jsonl": data.replace(b"00001", b"99999")})  # As long as before.
    with pytest.raises(DataError, match=r"replaced/a\.jsonl.*was replaced since") as refused:
        DatasetReader(reader.found).read([0, 1999])
    assert "must not change" in refused.value.hint
    open_store(BUCKET).delete("replaced/a.jsonl")
    with pytest.raises(DataError, match=r"replaced/a\.jsonl.*no such file"):
        DatasetReader(reader.found).read([0, 1999])
    assert DatasetReader(upload("replaced", {"a.jsonl": data}))[1] == ROWS[1]  # Counted anew.


READ_ALL = """
import sys
from strata.data import DatasetReader
from strata.data.streaming import sources
sources.BLOCK_BYTES = int(sys.argv[2])
reader = DatasetReader(sys.argv[1])
print(sum(row["id"] for row in reader.read(range(len(reader)))), flush=True)
"""


def reading(url: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", READ_ALL, url, str(BLOCK_BYTES)], stdout=subprocess.PIPE, text=True
    )


def test_processes_share_a_cache_and_survive_each_others_death(own_cache: Path) -> None:
    url = upload("killed", FORMATS["mds"]())
    expected = str(sum(range(len(ROWS))))
    doomed = [reading(url) for _ in range(2)]
    folder = own_cache / "blocks"
    while not blocks(own_cache):  # They are at it.
        assert all(process.poll() is None for process in doomed) or blocks(own_cache)
    for process in doomed:
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=60)
    # One more left a block half written, with nobody holding it.
    left = folder / f"{'ab' * 16}.part"
    left.write_bytes(bytes(1000))
    for process in [reading(url) for _ in range(2)]:
        assert process.communicate(timeout=120)[0].strip() == expected
    cache = caches.BlockCache(folder, limit_bytes=BLOCK_BYTES)
    assert cache.fill("cd" * 16, 100, lambda: memoryview(bytes(100))) == bytes(100)
    assert not left.exists()
    assert cache.used_bytes() <= BLOCK_BYTES


def test_a_token_index_is_read_in_place(tmp_path: Path, own_cache: Path) -> None:
    text = tmp_path / "a.jsonl"
    text.write_bytes(lines(ROWS))
    build_index([text], tmp_path / "a.index", tokenizer="bytes")
    data = (tmp_path / "a.index").read_bytes()
    url = upload("tokens", {"a.index": data})
    with TokenIndex(tmp_path / "a.index") as local, TokenIndex(f"{url}/a.index") as remote:
        assert remote.identity == local.identity
        assert np.array_equal(remote.tokens[1000:3000], local.tokens[1000:3000])
        assert remote.find_position(50_000) == local.find_position(50_000)
        batches = [
            [batch["input_ids"] for batch in TokenLoader(TokenDataset(index, seq_length=512), 8)]
            for index in (local, remote)
        ]
        assert all(one.equal(other) for one, other in zip(*batches, strict=True))
    upload("tokens", {"short.index": data[:-10]})
    with pytest.raises(InvalidIndex, match=r"short\.index: is cut short"):
        TokenIndex(f"{url}/short.index")


def token_index(tmp_path: Path, name: str) -> str:
    (tmp_path / f"{name}.jsonl").write_bytes(lines([{"text": f"{i} " * (40 + i % 300)} for i in range(600)]))
    build_index([tmp_path / f"{name}.jsonl"], tmp_path / f"{name}.index")
    return upload(f"ahead/{name}", {"a.index": (tmp_path / f"{name}.index").read_bytes()}) + "/a.index"


def remote_tokens(tmp_path: Path) -> dict[str, Any]:
    """Datasets that are made of remote ones, with the parts of the object that a sample of each is in."""
    documents = strata.tokens(token_index(tmp_path, "web"))
    rows = ElasticDataset(upload("ahead/rows", {"a.jsonl": lines(ROWS)}))
    return {
        "documents": documents,
        "sequences": documents.sequences(64),
        "packed": strata.data.pack(documents, 64),
        "mapped": strata.data.mapped(rows, lambda row: [row["id"]]),
        "packed samples": strata.data.pack(strata.data.mapped(rows, lambda row: [[row["id"]] * 9]), 64),
    }


@pytest.mark.parametrize("kind", ["documents", "sequences", "packed", "mapped", "packed samples", "mixture"])
def test_what_is_made_of_remote_data_is_fetched_ahead_too(
    kind: str, tmp_path: Path, server: Seaweed, monkeypatch: pytest.MonkeyPatch, own_cache: Path
) -> None:
    """The blocks of samples that were announced are on this machine before anybody reads them."""
    with counted(server, monkeypatch) as asked:
        sets = remote_tokens(tmp_path)
        sets["mixture"] = strata.Mixture(
            {"a": sets["sequences"], "b": sets["documents"]}, weights={"a": 0.5, "b": 0.5}
        )
        dataset = sets[kind]
        assert dataset.is_remote
        before = len(asked())
        for path in blocks(own_cache):
            path.unlink()
        wanted = [3, 250, 17]
        ahead = dataset.ahead()
        ahead.fetch(wanted, in_memory=False)
        ahead.close()
        fetched = len(asked())
        assert fetched > before
        assert ahead.sample_bytes > 0
        for number in wanted:
            assert dataset[number] is not None
        assert len(asked()) == fetched, "something was not fetched ahead"


def test_a_mixture_with_a_remote_index_is_read_by_loader_processes(tmp_path: Path, own_cache: Path) -> None:
    documents = strata.tokens(token_index(tmp_path, "web"))
    mix = strata.Mixture(
        {"web": documents, "own": [{"input_ids": np.arange(32), "labels": np.arange(32)}] * 20},
        weights={"web": 0.5, "own": 0.5},
        sequence_length=32,
    )
    loader = ElasticLoader(mix, strata.ElasticSampler(mix, global_batch_size=8), num_workers=1)
    batches = [batch.data["input_ids"] for _, batch in zip(range(3), loader, strict=False)]
    alone = ElasticLoader(mix, strata.ElasticSampler(mix, global_batch_size=8))
    for batch, expected in zip(batches, alone, strict=False):
        assert batch.tolist() == expected.data["input_ids"].tolist()


def test_a_listing_that_nobody_may_read_is_a_data_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    sources._store_of.cache_clear()
    with pytest.raises(DataError, match="s3://streams/any"):
        discover(f"{BUCKET}/any")


def training(url: str, folder: Path, *more: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.training.stream_script", url, str(folder), str(BLOCK_BYTES), *more],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=ROOT,
        env={**os.environ, "STRATA_MEMORY_ROOT": str(folder.parent / "memory"), "OMP_NUM_THREADS": "1"},
    )


def steps_until(process: subprocess.Popen[str], last: int | None) -> dict[int, list[int]]:
    """What was printed of each step; at step `last` the process is killed, and may have got further by then."""
    found: dict[int, list[int]] = {}
    assert process.stdout is not None
    for line in process.stdout:
        assert not line.startswith("error"), line
        step, *ids = map(int, line.split())
        found[step] = ids
        if step == last:
            process.send_signal(signal.SIGKILL)
    process.wait(120)
    return found


@pytest.mark.timeout(600)
def test_training_that_is_killed_while_it_streams_continues_exactly(tmp_path: Path, own_cache: Path) -> None:
    url = upload("training", FORMATS["jsonl.gz"]() | {"b.jsonl": lines(ROWS)})
    (tmp_path / "memory").mkdir()
    undisturbed = steps_until(training(url, tmp_path / "a"), None)
    assert sorted(i for ids in undisturbed.values() for i in ids) == sorted([*range(len(ROWS))] * 2)
    shutil.rmtree(own_cache)  # Cold.
    seen = steps_until(training(url, tmp_path / "b"), 4)
    for number, path in enumerate(blocks(own_cache)):  # And damaged where it is warm.
        data = bytearray(path.read_bytes())
        data[len(data) // 3] ^= 0x40
        path.write_bytes(data if number % 2 else data[: len(data) // 2])
    seen |= steps_until(training(url, tmp_path / "b"), 20)
    seen |= steps_until(training(url, tmp_path / "b"), None)
    assert seen == undisturbed
    report = strata.audit(tmp_path / "b", "data", 0)
    assert report.exact, report.reason
    # An object that disappears is named, and nothing is trained that would have to be taken back.
    shutil.rmtree(own_cache)
    (tmp_path / "hold").touch()
    doomed = training(url, tmp_path / "c", str(tmp_path / "hold"))
    assert doomed.stdout is not None
    assert doomed.stdout.readline().startswith("0 ")
    open_store(BUCKET).delete("training/b.jsonl")
    for path in blocks(own_cache):
        path.unlink(missing_ok=True)
    (tmp_path / "hold").unlink()
    output, _ = doomed.communicate(timeout=120)
    assert "error: DataError" in output.splitlines()[-1]
    assert f"{url}/b.jsonl" in output.splitlines()[-1]


def test_what_was_fetched_is_read_from_memory_within_its_bound(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources.forget_fetched()
    monkeypatch.setattr(sources, "IN_MEMORY_BYTES", 3 * BLOCK_BYTES)
    data = np.random.default_rng(1).bytes(8 * BLOCK_BYTES + 100)
    url = upload("memory", {"x.bin": data}) + "/x.bin"
    source = sources.StoredSource(url)
    for block in range(9):
        source.prefetch([(block * BLOCK_BYTES, 1)])
        assert source.read(block * BLOCK_BYTES, 50) == data[block * BLOCK_BYTES :][:50]
        assert (
            sum(map(len, sources._fetching._recent.values()))
            == sources._fetching._recent_bytes
            <= 3 * BLOCK_BYTES
        )
    sources.forget_fetched()
    shutil.rmtree(own_cache)
    source.prefetch([(8 * BLOCK_BYTES, 1)])
    whole = source.view(8 * BLOCK_BYTES, 100).obj
    assert any(whole is view.obj for view in sources._fetching._recent.values()), (
        "the last block was read from the disk, or copied"
    )
    sources.forget_fetched()
    assert source.read(0, source.size_bytes) == data


def test_a_cache_that_is_emptied_meanwhile_stays_in_use(own_cache: Path) -> None:
    cache = caches.block_cache()

    def fetch_while_it_is_emptied() -> memoryview:
        shutil.rmtree(cache.folder)
        return memoryview(b"12345")

    assert bytes(cache.fill("ab01", 5, fetch_while_it_is_emptied)) == b"12345"
    assert not cache.has("ab01")
    assert bytes(cache.fill("ab02", 5, lambda: memoryview(b"67890"))) == b"67890"
    assert cache.has("ab02"), "the cache was given up"
