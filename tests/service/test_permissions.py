"""Every HTTP route and gRPC method, by every role, for one's own job and for another's."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import grpc
import pytest
from fastapi.routing import APIRoute

from strata.coordinator.http.app import ROUTERS
from strata.rpc import coordinator_pb2 as pb
from strata.rpc.methods import SERVICE
from tests.service.clients import channel, stub
from tests.support import Coordinator

ROLES = ("viewer", "worker", "operator", "admin")
OWN, FOREIGN = "own-job", "foreign-job"


@dataclass(frozen=True)
class Expected:
    """Who may call: `role` or more; those bound to a job only where `about` is 'job', and theirs."""

    role: str | None
    about: str = "cluster"


ROUTES = {
    "GET /api/health": Expected(None),
    "POST /api/session": Expected(None),
    "GET /api/session": Expected("viewer", "nobody"),
    "DELETE /api/session": Expected("viewer", "nobody"),
    "POST /api/session/links": Expected("viewer", "nobody"),
    "GET /api/recipes": Expected("viewer", "nobody"),
    "GET /docs": Expected("viewer", "nobody"),
    "GET /api/tokens": Expected("admin"),
    "POST /api/tokens": Expected("admin"),
    "DELETE /api/tokens/{token_id}": Expected("admin"),
    "GET /api/audit-log": Expected("admin"),
    "GET /api/status": Expected("viewer"),
    "GET /api/dashboard": Expected("viewer"),
    "GET /api/events": Expected("viewer"),
    "GET /api/events/recent": Expected("viewer"),
    "GET /api/workers": Expected("viewer"),
    "GET /api/barriers": Expected("viewer"),
    "GET /api/recoveries": Expected("viewer"),
    "GET /api/incidents": Expected("viewer"),
    "GET /api/notifications": Expected("viewer"),
    "GET /api/notifications/channels": Expected("viewer"),
    "POST /api/notifications/test": Expected("operator"),
    "GET /api/quarantine": Expected("viewer"),
    "POST /api/quarantine": Expected("operator"),
    "DELETE /api/quarantine/{host}": Expected("operator"),
    "GET /api/agents": Expected("viewer"),
    "GET /api/drains": Expected("viewer"),
    "POST /api/drains": Expected("operator"),
    "DELETE /api/drains/{host}": Expected("operator"),
    "GET /api/machines": Expected("viewer"),
    "GET /api/datasets": Expected("viewer"),
    "POST /api/datasets": Expected("operator"),
    "DELETE /api/datasets/{dataset_id}": Expected("operator"),
    "GET /api/datasets/{dataset_id}/shards": Expected("viewer"),
    "GET /api/datasets/{dataset_id}/audit": Expected("viewer"),
    "GET /api/datasets/{dataset_id}/preview": Expected("viewer"),
    "GET /api/checkpoints": Expected("viewer"),
    "POST /api/checkpoints/{checkpoint_id}/verify": Expected("operator"),
    "GET /api/metrics": Expected("viewer"),
    "GET /metrics": Expected("viewer"),
    "GET /api/metrics/history": Expected("viewer"),
    "GET /api/goodput": Expected("viewer"),
    "GET /api/jobs/{job_id}/goodput": Expected("viewer", "job"),
    "GET /api/jobs/{job_id}/mixture": Expected("viewer", "job"),
    "GET /api/jobs/{job_id}/safety": Expected("viewer", "job"),
    "POST /api/jobs/{job_id}/mixture": Expected("operator", "job"),
    "GET /api/tasks": Expected("viewer"),
    "POST /api/tasks": Expected("operator"),
    "GET /api/tasks/{task_id}": Expected("viewer", "job"),
    "POST /api/tasks/{task_id}/stop": Expected("operator", "job"),
    "POST /api/tasks/{task_id}/restart": Expected("operator", "job"),
    "GET /api/tasks/{task_id}/logs": Expected("viewer", "job"),
    "GET /api/tasks/{task_id}/goodput": Expected("viewer", "job"),
    "GET /api/runs": Expected("viewer"),
    "GET /api/runs/{run}/cost": Expected("viewer"),
    "GET /api/runs/{run}": Expected("viewer"),
    "POST /api/runs/{run}/notes": Expected("operator"),
    "GET /api/runs/{run}/metrics": Expected("viewer"),
    "GET /api/runs/{run}/metrics/series": Expected("viewer"),
    "GET /api/logs": Expected("viewer"),
    "GET /api/logs/live": Expected("viewer"),
}


def served() -> set[str]:
    return {
        f"{method} {route.path}"
        for router in ROUTERS
        for route in router.routes
        if isinstance(route, APIRoute)
        for method in (route.methods or set()) - {"HEAD"}
    }


def test_every_route_is_in_the_table() -> None:
    assert served() == ROUTES.keys() & served(), "a route that nobody has decided about"
    assert ROUTES.keys() == served()


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Coordinator]:
    folder = tmp_path_factory.mktemp("permissions")
    # Workers only register here: none of them is failed for silence between two tests.
    env = {"STRATA_TOKEN": "the-admin-of-this-test", "STRATA_HEARTBEAT_TIMEOUT": "600"}
    server = Coordinator(folder / "data", "--launcher", "none", env=env).start()
    yield server
    server.stop()
    assert "Traceback" not in "".join(server.output)


@pytest.fixture(scope="module")
def tokens(guarded: Coordinator) -> dict[tuple[str, str | None], str]:
    """By role and job."""
    found = {}
    for role in ROLES:
        for job in (None, OWN, FOREIGN) if role != "admin" else (None,):
            body = {"name": f"{role} of {job}", "role": role, "job_id": job}
            status, made = guarded.post("/api/tokens", body, token="the-admin-of-this-test")
            assert status == 201
            found[role, job] = made["token"]
    return found


@pytest.mark.parametrize("route", sorted(served()))
def test_route_is_for_its_role_and_its_job_alone(
    guarded: Coordinator, tokens: dict[tuple[str, str | None], str], route: str
) -> None:
    expected = ROUTES[route]
    method, _, path = route.partition(" ")
    if path in ("/api/events", "/api/logs/live"):
        method = "HEAD"  # They have no end.
    path = path.replace("{task_id}", OWN).replace("{job_id}", OWN)
    path = path.replace("{dataset_id}", "d").replace("{checkpoint_id}", "c").replace("{token_id}", "none")
    status, answer = guarded.call(method, path, {} if method == "POST" else None)
    assert (status == 401) == (expected.role is not None), "without a token"
    for (role, job), token in tokens.items():
        status, answer = guarded.call(method, path, {} if method == "POST" else None, token=token)
        enough = expected.role is None or ROLES.index(role) >= ROLES.index(expected.role)
        ours = job is None or expected.role is None or expected.about == "nobody"
        ours = ours or (expected.about == "job" and job == OWN)
        assert (status == 403) == (not (enough and ours)), f"{role} of {job}: {status} {answer}"
        assert status not in (401, 500)


def test_log_and_history_can_be_asked_for_one_job(
    guarded: Coordinator, tokens: dict[tuple[str, str | None], str]
) -> None:
    own = tokens["viewer", OWN]
    assert guarded.call("GET", f"/api/logs?task_id={OWN}", token=own)[0] == 200
    assert guarded.call("GET", f"/api/runs/r?job_id={OWN}", token=own)[0] == 404
    assert guarded.call("GET", f"/api/runs/r/metrics?job_id={OWN}", token=own)[0] == 404
    writer, viewer = tokens["operator", OWN], own
    note = {"notes": "x"}
    assert guarded.call("POST", f"/api/runs/r/notes?job_id={OWN}", note, token=writer)[0] == 404
    assert guarded.call("POST", f"/api/runs/r/notes?job_id={FOREIGN}", note, token=writer)[0] == 403
    assert guarded.call("POST", f"/api/runs/r/notes?job_id={OWN}", note, token=viewer)[0] == 403
    assert guarded.call("GET", f"/api/runs/r/metrics/series?name=a&job_id={OWN}", token=own)[0] == 404
    assert guarded.call("GET", f"/api/incidents?run={OWN}", token=own)[0] == 200
    for path in (
        f"/api/logs?task_id={FOREIGN}",
        f"/api/logs?task_id={OWN}&task_id={FOREIGN}",
        "/api/logs",
        f"/api/logs?task_id={OWN}&task_id=",
        f"/api/logs?task_id=&task_id={OWN}",
        f"/api/metrics/history?job_id={FOREIGN}",
        f"/api/runs/r?job_id={FOREIGN}",
        f"/api/runs/r/metrics?job_id={FOREIGN}",
        f"/api/runs/r/metrics?job_id={OWN}&job_id={FOREIGN}",
        f"/api/runs/r/metrics/series?name=a&job_id={FOREIGN}",
        f"/api/runs?job_id={OWN}",
        f"/api/incidents?run={FOREIGN}",
        f"/api/incidents?run={OWN}&run={FOREIGN}",
        f"/api/tasks/{FOREIGN}/logs",
        f"/api/tasks/{OWN.replace('-', '%252D')}",
    ):
        assert guarded.call("GET", path, token=own)[0] == 403, path


# --- gRPC -----------------------------------------------------------------------------------------------------

ABOUT_A_WORKER: dict[str, Any] = {
    "Heartbeat": pb.HeartbeatRequest,
    "GetDataShard": pb.GetDataShardRequest,
    "WaitBarrier": pb.WaitBarrierRequest,
    "NotifyCheckpoint": pb.NotifyCheckpointRequest,
    "ReconcileCheckpoints": pb.ReconcileCheckpointsRequest,
    "GetLatestCheckpoint": pb.GetLatestCheckpointRequest,
    "ReportRecovery": pb.ReportRecoveryRequest,
    "DeregisterWorker": pb.DeregisterWorkerRequest,
}
OTHERS = {
    "RegisterWorker",
    "RegisterDataset",
    "ListDatasets",
    "ReadValue",
    "SwapValue",
    "ReportFailure",
    "AdmitHost",
    "AnnounceDrain",
    "ReportHandover",
    "ReportHealth",
    "Presence",
    "Session",
}


def test_every_method_is_in_the_table() -> None:
    assert {method.name for method in SERVICE.methods} == {*ABOUT_A_WORKER, *OTHERS}


def metadata(token: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {token}"),)


@pytest.fixture(scope="module")
def workers(guarded: Coordinator, tokens: dict[tuple[str, str | None], str]) -> dict[str, int]:
    """Incarnations of one worker in each job, by job; its id is the job's name."""
    with stub(guarded.address) as calls:
        return {
            job: calls.RegisterWorker(
                pb.RegisterWorkerRequest(worker_id=job, job_id=job),
                metadata=metadata(tokens["worker", job]),
                timeout=30,
            ).incarnation
            for job in (OWN, FOREIGN)
        }


