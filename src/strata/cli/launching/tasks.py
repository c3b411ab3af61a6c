"""`strata submit`, `run`, `stop`, `restart`, `recipes`: tasks from the command line.

`submit` asks a coordinator that is there; `run` brings its own, on this machine, follows the task to its end and leaves
its checkpoints behind. Only `run` takes a script that nobody has registered: whoever types it is the operator here.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.text import Text

from strata.cli.common import (
    DEFAULT_API,
    Api,
    AsJson,
    console,
    duration,
    get_rows,
    print_json,
    print_table,
    styled,
)
from strata.cli.extras import need
from strata.cli.watching.logs import show_entry
from strata.client import ENDED, Client, TaskAnswer, TaskView, Unreachable
from strata.core.text import as_identifier
from strata.errors import StrataError
from strata.validation import nearest

FOLLOW_S = 0.3
STOP_S = 15.0
_FILE_KEYS = ("name", "type", "dataset_id", "worker_count", "config", "gpus_per_worker", "max_retries")

TaskId = Annotated[str, typer.Argument(metavar="TASK", help="Id of the task, as `strata tasks` shows it.")]
Workers = Annotated[int | None, typer.Option("--workers", "-w", min=1, help="Worker processes. [1]")]
Gpus = Annotated[int | None, typer.Option(min=0, help="GPUs for each worker. [the recipe's]")]
Retries = Annotated[
    int | None, typer.Option(min=0, help="Failed attempts allowed before the task fails. [3]")
]
Name = Annotated[str | None, typer.Option(help="Name of the task. [the recipe's name]")]


class WrongCall(StrataError):
    code = "invalid_argument"


def recipes(api: Api = DEFAULT_API, as_json: AsJson = False) -> None:
    """List the recipes and the settings each takes."""
    found = get_rows(api, "/api/recipes")
    if as_json:
        print_json(found)
        return
    for recipe in found:
        console.print(Text.assemble((recipe["name"], "bold"), "  ", recipe["description"]))
        rows = [
            (f"  {key}", about.get("type", ""), about.get("default", "-"), about.get("description", ""))
            for key, about in recipe["schema"].get("properties", {}).items()
        ]
        print_table(("  KEY", "TYPE", "DEFAULT", "MEANING"), rows, empty="  It takes no settings.")


def submit(
    what: Annotated[
        list[str] | None,
        typer.Argument(metavar="FILE|KEY=VALUE", help="A YAML or JSON file, and settings that override it."),
    ] = None,
    type: Annotated[str | None, typer.Option(help="Name of a recipe. [training]")] = None,
    name: Name = None,
    dataset: Annotated[str | None, typer.Option(help="Id of a registered dataset.")] = None,
    workers: Workers = None,
    gpus_per_worker: Gpus = None,
    max_retries: Retries = None,
    secret: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY[=FILE]",
            help="A secret setting, read from a file or prompted for; never on the command line.",
        ),
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Follow its log until it ends. Ctrl-C leaves it running.")
    ] = False,
    api: Api = DEFAULT_API,
    as_json: AsJson = False,
) -> None:
    """Submit a task to the coordinator: `strata submit task.yaml`, `strata submit --type training steps=100`."""
    words = what or []
    request: dict[str, Any] = {"type": "training", "worker_count": 1, "config": {}}
    if words and "=" not in words[0]:
        request |= _read_request(Path(words[0]))
        words = words[1:]
    request["config"] = {**request["config"], **read_settings(words, request["config"])}
    request["config"] |= dict(_read_secret(word) for word in secret or [])
    flags = {
        "type": type,
        "name": name,
        "dataset_id": dataset,
        "worker_count": workers,
        "gpus_per_worker": gpus_per_worker,
        "max_retries": max_retries,
    }
    request |= {key: value for key, value in flags.items() if value is not None}
    client = Client(api)
    task_id = client.submit(**request)
    if as_json:
        print_json({"task_id": task_id})
    else:
        console.print(Text.assemble("submitted ", (task_id, "bold cyan")))
    if follow:
        _report_end(_Following(client, task_id).to_the_end())


def _read_secret(word: str) -> tuple[str, str]:
    key, separator, file = word.partition("=")
    if not separator:
        return key, str(typer.prompt(key, hide_input=True, err=True))
    try:
        return key, Path(file).read_text().rstrip("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise WrongCall(f"--secret {key}: {file} cannot be read: {error}.") from None


def stop(
    task: TaskId,
    wait: Annotated[bool, typer.Option(help="Wait until its processes have exited.")] = True,
    api: Api = DEFAULT_API,
    as_json: AsJson = False,
) -> None:
    """Stop a task: its workers save a final checkpoint and exit."""
    _print_answer(Client(api).stop(task, wait_s=STOP_S if wait else 0.0), as_json=as_json)


def restart(task: TaskId, api: Api = DEFAULT_API, as_json: AsJson = False) -> None:
    """Run a failed or stopped task again, from its latest intact checkpoint."""
    _print_answer(Client(api).restart(task), as_json=as_json)


def run(
    program: Annotated[
        str, typer.Argument(metavar="SCRIPT|RECIPE", help="A Python file, or a recipe's name.")
    ],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="ARGUMENTS", help="A script's own arguments; a recipe's settings: key=value."),
    ] = None,
    workers: Workers = None,
    name: Name = None,
    dataset: Annotated[str | None, typer.Option(help="Path of a dataset, for recipes that read one.")] = None,
    format: Annotated[str | None, typer.Option(help="Its format, if the suffix does not imply it.")] = None,
    gpus_per_worker: Gpus = None,
    max_retries: Retries = None,
    spares: Annotated[
        int,
        typer.Option(
            min=0,
            help="Standby processes: one replaces a lost worker of a script's @strata.recoverable function at once.",
        ),
    ] = 0,
    data_dir: Annotated[
        Path, typer.Option(help="Where the run's coordinator, checkpoints and logs are.")
    ] = Path(".strata"),
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Start a new task even if the same one was stopped or has failed.")
    ] = False,
) -> None:
    """Run a script or a recipe on this machine, with its own coordinator, and follow its log. After Ctrl-C, the same
    command continues it. Options go before the script."""
    words = arguments or []
    script = Path(program)
    is_script = script.suffix == ".py" or script.is_file()
    if is_script and not script.is_file():
        raise WrongCall(f"There is no script '{program}'.", hint="Give the path of a Python file.")
    if spares and not is_script:
        raise WrongCall(
            f"--spares is for scripts, and '{program}' is a recipe.",
            hint="Declare `spares` in the recipe's file.",
        )
    need("torch", feature="Running tasks on this machine", extra="torch" if is_script else "harness")
    count = workers or 1
    own = script if is_script else None
    with _own_coordinator(data_dir.absolute(), own, words, count, spares) as (api, recipe):
        client = Client(api)
        dataset_id = _register(client, dataset, format) if dataset is not None else None
        config = _script_config(words) if is_script else read_settings(words, {})
        request: dict[str, Any] = {
            "type": recipe or program,
            "name": name or script.stem,
            "dataset_id": dataset_id,
            "worker_count": count,
            "config": config,
        }
        earlier = None if fresh else _continue(client, request)
        task_id = earlier or client.submit(
            **request, gpus_per_worker=gpus_per_worker, max_retries=max_retries
        )
        again = " continues (--fresh starts another)" if earlier else ""
        console.print(Text.assemble((task_id, "bold cyan"), f"{again} at {api}; Ctrl-C saves and stops"))
        following = _Following(client, task_id, only_new=earlier is not None)
        try:
            ended = following.to_the_end()
        except KeyboardInterrupt:
            console.print(Text("stopping: the workers save a final checkpoint …", style="bold"))
            try:
                client.stop(task_id)
                ended = following.to_the_end()
            except KeyboardInterrupt:
                console.print(Text("exiting immediately, without a final checkpoint", style="bold"))
                _end_at_once(data_dir, task_id)
                raise
        checkpoints = data_dir / "tasks" / task_id / "checkpoints"
        if checkpoints.exists():
            console.print(Text.assemble("checkpoints: ", str(checkpoints)))
    _report_end(ended)


def _continue(client: Client, request: dict[str, Any]) -> str | None:
    """The newest task that asked for the same, set going again from its checkpoints, unless it has completed."""
    same = (task for task in client.tasks() if all(task.get(key) == value for key, value in request.items()))
    task = next(same, None)
    if task is None or task["status"] == "completed":
        return None
    if task["stopping"]:  # As it was when its coordinator was ended.
        task = client.wait(task["id"])
    if task["status"] in ENDED:
        client.restart(task["id"])
    return task["id"]


def _end_at_once(data_dir: Path, task_id: str) -> None:
    from strata.launch.cleanup import end_processes

    for folder in (data_dir / "tasks" / task_id).glob("run-*"):
        end_processes(f"{task_id}-{folder.name.removeprefix('run-')}")


# --- following --------------------------------------------------------------------------------------------------


class _Following:
    """Shows a task's log, each line once, also when it is interrupted and taken up again."""

    def __init__(self, client: Client, task_id: str, *, only_new: bool = False) -> None:
        self._client = client
        self._task_id = task_id
        newest = client.logs(task_id, limit=1) if only_new else []
        self._after: str | None = newest[-1]["id"] if newest else None
        self._state = ""

    def to_the_end(self) -> TaskView:
        """Until the task has ended. A coordinator that restarts meanwhile is waited for."""
        while True:
            try:
                task = self._client.task(self._task_id)
                while entries := self._client.logs(self._task_id, after=self._after):
                    for entry in entries:
                        show_entry(entry, as_json=False)
                        self._after = entry["id"]
            except Unreachable:
                time.sleep(1.0)
                continue
            state = f"{task['status']}: {task['reason']}"
            if state != self._state:
                console.print(Text.assemble(styled(task["status"]), f": {task['reason']}"), soft_wrap=True)
                self._state = state
            if task["status"] in ENDED:
                return task
            time.sleep(FOLLOW_S)


