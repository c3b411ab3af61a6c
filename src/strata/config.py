"""One frozen configuration, from a TOML file, the environment and flags, in that order of precedence.

`read_config` reports every problem at once, each with the key's path, what was given, what is allowed and the
nearest known name for a key that does not exist. A `.env` file in the working directory is read below the
environment, for what `strata.environment.SAFE` names; what else it says about Strata is named in a warning. A file that
its user names (`read_env_file`) counts in full.
"""

from __future__ import annotations

import logging
import os
import tomllib
import types
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from strata.core.text import counted
from strata.environment import SAFE, refused_in_dotenv
from strata.errors import StrataError
from strata.validation import Schema, check, closest, nearest

T = TypeVar("T")

log = logging.getLogger("strata.config")
_warned: set[tuple[Path, tuple[str, ...]]] = set()


class ConfigError(StrataError):
    """Everything that is wrong with a configuration, at once."""

    code = "config"

    def __init__(self, problems: list[str]) -> None:
        lines = "".join(f"\n  - {problem}" for problem in problems)
        super().__init__(f"The configuration has {counted(len(problems), 'problem')}:{lines}")
        self.problems = problems


def setting(
    default: Any,
    doc: str,
    *,
    env: str = "",
    least: float | None = None,
    most: float | None = None,
    choices: tuple[str, ...] = (),
    secret: bool = False,
) -> Any:
    """A configuration field with what it means and what it may be; a secret one is never printed."""
    about = {"doc": doc, "env": env, "least": least, "most": most, "choices": choices}
    if callable(default):
        return field(default_factory=default, metadata=about, repr=not secret)
    return field(default=default, metadata=about, repr=not secret)


@dataclass(frozen=True, slots=True)
class _Given:
    """A value that was set, and where, for messages."""

    value: Any
    where: str


def read_config(
    kind: type[T],
    *,
    section: str,
    file: Path | None = None,
    flags: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
    check: Callable[[T], list[str]] | None = None,
) -> T:
    """Build `kind` (a frozen dataclass of `setting`s) or raise one `ConfigError` that lists everything.

    `check` finds what is wrong between settings; values that are wrong by themselves stand at their defaults there.
    """
    problems: list[str] = []
    known = {f.name: f for f in fields(cast(Any, kind))}
    given: dict[str, _Given] = {}
    if file is not None:
        for key, value in read_section(file, section, problems).items():
            if key in known:
                given[key] = _Given(value, f"{section}.{key} in {file}")
            else:
                problems.append(f"{section}.{key} in {file} is not a known key; {nearest(key, known)}")
    variables = _environment(problems) if environ is None else environ
    for name, about in known.items():
        variable = about.metadata.get("env")
        if variable and variables.get(variable):
            given[name] = _Given(variables[variable], f"the environment variable {variable}")
    for name, value in (flags or {}).items():
        if value is not None:
            given[name] = _Given(value, "--" + name.removesuffix("_s").replace("_", "-"))
    hints = get_type_hints(kind)
    values: dict[str, Any] = {}
    for name, item in given.items():
        try:
            values[name] = _convert(item.value, hints[name], known[name])
        except ValueError as error:
            problems.append(f"{item.where}: {error}")
    built = kind(**values)
    if check is not None:
        problems += check(built)
    if problems:
        raise ConfigError(problems)
    return built


def environment() -> Mapping[str, str]:
    """The environment, and below it what a `.env` in the working directory may say."""
    problems: list[str] = []
    found = _environment(problems)
    if problems:
        raise ConfigError(problems)
    return found


TABLES = ("coordinator", "notify")
"""Of a settings file."""


def read_env_file(path: Path) -> dict[str, str]:
    """All variables of a file that its user has named. Raises `ConfigError`."""
    if not path.is_file():
        raise ConfigError([f"--env-file: there is no file {path}"])
    problems: list[str] = []
    found = _dotenv(path, problems)
    if problems:
        raise ConfigError(problems)
    return found


def _environment(problems: list[str]) -> Mapping[str, str]:
    path = Path(".env").absolute()
    found = _dotenv(path, problems)
    refused = tuple(refused_in_dotenv(found))
    if refused and (path, refused) not in _warned:
        _warned.add((path, refused))
        log.warning(
            "%s sets %s, which is ignored in a .env of the working directory. To use it: strata --env-file .env …",
            *(path, ", ".join(refused)),
        )
    return {**{name: value for name, value in found.items() if name in SAFE}, **os.environ}