def refused(call: Any) -> str:
    """The code of a refusal, empty for none."""
    try:
        call()
    except grpc.RpcError as error:
        trailers: Any = dict(cast("list[tuple[str, Any]]", error.trailing_metadata() or ()))
        return f"{error.code().name} {trailers.get('strata-code', '')}"
    return ""


@pytest.mark.parametrize("method", sorted({*ABOUT_A_WORKER} - {"WaitBarrier"}))
def test_method_is_for_ones_own_worker_alone(
    guarded: Coordinator, tokens: dict[tuple[str, str | None], str], workers: dict[str, int], method: str
) -> None:
    kind = ABOUT_A_WORKER[method]
    fields = {field.name for field in kind.DESCRIPTOR.fields}

    def request(job: str, incarnation: int) -> Any:
        given = {"worker_id": job, "incarnation": incarnation}
        return kind(**{name: value for name, value in given.items() if name in fields})

    forbidden = "PERMISSION_DENIED forbidden"
    with stub(guarded.address) as calls:
        call = getattr(calls, method)
        foreign = request(FOREIGN, workers[FOREIGN])
        for role in ("viewer", "worker", "operator"):
            own_token = metadata(tokens[role, OWN])
            assert refused(partial(call, foreign, metadata=own_token, timeout=30)) == forbidden, role
        assert refused(lambda: call(request(OWN, workers[OWN]), timeout=30)).startswith("UNAUTHENTICATED")
        viewer = metadata(tokens["viewer", None])
        assert refused(lambda: call(request(OWN, workers[OWN]), metadata=viewer, timeout=30)) == forbidden
        own = metadata(tokens["worker", OWN])
        if "incarnation" in fields:
            assert refused(lambda: call(request(OWN, 0), metadata=own, timeout=30)) == forbidden, "who is it?"
        if method != "DeregisterWorker":  # Which would end the worker for the other tests.
            answer = refused(lambda: call(request(OWN, workers[OWN]), metadata=own, timeout=30))
            assert "forbidden" not in answer