def _report_end(task: TaskView) -> None:
    """Exit 0 for a completed task, 1 for any other end."""
    started_s, ended_s = task["started_at"], task["completed_at"]
    elapsed_s = ended_s - started_s if started_s is not None and ended_s is not None else 0.0
    console.print(Text.assemble(styled(task["status"]), f" after {duration(elapsed_s)}"))
    cause = task["exit_cause"]
    if task["status"] == "failed" and cause is not None and cause["traceback"]:
        console.print(Text(cause["traceback"], style="dim"), soft_wrap=True)
    if task["status"] != "completed":
        raise typer.Exit(1)


def _print_answer(answer: TaskAnswer, *, as_json: bool) -> None:
    if as_json:
        print_json(answer)
    else:
        console.print(Text.assemble(styled(answer["status"]), f": {answer['reason']}"), soft_wrap=True)


# --- reading ----------------------------------------------------------------------------------------------------


def _read_request(path: Path) -> dict[str, Any]:
    """A task in a file: name, type, dataset_id, worker_count, config."""
    import yaml

    try:
        found = yaml.safe_load(path.read_text())
    except FileNotFoundError:
        raise WrongCall(f"There is no file '{path}'.", hint="Settings are written as key=value.") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise WrongCall(f"'{path}' cannot be read: {error}") from None
    if not isinstance(found, dict):
        _refuse(path, "must be a mapping of name, type, dataset_id, worker_count and config")
    for key in found:
        if key not in _FILE_KEYS:
            _refuse(path, f"has a key '{key}' that is not known; {nearest(str(key), list(_FILE_KEYS))}")
    if not isinstance(found.setdefault("config", {}), dict):
        _refuse(path, "must have a mapping under 'config'")
    return found


