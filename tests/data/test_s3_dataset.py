"""Datasets in object storage read like those on disk, against a real S3 server."""

from __future__ import annotations

import io
import json
import shutil
import tarfile
from collections.abc import Iterator
from operator import itemgetter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest
from torch.utils.data import DataLoader

from strata.data import ElasticDataset, ElasticIterableDataset, ElasticLoader, ElasticSampler
from strata.data.errors import DataError
from strata.data.reader import DatasetReader, discover
from strata.data.shards.registry import DatasetRegistry
from strata.data.streaming import sources
from strata.stores import open_store
from tests.support_seaweed import Seaweed, seaweed

pytestmark = pytest.mark.s3


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seaweed]:
    with seaweed(tmp_path_factory.mktemp("seaweed")) as running:
        yield running


@pytest.fixture
def bucket(server: Seaweed, monkeypatch: pytest.MonkeyPatch) -> str:
    """Two JSON-lines files, a parquet file and a tar, below one prefix each."""
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)
    sources._store_of.cache_clear()
    store = open_store("s3://datasets")
    for part in range(2):
        rows = range(part * 40, part * 40 + 40)
        store.put(f"lines/part-{part}.jsonl", "".join(json.dumps({"id": i}) + "\n" for i in rows).encode())
    buffer = io.BytesIO()
    pa.parquet.write_table(pa.table({"id": list(range(50))}), buffer, row_group_size=16)
    store.put("table/a.parquet", buffer.getvalue())
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for i in range(5):
            member = tarfile.TarInfo(f"{i}.cls")
            member.size = 1
            archive.addfile(member, io.BytesIO(str(i).encode()))
    store.put("packed/a.tar", packed.getvalue())
    return "s3://datasets"


def test_prefixes_globs_and_single_objects_are_found_and_read(bucket: str) -> None:
    reader = DatasetReader(f"{bucket}/lines")
    assert [f.path for f in reader.files] == [f"{bucket}/lines/part-{i}.jsonl" for i in range(2)]
    assert [r["id"] for r in reader.read([79, 0, 41])] == [79, 0, 41]
    assert discover(f"{bucket}/lines/*-1.jsonl").total == 40
    assert discover(f"{bucket}/lines/part-0.jsonl").total == 40
    assert DatasetReader(f"{bucket}/table").read([17, 49]) == [{"id": 17}, {"id": 49}]
    assert DatasetReader(f"{bucket}/packed/a.tar")[3] == {"__key__": "3", "cls": 3}


@pytest.mark.parametrize("kind", ["map", "iterable"])
def test_loader_processes_open_connections_of_their_own(bucket: str, kind: str) -> None:
    dataset = ElasticDataset(f"{bucket}/lines", transform=itemgetter("id"))
    assert dataset[0] == 0  # The parent has a client before the loader processes are made.
    sampler = ElasticSampler(len(dataset), global_batch_size=20, shuffle=False)
    loader = (
        ElasticLoader(dataset, sampler, num_workers=1)
        if kind == "map"
        else ElasticLoader(ElasticIterableDataset(dataset, sampler), num_workers=1)
    )
    assert [i for batch in loader for i in batch.data.tolist()] == list(range(80))


def test_a_forked_process_says_what_is_wrong_instead_of_waiting_for_ever(bucket: str) -> None:
    reader = DatasetReader(f"{bucket}/lines")
    assert reader[0] == {"id": 0}
    loader: DataLoader[Any] = DataLoader(reader, num_workers=1, collate_fn=list)  # type: ignore[arg-type]
    with pytest.raises(DataError, match="multiprocessing_context='spawn'"):
        next(iter(loader))


def test_a_registry_names_objects_that_exist(bucket: str) -> None:
    registry = DatasetRegistry()
    assert registry.register("d", f"{bucket}/lines", "jsonl", shard_size=40) == 2
    registry.register_worker("w")
    assert [s.file_paths for s in registry.get_shards("d", "w")] == [
        (f"{bucket}/lines/part-0.jsonl",),
        (f"{bucket}/lines/part-1.jsonl",),
    ]


def test_what_is_not_there_is_a_data_error_that_names_it(bucket: str, own_cache: Path) -> None:
    with pytest.raises(DataError, match=f"{bucket}/nothing"):
        discover(f"{bucket}/nothing")
    with pytest.raises(DataError, match="no such file"):
        discover(f"{bucket}/lines", "parquet")
    found = discover(f"{bucket}/lines/part-0.jsonl")
    open_store(bucket).delete("lines/part-0.jsonl")
    assert DatasetReader(found)[0] == {"id": 0}  # This machine still has the version that was counted.
    shutil.rmtree(own_cache)
    with pytest.raises(DataError, match="no such file"):
        DatasetReader(found).read([0])