def test_a_failure_is_reported_for_ones_own_job_alone(
    guarded: Coordinator, tokens: dict[tuple[str, str | None], str], workers: dict[str, int]
) -> None:
    """Also where it names another's process, or says nothing of whose it is."""
    own, viewer = metadata(tokens["worker", OWN]), metadata(tokens["viewer", OWN])
    ended = pb.WorkerFailure(rank=0, host="here", pid=4711, exit_code=-9)
    foreign = pb.ReportFailureRequest(failures=[ended], job_id=FOREIGN)
    silent = pb.ReportFailureRequest(failures=[ended], launch=FOREIGN)
    with stub(guarded.address) as calls:
        for request, token in ((foreign, own), (silent, viewer)):
            code = refused(partial(calls.ReportFailure, request, metadata=token, timeout=30))
            assert code == "PERMISSION_DENIED forbidden"
        assert refused(lambda: calls.ReportFailure(silent, timeout=30)).startswith("UNAUTHENTICATED")
        assert calls.ReportFailure(silent, metadata=own, timeout=30).acknowledged
    foreign_viewer = tokens["viewer", FOREIGN]
    assert guarded.call("GET", f"/api/incidents?run={FOREIGN}", token=foreign_viewer)[1] == []
    found = guarded.call("GET", f"/api/incidents?run={OWN}", token="the-admin-of-this-test")[1]
    assert [(one["run"], one["rank"], one["pid"]) for one in found] == [(OWN, 0, 4711)]


