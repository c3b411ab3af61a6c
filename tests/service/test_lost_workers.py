"""Workers that die, freeze and come back: noticed in time, their work given on, their zombies fenced."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from strata import TrainingOrchestrator
from strata.core.data.ledger import DataCommit, RankRecord
from strata.rpc import coordinator_pb2 as pb
from tests.service.clients import EventStream, RawSession, channel, refusal, stub
from tests.service.fleet import Fleet, RemoteError
from tests.support import Coordinator, eventually

Fleets = Callable[..., Fleet]


@pytest.fixture
def impatient(tmp_path: Path) -> Iterator[Coordinator]:
    server = Coordinator(
        tmp_path / "coordinator", "--heartbeat-timeout", "10", env={"STRATA_HEARTBEAT_INTERVAL": "0.2"}
    ).start()
    yield server
    server.stop()
    assert "Traceback" not in "".join(server.output)


def test_killed_worker_fails_within_a_second_and_its_unfinished_shards_move(
    shared: Coordinator, fleets: Fleets, capsys: pytest.CaptureFixture[str]
) -> None:
    coordinator = shared
    survivor, victim = (fleets(coordinator.address, job="killed") for _ in range(2))
    survivor.register("survivor")
    victim.register("victim")
    survivor.call("survivor", "register_dataset", "images", "/data", "parquet", 4_000, 1_000)
    finished = victim.call("victim", "get_shards", "images")[0]
    trained = RankRecord(dataset="images", epoch=0, total=4_000, rank=0)
    record = DataCommit().next([trained.with_span(finished["start"], finished["stop"])], world_size=2)
    victim.call("victim", "notify_checkpoint", "step-1", 1, path="/ckpt/1", data=record.to_json())

    with EventStream(coordinator.http_port) as events:
        killed_s = victim.kill()
        failed = events.wait_for("worker_failed", lambda e: e["worker_id"] == "victim", within_s=60)
    elapsed_s = failed.at_mono_s - killed_s
    with capsys.disabled():
        print(f"\nfailed {elapsed_s:.2f} s after SIGKILL", end=" ")
    assert elapsed_s < 60.0  # One second is the promise on a quiet machine; silence would take ten minutes.
    assert "connection lost" in failed.data["reason"]
    workers = [w for w in coordinator.get("/api/workers") if w["job_id"] == "killed"]
    states = {w["id"]: (w["status"], w["connected"]) for w in workers}
    assert states == {"survivor": ("active", True), "victim": ("failed", False)}

    plan = coordinator.get("/api/datasets/images/shards?job_id=killed")["shards"]
    owners = {shard["id"]: shard["worker_id"] for shard in plan}
    assert owners.pop(finished["shard_id"]) == "victim", "a finished shard stays with whoever finished it"
    assert set(owners.values()) == {"survivor"}
    mine = {shard["shard_id"] for shard in survivor.call("survivor", "get_shards", "images")}
    assert mine == set(owners)


def test_frozen_worker_fails_after_heartbeat_timeout_and_wakes_up_stale(
    impatient: Coordinator, fleets: Fleets
) -> None:
    sleeper = fleets(impatient.address)
    first = sleeper.register("sleeper")[0]
    sleeper.call("sleeper", "register_dataset", "images", "/data", "parquet", 4_000, 1_000)
    with EventStream(impatient.http_port) as events:
        frozen_s = sleeper.freeze()
        failed = events.wait_for("worker_failed", lambda e: e["worker_id"] == "sleeper", within_s=60)
    # Its last heartbeat may be some seconds old when it freezes.
    silent_s = failed.at_mono_s - frozen_s
    assert silent_s > 4.0, f"heartbeat_timeout is 10 s; it was failed after {silent_s:.2f} s"
    assert "no heartbeat for" in failed.data["reason"]
    assert "heartbeat_timeout is 10 s" in failed.data["reason"]

    before = _state(impatient)
    sleeper.thaw()
    _until_told(sleeper, "sleeper")
    requests: dict[str, tuple[str, tuple[object, ...], dict[str, object]]] = {
        "heartbeat": ("heartbeat", (7, 1), {}),
        "progress": ("report_progress", ("images", 0, 0, 500), {}),
        "barrier": ("barrier", ("b",), {"participants": 1}),
        "checkpoint": ("notify_checkpoint", ("late", 3), {"path": "/ckpt/late"}),
        "shards": ("get_shards", ("images",), {}),
    }
    for what, (method, args, kwargs) in requests.items():
        with pytest.raises(RemoteError) as refused:
            sleeper.call("sleeper", method, *args, **kwargs)
        assert refused.value.kind == "StaleWorker", what
        assert "failed" in refused.value.message, what
        assert "egister again" in refused.value.message, what
    assert _state(impatient) == before

    second = sleeper.register("sleeper")[0]
    assert second["incarnation"] > first["incarnation"]
    assert sleeper.call("sleeper", "barrier", "b", participants=1)["participants"] == 1
    sleeper.call("sleeper", "notify_checkpoint", "late", 3, path="/ckpt/late")
    assert len(sleeper.call("sleeper", "get_shards", "images")) == 4
    sleeper.call("sleeper", "heartbeat", 8, 1)
    eventually(lambda: impatient.get("/api/workers")[0]["current_step"] == 8, within_s=30)
    reported = [s["reported"] for s in impatient.get("/api/datasets/images/shards")["shards"]]
    assert reported == [0, 0, 0, 0], "progress of the stale incarnation was counted"


def test_zombie_over_plain_calls_is_refused_whatever_it_asks(shared: Coordinator) -> None:
    coordinator = shared
    with stub(coordinator.address) as calls, channel(coordinator.address) as own:
        old = calls.RegisterWorker(pb.RegisterWorkerRequest(worker_id="w")).incarnation
        calls.RegisterDataset(
            pb.RegisterDatasetRequest(dataset_id="d", path="/d", format="f", total_samples=10, shard_size=1)
        )
        zombie = RawSession(own).hello("w", old)
        zombie.wait_for("welcome")
        new = calls.RegisterWorker(pb.RegisterWorkerRequest(worker_id="w")).incarnation
        assert new > old
        assert "fenced" in zombie.wait_for("stale").reason
        before = _state(coordinator)
        asked = {
            "Heartbeat": pb.HeartbeatRequest(
                worker_id="w", incarnation=old, status=pb.WorkerStatus(state="training", current_step=99)
            ),
            "WaitBarrier": pb.WaitBarrierRequest(
                worker_id="w", incarnation=old, barrier_id="b", expected_participants=1
            ),
            "NotifyCheckpoint": pb.NotifyCheckpointRequest(
                worker_id="w", incarnation=old, checkpoint_id="c", step=1, path="/c"
            ),
            "GetDataShard": pb.GetDataShardRequest(worker_id="w", incarnation=old, dataset_id="d", epoch=5),
            "DeregisterWorker": pb.DeregisterWorkerRequest(worker_id="w", incarnation=old),
        }
        for method, request in asked.items():
            status, code, message, hint = refusal(
                lambda m=method, r=request: getattr(calls, m)(r, timeout=30)
            )
            assert (status.name, code) == ("FAILED_PRECONDITION", "stale"), method
            assert f"Incarnation {old}" in message, method
            assert hint, method
        with channel(coordinator.address) as other:
            second = RawSession(other).hello("w", old)
            assert f"Incarnation {old}" in second.wait_for("stale").reason
        assert _state(coordinator) == before


def test_stale_generation_is_refused(shared: Coordinator) -> None:
    with stub(shared.address) as calls:
        first = calls.RegisterWorker(pb.RegisterWorkerRequest(worker_id="a", job_id="generations"))
        second = calls.RegisterWorker(pb.RegisterWorkerRequest(worker_id="b", job_id="generations"))
        assert second.generation > first.generation
        for method, request in {
            "WaitBarrier": pb.WaitBarrierRequest(
                worker_id="a", generation=first.generation, barrier_id="b", expected_participants=1
            ),
            "NotifyCheckpoint": pb.NotifyCheckpointRequest(
                worker_id="a", generation=first.generation, checkpoint_id="c", step=1, path="/c"
            ),
        }.items():
            status, code, message, _ = refusal(getattr(calls, method), request, timeout=30)
            assert (status.name, code) == ("FAILED_PRECONDITION", "stale")
            assert f"Generation {first.generation}" in message
        told = calls.Heartbeat(pb.HeartbeatRequest(worker_id="a", generation=first.generation))
        assert [c.kind for c in told.pending_commands] == ["topology"]
        assert told.generation == second.generation
    assert "c" not in {c["id"] for c in shared.get("/api/checkpoints")}


def test_retried_registration_is_the_same_incarnation(shared: Coordinator) -> None:
    request = pb.RegisterWorkerRequest(
        worker_id="again", job_id="retried", registration_id=b"0123456789abcdef"
    )
    with stub(shared.address) as one, stub(shared.address) as two:
        assert one.RegisterWorker(request).incarnation == two.RegisterWorker(request).incarnation


def test_goodbye_moves_shards_at_once_and_is_no_failure(shared: Coordinator) -> None:
    with EventStream(shared.http_port) as events:
        _goodbye(shared)
    # Those of other tests, whose process has ended, may fail meanwhile.
    failed = {e.data["worker_id"] for e in events.received if e.kind == "worker_failed"}
    assert not failed & {"stays", "leaves"}


def _goodbye(shared: Coordinator) -> None:
    stays = TrainingOrchestrator(shared.address, job_id="goodbye")
    leaves = TrainingOrchestrator(shared.address, job_id="goodbye")
    try:
        stays.register_worker("stays")
        assert stays.wait_connected(30)  # Later it would learn where it stands, and not why.
        leaves.register_worker("leaves")
        stays.register_dataset("farewell", "/data", "parquet", 4_000, 1_000)
        leaves.deregister("done for today")
        assert "leaves" not in {w["id"] for w in shared.get("/api/workers")}
        assert len(stays.get_shards("farewell")) == 4
        assert eventually(lambda: "done for today" in stays.topology.reason, within_s=30)
        assert stays.topology.world_size == 1
        stays.deregister()
    finally:
        stays.close()
        leaves.close()


def test_frozen_worker_is_not_failed_before_its_heartbeat_timeout(tmp_path: Path, fleets: Fleets) -> None:
    """A stopped process answers no pings either; that must not count as a dropped connection."""
    server = Coordinator(tmp_path / "coordinator", "--heartbeat-timeout", "22").start()
    try:
        sleeper = fleets(server.address)
        sleeper.register("sleeper")
        with EventStream(server.http_port) as events:
            frozen_s = sleeper.freeze()
            failed = events.wait_for("worker_failed", within_s=60)
        assert "no heartbeat for" in failed.data["reason"]
        assert failed.at_mono_s - frozen_s > 16  # Its last heartbeat may be some seconds old when it freezes.
    finally:
        server.stop()


def _until_told(fleet: Fleet, worker: str) -> None:
    def told() -> bool:
        try:
            fleet.call(worker, "heartbeat")
        except RemoteError:
            return True
        return False

    eventually(told, within_s=30, what="it is told that it is stale")


def _state(coordinator: Coordinator) -> dict[str, object]:
    """What a refused request must leave as it was."""
    time.sleep(0.3)  # Listings may be a quarter of a second old where only soft state changed.
    workers = [
        {k: w[k] for k in ("id", "status", "incarnation", "current_step", "assigned_shards")}
        for w in coordinator.get("/api/workers")
    ]
    names = ("datasets", "checkpoints", "barriers", "tasks")
    return {"workers": workers, **{name: coordinator.get(f"/api/{name}") for name in names}}
