"""The trainer's own reading of its configuration: every mistake before anything starts, in the guide's words."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic_harness.errors import ConfigurationError
from elastic_harness.train import main
from elastic_harness.train_config import read_train_config
from strata.trainer.config import ParallelSection

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
