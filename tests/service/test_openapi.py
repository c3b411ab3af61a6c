"""The OpenAPI document is true: every answer is what it says, and nothing it allows breaks the coordinator."""

from __future__ import annotations

import contextlib
import copy
import json
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from typing import Any

import jsonschema_rs
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.core.result import Ok
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

from strata import TrainingOrchestrator
from strata.core.data.ledger import DataCommit, RankRecord
from strata.core.data.mixture_changes import board_key
from strata.rpc import coordinator_pb2 as pb
from strata.worker.outbox import MetricOutbox
from tests.service.clients import RawSession, channel, stub
from tests.service.test_mixture_routes import a_board
from tests.support import Coordinator, eventually

STREAMING = ["/api/events", "/api/logs/live"]


@pytest.fixture(scope="module")
def busy(shared: Coordinator, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Coordinator]:
    """A coordinator that has something to show on every page."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "part.jsonl").write_text("".join(f'{{"text": "sample {n}"}}\n' for n in range(1_000)))
    with stub(shared.address) as calls, channel(shared.address) as own:
        worker = TrainingOrchestrator(shared.address)
        worker.register_worker("alive", port=4000, gpu_count=1, memory_bytes=10, metadata={"zone": "a"})
        worker.register_dataset("images", str(folder), "jsonl", None, 100, metadata={"name": "Images"})
        figures = {"loss": 1.0, "account_began_s": 1.0, "training_total_s": 2.0}
        worker.heartbeat(3, 1, state="training", task="task-1", metrics=figures)
        worker.report_progress("images", 0, 0, 50)
        outbox = MetricOutbox(generation=1, started_ms=5, resumed_step=0)
        outbox.put(pb.MetricRows(names=["loss"], steps=[1, 2], times=[1.0, 2.0], values=bytes(16)))
        worker.send_metrics(outbox)
        lost = calls.RegisterWorker(pb.RegisterWorkerRequest(worker_id="lost")).incarnation
        session = RawSession(own).hello("lost", lost)
        session.wait_for("welcome")
        gpu = pb.GpuUsage(index=0, utilization_percent=50.0, memory_used_bytes=1, memory_total_bytes=2)
        session.send(heartbeat=pb.HeartbeatRequest(resources=pb.ResourceUsage(gpu_usage=[gpu])))
        session.send(logs=pb.LogBatch(entries=[pb.LogEntry(timestamp=time.time(), message="hello")]))
        eventually(lambda: shared.get("/api/logs?worker_id=lost"), within_s=30)
        session.close()
        eventually(lambda: "failed" in {w["status"] for w in shared.get("/api/workers")}, within_s=60)
        trained = RankRecord(dataset="images", epoch=0, total=1_000, rank=0).with_span(0, 100)
        data = DataCommit().next([trained], world_size=1).to_json()
        for status in ("in_progress", "completed", "failed"):
            worker.notify_checkpoint(
                f"c-{status}",
                3,
                1,
                "/c",
                1_000_000,
                status=status,
                tiers=["local"],
                duration_s=0.5,
                data=data,
            )
        worker.barrier("done", 1, participants=1)
        calls.SwapValue(pb.SwapValueRequest(key=board_key("default"), value=a_board().to_bytes()))
        eventually(lambda: shared.get("/api/goodput"), within_s=30)
        broken = pb.WaitBarrierRequest(
            worker_id="alive", barrier_id="broken", step=2, expected_participants=2, timeout_ms=100
        )
        with pytest.raises(Exception, match="timed out"):
            calls.WaitBarrier(broken, timeout=60)
        waiting = calls.WaitBarrier.future(
            pb.WaitBarrierRequest(worker_id="alive", barrier_id="waiting", expected_participants=9)
        )
        body = {
            "name": "t",
            "type": "training",
            "dataset_id": "images",
            "config": {"learning_rate": 0.1, "model": {"n_layer": 1}},
        }
        _, made = shared.post("/api/tasks", body)
        assert shared.post(f"/api/tasks/{made['task_id']}/stop", {})[0] == 200
        shared.post("/api/tasks", body)
        pages = ("workers", "datasets", "checkpoints", "barriers", "tasks", "logs")
        eventually(lambda: len(shared.get("/api/barriers")) >= 3, within_s=30)
        assert all(shared.get(f"/api/{page}") for page in pages)
        eventually(lambda: shared.get("/api/runs"), within_s=30)
        yield shared
        waiting.cancel()
        worker.deregister()
        worker.close()


@pytest.fixture(scope="module")
def document(busy: Coordinator) -> dict[str, Any]:
    found: dict[str, Any] = busy.get("/openapi.json")
    return found


def strict(document: dict[str, Any]) -> dict[str, Any]:
    """The document's schemas, with nothing allowed beyond what they name."""
    components: dict[str, Any] = copy.deepcopy(document["components"])
    for schema in components["schemas"].values():
        if "properties" in schema:
            schema["additionalProperties"] = False
    return components


