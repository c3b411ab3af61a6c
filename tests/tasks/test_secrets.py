"""Secrets of tasks: they reach the program and nobody else; of the coordinator's environment a task sees what it needs."""

from __future__ import annotations

import hashlib
import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from strata.config import ConfigError
from strata.coordinator.tasks.secrets import TaskSecrets
from strata.core.messages import InvalidArgument
from strata.launch.concealer import Concealer
from strata.launch.inherited import inherited
from strata.launch.recipes import InvalidConfig, Recipe, read_recipes
from tests.support import eventually
from tests.tasks.conftest import Tasks

SECRET = "correct-horse-battery-staple"
CREDENTIAL = "the-operators-own-credential"
ADMIN = "the-administrators-own-token-0123456789"
PROGRAM = """
import hashlib, json, os, pathlib, sys, time
folder = pathlib.Path(sys.argv[1])
secret = os.environ["SERVICE_KEY"]
(folder / "digest").write_text(hashlib.sha256(secret.encode()).hexdigest())
(folder / "environment.new").write_text(json.dumps(dict(os.environ)))
(folder / "environment.new").rename(folder / "environment")
print(f"signing in with {secret}", flush=True)
while not (folder / "go").exists():
    time.sleep(0.02)
raise ValueError(f"the service refused {secret}")
"""
RECIPE = """
script = "{script}"
arguments = ["{folder}", "--name", "{{name}}"]
warm = false
[config.name]
type = "string"
[config.service_key]
type = "secret"
"""


@pytest.fixture
def tasks(tmp_path: Path) -> Iterator[Tasks]:
    (tmp_path / "program.py").write_text(PROGRAM)
    recipes = tmp_path / "recipes"
    recipes.mkdir()
    (recipes / "calling.toml").write_text(RECIPE.format(script=tmp_path / "program.py", folder=tmp_path))
    made = Tasks(
        tmp_path / "data",
        {
            "STRATA_TASK_WORKERS": "2",
            "STRATA_RECIPES_DIR": str(recipes),
            "STRATA_TOKEN": ADMIN,
            "AWS_SECRET_ACCESS_KEY": CREDENTIAL,
            "MY_SETTING": "wanted",
            "STRATA_TASK_ENVIRONMENT": "MY_*",
        },
    )
    as_administrator = urllib.request.build_opener()
    as_administrator.addheaders = [("Authorization", f"Bearer {ADMIN}")]
    urllib.request.install_opener(as_administrator)
    made.server.start()
    yield made
    made.close()
    urllib.request.install_opener(urllib.request.build_opener())


@pytest.mark.timeout(300)
def test_a_secret_reaches_the_program_and_nobody_else(tasks: Tasks, tmp_path: Path) -> None:
    body = {"name": "x", "type": "calling", "max_retries": 0, "config": {"name": "n", "service_key": SECRET}}
    status, answer = tasks.server.post("/api/tasks", body)
    assert status == 201, answer
    task_id = answer["task_id"]
    tasks.ids.append(task_id)
    eventually((tmp_path / "environment").exists, within_s=120)
    assert (tmp_path / "digest").read_text() == hashlib.sha256(SECRET.encode()).hexdigest()

    processes = tasks.processes(task_id)
    assert len(processes) >= 3  # Supervisor, agent, worker.
    lines = " ".join(processes.values())
    (tmp_path / "go").touch()
    ended = tasks.ended(task_id)
    eventually(lambda: "signing in with (secret)" in tasks.log(task_id), within_s=30)
    assert ended["config"] == {"name": "n", "service_key": "(secret)"}
    assert "ValueError: the service refused (secret)" in ended["exit_cause"]["message"]
    seen = [lines, json.dumps(ended), tasks.log(task_id), "".join(tasks.server.output)]
    seen += [json.dumps(tasks.server.get(path)) for path in ("/api/tasks", "/api/dashboard", "/api/recipes")]
    tasks.server.stop()
    kept = tmp_path / "data" / "tasks" / task_id / "secrets.json"
    assert kept.stat().st_mode & 0o077 == 0
    private = [
        kept,
        *kept.parent.glob("run-*/**/*"),
    ]  # What it said, as it said it, where only this user may look.
    for path in (tmp_path / "data").rglob("*"):
        if path.is_file() and path not in private:
            seen.append(path.read_bytes().decode(errors="replace"))
    assert [text[:200] for text in seen if SECRET in text] == []


