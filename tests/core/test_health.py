"""Machines that are not fit to train: out of use for what failed by itself, and for what is slow beside the others."""

from __future__ import annotations

import pytest

from strata.core.fleet.health import CLOCK_LIMIT_S, FEWEST, HealthView
from strata.core.fleet.quarantine import Quarantined
from strata.core.messages import Accepted, InvalidArgument, ReportHealth
from tests.core.builders import Fleet


def report(
    fleet: Fleet,
    host: str,
    *,
    kind: str = "H200",
    failed: dict[str, str] | None = None,
    off_s: float = 0.0,
    **measured: float,
) -> str:
    command = ReportHealth(
        host=host,
        kind=kind,
        measured=measured,
        failed=failed or {},
        clock_s=fleet.now.wall_s + off_s,
        seconds=1.2,
        reason="before joining",
    )
    reply = fleet.do(command).reply
    assert isinstance(reply, Accepted)
    return reply.reason


def shown(fleet: Fleet) -> list[HealthView]:
    found = fleet.cluster.health.shown()
    assert fleet.replayed().cluster.health.shown() == found
    assert fleet.compacted().cluster.health.shown() == found
    return found


@pytest.fixture
def fleet() -> Fleet:
    fleet = Fleet()
    for number in range(FEWEST):
        assert report(fleet, f"good-{number}", pcie_gb_s=50.0 + number, disk_mb_s=900.0) == "fit"
    return fleet


def test_a_machine_that_is_as_fast_as_the_others_is_fit(fleet: Fleet) -> None:
    assert report(fleet, "new", pcie_gb_s=26.0, disk_mb_s=100.0) == "fit"
    fleet.cluster.quarantine.admit("new")
    assert [one.host for one in shown(fleet)] == ["good-0", "good-1", "good-2", "new"]


def test_a_slow_one_is_quarantined_with_the_numbers(fleet: Fleet) -> None:
    said = report(fleet, "slow", pcie_gb_s=12.0)
    assert said == "pcie_gb_s: 12, the median of 3 other machines is 51"
    with pytest.raises(Quarantined, match="12, the median"):
        fleet.compacted().cluster.quarantine.admit("slow")
    (held,) = fleet.cluster.quarantine.shown()
    assert (held.host, held.by) == ("slow", "its health checks")


def test_few_others_or_others_of_another_kind_are_no_median(fleet: Fleet) -> None:
    assert report(fleet, "older", kind="A100", pcie_gb_s=12.0) == "fit"
    few = Fleet()
    for number in range(FEWEST - 1):
        report(few, f"m{number}", pcie_gb_s=50.0)
    assert report(few, "slow", pcie_gb_s=1.0) == "fit"


def test_its_own_earlier_report_is_not_among_the_others(fleet: Fleet) -> None:
    assert report(fleet, "good-0", pcie_gb_s=1.0) == "fit"  # Beside two.


def test_a_check_that_failed_decides_alone(fleet: Fleet) -> None:
    assert report(fleet, "bad", failed={"gpu 1": "a matmul has the wrong checksum"}, pcie_gb_s=50.0)
    with pytest.raises(Quarantined, match="gpu 1: a matmul has the wrong checksum"):
        fleet.cluster.quarantine.admit("bad")


@pytest.mark.parametrize("off_s", [CLOCK_LIMIT_S + 1, -CLOCK_LIMIT_S - 1])
def test_a_clock_that_is_off_is_named(fleet: Fleet, off_s: float) -> None:
    assert report(fleet, "late", off_s=CLOCK_LIMIT_S - 1) == "fit"
    assert report(fleet, "late", off_s=off_s) == f"clock: its clock is {off_s:+,.0f} s off the coordinator's"


def test_what_is_no_number_is_refused(fleet: Fleet) -> None:
    with pytest.raises(InvalidArgument):
        report(fleet, "odd", pcie_gb_s=float("nan"))
    assert len(shown(fleet)) == FEWEST
