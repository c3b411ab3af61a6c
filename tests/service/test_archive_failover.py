"""The leader is killed: what it gathered beside the journal is there on the next one, from an S3 server, and continues."""

from __future__ import annotations

import logging
import struct
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from strata import TrainingOrchestrator
from strata.rpc import coordinator_pb2 as pb
from strata.worker.outbox import MetricOutbox
from tests.rendezvous.etcd_server import EtcdServer
from tests.service.test_failover import Pair
from tests.support import Coordinator, eventually
from tests.support_seaweed import seaweed

SLOW_MACHINE_S = 60.0


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    folder = tmp_path / "etcd"
    folder.mkdir()
    etcd = EtcdServer(folder)
    etcd.start()
    try:
        with seaweed(tmp_path / "s3") as server, ExitStack() as stack:
            yield Pair(
                tmp_path,
                etcd.endpoint,
                stack,
                STRATA_ARCHIVE="s3://fleet/archive",
                STRATA_LEADER_LEASE="6",
                **server.environment(),
            )
    finally:
        etcd.stop()


def lines(coordinator: Coordinator, text: str) -> list[str]:
    """Oldest first."""
    found = coordinator.get(f"/api/logs?task_id=moves&limit=1000&q={text}")
    return [entry["message"] for entry in found[::-1]]


def losses(coordinator: Coordinator) -> dict[int, float]:
    status, _ = coordinator.call("GET", "/api/runs/moves/metrics")
    if status == 404:
        return {}
    found: dict[str, Any] = coordinator.get("/api/runs/moves/metrics/series?name=loss&points=1000")
    curve = found["series"][0]["committed"]
    return dict(zip(curve["steps"], curve["values"], strict=True))


def metrics(coordinator: Coordinator) -> dict[str, float]:
    _, page = coordinator.call("GET", "/metrics")
    families = text_string_to_metric_families(page.decode())
    return {
        sample.name: sample.value for family in families for sample in family.samples if not sample.labels
    }


def log_losses(outbox: MetricOutbox, steps: range) -> None:
    values = b"".join(struct.pack("<d", 1.0 / (1 + step)) for step in steps)
    times = [1.7e9 + step for step in steps]
    outbox.put(pb.MetricRows(names=["loss"], steps=list(steps), times=times, values=values))


@pytest.mark.s3
@pytest.mark.timeout(300)
def test_logs_and_metrics_survive_a_failover_to_another_disk_and_continue(pair: Pair) -> None:
    old = pair.leader()
    new = pair.other(old)
    logger = logging.getLogger("training.moves")
    worker = TrainingOrchestrator(f"{old.address},{new.address}", job_id="moves", ship_logs=True)
    with worker:
        worker.register_worker("moves-0")
        outbox = MetricOutbox(generation=1, started_ms=5, resumed_step=0)
        worker.send_metrics(outbox)
        for number in range(100):
            logger.warning("before %d", number)
        log_losses(outbox, range(500))
        worker.flush_logs()
        before = [f"before {number}" for number in range(100)]
        wanted = {step: 1.0 / (1 + step) for step in range(500)}
        eventually(
            lambda: lines(new, "before") == before and losses(new) == wanted,
            within_s=SLOW_MACHINE_S,
            what="a standby shows what the leader gathers",
        )
        assert new.get("/api/status")["role"] == "standby"
        led, follows = metrics(old), metrics(new)
        assert (led["strata_leader"], follows["strata_leader"]) == (1, 0)
        assert led["strata_leader_term"] == follows["strata_leader_term"] > 0
        assert (led["strata_elections_total"], led["strata_standby_behind_records"]) == (1, 0)
        assert led["strata_archive_uploads_total"] > 0
        old.kill()
        eventually(lambda: pair.is_led_by(new), within_s=SLOW_MACHINE_S, what="the other one leads")
        assert lines(new, "before") == before
        assert losses(new) == wanted
        leads = metrics(new)
        assert leads["strata_leader"] == 1
        assert leads["strata_leader_term"] > led["strata_leader_term"]
        assert leads["strata_elections_total"] == follows["strata_elections_total"] + 1
        assert leads["strata_journal_records"] >= led["strata_journal_records"] > 0
        assert leads["strata_journal_bytes"] >= led["strata_journal_bytes"] > 0
        assert worker.wait_connected()
        for number in range(50):
            logger.warning("after %d", number)
        log_losses(outbox, range(500, 700))
        after = [f"after {number}" for number in range(50)]
        wanted |= {step: 1.0 / (1 + step) for step in range(500, 700)}
        eventually(lambda: lines(new, "after") == after and losses(new) == wanted, within_s=SLOW_MACHINE_S)
        eventually(lambda: new.get("/api/logs?q=the+previous+leader+at"), within_s=SLOW_MACHINE_S)
        old.start()
        eventually(
            lambda: lines(old, "after") == after and losses(old) == wanted,
            within_s=SLOW_MACHINE_S,
            what="the one that was killed knows what came after it",
        )
        eventually(lambda: new.get("/api/logs?q=have+arrived"), within_s=SLOW_MACHINE_S)
        assert lines(new, "before") == lines(old, "before") == before, "nothing is there twice"
        assert new.get("/api/runs/moves/metrics")["missing_batches"] == 0
        worker.deregister()
