"""Steps are arithmetic: exact cover, equal counts on all ranks, any position at once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.data.loading.steps import StepPlan


def plans(world: int, **options: int | bool | None) -> list[StepPlan]:
    return [StepPlan(epoch=0, rank=rank, world_size=world, **options) for rank in range(world)]  # type: ignore[arg-type]


@given(
    total=st.integers(0, 200),
    start=st.integers(0, 200),
    batch=st.integers(1, 40),
    micro=st.one_of(st.none(), st.integers(1, 7)),
    world=st.integers(1, 12),
    drop_last=st.booleans(),
)
def test_ranks_cover_each_batch_once_in_as_many_micro_batches(
    total: int, start: int, batch: int, micro: int | None, world: int, drop_last: bool
) -> None:
    start = min(start, total)
    ranks = plans(
        world, total=total, start=start, global_batch_size=batch, micro_batch_size=micro, drop_last=drop_last
    )
    assert len({len(plan) for plan in ranks}) == 1
    per_rank = [[plan.micro_batch(m) for m in range(len(plan))] for plan in ranks]
    covered = sorted(p for steps in per_rank for s in steps for p in range(s.start, s.stop))
    assert covered == list(range(start, ranks[0].end))
    assert ranks[0].end + ranks[0].dropped.size == total
    if not drop_last:
        assert ranks[0].end == total
    for together in zip(*per_rank, strict=True):
        assert len({(s.batch_start, s.batch_stop, s.ends_step) for s in together}) == 1
        assert micro is None or all(len(s) <= micro for s in together)
        assert max(len(s) for s in together) - min(len(s) for s in together) <= 1
    weights: dict[int, float] = {}
    for s in (s for steps in per_rank for s in steps):
        weights[s.batch_start] = weights.get(s.batch_start, 0.0) + s.weight
    assert all(weight == pytest.approx(world) for weight in weights.values())


def test_the_last_micro_batch_of_a_huge_epoch_is_found_at_once() -> None:
    (plan,) = plans(1, total=10**12 + 1, start=0, global_batch_size=1_024, micro_batch_size=8)
    last = plan.micro_batch(len(plan) - 1)
    assert last.stop == 10**12 + 1
    assert last.ends_step


def test_there_is_nothing_after_the_end() -> None:
    (plan,) = plans(1, total=10, start=0, global_batch_size=4)
    with pytest.raises(IndexError, match="micro-batch 3 of 3"):
        plan.micro_batch(3)
