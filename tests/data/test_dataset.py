"""Files through the elastic dataset and loader, and imports that stay light."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import strata.data
from strata.core.data.order import EpochOrder
from strata.data import DataError, ElasticDataset, ElasticIterableDataset, ElasticLoader, ElasticSampler


def identity(row: dict[str, Any]) -> int:
    return int(row["id"])


@pytest.fixture
def files(tmp_path: Path) -> Path:
    for i in range(4):
        (tmp_path / f"{i}.jsonl").write_text(
            "".join(json.dumps({"id": 25 * i + j}) + "\n" for j in range(25))
        )
    return tmp_path


@pytest.mark.parametrize("kind", ["map", "iterable"])
def test_files_go_through_loader_processes_in_the_order_of_the_epoch(files: Path, kind: str) -> None:
    dataset = ElasticDataset(files, transform=identity)
    sampler = ElasticSampler(len(dataset), global_batch_size=8, seed=1)
    loader = (
        ElasticLoader(dataset, sampler, num_workers=2)
        if kind == "map"
        else ElasticLoader(ElasticIterableDataset(dataset, sampler), num_workers=2)
    )
    seen = [i for batch in loader for i in batch.data.tolist()]
    assert seen == EpochOrder(total=100, seed=1)[:].tolist()
    assert dataset[3] == 3


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_bad_record_reaches_the_trainer_as_a_data_error(files: Path, num_workers: int) -> None:
    (files / "2.jsonl").write_text('{"id": 50}\n{"id": }\n')
    dataset = ElasticDataset(files, transform=identity)
    sampler = ElasticSampler(len(dataset), global_batch_size=8, shuffle=False)
    with pytest.raises(DataError, match=r"2\.jsonl', line 2: not valid JSON"):
        list(ElasticLoader(dataset, sampler, num_workers=num_workers))


def test_importing_data_needs_neither_torch_nor_pyarrow_nor_obstore() -> None:
    script = """
import sys
for name in ("torch", "pyarrow", "obstore", "tokenizers", "fastapi", "uvloop", "omegaconf"):
    sys.modules[name] = None
import strata.data
from strata.data import DatasetReader, DatasetRegistry, DataLedger, ElasticDataset, ElasticSampler, ShardManager, audit
from strata.errors import MissingDependency
for name in ("ElasticLoader", "ElasticIterableDataset"):
    try:
        getattr(strata.data, name)
    except MissingDependency as error:
        assert "torch" in str(error)
    else:
        raise SystemExit(name)
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_every_public_name_loads() -> None:
    for name in strata.data.__all__:
        assert getattr(strata.data, name) is not None
    assert "audit" in dir(strata.data)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        strata.data.nothing  # noqa: B018


def test_an_error_whose_reason_is_a_sentence_ends_with_one_period() -> None:
    assert ".." not in str(DataError.at("gs://b/x", "there are no credentials."))
    assert str(DataError.at("x", "no such file")).splitlines()[0].endswith("no such file.")
