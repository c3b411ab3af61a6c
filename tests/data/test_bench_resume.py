"""The benchmark counts what it says, for us and for others."""

from __future__ import annotations

import pytest

from benchmarks.resume_peers import torchdata, verdict
from strata.bench.data.resume import SCHEDULES, strata_run


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("total", [1_000, 1_003])
@pytest.mark.parametrize("constant", [True, False])
def test_strata_loses_and_repeats_nothing_on_any_schedule(
    schedule: list[int], total: int, constant: bool
) -> None:
    assert strata_run(total, schedule, constant=constant) == (0, 0)


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_a_sampler_that_does_not_know_the_world_changed_is_seen_to_lose_and_repeat() -> None:
    answer = torchdata(1_003, [2, 4, 2])
    assert answer["lost"] > 0
    assert answer["repeated"] > 0


def test_lost_and_repeated_are_counted() -> None:
    assert verdict([0, 1, 1, 1, 3], 5) == {"lost": 2, "repeated": 2}
