"""How fast the coordinator is, measured from outside on a real `strata serve`, beside torch's TCPStore.

Load generator and coordinator share this machine, as the targets say. Each figure is repeated, and its note
tells how far the repetitions lie apart. Nothing here needs a quiet machine to run, only to be believed.
"""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from strata.bench import tcpstore
from strata.bench.browsers import Browser
from strata.bench.fleet import Fleet, heartbeat
from strata.bench.serving import Cost, ServedCoordinator
from strata.bench.swarm import SERVICE, Connection, framed
from strata.bench.table import Row, number, report
from strata.core.sharding import ShardPlan, first_plan, moves_between, replan
from strata.errors import StrataError
from strata.rpc import coordinator_pb2 as pb

TITLE = "Coordinator"
DATASET = "bench"


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How much of everything. `QUICK` proves that the benchmark works; its figures prove nothing."""

    beating_workers: int = 200
    beats_per_worker: int = 250
    unary_calls: int = 20_000
    repeats: int = 5
    barriers: Sequence[tuple[int, int, float]] = ((100, 300, 25.0), (1_000, 100, 150.0))
    """Workers, rounds, and the milliseconds that the 99th percentile may take."""
    plans: Sequence[tuple[int, float]] = ((10_000, 10.0), (100_000, 60.0))
    """Shards, and the milliseconds that a plan for them may take."""
    plan_repeats: int = 15
    planned_workers: int = 1_000
    fleet: int = 1_000
    browsers: int = 200
    watch_s: float = 15.0
    peer_rounds: int = 20


QUICK = Load(
    beating_workers=10,
    beats_per_worker=20,
    unary_calls=200,
    repeats=1,
    barriers=((10, 5, 25.0),),
    plans=((1_000, 10.0),),
    plan_repeats=3,
    planned_workers=50,
    fleet=20,
    browsers=5,
    watch_s=1.0,
    peer_rounds=3,
)


def main(json: bool, quick: bool) -> None:
    report(TITLE, rows(QUICK if quick else Load()), as_json=json)


def rows(load: Load) -> Iterator[Row]:
    yield from plan_rows(load)
    yield from asyncio.run(_heartbeat_rows(load))
    yield from asyncio.run(_unary_rows(load))
    for workers, rounds, target_ms in load.barriers:
        yield asyncio.run(_barrier_row(workers, rounds, target_ms, load.peer_rounds))
    yield from asyncio.run(_fleet_rows(load))


# --- shard plans ----------------------------------------------------------------------------------------------


def plan_rows(load: Load) -> Iterator[Row]:
    """Time of the slowest kind of plan; balance and movement of all of them."""
    names = [f"worker-{place:04}" for place in range(load.planned_workers)]
    for shards, target_ms in load.plans:
        plan = first_plan(names, shards, salt=DATASET)
        makers: dict[str, Callable[[], ShardPlan]] = {
            "first": lambda shards=shards: first_plan(names, shards, salt=DATASET),  # type: ignore[misc]
            "leave": lambda plan=plan: replan(plan, names[1:]),  # type: ignore[misc]
            "join": lambda plan=plan: replan(plan, [*names, "worker-new"]),  # type: ignore[misc]
        }
        times_ms = {kind: _times_ms(make, load.plan_repeats) for kind, make in makers.items()}
        what = f"shard plan, {len(names):,} workers × {shards:,} shards"
        yield Row(
            name=what,
            measured=max(median(times) for times in times_ms.values()),
            unit="ms",
            target=target_ms,
            better="lower",
            note="median; "
            + ", ".join(f"{kind} {median(t):.1f} (worst {max(t):.1f})" for kind, t in times_ms.items()),
        )
        made = [make() for make in makers.values()]
        yield Row(
            name=f"{what}: max − min",
            measured=max(int(p.counts().max() - p.counts().min()) for p in made),
            unit="shards",
            target=1,
            better="lower",
        )
        _, left, joined = made
        needed = int(plan.counts()[0]) + int(joined.counts().min())
        moved = len(moves_between(plan, left)) + len(moves_between(plan, joined))
        yield Row(
            name=f"{what}: moved by a leave and a join",
            measured=moved,
            unit="shards",
            target=needed,
            better="lower",
            note="the target is the minimum: what the leaver had, and the joiner's share",
        )


def _times_ms(make: Callable[[], ShardPlan], repeats: int) -> list[float]:
    times = []
    for _ in range(repeats):
        began_s = time.perf_counter()
        make()
        times.append((time.perf_counter() - began_s) * 1000)
    return times


# --- heartbeats and unary calls -------------------------------------------------------------------------------


async def _heartbeat_rows(load: Load) -> list[Row]:
    """Every session sends as fast as it is read; a barrier behind the heartbeats proves that they were taken."""
    total = load.beating_workers * load.beats_per_worker
    with ServedCoordinator() as coordinator:
        async with Fleet(coordinator, load.beating_workers) as fleet:
            await fleet.barrier("warm-up", 0, beats_before=load.beats_per_worker // 10)
            before = coordinator.cost()
            rates = [
                total / await fleet.barrier("beats", step, beats_before=load.beats_per_worker)
                for step in range(load.repeats)
            ]
            cpu_us = (coordinator.cost().cpu_s - before.cpu_s) / total / load.repeats * 1e6
    peer = tcpstore.sets_per_second(clients=8, sets=total // 8)
    row = Row(
        name=f"heartbeats over {load.beating_workers} sessions",
        measured=median(rates),
        unit="per s",
        target=12_000,
        peer=f"TCPStore set(): {number(peer)} per s",
        note=f"{_spread(rates)}; {cpu_us:.0f} µs of coordinator CPU each",
    )
    return [row]


async def _unary_rows(load: Load) -> list[Row]:
    with ServedCoordinator() as coordinator:
        async with Fleet(coordinator, load.fleet) as fleet:
            beating = asyncio.create_task(fleet.beat_at_1_hz())
            worker = fleet.workers[0]
            dataset = pb.RegisterDatasetRequest(
                dataset_id=DATASET, path="/data/bench", format="bin", total_samples=100_000_000
            )
            await worker.connection.unary("RegisterDataset", dataset.SerializeToString())
            beat = heartbeat(1)
            beat.worker_id, beat.incarnation = worker.worker_id, worker.incarnation
            shards = pb.GetDataShardRequest(
                worker_id=worker.worker_id, dataset_id=DATASET, incarnation=worker.incarnation
            )
            rows = [
                await _unary_row(coordinator, "Heartbeat", beat.SerializeToString(), 5_000, load),
                await _unary_row(coordinator, "GetDataShard", shards.SerializeToString(), 8_900, load),
            ]
            beating.cancel()
    return rows


async def _unary_row(
    coordinator: ServedCoordinator, method: str, request: bytes, target: float, load: Load
) -> Row:
    h2load = shutil.which("h2load")
    rates = []
    before = coordinator.cost()
    for _ in range(load.repeats):
        if h2load:
            rates.append(await _h2load_rate(h2load, coordinator, method, request, load.unary_calls))
        else:
            rates.append(await _swarm_rate(coordinator, method, request, load.unary_calls))
    cpu_us = (coordinator.cost().cpu_s - before.cpu_s) / load.unary_calls / load.repeats * 1e6
    return Row(
        name=f"unary {method}, {load.fleet:,} workers connected",
        measured=median(rates),
        unit="per s",
        target=target,
        note=f"{_spread(rates)}; {cpu_us:.0f} µs of coordinator CPU each; "
        f"driven by {'h2load' if h2load else 'the swarm client'}",
    )


async def _h2load_rate(
    h2load: str, coordinator: ServedCoordinator, method: str, request: bytes, calls: int
) -> float:
    with tempfile.NamedTemporaryFile() as body:
        body.write(framed(request))
        body.flush()
        command = [h2load, "--requests", str(calls), "--clients", "8", "--max-concurrent-streams", "16"]
        command += ["--data", body.name, "--header", "te: trailers"]
        command += ["--header", "content-type: application/grpc"]
        command.append(f"http://{coordinator.host}:{coordinator.grpc_port}{SERVICE}{method}")
        process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
        said = (await process.communicate())[0].decode()
    rate = re.search(r"([\d.]+) req/s", said)
    answered = re.search(r"(\d+) 2xx", said)
    if rate is None or answered is None or int(answered[1]) != calls:
        raise StrataError(f"h2load did not get {calls} answers from {method}: {said}")
    return float(rate[1])


async def _swarm_rate(coordinator: ServedCoordinator, method: str, request: bytes, calls: int) -> float:
    left = iter(range(calls))
    connections = [await Connection.open(coordinator.host, coordinator.grpc_port) for _ in range(8)]

    async def ask(connection: Connection) -> None:
        for _ in left:
            await connection.unary(method, request)

    began_s = time.perf_counter()
    await asyncio.gather(*(ask(connection) for connection in connections for _ in range(16)))
    took_s = time.perf_counter() - began_s
    for connection in connections:
        connection.close()
    return calls / took_s


# --- barriers -------------------------------------------------------------------------------------------------


async def _barrier_row(workers: int, rounds: int, target_ms: float, peer_rounds: int) -> Row:
    with ServedCoordinator() as coordinator:
        async with Fleet(coordinator, workers) as fleet:
            for step in range(3):
                await fleet.barrier("warm-up", step)
            before = coordinator.cost()
            times_ms = [await fleet.barrier("bench", step) * 1000 for step in range(rounds)]
            cpu_ms = (coordinator.cost().cpu_s - before.cpu_s) / rounds * 1000
    peer_ms = [seconds * 1000 for seconds in tcpstore.barriers_s(clients=workers, rounds=peer_rounds)]
    return Row(
        name=f"barrier of {workers:,} workers, first arrival to last release, p99",
        measured=_percentile(times_ms, 99),
        unit="ms",
        target=target_ms,
        better="lower",
        peer=f"TCPStore add and wait: median {median(peer_ms):.0f} ms, worst {max(peer_ms):.0f} ms",
        note=f"{rounds} rounds, median {median(times_ms):.1f}, worst {max(times_ms):.1f}; "
        f"{cpu_ms:.1f} ms of coordinator CPU a round",
    )


# --- a fleet, and people watching it --------------------------------------------------------------------------


async def _fleet_rows(load: Load) -> list[Row]:
    with ServedCoordinator() as coordinator:
        async with Fleet(coordinator, load.fleet) as fleet:
            beating = asyncio.create_task(fleet.beat_at_1_hz())
            await asyncio.sleep(min(2.0, load.watch_s))
            alone, _ = await _watched(coordinator, browsers=0, for_s=load.watch_s)
            one, one_s = await _watched(coordinator, browsers=1, for_s=load.watch_s)
            many, many_s = await _watched(coordinator, browsers=load.browsers, for_s=load.watch_s)
            rss_mb = coordinator.cost().rss_bytes / 1e6
            beating.cancel()
    what = f"{load.fleet:,} workers at 1 Hz"
    latency = f"GET /api/dashboard, {what}, p99"
    return [
        Row(name=f"{what}: CPU", measured=alone, unit="% of a core", target=30, better="lower"),
        Row(
            name=f"{what}, one browser: CPU",
            measured=one,
            unit="% of a core",
            target=30,
            better="lower",
            note="an event stream, and the dashboard ten times a second",
        ),
        Row(
            name=f"{what}, {load.browsers} browsers: CPU",
            measured=many,
            unit="% of a core",
            better="lower",
            note="each an event stream, and the dashboard every two seconds",
        ),
        Row(name=f"{what}: RSS", measured=rss_mb, unit="MB", target=400, better="lower"),
        _latency_row(f"{latency}, one browser", one_s),
        _latency_row(f"{latency}, {load.browsers} browsers", many_s),
    ]


async def _watched(
    coordinator: ServedCoordinator, *, browsers: int, for_s: float
) -> tuple[float, list[float]]:
    """Per cent of a core that the coordinator used meanwhile, and how long each dashboard took."""
    taken_s: list[float] = []
    every_s = 0.1 if browsers == 1 else 2.0
    watching = [Browser(coordinator.host, coordinator.http_port) for _ in range(browsers)]
    tasks = []
    for place, browser in enumerate(watching):
        tasks.append(asyncio.create_task(browser.watch()))
        tasks.append(
            asyncio.create_task(
                browser.poll(
                    "/api/dashboard",
                    every_s=every_s,
                    first_after_s=every_s * place / browsers,
                    taken_s=taken_s,
                )
            )
        )
    before = coordinator.cost()
    await asyncio.sleep(for_s)
    after = coordinator.cost()
    failed = [task for task in tasks if task.done()]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for browser in watching:
        browser.close()
    if failed:
        failed[0].result()
    return _percent(before, after), taken_s


def _latency_row(name: str, taken_s: Sequence[float]) -> Row:
    times_ms = [seconds * 1000 for seconds in taken_s]
    return Row(
        name=name,
        measured=_percentile(times_ms, 99),
        unit="ms",
        target=50,
        better="lower",
        note=f"{len(times_ms)} answers, median {median(times_ms):.1f}, worst {max(times_ms):.1f}",
    )


def _percent(before: Cost, after: Cost) -> float:
    return (after.cpu_s - before.cpu_s) / (after.at_mono_s - before.at_mono_s) * 100


def _percentile(values: Sequence[float], percent: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


def _spread(rates: Sequence[float]) -> str:
    return f"median of {len(rates)}, {number(min(rates))} to {number(max(rates))}"


if __name__ == "__main__":
    main(json="--json" in sys.argv, quick="--quick" in sys.argv)
