"""How fast the coordinator is, measured from outside on a real `strata serve`, beside torch's TCPStore.

Load generator and coordinator share this machine, as the targets say. Each figure is repeated, and its note
tells how far the repetitions lie apart. Nothing here needs a quiet machine to run, only to be believed.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from strata.bench.coordinator import tcpstore
from strata.bench.coordinator.browsers import Browser
from strata.bench.coordinator.fleet import ROUND_TIMEOUT_S, AgentSwarm, Fleet, MachineFleet, heartbeat
from strata.bench.coordinator.serving import Served, bare_grpc_server, served_coordinator
from strata.bench.coordinator.unary import calls_per_second, driver
from strata.bench.table import Row, number, report
from strata.core.data.sharding import ShardPlan, first_plan, moves_between, replan
from strata.core.fleet.presence import PresenceLimits
from strata.data.shards.manager import ShardManager
from strata.rpc import coordinator_pb2 as pb

TITLE = "Coordinator"
DATASET = "bench"
SHARDS_EACH = 10
NO_PEER = "TCPStore: torch is not installed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How much of everything. `QUICK` shows that the benchmark works; its results mean nothing."""

    beating_workers: int = 200
    beats_per_worker: int = 250
    unary_calls: int = 20_000
    repeats: int = 5
    barriers: Sequence[tuple[int, int, float]] = ((100, 300, 25.0), (1_000, 100, 150.0))
    """Workers, rounds, and the milliseconds that the 99th percentile may take."""
    machines: int = 125
    ranks_each: int = 8
    """For what agents say for their workers."""
    machine_rounds: int = 100
    machine_barrier_ms: float = 40.0
    shared_connections: int = 10
    """Barriers are measured twice: over so many connections, and over one for each worker."""
    plans: Sequence[tuple[int, float]] = ((10_000, 10.0), (100_000, 60.0))
    """Shards, and the milliseconds that a plan for them may take."""
    plan_repeats: int = 15
    fleet: int = 1_000
    browsers: int = 200
    watch_s: float = 15.0
    peer_rounds: int = 20


QUICK = Load(
    beating_workers=10,
    beats_per_worker=20,
    unary_calls=500,
    repeats=1,
    barriers=((10, 5, 25.0),),
    machines=3,
    ranks_each=4,
    machine_rounds=5,
    shared_connections=2,
    plans=((1_000, 10.0),),
    plan_repeats=3,
    fleet=20,
    browsers=5,
    watch_s=1.0,
    peer_rounds=3,
)


def main(*, json: bool = False, quick: bool = False) -> None:
    report(TITLE, run(QUICK if quick else Load()), as_json=json)


def run(load: Load) -> Iterator[Row]:
    yield from _plan_rows(load)
    yield _lookup_row(load)
    yield asyncio.run(_heartbeat_row(load))
    yield from asyncio.run(_machine_rows(load))
    yield from asyncio.run(_unary_rows(load))
    for workers, rounds, target_ms in load.barriers:
        peer = _barrier_peer(workers, load.peer_rounds)
        for connections in (load.shared_connections, workers):
            yield asyncio.run(_barrier_row(workers, connections, rounds, target_ms, peer))
    yield from asyncio.run(_loss_rows(load))
    yield from asyncio.run(_fleet_rows(load))


# --- shard plans ----------------------------------------------------------------------------------------------


def _plan_rows(load: Load) -> Iterator[Row]:
    """Time of the slowest kind of plan; balance and movement of all of them."""
    names = _worker_names(load.fleet)
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
            note="median of the slowest; "
            + ", ".join(f"{kind} {median(t):.1f} (worst {max(t):.1f})" for kind, t in times_ms.items()),
        )
        _, left, joined = made = [make() for make in makers.values()]
        yield Row(
            name=f"{what}: max − min",
            measured=max(int(p.counts().max() - p.counts().min()) for p in made),
            unit="shards",
            target=1,
            better="lower",
        )
        yield Row(
            name=f"{what}: moved by a leave and a join",
            measured=len(moves_between(plan, left)) + len(moves_between(plan, joined)),
            unit="shards",
            target=int(plan.counts()[0]) + int(joined.counts().min()),
            better="lower",
            note="the target is the minimum: what the leaver had, and the joiner's share",
        )


def _times_ms(work: Callable[[], object], repeats: int) -> list[float]:
    times = []
    for _ in range(repeats):
        began_s = time.perf_counter()
        work()
        times.append((time.perf_counter() - began_s) * 1000)
    return times


def _lookup_row(load: Load) -> Row:
    names = _worker_names(load.fleet)
    shards = ShardManager()
    shards.register_dataset_params(DATASET, load.fleet * SHARDS_EACH * 100, 100)
    for name in names:
        shards.add_worker(name)

    def look_up_all() -> None:
        for name in names:
            shards.get_shard_for_worker(DATASET, name, 0)

    look_up_all()
    rates = [len(names) / ms * 1000 for ms in _times_ms(look_up_all, load.repeats)]
    return Row(
        name=f"shard look-ups in a process, {load.fleet:,} workers × {SHARDS_EACH} shards",
        measured=median(rates),
        unit="per s",
        target=8_900,
        note=_spread(rates),
    )


