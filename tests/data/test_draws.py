"""Random numbers of samples: the same after any restart, in any world, with any number of loader processes."""

from __future__ import annotations

import json
import random
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, get_worker_info

from strata.data.dataset import ElasticDataset
from strata.data.iterable import ElasticIterableDataset
from strata.data.loading.loader import ElasticLoader
from strata.data.loading.sampler import ElasticSampler

TOTAL = 60


def draw(sample: int) -> torch.Tensor:
    drawn = (torch.rand(()).item(), random.random(), np.random.random())
    return torch.tensor([sample, *drawn], dtype=torch.float64)


class Drawing(Dataset[torch.Tensor]):
    """Samples that are augmented at random, with everything people draw from."""

    shift = 0

    def __len__(self) -> int:
        return TOTAL

    def __getitem__(self, sample: int) -> torch.Tensor:
        return draw(sample + self.shift)


class DrawingBatches(Drawing):
    """The same, read batch by batch."""

    def __getitems__(self, samples: list[int]) -> list[torch.Tensor]:
        return [self[sample] for sample in samples]


class Seeds(Drawing):
    """Samples that are the seed of the loader process that read them."""

    def __getitem__(self, sample: int) -> torch.Tensor:
        info = get_worker_info()
        assert info is not None
        return torch.tensor(info.seed - info.id)


def transform(row: dict[str, Any]) -> torch.Tensor:
    return draw(row["id"])


@pytest.fixture(params=["map", "iterable", "files", "batches"])
def dataset(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Any]:
    if request.param == "files":
        (tmp_path / "d.jsonl").write_text("".join(json.dumps({"id": i}) + "\n" for i in range(TOTAL)))
        return request.param, ElasticDataset(tmp_path / "d.jsonl", transform=transform)
    return request.param, DrawingBatches() if request.param == "batches" else Drawing()


def make_loader(
    dataset: tuple[str, Any], num_workers: int, *, rank: int = 0, world: int = 1
) -> ElasticLoader:
    kind, samples = dataset
    options: dict[str, Any] = {"num_workers": num_workers, "persistent_workers": True}
    sampler = ElasticSampler(TOTAL, global_batch_size=6, seed=5, rank=rank, world_size=world)
    if kind == "iterable":
        return ElasticLoader(ElasticIterableDataset(samples, sampler), **options)
    return ElasticLoader(samples, sampler, **options)


def drawn(batches: Any) -> dict[int, tuple[float, ...]]:
    """What was drawn for each sample."""
    return {int(row[0]): tuple(row[1:]) for batch in batches for row in batch.data.tolist()}


def test_a_resumed_run_draws_what_an_undisturbed_one_would(dataset: tuple[str, Any]) -> None:
    before = torch.get_rng_state()
    calm = drawn(make_loader(dataset, 1))
    assert len(set(calm.values())) == TOTAL
    assert torch.equal(torch.get_rng_state(), before), "the model's own generator was touched"

    killed = make_loader(dataset, 2)
    first = list(islice(killed, 4))
    state = killed.state_dict()
    # Where a dataset reads whole batches its draws follow the batches, which follow the world.
    world = 1 if dataset[0] == "batches" else 2
    rest: dict[int, tuple[float, ...]] = {}
    for rank in range(world):
        resumed = make_loader(dataset, 1, rank=rank, world=world)
        resumed.load_state_dict(state)
        rest |= drawn(resumed)
    assert drawn(first) | rest == calm


def test_another_epoch_draws_again() -> None:
    loader = make_loader(("map", Drawing()), 1)
    first, second = drawn(loader), drawn(loader)
    assert first.keys() == second.keys()
    assert not set(first.values()) & set(second.values())


def test_loader_processes_are_seeded_by_where_they_begin() -> None:
    def seed(position: int) -> int:
        loader = make_loader(("map", Seeds()), 1)
        loader.load_state_dict({**loader.state_dict(), "position": position})
        return int(next(iter(loader)).data[0])

    assert seed(0) == seed(0)
    assert seed(0) != seed(30), "a restart would begin with the random numbers of the first start"


def shift(worker: int) -> None:
    info = get_worker_info()
    assert info is not None
    dataset: Any = info.dataset
    assert len(dataset) == TOTAL
    dataset.shift = 100


def test_a_worker_init_function_finds_the_users_dataset() -> None:
    sampler = ElasticSampler(TOTAL, global_batch_size=6, shuffle=False)
    loader = ElasticLoader(Drawing(), sampler, num_workers=1, worker_init_fn=shift)
    assert next(iter(loader)).data[:, 0].tolist() == [100, 101, 102, 103, 104, 105]


def test_a_generator_of_ones_own_is_left_alone() -> None:
    mine = torch.Generator().manual_seed(3)
    expected = torch.Generator().manual_seed(3)
    sampler = ElasticSampler(TOTAL, global_batch_size=6)
    next(iter(ElasticLoader(Seeds(), sampler, num_workers=1, generator=mine)))
    torch.empty((), dtype=torch.int64).random_(generator=expected)
    assert torch.equal(mine.get_state(), expected.get_state())