def test_every_answer_is_what_the_document_says(busy: Coordinator, document: dict[str, Any]) -> None:
    task = busy.get("/api/tasks")[0]["id"]
    checked = []
    for path, methods in document["paths"].items():
        schema = methods.get("get", {}).get("responses", {}).get("200", {}).get("content", {})
        if "application/json" not in schema or not schema["application/json"].get("schema"):
            continue
        address = path.replace("{dataset_id}", "images").replace("{task_id}", task)
        address = address.replace("{job_id}", "default").replace("{run}", "default")
        address += "?name=loss" if path.endswith("/series") else ""
        try:
            answer = busy.get(address)
        except urllib.error.HTTPError as error:
            with error:
                raise AssertionError(f"{address}: {error.code} {error.read()!r}") from None
        whole = {**schema["application/json"]["schema"], "components": strict(document)}
        jsonschema_rs.Draft202012Validator(whole).validate(answer)
        checked.append(path)
    assert len(checked) >= 12, checked
    assert {"/api/dashboard", "/api/workers", "/api/datasets/{dataset_id}/shards"} <= set(checked)


def test_refusals_are_what_the_document_says(busy: Coordinator, document: dict[str, Any]) -> None:
    whole = {"$ref": "#/components/schemas/ErrorBody", "components": strict(document)}
    validator = jsonschema_rs.Draft202012Validator(whole)
    for path, body in (("/api/datasets", {}), ("/api/tasks", b"["), ("/api/nothing", {})):
        status, answer = busy.post(path, body)
        assert 400 <= status < 500
        validator.validate(answer)


def test_contract_is_in_the_document(document: dict[str, Any]) -> None:
    wanted = {
        "/api/health": "get",
        "/api/status": "get",
        "/api/workers": "get",
        "/api/datasets": "post",
        "/api/datasets/{dataset_id}/shards": "get",
        "/api/checkpoints": "get",
        "/api/barriers": "get",
        "/api/metrics": "get",
        "/metrics": "get",
        "/api/logs": "get",
        "/api/tasks": "post",
        "/api/tasks/{task_id}/stop": "post",
        "/api/tasks/{task_id}/logs": "get",
        "/api/dashboard": "get",
        "/api/events": "get",
    }
    assert {p: m for p, m in wanted.items() if m not in document["paths"].get(p, {})} == {}
    metrics = document["components"]["schemas"]["MetricsView"]["properties"]
    for name, unit in {"checkpoint_throughput": "MB/s", "barrier_latency_p99": "ms"}.items():
        assert unit in json.dumps(metrics[name]), f"the unit of {name} is not documented"


