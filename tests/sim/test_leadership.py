"""Hundreds of small disasters of several coordinators, each decided by its seed, and proof that the simulator would notice a mistake.

`STRATA_SIM_SEED=17` runs one seed, `STRATA_SIM_RUNS=5000` more of them; `python -m tests.sim --leadership --seed 17 --story` tells
everything that happened in one.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from strata.core import leadership
from strata.core.leadership import Appender, Leadership, Record, Refusal, Tail
from tests.sim.leadership import Result, SimLeader, Store, simulate
from tests.sim.scenario import SimulationFailed

RUNS = int(os.environ.get("STRATA_SIM_RUNS", "200"))
PER_TEST = 50
ONE_SEED = os.environ.get("STRATA_SIM_SEED")
NOTICED_WITHIN = 300
"""Seeds after which a mistake must have been noticed."""


def batches() -> list[range]:
    if ONE_SEED is not None:
        return [range(int(ONE_SEED), int(ONE_SEED) + 1)]
    return [range(first, min(first + PER_TEST, RUNS)) for first in range(0, RUNS, PER_TEST)]


@pytest.mark.parametrize("seeds", batches(), ids=lambda seeds: f"seeds-{seeds.start}-{seeds.stop - 1}")
def test_nothing_acknowledged_is_lost_and_one_leads_at_a_time(seeds: range) -> None:
    results = [simulate(seed) for seed in seeds]
    if len(seeds) == PER_TEST:
        assert_interesting(results)


def run_all(first: int) -> None:
    """One that has shown a mistake before comes first: that is soonest, and no more than that."""
    for seed in (first, *range(NOTICED_WITHIN)):
        simulate(seed)


def assert_interesting(results: list[Result]) -> None:
    """A simulation in which nothing goes wrong proves nothing."""
    counts = sum((result.counts for result in results), Counter[str]())
    assert counts["terms"] > 1.5 * len(results)
    for what in ("swaps", "reads", "meetings", "parts"):
        assert counts[what] > 10 * len(results), what


def test_one_seed_is_one_story() -> None:
    assert simulate(7) == simulate(7)
    assert simulate(7).fingerprint != simulate(8).fingerprint


# --- would it notice? ---------------------------------------------------------------------------------------

Patch = Callable[[Any, str, Any], None]


def appends_are_not_fenced(patch: Patch) -> None:
    patch(Store, "is_led", lambda self, term: True)


def positions_are_written_over(patch: Patch) -> None:
    patch(Store, "found", lambda self, position: None)


def whatever_is_at_the_position_counts_as_landed(patch: Patch) -> None:
    patch(Record, "is_same", lambda self, other: other is not None)
    patch(Appender, "__init__", _at_the_position_before)


def _at_the_position_before(self: Appender, term: int, *, position: int) -> None:
    """A leader that has not read the last record."""
    self.term, self.position, self._batch = term, max(0, position - 1), 0


def an_append_without_an_answer_is_made_anew(patch: Patch) -> None:
    def anew(self: SimLeader, record: Record) -> None:
        if self._in_flight and self._in_flight[0] == record:
            assert self._appender is not None
            self._appender.position = record.position
            self._in_flight = self._appender.records(
                b"".join(each.body for each in self._in_flight), part_bytes=10_000
            )
            self._send(self._in_flight[0])

    patch(SimLeader, "_resend", anew)


def answers_do_not_wait_for_the_append(patch: Patch) -> None:
    send = SimLeader._send

    def hasty(self: SimLeader, record: Record) -> None:
        answers, self._answers = self._answers, []
        for answer in answers:
            answer()
        send(self, record)

    patch(SimLeader, "_send", hasty)


def answers_wait_for_the_first_part_alone(patch: Patch) -> None:
    landed = SimLeader._landed

    def early(self: SimLeader) -> None:
        answers, self._answers = self._answers, []
        for answer in answers:
            answer()
        landed(self)

    patch(SimLeader, "_landed", early)


def what_is_not_written_is_not_confirmed(patch: Patch) -> None:
    patch(SimLeader, "is_confirmed", lambda self: True)


def leases_count_from_their_answer(patch: Patch) -> None:
    renewed = Leadership.renewed
    clocks: dict[int, SimLeader] = {}
    start = SimLeader.start

    def started(self: SimLeader) -> None:
        start(self)
        clocks[id(self.leadership)] = self

    def from_now(self: Leadership, *, sent_s: float) -> None:
        renewed(self, sent_s=clocks[id(self)].now_s())

    patch(SimLeader, "start", started)
    patch(Leadership, "renewed", from_now)


def leases_count_longer_than_they_are(patch: Patch) -> None:
    patch(leadership, "CLOCK_MARGIN", -0.3)


def the_clock_stops_while_the_process_is_paused(patch: Patch) -> None:
    patch(SimLeader, "now_s", lambda self: self._offset_s + (self.world.now_s - self.paused_s) * self._rate)


def the_clock_can_be_set(patch: Patch) -> None:
    patch(SimLeader, "now_s", lambda self: self._offset_s + self.world.now_s + self.wall_jump_s)


def new_leaders_do_not_read_what_they_missed(patch: Patch) -> None:
    patch(SimLeader, "_take_over", SimLeader._lead)


def records_that_come_twice_count_twice(patch: Patch) -> None:
    take = Tail.take

    def again(self: Tail, record: Record) -> bytes | None:
        if record.position == self.position and record.parts == 1:
            return record.body
        return take(self, record)

    patch(Tail, "take", again)


def gaps_are_not_noticed(patch: Patch) -> None:
    take = Tail.take

    def careless(self: Tail, record: Record) -> bytes | None:
        self.position = max(self.position, record.position - 1)
        return take(self, record)

    patch(Tail, "take", careless)


def parts_of_two_batches_make_one(patch: Patch) -> None:
    patch(leadership, "_continues", lambda last, record: True)


def snapshots_are_not_fenced(patch: Patch) -> None:
    patch(Store, "may_snapshot", lambda self, term, before: True)


def snapshots_may_go_back(patch: Patch) -> None:
    patch(Store, "may_snapshot", lambda self, term, before: self.is_led(term))


def who_is_deposed_keeps_its_state(patch: Patch) -> None:
    start = SimLeader.start

    def kept(self: SimLeader) -> None:
        cluster = getattr(self, "cluster", None)
        tail = getattr(self, "tail", None)
        start(self)
        if cluster is not None and tail is not None:
            self.cluster, self.tail = cluster, tail

    patch(SimLeader, "start", kept)


def standbys_take_commands(patch: Patch) -> None:
    patch(SimLeader, "leads", lambda self: self.serves or self._ticks)
    patch(SimLeader, "is_confirmed", lambda self: True)


def who_cannot_renew_leads_on(patch: Patch) -> None:
    patch(Leadership, "may_answer", lambda self, now_s: self.role == "leader")


def a_refused_append_is_forgotten(patch: Patch) -> None:
    fate = Appender.fate

    def forgetful(self: Appender, record: Record, refusal: Refusal | None) -> str:
        found = fate(self, record, refusal)
        return "landed" if found == "deposed" else found

    patch(Appender, "fate", forgetful)


def nobody_campaigns_again(patch: Patch) -> None:
    patch(Leadership, "not_won", lambda self, leader, *, revision, now_s: None)


def old_news_of_who_leads_is_believed_for_ever(patch: Patch) -> None:
    patch(Leadership, "leader_seen", _once)
    patch(leadership, "PATIENCE_LEASES", 1e9)


def _once(self: Leadership, leader: Any, *, revision: int, now_s: float) -> None:
    self._seen_s = now_s
    self.leader = self.leader or leader


MISTAKES = [
    appends_are_not_fenced,
    positions_are_written_over,
    whatever_is_at_the_position_counts_as_landed,
    an_append_without_an_answer_is_made_anew,
    answers_do_not_wait_for_the_append,
    answers_wait_for_the_first_part_alone,
    what_is_not_written_is_not_confirmed,
    leases_count_from_their_answer,
    leases_count_longer_than_they_are,
    the_clock_stops_while_the_process_is_paused,
    the_clock_can_be_set,
    new_leaders_do_not_read_what_they_missed,
    records_that_come_twice_count_twice,
    gaps_are_not_noticed,
    parts_of_two_batches_make_one,
    snapshots_are_not_fenced,
    snapshots_may_go_back,
    who_is_deposed_keeps_its_state,
    standbys_take_commands,
    who_cannot_renew_leads_on,
    a_refused_append_is_forgotten,
    nobody_campaigns_again,
    old_news_of_who_leads_is_believed_for_ever,
]

SHOWN_BY: dict[Callable[[Patch], None], int] = {
    what_is_not_written_is_not_confirmed: 18,
    leases_count_from_their_answer: 135,
    leases_count_longer_than_they_are: 81,
    the_clock_stops_while_the_process_is_paused: 18,
    the_clock_can_be_set: 34,
    records_that_come_twice_count_twice: 23,
    who_cannot_renew_leads_on: 18,
}


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
def test_the_simulator_would_notice(
    mistake: Callable[[Patch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mistake(monkeypatch.setattr)
    with pytest.raises(SimulationFailed) as failure:
        run_all(SHOWN_BY.get(mistake, 0))
    assert f"python -m tests.sim --seed {failure.value.seed} --story --leadership" in str(failure.value)
