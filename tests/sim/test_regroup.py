"""Recovery without a restart, simulated: kills, errors, hangs and stops at any moment, on one machine and on several."""

from __future__ import annotations

import os
from collections import Counter

import pytest

from tests.sim.regroup import Fleet

RUNS = int(os.environ.get("STRATA_SIM_JOB_RUNS", "300"))


@pytest.mark.parametrize(("machines", "workers"), [(1, 3), (1, 8), (3, 2)])
@pytest.mark.parametrize("sharded", [False, True])
def test_everybody_trains_together_in_the_end(machines: int, workers: int, sharded: bool) -> None:
    counts: Counter[str] = Counter()
    for seed in range(RUNS // 3):
        fleet = Fleet(seed, machines=machines, workers=workers, sharded=sharded)
        fleet.run()
        counts += fleet.counts
    assert counts["kill"]
    assert counts["Replace"]
    assert counts["Meet"] > counts["Restart"]