def test_an_agent_says_nothing_about_machines_that_its_job_is_not_on(
    guarded: Coordinator, tokens: dict[tuple[str, str | None], str], workers: dict[str, int]
) -> None:
    own = metadata(tokens["worker", OWN])
    forbidden = "PERMISSION_DENIED forbidden"
    drain = pb.AnnounceDrainRequest(host="somebody-elses", within_s=30, reason="r", source="aws")
    left = pb.ReportHandoverRequest(host="somebody-elses", node="n", where="durable")
    foreign = pb.ReportHandoverRequest(host="", node="n", job_id=FOREIGN)
    unfit = pb.ReportHealthRequest(host="somebody-elses", failed={"gpu": "wrong"}, clock=time.time())
    with stub(guarded.address) as calls:
        assert refused(partial(calls.AnnounceDrain, drain, metadata=own, timeout=30)) == forbidden
        assert refused(partial(calls.ReportHandover, left, metadata=own, timeout=30)) == forbidden
        assert refused(partial(calls.ReportHandover, foreign, metadata=own, timeout=30)) == forbidden
        # It is told what it is, and nobody else is.
        assert calls.ReportHealth(unfit, metadata=own, timeout=30).unfit == "gpu: wrong"
        for call, request in ((calls.AnnounceDrain, drain), (calls.ReportHealth, unfit)):
            viewer = metadata(tokens["viewer", None])
            assert refused(partial(call, request, metadata=viewer, timeout=30)) == forbidden
    token = "the-admin-of-this-test"
    assert guarded.call("GET", "/api/drains", token=token)[1] == []
    assert guarded.call("GET", "/api/machines", token=token)[1] == []
    assert "somebody-elses" not in str(guarded.call("GET", "/api/quarantine", token=token)[1])


