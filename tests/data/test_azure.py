"""Datasets in Azure's blob storage, on its own emulator: read in place, exactly once, with errors that name the object."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from strata.data import DataError, DatasetReader, ElasticDataset, ElasticLoader, ElasticSampler, discover
from strata.data.streaming.block_cache import block_cache
from strata.stores import AlreadyExists, open_store
from tests.support_azurite import Azurite, azurite
from tests.support_datasets import in_members, lines

WRITTEN = Path(__file__).parent / "written_by_mosaicml"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Azurite]:
    with azurite(tmp_path_factory.mktemp("azurite")) as server:
        yield server


@pytest.fixture(autouse=True)
def settings(server: Azurite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("STRATA_CACHE_DIR", str(tmp_path / "cache"))


def ids(url: str) -> list[int]:
    dataset = ElasticDataset(url, transform=lambda row: row["id"])
    loader = ElasticLoader(dataset, ElasticSampler(len(dataset), global_batch_size=8), collate_fn=list)
    return [i for batch in loader for i in batch.data]


def test_the_settings_of_the_environment_are_enough(server: Azurite) -> None:
    store = open_store(f"az://{server.container}/plain")
    store.put("a/b", b"x" * 100, if_absent=True)
    with pytest.raises(AlreadyExists):
        store.put("a/b", b"y", if_absent=True)
    assert store.read("a/b", offset=98) == b"xx"
    assert [(blob.key, blob.size_bytes) for blob in store.list("a/")] == [("a/b", 100)]
    store.delete("a/b")
    assert store.stat("a/b") is None


@pytest.mark.parametrize("kind", ["raw", "zstd"])
def test_shards_are_streamed_exactly_once(server: Azurite, kind: str) -> None:
    store = open_store(f"az://{server.container}/{kind}")
    for path in (WRITTEN / kind).iterdir():
        store.put(path.name, path.read_bytes())
    url = f"az://{server.container}/{kind}"
    assert sorted(ids(url)) == list(range(24))
    assert ids(url) == ids(url)


def test_compressed_lines_are_read_by_number_and_a_replaced_object_is_named(server: Azurite) -> None:
    store = open_store(f"az://{server.container}/text")
    store.put("a.jsonl.gz", in_members(lines([{"id": i} for i in range(5_000)]), 20_000, "gz"))
    url = f"az://{server.container}/text/a.jsonl.gz"
    assert sorted(ids(url)) == list(range(5_000))
    found = discover(url)
    store.put("a.jsonl.gz", in_members(lines([{"id": i} for i in range(5_001)]), 20_000, "gz"))
    shutil.rmtree(block_cache().folder)
    with pytest.raises(DataError, match=r"a\.jsonl\.gz") as changed:
        DatasetReader(found).read([0, 4_999])
    assert "replaced" in str(changed.value)
    store.delete("a.jsonl.gz")
    with pytest.raises(DataError, match="no such file"):
        discover(url)
