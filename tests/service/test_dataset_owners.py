"""Datasets over HTTP and gRPC: ids that are names, those of one job, and their removal."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from strata import DatasetRegistry
from strata.core.messages import InvalidArgument
from strata.rpc import coordinator_pb2 as pb
from tests.service.clients import stub
from tests.support import Coordinator

ADMIN = "the-admin-of-this-test"


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Coordinator]:
    server = Coordinator(tmp_path_factory.mktemp("owners") / "data", env={"STRATA_TOKEN": ADMIN}).start()
    yield server
    server.stop()
    assert "Traceback" not in "".join(server.output)


def of_job(server: Coordinator, job: str) -> tuple[tuple[str, str], ...]:
    body = {"name": f"worker of {job}", "role": "worker", "job_id": job}
    status, made = server.post("/api/tokens", body, token=ADMIN)
    assert status == 201
    return (("authorization", f"Bearer {made['token']}"),)


def dataset(name: str, path: str = "/d") -> pb.RegisterDatasetRequest:
    return pb.RegisterDatasetRequest(
        dataset_id=name, path=path, format="jsonl", total_samples=100, shard_size=10
    )


def code(error: pytest.ExceptionInfo[grpc.RpcError]) -> str:
    return str(error.value.code().name)


def test_a_path_is_no_id_over_http_grpc_and_alone(guarded: Coordinator) -> None:
    for name in ("/tmp/x", "../../etc", "..", "a/b", "a b"):
        body = {"dataset_id": name, "path": "/d", "format": "jsonl", "total_samples": 1}
        status, answer = guarded.post("/api/datasets", body, token=ADMIN)
        assert (status, answer["code"]) == (422, "invalid_argument"), name
        with stub(guarded.address) as calls, pytest.raises(grpc.RpcError) as refused:
            calls.RegisterDataset(dataset(name), metadata=of_job(guarded, "x"), timeout=30)
        assert code(refused) == "INVALID_ARGUMENT"
        with pytest.raises(InvalidArgument):
            DatasetRegistry().register_dataset(name, 10, 1)


def test_a_job_sees_and_reads_its_own_datasets_and_shared_ones(guarded: Coordinator) -> None:
    mine, theirs = of_job(guarded, "mine"), of_job(guarded, "theirs")
    shared = {"dataset_id": "for-all", "path": "/s", "format": "jsonl", "total_samples": 100}
    assert guarded.post("/api/datasets", shared, token=ADMIN)[0] == 201
    with stub(guarded.address) as calls:
        incarnations = {
            job: calls.RegisterWorker(
                pb.RegisterWorkerRequest(worker_id=f"w-{job}", job_id=job), metadata=who, timeout=30
            ).incarnation
            for job, who in (("mine", mine), ("theirs", theirs))
        }
        calls.RegisterDataset(dataset("of-mine", "/secret"), metadata=mine, timeout=30)
        seen = calls.ListDatasets(pb.ListDatasetsRequest(), metadata=theirs, timeout=30)
        assert {d.dataset_id for d in seen.datasets} & {"for-all", "of-mine"} == {"for-all"}
        seen = calls.ListDatasets(pb.ListDatasetsRequest(), metadata=mine, timeout=30)
        assert {d.dataset_id for d in seen.datasets} >= {"for-all", "of-mine"}

        def shards(job: str, who: tuple[tuple[str, str], ...], name: str) -> int:
            request = pb.GetDataShardRequest(
                worker_id=f"w-{job}", dataset_id=name, incarnation=incarnations[job]
            )
            return len(calls.GetDataShard(request, metadata=who, timeout=30).shards)

        assert shards("mine", mine, "of-mine") == 10
        assert shards("theirs", theirs, "for-all") == 1
        with pytest.raises(grpc.RpcError) as unknown:
            shards("theirs", theirs, "of-mine")
        assert code(unknown) == "NOT_FOUND"
        with pytest.raises(grpc.RpcError) as conflict:
            calls.RegisterDataset(dataset("of-mine", "/guess"), metadata=theirs, timeout=30)
        assert "secret" not in str(conflict.value.details())
    plans = guarded.call("GET", "/api/datasets/of-mine/shards?job_id=theirs", token=ADMIN)
    assert plans[0] == 404, "no plan is made for others"


def test_values_of_jobs_with_similar_names_are_isolated(guarded: Coordinator) -> None:
    with stub(guarded.address) as calls:
        calls.SwapValue(pb.SwapValueRequest(key="b/x", value=b"1"), metadata=of_job(guarded, "a"), timeout=30)
        found = calls.ReadValue(pb.ReadValueRequest(key="x"), metadata=of_job(guarded, "a/b"), timeout=30)
        assert found.version == 0


def test_a_dataset_is_removed_over_http_and_the_command_line(guarded: Coordinator, tmp_path: Path) -> None:
    for name in ("gone-1", "gone-2", "stays"):
        body = {"dataset_id": name, "path": "/d", "format": "jsonl", "total_samples": 10}
        assert guarded.post("/api/datasets", body, token=ADMIN)[0] == 201
    assert guarded.call("DELETE", "/api/datasets/gone-1", token=ADMIN)[0] == 204
    assert guarded.call("DELETE", "/api/datasets/gone-1", token=ADMIN)[0] == 404
    strata = [sys.executable, "-m", "strata.cli.main", "datasets"]
    about = {"env": {"PATH": "", "STRATA_TOKEN": ADMIN, "HOME": str(tmp_path)}, "cwd": tmp_path}
    for arguments, status in ((["rm", "gone-2"], 0), (["rm", "gone-2"], 1), ([], 0), (["--json"], 0)):
        ended = subprocess.run(
            [*strata, *arguments, "--api", guarded.url],
            capture_output=True,
            text=True,
            timeout=60,
            **about,  # type: ignore[call-overload]
        )
        assert ended.returncode == status, ended.stderr
    assert "stays" in ended.stdout
    assert "gone" not in ended.stdout
    guarded.stop()
    guarded.start()
    left = {d["id"] for d in guarded.call("GET", "/api/datasets", token=ADMIN)[1]}
    assert {"stays"} == left & {"stays", "gone-1", "gone-2"}, "after a restart too"