def _worker_names(count: int) -> list[str]:
    return [f"worker-{place:04}" for place in range(count)]


# --- heartbeats and unary calls -------------------------------------------------------------------------------


async def _heartbeat_row(load: Load) -> Row:
    """Every session sends as fast as it is read; a barrier behind the heartbeats proves that they were taken."""
    total = load.beating_workers * load.beats_per_worker
    with served_coordinator() as coordinator:
        async with Fleet(coordinator, load.beating_workers) as fleet:
            await fleet.barrier("warm-up", 0, beats_before=load.beats_per_worker // 10)
            before = coordinator.cost()
            rates = [
                total / await fleet.barrier("beats", step, beats_before=load.beats_per_worker)
                for step in range(load.repeats)
            ]
            cpu_us = coordinator.cost().cpu_since_s(before) / total / load.repeats * 1e6
    peer = NO_PEER
    if tcpstore.installed():
        peer = f"TCPStore set(): {number(tcpstore.sets_per_second(clients=8, sets=total // 8))} per s"
    return Row(
        name=f"heartbeats over {load.beating_workers} sessions",
        measured=median(rates),
        unit="per s",
        target=40_000,
        peer=peer,
        note=f"{_spread(rates)}; {cpu_us:.0f} µs of coordinator CPU each",
    )


async def _machine_rows(load: Load) -> list[Row]:
    """Workers of machines whose agents speak for them: heartbeats with a new report of each, and barriers."""
    total = load.machines * load.ranks_each * load.beats_per_worker
    where = f"{load.machines * load.ranks_each:,} workers on {load.machines:,} machines with agents"
    with served_coordinator() as coordinator:
        async with MachineFleet(coordinator, load.machines, load.ranks_each) as fleet:
            await fleet.barrier("warm-up", 0, beats_before=load.beats_per_worker // 10)
            before = coordinator.cost()
            rates = [
                total / await fleet.barrier("beats", step, beats_before=load.beats_per_worker)
                for step in range(load.repeats)
            ]
            beats_cpu_us = coordinator.cost().cpu_since_s(before) / total / load.repeats * 1e6
            before = coordinator.cost()
            times_ms = [await fleet.barrier("bench", step) * 1000 for step in range(load.machine_rounds)]
            barrier_cpu_ms = coordinator.cost().cpu_since_s(before) / load.machine_rounds * 1000
    return [
        Row(
            name=f"heartbeats of {where}",
            measured=median(rates),
            unit="per s",
            target=100_000,
            note=f"{_spread(rates)}; {beats_cpu_us:.1f} µs of coordinator CPU each; folded by machine, every report is a new one",
        ),
        Row(
            name=f"barrier of {where}, p99",
            measured=_percentile(times_ms, 99),
            unit="ms",
            target=load.machine_barrier_ms,
            better="lower",
            note=f"first arrival to last release; {load.machine_rounds} rounds, median {median(times_ms):.1f}, "
            f"worst {max(times_ms):.1f}; {barrier_cpu_ms:.1f} ms of coordinator CPU a round",
        ),
    ]


async def _unary_rows(load: Load) -> list[Row]:
    """Beside a server that does nothing, on the same framework and driven the same way: the limit."""
    with bare_grpc_server() as port:
        limit = median(
            [
                await calls_per_second(port, "Nothing", b"\0" * 100, calls=load.unary_calls)
                for _ in range(load.repeats)
            ]
        )
    workers = 8
    with served_coordinator() as coordinator:
        async with Fleet(coordinator, workers) as fleet:
            worker = fleet.workers[0]
            dataset = pb.RegisterDatasetRequest(
                dataset_id=DATASET,
                path="/data/bench",
                format="bin",
                total_samples=workers * SHARDS_EACH * 10_000,
            )
            await worker.connection.unary("RegisterDataset", dataset.SerializeToString())
            beat = heartbeat(1)
            beat.worker_id, beat.incarnation = worker.worker_id, worker.incarnation
            shards = pb.GetDataShardRequest(
                worker_id=worker.worker_id, dataset_id=DATASET, incarnation=worker.incarnation
            )
            calls = (("Heartbeat", beat.SerializeToString()), ("GetDataShard", shards.SerializeToString()))
            targets = {"Heartbeat": 5_000, "GetDataShard": 8_900}
            rows = []
            for method, request in calls:
                await worker.connection.unary(method, request)  # A refusal would be counted as an answer.
                before = coordinator.cost()
                rates = []
                for _ in range(load.repeats):
                    for each in fleet.workers:  # Or they are failed while the calls are made.
                        each.say(pb.WorkerMessage(heartbeat=heartbeat(1)))
                    rate = await calls_per_second(
                        coordinator.grpc_port, method, request, calls=load.unary_calls
                    )
                    rates.append(rate)
                cpu_us = coordinator.cost().cpu_since_s(before) / load.unary_calls / load.repeats * 1e6
                rows.append(
                    Row(
                        name=f"unary {method}",
                        measured=median(rates),
                        unit="per s",
                        target=targets[method],
                        peer=f"grpc.aio answering nothing: {number(limit)} per s",
                        note=f"{_spread(rates)}; {cpu_us:.0f} µs of coordinator CPU each; "
                        f"driven by {driver()}",
                    )
                )
    return rows


# --- barriers -------------------------------------------------------------------------------------------------


async def _barrier_row(workers: int, connections: int, rounds: int, target_ms: float, peer: str) -> Row:
    with served_coordinator() as coordinator:
        async with Fleet(coordinator, workers, connections=connections) as fleet:
            for step in range(3):
                await fleet.barrier("warm-up", step)
            before = coordinator.cost()
            times_ms = [await fleet.barrier("bench", step) * 1000 for step in range(rounds)]
            cpu_ms = coordinator.cost().cpu_since_s(before) / rounds * 1000
    return Row(
        name=f"barrier of {workers:,} workers over {connections:,} connections, p99",
        measured=_percentile(times_ms, 99),
        unit="ms",
        target=target_ms,
        better="lower",
        peer=peer,
        note=f"first arrival to last release; {rounds} rounds, median {median(times_ms):.1f}, "
        f"worst {max(times_ms):.1f}; {cpu_ms:.1f} ms of coordinator CPU a round",
    )


def _barrier_peer(clients: int, rounds: int) -> str:
    if not tcpstore.installed():
        return NO_PEER
    times_ms = [seconds * 1000 for seconds in tcpstore.barriers_s(clients=clients, rounds=rounds)]
    return f"TCPStore add and wait: median {median(times_ms):.0f} ms, worst {max(times_ms):.0f} ms"


# --- losses ---------------------------------------------------------------------------------------------------


async def _loss_rows(load: Load) -> list[Row]:
    """How long after a death everybody else knows of it."""
    with served_coordinator() as coordinator:
        async with AgentSwarm(coordinator, load.fleet + load.repeats) as agents:
            of_agents_s = [await agents.lose_one() for _ in range(load.repeats)]
        async with Fleet(coordinator, load.fleet + load.repeats) as fleet:
            of_workers_s = [await fleet.lose(1) for _ in range(load.repeats)]
    return [
        Row(
            name=f"a lost agent → {load.fleet:,} others are notified",
            measured=median(of_agents_s),
            unit="s",
            target=0.5,
            better="lower",
            note=f"{_spread(of_agents_s)}; {PresenceLimits().grace_s:g} s of it are the time in which it may come back",
        ),
        Row(
            name=f"a lost worker → {load.fleet:,} others have the new generation",
            measured=median(of_workers_s),
            unit="s",
            better="lower",
            note=f"{_spread(of_workers_s)}; of it `disconnect_grace`",
        ),
    ]


# --- a fleet, and people watching it --------------------------------------------------------------------------


async def _fleet_rows(load: Load) -> list[Row]:
    with served_coordinator() as coordinator:
        async with Fleet(coordinator, load.fleet) as fleet:
            beating = asyncio.create_task(fleet.beat(every_s=1.0))
            await asyncio.sleep(min(2.0, load.watch_s))
            alone, _ = await watched(coordinator, browsers=0, for_s=load.watch_s)
            one, one_s = await watched(coordinator, browsers=1, for_s=load.watch_s)
            many, many_s = await watched(coordinator, browsers=load.browsers, for_s=load.watch_s)
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


async def watched(coordinator: Served, *, browsers: int, for_s: float) -> tuple[float, list[float]]:
    """Per cent of a core that the coordinator used meanwhile, and how long each dashboard took."""
    every_s = 0.1 if browsers == 1 else 2.0
    watching = [Browser(coordinator.http_port) for _ in range(browsers)]
    taken_s: list[float] = []
    tasks = [asyncio.create_task(browser.watch()) for browser in watching]
    for place, browser in enumerate(watching):
        first_after_s = every_s * place / browsers
        polling = browser.poll(
            "/api/dashboard", every_s=every_s, first_after_s=first_after_s, taken_s=taken_s
        )
        tasks.append(asyncio.create_task(polling))
    before = coordinator.cost()
    await asyncio.sleep(for_s)
    after = coordinator.cost()
    async with asyncio.timeout(ROUND_TIMEOUT_S):  # A slow answer is the one to tell of.
        while watching and not taken_s and not any(task.done() for task in tasks):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    for task in tasks:
        if task.done():
            task.result()  # None ends by itself: this says why it did.
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for browser in watching:
        browser.close()
    return after.percent_since(before), taken_s


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


def _percentile(values: Sequence[float], percent: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


def _spread(rates: Sequence[float]) -> str:
    return f"median of {len(rates)}, {number(min(rates))} to {number(max(rates))}"


if __name__ == "__main__":
    main(json="--json" in sys.argv, quick="--quick" in sys.argv)
