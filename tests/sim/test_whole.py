"""The whole in one world: many small disasters, each decided by its seed, and proof that the simulator would notice a mistake.

`STRATA_SIM_SEED=17` runs one seed, `STRATA_SIM_RUNS=5000` more of them; `python -m tests.sim --whole --seed 17 --story` tells
everything that happened in one, and `python -m tests.sim --whole --runs 3000` searches on all processors.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from strata.core.cluster import Cluster
from strata.core.fleet.checkpoints import Checkpoints
from strata.core.fleet.multiplexer import Multiplexer, StreamLost
from strata.core.jobs import job as job_protocol
from strata.core.jobs.lineage import CompletionOrder
from strata.core.leadership import Leadership
from strata.core.messages import ClockResumed
from tests.sim import test_job, test_leadership, test_machines, test_simulation
from tests.sim.whole import WholeResult, simulate

RUNS = int(os.environ.get("STRATA_SIM_RUNS", "100"))
PER_TEST = 50
ONE_SEED = os.environ.get("STRATA_SIM_SEED")
NOTICED_WITHIN = 60
"""Seeds after which a mistake must have been noticed."""


def batches() -> list[range]:
    if ONE_SEED is not None:
        return [range(int(ONE_SEED), int(ONE_SEED) + 1)]
    return [range(first, min(first + PER_TEST, RUNS)) for first in range(0, RUNS, PER_TEST)]


@pytest.mark.parametrize("seeds", batches(), ids=lambda seeds: f"seeds-{seeds.start}-{seeds.stop - 1}")
def test_whatever_fails_together_every_sample_is_trained_once(seeds: range) -> None:
    results = [simulate(seed) for seed in seeds]
    if len(seeds) == PER_TEST:
        assert_interesting(results)


def assert_interesting(results: list[WholeResult]) -> None:
    """A simulation in which nothing goes wrong proves nothing."""
    counts = sum((result.counts for result in results), Counter[str]())
    assert counts["terms"] > 1.3 * len(results)
    for what, times in (
        ("releases", 300),
        ("breaks", 50),
        ("stale", 50),
        ("redirected", 200),
        ("one-way cuts", 15),
        ("coordinators paused", 10),
        ("coordinators killed", 5),
        ("majorities lost", 3),
        ("published", 80),
        ("lives", 70),
        ("restored from memory", 5),
        ("restored from disk", 5),
        ("stream cuts", 10),
        ("machines lost", 5),
    ):
        assert counts[what] > times, what


def test_one_seed_is_one_story() -> None:
    assert simulate(7) == simulate(7)
    assert simulate(7).fingerprint != simulate(8).fingerprint


# --- would it notice? ---------------------------------------------------------------------------------------

Patch = Callable[[Any, str, Any], None]
Mistake = Callable[[pytest.MonkeyPatch], None]


def saves_that_end_late_count_as_the_newest(patch: Patch) -> None:
    patch(CompletionOrder, "completed", lambda self, checkpoint_id, step: None)


def what_a_failover_swallowed_is_never_reported(patch: Patch) -> None:
    reconcile = Checkpoints.decide_reconcile
    patch(Checkpoints, "decide_reconcile", lambda *arguments: (reconcile(*arguments)[0], ()))


def new_leaders_take_everybody_for_lost(patch: Patch) -> None:
    observe = Cluster.observe

    def impatient(self: Cluster, observation: Any, now: Any) -> None:
        if not isinstance(observation, ClockResumed):
            observe(self, observation, now)

    patch(Cluster, "observe", impatient)


def agents_stay_with_a_stream_that_is_lost(patch: Patch) -> None:
    handle = Multiplexer.handle

    def stubborn(self: Multiplexer, stimulus: Any, now_s: float) -> Any:
        return [] if isinstance(stimulus, StreamLost) else handle(self, stimulus, now_s)

    patch(Multiplexer, "handle", stubborn)


def leaders_never_step_down(patch: Patch) -> None:
    patch(Leadership, "resign", lambda self: None)


def what_superseded_generations_publish_is_restored(patch: Patch) -> None:
    patch(job_protocol.Fence, "refuses", lambda self, offer: False)


OF_THE_WHOLE = [
    saves_that_end_late_count_as_the_newest,
    what_a_failover_swallowed_is_never_reported,
    new_leaders_take_everybody_for_lost,
    agents_stay_with_a_stream_that_is_lost,
    leaders_never_step_down,
    what_superseded_generations_publish_is_restored,
]


def all_mistakes() -> dict[str, Mistake]:
    """Of this simulation, and of those that it joins."""
    found: dict[str, Mistake] = {}
    for mistakes in (
        OF_THE_WHOLE,
        test_leadership.MISTAKES,
        test_machines.MISTAKES,
        test_simulation.MISTAKES,
    ):
        for mistake in mistakes:
            found[mistake.__name__] = _with_setattr(mistake)
    return found | test_job.MISTAKES


def _with_setattr(mistake: Callable[[Patch], None]) -> Mistake:
    return lambda monkeypatch: mistake(monkeypatch.setattr)
