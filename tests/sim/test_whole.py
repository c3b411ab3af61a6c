"""The whole in one world: many small disasters, each decided by its seed, and proof that the simulator would notice a mistake.

`STRATA_SIM_SEED=17` runs one seed, `STRATA_SIM_RUNS=5000` more of them; `python -m tests.sim --whole --seed 17 --story` tells
everything that happened in one, and `python -m tests.sim --whole --runs 3000` searches on all processors.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from strata.core.cluster import Cluster
from strata.core.fleet import checkpoints
from strata.core.fleet.checkpoints import Checkpoints
from strata.core.fleet.multiplexer import Multiplexer, StreamLost
from strata.core.jobs import job as job_protocol
from strata.core.jobs.lineage import CompletionOrder
from strata.core.messages import ClockResumed
from tests.sim import test_job, test_leadership, test_machines, test_simulation
from tests.sim.scenario import SimulationFailed
from tests.sim.whole import WholeResult, simulate

RUNS = int(os.environ.get("STRATA_SIM_RUNS", "3000"))
PER_TEST = 50
ROOT = Path(__file__).parents[2]
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
    if len(seeds) == PER_TEST and seeds.stop <= 100:  # Of the others some are bound to be dull by chance.
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
        ("coordinators killed", 2),
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


def test_a_search_writes_what_it_has_seen(tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    command = [
        sys.executable,
        "-m",
        "tests.sim",
        "--whole",
        "--seed",
        "7",
        "--runs",
        "2",
        "--processes",
        "1",
        "-o",
    ]
    subprocess.run([*command, str(result)], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    found = json.loads(result.read_text())
    assert (found["first_seed"], found["last_seed"], found["schedules"]) == (7, 8, 2)
    assert found["failed_seeds"] == []
    assert found["counts"]["releases"] == sum(simulate(seed).counts["releases"] for seed in (7, 8))


def test_a_search_needs_python_msgspec_and_numpy_alone() -> None:
    """It is carried to whatever machine has many processors."""
    listing = "import sys, tests.sim.__main__; print(*{name.partition('.')[0] for name in sys.modules})"
    command = [sys.executable, "-c", listing]
    loaded = subprocess.run(command, check=True, cwd=ROOT, capture_output=True, text=True).stdout.split()
    assert not set(loaded) & {"torch", "grpc", "pytest", "hypothesis", "fastapi", "google", "xxhash"}
    assert {"msgspec", "numpy"} <= set(loaded)


# --- would it notice? ---------------------------------------------------------------------------------------

Patch = Callable[[Any, str, Any], None]
Mistake = Callable[[pytest.MonkeyPatch], None]


def saves_that_end_late_count_as_the_newest(patch: Patch) -> None:
    patch(CompletionOrder, "completed", lambda self, checkpoint_id, step: None)
    patch(Checkpoints, "_newer", lambda self, command, job: "")


def reports_that_are_late_count_as_the_newest(patch: Patch) -> None:
    patch(Checkpoints, "_newer", lambda self, command, job: "")


def what_is_found_again_counts_as_the_newest(patch: Patch) -> None:
    patch(checkpoints, "_age", lambda record: (0, 0))


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


def what_superseded_generations_publish_is_restored(patch: Patch) -> None:
    patch(job_protocol.Fence, "refuses", lambda self, offer: False)


OF_THE_WHOLE = [
    saves_that_end_late_count_as_the_newest,
    reports_that_are_late_count_as_the_newest,
    what_is_found_again_counts_as_the_newest,
    what_a_failover_swallowed_is_never_reported,
    new_leaders_take_everybody_for_lost,
    agents_stay_with_a_stream_that_is_lost,
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


SHOWN_BY = {
    "what_superseded_generations_publish_is_restored": 387,
    "reconciliations_count_however_late": 95,
    "saves_that_end_late_count_as_the_newest": 40,
    "reports_that_are_late_count_as_the_newest": 98228,
    "what_is_found_again_counts_as_the_newest": 758,
    "what_a_failover_swallowed_is_never_reported": 31,
    "new_leaders_take_everybody_for_lost": 0,
    "agents_stay_with_a_stream_that_is_lost": 0,
    "appends_are_not_fenced": 8,
    "positions_are_written_over": 1,
    "whatever_is_at_the_position_counts_as_landed": 0,
    "an_append_without_an_answer_is_made_anew": 0,
    "answers_do_not_wait_for_the_append": 0,
    "answers_wait_for_the_first_part_alone": 0,
    "what_is_not_written_is_not_confirmed": 19,
    "leases_count_longer_than_they_are": 19,
    "the_clock_stops_while_the_process_is_paused": 0,
    "the_clock_can_be_set": 20,
    "new_leaders_do_not_read_what_they_missed": 0,
    "records_that_come_twice_count_twice": 1,
    "gaps_are_not_noticed": 0,
    "parts_of_two_batches_make_one": 40,
    "snapshots_are_not_fenced": 8,
    "snapshots_may_go_back": 8,
    "who_is_deposed_keeps_its_state": 13,
    "standbys_take_commands": 0,
    "who_cannot_renew_leads_on": 19,
    "a_refused_append_is_forgotten": 17,
    "nobody_campaigns_again": 1,
    "old_news_of_who_leads_is_believed_for_ever": 14,
    "silent_workers_are_beaten_for": 3,
    "who_waits_does_not_arrive_again": 0,
    "losses_are_kept_secret": 3,
    "generations_are_folded_together": 0,
    "workers_arrive_as_each_other": 2,
    "incarnations_are_not_checked_where_many_arrive": 0,
    "checkpoints_that_exist_are_forgotten": 7,
    "a_report_that_is_said_again_counts_again": 6,
    "what_an_agent_says_late_is_not_taken": 10,
    "recoveries_close_nothing": 1,
    "whoever_is_lost_is_blamed": 5,
    "no_incarnation_is_checked": 1,
    "no_generation_is_checked": 0,
    "barriers_open_one_short": 0,
    "retries_count_again": 2,
    "losses_do_not_end_barriers": 40,
    "newcomers_take_the_place_of_others": 2,
    "progress_is_not_taken_from_checkpoints": 0,
    "a_late_upload_counts_as_the_newest": 2,
    "no_generation_of_the_run_is_checked": 0,
    "who_was_taken_for_dead_is_called_superseded": 1,
    "what_does_not_exist_any_more_stays_in_the_registry": 3,
    "an agent does not wait for the ranks of other machines": 31,
}
"""By mistake: a seed that has shown it. That is soonest, and no more than that."""


def run_all(first: int) -> None:
    for seed in (first, *range(NOTICED_WITHIN)):
        simulate(seed)


@pytest.mark.parametrize("name", SHOWN_BY)
def test_a_planted_mistake_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    all_mistakes()[name](monkeypatch)
    with pytest.raises(SimulationFailed) as failure:
        run_all(SHOWN_BY[name])
    assert f"python -m tests.sim --seed {failure.value.seed} --story --whole" in str(failure.value)
