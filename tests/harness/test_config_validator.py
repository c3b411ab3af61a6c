"""Every mistake is found at once, with its key path and the words users know."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_harness.config_validator import (
    COUNT,
    FRACTION,
    OPTIONAL_TEXT,
    OTHER_NAMES,
    SECTIONS,
    Key,
    validate_config,
    validate_elastic_config,
    validate_s3_access,
    validate_training_config,
)
from elastic_harness.errors import ConfigurationError

GOOD: dict[str, Any] = {
    "model": {"n_layer": 2, "n_head": 2, "n_embd": 64, "seq_length": 64, "dropout": 0.0},
    "training": {"lr": 3e-4, "batch_size": 8, "max_steps": 1000, "max_norm": 1.0, "seed": 1},
    "data": {
        "files": ["data/train.jsonl"],
        "index_file": "data/train.index",
        "tokenizer": "bytes",
        "text_key": "text",
    },
    "checkpoint": {
        "checkpoint_interval": 500,
        "memory_snapshot_interval": 50,
        "nvme_path": "/tmp/x",
        "s3_bucket": None,
    },
    "scaling": {"strategy": "constant_batch", "target_global_batch_size": 32, "base_world_size": 4},
    "elastic": {"min_nodes": 1, "max_nodes": 4, "rdzv_backend": "etcd", "rdzv_id": "my-job:123"},
    "parallel": {"dp": "auto", "tp": 2, "fsdp": True},
    "chaos": {"enabled": False},
}


def config(**changes: Any) -> dict[str, Any]:
    """`GOOD` with changes such as `elastic__min_nodes=0`."""
    changed = copy.deepcopy(GOOD)
    for path, value in changes.items():
        section, _, key = path.partition("__")
        changed[section][key] = value
    return changed


def test_a_good_configuration_has_nothing_to_say() -> None:
    result = validate_config(GOOD)
    assert (result.valid, result.errors, result.warnings) == (True, [], [])
    assert validate_config({}).valid


@pytest.mark.parametrize(
    ("changes", "path", "text"),
    [
        ({"elastic__min_nodes": 0}, "elastic.min_nodes", "min_nodes (0) must be at least 1"),
        ({"elastic__min_nodes": 8}, "elastic.min_nodes", "min_nodes (8) cannot exceed max_nodes (4)"),
        (
            {"elastic__heartbeat_timeout": 10},
            "elastic.heartbeat_timeout",
            "must exceed heartbeat_interval (30)",
        ),
        ({"elastic__nproc_per_node": "many"}, "elastic.nproc_per_node", "Unknown nproc_per_node 'many'"),
        ({"elastic__rdzv_id": ""}, "elastic.rdzv_id", "rdzv_id cannot be empty"),
        (
            {"checkpoint__checkpoint_interval": 0},
            "checkpoint.checkpoint_interval",
            "checkpoint_interval (0) must be positive",
        ),
        (
            {"checkpoint__memory_snapshot_interval": -1},
            "checkpoint.memory_snapshot_interval",
            "memory_snapshot_interval (-1) cannot be negative",
        ),
        ({"checkpoint__keep_last_n": 0}, "checkpoint.keep_last_n", "keep_last_n (0) must be at least 1"),
        (
            {"checkpoint__async_save_policy": "panic"},
            "checkpoint.async_save_policy",
            "Unknown async_save_policy 'panic'. Valid options: ['warn', 'fail', 'retry']",
        ),
        ({"checkpoint__s3_bucket": "s3://bucket/x"}, "checkpoint.s3_bucket", "takes the bare name"),
        ({"checkpoint__s3_bucket": "No_Bucket"}, "checkpoint.s3_bucket", "not a valid bucket name"),
        (
            {"scaling__strategy": "invalid"},
            "scaling.strategy",
            "Unknown scaling strategy 'invalid'. Valid options: ['variable_batch', 'constant_batch']",
        ),
        (
            {"scaling__target_global_batch_size": None},
            "scaling.target_global_batch_size",
            "target_global_batch_size is required for constant_batch strategy",
        ),
        ({"scaling__min_lr": 1.0}, "scaling.min_lr", "min_lr (1) cannot exceed max_lr (0.01)"),
        ({"training__lr": 0}, "training.lr", "lr (0) must be positive"),
        ({"training__lr": float("nan")}, "training.lr", "must be a finite number"),
        ({"scaling__max_lr": 10**400}, "scaling.max_lr", "must be a finite number"),
        ({"elastic__nproc_per_node": 0}, "elastic.nproc_per_node", "nproc_per_node (0) must be at least 1"),
        (
            {"elastic__nproc_per_node": 1.5},
            "elastic.nproc_per_node",
            "must be a whole number or one of ['auto', 'gpu', 'cpu'], not a fraction (1.5)",
        ),
        ({"checkpoint__s3_bucket": " "}, "checkpoint.s3_bucket", "s3_bucket cannot be empty"),
        (
            {"training__learning_rate": -1e-3},
            "training.learning_rate",
            "learning_rate (-0.001) must be positive",
        ),
        ({"training__batch_size": 0}, "training.batch_size", "batch_size (0) must be positive"),
        (
            {"training__batch_size": 2.5},
            "training.batch_size",
            "must be a whole number, not a fraction (2.5)",
        ),
        ({"training__batch_size": True}, "training.batch_size", "must be a whole number, not true or false"),
        ({"training__max_norm": -1}, "training.max_norm", "max_norm (-1) must be positive"),
        ({"training__seed": None}, "training.seed", "seed has no value"),
        ({"training__seed": 10**26}, "training.seed", "cannot exceed 1.84467e+19"),
        (
            {"training__betas": [0.9]},
            "training.betas",
            "betas must be two numbers, each at least 0 and below 1",
        ),
        ({"training__betas": ["a", "b"]}, "training.betas", "not a list (['a', 'b'])"),
        ({"training__betas": [0.9, 1.5]}, "training.betas", "not a list ([0.9, 1.5])"),
        ({"training__betas": 0.9}, "training.betas", "not a fraction (0.9)"),
        ({"elastic__coordinator": "head:99999"}, "elastic.coordinator", "is not a coordinator address"),
        ({"elastic__coordinator": "head one:50051"}, "elastic.coordinator", "is not a coordinator address"),
        (
            {"checkpoint__max_snapshots": 1},
            "checkpoint.max_snapshots",
            "must be at least 2 where the model is spread",
        ),
        ({"model__n_embd": 65}, "model.n_embd", "n_embd (65) must be a multiple of n_head (2)"),
        ({"model__dropout": 1.5}, "model.dropout", "dropout (1.5) cannot exceed 1"),
        ({"data__files": [1]}, "data.files", "must be a list of names"),
        ({"data__files": [" "]}, "data.files", "files must be a list of names, not a list ([' '])"),
        ({"data__files": ["a", 1, 2]}, "data.files", "must be a list of names, not a list (['a', 1, 2])"),
        ({"parallel__tp": 3}, "parallel.tp", "n_head (2) must be a multiple of tp (3)"),
        ({"parallel__dp": "all"}, "parallel.dp", "Unknown dp 'all'. Valid options: ['auto']"),
        ({"parallel__dp": 0}, "parallel.dp", "dp (0) must be at least 1"),
        (
            {"parallel__dp": 2, "parallel__fsdp": False},
            "parallel.fsdp",
            "fsdp must be true for 2 tensor-parallel groups",
        ),
        (
            {"elastic__nproc_per_node": 1, "elastic__max_nodes": 1},
            "parallel.tp",
            "no world this job can have is a multiple of tp (2): 1",
        ),
        (
            {"elastic__nproc_per_node": 2, "elastic__max_nodes": 2, "parallel__dp": 3},
            "parallel.dp",
            "no world this job can have is dp x tp (6): 2 or 4",
        ),
    ],
)
def test_each_mistake_has_its_message_and_its_position(changes: dict[str, Any], path: str, text: str) -> None:
    result = validate_config(config(**changes))
    assert not result.valid
    assert [error.path for error in result.errors] == [path]
    assert text in result.errors[0]
    assert result.errors[0].startswith(f"{path}: ")


@pytest.mark.parametrize(
    ("changes", "path", "text"),
    [
        (
            {"scaling__base_world_size": 8, "scaling__target_global_batch_size": 64},
            "scaling.base_world_size",
            "outside the worlds this job can have (1 to 4)",
        ),
        ({"checkpoint__memory_snapshot_interval": 30}, "checkpoint.memory_snapshot_interval", "do not nest"),
        ({"training__max_steps": 100}, "checkpoint.checkpoint_interval", "exceeds max_steps (100)"),
        (
            {"scaling__target_global_batch_size": 50},
            "scaling.target_global_batch_size",
            "the last micro-batches of each step are smaller",
        ),
        (
            {"scaling__target_global_batch_size": 50, "scaling__rounding_mode": "ceil"},
            "scaling.target_global_batch_size",
            "each step will take 64 samples",
        ),
        (
            {"scaling__target_global_batch_size": 50, "scaling__rounding_mode": "floor"},
            "scaling.target_global_batch_size",
            "each step will take 32 samples",
        ),
        (
            {"training__learning_rate": 0.5},
            "training.learning_rate",
            "it changes nothing (0.5), because training.lr (0.0003) is given too",
        ),
        ({"scaling__base_lr": 1e-3}, "training.lr", "because scaling.base_lr (0.001) is given too"),
        ({"data__seq_length": 32}, "data.seq_length", "because model.seq_length (64) is given too"),
        ({"scaling__base_lr": 0.1, "training__lr": 0.1}, "scaling.base_lr", "will be clamped"),
        ({"elastic__heartbeat_timeout": 40}, "elastic.heartbeat_timeout", "one late heartbeat"),
        ({"training__batchsize": 8}, "training.batchsize", "did you mean 'training.batch_size'?"),
        ({"training__zzz": 8}, "training.zzz", "unknown key, it changes nothing; known are lr, "),
        ({"training__lr": "1e-4"}, "training.lr", "read as 0.0001"),
        (
            {"elastic__nproc_per_node": 1, "elastic__min_nodes": 2},
            "parallel.tp",
            "with 3 workers this job waits for more: only a multiple of tp (2) can train",
        ),
    ],
)
def test_each_doubt_is_a_warning_and_not_an_error(changes: dict[str, Any], path: str, text: str) -> None:
    result = validate_config(config(**changes))
    assert result.valid
    assert [warning.path for warning in result.warnings] == [path]
    assert text in result.warnings[0]


def test_snapshots_can_be_switched_off() -> None:
    result = validate_config(config(checkpoint__memory_snapshot_interval=0))
    assert (result.valid, result.warnings) == (True, [])


def test_all_mistakes_come_at_once() -> None:
    result = validate_config(
        config(
            elastic__min_nodes=0, checkpoint__checkpoint_interval=0, scaling__strategy="x", training__lr=-1
        )
    )
    assert {error.path for error in result.errors} == {
        "elastic.min_nodes",
        "checkpoint.checkpoint_interval",
        "scaling.strategy",
        "training.lr",
    }


def test_sections_of_the_wrong_shape_are_named() -> None:
    result = validate_config({"training": "lr:1e-4", "elastik": {}})
    assert result.errors == ["training: must be a mapping of settings, not text ('lr:1e-4')"]
    assert result.warnings == ["elastik: unknown section (did you mean 'elastic'?)"]
    assert not validate_config([]).valid  # type: ignore[arg-type]
    assert not validate_config(None).valid  # type: ignore[arg-type]


def test_raising_names_the_section_and_lists_the_rest() -> None:
    result = validate_config(config(scaling__strategy="invalid", training__lr=0))
    with pytest.raises(ConfigurationError) as caught:
        result.raise_if_invalid()
    assert caught.value.message == "Configuration error in 'training': lr (0) must be positive"
    assert "Unknown scaling strategy 'invalid'" in str(caught.value)
    with pytest.raises(ConfigurationError) as caught:
        validate_config(config(scaling__strategy="invalid")).raise_if_invalid()
    assert caught.value.message == (
        "Configuration error in 'scaling': Unknown scaling strategy 'invalid'. "
        "Valid options: ['variable_batch', 'constant_batch']"
    )
    validate_config(GOOD).raise_if_invalid()


def test_elastic_section_can_be_checked_alone() -> None:
    assert validate_elastic_config({"min_nodes": 2, "max_nodes": 4}).valid
    assert validate_elastic_config({"min_nodes": 5, "max_nodes": 4}).errors == [
        "elastic.min_nodes: min_nodes (5) cannot exceed max_nodes (4)"
    ]


def test_of_a_whole_configuration_what_makes_it_elastic_is_checked() -> None:
    wrong = config(
        elastic__min_nodes=5,
        training__lr=-1,
        checkpoint__checkpoint_interval=0,
        scaling__strategy="x",
        model__n_embd=3,
    )
    assert {error.path for error in validate_elastic_config(wrong).errors} == {
        "elastic.min_nodes",
        "training.lr",
        "checkpoint.checkpoint_interval",
        "scaling.strategy",
    }
    assert validate_elastic_config({"scaling": {"strategy": "constant_batch"}}).errors == [
        "scaling.target_global_batch_size: target_global_batch_size is required for constant_batch strategy"
    ]
    assert validate_elastic_config({**GOOD, "notes": "of our own"}).valid
    assert validate_elastic_config({"training": {"lr": 1}}) == validate_elastic_config({})
    assert not validate_elastic_config({"elastic": "two nodes"}).valid
    assert validate_elastic_config({"elastic": None}).valid
    assert validate_elastic_config(None).errors == [  # type: ignore[arg-type]
        "The configuration must be a mapping of sections, not nothing"
    ]


def test_keys_that_others_read_are_named_with_who_does() -> None:
    elsewhere = config(
        elastic__heartbeat_interval=5, elastic__heartbeat_timeout=20, elastic__max_restarts=3, elastic__rdzv_conf={"a": 1},
        elastic__rdzv_endpoint="head:2379", model__name="llama", chaos__enabled=True,
    )  # fmt: skip
    assert not [each for each in validate_config(elsewhere).warnings if "does not read" in each]
    result = validate_training_config(elsewhere)
    assert result.valid
    assert {warning.path: warning.problem.rpartition(": ")[2] for warning in result.warnings} == {
        "elastic.max_restarts": "strata torchrun --max-restarts=3",
        "elastic.rdzv_backend": "strata torchrun --rdzv-backend=etcd",
        "elastic.rdzv_endpoint": "strata torchrun --rdzv-endpoint=head:2379",
        "elastic.rdzv_id": "strata torchrun --rdzv-id=my-job:123",
        "elastic.rdzv_conf": "strata torchrun --rdzv-conf=KEY=VALUE",
        "elastic.heartbeat_interval": "STRATA_HEARTBEAT_INTERVAL=5 strata serve",
        "elastic.heartbeat_timeout": "strata serve --heartbeat-timeout=20",
        "model.name": "the trainer's model is a GPT, whatever its name",
        "chaos": "strata chaos",
    }
    assert all(warning.path != "chaos" for warning in validate_training_config(GOOD).warnings)


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("model.d_model", "model.n_embd"),
        ("model.num_layers", "model.n_layer"),
        ("model.n_heads", "model.n_head"),
        ("training.grad_clip", "training.max_norm"),
        ("data.train_files", "data.files"),
        ("checkpoint.checkpoint_dir", "checkpoint.nvme_path"),
        ("elastic.nproc", "elastic.nproc_per_node"),
        ("elastic.base_world_size", "scaling.base_world_size"),
        ("training.gradient_clipping", "training.max_norm"),
    ],
)
def test_keys_of_other_programs_are_named_with_ours(path: str, meant: str) -> None:
    section, _, key = path.partition(".")
    result = validate_config({section: {key: 1}})
    assert f"{path}: unknown key, it changes nothing (did you mean '{meant}'?)" in result.warnings


def test_every_other_name_leads_to_a_key_that_exists() -> None:
    for section, names in OTHER_NAMES.items():
        known = SECTIONS[section] if section else SECTIONS
        elsewhere = {f"{other}.{key}" for other, keys in SECTIONS.items() for key in keys}
        assert set(names.values()) <= {*known, *elsewhere}
        assert not set(names) & set(known)


def test_unreachable_bucket_is_an_error_only_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("obstore")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/dev/null")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with_bucket = config(checkpoint__s3_bucket="some-bucket")
    assert validate_config(with_bucket).valid
    result = validate_config(with_bucket, validate_s3=True)
    assert [error.path for error in result.errors] == ["checkpoint.s3_bucket"]
    assert "NoCredentialsError" in result.errors[0]
    assert not validate_s3_access("some-bucket", "us-east-1").valid
    monkeypatch.delenv("AWS_EC2_METADATA_DISABLED")
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:9")
    (error,) = validate_s3_access("some-bucket", "us-east-1").errors
    assert "NoCredentialsError" in error, "once, although no operation is allowed"


junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
paths = st.sampled_from([(section, key) for section, keys in SECTIONS.items() for key in keys])


@settings(deadline=None, max_examples=200)
@given(st.lists(st.tuples(paths, junk), max_size=6))
def test_no_value_anywhere_breaks_the_validator_or_is_changed_by_it(
    values: list[tuple[tuple[str, str], Any]],
) -> None:
    built: dict[str, Any] = {}
    for (section, key), value in values:
        built.setdefault(section, {})[key] = value
    before = repr(built)
    result = validate_config(built)
    assert repr(built) == before
    assert result.valid == (not result.errors)


def test_keys_by_their_earlier_names_are_the_schemas_of_today() -> None:
    assert Key(kind="int", at_least=1) == COUNT
    assert Key(kind="number", at_least=0, at_most=1) == FRACTION
    assert Key(kind="str", nullable=True) == OPTIONAL_TEXT
    assert Key(kind="str", choices=("fp32", "bf16")) == SECTIONS["training"]["precision"]
    assert Key(kind="int", above=0, nullable=True) == SECTIONS["scaling"]["target_global_batch_size"]
    assert Key(kind="names") == SECTIONS["data"]["files"]
    assert Key(kind="mapping") == SECTIONS["elastic"]["rdzv_conf"]