def _refuse(path: Path, why: str) -> NoReturn:
    raise WrongCall(f"'{path}' {why}.", hint="See docs/operating/tasks.md for an example.")


def read_settings(words: Sequence[str], under: dict[str, Any]) -> dict[str, Any]:
    """`key=value` and `part.key=value`; values as in JSON, or else text."""
    settings: dict[str, Any] = {}
    for word in words:
        path, equals, text = word.partition("=")
        if not equals or not path:
            raise WrongCall(f"'{word}' is not a setting.", hint="Write key=value, for example steps=100.")
        *parts, last = path.split(".")
        place = settings
        for part in parts:
            before = under.get(part, {}) if place is settings else {}
            place = place.setdefault(part, dict(before) if isinstance(before, dict) else {})
            if not isinstance(place, dict):
                raise WrongCall(f"'{word}' sets a part of a setting that was already given in full.")
        place[last] = _value(text)
    return settings


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


# --- a coordinator of one's own ---------------------------------------------------------------------------------


@contextmanager
def _own_coordinator(
    data_dir: Path, script: Path | None, words: Sequence[str], workers: int, spares: int
) -> Iterator[tuple[str, str | None]]:
    """Its address, and the name under which it knows the script."""
    import tempfile

    from strata.launch.coordinator import CoordinatorProcess
    from strata.launch.recipes import script_recipe

    data_dir.parent.mkdir(parents=True, exist_ok=True)
    data_dir.mkdir(mode=0o700, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="strata-recipes-") as folder:
        os.environ["STRATA_TASK_WORKERS"] = str(max(workers, os.cpu_count() or 1))
        os.environ["STRATA_LAUNCHER"] = "local"
        # Whoever types this is the operator, and the script is theirs.
        os.environ.setdefault("STRATA_TASK_ENVIRONMENT", "*")
        name = None
        if script is not None:
            name = re.sub(r"[^a-z0-9._-]", "-", script.stem.lower()).strip("-._") or "script"
            name = name if name not in ("training", "indexing", "sharding") else f"{name}-script"
            text = script_recipe(
                script.absolute(), working_dir=Path.cwd(), arguments=len(words), spares=spares
            )
            (Path(folder) / f"{name}.toml").write_text(text)
            os.environ["STRATA_RECIPES_DIR"] = folder
        coordinator = CoordinatorProcess(data_dir)
        try:
            coordinator.start()
            yield coordinator.api.replace("localhost", "127.0.0.1"), name
        finally:
            coordinator.stop()


def _script_config(words: Sequence[str]) -> dict[str, str]:
    return {f"argument_{number}": word for number, word in enumerate(words)}


def _register(client: Client, path: str, format: str | None) -> str:
    from strata.api import post

    name = as_identifier(Path(path).stem)
    suffix = Path(path).suffix.lstrip(".") or "text"
    body = {"dataset_id": name, "path": os.path.abspath(path), "format": format or suffix}
    return str(post(client.url, "/api/datasets", body)["id"])
