"""Rules raise once, resolve once, say how many were held back, forget what is over, and survive a restart."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.core.events import IncidentSubject, Outcome
from strata.core.faults.failures import FailureClass
from strata.core.faults.incidents import Incident
from strata.core.faults.notifications import (
    ACTIVE_LIMIT,
    GOODPUT_WINDOW_S,
    HOUR_S,
    KEPT,
    LOSSES_ABOVE,
    LOSSES_NEEDED,
    MOST_PER_HOUR,
    QUIET_S,
    RATES_NEEDED,
    RATES_RECENT,
    RULES,
    SILENT_S,
    Disk,
    Key,
    Notification,
    Notifications,
    Sample,
    default_rules,
)
from strata.core.messages import (
    CheckpointCompleted,
    CheckpointId,
    Event,
    IncidentClosed,
    IncidentReported,
    JobId,
    TaskChanged,
    TaskId,
    WorkerId,
)

RUN = JobId("llm")


class Story:
    """Notifications with a clock and the incidents that a cluster would know."""

    def __init__(self, **rules: float) -> None:
        self.now_s = 1_000_000.0
        self.rules = Notifications({**default_rules(), **rules})  # type: ignore[dict-item]
        self.incidents: dict[int, Incident] = {}

    def take(self, *events: Event) -> list[Notification]:
        for event in events:
            if isinstance(event, IncidentReported):
                self.incidents[event.incident_id] = Incident(reported=event, opened_at_s=self.now_s)
        return self.rules.take_events(events, self.incidents, self.now_s)

    def fail(
        self,
        *,
        subject: IncidentSubject = "run",
        kind: FailureClass = "user_error",
        fingerprint: str = "user_error/ValueError",
        launch: str = "",
    ) -> list[Notification]:
        self.number = len(self.incidents) + 1
        return self.take(
            IncidentReported(
                incident_id=self.number,
                job_id=RUN,
                launch=launch,
                subject=subject,
                failure_class=kind,
                fingerprint=fingerprint,
                first=None,
                failures=(),
                what="rank 3 failed",
                decision="restart",
                reason="",
                at_s=self.now_s,
            )
        )

    def close(self, outcome: Outcome, *, took_s: float = 0.0) -> list[Notification]:
        phases = {"load": took_s} if took_s else {}
        return self.take(
            IncidentClosed(
                incident_id=self.number,
                job_id=RUN,
                outcome=outcome,
                reason="why",
                at_s=self.now_s,
                phases_s=phases,
            )
        )

    def save(self, step: int) -> list[Notification]:
        return self.take(
            CheckpointCompleted(
                checkpoint_id=CheckpointId(f"c{step}"),
                job_id=RUN,
                worker_id=WorkerId("w"),
                step=step,
                epoch=0,
                path="/c",
                size_bytes=1,
                tiers=("local",),
                duration_s=1.0,
                digest="",
                parent_id="",
                data_json="",
                metadata={},
                reason="",
                at_s=self.now_s,
            )
        )

    def second(
        self,
        *,
        rate: float | None = 100.0,
        training: float = 1.0,
        disks: tuple[Disk, ...] = (),
        is_there: bool = True,
    ) -> list[Notification]:
        self.now_s += 1
        since_s = self.now_s - 1_000_000
        sample = Sample(
            step=int(since_s),
            workers=4,
            rate=rate,
            unit="tokens/s",
            training_s=since_s * training,
            total_s=since_s,
        )
        still_open = [i for i in self.incidents.values() if i.is_open and i.is_about_run]
        return self.rules.take_samples({RUN: sample} if is_there else {}, disks, still_open, self.now_s)

    def until(self, step: Callable[[], list[Notification]], *, at_most: int = 5_000) -> Notification:
        for _ in range(at_most):
            found = step()
            if found:
                (only,) = found
                return only
        raise AssertionError(f"nothing was notified in {at_most} seconds")


def task(status: str, reason: str = "it failed") -> TaskChanged:
    return TaskChanged(
        task_id=TaskId(RUN),
        status=status,  # type: ignore[arg-type]
        worker_ids=(),
        reason=reason,
        at_s=0.0,
    )


def test_a_run_that_stops_is_notified_once_with_what_the_incident_knows_and_its_return() -> None:
    story = Story()
    assert story.fail() == []
    closed = IncidentClosed(incident_id=1, job_id=RUN, outcome="stopped", reason="no restarts left", at_s=0.0)
    (stopped,) = story.take(task("failed"), closed)
    assert (stopped.rule, stopped.state, stopped.severity, stopped.title) == (
        "stopped",
        "raised",
        "error",
        "llm has stopped",
    )
    assert stopped.text == "rank 3 failed. Stopped: no restarts left"
    assert stopped.next_step.startswith("Fix the program")
    assert story.take(task("failed")) == []
    (again,) = story.take(task("running"))
    assert (again.state, again.title, again.severity) == ("resolved", "llm runs again", "success")
    (stopped,) = story.take(task("failed", "it failed anew"))
    assert stopped.text == "it failed anew", "a run that stops again is always news"


def test_a_task_that_a_person_stops_is_no_news() -> None:
    assert Story().take(task("stopped"), task("completed")) == []


def test_a_recovery_is_slow_by_its_duration_or_while_it_is_open() -> None:
    story = Story(slow_recovery=60.0)
    story.fail()
    assert story.close("recovered", took_s=59.0) == []
    story.fail(fingerprint="b")
    (slow,) = story.close("recovered", took_s=61.0)
    assert (slow.rule, slow.title, slow.severity) == ("slow_recovery", "llm recovered slowly", "warning")
    assert slow.text.startswith("Recovery took 61 s.")
    assert not story.rules.active, "it is over already"

    story = Story(slow_recovery=60.0)
    story.fail()
    lasting = story.until(story.second)
    assert lasting.title == "llm has not recovered for 60 s"
    assert story.second() == []
    (over,) = story.close("recovered", took_s=90.0)
    assert (over.state, over.title) == ("resolved", "llm has recovered")


def test_the_same_failure_three_times_within_an_hour_is_repeated_and_over_after_one() -> None:
    story = Story()
    for _ in range(2):
        assert story.fail() == []
        assert story.fail(fingerprint=f"other/{story.now_s}") == []
        story.now_s += 60
    (repeated,) = story.fail()
    assert (repeated.rule, repeated.subject) == ("repeated", "user_error/ValueError")
    assert repeated.title == "llm failed 3 times within an hour"
    assert story.take(story.incidents[story.number].reported) == [], "more became known of the same one"
    for incident, known in list(story.incidents.items()):
        closed = IncidentClosed(incident_id=incident, job_id=RUN, outcome="recovered", reason="", at_s=0.0)
        story.incidents[incident] = Incident(reported=known.reported, opened_at_s=0.0, closed=closed)
    story.now_s += HOUR_S
    assert story.until(lambda: story.second(rate=None)).state == "resolved"


def test_preemptions_are_not_failures_that_repeat() -> None:
    story = Story()
    assert [story.fail(kind="preemption", fingerprint="preemption") for _ in range(5)] == [[]] * 5


@pytest.mark.parametrize(("subject", "rule"), [("save", "failed_save"), ("slow_rank", "slow_rank")])
def test_failed_saves_and_slow_ranks_are_raised_and_resolved(subject: IncidentSubject, rule: str) -> None:
    story = Story()
    (raised,) = story.fail(subject=subject, launch="llm-rank3")
    (resolved,) = story.close("recovered")
    assert (raised.rule, raised.state, resolved.rule, resolved.state) == (rule, "raised", rule, "resolved")


def test_a_save_is_overdue_after_three_of_the_usual_intervals() -> None:
    story = Story()
    for step in range(4):
        for _ in range(100):
            assert story.second() == []
        assert story.save(step) == []
    saved_s = story.now_s
    overdue = story.until(story.second)
    assert story.now_s - saved_s == 300
    assert (overdue.rule, overdue.title) == ("overdue_save", "llm: a checkpoint is overdue")
    assert "usually one every 100 s" in overdue.text
    (saved,) = story.save(9)
    assert (saved.state, saved.text) == ("resolved", "The checkpoint of step 9 was completed.")


def test_time_without_training_makes_no_save_overdue() -> None:
    story = Story()
    for step in range(3):
        for _ in range(100):
            story.second()
        story.save(step)
    for _ in range(2_000):
        assert story.second(is_there=False) == []
    for _ in range(299):
        assert story.second() == []


@pytest.mark.parametrize(
    ("bad", "what"), [(math.nan, "NaN"), (math.inf, "infinite"), (-math.inf, "infinite")]
)
def test_a_loss_that_is_no_number_is_raised_at_once_and_resolved_when_it_is_one(
    bad: float, what: str
) -> None:
    story = Story()
    (raised,) = story.rules.take_losses(RUN, [2.0, bad, bad], 7, story.now_s)
    assert (raised.rule, raised.severity, raised.title) == ("loss", "error", f"llm: the loss is {what}")
    assert "step 7" in raised.text
    assert story.rules.take_losses(RUN, [bad], 8, story.now_s) == []
    (resolved,) = story.rules.take_losses(RUN, [2.0], 9, story.now_s)
    assert resolved.state == "resolved"


def test_a_loss_explodes_when_it_stays_far_above_its_median() -> None:
    story = Story()
    usual = [2.0 + n / 100 for n in range(LOSSES_NEEDED)]
    assert story.rules.take_losses(RUN, usual, 20, story.now_s) == []
    assert story.rules.take_losses(RUN, [50.0] * (LOSSES_ABOVE - 1) + [2.0], 25, story.now_s) == []
    (raised,) = story.rules.take_losses(RUN, [50.0] * 10, 40, story.now_s)
    assert raised.title == "llm: the loss explodes"
    assert raised.text == "50 at step 40; its median before was 2.09."
    assert [n.state for n in story.rules.take_losses(RUN, [2.0], 41, story.now_s)] == ["resolved"]


def test_losses_that_fall_or_are_negative_do_not_explode() -> None:
    story = Story()
    falling = [10.0 * 0.9**n for n in range(200)]
    negative = [-3.0 + 0.1 * (n % 5) for n in range(200)]
    assert story.rules.take_losses(RUN, falling, 1, story.now_s) == []
    assert story.rules.take_losses("other", negative, 1, story.now_s) == []


def test_throughput_is_down_when_its_recent_median_is_and_back_when_most_of_it_is() -> None:
    story = Story(throughput=30.0)
    for _ in range(RATES_NEEDED + RATES_RECENT):
        assert story.second() == []
    assert [story.second(rate=10.0) for _ in range(5)] == [[]] * 5, "a few slow steps are none"
    assert [story.second() for _ in range(RATES_RECENT)] == [[]] * RATES_RECENT
    raised = story.until(lambda: story.second(rate=60.0))
    assert (raised.rule, raised.title) == ("throughput", "llm: throughput is down by 40 %")
    assert raised.text == "60 tokens/s with 4 workers; its median is 100."
    assert [story.second(rate=80.0) for _ in range(100)] == [[]] * 100, "half of the way back is not back"
    assert story.until(lambda: story.second(rate=99.0)).state == "resolved"


def test_goodput_counts_over_the_last_ten_minutes() -> None:
    story = Story(goodput=0.5)
    raised = story.until(lambda: story.second(rate=None, training=0.2))
    assert story.now_s - 1_000_000 >= GOODPUT_WINDOW_S * 0.9
    assert (raised.rule, raised.title) == ("goodput", "llm: goodput is under 50%")
    assert raised.text.startswith("20% of the last")


def test_a_disk_that_fills_is_raised_and_has_space_again() -> None:
    story = Story(disk=10.0)

    def look(free: int) -> list[Notification]:
        return story.second(
            disks=(Disk(name="the disk of /data", run="", free_bytes=free, total_bytes=1_000_000_000_000),)
        )

    assert look(100_000_000_000) == []
    (raised,) = look(90_000_000_000)
    assert (raised.rule, raised.run, raised.title) == ("disk", "", "the coordinator: a disk is filling up")
    assert raised.text == "the disk of /data: 90.0 GB of 1,000.0 GB are free (9 %)."
    assert look(105_000_000_000) == []
    assert [n.state for n in look(120_000_000_000)] == ["resolved"]


def test_a_notification_that_recurs_soon_is_held_back_and_counted() -> None:
    story = Story()
    nan, good = [math.nan], [1.0]
    assert len(story.rules.take_losses(RUN, nan + good, 1, story.now_s)) == 2
    for _ in range(3):
        story.now_s += QUIET_S / 10
        assert story.rules.take_losses(RUN, nan + good, 1, story.now_s) == [], (
            "neither it nor its end is said"
        )
    story.now_s += QUIET_S
    (raised,) = story.rules.take_losses(RUN, nan, 1, story.now_s)
    assert raised.held_back == 3


def test_one_run_is_notified_of_so_often_an_hour_and_no_more() -> None:
    story = Story()
    sent = [story.fail(subject="slow_rank", launch=f"llm-rank{n}") for n in range(2 * MOST_PER_HOUR)]
    assert sum(map(len, sent)) == MOST_PER_HOUR
    assert len(story.rules.take_losses("other", [math.nan], 1, story.now_s)) == 1, "others are not held back"
    story.now_s += HOUR_S + 1
    (raised,) = story.fail(subject="save")
    assert raised.held_back == MOST_PER_HOUR


def test_a_rule_that_is_off_raises_nothing() -> None:
    rules = Notifications({})
    assert rules.take_losses(RUN, [math.nan], 1, 0.0) == []
    assert rules.take_events([task("failed")], {}, 0.0) == []
    disk = Disk(name="d", run="", free_bytes=0, total_bytes=1)
    assert rules.take_samples({}, [disk], [], 0.0) == []


def test_what_held_of_a_run_that_is_over_is_forgotten_without_a_word() -> None:
    story = Story()
    story.second()
    story.rules.take_losses(RUN, [math.nan], 1, story.now_s)
    story.take(task("failed"))
    for _ in range(int(SILENT_S) + 5):
        assert story.second(is_there=False) == []
    assert list(story.rules.active) == [Key("stopped", RUN, "")]


def test_a_restart_knows_what_was_said_and_what_holds() -> None:
    story = Story()
    for step in range(3):
        for _ in range(100):
            story.second()
        story.save(step)
    story.rules.take_losses(RUN, [math.nan], 1, story.now_s)
    story.fail()
    story.fail(fingerprint="other")
    kept = story.rules.dump()
    restarted = Notifications()
    restarted.load(kept)
    assert restarted.dump() == kept
    assert restarted.take_losses(RUN, [math.nan], 2, story.now_s) == []
    assert restarted.take_events([story.incidents[1].reported], story.incidents, story.now_s) == []
    (resolved,) = restarted.take_losses(RUN, [1.0], 3, story.now_s)
    assert resolved.id == story.rules.count + 1


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b'{"count": 1}', b"null", b'{"count": [], "recent": 1}'])
def test_what_was_not_written_by_dump_is_refused_and_changes_nothing(body: bytes) -> None:
    story = Story()
    story.rules.take_losses(RUN, [math.nan], 1, story.now_s)
    before = story.rules.dump()
    with pytest.raises(ValueError):
        story.rules.load(body)
    assert story.rules.dump() == before


@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.floats(allow_nan=True, width=32), st.floats(0, 2_000)),
        max_size=80,
    )
)
def test_raised_and_resolved_alternate_for_each_key_whatever_happens(
    story: list[tuple[str, float, float]],
) -> None:
    rules, now_s, said = Notifications(), 0.0, list[Notification]()
    for run, loss, pause_s in story:
        now_s += pause_s
        said += rules.take_losses(run, [loss], 1, now_s)
    of_key: dict[Key, list[str]] = {}
    for each in said:
        of_key.setdefault(Key(each.rule, each.run, each.subject), []).append(each.state)
    for states in of_key.values():
        assert states == (["raised", "resolved"] * len(states))[: len(states)]
    ids = [each.id for each in said]
    assert ids == sorted(set(ids))


def test_memory_is_bounded_whatever_happens() -> None:
    rules = Notifications()
    for n in range(2 * ACTIVE_LIMIT):
        rules.take_losses(f"run-{n}", [math.nan], 1, float(n))
    assert len(rules.active) == ACTIVE_LIMIT
    assert len(rules.recent) == KEPT
    assert len(rules.dump()) < 2_000_000


def test_every_rule_says_what_it_means_and_keeps_to_its_range() -> None:
    for name, about in RULES.items():
        assert about.meaning, name
        assert about.default is None or about.least <= about.default <= about.most