def _dotenv(path: Path, problems: list[str]) -> dict[str, str]:
    from dotenv import dotenv_values

    try:
        # Without interpolation: a value that names another variable would carry that one's value along.
        found = dotenv_values(path, interpolate=False)
    except (OSError, UnicodeDecodeError) as error:
        problems.append(f"{path} cannot be read: {error}")
        return {}
    return {name: value for name, value in found.items() if value is not None}


def read_section(file: Path, section: str, problems: list[str]) -> dict[str, Any]:
    """One table of a TOML file; empty where it has none, and what is wrong with the file is added to `problems`."""
    try:
        document = tomllib.loads(file.read_text())
    except FileNotFoundError:
        problems.append(f"{file} does not exist")
    except (OSError, UnicodeDecodeError) as error:
        problems.append(f"{file} cannot be read: {error}")
    except (
        ValueError,
        RecursionError,
    ) as error:  # Of numbers with thousands of digits it is not a TOMLDecodeError.
        problems.append(f"{file} is not valid TOML: {error}")
    else:
        part = document.get(section, {})
        for name in (name for name in document if name not in TABLES):
            near = closest(name, TABLES, likeness=0.8)
            if not isinstance(document[name], dict):
                problems.append(f"{name} in {file} is outside a table; put it below [{TABLES[0]}]")
            elif near is not None:
                problems.append(f"[{name}] in {file} is not a known table; did you mean [{near}]?")
            elif section == TABLES[0]:  # Of another program that shares the file, perhaps.
                log.warning("[%s] in %s changes nothing; known tables: [%s]", name, file, "], [".join(TABLES))
        if isinstance(part, dict):
            return part
        problems.append(f"{section} in {file} must be a table: [{section}]")
    return {}


def _convert(value: Any, hint: Any, about: Field[Any]) -> Any:
    """The value as the setting's type has it; texts of the environment are read as what they stand for."""
    if any("\0" in part for part in (value if isinstance(value, list) else [value]) if isinstance(part, str)):
        raise ValueError("must not contain a NUL character")
    if get_origin(hint) in (Union, types.UnionType):
        hint = next(arm for arm in get_args(hint) if arm is not type(None))
    if hint is Path:
        if not isinstance(value, str | Path):
            raise ValueError(f"must be a path, not {value!r}")
        return Path(value).expanduser()
    if get_origin(hint) is tuple:
        value = (
            [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value
        )
    if hint in (bool, int, float):
        value = _read_text(value, hint) if isinstance(value, str) else value
        if hint is int and isinstance(value, float) and value.is_integer():
            value = int(value)
    problems = check(_schema(hint, about), value)
    if problems:
        where = f"{about.name}.{problems[0].path} " if problems[0].path else ""
        message = problems[0].message
        # A secret is not printed, whatever is wrong with it.
        raise ValueError(where + (message if about.repr else message.partition(", not ")[0]))
    if get_origin(hint) is tuple:
        return tuple(value)
    return hint(value) if hint in (int, float) else value


def _schema(hint: Any, about: Field[Any]) -> Schema:
    names = {bool: "boolean", int: "integer", float: "number"}
    limits = {
        "minimum": about.metadata["least"],
        "maximum": about.metadata["most"],
        "enum": about.metadata["choices"] or None,
    }
    said = {keyword: limit for keyword, limit in limits.items() if limit is not None}
    if get_origin(hint) is dict:
        kind = names.get(get_args(hint)[1], "string")
        return {"type": "object", "additionalProperties": {"type": kind, **said}}
    if get_origin(hint) is tuple:
        return {"type": "array", "items": {"type": "string"}}
    return {"type": names.get(hint, "string"), **said}


def _read_text(text: str, hint: type) -> Any:
    if hint is bool:
        words = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
        return words.get(text.strip().lower(), text)
    try:
        return int(text)
    except ValueError:
        pass
    try:
        return float(text)
    except ValueError:
        return text


def documented(kind: type[Any]) -> list[tuple[str, str, str, str]]:
    """(key, default, environment variable, meaning) of every setting: what the documentation prints."""
    rows = []
    for f in fields(kind):
        default = f.default_factory() if f.default_factory is not MISSING else f.default
        rows.append((f.name, str(default), f.metadata["env"], f.metadata["doc"]))
    return rows
