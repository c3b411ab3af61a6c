"""What a task may be: config checked all at once against the recipe's schema, recipes read from an operator's folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from strata.cli.launching.tasks import WrongCall, read_settings
from strata.config import ConfigError
from strata.core.messages import InvalidArgument, Unknown
from strata.launch.context import NotATask, TaskContext, current_task
from strata.launch.programs.training import prepare, settings
from strata.launch.recipes import InvalidConfig, Recipes, read_recipes, script_recipe
from strata.launch.recipes_builtin import BUILT_IN, INDEXING, TRAINING
from strata.validation import check, filled, schema_problems

WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "unknown key": (
        {"learning_rat": 1},
        "config.learning_rat is not a known key; did you mean 'learning_rate'?",
    ),
    "far-off key": ({"zebra": 1}, "config.zebra is not a known key; known are batch_size"),
    "text for a number": ({"learning_rate": "fast"}, "config.learning_rate must be a number, not 'fast'"),
    "truth for a number": ({"steps": True}, "config.steps must be a whole number, not True"),
    "fraction for a whole": ({"batch_size": 1.5}, "config.batch_size must be a whole number, not 1.5"),
    "zero": ({"learning_rate": 0}, "config.learning_rate must be more than 0, not 0"),
    "below": ({"batch_size": 0}, "config.batch_size must be between 1 and 1,000,000, not 0"),
    "above": ({"batch_size": 2**40}, "config.batch_size must be between 1 and 1,000,000, not 1099511627776"),
    "not a choice": ({"precision": "fp8"}, "config.precision must be one of fp32, bf16, not 'fp8'"),
    "empty": ({"tokenizer": ""}, "config.tokenizer must not be empty"),
    "inner key": (
        {"model": {"n_layers": 2}},
        "config.model.n_layers is not a known key; did you mean 'n_layer'?",
    ),
    "inner type": ({"model": 7}, "config.model must be a table of keys, not 7"),
    "float for a whole": ({"steps": 2.0}, "config.steps must be a whole number, not 2.0"),
    "not finite": (
        {"learning_rate": float("inf")},
        "config.learning_rate must be a finite number, not inf",
    ),
    "mistyped choice": ({"precision": 7}, "config.precision must be text, not 7"),
    "null": ({"steps": None}, "config.steps must be a whole number, not None"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_said_with_the_path_of_its_key(name: str) -> None:
    config, message = WRONG[name]
    (problem,) = check(TRAINING.schema, config, "config")
    assert str(problem).startswith(message)


def test_all_problems_are_reported_at_once() -> None:
    config = {"learning_rate": "x", "batch_size": 0, "modl": {}, "model": {"n_head": "two"}}
    with pytest.raises(InvalidConfig) as refusal:
        TRAINING.check(config, worker_count=1, dataset_id=None)
    assert {p["field"] for p in refusal.value.details} == {
        "config.learning_rate",
        "config.batch_size",
        "config.modl",
        "config.model.n_head",
    }
    assert "GET /api/recipes" in refusal.value.hint


def test_defaults_are_filled_and_what_was_given_stays() -> None:
    config = filled(TRAINING.schema, {"steps": 7, "model": {"n_layer": 9}})
    assert (config["steps"], config["learning_rate"], config["batch_size"]) == (7, 3e-4, 8)
    assert config["model"] == {"n_layer": 9, "n_head": 4, "n_embd": 128, "dropout": 0.0}
    assert "epochs" not in config
    assert check(TRAINING.schema, config, "config") == []


def test_the_built_in_schemas_are_valid() -> None:
    for recipe in BUILT_IN:
        assert schema_problems(recipe.schema, "config") == []


def a_training(folder: Path, task_id: str = "task-1", **config: Any) -> TaskContext:
    return TaskContext(
        task_id=task_id,
        name="t",
        worker_count=2,
        config=TRAINING.full_config(config),
        dataset=None,
        task_dir=folder,
        shutdown_s=7.0,
    )


def test_the_same_text_in_other_sequences_has_another_name_at_the_coordinator(tmp_path: Path) -> None:
    names = set()
    for task_id, length in (("task-1", 32), ("task-2", 64)):
        config = prepare(a_training(tmp_path / task_id, task_id, seq_length=length))
        names.add(Path(yaml.safe_load(config.read_text())["data"]["index_file"]).stem)
    assert names == {"sample-text-task-1", "sample-text-task-2"}


def test_the_trainer_gets_what_was_asked_for(tmp_path: Path) -> None:
    task = a_training(tmp_path, learning_rate=0.5, batch_size=3, steps=11, checkpoint_interval=4)
    document = settings(task, ["text.txt"], tmp_path / "t.index")
    training = document["training"]
    assert (training["lr"], training["batch_size"], training["max_steps"]) == (0.5, 3, 11)
    assert document["checkpoint"]["checkpoint_interval"] == 4
    assert document["checkpoint"]["nvme_path"] == str(tmp_path / "checkpoints")
    assert document["scaling"]["target_global_batch_size"] == 6
    assert document["scaling"]["max_lr"] >= 0.5
    assert (document["elastic"]["job_id"], document["elastic"]["shutdown_timeout"]) == ("task-1", 7.0)


def test_a_recipe_that_is_not_known_is_refused_with_the_nearest() -> None:
    with pytest.raises(Unknown, match="Did you mean 'training'"):
        Recipes(BUILT_IN).get("traning")
    with pytest.raises(InvalidArgument, match="dataset_id"):
        INDEXING.check({}, worker_count=1, dataset_id=None)


def test_training_takes_one_gpu_for_each_worker_where_there_are_enough() -> None:
    assert TRAINING.gpus_for({}, worker_count=4, gpus=8) == 1
    assert TRAINING.gpus_for({}, worker_count=4, gpus=3) == 0
    assert TRAINING.gpus_for({"device": "cpu"}, worker_count=1, gpus=8) == 0
    assert INDEXING.gpus_for({}, worker_count=1, gpus=8) == 0


def declare(folder: Path, name: str, text: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.toml").write_text(text)
    (folder / "job.py").write_text("print('hello')\n")


def test_a_declared_script_gets_each_value_as_one_argument(tmp_path: Path) -> None:
    declare(
        tmp_path,
        "finetune",
        """
        description = "Fine-tune"
        script = "job.py"
        arguments = ["--lr", "{lr}", "--note", "{note}", "--out={checkpoints}", "--deep", "{deep}"]
        gpus_per_worker = 1
        max_workers = 4
        [config.lr]
        type = "number"
        default = 0.1
        [config.note]
        type = "string"
        [config.deep]
        type = "boolean"
        """,
    )
    (recipe,) = read_recipes(tmp_path)
    config = recipe.full_config({"note": "a b; rm -rf / {lr} $(x)"})
    assert recipe.command(config, {"checkpoints": "/c"}) == (
        str(tmp_path / "job.py"),
        *("--lr", "0.1", "--note", "a b; rm -rf / {lr} $(x)", "--out=/c"),
    )
    with pytest.raises(InvalidArgument, match="worker_count: is 5; 'finetune' takes at most 4"):
        recipe.check({}, worker_count=5, dataset_id=None)


BAD_DECLARATIONS = {
    "no program": ("description = 'x'", "either script or module"),
    "two programs": ("script = 'job.py'\nmodule = 'job'", "either script or module"),
    "no such script": ("script = 'nothing.py'", "there is no script"),
    "a shell line": ("module = 'os; rm -rf /'", "dotted name of a Python module"),
    "unknown key": ("script = 'job.py'\ncomand = 'rm'", "comand is not a known key"),
    "wrong type": ("script = 'job.py'\narguments = '--x'", "arguments must be a list"),
    "unknown place": ("script = 'job.py'\narguments = ['{lr}']", "{lr} is not a key of config"),
    "bad schema": (
        "script = 'job.py'\n[config.lr]\ntype = 'float'",
        "config.properties.lr.type must be one of",
    ),
    "no such keyword": (
        "script = 'job.py'\n[config.lr]\nminimun = 1",
        "config.properties.lr.minimun is not a known key; did you mean 'minimum'?",
    ),
    "required by nobody": ("script = 'job.py'\nrequired = ['lr']", "names that are in properties"),
    "environment": ("script = 'job.py'\n[environment]\nX = 1", "environment.X must be text, not 1"),
    "bad default": (
        "script = 'job.py'\n[config.lr]\ntype = 'number'\ndefault = 'x'",
        "must be a number, not 'x'",
    ),
    "no TOML": ("script = ", "cannot be read"),
}


def test_a_bad_declaration_is_refused_and_all_problems_are_reported(tmp_path: Path) -> None:
    for number, (text, _) in enumerate(BAD_DECLARATIONS.values()):
        declare(tmp_path, f"bad-{number}", text)
    declare(tmp_path, "Bad Name", "script = 'job.py'")
    with pytest.raises(ConfigError) as refusal:
        read_recipes(tmp_path)
    for number, (_, message) in enumerate(BAD_DECLARATIONS.values()):
        assert any(f"bad-{number}.toml" in p and message in p for p in refusal.value.problems), message
    assert any("Bad Name.toml" in p for p in refusal.value.problems)
    assert read_recipes(tmp_path / "nowhere") == []


def test_a_script_that_is_run_here_gets_its_arguments_unchanged(tmp_path: Path) -> None:
    script = tmp_path / 'a "script".py'
    script.write_text("")
    words = ["--lr=1", "{argument_0}", "two words", ""]
    declared = script_recipe(script, working_dir=tmp_path, arguments=len(words), spares=2)
    (tmp_path / "own.toml").write_text(declared)
    (recipe,) = read_recipes(tmp_path)
    config = {f"argument_{n}": word for n, word in enumerate(words)}
    assert check(recipe.schema, config) == []
    assert recipe.command(config, {}) == (str(script), *words)
    assert recipe.working_dir == tmp_path
    assert recipe.spares == 2


def test_settings_on_the_command_line_are_typed_and_may_be_nested() -> None:
    words = ["learning_rate=1e-3", "steps=10", "model.n_layer=4", "tokenizer=bytes", "flag=true"]
    assert read_settings(words, {"model": {"n_head": 2}}) == {
        "learning_rate": 1e-3,
        "steps": 10,
        "model": {"n_head": 2, "n_layer": 4},
        "tokenizer": "bytes",
        "flag": True,
    }
    for word in ("steps", "=1"):
        with pytest.raises(WrongCall):
            read_settings([word], {})


def test_a_program_that_is_no_task_gets_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("STRATA_TASK", raising=False)
    with pytest.raises(NotATask, match="not part of a task"):
        current_task()
    task = TaskContext(
        task_id="t",
        name="n",
        worker_count=1,
        config={"a": 1},
        dataset=None,
        task_dir=tmp_path,
        shutdown_s=1.0,
    )
    task.write(tmp_path / "task.json")
    monkeypatch.setenv("STRATA_TASK", str(tmp_path / "task.json"))
    assert current_task() == task
