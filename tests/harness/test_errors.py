"""Every error says exactly what users were told it says, and what to do next."""

from __future__ import annotations

import pickle
from collections.abc import Callable

import pytest

from elastic_harness import errors as e
from strata.errors import StrataError

GUIDE = [
    (
        e.DistributedSetupError.missing_environment(["RANK", "LOCAL_RANK", "WORLD_SIZE"]),
        "Missing required environment variables: ['RANK', 'LOCAL_RANK', 'WORLD_SIZE']",
        "torchrun --nproc-per-node",
    ),
    (
        e.DistributedSetupError.timed_out(rank=1, world_size=2, address="10.0.0.1:29500", timeout_s=30),
        "Distributed initialization timed out: rank 1 of 2 waited 30 s at 10.0.0.1:29500",
        "nc -zv 10.0.0.1 29500",
    ),
    (
        e.DistributedSetupError.address_in_use(address="localhost:29500"),
        "Address already in use: localhost:29500",
        "lsof -i :29500",
    ),
    (
        e.DistributedSetupError.nccl_failed("init.cc:42, unhandled system error"),
        "NCCL error in: init.cc:42, unhandled system error",
        "NCCL_DEBUG=INFO",
    ),
    (
        e.DistributedSetupError.etcd_unreachable("localhost:2379"),
        "Failed to connect to etcd at localhost:2379",
        "./scripts/start_etcd.sh start",
    ),
    (
        e.CheckpointSaveError(
            "No space left on device", tier="nvme", path="/nvme/checkpoints/checkpoint_step_00000500.pt"
        ),
        "[NVME] Failed to save checkpoint to '/nvme/checkpoints/checkpoint_step_00000500.pt': No space left on device",
        "df -h /nvme/checkpoints",
    ),
    (
        e.CheckpointSaveError("Permission denied", tier="NVME", path="/nvme/checkpoints/a.pt"),
        "[NVME] Failed to save checkpoint to '/nvme/checkpoints/a.pt': Permission denied",
        "mkdir -p /nvme/checkpoints",
    ),
    (
        e.CheckpointSaveError("NoCredentialsError", tier="S3"),
        "[S3] Failed to save checkpoint: NoCredentialsError",
        "AWS_ACCESS_KEY_ID",
    ),
    (
        e.CheckpointLoadError.missing_keys("a.pt", {"model_state_dict"}),
        "Failed to load checkpoint from 'a.pt': Missing required keys: {'model_state_dict'}",
        "strict=False",
    ),
    (
        e.CheckpointValidationError("step is negative", path="a.pt"),
        "Checkpoint 'a.pt' is not valid: step is negative",
        "older",
    ),
    (
        e.MemoryLimitExceeded.for_snapshot(required_mb=2048, available_mb=512),
        "Cannot save snapshot: 2048.0MB required, but only 512.0MB available",
        "max_memory_mb",
    ),
    (
        e.TopologyChangeError.below_min_nodes(old_world_size=4, new_world_size=1),
        "Topology change (4 -> 1 workers) failed: World size below min_nodes",
        "elastic.min_nodes",
    ),
    (e.TopologyChangeError.no_checkpoint(), "No checkpoint available for recovery", "checkpoint_interval"),
    (
        e.ConfigurationError("Unknown scaling strategy 'invalid'.", section="scaling"),
        "Configuration error in 'scaling': Unknown scaling strategy 'invalid'.",
        "strata validate",
    ),
    (
        e.DataLoadingError.index_not_found("data/train.jsonl", command="strata index data/train.jsonl"),
        "Failed to load data from 'data/train.jsonl': Token index file not found",
        "strata index data/train.jsonl",
    ),
    (
        e.DataLoadingError.missing_text_key("text", record="data/train.jsonl, line 3", found=["content"]),
        "KeyError: 'text'",
        'data.text_key: "content"',
    ),
]


@pytest.mark.parametrize(("error", "message", "suggestion"), GUIDE)
def test_text_is_the_one_users_know_and_comes_with_a_next_step(
    error: e.ElasticTrainingError, message: str, suggestion: str
) -> None:
    assert error.message == message
    assert str(error).splitlines()[0] == message
    assert any(suggestion in line for line in error.suggestions)
    assert all(line in str(error) for line in error.suggestions)
    assert isinstance(error, StrataError)
    assert error.code != StrataError.code


@pytest.mark.parametrize("error", [case[0] for case in GUIDE])
def test_error_survives_pickling_with_its_facts(error: e.ElasticTrainingError) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert (str(copy), vars(copy)) == (str(error), vars(error))


@pytest.mark.parametrize("error", [case[0] for case in GUIDE])
def test_error_can_be_made_again_from_its_text_alone(error: e.ElasticTrainingError) -> None:
    """PyTorch re-raises a loader process's error that way."""
    assert type(error)(error.message).message == error.message


