"""When the live state of a survivor is known to be complete: every fact that can be missing, and none."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.core.jobs.live import Boundary, Complete, Device, Facts, Frozen, Incomplete, judge

AT_FIVE = Facts(boundary=Boundary(step=1205, made=5), began=5, ended=5)
DEVICES: list[Device] = ["none", "done", "pending", "unknown"]


def test_a_rank_at_a_boundary_is_complete() -> None:
    assert judge(AT_FIVE) == Complete(step=1205)
    assert judge(AT_FIVE).reason == "the live state is complete at step 1,205"


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        (replace(AT_FIVE, is_sharded=True), "the state is sharded"),
        (replace(AT_FIVE, sees_steps=False), "the steps of this optimizer cannot be observed"),
        (replace(AT_FIVE, boundary=None), "no step was completed"),
        (replace(AT_FIVE, began=6), "the optimizer was in the middle of the step after step 1,205"),
        (replace(AT_FIVE, began=6, ended=6), "the optimizer has stepped since step 1,205"),
        (replace(AT_FIVE, device="pending"), "the device had not completed step 1,205"),
        (replace(AT_FIVE, device="unknown"), "it is unknown whether the device had completed step 1,205"),
        (replace(AT_FIVE, has_read_on=True), "batches were committed since step 1,205"),
        (replace(AT_FIVE, changed=("'a'",)), "changed since step 1,205, without a copy: 'a'"),
        (
            replace(AT_FIVE, changed=("'a'", "'b'", "'c'", "'d'", "'e'")),
            "changed since step 1,205, without a copy: 'a', 'b', 'c' and 2 more",
        ),
        (
            replace(AT_FIVE, frozen=Frozen(step=1204, began=4, device="none")),
            "step 1,205 began after the process groups were aborted",
        ),
    ],
)
def test_whatever_is_not_known_is_named(facts: Facts, reason: str) -> None:
    judged = judge(facts)
    assert isinstance(judged, Incomplete)
    assert judged.reason.startswith(reason)


def test_on_the_cpu_a_step_that_began_before_the_abort_counts() -> None:
    """Its gradients had arrived, and nothing of it is left to run."""
    assert judge(replace(AT_FIVE, frozen=Frozen(step=1204, began=5, device="none"))) == Complete(step=1205)


@pytest.mark.parametrize("device", DEVICES)
def test_on_a_device_only_a_step_that_it_had_made_before_the_abort_counts(device: Device) -> None:
    """Afterwards an event says nothing: an aborted collective ends as well, with garbage."""
    late = replace(AT_FIVE, device="done", frozen=Frozen(step=1204, began=5, device="done"))
    assert isinstance(judge(late), Incomplete)
    there = replace(AT_FIVE, device="done", frozen=Frozen(step=1205, began=5, device=device))
    assert isinstance(judge(there), Complete) == (device in ("done", "none"))


@given(
    began=st.integers(0, 4),
    ended=st.integers(0, 4),
    made=st.integers(0, 4),
    frozen=st.none()
    | st.builds(Frozen, step=st.integers(0, 4), began=st.integers(0, 4), device=st.sampled_from(DEVICES)),
    device=st.sampled_from(DEVICES),
    has_read_on=st.booleans(),
    changed=st.sampled_from([(), ("'a'",)]),
)
def test_what_is_complete_has_every_reason_to_be(
    began: int,
    ended: int,
    made: int,
    frozen: Frozen | None,
    device: Device,
    has_read_on: bool,
    changed: tuple[str, ...],
) -> None:
    facts = Facts(
        boundary=Boundary(step=made, made=made),
        began=began,
        ended=ended,
        frozen=frozen,
        device=device,
        has_read_on=has_read_on,
        changed=changed,
    )
    judged = judge(facts)
    assert judged.reason
    if isinstance(judged, Complete):
        assert began == ended == made == judged.step
        assert not has_read_on
        assert not changed
        assert device in ("none", "done") or frozen is not None
        assert frozen is None or made <= frozen.began
        if device != "none" and frozen is not None:
            assert frozen.step == made
            assert frozen.device in ("done", "none")
