"""Joining and leaving the process group, for real, and the words when it does not work."""

from __future__ import annotations

import errno
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from elastic_harness import agent
from elastic_harness.agent import ElasticTrainingConfig, WorldInfo
from elastic_harness.errors import ConfigurationError, DistributedSetupError, TopologyChangeError
from tests.rendezvous.etcd_server import free_port, port_of_nobody

VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(autouse=True)
def no_torchrun(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in (*VARIABLES, "NCCL_SOCKET_TIMEOUT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    yield
    agent.cleanup_distributed()


def pretend(
    monkeypatch: pytest.MonkeyPatch, *, rank: int = 0, world: int = 1, port: int | None = None
) -> int:
    port = port or free_port()
    values = (rank, rank, world, world, "127.0.0.1", port)
    for name, value in zip(VARIABLES, values, strict=True):
        monkeypatch.setenv(name, str(value))
    return port


def test_without_torchrun_the_missing_variables_are_named_and_torchrun_suggested() -> None:
    for call in (agent.get_world_info, agent.setup_distributed_environment):
        with pytest.raises(RuntimeError) as caught:
            call()
        first, *rest = str(caught.value).splitlines()
        assert first == "Missing required environment variables: ['RANK', 'LOCAL_RANK', 'WORLD_SIZE']"
        assert "torchrun" in "".join(rest)


def test_without_torchrun_everything_else_is_a_world_of_one() -> None:
    assert (agent.get_rank(), agent.get_world_size(), agent.is_main_process()) == (0, 1, True)
    agent.barrier()
    assert agent.broadcast_object({"a": 1}) == {"a": 1}
    agent.cleanup_distributed()


def test_rank_that_is_no_number_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch)
    monkeypatch.setenv("RANK", "first")
    with pytest.raises(DistributedSetupError, match="RANK must be a whole number, not 'first'"):
        agent.get_world_info()


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("WORLD_SIZE", "0", "of at least 1"),
        ("LOCAL_WORLD_SIZE", "0", "of at least 1"),
        ("WORLD_SIZE", "-2", "of at least 1"),
        ("RANK", "5", "from 0 to 0"),
        ("RANK", "-1", "from 0 to 0"),
        ("LOCAL_RANK", "-1", "of at least 0"),
    ],
)
def test_a_place_that_cannot_be_is_named(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, wanted: str
) -> None:
    pretend(monkeypatch)
    monkeypatch.setenv(name, value)
    with pytest.raises(DistributedSetupError, match=f"{name} must be a whole number {wanted}, not '{value}'"):
        agent.get_world_info()


def test_the_meeting_place_can_be_given_as_a_url(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pretend(monkeypatch)
    world = agent.setup_distributed_environment("gloo", f"file://{tmp_path}/store", timeout_s=60)
    assert (world.rank, (tmp_path / "store").exists()) == (0, True)
    agent.cleanup_distributed()
    assert agent.setup_distributed_environment("gloo", init_method=None) == world
    agent.cleanup_distributed()
    with pytest.raises(DistributedSetupError, match="could not join the others at nowhere://host:1"):
        agent.setup_distributed_environment("gloo", init_method="nowhere://host:1", timeout_s=2)


def test_joining_twice_is_joining_once_and_leaving_twice_is_harmless(monkeypatch: pytest.MonkeyPatch) -> None:
    port = pretend(monkeypatch)
    world = agent.setup_distributed_environment("auto", timeout_s=60)
    assert world == WorldInfo(0, 0, 1, 1, "127.0.0.1", port)
    assert agent.setup_distributed_environment("gloo") == world
    assert dist.get_backend() == ("nccl" if torch.cuda.is_available() else "gloo")
    agent.barrier()
    assert agent.broadcast_object([1, 2]) == [1, 2]
    agent.cleanup_distributed()
    agent.cleanup_distributed()
    assert not dist.is_initialized()


def test_unreachable_master_address_times_out_with_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    with port_of_nobody() as port:
        pretend(monkeypatch, rank=1, world=2, port=port)
        with pytest.raises(
            DistributedSetupError, match=r"^Distributed initialization timed out: rank 1 of 2 waited 1 s"
        ):
            agent.setup_distributed_environment("gloo", timeout_s=1)
    assert not dist.is_initialized()


def test_master_that_nobody_joins_times_out_and_honours_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pretend(monkeypatch, rank=0, world=2)
    monkeypatch.setenv("NCCL_SOCKET_TIMEOUT", "1")
    with pytest.raises(
        DistributedSetupError, match="Distributed initialization timed out: rank 0 of 2 waited 1 s"
    ):
        agent.setup_distributed_environment("gloo")


def test_port_of_another_process_is_reported_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as other:
        other.bind(("0.0.0.0", 0))
        other.listen()
        port = other.getsockname()[1]
        pretend(monkeypatch, rank=0, world=2, port=port)
        with pytest.raises(
            DistributedSetupError, match=f"Address already in use: 127.0.0.1:{port}"
        ) as caught:
            agent.setup_distributed_environment("gloo", timeout_s=2)
    assert f"lsof -i :{port}" in str(caught.value)


def test_nccl_without_a_gpu_is_refused_before_it_can_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    pretend(monkeypatch)
    with pytest.raises(DistributedSetupError, match="NCCL error in: local rank 0 has no GPU"):
        agent.setup_distributed_environment("nccl", timeout_s=2)


def test_unknown_backend_names_the_valid_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch)
    with pytest.raises(
        ConfigurationError, match=r"Unknown backend 'mpi'. Valid options: \['nccl', 'gloo', 'auto'\]"
    ):
        agent.setup_distributed_environment("mpi")  # type: ignore[arg-type]


