"""`strata validate` explains what is wrong, where, and what was probably meant."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from elastic_harness.data.index_builder import IndexBuilder
from elastic_harness.errors import ConfigurationError
from elastic_harness.train_config import read_train_config
from strata.cli.launching.validate import validate
from tests.data.tokens import bpe

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
        ("training:\n  lr: !foo 1\n", 2, "Tags (!name) are not understood here."),
        ("x: !!python/object/apply:os.system ['true']\n", 1, "Tags (!name) are not understood here."),
        ("a: &a [*a]\n", 1, "cannot contain itself"),
        ("a: &a {b: *a}\n", 1, "cannot contain itself"),
        ("<<: 5\n", 1, "takes a section from elsewhere in the file"),
        ("training: {? [1, 2] : 3}\n", 1, "A key must be a name"),
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
    assert code == 0
    assert "model.d_model: unknown key, it changes nothing (did you mean 'model.n_embd'?)" in output
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


def test_sections_may_be_taken_from_elsewhere_in_the_file(tmp_path: Path) -> None:
    assert run(tmp_path, "training: &t {max_steps: 10}\ndata: {files: [a.jsonl]}\n")[0] == 0
    merged = "model: &m {n_layer: 2}\ntraining: {max_steps: 10}\ndata: {files: [a.jsonl]}\nparallel: {<<: {tp: 1}}\n"
    assert run(tmp_path, merged)[0] == 0


@pytest.mark.parametrize("text", ["a: " + "[" * 3000 + "]" * 3000, "null: 4\n", "training: {lr: ${}}\n"])
def test_nothing_that_yaml_allows_is_a_traceback(tmp_path: Path, text: str) -> None:
    code, output = run(tmp_path, text)
    assert (code, "error: " in output) == (1, True)


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A configuration whose index is here."""
    monkeypatch.chdir(tmp_path)
    Path("a.jsonl").write_text('{"text": "some words"}\n')
    IndexBuilder("bytes").build("a.jsonl", "a.index")
    return COMPLETE


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("model.vocab_size=10", "vocab_size (10) is too small for 'a.index', which has tokens up to 119"),
        ("data.text_key=content", "the index holds the texts under 'text', not 'content'"),
        ("data.tokenizer=gpt2", "the index was tokenized with bytes, not with gpt2"),
        ("data.index_file=.", ". is a folder, not a token index"),
        ("data.index_file=a.jsonl", "bad magic number"),
    ],
)
def test_an_index_that_is_here_and_does_not_fit_is_an_error(
    tmp_path: Path, data: str, override: str, said: str
) -> None:
    assert run(tmp_path, data)[0] == 0
    code, output = run(tmp_path, data, override)
    assert (code, said in output) == (1, True), output


def test_an_index_that_is_elsewhere_is_nothing_to_complain_about(tmp_path: Path, data: str) -> None:
    assert run(tmp_path, data, "data.index_file=other.index", "model.vocab_size=10")[0] == 0
    assert run(tmp_path, data, "model.vocab_size=128")[0] == 0, "no token of it is as large"


def test_a_tokenizer_of_another_name_may_be_the_same(tmp_path: Path, data: str) -> None:
    tokenizer = bpe.train(tmp_path / "tokenizer.json")
    IndexBuilder(str(tokenizer)).build("a.jsonl", "bpe.index")
    assert run(tmp_path, data, "data.index_file=bpe.index", f"data.tokenizer={tokenizer}")[0] == 0
    code, output = run(tmp_path, data, "data.index_file=bpe.index", "data.tokenizer=somebody/gpt2")
    assert (code, "not with somebody/gpt2; whether it fits is not known here" in output) == (0, True), output
    assert run(tmp_path, data, "data.index_file=bpe.index", "data.tokenizer=bytes")[0] == 1


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
        COMPLETE + "elastic: {coordinator: 'head:99999'}\n",
        COMPLETE + "parallel: {tp: 2}\ncheckpoint: {max_snapshots: 1}\n",
        COMPLETE.replace("lr: 1e-4", "betas: [0.9]"),
        COMPLETE.replace("lr: 1e-4", "betas: [0.9, 1.5]"),
        COMPLETE.replace("lr: 1e-4", "betas: [0.9, 0.99]"),
        COMPLETE.replace("lr: 1e-4", "seed: 99999999999999999999999999"),
        COMPLETE.replace("lr: 1e-4", "seed: -5"),
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
