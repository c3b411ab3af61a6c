"""Versions of the wire: what is served under which name, who is refused, and that neighbours work together."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pb2

from strata import TrainingOrchestrator
from strata.rpc import coordinator_pb2 as pb
from strata.rpc.cas import CoordinatorCasClient
from strata.rpc.methods import EARLIER_METHODS, EARLIER_NAME, NAME, SERVICE
from tests.service.clients import channel, refusal
from tests.service.quiet import state
from tests.support import Coordinator, unpack
from tests.support_programs import program

ROOT = Path(__file__).parents[2]
DESCRIPTOR_OF_0_1 = ROOT / "tests/testdata/0.1/coordinator.desc"
LAST_COMMIT_OF_0_1 = "a75fd362f64b39290584aa4ce55e702372c15fbe"
PATIENCE_S = 60.0


def string(number: int, value: str) -> bytes:
    return bytes([number << 3 | 2, len(value)]) + value.encode()


def varint(number: int, value: int) -> bytes:
    assert value < 128
    return bytes([number << 3, value])


# --- names --------------------------------------------------------------------------------------------------------


def messages(file: descriptor_pb2.FileDescriptorProto) -> dict[str, dict[int, tuple[str, int, int, str]]]:
    found: dict[str, dict[int, tuple[str, int, int, str]]] = {}

    def add(prefix: str, kinds: Any) -> None:
        for kind in kinds:
            found[prefix + kind.name] = {
                f.number: (f.name, f.type, f.label, f.type_name.removeprefix(f".{file.package}."))
                for f in kind.field
            }
            add(f"{prefix}{kind.name}.", kind.nested_type)

    add("", file.message_type)
    return found


def test_no_field_of_version_0_1_has_changed_its_number_type_or_name() -> None:
    """Also that every call of it is still there."""
    before = descriptor_pb2.FileDescriptorSet.FromString(DESCRIPTOR_OF_0_1.read_bytes()).file[0]
    now = descriptor_pb2.FileDescriptorProto()
    pb.DESCRIPTOR.CopyToProto(now)
    current = messages(now)
    for name, fields in messages(before).items():
        assert fields.items() <= current[name].items(), name
    assert before.package == "coordinator"
    assert {method.name for method in before.service[0].method} == EARLIER_METHODS
    assert {method.name for method in SERVICE.methods} >= EARLIER_METHODS
    assert NAME == "strata.v1.Coordinator"


def test_the_earlier_name_is_served_with_the_same_messages(shared: Coordinator) -> None:
    with channel(shared.address) as opened:
        for name in (NAME, EARLIER_NAME):
            register = opened.unary_unary(
                f"/{name}/RegisterWorker",
                request_serializer=pb.RegisterWorkerRequest.SerializeToString,
                response_deserializer=pb.RegisterWorkerResponse.FromString,
            )
            worker = f"of-{name}"
            assert register(pb.RegisterWorkerRequest(worker_id=worker, gpu_count=2)).assigned_id == worker
    assert {w["gpu_count"] for w in shared.get("/api/workers") if w["id"].startswith("of-")} == {2}


@pytest.mark.parametrize(
    ("method", "body"),
    [
        ("RegisterWorker", string(1, "w") + varint(2, 5)),  # a number where the host is
        ("RegisterWorker", string(1, "w") + string(3, "8080")),  # a text where the port is
        ("RegisterWorker", string(1, "w") + string(19, "gpu")),  # a field that nobody has here
        ("Heartbeat", string(1, "w") + bytes([3 << 3 | 2, 2]) + varint(1, 1)),  # in a message inside it
        ("NotifyCheckpoint", string(1, "w") + string(2, "c") + string(3, "step-100")),
        ("RegisterWorker", b"\xff" * 20),
    ],
    ids=["a number for a text", "a text for a number", "unknown", "inside", "a checkpoint", "no message"],
)
def test_a_client_whose_fields_mean_something_else_is_refused_under_the_earlier_name(
    shared: Coordinator, method: str, body: bytes
) -> None:
    before = state(shared)
    with channel(shared.address) as opened:
        call = opened.unary_unary(f"/{EARLIER_NAME}/{method}", None, None)
        status, code, message, hint = refusal(call, body, timeout=PATIENCE_S)
    assert (status, code) == (grpc.StatusCode.INVALID_ARGUMENT, "invalid_argument")
    assert "of Strata" in message
    assert "strata.v1" in hint
    assert state(shared) == before


def test_such_a_client_is_refused_in_a_stream_too(shared: Coordinator) -> None:
    with channel(shared.address) as opened:
        call = opened.stream_stream(f"/{EARLIER_NAME}/Session", None, None)
        hello = bytes([1 << 3 | 2, 2]) + varint(1, 7)
        status, _, message, hint = refusal(lambda: list(call(iter([hello]), timeout=PATIENCE_S)))
    assert status is grpc.StatusCode.INVALID_ARGUMENT
    assert "of Strata" in message
    assert "strata.v1" in hint


def test_a_newer_client_of_the_present_version_may_say_more_than_is_known(shared: Coordinator) -> None:
    with channel(shared.address) as opened:
        call = opened.unary_unary(f"/{NAME}/RegisterWorker", None, pb.RegisterWorkerResponse.FromString)
        answer = call(string(1, "newer") + string(15, "what is not known yet"), timeout=PATIENCE_S)
    assert answer.assigned_id == "newer"


@pytest.mark.parametrize("method", ["RegisterWorker", "Session", "NotInvented"])
def test_a_client_of_another_version_learns_which_is_served_and_what_to_do(
    shared: Coordinator, method: str
) -> None:
    with channel(shared.address) as opened:
        call = opened.stream_stream(f"/strata.v2.Coordinator/{method}", None, None)
        status, code, message, hint = refusal(lambda: list(call(iter([b""]), timeout=PATIENCE_S)))
    assert (status, code) == (grpc.StatusCode.UNIMPLEMENTED, "wire_version")
    assert "speaks strata.v1, not strata.v2" in message
    assert "Upgrade the coordinator first" in hint


# --- a worker of this version, a coordinator of the one before ------------------------------------------------------


class _EarlierAlone(grpc.GenericRpcHandler):  # type: ignore[type-arg]
    """Passes on what version 0.1 served, and knows nothing else."""

    def __init__(self, opened: grpc.Channel) -> None:
        self._opened = opened

    def service(self, handler_call_details: Any) -> grpc.RpcMethodHandler[Any, Any] | None:
        name, method = handler_call_details.method.strip("/").split("/")
        if name != EARLIER_NAME or method not in EARLIER_METHODS:
            return None
        if method != "Session":
            unary = self._opened.unary_unary(handler_call_details.method, None, None)

            def pass_on(request: bytes, context: grpc.ServicerContext) -> bytes:
                return bytes(unary(request, timeout=PATIENCE_S))

            return grpc.unary_unary_rpc_method_handler(pass_on)
        stream = self._opened.stream_stream(handler_call_details.method, None, None)

        def pass_all_on(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
            call = stream(requests)
            context.add_callback(call.cancel)
            yield from call

        return grpc.stream_stream_rpc_method_handler(pass_all_on)


@contextmanager
def earlier_alone(address: str) -> Iterator[str]:
    with channel(address) as opened, ThreadPoolExecutor(8) as pool:
        server = grpc.server(pool)
        server.add_generic_rpc_handlers((_EarlierAlone(opened),))
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            yield f"127.0.0.1:{port}"
        finally:
            server.stop(0).wait()


def take_part(address: str, worker: str) -> None:
    """What a worker does, over the session and beside it."""
    with TrainingOrchestrator(address) as link:
        registered = link.register_worker(worker, "host-a", 1234, gpu_count=1)
        assert registered.rank == 0
        assert link.wait_connected(PATIENCE_S)
        link.heartbeat(3, 0)
        assert link.barrier("start", 1).participants == 1
        link.notify_checkpoint(f"checkpoint-of-{worker}", 3, 0, "/c", 10)
        latest = link.latest_checkpoint()
        assert latest is not None
        assert latest.step == 3


def test_a_worker_works_with_a_coordinator_that_speaks_only_the_version_before(
    shared: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STRATA_JOB_ID", "the version before")
    with earlier_alone(shared.address) as address:
        take_part(address, "of-this-version")


def test_agents_work_with_a_coordinator_that_speaks_only_the_version_before(shared: Coordinator) -> None:
    with earlier_alone(shared.address) as address:
        client = CoordinatorCasClient(address, timeout_s=PATIENCE_S)
        try:
            client.admit("host-a")  # A call it does not know: nobody is refused.
            assert client.cas("k", b"v", None)[0]
            assert client.get("k") is not None
        finally:
            client.close()


# --- with version 0.1 itself, where the history of this checkout has it ---------------------------------------------


@pytest.fixture(scope="module")
def sources_of_0_1(tmp_path_factory: pytest.TempPathFactory) -> Path:
    archive = subprocess.run(
        [program("git"), "-C", str(ROOT), "archive", LAST_COMMIT_OF_0_1, "src"],
        capture_output=True,
        check=False,
    )
    if archive.returncode:
        pytest.skip("this checkout has no history back to version 0.1")
    folder = tmp_path_factory.mktemp("0.1")
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as tar:
        unpack(tar, folder)
    return folder / "src"


def test_a_worker_works_with_a_coordinator_of_version_0_1(sources_of_0_1: Path, tmp_path: Path) -> None:
    server = Coordinator(tmp_path / "c", env={"PYTHONPATH": str(sources_of_0_1)}).start()
    try:
        assert server.get("/api/status")["version"] == "0.1.0"
        take_part(server.address, "of-this-version")
    finally:
        server.stop()


OLD_WORKER = """
import sys, strata
from strata import TrainingOrchestrator
assert strata.__version__ == "0.1.0"
with TrainingOrchestrator(sys.argv[1]) as link:
    assert link.register_worker("of-0.1", "host-a", 1234).rank == 0
    assert link.wait_connected(60.0)
    link.heartbeat(3, 0)
    assert link.barrier("start", 1).participants == 1
    link.notify_checkpoint("c-1", 3, 0, "/c", 10)
    assert link.latest_checkpoint().step == 3
"""


def test_a_worker_of_version_0_1_works_with_this_coordinator(
    shared: Coordinator, sources_of_0_1: Path
) -> None:
    env = {**os.environ, "PYTHONPATH": str(sources_of_0_1), "STRATA_JOB_ID": "of 0.1"}
    subprocess.run(
        [sys.executable, "-c", OLD_WORKER, shared.address], env=env, check=True, timeout=2 * PATIENCE_S
    )
