"""Nothing anyone sends over gRPC gives a traceback or changes anything it should not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from strata.rpc import coordinator_pb2 as pb
from tests.service.clients import RawSession, channel, raw_call, refusal, stub
from tests.service.quiet import state
from tests.support import Coordinator, eventually

COORDINATOR_ENV = {"STRATA_DISCONNECT_GRACE": "60"}
"""So that a worker whose session was refused is not failed before its next."""
HUGE = "n" * 10_000_000
BIGGEST = 2**64 - 1


@pytest.fixture
def calls(shared: Coordinator) -> Iterator[Any]:
    with stub(shared.address) as made:
        made.RegisterWorker(pb.RegisterWorkerRequest(worker_id="known"))
        made.RegisterDataset(dataset())
        yield made


def worker(**values: Any) -> pb.RegisterWorkerRequest:
    return pb.RegisterWorkerRequest(**{"worker_id": "w", **values})


def dataset(**values: Any) -> pb.RegisterDatasetRequest:
    plain = {"dataset_id": "d", "path": "/d", "format": "parquet", "total_samples": 100, "shard_size": 10}
    return pb.RegisterDatasetRequest(**{**plain, **values})


def barrier(**values: Any) -> pb.WaitBarrierRequest:
    return pb.WaitBarrierRequest(**{"worker_id": "known", "barrier_id": "b", "timeout_ms": 100, **values})


def checkpoint(**values: Any) -> pb.NotifyCheckpointRequest:
    plain = {"worker_id": "known", "checkpoint_id": "c", "step": 1, "path": "/c"}
    return pb.NotifyCheckpointRequest(**{**plain, **values})


def reconcile(**values: Any) -> pb.ReconcileCheckpointsRequest:
    return pb.ReconcileCheckpointsRequest(**{"worker_id": "known", **values})


def beat(**values: Any) -> pb.HeartbeatRequest:
    return pb.HeartbeatRequest(**{"worker_id": "known", **values})


def shards(**values: Any) -> pb.GetDataShardRequest:
    return pb.GetDataShardRequest(**{"worker_id": "known", "dataset_id": "d", **values})


def recovery(**values: Any) -> pb.ReportRecoveryRequest:
    plain = {"worker_id": "known", "phases_s": {"detect": 1.0}, "tier": "memory"}
    return pb.ReportRecoveryRequest(**{**plain, **values})


MANY = {str(n): "" for n in range(65)}

INVALID = {
    "empty worker": ("RegisterWorker", worker(worker_id="")),
    "blank worker": ("RegisterWorker", worker(worker_id=" \t ")),
    "control characters": ("RegisterWorker", worker(worker_id="a\x1b[31mb")),
    "10 MB worker name": ("RegisterWorker", worker(worker_id=HUGE)),
    "10 MB host": ("RegisterWorker", worker(hostname=HUGE)),
    "10 MB job": ("RegisterWorker", worker(job_id=HUGE)),
    "port": ("RegisterWorker", worker(port=65_536)),
    "gpus": ("RegisterWorker", worker(gpu_count=2**32 - 1)),
    "memory": ("RegisterWorker", worker(memory_bytes=BIGGEST)),
    "metadata value": ("RegisterWorker", worker(metadata={"k": HUGE})),
    "metadata key": ("RegisterWorker", worker(metadata={"": "v"})),
    "metadata count": ("RegisterWorker", worker(metadata=MANY)),
    "10 MB run": ("RegisterWorker", worker(run_id=HUGE)),
    "NUL in run": ("RegisterWorker", worker(run_id="a\0b")),
    "generation of a run": ("RegisterWorker", worker(run_generation=BIGGEST)),
    "empty dataset": ("RegisterDataset", dataset(dataset_id="")),
    "10 MB dataset name": ("RegisterDataset", dataset(dataset_id=HUGE)),
    "empty path": ("RegisterDataset", dataset(dataset_id="e", path="")),
    "empty format": ("RegisterDataset", dataset(dataset_id="e", format="")),
    "no samples": ("RegisterDataset", dataset(dataset_id="e", path="/nowhere/at/all", total_samples=0)),
    "too many samples": ("RegisterDataset", dataset(dataset_id="e", total_samples=BIGGEST)),
    "too many shards": ("RegisterDataset", dataset(dataset_id="e", total_samples=2**50, shard_size=1)),
    "shard size": ("RegisterDataset", dataset(dataset_id="e", shard_size=BIGGEST)),
    "NUL in path": ("RegisterDataset", dataset(dataset_id="e", path="/a\0b")),
    "empty barrier": ("WaitBarrier", barrier(barrier_id="")),
    "10 MB barrier name": ("WaitBarrier", barrier(barrier_id=HUGE)),
    "barrier step": ("WaitBarrier", barrier(step=BIGGEST)),
    "participants": ("WaitBarrier", barrier(expected_participants=2**32 - 1)),
    "barrier time-out": ("WaitBarrier", barrier(timeout_ms=BIGGEST)),
    "empty checkpoint": ("NotifyCheckpoint", checkpoint(checkpoint_id="")),
    "10 MB checkpoint name": ("NotifyCheckpoint", checkpoint(checkpoint_id=HUGE)),
    "10 MB checkpoint path": ("NotifyCheckpoint", checkpoint(path=HUGE)),
    "no checkpoint path": ("NotifyCheckpoint", checkpoint(path="")),
    "checkpoint step": ("NotifyCheckpoint", checkpoint(step=BIGGEST)),
    "checkpoint epoch": ("NotifyCheckpoint", checkpoint(epoch=BIGGEST)),
    "checkpoint size": ("NotifyCheckpoint", checkpoint(size_bytes=BIGGEST)),
    "negative duration": ("NotifyCheckpoint", checkpoint(duration_s=-1.0)),
    "NaN duration": ("NotifyCheckpoint", checkpoint(duration_s=float("nan"))),
    "infinite duration": ("NotifyCheckpoint", checkpoint(duration_s=float("inf"))),
    "checkpoint status": ("NotifyCheckpoint", checkpoint(status=77)),
    "data is no JSON": ("NotifyCheckpoint", checkpoint(data_json="{")),
    "data is no record": ("NotifyCheckpoint", checkpoint(data_json='{"a": 1}')),
    "deep data": ("NotifyCheckpoint", checkpoint(data_json="[" * 100_000)),
    "10 MB data": ("NotifyCheckpoint", checkpoint(data_json='"' + HUGE + '"')),
    "too many tiers": ("NotifyCheckpoint", checkpoint(tiers=["t"] * 100)),
    "10 MB run of a checkpoint": ("NotifyCheckpoint", checkpoint(run_id=HUGE)),
    "run generation": ("NotifyCheckpoint", checkpoint(run_generation=BIGGEST)),
    "saved generation": ("NotifyCheckpoint", checkpoint(saved_generation=BIGGEST)),
    "10 MB successor": ("NotifyCheckpoint", checkpoint(succeeded_by=HUGE)),
    "empty checkpoint that exists": ("ReconcileCheckpoints", reconcile(present=[""])),
    "10 MB checkpoint that exists": ("ReconcileCheckpoints", reconcile(present=[HUGE])),
    "too many that exist": ("ReconcileCheckpoints", reconcile(present=["c"] * 100_001)),
    "reconciled for another job": ("ReconcileCheckpoints", reconcile(job_id="not mine")),
    "epoch of shards": ("GetDataShard", shards(epoch=BIGGEST)),
    "10 MB state": ("Heartbeat", beat(status=pb.WorkerStatus(state=HUGE))),
    "10 MB task": ("Heartbeat", beat(status=pb.WorkerStatus(current_task=HUGE))),
    "heartbeat step": ("Heartbeat", beat(status=pb.WorkerStatus(current_step=BIGGEST))),
    "heartbeat epoch": ("Heartbeat", beat(status=pb.WorkerStatus(current_epoch=BIGGEST))),
    "NaN cpu": ("Heartbeat", beat(resources=pb.ResourceUsage(cpu_percent=float("nan")))),
    "infinite cpu": ("Heartbeat", beat(resources=pb.ResourceUsage(cpu_percent=float("inf")))),
    "memory used": ("Heartbeat", beat(resources=pb.ResourceUsage(memory_used_bytes=BIGGEST))),
    "NaN gpu": (
        "Heartbeat",
        beat(resources=pb.ResourceUsage(gpu_usage=[pb.GpuUsage(utilization_percent=float("nan"))])),
    ),
    "too many metrics": (
        "Heartbeat",
        beat(status=pb.WorkerStatus(metrics={str(n): 1.0 for n in range(100)})),
    ),
    "10 MB metric name": ("Heartbeat", beat(status=pb.WorkerStatus(metrics={HUGE: 1.0}))),
    "empty key": ("SwapValue", pb.SwapValueRequest(key="")),
    "10 MB key": ("SwapValue", pb.SwapValueRequest(key=HUGE)),
    "10 MB value": ("SwapValue", pb.SwapValueRequest(key="k", value=HUGE.encode())),
    "NaN phase": ("ReportRecovery", recovery(phases_s={"detect": float("nan")})),
    "infinite phase": ("ReportRecovery", recovery(phases_s={"detect": float("inf")})),
    "negative phase": ("ReportRecovery", recovery(phases_s={"detect": -1.0})),
    "10 MB phase name": ("ReportRecovery", recovery(phases_s={HUGE: 1.0})),
    "too many phases": ("ReportRecovery", recovery(phases_s={str(n): 1.0 for n in range(1_000)})),
    "resumed step": ("ReportRecovery", recovery(resumed_step=BIGGEST)),
    "10 MB tier": ("ReportRecovery", recovery(tier=HUGE)),
    "10 MB recovery reason": ("ReportRecovery", recovery(reason=HUGE)),
    "10 MB reason": ("DeregisterWorker", pb.DeregisterWorkerRequest(worker_id="known", reason=HUGE)),
}

UNKNOWN = {
    "heartbeat": ("Heartbeat", beat(worker_id="nobody")),
    "heartbeat of a 10 MB name": ("Heartbeat", beat(worker_id=HUGE)),
    "goodbye": ("DeregisterWorker", pb.DeregisterWorkerRequest(worker_id="nobody")),
    "barrier": ("WaitBarrier", barrier(worker_id="nobody")),
    "checkpoint": ("NotifyCheckpoint", checkpoint(worker_id="nobody")),
    "shards of nobody": ("GetDataShard", shards(worker_id="nobody")),
    "shards of nothing": ("GetDataShard", shards(dataset_id="nothing")),
    "latest": ("GetLatestCheckpoint", pb.GetLatestCheckpointRequest(worker_id="nobody")),
    "reconciling": ("ReconcileCheckpoints", reconcile(worker_id="nobody")),
    "removal": (
        "NotifyCheckpoint",
        checkpoint(checkpoint_id="none", status=pb.CHECKPOINT_STATUS_REMOVED),
    ),
}


def test_values_that_cannot_be_right_are_refused_and_change_nothing(shared: Coordinator, calls: Any) -> None:
    before = state(shared)
    for name, (method, request) in INVALID.items():
        status, code, message, hint = refusal(getattr(calls, method), request, timeout=30)
        assert (status.name, code) == ("INVALID_ARGUMENT", "invalid_argument"), f"{name}: {status} {message}"
        assert hint, name
        assert len(message) < 1_000, f"{name}: a message quotes what it was sent in full"
    assert state(shared) == before


def test_unknown_names_are_not_found(shared: Coordinator, calls: Any) -> None:
    before = state(shared)
    for name, (method, request) in UNKNOWN.items():
        status, code, message, hint = refusal(getattr(calls, method), request, timeout=30)
        assert (status.name, code) == ("NOT_FOUND", "not_found"), f"{name}: {status} {message}"
        assert hint, name
        assert len(message) < 1_000, name
    assert state(shared) == before


def test_same_dataset_is_accepted_and_a_different_one_is_a_conflict(shared: Coordinator, calls: Any) -> None:
    before = state(shared)
    assert calls.RegisterDataset(dataset()).created is False
    others: dict[str, Any] = {
        "path": "/e",
        "format": "csv",
        "total_samples": 101,
        "shard_size": 11,
        "shuffle": True,
        "seed": 1,
        "metadata": {"a": "b"},
    }
    for key, value in others.items():
        status, code, message, hint = refusal(calls.RegisterDataset, dataset(**{key: value}), timeout=30)
        assert (status.name, code) == ("ALREADY_EXISTS", "conflict")
        assert key in message
        assert hint
    assert state(shared) == before


@pytest.mark.parametrize(
    "method", ["RegisterWorker", "Heartbeat", "RegisterDataset", "WaitBarrier", "NotifyCheckpoint"]
)
@pytest.mark.parametrize(
    "body",
    [b"\x0a\x02\xff\xfe", b"\x0a\xff\xff\xff\xff\x0f", b"\xff" * 64, b"\x0a\x05abc"],
    ids=["invalid UTF-8", "length past the end", "noise", "cut short"],
)
def test_bytes_that_are_no_message_are_refused(shared: Coordinator, method: str, body: bytes) -> None:
    with channel(shared.address) as opened:
        status, code, message, hint = refusal(lambda: raw_call(opened, method)(body, timeout=30))
    assert (status.name, code) == ("INVALID_ARGUMENT", "invalid_argument"), message
    assert hint
    assert _no_traceback(shared)


def test_session_with_bytes_that_are_no_message_ends_with_a_reason(shared: Coordinator, calls: Any) -> None:
    with channel(shared.address) as opened:
        stream = opened.stream_stream(
            "/strata.v1.Coordinator/Session", request_serializer=bytes, response_deserializer=bytes
        )
        hello = pb.WorkerMessage(hello=pb.Hello(worker_id="known")).SerializeToString()
        for bodies in ([b"\x0a\x04\x0a\x02\xff\xfe"], [hello, b"\xff" * 20]):
            with pytest.raises(grpc.RpcError) as refused:
                list(stream(iter(bodies), timeout=30))
            assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT, refused.value
    assert _no_traceback(shared)


def test_session_refuses_values_that_cannot_be_right_without_calling_the_worker_stale(
    shared: Coordinator, calls: Any
) -> None:
    before = state(shared)
    too_much = [pb.ShardProgress(dataset_id="d", shard_id=n) for n in range(50_000)]
    for message in (
        {"heartbeat": beat(resources=pb.ResourceUsage(cpu_percent=float("nan")))},
        {"heartbeat": beat(status=pb.WorkerStatus(current_step=BIGGEST))},
        {"progress": pb.Progress(shards=too_much)},
    ):
        with channel(shared.address) as opened:
            session = RawSession(opened).hello("known")
            session.wait_for("welcome")
            session.send(**message)
            assert session.ended.wait(30)
            assert session.error is not None
            assert session.error.code() == grpc.StatusCode.INVALID_ARGUMENT
            assert [m for m in session.received if m.HasField("stale")] == []
    calls.Heartbeat(beat(), timeout=30)
    assert state(shared)["workers"] == before["workers"]


def test_hello_must_come_first_and_name_a_known_worker(shared: Coordinator) -> None:
    with channel(shared.address) as opened:
        session = RawSession(opened)
        session.send(heartbeat=beat())
        assert session.ended.wait(30)
        assert session.error is not None
        assert session.error.code() == grpc.StatusCode.INVALID_ARGUMENT
        stranger = RawSession(opened).hello("stranger")
        assert "stranger" in stranger.wait_for("stale").reason
        assert stranger.ended.wait(30)


def test_message_over_the_limit_is_refused_by_its_size(shared: Coordinator, calls: Any) -> None:
    status, _, message, _ = refusal(
        lambda: calls.RegisterWorker(worker(worker_id="n" * 40_000_000), timeout=30)
    )
    assert status == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "larger than max" in message
    assert calls.Heartbeat(beat(), timeout=30).acknowledged


def test_unknown_method_is_unimplemented(shared: Coordinator) -> None:
    with channel(shared.address) as opened:
        status, *_ = refusal(lambda: raw_call(opened, "Shutdown")(b"", timeout=30))
    assert status == grpc.StatusCode.UNIMPLEMENTED


def test_unknown_fields_are_left_for_newer_versions(shared: Coordinator) -> None:
    body = beat().SerializeToString() + b"\xba\x3e\x03abc"  # field 999
    with channel(shared.address) as opened, stub(shared.address) as calls:
        calls.RegisterWorker(pb.RegisterWorkerRequest(worker_id="known"))
        assert raw_call(opened, "Heartbeat")(body, timeout=30)


def test_huge_data_position_is_refused_and_the_coordinator_lives(shared: Coordinator, calls: Any) -> None:
    """A few bytes that describe more spans than fit in memory."""
    import json

    from strata.core.data.ledger import DataCommit, RankRecord

    record = DataCommit().next(
        [RankRecord(dataset="d", epoch=0, total=100, rank=0).with_span(0, 10)], world_size=1
    )
    plain = record.to_json()
    for run in ([0, 1, 2, 10**12], [0, 2**62, 1, 1], [2**62, 1, 1, 1], [-5, 1, 1, 1], [0, -1, 1, 1]):
        plain["epochs"][0]["ranks"] = {"0": [run]}
        status, code, message, _ = refusal(
            calls.NotifyCheckpoint, checkpoint(checkpoint_id="huge", data_json=json.dumps(plain)), timeout=30
        )
        assert (status.name, code) == ("INVALID_ARGUMENT", "invalid_argument"), message
    assert calls.Heartbeat(beat(), timeout=30).acknowledged


def test_every_kind_of_log_line_is_shown_as_data(shared: Coordinator, calls: Any) -> None:
    lines = [
        pb.LogEntry(timestamp=float("nan"), level="no such level", message="bell \x07 and \x1b[31mred"),
        pb.LogEntry(timestamp=float("inf"), message="x" * 100_000, source="s" * 10_000),
        pb.LogEntry(timestamp=-1e300, message="marked <script>", task_id="t" * 10_000),
    ]
    with channel(shared.address) as opened:
        session = RawSession(opened).hello("known")
        session.send(logs=pb.LogBatch(entries=lines, dropped=3))
        eventually(lambda: len(shared.get("/api/logs?worker_id=known")) >= 4, within_s=30)
        session.close()
    for entry in shared.get("/api/logs?worker_id=known"):
        assert entry["level"] in ("debug", "info", "warn", "error")
        assert isinstance(entry["timestamp"], float)
        assert 0 <= entry["timestamp"] < 1e11
        assert "\x1b" not in entry["message"]
        assert len(entry["message"]) < 9_000
        assert len(entry["source"]) <= 64
        assert len(entry["task_id"] or "") <= 256


def _no_traceback(coordinator: Coordinator) -> bool:
    return "Traceback" not in "".join(coordinator.output)