def test_a_worker_does_not_wait_at_anothers_barrier(
    guarded: Coordinator, tokens: dict[tuple[str, str | None], str], workers: dict[str, int]
) -> None:
    arrive = pb.WaitBarrierRequest(
        worker_id=FOREIGN, barrier_id="b", expected_participants=1, incarnation=workers[FOREIGN], call_id=b"1"
    )
    with stub(guarded.address) as calls:
        for token in (tokens["worker", OWN], tokens["viewer", FOREIGN]):
            code = refused(partial(calls.WaitBarrier, arrive, metadata=metadata(token), timeout=30))
            assert code == "PERMISSION_DENIED forbidden"
        assert calls.WaitBarrier(arrive, metadata=metadata(tokens["worker", FOREIGN]), timeout=30).released


def test_a_worker_joins_its_own_job_alone_and_takes_nobodys_id(
    guarded: Coordinator, tokens: dict[tuple[str, str | None], str], workers: dict[str, int]
) -> None:
    own = metadata(tokens["worker", OWN])
    with stub(guarded.address) as calls:
        for request in (
            pb.RegisterWorkerRequest(worker_id="spy", job_id=FOREIGN),
            pb.RegisterWorkerRequest(worker_id="spy"),
            pb.RegisterWorkerRequest(worker_id=FOREIGN, job_id=OWN),
        ):
            code = refused(partial(calls.RegisterWorker, request, metadata=own, timeout=30))
            assert code == "PERMISSION_DENIED forbidden"
        beat = pb.HeartbeatRequest(worker_id=FOREIGN, incarnation=workers[FOREIGN])
        assert calls.Heartbeat(beat, metadata=metadata(tokens["worker", FOREIGN]), timeout=30).acknowledged


def test_checkpoints_are_reported_for_ones_own_job_alone(
    guarded: Coordinator, tokens: dict[tuple[str, str | None], str], workers: dict[str, int]
) -> None:
    notice = pb.NotifyCheckpointRequest(
        worker_id=OWN, incarnation=workers[OWN], job_id=FOREIGN, checkpoint_id="c", step=1, path="/c"
    )
    with stub(guarded.address) as calls:
        code = refused(
            lambda: calls.NotifyCheckpoint(notice, metadata=metadata(tokens["worker", OWN]), timeout=30)
        )
    assert code == "PERMISSION_DENIED forbidden"


def test_agents_report_what_they_saved_for_ones_own_job_alone(
    guarded: Coordinator, tokens: dict[tuple[str, str | None], str], workers: dict[str, int]
) -> None:
    """An agent is no worker and has no incarnation: whoever has none and does not say so is refused as before."""
    notice = pb.NotifyCheckpointRequest(
        worker_id="gone",
        job_id=FOREIGN,
        checkpoint_id="c",
        step=1,
        path="/c",
        run_id="run",
        metadata={"saved_by": "agent"},
    )
    own = metadata(tokens["worker", OWN])
    with stub(guarded.address) as calls:
        assert refused(lambda: calls.NotifyCheckpoint(notice, metadata=own, timeout=30)) == (
            "PERMISSION_DENIED forbidden"
        )
        notice.job_id = OWN
        unknown = refused(lambda: calls.NotifyCheckpoint(notice, metadata=own, timeout=30))
        assert unknown == "NOT_FOUND not_found"  # No such run has started here.
        notice.metadata.clear()
        assert refused(lambda: calls.NotifyCheckpoint(notice, metadata=own, timeout=30)) == (
            "PERMISSION_DENIED forbidden"
        )


def test_values_of_jobs_are_isolated(guarded: Coordinator, tokens: dict[tuple[str, str | None], str]) -> None:
    with stub(guarded.address) as calls:
        own, foreign = metadata(tokens["worker", OWN]), metadata(tokens["worker", FOREIGN])
        assert calls.SwapValue(pb.SwapValueRequest(key="k", value=b"mine"), metadata=own, timeout=30).swapped
        assert calls.ReadValue(pb.ReadValueRequest(key="k"), metadata=foreign, timeout=30).version == 0
        assert calls.SwapValue(
            pb.SwapValueRequest(key="k", value=b"theirs"), metadata=foreign, timeout=30
        ).swapped
        assert calls.ReadValue(pb.ReadValueRequest(key="k"), metadata=own, timeout=30).value == b"mine"


