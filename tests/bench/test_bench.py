"""The benchmarks run, and what they print can be read. How fast anything is, no test asks."""

from __future__ import annotations

import asyncio
import json
import math
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from strata.bench.coordinator.crowd import measure
from strata.bench.coordinator.fleet import Fleet, heartbeat
from strata.bench.coordinator.serving import HOST, bare_grpc_server, served_coordinator
from strata.bench.coordinator.suite import watched
from strata.bench.coordinator.swarm import CallFailed, Connection
from strata.bench.coordinator.unary import calls_per_second, driver
from strata.bench.table import Row, number
from strata.cli.bench import app
from strata.rpc import coordinator_pb2 as pb


@pytest.mark.timeout(600)  # Half a dozen servers, one after the other.
def test_coordinator_bench_measures_every_figure() -> None:
    said = CliRunner().invoke(app, ["coordinator", "--quick", "--json"], catch_exceptions=False)
    assert said.exit_code == 0
    rows = json.loads(said.stdout)["rows"]
    assert all(math.isfinite(row["measured"]) and row["measured"] >= 0 for row in rows)
    for figure in (
        "shard plan",
        "shard look-ups",
        "heartbeats over",
        "heartbeats of",
        "machines with agents, p99",
        "unary Heartbeat",
        "unary GetDataShard",
        "barrier of",
        "a lost agent",
        "a lost worker",
        "one browser: CPU",
        "5 browsers: CPU",
        "RSS",
        "GET /api/dashboard",
    ):
        assert any(figure in row["name"] for row in rows), figure
    exact = [row for row in rows if "max − min" in row["name"] or "moved by" in row["name"]]
    assert exact
    assert all(row["met"] for row in exact), "balance and movement do not depend on speed"


async def test_a_fleet_keeps_to_the_flow_control_of_its_coordinator() -> None:
    with served_coordinator() as coordinator:
        async with Fleet(coordinator, 2) as fleet:
            # Several times what a stream may carry before it is read.
            assert await fleet.barrier("full", 1, beats_before=2_000) > 0


SLOW = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.parametrize(
    ("workers", "rack", "through_agents"),
    [
        pytest.param(500, 50, True, id="500 with agents"),
        pytest.param(500, 50, False, id="500 with a session each"),
        pytest.param(10_000, 500, True, marks=SLOW, id="10,000 with agents"),
        pytest.param(3_000, 150, False, marks=SLOW, id="3,000 with a session each"),
    ],
)
async def test_a_crowd_joins_beats_meets_loses_a_rack_and_sees_the_next_generation(
    workers: int, rack: int, through_agents: bool
) -> None:
    """Every step awaits all of them: one that is failed by mistake, or not notified, fails it."""
    crowd = await measure(workers, through_agents=through_agents, rack=rack, watch_s=1.0)
    assert (crowd.workers, crowd.lost) == (workers, rack)
    assert crowd.rss_bytes < 1e9


async def test_a_barrier_that_breaks_is_not_measured() -> None:
    with served_coordinator() as coordinator:
        async with Fleet(coordinator, 2) as fleet:
            goodbye = pb.DeregisterWorkerRequest(worker_id=fleet.workers[1].worker_id)
            await fleet.workers[0].connection.unary("DeregisterWorker", goodbye.SerializeToString())
            with pytest.raises(CallFailed):
                await fleet.barrier("alone", 1, timeout_ms=500)


async def test_a_refused_call_is_not_an_answer() -> None:
    with served_coordinator() as coordinator:
        connection = await Connection.open(HOST, coordinator.grpc_port)
        with pytest.raises(CallFailed):
            await connection.unary("Heartbeat", heartbeat(1).SerializeToString())
        connection.close()
        await asyncio.sleep(0)


async def test_a_coordinator_slower_than_the_watch_is_watched_until_it_answers() -> None:
    with served_coordinator() as coordinator:
        for browsers in (1, 2):
            percent, taken_s = await watched(coordinator, browsers=browsers, for_s=0.0)
            assert math.isfinite(percent)
            assert taken_s


async def test_unary_calls_are_counted_without_h2load_too(monkeypatch: pytest.MonkeyPatch) -> None:
    with bare_grpc_server() as port:
        monkeypatch.setenv("PATH", "")
        assert driver() == "the swarm client"
        assert await calls_per_second(port, "Nothing", b"request", calls=200) > 0


@pytest.mark.parametrize(
    ("measured", "target", "better", "met"),
    [(5, 5, "higher", True), (4, 5, "higher", False), (5, 5, "lower", True), (6, 5, "lower", False)],
)
def test_a_target_is_met_on_its_good_side(measured: float, target: float, better: str, met: bool) -> None:
    row = Row(name="x", measured=measured, unit="", target=target, better=better)  # type: ignore[arg-type]
    assert row.met is met
    assert row.to_json()["met"] is met


def test_a_figure_without_target_is_neither_met_nor_missed() -> None:
    assert Row(name="x", measured=1, unit="s").met is None


def test_numbers_keep_three_digits_that_matter() -> None:
    assert [number(x) for x in (0.01234, 9.876, 12, 123.4, 12345.6)] == [
        "0.0123",
        "9.88",
        "12",
        "123",
        "12,346",
    ]


def test_tables_are_printed_on_a_machine_without_rich_or_typer() -> None:
    program = """
import sys
sys.modules["rich"] = sys.modules["typer"] = None
from strata.bench.table import Row, report
report("Title", [Row(name="speed", measured=2, unit="per s", target=3, note="slow")], as_json=False)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "Title" in done.stdout
    assert "≥ 3" in done.stdout
    assert "NO" in done.stdout
    assert "slow" in done.stdout
