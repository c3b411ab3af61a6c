"""Steps by a budget of tokens: the same in any world, exactly once, within the budget, whatever happens to the fleet."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.core.data.ledger import DataCommit
from strata.data import DataLedger, ElasticLoader, ElasticSampler
from strata.data.loading.steps import Step


def make(lengths: list[int], budget: int, rank: int = 0, world_size: int = 1) -> ElasticSampler:
    return ElasticSampler(
        len(lengths), max_tokens=budget, lengths=lengths, rank=rank, world_size=world_size, seed=5
    )


def undisturbed(lengths: list[int], budget: int) -> list[tuple[list[int], float]]:
    return [(ids, step.weight) for step, ids in make(lengths, budget).batches()]


@settings(max_examples=200, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 50), min_size=1, max_size=120),
    budget=st.integers(50, 400),
    worlds=st.lists(st.integers(1, 64), min_size=1, max_size=5),
    seed=st.integers(0, 1000),
)
def test_steps_are_the_same_in_any_world(
    lengths: list[int], budget: int, worlds: list[int], seed: int
) -> None:
    expected = [sorted(ids) for ids, _ in undisturbed(lengths, budget)]
    chance = random.Random(seed)
    seen: list[list[int]] = []
    record = DataCommit()
    state = make(lengths, budget).state_dict()
    while len(seen) < len(expected):
        world = worlds[len(seen) % len(worlds)]
        ranks = [make(lengths, budget, rank, world) for rank in range(world)]
        for sampler in ranks:
            sampler.load_state_dict(state)
        committed = chance.randint(1, 5)
        for _, parts in zip(range(committed), zip(*(s.batches() for s in ranks), strict=True), strict=False):
            ids = [i for step, own in parts for i in (own if len(step) else [])]
            tokens = sum(lengths[i] for i in ids)
            assert tokens <= budget
            assert sum(step.weight for step, _ in parts) == pytest.approx(world)
            largest = max(sum(lengths[i] for i in own) for step, own in parts if len(step))
            assert largest <= tokens / world + 50
            seen.append(sorted(ids))
            for sampler, (step, _) in zip(ranks, parts, strict=True):
                sampler.commit(step)
        state = ranks[0].state_dict()
        record = record.next([r for s in ranks for r in s.records()], world_size=world)
    assert seen == expected
    coverage = record.coverage("data", 0)
    assert coverage.covered.count_below(np.array([len(lengths)]))[0] == len(lengths)
    assert not coverage.repeated


def test_a_greedy_step_holds_as_much_as_fits() -> None:
    lengths = [random.Random(i).randint(1, 40) for i in range(300)]
    batches = [ids for ids, _ in undisturbed(lengths, 200)]
    for ids, following in itertools.pairwise(batches):
        assert sum(lengths[i] for i in ids) + lengths[following[0]] > 200


def test_what_other_ranks_have_trained_follows_from_the_position() -> None:
    lengths = [random.Random(i).randint(1, 40) for i in range(100)]
    ranks = [make(lengths, 150, rank, 3) for rank in range(3)]
    for _ in range(len(ranks[0]) + 2):  # Into the second epoch.
        for sampler in ranks:
            sampler.commit()
    for rank, sampler in enumerate(ranks):
        derived = ranks[0].records_of(rank, (0, 0))
        assert [r.to_json() for r in derived] == [r.to_json() for r in sampler.records()]


def test_a_loader_reads_batches_of_changing_size(tmp_path: Path) -> None:
    lengths = [1 + i % 9 for i in range(60)]
    loader = ElasticLoader(range(60), make(lengths, 30), num_workers=1)
    ledger = DataLedger(loader)
    seen = [batch.data.tolist() for batch in loader]
    assert sorted(i for ids in seen for i in ids) == list(range(60))
    assert len({len(ids) for ids in seen}) > 1
    assert ledger.commit()["epochs"][0]["closed"]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"max_tokens": 10}, "max_tokens needs lengths"),
        ({"max_tokens": 10, "lengths": [1, 2]}, "one number for each"),
        ({"max_tokens": 10, "lengths": [1, 11, 2]}, "sample 1 has 11 tokens"),
        ({"max_tokens": 10, "lengths": [1, -1, 2]}, "length of -1"),
        ({"max_tokens": 0, "lengths": [0, 0, 0]}, "must be positive"),
        (
            {"max_tokens": 10, "lengths": [1, 1, 1], "drop_last": True},
            "combined with micro_batch_size or drop_last",
        ),
        ({"max_tokens": 10, "lengths": [1, 1, 1], "batch_size": 2}, "exactly one of"),
    ],
)
def test_what_cannot_be_meant_is_refused(options: dict[str, object], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        ElasticSampler(3, **options)  # type: ignore[arg-type]


def test_an_empty_slice_takes_part_with_weight_nothing() -> None:
    steps: list[Step] = [step for step, _ in make([10, 10], 20, rank=5, world_size=7).batches()]
    assert [(len(step), step.weight) for step in steps] in ([(0, 0.0)], [(1, 3.5)])
