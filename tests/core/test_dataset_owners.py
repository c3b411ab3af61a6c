"""Datasets of one job: others neither see them nor get plans of them; and datasets that are removed."""

from __future__ import annotations

import pytest

from strata.core import checks
from strata.core.cluster import Cluster
from strata.core.fleet import datasets as datasets_module
from strata.core.messages import (
    Conflict,
    DatasetId,
    DatasetRegistered,
    InvalidArgument,
    JobId,
    Overloaded,
    RemoveDataset,
    TaskId,
    Unknown,
)
from tests.core.builders import Fleet, dataset_spec, instant

A, B = JobId("job-a"), JobId("job-b")


def remove(fleet: Fleet, name: str = "d") -> None:
    fleet.do(RemoveDataset(dataset_id=DatasetId(name), reason="nobody reads it"))


@pytest.mark.parametrize(
    "name",
    [
        "/tmp/x",
        "../../etc",
        "..",
        ".",
        ".hidden",
        "-rf",
        "a/b",
        "a b",
        "a\\b",
        "ä",
        "a%2Fb",
        "<b>",
        "a\n",
        "",
    ],
)
def test_an_id_that_could_be_anything_but_a_name_is_refused(name: str) -> None:
    fleet = Fleet()
    with pytest.raises(InvalidArgument, match="dataset_id"):
        fleet.register(name)
    assert not fleet.cluster.datasets.specs


@pytest.mark.parametrize("name", ["imagenet-1k", "a", "0", "_x", "org:name", "v1.2_final-3", "A" * 256])
def test_names_are_fine(name: str) -> None:
    checks.identifier("dataset_id", name)


def test_a_journal_from_before_loads_whatever_its_ids_are() -> None:
    cluster = Cluster()
    event = DatasetRegistered(spec=dataset_spec("../../etc"), reason="", at_s=0.0)
    cluster.apply(event, instant(0.0))
    again = Cluster()
    for fact in cluster.compact():
        again.apply(fact, instant(0.0))
    assert list(again.datasets.specs) == ["../../etc"]


def test_plans_are_made_for_the_jobs_that_have_a_dataset_alone() -> None:
    fleet = Fleet()
    fleet.join("a", A)
    fleet.join("b", B)
    fleet.register("own", jobs=(A,))
    fleet.register("shared")
    fleet.plan()
    assert {(job, name) for job, name, _ in fleet.cluster.datasets.plans} == {
        (A, "own"),
        (A, "shared"),
        (B, "shared"),
    }
    with pytest.raises(Unknown):
        fleet.open_epoch("b", 1, "own")
    fleet.open_epoch("a", 1, "own")


def test_who_describes_it_exactly_has_it_too_and_who_does_not_learns_nothing() -> None:
    fleet = Fleet()
    fleet.register("d", jobs=(A,), path="/secret/place")
    with pytest.raises(Conflict) as refused:
        fleet.register("d", jobs=(B,), path="/a/guess")
    assert "secret" not in str(refused.value)
    fleet.register("d", jobs=(B,), path="/secret/place")
    assert fleet.cluster.datasets.specs[DatasetId("d")].jobs == (A, B)
    assert not fleet.register("d", jobs=(A,), path="/secret/place").events
    fleet.register("d", path="/secret/place")
    assert fleet.cluster.datasets.specs[DatasetId("d")].jobs == (), "an operator's is everybody's"


def test_a_task_that_is_given_a_dataset_may_read_it() -> None:
    fleet = Fleet()
    fleet.register("d", jobs=(A,))
    fleet.create_task("task-1", dataset_id=DatasetId("d"))
    assert fleet.cluster.datasets.specs[DatasetId("d")].jobs == (A, JobId("task-1"))


def test_one_job_cannot_use_up_the_datasets_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets_module, "MAX_DATASETS_OF_A_JOB", 2)
    fleet = Fleet()
    for name in ("1", "2"):
        fleet.register(name, jobs=(A,))
    with pytest.raises(Overloaded, match="job-a"):
        fleet.register("3", jobs=(A,))
    fleet.register("3", jobs=(B,))
    with pytest.raises(Overloaded):
        fleet.register("3", jobs=(A,))
    remove(fleet, "1")
    fleet.register("3", jobs=(A,))


def test_a_removed_dataset_takes_its_plans_along_and_can_come_back_as_another() -> None:
    fleet = Fleet()
    fleet.join("a")
    fleet.register("d")
    fleet.plan()
    fleet.open_epoch("a", 1)
    remove(fleet)
    assert not fleet.cluster.datasets.plans
    assert not fleet.cluster.datasets.specs
    with pytest.raises(Unknown):
        remove(fleet)
    fleet.register("d", total_samples=77)
    fleet.plan()
    assert len(fleet.cluster.datasets.plans) == 1
    for other in (fleet.replayed(), fleet.compacted()):
        assert other.cluster.datasets.specs == fleet.cluster.datasets.specs
        assert other.cluster.datasets.plans.keys() == fleet.cluster.datasets.plans.keys()


def test_a_dataset_that_a_task_reads_stays() -> None:
    fleet = Fleet()
    fleet.register("d")
    fleet.create_task("task-1", dataset_id=DatasetId("d"))
    with pytest.raises(Conflict, match="task-1"):
        remove(fleet)
    fleet.stop_task("task-1")
    remove(fleet)
    assert TaskId("task-1") in fleet.cluster.tasks.tasks
