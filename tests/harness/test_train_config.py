"""The trainer's own reading of its configuration: every mistake before anything starts, in the guide's words."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from elastic_harness.errors import ConfigurationError
from elastic_harness.train import main
from elastic_harness.train_config import read_train_config
from strata.trainer.config import ParallelSection, TrainConfig, coordinator_address
from strata.trainer.validation import ALIASES, ELSEWHERE, SECTIONS

GOOD = "training: {max_steps: 10}\ndata: {files: [a.jsonl]}\n"


def refused(tmp_path: Path, text: str, *overrides: str) -> str:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(ConfigurationError) as caught:
        read_train_config(path, overrides)
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "training:\n  lr:1e-4\n  seed: 1\n",
            "yaml.scanner.ScannerError: mapping values are not allowed here",
        ),
        ("training:\n\tlr: 1e-4\n", "found character '\\t' that cannot start any token"),
        ("elastic:\n  rdzv_id: my-job: 123\n", "mapping values are not allowed here"),
    ],
)
def test_broken_yaml_is_reported_in_the_parsers_words_with_a_way_to_see_more(
    tmp_path: Path, text: str, said: str
) -> None:
    told = refused(tmp_path, text)
    assert said in told
    assert "strata validate" in told


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("elastic.min_nodes=0", "Configuration error in 'elastic': min_nodes (0) must be at least 1"),
        ("elastic.min_nodes=8", "min_nodes (8) cannot exceed max_nodes (4)"),
        ("checkpoint.checkpoint_interval=0", "checkpoint_interval (0) must be positive"),
        (
            "scaling.strategy=constant_batch",
            "target_global_batch_size is required for constant_batch strategy",
        ),
        ("model.n_embd=30", "must be a multiple of n_head"),
        ("parallel.tp=3", "n_head (4) must be a multiple of tp (3)"),
        ("parallel.dp=some", "Unknown dp 'some'"),
    ],
)
def test_each_mistake_of_the_guide_is_refused_in_its_words(tmp_path: Path, override: str, said: str) -> None:
    assert said in refused(tmp_path, GOOD, override)


def test_what_is_missing_is_said_at_once(tmp_path: Path) -> None:
    told = refused(tmp_path, "model: {n_embd: 64}\n")
    assert "Configuration error in 'data': files must name the training data" in told
    assert "training.max_steps" in told


def test_an_empty_list_of_files_is_refused_like_none(tmp_path: Path) -> None:
    assert "files must name the training data" in refused(tmp_path, GOOD, "data.files=[]")


def test_a_number_in_quotes_is_read_as_the_warning_says(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(GOOD + "checkpoint: {max_memory_mb: '1e3'}\nscaling: {max_lr: '1e-3'}\n")
    config, warnings = read_train_config(path)
    assert (config.checkpoint.max_memory_mb, config.scaling.max_lr) == (1000.0, 0.001)
    assert [warning for warning in warnings if "read as 1000" in warning]


def test_the_environment_says_where_checkpoints_go_unless_the_file_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CHECKPOINT_DIR", "/nvme/mine")
    monkeypatch.setenv("CHECKPOINT_FOLDER", "/nvme/lost")
    path = tmp_path / "config.yaml"
    path.write_text(GOOD)
    config, warnings = read_train_config(path)
    assert config.checkpoint.nvme_path == "/nvme/mine"
    assert (
        "the environment variable CHECKPOINT_FOLDER changes nothing (did you mean CHECKPOINT_DIR?)"
        in warnings
    )
    assert read_train_config(path, ["checkpoint.nvme_path=/else"])[0].checkpoint.nvme_path == "/else"


def test_the_environment_says_where_checkpoints_go_where_the_file_says_null(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(GOOD + "checkpoint: {nvme_path: null}\n")
    assert read_train_config(path)[0].checkpoint.nvme_path is None
    monkeypatch.setenv("CHECKPOINT_DIR", "/nvme/mine")
    assert read_train_config(path)[0].checkpoint.nvme_path == "/nvme/mine"


def test_an_override_without_a_value_is_refused(tmp_path: Path) -> None:
    assert "'training.lr' is no setting" in refused(tmp_path, GOOD, "training.lr")


@pytest.mark.parametrize(
    "text",
    [
        "a: !foo 1",
        "a: &a [*a]",
        "a: &a {b: *a}",
        "<<: 5",
        "training: {? [1, 2] : 3}",
        "x: !!python/object/apply:os.system ['true']",
        "training: {lr: 1}\ntraining: {lr: 2}",
    ],
)
def test_yaml_that_means_nothing_here_is_refused_with_a_reason(tmp_path: Path, text: str) -> None:
    told = refused(tmp_path, text + "\n")
    assert "config.yaml' cannot be read: " in told
    assert "line " in told


def test_settings_of_scaling_and_checkpoints_reach_the_trainer(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(GOOD)
    wanted: dict[str, dict[str, Any]] = {
        "scaling": {"rounding_mode": "floor", "base_lr": 5e-4, "base_batch_size": 64},
        "checkpoint": {"async_save": False, "s3_region": "eu-west-1", "max_snapshots": 7},
        "elastic": {"nproc_per_node": 4},
    }
    overrides = [f"{name}.{key}={value}" for name, keys in wanted.items() for key, value in keys.items()]
    config, warnings = read_train_config(path, overrides)
    for name, keys in wanted.items():
        assert {key: getattr(getattr(config, name), key) for key in keys} == keys
    assert not [warning for warning in warnings if "does not read" in warning]


def test_every_key_that_passes_is_read_or_named(tmp_path: Path) -> None:
    """A key that changes nothing, and of which nobody is warned, is worse than one that is refused."""
    read = {
        f"{name}.{each.name}"
        for name, section in get_type_hints(TrainConfig).items()
        for each in fields(next(iter(get_args(section)), section))
    }
    named = {path for path, _ in ALIASES} | set(ELSEWHERE)
    known = {f"{name}.{key}" for name, keys in SECTIONS.items() for key in keys if name != "chaos"}
    assert known - read - named == set()


@pytest.mark.parametrize("name", ["COORDINATOR_ADDR", "COORDINATOR_URL"])
def test_an_address_in_the_environment_that_is_none_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(GOOD)
    monkeypatch.setenv(name, "head:99999")
    with pytest.raises(ConfigurationError, match=f"{name}: 'head:99999' is not a coordinator address"):
        coordinator_address(read_train_config(path)[0])
    assert coordinator_address(read_train_config(path, ["elastic.coordinator=head:1"])[0]) == "head:1"


def test_overrides_and_older_names_are_taken(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("training: {learning_rate: 0.1, epochs: 1}\ndata: {data_files: a.txt, seq_length: 16}\n")
    config, warnings = read_train_config(path, ["training.lr=0.5", "data.text_key=content"])
    assert (config.training.lr, config.data.text_key, config.data.files) == (0.5, "content", ("a.txt",))
    assert config.model.seq_length == 16
    assert not [warning for warning in warnings if "unknown" in warning]


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="does not exist"):
        read_train_config(tmp_path / "absent.yaml")


def test_the_environment_names_the_configuration_where_no_flag_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CONFIG_FILE", str(tmp_path / "from-env.yaml"))
    assert main([]) == 2
    assert "from-env.yaml" in capsys.readouterr().err
    assert main(["--config", str(tmp_path / "flag.yaml")]) == 2
    assert "flag.yaml" in capsys.readouterr().err
    monkeypatch.setenv("LOGLEVEL", "loud")
    assert main([]) == 2
    assert "LOGLEVEL must be one of CRITICAL, " in capsys.readouterr().err
    monkeypatch.setenv("LOGLEVEL", "error")
    monkeypatch.setenv("LOG_FORMAT", "xml")
    assert main([]) == 2
    assert "LOG_FORMAT must be text or json" in capsys.readouterr().err


def test_a_model_is_spread_only_where_the_section_is_there(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(GOOD)
    assert read_train_config(path)[0].parallel is None
    assert read_train_config(path, ["parallel=null"])[0].parallel is None
    assert read_train_config(path, ["parallel={}"])[0].parallel == ParallelSection()
    config, warnings = read_train_config(path, ["parallel.tp=2", "parallel.dp=auto", "parallel.fsdp=true"])
    assert config.parallel == ParallelSection(dp="auto", tp=2, fsdp=True)
    assert not [warning for warning in warnings if "parallel" in warning]
