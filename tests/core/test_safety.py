"""Where a checkpoint is safe, and what is lost with a process, a machine, a rack or the site."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from strata.core import views
from strata.core.jobs.safety import Copy, is_complete, kind_of, losses, safety_of, survives
from strata.core.messages import JobId
from tests.core.builders import NOTHING_TO_REPORT, Fleet


def copy(step: int, kind: Any, host: str = "", **more: Any) -> Copy:
    return Copy(
        checkpoint_id=more.pop("checkpoint_id", f"c{step}"),
        step=step,
        saved_at=more.pop("saved_at", float(step)),
        kind=kind,
        host=host,
        **more,
    )


def texts(*copies: Copy, reached: int = 100) -> list[str]:
    return [loss.text for loss in losses(copies, reached=reached)]


def test_snapshot_in_memory_and_a_disk_of_the_machine_die_with_it() -> None:
    assert texts(copy(93, "memory", "a"), copy(57, "disk", "a")) == [
        "7 steps",
        "everything, no copy off the machine",
        "everything, no bucket copy",
    ]


def test_file_system_of_another_machine_outlives_this_one_and_a_bucket_the_site() -> None:
    shared, bucket = copy(57, "network disk"), copy(20, "bucket")
    assert texts(copy(93, "memory", "a"), shared) == ["7 steps", "43 steps", "everything, no bucket copy"]
    assert texts(copy(93, "memory", "a"), shared, bucket) == ["7 steps", "43 steps", "80 steps"]


def test_peer_copy_outlives_the_machine_whichever_it_is() -> None:
    assert texts(copy(93, "memory", "a"), copy(93, "peer", "b"))[:2] == ["7 steps", "7 steps"]
    assert texts(copy(93, "memory", "a"), copy(93, "peer", "a"))[1] == "everything, no copy off the machine"


def test_parts_of_a_sharded_state_are_safe_only_together() -> None:
    parts = ("0", "1")
    memory = [copy(93, "memory", host, part=part, parts=parts) for host, part in (("a", "0"), ("b", "1"))]
    assert is_complete(memory)
    assert not survives(memory, "machine")
    crossed = [copy(93, "peer", host, part=part, parts=parts) for host, part in (("b", "0"), ("a", "1"))]
    assert survives([*memory, *crossed], "machine")
    assert not survives([*memory, crossed[0]], "machine")


def test_racks_count_where_they_have_names() -> None:
    one, other = copy(93, "memory", "a", rack="r1"), copy(93, "peer", "b", rack="r1")
    assert [loss.domain for loss in losses([one, other], reached=93)] == [
        "process",
        "machine",
        "rack",
        "site",
    ]
    assert not survives([one, other], "rack")
    assert survives([one, copy(93, "peer", "b", rack="r2")], "rack")
    assert not survives([one, copy(93, "network disk")], "rack")
    assert survives([one, copy(93, "bucket")], "rack")


def test_copy_that_is_known_to_be_damaged_does_not_count() -> None:
    assert not survives([copy(93, "bucket", verified=False)], "site")
    assert survives([copy(93, "bucket", verified=None)], "site")


def test_newest_is_by_time_and_not_by_step() -> None:
    older, newer = copy(90, "bucket", saved_at=1.0), copy(60, "bucket", saved_at=2.0)
    assert texts(older, newer) == ["40 steps", "40 steps", "40 steps"]


def test_asked_step_has_its_copies_near_to_far_and_where_it_is_safe() -> None:
    found = safety_of(
        [copy(90, "bucket"), copy(90, "disk", "a"), copy(93, "memory", "a")], reached=100, step=90
    )
    assert [each.kind for each in found.copies] == ["disk", "bucket"]
    assert found.safe_in == ("process", "machine", "site")
    assert safety_of([copy(93, "memory", "a")], reached=100).step == 93
    assert safety_of([], reached=100).copies == ()
    assert safety_of([copy(93, "memory", "a")], reached=100, step=5).safe_in == ()


@pytest.mark.parametrize(
    ("tier", "kind"),
    [("MEMORY", "memory"), ("PEER", "peer"), ("NVME", "disk"), ("LOCAL", "disk"), ("S3", "bucket")],
)
def test_tier_has_its_kind(tier: str, kind: str) -> None:
    assert kind_of(tier) == kind
    assert kind_of("LOCAL", is_on_network=True) == "network disk"


@pytest.mark.parametrize(
    ("kind", "metrics", "safe_in"),
    [
        ("replicated", {"snapshot_step": 90.0}, ("process", "machine")),
        ("sharded", {"snapshot_step": 90.0}, ("process",)),
        ("sharded", {"snapshot_step": 90.0, "peer_step": 90.0}, ("process", "machine")),
    ],
)
def test_snapshots_on_two_machines_are_copies_of_a_replicated_state_and_parts_of_a_sharded_one(
    kind: str, metrics: dict[str, float], safe_in: tuple[str, ...]
) -> None:
    fleet = Fleet()
    for worker in ("w0", "w1"):
        fleet.join(worker, "job", hostname=f"host-of-{worker}", metadata={"state": kind})
        fleet.beat(worker, report=replace(NOTHING_TO_REPORT, step=95, metrics=metrics))
    found = views.safety(fleet.cluster, JobId("job"), step=None, now_s=0.0, verified={})
    assert (found.step, found.safe_in) == (90, safe_in)
