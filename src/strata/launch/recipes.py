"""Recipes: what may be run here, declared by the operator. Nobody else can name a program.

The built-in ones train and prepare data. Further ones are TOML files in a folder, read when the coordinator starts:

    description = "Fine-tune the small model"
    script = "finetune.py"                      # beside this file, or an absolute path; or: module = "package.name"
    arguments = ["--lr", "{learning_rate}"]     # each {key} of config in its place; also {checkpoints} and {task_dir}
    gpus_per_worker = 1
    spares = 1                                  # processes that stand by for lost workers of a `strata.recoverable` function

    [config.learning_rate]
    type = "number"
    default = 0.001
    exclusiveMinimum = 0

    [config.api_key]
    type = "secret"                             # never on a command line, in the API, in logs or on disk in the clear of others
    variable = "WANDB_API_KEY"                  # where the program finds it in its environment; API_KEY without this line
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from strata.config import ConfigError
from strata.core.messages import InvalidArgument, Unknown
from strata.launch.concealer import SECRET_SHOWN
from strata.validation import Problem, Schema, check, filled, nearest, schema_problems

MAX_RECIPES = 1_000
NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
_PLACEHOLDER = re.compile(r"\{([a-z_][a-z0-9_]*)\}")
_OWN_PLACEHOLDERS = frozenset({"task_id", "task_dir", "checkpoints", "dataset_path"})


PROBLEMS_SHOWN = 20
SECRET_LIMIT = 32_768
_VARIABLE = re.compile(r"[A-Z_][A-Z0-9_]{0,99}")


class InvalidConfig(InvalidArgument):
    """Everything that is wrong with a task's config, at once."""

    def __init__(self, recipe: str, problems: list[Problem]) -> None:
        shown = "; ".join(map(str, problems[:PROBLEMS_SHOWN]))
        if len(problems) > PROBLEMS_SHOWN:
            shown += f"; and {len(problems) - PROBLEMS_SHOWN} more"
        super().__init__("config", shown + ".", hint=f"GET /api/recipes shows what '{recipe}' takes.")
        self.problems = problems

    @property
    def details(self) -> list[dict[str, str]]:
        return [{"field": p.path, "message": p.message} for p in self.problems[:50]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    name: str
    description: str
    program: tuple[str, ...]
    """`-m module`, or the path of a script."""
    schema: Schema
    arguments: tuple[str, ...] = ()
    """Each `{key}` stands for a value of config."""
    needs_dataset: bool = False
    one_process: bool = False
    """The program itself makes use of `worker_count` processors."""
    gpus_per_worker: int | None = 0
    """None: one where there are enough, unless the config says `device: cpu`."""
    max_workers: int | None = None
    working_dir: Path | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    warm: bool = True
    """Workers are forked with torch in place; no use to a program that needs no torch."""
    spares: int = 0
    """Processes beyond the workers that stand by on each machine, for those of a `strata.recoverable` function."""
    built_in: bool = False

    def check(self, config: Mapping[str, Any], *, worker_count: int, dataset_id: str | None) -> None:
        """Raises `InvalidArgument` with everything that is wrong with a request."""
        problems = check(self.schema, config, "config")
        if problems:
            raise InvalidConfig(self.name, problems)
        if self.needs_dataset and dataset_id is None:
            raise InvalidArgument(
                "dataset_id",
                f"is missing: '{self.name}' needs a dataset.",
                hint="POST /api/datasets registers one; GET /api/datasets lists them.",
            )
        if self.max_workers is not None and worker_count > self.max_workers:
            raise InvalidArgument(
                "worker_count",
                f"is {worker_count}; '{self.name}' takes at most {self.max_workers}.",
                hint="Request fewer.",
            )

    @property
    def secrets(self) -> dict[str, str]:
        """By key of config: the environment variable in which the program finds a value that only it may see."""
        return {
            key: about.get("variable", key.upper())
            for key, about in self.schema.get("properties", {}).items()
            if about.get("type") == "secret"
        }

    def split_secrets(self, config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
        """The config as everybody may see it, and the secrets in it. Raises `InvalidArgument`."""
        kept = {key: str(config[key]) for key in self.secrets if key in config}
        for key, value in kept.items():
            problem = _secret_problem(value)
            if problem:
                raise InvalidArgument(f"config.{key}", problem, hint="Give the value itself.")
        return {**config, **dict.fromkeys(kept, SECRET_SHOWN)}, kept

    @property
    def shown_schema(self) -> Schema:
        """As plain JSON Schema: a secret is a text that is only ever written."""
        shown = {
            key: {
                **{word: value for word, value in about.items() if word != "variable"},
                "type": "string",
                "format": "password",
                "writeOnly": True,
            }
            if key in self.secrets
            else about
            for key, about in self.schema.get("properties", {}).items()
        }
        return {**self.schema, "properties": shown} if self.secrets else self.schema

    def gpus_for(self, config: Mapping[str, Any], *, worker_count: int, gpus: int) -> int:
        """How many each worker gets when no number is requested, on machines that have so many altogether."""
        if self.gpus_per_worker is not None:
            return self.gpus_per_worker
        return 1 if config.get("device") != "cpu" and gpus >= worker_count else 0

    def full_config(self, config: Mapping[str, Any]) -> dict[str, Any]:
        return filled(self.schema, config)

    def command(self, config: Mapping[str, Any], places: Mapping[str, str]) -> tuple[str, ...]:
        """Program and arguments. A value is one argument, whatever is in it; an argument without its value is left out."""
        values = {**{key: _written(value) for key, value in config.items()}, **places}
        arguments = []
        for argument in self.arguments:
            names = _PLACEHOLDER.findall(argument)
            if all(name in values for name in names):
                arguments.append(_PLACEHOLDER.sub(lambda found: values[found[1]], argument))
            elif arguments and arguments[-1].startswith("--") and not _PLACEHOLDER.search(arguments[-1]):
                arguments.pop()  # The flag of a value that was not given.
        return (*self.program, *arguments)


class Recipes:
    """By name. What is not in here cannot be run."""

    def __init__(self, recipes: Iterable[Recipe]) -> None:
        self._recipes = {recipe.name: recipe for recipe in recipes}

    def get(self, name: str) -> Recipe:
        recipe = self._recipes.get(name)
        if recipe is None:
            raise Unknown(
                "recipe", name, hint=f"{_capital(nearest(name, self._recipes))} GET /api/recipes lists them."
            )
        return recipe

    def __iter__(self) -> Any:
        return iter(self._recipes.values())


def read_recipes(folder: Path) -> list[Recipe]:
    """The recipes declared in a folder; none where there is no folder. Raises one `ConfigError` with every problem."""
    problems: list[str] = []
    found: list[Recipe] = []
    for path in sorted(folder.glob("*.toml"))[:MAX_RECIPES]:
        try:
            declared = tomllib.loads(path.read_text())
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            problems.append(f"{path} cannot be read: {error}")
            continue
        recipe = _read_recipe(path, declared, problems)
        if recipe is not None:
            found.append(recipe)
    if problems:
        raise ConfigError(problems)
    return found


def script_recipe(script: Path, *, working_dir: Path, arguments: int, spares: int = 0) -> str:
    """The declaration of a script that takes so many arguments, each a value of config."""
    lines = [
        f"description = {_quoted('the script ' + script.name)}",
        f"script = {_quoted(str(script))}",
        f"working_dir = {_quoted(str(working_dir))}",
        f"arguments = {json.dumps([f'{{argument_{n}}}' for n in range(arguments)])}",
        *([f"spares = {spares}"] if spares else []),
        *(f'[config.argument_{n}]\ntype = "string"' for n in range(arguments)),
    ]
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    return json.dumps(text)  # A JSON string is a TOML string.


_TEXT = {"type": "string"}
_DECLARATION: Schema = {
    "type": "object",
    "properties": {
        "description": _TEXT,
        "script": _TEXT,
        "module": _TEXT,
        "arguments": {"type": "array"},
        "config": {"type": "object", "additionalProperties": True},
        "required": {"type": "array"},
        "needs_dataset": {"type": "boolean"},
        "gpus_per_worker": {"type": "integer"},
        "max_workers": {"type": "integer"},
        "working_dir": _TEXT,
        "environment": {"type": "object", "additionalProperties": _TEXT},
        "warm": {"type": "boolean"},
        "spares": {"type": "integer", "minimum": 0},
    },
}


def _read_recipe(path: Path, declared: dict[str, Any], problems: list[str]) -> Recipe | None:
    before = len(problems)
    name = path.stem
    if not NAME.fullmatch(name):
        problems.append(
            f"{path}: a recipe's name has lower-case letters, digits, '.', '_' and '-', at most 64"
        )
    problems += [f"{path}: {problem}" for problem in check(_DECLARATION, declared)]
    if len(problems) > before:
        return None
    schema = {
        "type": "object",
        "properties": declared.get("config", {}),
        "required": declared.get("required", []),
        "additionalProperties": False,
    }
    problems += [f"{path}: {problem}" for problem in schema_problems(schema, "config")]
    problems += [f"{path}: {problem}" for problem in _secret_problems(schema)]
    program = _program(path, declared, problems)
    arguments = tuple(map(str, declared.get("arguments", [])))
    for argument in arguments:
        for place in _PLACEHOLDER.findall(argument):
            if schema["properties"].get(place, {}).get("type") == "secret":
                problems.append(
                    f"{path}: arguments: {{{place}}} is a secret, and everybody on a machine can read its command lines; the "
                    "program finds it in its environment"
                )
            elif place not in schema["properties"] and place not in _OWN_PLACEHOLDERS:
                known = {**schema["properties"], **dict.fromkeys(_OWN_PLACEHOLDERS)}
                problems.append(
                    f"{path}: arguments: {{{place}}} is not a key of config; {nearest(place, known)}"
                )
    if len(problems) > before:
        return None
    working_dir = declared.get("working_dir")
    return Recipe(
        name=name,
        description=declared.get("description", ""),
        program=program,
        schema=schema,
        arguments=arguments,
        needs_dataset=declared.get("needs_dataset", False),
        gpus_per_worker=declared.get("gpus_per_worker", 0),
        max_workers=declared.get("max_workers"),
        working_dir=(path.parent / working_dir).resolve() if working_dir is not None else None,
        environment=declared.get("environment", {}),
        warm=declared.get("warm", True),
        spares=declared.get("spares", 0),
    )


def _secret_problems(schema: Schema) -> list[str]:
    """Secrets are keys of config itself: deeper ones would have to be looked for everywhere that a config goes."""
    problems = []
    for key, about in schema["properties"].items():
        if not isinstance(about, Mapping):
            continue  # Which has been reported.
        if about.get("type") != "secret":
            if '"secret"' in json.dumps(
                {k: v for k, v in about.items() if k in ("properties", "items")}, default=str
            ):
                problems.append(f"config.{key}: a secret must be a key of config itself")
            if "variable" in about:
                problems.append(
                    f"config.{key}.variable is for secrets; this is a {about.get('type', 'value')}"
                )
            continue
        variable = about.get("variable", key.upper())
        if not _VARIABLE.fullmatch(str(variable)):
            problems.append(
                f"config.{key}.variable must be the name of an environment variable, not '{variable}'"
            )
        elif variable.startswith(("STRATA_", "LD_", "PYTHON")) or variable == "PATH":
            problems.append(f"config.{key}.variable: {variable} is reserved; choose another")
        if "default" in about or "examples" in about or "enum" in about:
            problems.append(
                f"config.{key}: a secret has no default, examples or enum, which everybody could read"
            )
    return problems


def _secret_problem(value: str) -> str:
    """What is wrong with a secret, without saying what it is."""
    if value == SECRET_SHOWN:
        return f"is '{SECRET_SHOWN}', which stands for a value that is not shown."
    if "\0" in value:
        return "contains a NUL byte, which an environment variable cannot."
    if len(value) > SECRET_LIMIT:
        return f"is {len(value):,} characters long; at most {SECRET_LIMIT:,} are allowed."
    return ""


def _program(path: Path, declared: Mapping[str, Any], problems: list[str]) -> tuple[str, ...]:
    if ("script" in declared) == ("module" in declared):
        problems.append(f"{path}: set either script or module")
        return ()
    if "module" in declared:
        if not re.fullmatch(r"[A-Za-z_][\w]*(\.[A-Za-z_][\w]*)*", declared["module"]):
            problems.append(f"{path}: module must be the dotted name of a Python module")
        return ("-m", declared["module"])
    script = (path.parent / declared["script"]).resolve()
    if not script.is_file():
        problems.append(f"{path}: there is no script {script}")
    return (str(script),)


def _written(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:] + ("" if text.endswith("?") else ".")
