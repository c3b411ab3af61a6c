"""Datasets in Google Cloud Storage, on an emulator: read in place, exactly once, with errors that name the object."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import strata
from strata.data import DataError, DatasetReader, ElasticDataset, ElasticLoader, ElasticSampler, discover
from strata.data.streaming.block_cache import block_cache
from strata.data.streaming.sources import forget_fetched
from strata.data.tokens.building.builder import build_index
from strata.stores import NotFound, Replaced, open_store
from tests.support_datasets import in_members, lines
from tests.support_gcs import FakeGcs, fake_gcs

WRITTEN = Path(__file__).parent / "written_by_mosaicml"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeGcs]:
    with fake_gcs(tmp_path_factory.mktemp("gcs")) as server:
        yield server


@pytest.fixture(autouse=True)
def settings(server: FakeGcs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("STRATA_CACHE_DIR", str(tmp_path / "cache"))


def ids(url: str) -> list[int]:
    dataset = ElasticDataset(url, transform=lambda row: row["id"])
    loader = ElasticLoader(dataset, ElasticSampler(len(dataset), global_batch_size=8), collate_fn=list)
    return [i for batch in loader for i in batch.data]


def test_the_settings_of_the_environment_are_enough(server: FakeGcs) -> None:
    store = open_store(f"gs://{server.bucket}/plain")
    server.upload("plain/a/b", bytes(range(100)))
    assert store.read("a/b", offset=98) == bytes([98, 99])
    assert [(blob.key, blob.size_bytes) for blob in store.list("a/")] == [("a/b", 100)]
    store.delete("a/b")
    assert store.stat("a/b") is None
    with pytest.raises(NotFound, match="a/b"):
        store.read("a/b")


def test_one_version_is_read_although_this_server_ignores_that_it_was_asked_for(server: FakeGcs) -> None:
    store = open_store(f"gs://{server.bucket}/versions")
    server.upload("versions/a", b"0" * 100)
    (listed,) = store.list()
    found = store.stat("a")
    assert found is not None
    for version in (listed.version, found.version):
        assert store.read_version("a", version, offset=90, length=10) == b"0" * 10  # type: ignore[attr-defined]
    server.upload("versions/a", b"1" * 100)
    with pytest.raises(Replaced):
        store.read_version("a", listed.version, offset=90, length=10)  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", ["raw", "zstd"])
def test_shards_are_streamed_exactly_once(server: FakeGcs, kind: str) -> None:
    for path in (WRITTEN / kind).iterdir():
        server.upload(f"{kind}/{path.name}", path.read_bytes())
    url = f"gs://{server.bucket}/{kind}"
    assert sorted(ids(url)) == list(range(24))
    assert ids(url) == ids(url)


def test_compressed_lines_are_read_by_number_and_a_replaced_object_is_named(server: FakeGcs) -> None:
    server.upload("text/a.jsonl.gz", in_members(lines([{"id": i} for i in range(5_000)]), 20_000, "gz"))
    url = f"gs://{server.bucket}/text/a.jsonl.gz"
    assert sorted(ids(url)) == list(range(5_000))
    found = discover(url)
    server.upload("text/a.jsonl.gz", in_members(lines([{"id": i} for i in range(5_001)]), 20_000, "gz"))
    forget_fetched()
    shutil.rmtree(block_cache().folder)
    with pytest.raises(DataError, match=r"a\.jsonl\.gz") as changed:
        DatasetReader(found).read([0, 4_999])
    assert "replaced" in str(changed.value)
    open_store(f"gs://{server.bucket}/text").delete("a.jsonl.gz")
    with pytest.raises(DataError, match="no such file"):
        discover(url)


def test_a_token_index_is_read_in_place(server: FakeGcs, tmp_path: Path) -> None:
    source, index = tmp_path / "a.jsonl", tmp_path / "a.index"
    source.write_bytes(lines([{"text": f"document {i}"} for i in range(300)]))
    build_index([source], index)
    server.upload("corpora/a.index", index.read_bytes())
    here, there = strata.tokens(index), strata.tokens(f"gs://{server.bucket}/corpora/a.index")
    assert len(here) == len(there) == 300
    assert all(np.array_equal(here[i]["input_ids"], there[i]["input_ids"]) for i in range(300))
