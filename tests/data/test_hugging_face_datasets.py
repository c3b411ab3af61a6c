"""Streams of Hugging Face `datasets` over real files: exact in any world where their state says where they are."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets.distributed import split_dataset_by_node

from strata.data import DataError, StreamLoader
from strata.data.loading.adapt import as_elastic_loader

FILES, ROWS = 3, 23
TOTAL = FILES * ROWS
Make = Callable[[], Any]


@pytest.fixture(autouse=True)
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    datasets.disable_progress_bars()


@pytest.fixture(params=["json", "parquet"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    """The same rows as JSON lines or as parquet in groups of five, opened anew each time as a restarted script does."""
    kind = request.param
    names = []
    for number in range(FILES):
        rows = [{"id": number * ROWS + i, "text": f"row {i}"} for i in range(ROWS)]
        path = tmp_path / f"part{number}.{kind}"
        if kind == "json":
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        else:
            pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=5)
        names.append(str(path))
    return lambda: datasets.load_dataset(kind, data_files=names, split="train", streaming=True)


def through(make: Make, worlds: list[int], *, steps: int = 2, **options: Any) -> list[int]:
    """The ids of one epoch in the order they were trained, with another world after every `steps` steps."""
    trained: list[int] = []
    state: Any = None
    for turn, world in enumerate(worlds):
        is_last = turn == len(worlds) - 1
        loaders = []
        for rank in range(world):
            stream = make()
            loader = (
                StreamLoader(stream, global_batch_size=6, **options)
                if options
                else as_elastic_loader(stream, global_batch_size=6)
            )
            loader.set_world(rank, world)
            if state is not None:
                loader.load_state_dict(state)
            loaders.append(loader)
        for step, batches in enumerate(zip(*loaders, strict=True), start=1):
            for batch in batches:
                trained += batch.data["id"].tolist() if len(batch.step) else []
            if step == steps and not is_last:
                break
        state = json.loads(json.dumps(loaders[0].state_dict()))
    return trained


@pytest.mark.parametrize("worlds", [[1, 1], [4, 3, 5], [2, 7, 1, 3]])
def test_a_streamed_file_is_exact_in_any_world(make: Make, worlds: list[int]) -> None:
    assert through(make, worlds) == list(range(TOTAL))


@pytest.mark.parametrize("make", ["json"], indirect=True)
def test_what_map_filter_and_interleave_make_of_a_stream_is_exact(make: Make) -> None:
    def odd() -> Any:
        return make().filter(lambda row: row["id"] % 2).map(lambda row: {"id": row["id"] + 1000})

    def mixed() -> Any:
        other = make().map(lambda row: {"id": row["id"] + 1000})
        return datasets.interleave_datasets([make(), other], probabilities=[0.7, 0.3], seed=1)

    assert through(odd, [4, 3, 2]) == [1000 + i for i in range(TOTAL) if i % 2]
    undisturbed = [row["id"] for row in mixed()]
    assert through(mixed, [4, 3, 2]) == undisturbed


@pytest.mark.parametrize(
    "make", ["json"], indirect=True
)  # A parquet reader that is left takes seconds to end.
def test_a_buffer_that_the_state_leaves_out_is_refused_or_replayed(make: Make) -> None:
    def shuffled() -> Any:
        return make().shuffle(seed=3, buffer_size=10).map(lambda row: row)

    undisturbed = [row["id"] for row in shuffled()]
    stream = shuffled()
    reading = iter(stream)
    before = [next(reading)["id"] for _ in range(12)]
    again = shuffled()
    again.load_state_dict(stream.state_dict())
    lost = set(undisturbed) - {*before, *(row["id"] for row in again)}
    assert lost, "the library keeps its buffer now: it need not be refused any more"
    with pytest.raises(DataError, match="buffer that its state_dict leaves out") as refused:
        as_elastic_loader(shuffled(), global_batch_size=6)
    assert "replay=True" in refused.value.hint
    assert through(shuffled, [4, 3, 2], replay=True) == undisturbed


def test_a_stream_that_is_divided_among_ranks_already_is_refused(make: Make) -> None:
    with pytest.raises(DataError, match="already divided among ranks"):
        as_elastic_loader(split_dataset_by_node(make(), rank=0, world_size=2), global_batch_size=8)


def test_a_map_style_dataset_is_read_by_number() -> None:
    rows = datasets.Dataset.from_dict({"id": list(range(TOTAL))})
    loader = as_elastic_loader(rows, global_batch_size=6)
    assert sorted(i for batch in loader for i in batch.data["id"].tolist()) == list(range(TOTAL))