def test_world_below_the_declared_minimum_is_refused() -> None:
    world = WorldInfo(0, 0, 1, 1, "localhost", 29500)
    agent.ensure_enough_nodes(world, min_nodes=1)
    with pytest.raises(TopologyChangeError) as caught:
        agent.ensure_enough_nodes(world, min_nodes=2, previous_world_size=4)
    assert caught.value.message == "Topology change (4 -> 1 workers) failed: World size below min_nodes"


def test_torchrun_arguments_recover_in_seconds() -> None:
    arguments = ElasticTrainingConfig(
        min_nodes=2, max_nodes=8, nproc_per_node=4, rdzv_id="job"
    ).to_torchrun_args()
    assert arguments == [
        "--nnodes=2:8",
        "--nproc-per-node=4",
        "--rdzv-backend=etcd-v2",
        "--rdzv-endpoint=localhost:2379",
        "--rdzv-id=job",
        "--rdzv-conf=keep_alive_interval=1,keep_alive_max_attempt=3,last_call_timeout=1,close_timeout=10",
        "--max-restarts=100",
    ]
    assert ElasticTrainingConfig().to_torchrun_env() == {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def test_launch_settings_that_cannot_work_are_refused_together() -> None:
    with pytest.raises(ConfigurationError) as caught:
        ElasticTrainingConfig(min_nodes=0, rdzv_backend="zookeeper")
    text = str(caught.value)
    assert text.startswith("Configuration error in 'elastic': min_nodes (0) must be at least 1")
    assert "Unknown rdzv_backend 'zookeeper'" in text


def test_launch_without_etcd_says_how_to_start_one() -> None:
    with socket.socket() as server, port_of_nobody() as nobody:
        server.bind(("127.0.0.1", 0))
        server.listen()
        alive, dead = f"127.0.0.1:{server.getsockname()[1]}", f"127.0.0.1:{nobody}"
        ElasticTrainingConfig(rdzv_backend="etcd", rdzv_endpoint=f"{dead},{alive}").check_rendezvous()
        ElasticTrainingConfig(rdzv_backend="c10d", rdzv_endpoint=dead).check_rendezvous()
        with pytest.raises(DistributedSetupError) as caught:
            ElasticTrainingConfig(rdzv_endpoint=dead).check_rendezvous()
    assert (
        caught.value.message
        == f"Failed to connect to etcd at {dead}: [Errno {errno.ECONNREFUSED}] Connection refused"
    )
    assert "./scripts/start_etcd.sh start" in str(caught.value)


SCRIPT = """
import json, sys
from elastic_harness import agent
world = agent.setup_distributed_environment(timeout_s=60)
agent.barrier()
got = agent.broadcast_object({"from": world.rank}, src=1)
agent.barrier()
line = {"rank": agent.get_rank(), "world": agent.get_world_size(), "main": agent.is_main_process(), "got": got,
        "nodes": world.num_nodes}
with open(f"{sys.argv[1]}/{world.rank}", "w") as out:
    json.dump(line, out)
agent.cleanup_distributed()
"""


def test_two_processes_under_torchrun_agree(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    config = ElasticTrainingConfig(
        max_nodes=1,
        nproc_per_node=2,
        rdzv_backend="c10d",
        rdzv_endpoint=f"127.0.0.1:{free_port()}",
        max_restarts=0,
    )
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        *config.to_torchrun_args(),
        "--local-addr=127.0.0.1",
    ]
    done = subprocess.run(
        [*command, str(tmp_path / "script.py"), str(tmp_path)],
        env={**os.environ, **config.to_torchrun_env(), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    reports = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(2)]
    assert [(r["rank"], r["world"], r["main"], r["nodes"]) for r in reports] == [
        (0, 2, True, 1),
        (1, 2, False, 1),
    ]
    assert all(report["got"] == {"from": 1} for report in reports)


def test_a_launch_is_described_by_the_common_variables() -> None:
    config = ElasticTrainingConfig.from_env(
        {"NNODES": "2:8", "NPROC_PER_NODE": "gpu", "RDZV_ENDPOINT": "head:2379", "RDZV_ID": "mine"}
    )
    assert (config.min_nodes, config.max_nodes, config.nproc_per_node) == (2, 8, "gpu")
    assert (config.rdzv_endpoint, config.rdzv_id) == ("head:2379", "mine")
    assert ElasticTrainingConfig.from_env({"NNODES": "3"}).max_nodes == 3
    ranged = ElasticTrainingConfig.from_env({"NNODES": "4", "MIN_NODES": "2", "MAX_NODES": "8"})
    assert (ranged.min_nodes, ranged.max_nodes) == (2, 8)
    assert ElasticTrainingConfig.from_env({"NNODES": "4", "MIN_NODES": "2"}).max_nodes == 4
    assert ElasticTrainingConfig.from_env({}) == ElasticTrainingConfig()
    with pytest.raises(DistributedSetupError, match="NNODES must be a whole number, not 'two'"):
        ElasticTrainingConfig.from_env({"NNODES": "two"})
