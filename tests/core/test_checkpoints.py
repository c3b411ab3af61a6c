"""The checkpoint registry: what may follow what, which one a recovery would use, and what it refuses."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.core import views
from strata.core.cluster import Cluster
from strata.core.fleet.checkpoints import Checkpoints
from strata.core.messages import (
    DEFAULT_JOB,
    CheckpointCompleted,
    CheckpointId,
    CheckpointRemoved,
    CheckpointStarted,
    Conflict,
    Event,
    InvalidArgument,
    JobId,
    Unknown,
    WorkerId,
)
from tests.core.builders import Fleet, data_json, instant, notice, shown, trained


@pytest.fixture
def fleet() -> Fleet:
    fleet = Fleet()
    fleet.joins("a", "b")
    return fleet


def status_of(fleet: Fleet, checkpoint_id: str) -> str:
    return fleet.cluster.checkpoints.records[CheckpointId(checkpoint_id)].status


def test_a_save_begins_and_completes(fleet: Fleet) -> None:
    fleet.save("a", "c1", status="in_progress", tiers=(), digest="")
    assert (status_of(fleet, "c1"), fleet.latest()) == ("in_progress", None)
    fleet.now_s += 2
    fleet.save("a", "c1")
    assert (status_of(fleet, "c1"), fleet.latest()) == ("completed", "c1")


def test_a_save_may_fail_and_says_why(fleet: Fleet) -> None:
    fleet.save("a", "c1", status="in_progress")
    fleet.save("a", "c1", status="failed", reason="disk full")
    record = fleet.cluster.checkpoints.records[CheckpointId("c1")]
    assert (record.status, record.reason, fleet.latest()) == ("failed", "disk full", None)


def test_a_save_need_not_announce_itself(fleet: Fleet) -> None:
    fleet.save("a", "c1")
    fleet.save("a", "c2", status="failed")
    assert (status_of(fleet, "c1"), status_of(fleet, "c2"), fleet.latest()) == ("completed", "failed", "c1")


def test_a_failed_attempt_may_still_complete(fleet: Fleet) -> None:
    fleet.save("a", "c1", status="failed")
    fleet.save("a", "c1")
    assert fleet.latest() == "c1"


@pytest.mark.parametrize("status", ["in_progress", "completed", "failed", "removed"])
def test_a_repeated_notice_changes_nothing(fleet: Fleet, status: str) -> None:
    if status == "removed":
        fleet.save("a", "c1")
    fleet.save("a", "c1", status=status)
    before = fleet.cluster.compact()
    fleet.now_s += 5
    assert fleet.save("b", "c1", status=status).events == ()
    assert fleet.cluster.compact() == before


@pytest.mark.parametrize(
    "difference", [{"step": 2}, {"epoch": 3}, {"digest": "other"}, {"size_bytes": 7}, {"status": "failed"}]
)
def test_a_completed_checkpoint_never_changes(fleet: Fleet, difference: dict[str, Any]) -> None:
    fleet.save("a", "c1")
    before = fleet.cluster.compact()
    with pytest.raises(Conflict):
        fleet.save("a", "c1", **difference)
    assert fleet.cluster.compact() == before


def test_the_id_of_another_job_is_a_conflict(fleet: Fleet) -> None:
    fleet.save("a", "c1")
    fleet.join("x", job="other")
    with pytest.raises(Conflict, match="belongs to job 'default'"):
        fleet.save("x", "c1")


def test_a_worker_cannot_speak_for_another_job(fleet: Fleet) -> None:
    with pytest.raises(InvalidArgument, match="job_id"):
        fleet.save("a", "c1", job_id=JobId("other"))
    fleet.save("a", "c1", job_id=JobId("default"))


def test_another_tier_is_added_and_does_not_make_it_newer(fleet: Fleet) -> None:
    fleet.save("a", "c1", step=1)
    fleet.save("a", "c2", step=2)
    fleet.save("a", "c1", step=1, tiers=("s3", "local"))
    assert fleet.cluster.checkpoints.records[CheckpointId("c1")].tiers == ("local", "s3")
    assert fleet.latest() == "c2"


def test_latest_follows_the_timeline_and_not_the_step(fleet: Fleet) -> None:
    fleet.save("a", "c9", step=900)
    fleet.save("a", "c5", step=500)  # After a rollback.
    assert fleet.latest() == "c5"


def test_latest_is_the_one_that_completed_last_not_the_one_that_began_last(fleet: Fleet) -> None:
    fleet.save("a", "slow", step=1, status="in_progress")
    fleet.save("b", "quick", step=2, status="in_progress")
    fleet.save("b", "quick", step=2)
    fleet.save("a", "slow", step=1)
    assert fleet.latest() == "slow"
    assert fleet.compacted().latest() == "slow"


def test_each_job_has_its_own_latest(fleet: Fleet) -> None:
    fleet.join("x", job="other")
    fleet.save("a", "c1")
    fleet.save("x", "c2")
    assert (fleet.latest(), fleet.latest("other"), fleet.latest("third")) == ("c1", "c2", None)


def test_removal_of_the_latest_falls_back_along_the_timeline(fleet: Fleet) -> None:
    for number in (1, 2, 3):  # All at the same instant: the clock cannot tell them apart.
        fleet.save("a", f"c{number}", step=number)
    fleet.now_s += 10
    fleet.save("a", "c1", tiers=("s3",))  # A late upload of an old one.
    fleet.save("a", "c3", step=3, status="removed")
    assert fleet.latest() == "c2"
    fleet.save("a", "c2", step=2, status="removed")
    fleet.save("a", "c1", status="removed")
    assert fleet.latest() is None


def test_what_is_removed_is_not_shown_but_its_data_position_is_kept(fleet: Fleet) -> None:
    fleet.save("a", "c1", data_json=data_json(trained([(0, 10)])))
    fleet.save("a", "c1", status="removed", reason="keep_count is 1")
    assert fleet.cluster.checkpoints.shown() == []
    record = fleet.cluster.checkpoints.records[CheckpointId("c1")]
    assert (record.removed, record.reason, record.data_json != "") == (True, "keep_count is 1", True)


def test_a_late_upload_does_not_bring_a_removed_checkpoint_back(fleet: Fleet) -> None:
    fleet.save("a", "c1")
    fleet.save("a", "c1", status="removed")
    assert fleet.save("a", "c1", tiers=("s3",)).events == ()
    assert (fleet.cluster.checkpoints.shown(), fleet.latest()) == ([], None)


def test_removing_what_was_never_there_is_refused(fleet: Fleet) -> None:
    with pytest.raises(Unknown):
        fleet.save("a", "ghost", status="removed")


def test_duration_is_measured_where_the_writer_does_not_say(fleet: Fleet) -> None:
    fleet.save("a", "c1", status="in_progress")
    fleet.now_s += 4
    fleet.save("a", "c1", duration_s=0.0, size_bytes=8_000_000)
    view = views.checkpoint(fleet.cluster.checkpoints.records[CheckpointId("c1")])
    assert view.throughput_mb_s == pytest.approx(2.0)


def test_compaction_is_the_same_whichever_job_completed_first(fleet: Fleet) -> None:
    fleet.joins("c", job="other")
    fleet.save("a", "c0")
    fleet.save("c", "c1")
    fleet.save("c", "c1", status="removed")
    fleet.save("c", "c2")
    assert fleet.compacted().cluster.compact() == fleet.cluster.compact()


def test_compaction_keeps_status_order_tiers_and_removals(fleet: Fleet) -> None:
    fleet.save("a", "begun", status="in_progress")
    fleet.save("a", "failed", status="failed", reason="no space")
    fleet.save("a", "done", step=3, data_json=data_json(trained([(0, 5)])))
    fleet.now_s += 1
    fleet.save("a", "done", step=3, tiers=("s3",))
    fleet.save("a", "gone")
    fleet.save("a", "gone", status="removed")
    again = fleet.compacted()
    assert shown(again.cluster) == shown(fleet.cluster)
    assert again.cluster.checkpoints.records == fleet.cluster.checkpoints.records


# --- limits -------------------------------------------------------------------------------------------------


def started(checkpoint_id: str) -> CheckpointStarted:
    return CheckpointStarted(
        checkpoint_id=CheckpointId(checkpoint_id),
        job_id=JobId("old"),
        worker_id=notice("a", "x").worker_id,
        step=1,
        epoch=0,
        path="",
        size_bytes=0,
        reason="",
        at_s=0.0,
    )


def completed(checkpoint_id: str, job: str) -> CheckpointCompleted:
    command = notice("a", checkpoint_id)
    event = Checkpoints().decide_notice(command, JobId(job), instant(1.0))
    assert isinstance(event, CheckpointCompleted)
    return event


def test_old_records_are_evicted_but_never_the_latest_of_a_job() -> None:
    registry = Checkpoints(records_kept=3)
    history: list[Event] = [completed("first-of-old", "old"), *(completed(f"c{n}", "new") for n in range(9))]
    for event in history:
        assert isinstance(event, CheckpointCompleted)
        registry.apply(event)
    assert list(registry.records) == ["first-of-old", "c7", "c8"]
    latest = {job: registry.latest(JobId(job)) for job in ("old", "new")}
    assert {job: r.checkpoint_id for job, r in latest.items() if r} == {"old": "first-of-old", "new": "c8"}
    removed = CheckpointRemoved(checkpoint_id=CheckpointId("c8"), reason="", at_s=0.0)
    registry.apply(removed)
    fallback = registry.latest(JobId("new"))
    assert fallback is not None
    assert fallback.checkpoint_id == "c7"


# --- data positions ------------------------------------------------------------------------------------------


def epoch_record(**changes: Any) -> str:
    record = trained([(0, 10)]).to_json()
    record["epochs"][0] |= changes
    return json.dumps(record)


@pytest.mark.parametrize(
    "data",
    [
        "{",
        "[]",
        "null",
        "{}",
        '{"schema": 99, "world_size": 1, "epochs": [], "states": {}}',
        "[" * 100_000,
        "1" * 10_000,
        epoch_record(total=-1),
        epoch_record(total=10**30),
        epoch_record(total=5),
        epoch_record(covered=[[0, 10**30]]),
        epoch_record(covered=[[0, 101]]),
        epoch_record(covered=[[7, 3]]),
        epoch_record(ranks={"0": [[0, 1, 0, 10**15]]}),
        epoch_record(ranks={"0": [[0, 1, 1, 10**12]]}),
        epoch_record(ranks={"0": [[10**25, 1, 0, 1]]}),
        epoch_record(ranks={"0": [[95, 10, 0, 1]]}),
        epoch_record(ranks={"0": [[0, 0, 0, 0]]}),
        epoch_record(ranks={"x": []}),
        epoch_record(dropped=[[0, 1000]]),
        epoch_record(total=2**53, ranks={"0": [[0, 1, 2, 2**40]]}),
    ],
    ids=lambda text: text[:20],
)
def test_a_data_record_that_cannot_be_true_is_refused_before_anything_changes(
    fleet: Fleet, data: str
) -> None:
    before = fleet.cluster.compact()
    with pytest.raises(InvalidArgument, match="data_json"):
        fleet.save("a", "c1", data_json=data)
    assert fleet.cluster.compact() == before


def test_a_data_record_of_a_dataset_nobody_registered_is_fine() -> None:
    fleet = Fleet()
    fleet.join("a")
    fleet.save("a", "c1", data_json=data_json(trained([(0, 10)], dataset="elsewhere")))
    assert isinstance(fleet.cluster, Cluster)
    assert fleet.latest() == "c1"


@pytest.mark.parametrize(
    "fields",
    [
        {"checkpoint_id": ""},
        {"checkpoint_id": "x" * 10_000_000},
        {"step": -1},
        {"step": 2**63},
        {"epoch": -1},
        {"size_bytes": -1},
        {"duration_s": float("nan")},
        {"duration_s": float("inf")},
        {"path": ""},
        {"path": "\ud800"},
        {"digest": "x" * 1000},
        {"tiers": ("",)},
        {"tiers": tuple("abcdefghijklmnopqrstuvw")},
        {"metadata": {str(n): "" for n in range(1000)}},
        {"metadata": {"": "x"}},
        {"data_json": "x" * 2_000_000},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_bad_values_are_refused_and_change_nothing(fleet: Fleet, fields: dict[str, Any]) -> None:
    before = fleet.cluster.compact()
    with pytest.raises(InvalidArgument):
        fleet.do(
            notice("a", "c1", **{"step": 1} | fields)
            if "checkpoint_id" not in fields
            else notice("a", **fields)
        )
    assert fleet.cluster.compact() == before


def test_what_was_taken_for_removed_comes_back_to_its_place(fleet: Fleet) -> None:
    for step in range(1, 6):
        fleet.save("a", f"c{step}", step=step)
    fleet.reconcile("a", "c1", "c4")
    assert fleet.latest() == "c4"
    fleet.reconcile("a", "c3", "c5", "c2", "c4", "c1")  # A list is in whatever order a store gives it.
    for again in (fleet, fleet.replayed(), fleet.compacted()):
        order = []
        while (latest := again.latest()) is not None:
            order.append(latest)
            again.save("a", latest, step=int(latest[1:]), status="removed")
        assert order == ["c5", "c4", "c3", "c2", "c1"]


def test_what_was_reported_newest_first_comes_back_to_its_place(fleet: Fleet) -> None:
    """A start that finds checkpoints which nobody has reported describes the newest first."""
    later: dict[str, Any] = {"succeeded_by": ""}
    for step in (3, 2, 1):
        fleet.save("a", f"c{step}", step=step, run_id="run", run_generation=1, **later)
        later = {"succeeded_by": f"c{step}"}
    assert fleet.latest() == "c3"
    fleet.save("a", "c1", step=1, status="removed")
    fleet.reconcile("a", "c1", "c2", "c3", run_id="run", run_generation=2)
    for again in (fleet, fleet.replayed(), fleet.compacted()):
        assert again.latest() == "c3"


def test_a_list_for_another_state_of_the_registry_changes_nothing(fleet: Fleet) -> None:
    fleet.save("a", "c1", step=1)
    told = fleet.cluster.checkpoints.revision
    fleet.save("a", "c2", step=2)
    late, decision = fleet.reconcile("a", "c1", revision=told)
    assert (late.made, decision.events, fleet.latest()) == (False, (), "c2")
    for again in (fleet.replayed(), fleet.compacted()):
        assert again.cluster.checkpoints.revision == late.revision
    assert fleet.reconcile("a", "c1", revision=late.revision)[0].removed == 1
    assert fleet.latest() == "c1"


@pytest.mark.parametrize("generation", [1, 2])
def test_a_copy_that_is_late_is_not_the_newest_though_its_record_is_forgotten(
    fleet: Fleet, generation: int
) -> None:
    run: dict[str, Any] = {"run_id": "r", "run_generation": 2, "saved_generation": generation}
    for step in (1, 2, 3):
        fleet.save("a", f"c{step}", step=step, run_id="r", run_generation=2)
    fleet.save("b", "other", step=9, run_id="s", run_generation=1)
    fleet.save("a", "c0", step=0, **run)
    fleet.save("a", "c1", step=1, status="removed", **run)
    fleet.cluster.checkpoints.forget([CheckpointId("c1")])
    fleet.save("a", "c1", step=1, **run)
    latest = fleet.cluster.checkpoints.latest(DEFAULT_JOB, run_id="r")
    assert latest is not None
    assert latest.checkpoint_id == "c3"


@given(
    story=st.lists(
        st.tuples(
            st.sampled_from("abcdef"),
            st.sampled_from(["", "data", "removed", "before"]),
            st.sampled_from("abcdef"),
        ),
        max_size=30,
    )
)
def test_the_data_position_is_that_of_the_newest_that_has_one(story: list[tuple[str, str, str]]) -> None:
    checkpoints = Checkpoints()
    for name, what, other in story:
        known = checkpoints.records.get(CheckpointId(name))
        if what == "removed":
            if known is not None:
                checkpoints.apply(
                    CheckpointRemoved(checkpoint_id=CheckpointId(name), reason="retention", at_s=1.0)
                )
        else:
            checkpoints.apply(
                reported(name, data="{}" if what == "data" else "", before=other if what == "before" else "")
            )
        timeline = checkpoints._timelines.get(JobId("j"), {})
        with_data = [each for each in timeline if checkpoints.records[each].data_json]
        found = checkpoints.position(JobId("j"))
        assert (found.checkpoint_id if found is not None else None) == (with_data[-1] if with_data else None)


def test_the_data_position_is_not_looked_for_among_thousands_that_have_none() -> None:
    class Counting(dict[CheckpointId, Any]):
        reads = 0

        def __getitem__(self, key: CheckpointId) -> Any:
            self.reads += 1
            return super().__getitem__(key)

    checkpoints = Checkpoints()
    checkpoints.records = counting = Counting()
    for number in range(1_000):
        checkpoints.apply(reported(f"c{number}"))
        assert checkpoints.position(JobId("j")) is None
    assert counting.reads <= 2 * 1_000


def reported(name: str, *, data: str = "", before: str = "") -> CheckpointCompleted:
    return CheckpointCompleted(
        checkpoint_id=CheckpointId(name),
        job_id=JobId("j"),
        worker_id=WorkerId("a"),
        step=1,
        epoch=0,
        path="/c",
        size_bytes=1,
        tiers=("local",),
        digest="d",
        duration_s=1.0,
        parent_id="",
        data_json=data,
        metadata={},
        reason="",
        at_s=1.0,
        succeeded_by=before,
    )