@pytest.mark.timeout(300)
def test_a_task_inherits_neither_the_administrators_token_nor_credentials(
    tasks: Tasks, tmp_path: Path
) -> None:
    (tmp_path / "go").touch()
    task_id = tasks.submit("calling", name="n", service_key=SECRET)
    eventually((tmp_path / "environment").exists, within_s=120)
    tasks.server.post(f"/api/tasks/{task_id}/stop", {})
    found = json.loads((tmp_path / "environment").read_text())
    assert [name for name, value in found.items() if CREDENTIAL in value or ADMIN in value] == []
    assert found["MY_SETTING"] == "wanted"
    assert {"PATH", "HOME", "STRATA_JOB_ID"} <= found.keys()
    assert found["STRATA_TOKEN"] not in ("", ADMIN)


def recipe(tmp_path: Path, config: str, arguments: str = "[]") -> Recipe:
    (tmp_path / "x.py").touch()
    (tmp_path / "x.toml").write_text(f"script = 'x.py'\narguments = {arguments}\n{config}")
    return read_recipes(tmp_path)[0]


@pytest.mark.parametrize(
    ("config", "arguments", "told"),
    [
        ("[config.key]\ntype='secret'", "['--key', '{key}']", "command lines"),
        ("[config.key]\ntype='secret'\ndefault='x'", "[]", "no default"),
        ("[config.key]\ntype='secret'\nvariable='a b'", "[]", "name of an environment variable"),
        ("[config.key]\ntype='secret'\nvariable='STRATA_TOKEN'", "[]", "choose another"),
        ("[config.key]\ntype='string'\nvariable='X'", "[]", "is for secrets"),
        ("[config.deep]\ntype='object'\n[config.deep.properties.key]\ntype='secret'", "[]", "config itself"),
    ],
)
def test_a_recipe_that_would_reveal_a_secret_is_refused(
    tmp_path: Path, config: str, arguments: str, told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        recipe(tmp_path, config, arguments)


def test_a_wrong_secret_is_refused_without_being_shown(tmp_path: Path) -> None:
    made = recipe(tmp_path, "[config.key]\ntype='secret'\nvariable='THE_KEY'\nminLength=3")
    assert made.secrets == {"key": "THE_KEY"}
    for wrong in (4711, "ab", ["hunter2"]):
        with pytest.raises(InvalidConfig) as refused:
            made.check({"key": wrong}, worker_count=1, dataset_id=None)
        assert not any(text in str(refused.value) for text in ("4711", "'ab'", "hunter2"))
    for text in ("(secret)", "a\0b", "x" * 40_000):
        with pytest.raises(InvalidArgument):
            made.split_secrets({"key": text})
    assert made.split_secrets({"key": "abc"}) == ({"key": "(secret)"}, {"key": "abc"})
    assert made.shown_schema["properties"]["key"] == {
        "type": "string",
        "format": "password",
        "writeOnly": True,
        "minLength": 3,
    }


def test_secrets_of_several_lines_are_concealed_line_by_line() -> None:
    conceal = Concealer(["-----BEGIN KEY-----\nMIIEvQIBADAN\n", "abc"])
    assert conceal("read MIIEvQIBADAN of it") == "read (secret) of it"
    assert conceal("the alphabet is abc") == "the alphabet is abc"  # Too short to be looked for.


async def test_secrets_are_forgotten(tmp_path: Path) -> None:
    kept = TaskSecrets(tmp_path)
    await kept.keep("task-1", {"key": "value"})
    assert kept.read("task-1") == {"key": "value"}
    kept.forget("task-1")
    kept.forget("task-1")
    assert kept.read("task-1") == {}


def test_of_an_environment_what_programs_need_is_inherited() -> None:
    environ = {"PATH": "1", "NCCL_DEBUG": "2", "STRATA_TOKEN": "3", "HF_TOKEN": "4", "MY_A": "5", "MYB": "6"}
    assert inherited(environ) == {"PATH": "1", "NCCL_DEBUG": "2"}
    assert inherited(environ, ["MY_*", "HF_TOKEN"]).keys() == {"PATH", "NCCL_DEBUG", "HF_TOKEN", "MY_A"}
    assert inherited(environ, ["*"]) == environ
