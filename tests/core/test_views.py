"""What the API shows: true to the state, plain values only, and nothing that was not measured."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from strata.core import views
from strata.core.fleet import task_views
from strata.core.messages import (
    CheckpointId,
    DatasetId,
    JobId,
    RecoveryRecorded,
    Report,
    ReportRecovery,
    ShardsRequested,
    TaskId,
    Unknown,
    WorkerId,
)
from strata.core.stream_events import publish
from strata.core.types import WORKER_STATES
from tests.core.builders import Fleet, data_json, shown, trained

KEY = (JobId("default"), DatasetId("d"), 0)


@pytest.fixture
def fleet() -> Fleet:
    fleet = Fleet()
    fleet.joins("a", "b")
    fleet.register("d")
    fleet.plan()
    return fleet


def reports(fleet: Fleet, worker: str, state: str, *, task: str = "") -> None:
    report = Report(state=state, step=7, epoch=1, task=task, resources=None, metrics={"loss": 0.5})
    fleet.beat(worker, report=report)


def view_of(fleet: Fleet, worker: str) -> views.WorkerView:
    (view,) = [view for view in views.workers(fleet.cluster) if view.id == worker]
    return view


# --- workers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", WORKER_STATES)
def test_a_present_worker_has_the_status_it_reports(fleet: Fleet, state: str) -> None:
    reports(fleet, "a", state)
    assert view_of(fleet, "a").status == state


@pytest.mark.parametrize("state", ["", "dancing", "ACTIVE", "\n"])
def test_a_status_nobody_knows_is_shown_as_active(fleet: Fleet, state: str) -> None:
    reports(fleet, "a", state)
    assert view_of(fleet, "a").status == "active"


def test_those_who_train_or_checkpoint_count_as_active_and_the_failed_do_not(fleet: Fleet) -> None:
    fleet.joins("c", "d", "e")
    for worker, state in {"a": "training", "b": "checkpointing", "c": "idle", "d": "recovering"}.items():
        reports(fleet, worker, state)
    assert views.active_workers(fleet.cluster) == 3
    fleet.lose("a")
    assert views.active_workers(fleet.cluster) == 2


def test_a_worker_shows_what_it_last_said_and_when(fleet: Fleet) -> None:
    fleet.now_s += 5
    fleet.beat("a")
    reports(fleet, "a", "training", task="t")
    view = view_of(fleet, "a")
    assert (view.current_step, view.current_epoch, view.current_task) == (7, 1, "t")
    assert (view.metrics, view.last_heartbeat) == ({"loss": 0.5}, fleet.now.wall_s)
    assert (view.ip, view.port, view.gpu_count, view.rank) == ("10.0.0.1", 5000, 1, 0)
    assert view_of(fleet, "b").current_task is None


def test_a_failed_worker_stays_in_sight_without_a_rank_or_shards(fleet: Fleet) -> None:
    fleet.lose("b")
    fleet.plan()
    view = view_of(fleet, "b")
    assert (view.status, view.rank, view.assigned_shards, view.connected) == ("failed", None, 0, False)
    assert view.reason.startswith("connection lost")
    assert view.last_heartbeat == fleet.now.wall_s


def test_connected_means_that_its_stream_is_open(fleet: Fleet) -> None:
    assert not view_of(fleet, "a").connected
    fleet.connect("a")
    assert view_of(fleet, "a").connected
    fleet.drop("a")
    assert not view_of(fleet, "a").connected


def requests(fleet: Fleet, dataset: str, *, job: str = "default") -> None:
    fleet.observe(ShardsRequested(job_id=JobId(job), dataset_id=DatasetId(dataset)))


def assigned(fleet: Fleet) -> int:
    return sum(view.assigned_shards for view in views.workers(fleet.cluster))


def test_assigned_shards_count_every_dataset_that_is_read_by_shard_in_its_newest_epoch(fleet: Fleet) -> None:
    fleet.register("e", samples=30)
    fleet.plan()
    fleet.open_epoch("a", 1)
    assert assigned(fleet) == 10 + 3


def test_ranks_of_a_run_have_no_shards_of_their_own_until_they_ask_for_them(fleet: Fleet) -> None:
    fleet.join("x", job="run", run_id="r1")
    fleet.plan()
    assert view_of(fleet, "x").assigned_shards == 0, "it reads by position"
    requests(fleet, "d", job="run")
    assert view_of(fleet, "x").assigned_shards == 10


def test_a_dataset_is_not_assigned_to_a_job_that_does_not_read_it(fleet: Fleet) -> None:
    fleet.join("x", job="other", run_id="r1")
    fleet.plan()
    (shown_dataset,) = [views.dataset(fleet.cluster, spec) for spec in fleet.cluster.datasets.specs.values()]
    assert shown_dataset.readers == []
    requests(fleet, "d")
    assert views.dataset(fleet.cluster, fleet.cluster.datasets.specs[DatasetId("d")]).readers == ["default"]
    assert view_of(fleet, "x").assigned_shards == 0
    key = views.find_plan(fleet.cluster, DatasetId("d"), job=None, epoch=None)
    assert key is not None
    assert key[0] == "default", "the plan of the job that reads, not of the one that joined last"


def test_a_job_reads_what_its_checkpoints_and_its_task_say(fleet: Fleet) -> None:
    spec = fleet.cluster.datasets.specs[DatasetId("d")]
    fleet.save("a", "c1", data_json=data_json(trained([(0, 15)])))
    assert views.dataset(fleet.cluster, spec).readers == ["default"]
    key = views.find_plan(fleet.cluster, DatasetId("d"), job=None, epoch=None)
    assert key is not None
    assert not views.shard_plan(fleet.cluster, key).by_shard, "it reads by position: nobody asked for shards"
    requests(fleet, "d")
    assert views.shard_plan(fleet.cluster, key).by_shard


def test_a_dataset_that_nobody_has_trained_has_no_history_and_one_that_is_not_there_is_unknown(
    fleet: Fleet,
) -> None:
    assert views.audits(fleet.cluster, DatasetId("d"), job=None, epoch=None) == []
    with pytest.raises(Unknown):
        views.audits(fleet.cluster, DatasetId("nothing"), job=None, epoch=None)


# --- data ---------------------------------------------------------------------------------------------------


def test_a_dataset_is_called_by_its_name_where_it_has_one(fleet: Fleet) -> None:
    fleet.register("e", metadata={"name": "ImageNet"})
    names = {s: views.dataset(fleet.cluster, spec).name for s, spec in fleet.cluster.datasets.specs.items()}
    assert names == {"d": "d", "e": "ImageNet"}


def test_a_plan_shows_ranges_progress_and_former_owners() -> None:
    fleet = Fleet()
    fleet.join("a")
    fleet.register("d", samples=25)
    fleet.plan()
    fleet.save("a", "c1", data_json=data_json(trained([(0, 14)], total=25)))
    fleet.report("a", (2, 3))
    fleet.leave("a")
    fleet.plan()
    view = views.shard_plan(fleet.cluster, KEY)
    rows = [(s.id, s.start, s.stop, s.done, s.worker_id, s.moved) for s in view.shards]
    assert rows == [(0, 0, 10, 10, "a", False), (1, 10, 20, 4, None, True), (2, 20, 25, 0, None, True)]
    assert (view.samples_done, view.total_samples, view.shard_count) == (14, 25, 3)


@pytest.mark.parametrize(
    ("offset", "limit", "ids"),
    [(0, None, list(range(10))), (3, 2, [3, 4]), (9, 5, [9]), (50, 5, []), (7, None, [7, 8, 9])],
)
def test_a_page_of_a_plan_has_the_shards_asked_for(
    fleet: Fleet, offset: int, limit: int | None, ids: list[int]
) -> None:
    whole = {shard.id: shard for shard in views.shard_plan(fleet.cluster, KEY).shards}
    page = views.shard_plan(fleet.cluster, KEY, offset=offset, limit=limit)
    assert page.shards == [whole[number] for number in ids]
    assert page.shard_count == 10


def test_a_question_about_a_dataset_means_the_newest_plan_of_a_job_that_reads_it(fleet: Fleet) -> None:
    fleet.open_epoch("a", 1)
    fleet.join("x", job="other")
    fleet.plan()
    fleet.leave("x")

    def found(job: str | None = None, epoch: int | None = None) -> Any:
        asked = JobId(job) if job is not None else None
        key = views.find_plan(fleet.cluster, DatasetId("d"), job=asked, epoch=epoch)
        return key and (key[0], key[2])

    assert found() == ("default", 1)
    assert found(epoch=0) == ("default", 0)
    assert found(job="other") == ("other", 0)
    assert found(epoch=9) is None
    assert found(job="ghost") is None


# --- checkpoints --------------------------------------------------------------------------------------------


def test_throughput_is_shown_only_where_it_was_measured(fleet: Fleet) -> None:
    fleet.save("a", "begun", status="in_progress", size_bytes=10**9)
    fleet.save("a", "unmeasured", duration_s=0.0)
    fleet.save("a", "measured", size_bytes=50_000_000, duration_s=0.5)
    shown = {c: views.checkpoint(r) for c, r in fleet.cluster.checkpoints.records.items()}
    assert {c: view.throughput_mb_s for c, view in shown.items()} == {
        "begun": None,
        "unmeasured": None,
        "measured": 100.0,
    }


def test_only_a_completed_checkpoint_has_a_time_of_completion(fleet: Fleet) -> None:
    fleet.save("a", "failed", status="failed")
    fleet.save("a", "done")
    fleet.now_s += 100
    fleet.save("a", "done", tiers=("s3",))
    records = fleet.cluster.checkpoints.records
    assert views.checkpoint(records[CheckpointId("failed")]).completed_at is None
    assert views.checkpoint(records[CheckpointId("done")]).completed_at == fleet.now.wall_s - 100


# --- barriers -----------------------------------------------------------------------------------------------


def test_waiting_barriers_come_first_and_then_the_newest_that_ended(fleet: Fleet) -> None:
    for step in (1, 2):
        fleet.arrive("a", step=step)
        fleet.arrive("b", step=step)
    fleet.arrive("a", step=3, timeout_s=1.0)
    fleet.tick(1.0)
    fleet.arrive("b", step=4)
    rows = [(b.step, b.status, b.arrived, b.total, b.missing) for b in views.barriers(fleet.cluster, limit=2)]
    assert rows == [(4, "waiting", 1, 2, ["a"]), (3, "broken", 1, 2, ["b"]), (2, "complete", 2, 2, [])]


def test_every_round_of_a_barrier_has_an_id_of_its_own(fleet: Fleet) -> None:
    for call in ("1", "2"):
        for worker in ("a", "b"):
            fleet.arrive(worker, call_id=f"{worker}-{call}")
    fleet.arrive("a", call_id="a-3")
    assert [barrier.id for barrier in views.barriers(fleet.cluster, limit=9)] == [
        "default/b@0#2",
        "default/b@0#1",
        "default/b@0#0",
    ]


# --- the rest -----------------------------------------------------------------------------------------------


def test_a_task_shows_its_times_its_workers_and_why(fleet: Fleet) -> None:
    fleet.create_task("t", dataset_id=DatasetId("d"), worker_count=2)
    fleet.begin()
    fleet.progress(0, workers=["a", "b"])
    fleet.now_s += 2
    fleet.progress(25, workers=["a", "b"])
    view = task_views.task(fleet.cluster.tasks.get(TaskId("t")), {})
    assert (view.progress, view.steps_per_s, view.eta_s) == (25.0, 12.5, 6.0)
    fleet.now_s += 1
    fleet.end()
    view = task_views.task(fleet.cluster.tasks.get(TaskId("t")), {"lr": 0.1})
    assert (view.status, view.progress, view.worker_ids) == ("completed", 100.0, ["a", "b"])
    assert (view.completed_at, view.config, view.dataset_id) == (fleet.now.wall_s, {"lr": 0.1}, "d")


def test_a_recovery_shows_the_sum_of_its_phases(fleet: Fleet) -> None:
    fleet.do(
        ReportRecovery(
            worker_id=WorkerId("a"),
            incarnation=0,
            phases_s={"detect": 0.5, "load": 2.0},
            resumed_step=40,
            lost_steps=3,
            tier="memory",
            world_before=3,
            world_after=2,
            reason="",
        )
    )
    view = views.recovery(fleet.cluster.recoveries.records[-1])
    assert (view.total_s, view.resumed_step, view.reason) == (2.5, 40, "resumed at step 40")


@pytest.mark.parametrize(
    ("survived", "lost", "joined", "says"),
    [
        (2, ["j-rank1"], ["j-rank1"], "2 survived in process, rank1 replaced"),
        (2, ["j-rank1"], [], "2 survived in process, rank1 lost"),
        (2, [], ["j-rank1", "other"], "2 survived in process, rank1 and other joined"),
        (2, ["j-rank0", "j-rank1"], ["j-rank1"], "2 survived in process, rank1 replaced, rank0 lost"),
        (1_200, list("abcde"), [], "1,200 survived in process, 5 lost"),
        (0, [], [], ""),
    ],
)
def test_a_recovery_says_who_survived_it_and_its_event_says_the_same(
    survived: int, lost: list[str], joined: list[str], says: str
) -> None:
    record = RecoveryRecorded(
        job_id=JobId("j"),
        worker_id=WorkerId("j-rank0"),
        phases_s={"load": 1.0},
        resumed_step=40,
        lost_steps=3,
        tier="memory",
        world_before=3,
        world_after=3,
        reason="",
        at_s=1.0,
        survived=survived,
        lost=tuple(map(WorkerId, lost)),
        joined=tuple(map(WorkerId, joined)),
    )
    published = publish(record)
    assert published is not None
    assert views.recovery(record).who_survived == published.data["who_survived"] == says
    assert says in published.data["text"]


def test_everything_shown_is_plain_json(fleet: Fleet) -> None:
    fleet.save("a", "c1", data_json=data_json(trained([(0, 15)])))
    fleet.arrive("a")
    fleet.create_task()
    reports(fleet, "a", "training")
    text = msgspec.json.encode([shown(fleet.cluster), list(views.barriers(fleet.cluster, limit=9))])
    assert json.loads(text)
