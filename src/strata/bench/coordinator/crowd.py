"""What one coordinator carries: thousands of workers that are registered, beat, meet, lose a rack and see the next generation.

The workers are real to the coordinator, and streams of this process (`fleet`): once with a connection each, once on machines whose
agents speak for them. Time depends on the machine and on who else uses it; processor time of the coordinator, and memory, do so less.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from strata.bench.coordinator.fleet import Fleet, MachineFleet
from strata.bench.coordinator.serving import Served, served_coordinator
from strata.bench.coordinator.swarm import CallFailed
from strata.bench.table import Row

log = logging.getLogger("strata.bench")

RANKS_EACH = 10
"""On each machine."""
EVERY_S = 5.0
"""Between two heartbeats of a worker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Crowd:
    """How a coordinator did. Times are seconds, `_cpu_s` the coordinator's processor time."""

    workers: int
    lost: int
    joined_s: float
    joined_cpu_s: float
    beating_percent: float
    """Of one core."""
    rss_bytes: int
    barrier_s: float
    barrier_cpu_s: float
    loss_s: float
    loss_cpu_s: float


async def measure(workers: int, *, through_agents: bool, rack: int, watch_s: float) -> Crowd:
    """Everybody joins, beats for a while, meets at one barrier, loses a rack, and sees the generation without it."""
    loop = asyncio.get_running_loop()
    with served_coordinator() as coordinator:
        fleet: Fleet | MachineFleet
        if through_agents:
            fleet = MachineFleet(coordinator, workers // RANKS_EACH, RANKS_EACH)
        else:
            fleet = Fleet(coordinator, workers)
        began, began_s = coordinator.cost(), loop.time()
        async with fleet:
            joined, joined_s = coordinator.cost(), loop.time()
            beating = asyncio.create_task(fleet.beat(every_s=EVERY_S))
            try:
                await _settled(coordinator)
                before = coordinator.cost()
                await asyncio.sleep(watch_s)
                after = coordinator.cost()
                barrier_s = await fleet.barrier("crowd", 1)
                met = coordinator.cost()
                loss_s = await fleet.lose(rack // RANKS_EACH if through_agents else rack)
                lost = coordinator.cost()
            finally:
                beating.cancel()
                with suppress(asyncio.CancelledError):
                    await beating
    return Crowd(
        workers=workers,
        lost=rack,
        joined_s=joined_s - began_s,
        joined_cpu_s=joined.cpu_since_s(began),
        beating_percent=after.percent_since(before),
        rss_bytes=after.rss_bytes,
        barrier_s=barrier_s,
        barrier_cpu_s=met.cpu_since_s(after),
        loss_s=loss_s,
        loss_cpu_s=lost.cpu_since_s(met),
    )


async def _settled(coordinator: Served) -> None:
    """News of the joins has gone round: half a second costs no more than three of them would."""
    for _ in range(60):
        before = coordinator.cost()
        await asyncio.sleep(0.5)
        if coordinator.cost().percent_since(before) < 80:
            return


def run(*, workers: int, rack: int, watch_s: float) -> Iterator[Row]:
    for through_agents in (True, False):
        how = (
            f"on {workers // RANKS_EACH:,} machines with agents" if through_agents else "with a session each"
        )
        what = f"{workers:,} workers {how}"
        try:
            crowd = asyncio.run(measure(workers, through_agents=through_agents, rack=rack, watch_s=watch_s))
        except (CallFailed, TimeoutError) as failure:
            # What was measured before is worth having all the same.
            log.warning("%s: not reached on this machine now (%r); try fewer with --workers", what, failure)
            continue
        yield Row(
            name=f"{what}, beating at {1 / EVERY_S:g} Hz: CPU",
            measured=crowd.beating_percent,
            unit="% of a core",
            target=50,
            better="lower",
        )
        yield Row(
            name=f"{what}: RSS", measured=crowd.rss_bytes / 1e6, unit="MB", target=1_000, better="lower"
        )
        yield Row(
            name=f"{what}: all registered and connected",
            measured=crowd.joined_s,
            unit="s",
            better="lower",
            note=f"{crowd.joined_cpu_s:.1f} s of coordinator CPU, "
            f"{crowd.joined_cpu_s / workers * 1e3:.2f} ms for each",
        )
        yield Row(
            name=f"{what}: one barrier",
            measured=crowd.barrier_s,
            unit="s",
            better="lower",
            note=f"first arrival to last release; {crowd.barrier_cpu_s:.2f} s of coordinator CPU",
        )
        yield Row(
            name=f"{what}: {crowd.lost:,} are lost at once → all others have the new generation",
            measured=crowd.loss_s,
            unit="s",
            better="lower",
            note=f"of it `disconnect_grace`; {crowd.loss_cpu_s:.2f} s of coordinator CPU",
        )