def test_answers_have_the_fields_users_were_promised(busy: Coordinator) -> None:
    promised = {
        "status": "connected address uptime version leader generation",
        "workers": "id ip port status gpu_count last_heartbeat assigned_shards current_epoch current_step "
        "current_task resources",
        "datasets": "id name path total_samples shard_size shard_count format shuffle seed registered_at",
        "checkpoints": "id step epoch size path created_at worker_id status tiers digest",
        "barriers": "id name arrived total status created_at missing",
        "metrics": "checkpoint_throughput coordinator_rps active_workers total_workers barrier_latency_p99 "
        "shard_assignment_time",
        "logs": "id timestamp level message source task_id worker_id",
        "tasks": "id name type status worker_ids dataset_id started_at completed_at progress",
        "dashboard": "coordinator workers datasets checkpoints barriers metrics tasks logs",
    }
    for page, names in promised.items():
        answer = busy.get(f"/api/{page}")
        for row in answer if isinstance(answer, list) else [answer]:
            assert set(names.split()) <= set(row), page
    alive = next(w for w in busy.get("/api/workers") if w["id"] == "alive")
    used = alive["resources"]
    assert {"cpu_percent", "memory_used_bytes", "gpus", "disk_read_bytes", "network_rx_bytes"} <= set(used)
    assert {c["status"] for c in busy.get("/api/checkpoints")} == {"in_progress", "completed", "failed"}
    assert {b["status"] for b in busy.get("/api/barriers")} == {"waiting", "complete", "broken"}
    assert all(isinstance(value, int | float) for value in busy.get("/api/metrics").values()), "all measured"


def test_times_are_unix_seconds(busy: Coordinator) -> None:
    now_s = time.time()
    dashboard = busy.get("/api/dashboard")
    found = [
        dashboard["coordinator"]["started_at"],
        *(w["last_heartbeat"] for w in dashboard["workers"]),
        *(w["joined_at"] for w in dashboard["workers"]),
        *(d["registered_at"] for d in dashboard["datasets"]),
        *(c["created_at"] for c in dashboard["checkpoints"]),
        *(b["created_at"] for b in dashboard["barriers"]),
        *(t["created_at"] for t in dashboard["tasks"]),
        *(entry["timestamp"] for entry in dashboard["logs"]),
    ]
    assert len(found) > 10
    assert all(now_s - 600 < at_s < now_s + 60 for at_s in found)


def test_prometheus_page_is_in_its_text_format(busy: Coordinator) -> None:
    from prometheus_client.parser import text_string_to_metric_families

    with urllib.request.urlopen(busy.url + "/metrics", timeout=30) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        text = answer.read().decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    samples = {s.labels.get("status"): s.value for s in families["strata_workers"].samples}
    assert samples["failed"] == 1
    assert families["strata_barrier_seconds"].type == "histogram"
    assert families["strata_grpc_requests"].samples


@pytest.mark.parametrize(
    "examples", [8, pytest.param(200, marks=[pytest.mark.slow, pytest.mark.timeout(900)])]
)
def test_generated_requests_break_nothing(busy: Coordinator, examples: int) -> None:
    checks = [
        not_a_server_error,
        status_code_conformance,
        content_type_conformance,
        response_headers_conformance,
        response_schema_conformance,
        negative_data_rejection,
        unsupported_method,
    ]
    schema = schemathesis.openapi.from_url(busy.url + "/openapi.json").exclude(path=STREAMING)
    called: Counter[str] = Counter()
    for found in schema.get_all_operations():
        assert isinstance(found, Ok)
        operation = found.ok()
        for mode in GenerationMode:
            strategy = operation.as_strategy(generation_mode=mode)

            @settings(
                max_examples=examples,
                deadline=None,
                database=None,
                derandomize=True,
                suppress_health_check=list(HealthCheck),
            )
            @given(case=strategy)
            def run(case: Any) -> None:
                called[case.method + " " + case.path] += 1
                case.call_and_validate(checks=checks, timeout=30)

            with contextlib.suppress(Unsatisfiable):  # Some calls take nothing that could be wrong.
                run()
    assert {"POST /api/datasets", "POST /api/tasks", "GET /api/logs"} <= called.keys()
    assert called["POST /api/datasets"] >= examples
    assert "Traceback" not in "".join(busy.output)


def test_shard_plan_is_shown_a_part_at_a_time(busy: Coordinator) -> None:
    body = {"dataset_id": "many", "path": "/m", "format": "f", "total_samples": 25_000, "shard_size": 1}
    assert busy.post("/api/datasets", body)[0] == 201
    first = busy.get("/api/datasets/many/shards")
    assert first["shard_count"] == 25_000
    assert [first["shards"][0]["id"], first["shards"][-1]["id"]] == [0, 9_999]
    rest = busy.get("/api/datasets/many/shards?offset=24990&limit=100")["shards"]
    assert [shard["id"] for shard in rest] == list(range(24_990, 25_000))
