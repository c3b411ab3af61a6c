"""Whether a machine is fit to train: what it has measured of itself, beside what the others have.

Before an agent joins, and after a failure that may have been its machine's, it examines the machine and reports what it has found. A
check that fails by itself (a GPU that computes wrong, no space in shared memory) decides alone. A rate (PCIe, disk) is compared with
the median of the other machines with devices of the same kind, once there are `FEWEST`: what is too slow there is less than a share of
it, so that no number has to be known beforehand. A clock is compared with the coordinator's.

The newest report of each machine is kept, journaled: a restart forgets nothing. What follows from a failed one is that the machine is
quarantined (`cluster`). Pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from strata.core import checks
from strata.core.messages import Event, HostExamined, Instant, InvalidArgument, ReportHealth, shorten
from strata.core.text import counted

KEPT = 10_000
FEWEST = 3
"""So many other machines make a median that one is compared with."""
SHARES: Mapping[str, float] = {"pcie_gb_s": 0.5, "matmul_tflops": 0.5, "disk_mb_s": 0.1}
"""A rate below this share of the median is a fault. Disks that others use too differ much by themselves."""
CLOCK_LIMIT_S = 60.0
"""Signed requests and certificates fail long before clocks differ by hours."""
MEASURES_LIMIT = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthView:
    """Results of a machine's health checks. Times are Unix seconds."""

    host: str
    kind: str
    measured: dict[str, float]
    failed: dict[str, str]
    seconds: float
    reason: str
    at: float


class Health:
    def __init__(self) -> None:
        self.hosts: dict[str, HostExamined] = {}

    def shown(self) -> list[HealthView]:
        return [
            HealthView(
                host=one.host,
                kind=one.kind,
                measured=dict(one.measured),
                failed=dict(one.failed),
                seconds=one.seconds,
                reason=one.reason,
                at=one.at_s,
            )
            for one in self.hosts.values()
        ]

    def decide_report(self, command: ReportHealth, now: Instant) -> HostExamined:
        """With what is wrong beside others among what failed."""
        checks.name("host", command.host)
        checks.text("kind", command.kind, limit=checks.NAME_LIMIT)
        checks.text("reason", command.reason)
        checks.between("seconds", command.seconds, 0.0, 86_400.0)
        checks.between("number of measures", len(command.measured), 0, MEASURES_LIMIT)
        checks.between("number of failed checks", len(command.failed), 0, MEASURES_LIMIT)
        for name, value in command.measured.items():
            checks.name("measured key", name, limit=64)
            if not math.isfinite(value):
                raise InvalidArgument(f"measured[{name}]", "must be a number.", hint="Leave it out.")
        for name, why in command.failed.items():
            checks.name("failed key", name, limit=64)
            checks.text(f"failed[{name}]", why)
        failed = {**command.failed, **self._beside_others(command)}
        off_s = command.clock_s - now.wall_s
        if not abs(off_s) <= CLOCK_LIMIT_S:
            failed["clock"] = f"its clock is {off_s:+,.0f} s off the coordinator's"
        return HostExamined(
            host=command.host,
            kind=command.kind,
            measured=dict(command.measured),
            failed=failed,
            seconds=command.seconds,
            reason=command.reason or "examined",
            at_s=now.wall_s,
        )

    def _beside_others(self, command: ReportHealth) -> dict[str, str]:
        found: dict[str, str] = {}
        for name, share in SHARES.items():
            value = command.measured.get(name)
            others = [
                one.measured[name]
                for one in self.hosts.values()
                if one.host != command.host and one.kind == command.kind and name in one.measured
            ]
            if value is None or len(others) < FEWEST:
                continue
            median = _median(others)
            if value < share * median:
                found[name] = (
                    f"{value:.3g}, the median of {counted(len(others), 'other machine')} is {median:.3g}"
                )
        return found

    def apply(self, event: HostExamined) -> None:
        self.hosts.pop(event.host, None)
        self.hosts[event.host] = event
        while len(self.hosts) > KEPT:
            del self.hosts[next(iter(self.hosts))]

    def compact(self) -> Iterator[Event]:
        return iter(list(self.hosts.values()))


def why_unfit(examined: HostExamined) -> str:
    """In one sentence; empty for a machine that is fit."""
    return shorten("; ".join(f"{name}: {why}" for name, why in sorted(examined.failed.items())), 400)


def _median(values: Sequence[float]) -> float:
    ordered, half = sorted(values), len(values) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2
