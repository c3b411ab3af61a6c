"""`strata validate` explains what is wrong, where, and what was probably meant."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from elastic_harness.errors import ConfigurationError
from elastic_harness.train_config import read_train_config
from strata.cli.launching.validate import validate

COMPLETE = "training: {max_steps: 10, lr: 1e-4}\ndata: {files: [a.jsonl]}\n"
EXAMPLES = sorted((Path(__file__).parents[2] / "examples" / "configs").glob("*.yaml"))
app = typer.Typer()
app.command()(validate)


def run(tmp_path: Path, text: str, *words: str) -> tuple[int, str]:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    result = CliRunner().invoke(app, [str(path), *words])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output.replace(str(path), "config.yaml")


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        ("training:\n  lr:1e-4\n", 1, "There is no space after the colon: write 'lr: 1e-4'."),
        ("training:\n  lr:1e-4\n  seed: 1\n", 2, "Line 2 has no space after its colon. Write 'lr: 1e-4'."),
        ("training:\n\tlr: 1e-4\n", 2, "indented with a tab"),
        ("training:\n  lr: 1e-4\n\tseed: 1\n", 3, "indented with a tab"),
        ("elastic:\n  rdzv_id: my-job: 123\n", 2, "needs quotes"),
        ("training:\n  lr: 1e-4\n   seed: 1\n", 3, "indentation is off"),
        ('data:\n  tokenizer: "gpt2\n', 3, "never closed"),
        ("training:\n  lr: 1e-4\n  lr: 2e-4\n", 3, "the first is on line 2"),
        ("elastic:\n  min_nodes: 0\n", 2, "min_nodes (0) must be at least 1"),
        ("elastic:\n  min_nodes: 8\n  max_nodes: 4\n", 2, "min_nodes (8) cannot exceed max_nodes (4)"),
        ("checkpoint:\n  checkpoint_interval: 0\n", 2, "checkpoint_interval (0) must be positive"),
        ("scaling:\n  strategy: invalid\n", 2, "Unknown scaling strategy 'invalid'. Valid options: "),
        ("just words\n", 1, "must hold sections"),
    ],
)
def test_each_mistake_is_explained_with_its_line(tmp_path: Path, text: str, line: int, said: str) -> None:
    code, output = run(tmp_path, text)
    assert code == 1
    assert f"config.yaml:{line}: error: " in output
    assert said in output
    assert "Traceback" not in output


def test_what_is_missing_is_reported_without_a_line(tmp_path: Path) -> None:
    code, output = run(tmp_path, "scaling:\n  strategy: constant_batch\n")
    assert code == 1
    assert "target_global_batch_size is required for constant_batch strategy" in output


def test_quoted_and_glued_colons_in_values_are_fine(tmp_path: Path) -> None:
    assert run(tmp_path, COMPLETE + 'elastic:\n  rdzv_id: "my-job: 123"\n')[0] == 0
    assert run(tmp_path, COMPLETE + "elastic:\n  rdzv_id: my-job:123\n")[0] == 0


def test_number_without_a_point_is_a_number(tmp_path: Path) -> None:
    intervals = "checkpoint: {checkpoint_interval: 10, memory_snapshot_interval: 5}\n"
    assert run(tmp_path, COMPLETE + intervals) == (0, "config.yaml can be used\n")


def test_all_errors_come_at_once_and_warnings_alone_pass_unless_strict(tmp_path: Path) -> None:
    code, output = run(
        tmp_path, COMPLETE + "elastic: {min_nodes: 0}\ncheckpoint: {checkpoint_interval: 0}\ntraning: {}\n"
    )
    assert code == 1
    assert "2 errors, 1 warning" in output
    doubtful = COMPLETE + "model:\n  d_model: 64\n"
    code, output = run(tmp_path, doubtful)
    assert (code, "model.d_model: unknown key, it changes nothing (did you mean 'n_embd'?)" in output) == (
        0,
        True,
    )
    assert run(tmp_path, doubtful, "--strict")[0] == 1


def test_overrides_are_checked_like_the_file(tmp_path: Path) -> None:
    assert run(tmp_path, COMPLETE, "training.lr=0")[0] == 1
    assert run(tmp_path, COMPLETE.replace("1e-4", "0"), "training.lr=3e-4")[0] == 0
    code, output = run(tmp_path, "training:\n  lr: 1e-4\n", "training.lr")
    assert (code, "Write section.key=value." in output) == (1, True)


def test_interpolations_are_resolved_and_broken_ones_named(tmp_path: Path) -> None:
    assert run(tmp_path, COMPLETE + "scaling: {base_batch_size: '${training.max_steps}'}\n")[0] == 0
    code, output = run(tmp_path, "training:\n  lr: ${nowhere}\n")
    assert (code, "nowhere" in output) == (1, True)


def test_file_that_cannot_be_read_is_another_exit_code(tmp_path: Path) -> None:
    for path in (tmp_path / "absent.yaml", tmp_path):
        result = CliRunner().invoke(app, [str(path)])
        assert (result.exit_code, "Cannot read" in result.output) == (2, True)
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    assert CliRunner().invoke(app, [str(tmp_path / "binary.yaml")]).exit_code == 2
    assert run(tmp_path, "")[0] == 1


def test_json_carries_every_fact(tmp_path: Path) -> None:
    code, output = run(tmp_path, "elastic:\n  min_nodes: 0\n" + COMPLETE, "--json")
    document: dict[str, Any] = json.loads(output)
    assert (code, document["valid"]) == (1, False)
    assert [problem for problem in document["problems"] if problem["severity"] == "error"] == [
        {
            "severity": "error",
            "line": 2,
            "path": "elastic.min_nodes",
            "message": "min_nodes (0) must be at least 1",
            "hint": "",
        }
    ]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_every_example_is_valid_without_a_warning(path: Path) -> None:
    result = CliRunner().invoke(app, [str(path), "--strict"])
    assert result.exit_code == 0, result.output


def test_there_are_examples() -> None:
    assert {"small.yaml", "multi_node.yaml"} <= {path.name for path in EXAMPLES}


@pytest.mark.parametrize(
    "text",
    [
        COMPLETE,
        "training: {max_steps: 10}\n",
        "training: {max_steps: 10}\ndata: {files: []}\n",
        "training: {max_steps: 10}\ndata: {data_files: a.txt}\n",
        "data: {files: [a.jsonl]}\n",
        "data: {files: [a.jsonl]}\ntraining: {epochs: 1}\n",
        COMPLETE + "model: {n_embd: 30}\n",
        COMPLETE + "scaling: {strategy: constant_batch}\n",
    ],
)
def test_what_can_be_used_is_what_the_trainer_begins_with(tmp_path: Path, text: str) -> None:
    usable = run(tmp_path, text)[0] == 0
    try:
        read_train_config(tmp_path / "config.yaml")
    except ConfigurationError:
        assert not usable
    else:
        assert usable


def test_variables_that_change_nothing_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RDZV_ENDPOINTS", "head:2379")
    code, output = run(tmp_path, COMPLETE)
    assert code == 0
    assert "the environment variable RDZV_ENDPOINTS changes nothing (did you mean RDZV_ENDPOINT?)" in output