def test_setup_errors_are_runtime_errors_and_checkpoint_errors_share_a_base() -> None:
    assert issubclass(e.DistributedSetupError, RuntimeError)
    for kind in (
        e.CheckpointLoadError,
        e.CheckpointSaveError,
        e.CheckpointValidationError,
        e.MemoryLimitExceeded,
    ):
        assert issubclass(kind, e.CheckpointError)


def test_suggestions_can_be_replaced() -> None:
    error = e.CheckpointLoadError("torn", path="a.pt", suggestions=["look elsewhere"])
    assert error.suggestions == ("look elsewhere",)


@pytest.mark.parametrize(
    ("made", "like"),
    [
        (
            lambda: e.ConfigurationError(message="bad", config_key="scaling"),
            e.ConfigurationError("bad", section="scaling"),
        ),
        (
            lambda: e.DataLoadingError(message="gone", file_path="a.jsonl"),
            e.DataLoadingError("gone", source="a.jsonl"),
        ),
        (
            lambda: e.CheckpointLoadError(message="torn", checkpoint_path="a.pt"),
            e.CheckpointLoadError("torn", path="a.pt"),
        ),
        (
            lambda: e.CheckpointSaveError(message="full", tier="nvme", checkpoint_path="a.pt"),
            e.CheckpointSaveError("full", tier="nvme", path="a.pt"),
        ),
        (
            lambda: e.CheckpointValidationError(message="odd", checkpoint_path="a.pt"),
            e.CheckpointValidationError("odd", path="a.pt"),
        ),
        (
            lambda: e.TopologyChangeError(message="few", old_world_size=4, new_world_size=1),
            e.TopologyChangeError("few", old_world_size=4, new_world_size=1),
        ),
        (lambda: e.DistributedSetupError(message="no"), e.DistributedSetupError("no")),
        (lambda: e.MemoryLimitExceeded(message="much"), e.MemoryLimitExceeded("much")),
        (
            lambda: e.ConfigurationError("bad", "scaling", ["do"]),
            e.ConfigurationError("bad", section="scaling", suggestions=["do"]),
        ),
        (lambda: e.DataLoadingError("gone", "a.jsonl"), e.DataLoadingError("gone", source="a.jsonl")),
        (
            lambda: e.CheckpointLoadError("torn", "a.pt", "NVME"),
            e.CheckpointLoadError("torn", path="a.pt", tier="nvme"),
        ),
        (
            lambda: e.CheckpointSaveError("full", "a.pt", "NVME"),
            e.CheckpointSaveError("full", path="a.pt", tier="nvme"),
        ),
        (
            lambda: e.TopologyChangeError("few", 4, 1),
            e.TopologyChangeError("few", old_world_size=4, new_world_size=1),
        ),
    ],
)
def test_arguments_of_earlier_versions_mean_the_same(
    made: Callable[[], e.ElasticTrainingError], like: e.ElasticTrainingError
) -> None:
    error = made()
    assert (str(error), vars(error)) == (str(like), vars(like))


def test_facts_are_readable_under_both_names() -> None:
    assert e.ConfigurationError("bad", section="scaling").config_key == "scaling"
    assert e.DataLoadingError("gone", source="a.jsonl").file_path == "a.jsonl"
    assert e.CheckpointLoadError("torn", path="a.pt").checkpoint_path == "a.pt"


def test_the_facts_of_earlier_versions_are_in_the_error_and_in_its_text() -> None:
    setup = e.DistributedSetupError("Failed", missing_vars=["RANK", "MASTER_ADDR"], context={"host": "a"})
    assert (setup.missing_vars, setup.context) == (["RANK", "MASTER_ADDR"], {"host": "a"})
    assert "torchrun" in str(setup)
    assert "MASTER_ADDR=localhost" in str(setup)
    assert set(e.DistributedSetupError.COMMON_ISSUES) >= {
        "RANK",
        "WORLD_SIZE",
        "MASTER_PORT",
        "NCCL",
        "timeout",
    }
    assert e.DistributedSetupError.missing_environment(["RANK"]).missing_vars == ["RANK"]
    load = e.CheckpointLoadError(message="File not found", path="/nvme/a.pt", tier="nvme")
    assert load.message == "[NVME] Failed to load checkpoint from '/nvme/a.pt': File not found"
    assert load.tier == "NVME"
    invalid = e.CheckpointValidationError("Odd", missing_keys=["model_state_dict"], invalid_keys=["step"])
    assert (invalid.missing_keys, invalid.invalid_keys) == (["model_state_dict"], ["step"])
    assert invalid.message == "Odd (missing: 'model_state_dict'; invalid: 'step')"
    assert e.CheckpointValidationError.missing_state("x", "a", "b").missing_keys == ["a", "b"]
    full = OSError(28, "No space left on device")
    save = e.CheckpointSaveError("Disk full", path="/nvme/a.pt", tier="NVME", original_error=full)
    assert save.original_error is save.__cause__ is full
    assert e.CheckpointSaveError("Disk full").original_error is None
    for error in (setup, load, invalid, save):
        copy = pickle.loads(pickle.dumps(error))
        assert (str(copy), vars(copy)) == (str(error), vars(error))
