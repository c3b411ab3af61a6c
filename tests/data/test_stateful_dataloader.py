"""torchdata's `StatefulDataLoader` keeps and restores the position of the elastic sampler and dataset."""

from __future__ import annotations

import pytest
from torchdata.stateful_dataloader import StatefulDataLoader

from strata.data.iterable import ElasticIterableDataset
from tests.data.test_loader import TOTAL, Numbers, calm, flat, sampler

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")


@pytest.mark.parametrize("num_workers", [0, 2])
def test_stateful_dataloader_resumes_a_map_style_dataset_in_any_world(num_workers: int) -> None:
    loader = StatefulDataLoader(Numbers(), batch_sampler=sampler(), num_workers=num_workers)
    reading = iter(loader)
    taken = [next(reading) for _ in range(4)]
    state = loader.state_dict()

    rest = []
    for rank in range(3):
        again = StatefulDataLoader(
            Numbers(), batch_sampler=sampler(rank=rank, world_size=3), num_workers=num_workers
        )
        again.load_state_dict(state)
        rest.append([batch.tolist() for batch in again])
    seen = [s for batch in taken for s in batch.tolist()]
    for ranks in zip(*rest, strict=True):
        seen += [s for ids in ranks for s in ids]
    assert seen[:TOTAL] == calm()
    assert len(seen) == TOTAL


@pytest.mark.parametrize("num_workers", [0, 2])
def test_stateful_dataloader_resumes_the_iterable_dataset(num_workers: int) -> None:
    def build() -> StatefulDataLoader:
        dataset = ElasticIterableDataset(Numbers(), sampler())
        return StatefulDataLoader(dataset, batch_size=None, num_workers=num_workers)

    loader = build()
    reading = iter(loader)
    taken = [next(reading) for _ in range(5)]
    again = build()
    again.load_state_dict(loader.state_dict())
    assert flat(taken) + flat(list(again)) == calm()
