"""Datasets and their shard plans: who reads what, from where, and that nothing moves without need."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from strata.core import views
from strata.core.fleet import datasets as datasets_module
from strata.core.fleet.datasets import Shard
from strata.core.messages import (
    Conflict,
    DatasetAccepted,
    DatasetId,
    Decision,
    FileSpan,
    InvalidArgument,
    JobId,
    Overloaded,
    ShardsMoved,
    Unknown,
    WorkerId,
)
from tests.core.builders import Fleet, data_json, shown, trained

KEY = (JobId("default"), DatasetId("d"), 0)


@pytest.fixture
def fleet() -> Fleet:
    """Two workers and a dataset of ten shards of ten samples."""
    fleet = Fleet()
    fleet.joins("a", "b")
    fleet.register("d")
    fleet.plan()
    return fleet


def loads(fleet: Fleet, epoch: int = 0) -> dict[str | None, int]:
    return dict(Counter(fleet.owners(epoch=epoch).values()))


def done(fleet: Fleet, epoch: int = 0) -> list[int]:
    view = views.shard_plan(fleet.cluster, (KEY[0], KEY[1], epoch))
    return [shard.done for shard in view.shards]


def save(
    fleet: Fleet, checkpoint_id: str, *spans: tuple[int, int], epoch: int = 0, **fields: Any
) -> Decision:
    commit = trained(spans, epoch=epoch)
    return fleet.save("a", checkpoint_id, data_json=data_json(commit), **fields)


# --- registration -------------------------------------------------------------------------------------------


def test_the_same_parameters_again_are_no_change(fleet: Fleet) -> None:
    history = fleet.cluster.compact()
    decision = fleet.register("d")
    assert decision.events == ()
    assert isinstance(decision.reply, DatasetAccepted)
    assert (decision.reply.created, decision.reply.spec.shard_count) == (False, 10)
    assert fleet.cluster.compact() == history


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"path": "/elsewhere"}, "path is '/data/d', not '/elsewhere'"),
        ({"format": "parquet"}, "format is 'jsonl', not 'parquet'"),
        ({"samples": 99}, "total_samples is 100, not 99"),
        ({"shard": 7}, "shard_size is 10, not 7"),
        ({"shuffle": True}, "shuffle is False, not True"),
        ({"seed": 5}, "seed is 0, not 5"),
        ({"metadata": {"k": "v"}}, "metadata is {}, not {'k': 'v'}"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_other_parameters_under_the_same_id_are_a_conflict_that_lists_them(
    fleet: Fleet, change: dict[str, Any], words: str
) -> None:
    history = fleet.cluster.compact()
    with pytest.raises(Conflict) as refusal:
        fleet.register("d", **change)
    assert f"other parameters: {words}." in str(refusal.value)
    assert fleet.cluster.compact() == history


def test_a_conflict_quotes_long_values_in_short(fleet: Fleet) -> None:
    with pytest.raises(Conflict) as refusal:
        fleet.register("d", path="/" + "x" * 4000, metadata={f"k{n}": "v" * 4000 for n in range(60)})
    assert len(str(refusal.value)) < 1000


def test_the_location_of_its_files_is_not_part_of_a_datasets_identity(fleet: Fleet) -> None:
    assert fleet.register("d", files=(FileSpan(path="/data/d/0", samples=100),)).events == ()


def test_registered_parameters_survive_a_restart(fleet: Fleet) -> None:
    fleet.register("e", samples=7, shard=3, files=(FileSpan(path="/e/1", samples=7),), metadata={"name": "E"})
    again = fleet.compacted()
    assert again.cluster.datasets.specs == fleet.cluster.datasets.specs
    assert again.cluster.datasets.specs[DatasetId("e")].files == (FileSpan(path="/e/1", samples=7),)
    with pytest.raises(Conflict):
        again.register("e", samples=8)


def test_too_many_datasets_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets_module, "MAX_DATASETS", 2)
    fleet = Fleet()
    fleet.register("d")
    fleet.register("e")
    with pytest.raises(Overloaded):
        fleet.register("f")
    fleet.register("e")  # The same again is no further one.


# --- plans follow members -----------------------------------------------------------------------------------


def test_everyone_present_shares_the_first_plan(fleet: Fleet) -> None:
    assert loads(fleet) == {"a": 5, "b": 5}


def test_there_is_no_plan_before_there_is_a_worker() -> None:
    fleet = Fleet()
    fleet.register("d")
    assert fleet.plan().events == ()
    fleet.join("a")
    fleet.plan()
    assert loads(fleet) == {"a": 10}


def test_a_joiner_takes_its_share_and_nothing_else_moves(fleet: Fleet) -> None:
    before = fleet.owners()
    fleet.join("c")
    (moved,) = fleet.plan().events
    assert isinstance(moved, ShardsMoved)
    assert sorted(loads(fleet).values()) == [3, 3, 4]
    changed = {shard for shard, owner in fleet.owners().items() if owner != before[shard]}
    assert changed == set(moved.moved["c"])
    assert set(moved.moved) == {"c"}


@pytest.mark.parametrize("how", ["lose", "leave"])
def test_a_leavers_shards_spread_over_the_rest(fleet: Fleet, how: str) -> None:
    fleet.join("c")
    fleet.plan()
    before = fleet.owners()
    getattr(fleet, how)("c")
    fleet.plan()
    after = fleet.owners()
    assert loads(fleet) == {"a": 5, "b": 5}
    assert all(after[shard] == owner for shard, owner in before.items() if owner != "c")


def test_when_nobody_is_left_the_shards_wait(fleet: Fleet) -> None:
    fleet.leave("a")
    fleet.lose("b")
    fleet.plan()
    assert loads(fleet) == {None: 10}
    fleet.join("z")
    fleet.plan()
    assert loads(fleet) == {"z": 10}


def test_a_burst_of_joins_is_one_new_version(fleet: Fleet) -> None:
    version = fleet.cluster.datasets.plans[KEY].plan.version
    fleet.joins("c", "d", "e")
    assert len(fleet.plan().events) == 1
    assert fleet.cluster.datasets.plans[KEY].plan.version == version + 1


def test_a_worker_that_registers_again_in_place_moves_nothing(fleet: Fleet) -> None:
    save(fleet, "c1", (0, 50))
    fleet.join("a")
    assert fleet.plan().events == ()


@pytest.mark.parametrize("restart", [Fleet.replayed, Fleet.compacted])
def test_a_restart_of_the_coordinator_moves_nothing(fleet: Fleet, restart: Callable[[Fleet], Fleet]) -> None:
    """Also when what is finished by now would make another plan more even."""
    finished = [shard for shard, owner in fleet.owners().items() if owner == "a"]
    save(fleet, "c1", *((10 * shard, 10 * shard + 10) for shard in finished))
    again = restart(fleet)
    assert again.plan().events == ()
    assert shown(again.cluster) == shown(fleet.cluster)


def test_plans_of_different_jobs_do_not_mix(fleet: Fleet) -> None:
    fleet.joins("x", "y", job="other")
    fleet.plan()
    assert set(fleet.owners(job="other").values()) == {"x", "y"}
    assert loads(fleet) == {"a": 5, "b": 5}
    fleet.lose("x")
    before = fleet.cluster.datasets.plans[KEY].plan.version
    fleet.plan()
    assert fleet.cluster.datasets.plans[KEY].plan.version == before


def test_every_new_dataset_is_planned_for_every_job(fleet: Fleet) -> None:
    fleet.join("x", job="other")
    fleet.register("e")
    fleet.plan()
    assert set(fleet.owners("e").values()) == {"a", "b"}
    assert set(fleet.owners("e", job="other").values()) == {"x"}


def test_a_plan_says_why_it_differs(fleet: Fleet) -> None:
    fleet.lose("b")
    (moved,) = fleet.plan().events
    assert moved.reason == "b left: 5 unfinished shards spread over 1 worker"


def test_the_shards_of_a_worker_come_with_their_ranges() -> None:
    fleet = Fleet()
    fleet.join("a")
    fleet.register("d", samples=25, shard=10)
    fleet.plan()
    shards = list(fleet.cluster.datasets.shards_of(WorkerId("a"), KEY))
    assert [(s.shard_id, s.start, s.stop, s.done) for s in shards] == [
        (0, 0, 10, 0),
        (1, 10, 20, 0),
        (2, 20, 25, 0),
    ]
    assert list(fleet.cluster.datasets.shards_of(WorkerId("stranger"), KEY)) == []


def test_jobs_without_workers_are_forgotten_in_the_end() -> None:
    fleet = Fleet()
    fleet.register("d")
    for number in range(130):
        fleet.join("a", job=f"job-{number}")
        fleet.plan()
    fleet.leave("a")
    kept = {key[0] for key in fleet.cluster.datasets.plans}
    assert kept == {f"job-{number}" for number in range(30, 130)} == set(fleet.cluster.membership.jobs())
    assert shown(fleet.compacted().cluster) == shown(fleet.cluster)


# --- committed progress -------------------------------------------------------------------------------------


def test_committed_progress_decides_where_a_shard_begins_after_a_loss(fleet: Fleet) -> None:
    before = fleet.owners()
    mine = [shard for shard, owner in before.items() if owner == "b"]
    finished, half = mine[0], mine[1]
    save(fleet, "c1", (10 * finished, 10 * finished + 10), (10 * half, 10 * half + 4))
    fleet.report("b", (mine[2], 9))  # Read, but not committed: it counts for nothing.
    fleet.lose("b")
    fleet.plan()
    shards = {s.shard_id: s for s in fleet.cluster.datasets.shards_of(WorkerId("a"), KEY)}
    assert finished not in shards  # It keeps the name of the one who finished it.
    assert fleet.owners()[finished] == "b"
    assert shards[half] == Shard(shard_id=half, start=10 * half, stop=10 * half + 10, done=4)
    assert shards[mine[2]].done == 0


def test_progress_follows_the_newest_checkpoint_along_the_timeline(fleet: Fleet) -> None:
    save(fleet, "c1", (0, 15), step=1)
    save(fleet, "c2", (0, 35), step=2)
    assert done(fleet)[:5] == [10, 10, 10, 5, 0]
    save(fleet, "c3", (0, 18), step=1)  # After a rollback.
    assert done(fleet)[:5] == [10, 8, 0, 0, 0]


def test_a_late_upload_of_an_older_checkpoint_does_not_turn_progress_back(fleet: Fleet) -> None:
    save(fleet, "c1", (0, 15))
    save(fleet, "c2", (0, 35))
    save(fleet, "c1", (0, 15), tiers=("s3",))
    assert done(fleet)[:4] == [10, 10, 10, 5]


def test_removal_of_the_newest_checkpoint_takes_its_progress_back(fleet: Fleet) -> None:
    save(fleet, "c1", (0, 15))
    save(fleet, "c2", (0, 35))
    fleet.save("a", "c2", status="removed")
    assert done(fleet)[:4] == [10, 5, 0, 0]
    fleet.save("a", "c1", status="removed")
    assert done(fleet)[:4] == [0, 0, 0, 0]


def test_a_rollback_takes_back_epochs_started_since(fleet: Fleet) -> None:
    fleet.open_epoch("a", 1)
    save(fleet, "c1", (0, 15))
    commit = trained([(0, 100)]).next([], world_size=1).to_json()
    commit["epochs"] += trained([(0, 30)], epoch=1).to_json()["epochs"]
    fleet.save("a", "c2", data_json=json.dumps(commit))
    assert done(fleet, epoch=1)[:4] == [10, 10, 10, 0]
    save(fleet, "c3", (0, 20))
    assert (done(fleet, epoch=1)[:4], done(fleet)[:3]) == ([0, 0, 0, 0], [10, 10, 0])


def test_a_checkpoint_that_says_nothing_about_data_leaves_progress_as_it_was(fleet: Fleet) -> None:
    save(fleet, "c1", (0, 15))
    fleet.save("a", "c2")
    assert done(fleet)[:2] == [10, 5]


@pytest.mark.parametrize("restart", [None, Fleet.replayed, Fleet.compacted])
def test_progress_is_known_also_where_the_dataset_was_registered_after_the_checkpoint(
    restart: Callable[[Fleet], Fleet] | None,
) -> None:
    fleet = Fleet()
    fleet.join("a")
    save(fleet, "c1", (0, 15))
    fleet.register("d")
    fleet.plan()
    fleet = restart(fleet) if restart else fleet
    assert done(fleet)[:3] == [10, 5, 0]


def test_progress_of_a_dataset_of_another_size_does_not_count(fleet: Fleet) -> None:
    fleet.save("a", "c1", data_json=data_json(trained([(0, 50)], total=60)))
    assert done(fleet) == [0] * 10


def test_progress_of_another_job_does_not_count(fleet: Fleet) -> None:
    fleet.join("x", job="other")
    fleet.plan()
    fleet.save("x", "c1", data_json=data_json(trained([(0, 50)])))
    assert done(fleet) == [0] * 10


def test_reports_are_shown_until_the_shard_changes_hands_or_a_checkpoint_counts(fleet: Fleet) -> None:
    def reported() -> list[int]:
        return [shard.reported for shard in views.shard_plan(fleet.cluster, KEY).shards]

    mine = [shard for shard, owner in fleet.owners().items() if owner == "b"]
    fleet.report("b", (mine[0], 3), (mine[1], 99), (mine[2], -5), (1000, 1), (-1, 1))
    fleet.report("b", (0, 1), epoch=99)
    assert [reported()[shard] for shard in mine[:3]] == [3, 10, 0]
    fleet.lose("b")
    fleet.plan()
    assert [reported()[shard] for shard in mine[:3]] == [0, 0, 0]  # Its next reader has read none of it.
    fleet.report("a", (mine[0], 5))
    save(fleet, "c1", (10 * mine[0], 10 * mine[0] + 2))
    assert reported()[mine[0]] == 2


# --- epochs -------------------------------------------------------------------------------------------------


def test_a_new_epoch_begins_with_the_plan_of_the_last(fleet: Fleet) -> None:
    decision = fleet.open_epoch("a", 1)
    (moved,) = decision.events
    assert isinstance(moved, ShardsMoved)
    assert (moved.moved, moved.reason) == ({}, "epoch 1 begins with the plan of epoch 0")
    assert fleet.owners(epoch=1) == fleet.owners(epoch=0)
    assert fleet.open_epoch("b", 1).events == ()


def test_shards_that_leavers_finished_are_assigned_again_in_the_next_epoch(fleet: Fleet) -> None:
    save(fleet, "c1", (0, 100))
    fleet.leave("b")
    fleet.plan()
    assert loads(fleet) == {"a": 5, "b": 5}
    fleet.open_epoch("a", 1)
    assert loads(fleet, epoch=1) == {"a": 10}


def opens(decision: Decision) -> list[tuple[int, str]]:
    """The epochs that got a plan, and why."""
    return [(event.epoch, event.reason) for event in decision.events if isinstance(event, ShardsMoved)]


def shown_epoch(fleet: Fleet) -> views.ShardPlanView:
    key = views.find_plan(fleet.cluster, KEY[1], job=None, epoch=None)
    assert key is not None
    return views.shard_plan(fleet.cluster, key)


@pytest.mark.parametrize("restart", [None, Fleet.replayed, Fleet.compacted])
def test_an_epoch_that_nobody_asked_for_begins_with_the_first_checkpoint_in_it(
    fleet: Fleet, restart: Callable[[Fleet], Fleet] | None
) -> None:
    """Who reads by position never asks for shards: its checkpoints are what tells where it is."""
    assert opens(save(fleet, "c1", (0, 60))) == []
    begun = save(fleet, "c2", (0, 35), epoch=1, step=2)
    assert opens(begun) == [(1, "epoch 1 begins with the plan of epoch 0")]
    assert opens(save(fleet, "c3", (0, 45), epoch=1, step=3)) == []
    fleet = restart(fleet) if restart else fleet
    view = shown_epoch(fleet)
    assert (view.epoch, view.samples_done) == (1, 45)
    assert [shard.done for shard in view.shards] == [10, 10, 10, 10, 5, 0, 0, 0, 0, 0]
    fleet.lose("b")
    fleet.plan()
    after = shown_epoch(fleet)
    assert {shard.worker_id for shard in after.shards if shard.done < 10} == {"a"}


def test_a_checkpoint_opens_only_the_newest_epoch_and_never_one_before_it(fleet: Fleet) -> None:
    record = trained([(0, 100)]).to_json()
    for epoch in (7, 3):
        record["epochs"] += trained([(0, epoch)], epoch=epoch).to_json()["epochs"]
    record["epochs"] += trained([(0, 9)], epoch=2, dataset="nobody's").to_json()["epochs"]
    decision = fleet.save("a", "c1", data_json=json.dumps(record))
    assert opens(decision) == [(7, "epoch 7 begins with the plan of epoch 0")]
    assert opens(save(fleet, "c2", (0, 50), epoch=5)) == []  # After a rollback.
    assert shown_epoch(fleet).epoch == 7


def test_the_first_plan_is_that_of_the_epoch_which_checkpoints_have_reached(fleet: Fleet) -> None:
    fleet.save("a", "c1", data_json=data_json(trained([(0, 15)], dataset="e", epoch=4)))
    fleet.register("e")
    fleet.plan()
    assert fleet.cluster.datasets.epochs(KEY[0], DatasetId("e")) == [4]
    assert fleet.cluster.datasets.epochs(*KEY[:2]) == [0]


def test_only_the_last_epochs_keep_a_plan_and_an_older_one_is_recomputed(fleet: Fleet) -> None:
    for epoch in range(1, 6):
        fleet.open_epoch("a", epoch)
    assert fleet.cluster.datasets.epochs(*KEY[:2]) == [3, 4, 5]
    fleet.open_epoch("a", 1)
    assert fleet.cluster.datasets.epochs(*KEY[:2]) == [4, 5, 1]
    assert sorted(loads(fleet, epoch=1).values()) == [5, 5]
    assert shown(fleet.replayed().cluster) == shown(fleet.compacted().cluster) == shown(fleet.cluster)


def test_all_kept_epochs_follow_the_members(fleet: Fleet) -> None:
    fleet.open_epoch("a", 1)
    fleet.lose("b")
    fleet.plan()
    assert loads(fleet, 0) == loads(fleet, 1) == {"a": 10}


@pytest.mark.parametrize("epoch", [-1, 2**60])
def test_an_epoch_that_cannot_be_is_refused(fleet: Fleet, epoch: int) -> None:
    with pytest.raises(InvalidArgument, match="epoch"):
        fleet.open_epoch("a", epoch)


def test_an_unknown_dataset_is_named_in_the_refusal(fleet: Fleet) -> None:
    with pytest.raises(Unknown, match="dataset 'ghost'"):
        fleet.open_epoch("a", 0, "ghost")


# --- files --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("start", "stop", "expected"),
    [
        (0, 10, ["f0"]),
        (0, 11, ["f0", "f2"]),
        (9, 10, ["f0"]),
        (10, 15, ["f2"]),
        (14, 15, ["f2"]),
        (15, 40, ["f3"]),
        (0, 40, ["f0", "f2", "f3"]),
        (5, 16, ["f0", "f2", "f3"]),
    ],
)
def test_the_files_of_a_shard_are_those_that_hold_its_samples(
    start: int, stop: int, expected: list[str]
) -> None:
    sizes = {"f0": 10, "f1": 0, "f2": 5, "f3": 25}
    files = tuple(FileSpan(path=path, samples=samples) for path, samples in sizes.items())
    fleet = Fleet()
    fleet.register("d", samples=40, files=files)
    spec = fleet.cluster.datasets.get(DatasetId("d"))
    shard = Shard(shard_id=0, start=start, stop=stop, done=0)
    held = [path for path in fleet.cluster.datasets.files_of(spec, shard) if sizes[path]]
    assert held == expected


def test_where_only_the_workers_see_files_the_path_is_all_there_is(fleet: Fleet) -> None:
    spec = fleet.cluster.datasets.get(DatasetId("d"))
    shard = Shard(shard_id=0, start=0, stop=10, done=0)
    assert fleet.cluster.datasets.files_of(spec, shard) == ["/data/d"]


# --- compaction ---------------------------------------------------------------------------------------------


def test_compaction_keeps_owners_former_owners_versions_and_what_moved_last(fleet: Fleet) -> None:
    save(fleet, "c1", (0, 60))
    fleet.join("c")
    fleet.plan()
    fleet.leave("b")
    fleet.plan()
    fleet.open_epoch("a", 1)
    fleet.join("x", job="other")
    fleet.plan()
    for again in (fleet.replayed(), fleet.compacted(), fleet.compacted().compacted()):
        assert shown(again.cluster) == shown(fleet.cluster)
        assert again.cluster.compact() == fleet.cluster.compact()