def test_agents_of_jobs_are_isolated_and_a_viewer_is_not_an_agent(
    guarded: Coordinator, tokens: dict[tuple[str, str | None], str]
) -> None:
    hello = pb.AgentMessage(hello=pb.AgentHello(key="met", node="n"))
    with stub(guarded.address) as calls:
        for token in (tokens["viewer", OWN], tokens["viewer", None]):
            answers = calls.Presence(iter([hello]), metadata=metadata(token), timeout=30)
            assert refused(partial(list, answers)) == "PERMISSION_DENIED forbidden"
        nobody = calls.Presence(iter([hello]), timeout=30)
        assert refused(partial(list, nobody)).startswith("UNAUTHENTICATED")
        own, foreign = metadata(tokens["worker", OWN]), metadata(tokens["worker", FOREIGN])
        swapped = calls.SwapValue(pb.SwapValueRequest(key="met", value=b"mine"), metadata=own, timeout=30)
        for whose, version in ((own, swapped.version), (foreign, 0)):
            waiting = threading.Event()
            stream = calls.Presence(_then(hello, waiting), metadata=whose, timeout=30)
            assert next(stream).version == version
            waiting.set()
            stream.cancel()


def _then(hello: pb.AgentMessage, waiting: threading.Event) -> Iterator[pb.AgentMessage]:
    """A stream that stays open until it is over."""
    yield hello
    waiting.wait(30)


def test_a_session_is_ones_own(
    guarded: Coordinator, tokens: dict[tuple[str, str | None], str], workers: dict[str, int]
) -> None:
    with channel(guarded.address) as opened:
        stream = opened.stream_stream(
            f"/{SERVICE.full_name}/Session",
            request_serializer=pb.WorkerMessage.SerializeToString,
            response_deserializer=pb.CoordinatorMessage.FromString,
        )
        for token, worker, incarnation in (
            (tokens["worker", OWN], FOREIGN, workers[FOREIGN]),
            (tokens["worker", FOREIGN], FOREIGN, 0),
            (tokens["viewer", FOREIGN], FOREIGN, workers[FOREIGN]),
        ):
            hello = pb.WorkerMessage(hello=pb.Hello(worker_id=worker, incarnation=incarnation))
            answers = stream(iter([hello]), metadata=metadata(token), timeout=30)
            assert refused(partial(list, answers)) == "PERMISSION_DENIED forbidden"


def test_refusals_and_changes_are_in_the_audit_log_without_secrets(
    guarded: Coordinator, tokens: dict[tuple[str, str | None], str]
) -> None:
    admin = "the-admin-of-this-test"
    guarded.call("POST", "/api/tasks/own-job/stop", {}, token=tokens["viewer", OWN])
    guarded.post("/api/tokens", {"name": "watched", "role": "viewer"}, token=admin)
    _, entries = guarded.call("GET", "/api/audit-log?limit=10000", token=admin)
    refusals = [
        e for e in entries if e["outcome"] == "refused" and e["action"] == "POST /api/tasks/own-job/stop"
    ]
    assert any(f"viewer of {OWN}" in entry["who"] for entry in refusals)
    created = next(e for e in entries if e["action"] == "POST /api/tokens" and e["outcome"] == "allowed")
    assert created["role"] == "admin"
    assert created["target"], "the id of what was created"
    text = str(entries)
    assert all(secret not in text for secret in (admin, *tokens.values()))
    status, lines = guarded.call("GET", "/api/audit-log?format=ndjson&q=RegisterWorker", token=admin)
    assert status == 200
    assert isinstance(lines, bytes)
    assert lines
    assert all("registerworker" in json.loads(line)["action"].lower() for line in lines.splitlines())
