"""One frozen configuration, from a TOML file, the environment and flags, in that order of precedence.

`read_config` reports every problem at once, each with the key's path, what was given, what is allowed and the
nearest known name for a key that does not exist. A `.env` file in the working directory is read like the
environment, which wins over it. Nothing is read twice and nothing is kept between calls.
"""

from __future__ import annotations

import difflib
import os
import tomllib
import types
from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from strata.errors import StrataError

T = TypeVar("T")


class ConfigError(StrataError):
    """Everything that is wrong with a configuration, at once."""

    code = "config"

    def __init__(self, problems: list[str]) -> None:
        lines = "".join(f"\n  - {problem}" for problem in problems)
        noun = "problem" if len(problems) == 1 else "problems"
        super().__init__(f"The configuration has {len(problems)} {noun}:{lines}")
        self.problems = problems


def setting(
    default: Any,
    doc: str,
    *,
    env: str = "",
    least: float | None = None,
    most: float | None = None,
    choices: tuple[str, ...] = (),
) -> Any:
    """A configuration field with what it means and what it may be."""
    about = {"doc": doc, "env": env, "least": least, "most": most, "choices": choices}
    if callable(default):
        return field(default_factory=default, metadata=about)
    return field(default=default, metadata=about)


@dataclass(frozen=True, slots=True)
class _Given:
    """A value somebody set, and where, for messages."""

    value: Any
    where: str


def read_config(
    kind: type[T],
    *,
    section: str,
    file: Path | None = None,
    flags: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
) -> T:
    """Build `kind` (a frozen dataclass of `setting`s) or raise one `ConfigError` that lists everything."""
    problems: list[str] = []
    known = {f.name: f for f in fields(cast(Any, kind))}
    given: dict[str, _Given] = {}
    if file is not None:
        for key, value in _read_section(file, section, problems).items():
            if key in known:
                given[key] = _Given(value, f"{section}.{key} in {file}")
            else:
                problems.append(_unknown(f"{section}.{key} in {file}", key, known))
    variables = _environment(environ)
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
    if problems:
        raise ConfigError(problems)
    return kind(**values)


def _environment(environ: Mapping[str, str] | None) -> Mapping[str, str]:
    if environ is not None:
        return environ
    from dotenv import dotenv_values

    from_file = {k: v for k, v in dotenv_values(".env").items() if v is not None}
    return {**from_file, **os.environ}


def _read_section(file: Path, section: str, problems: list[str]) -> dict[str, Any]:
    try:
        document = tomllib.loads(file.read_text())
    except FileNotFoundError:
        problems.append(f"{file} does not exist")
    except (OSError, UnicodeDecodeError) as error:
        problems.append(f"{file} cannot be read: {error}")
    except tomllib.TOMLDecodeError as error:
        problems.append(f"{file} is not valid TOML: {error}")
    else:
        part = document.get(section, {})
        if isinstance(part, dict):
            return part
        problems.append(f"{section} in {file} must be a table: [{section}]")
    return {}


def _unknown(where: str, key: str, known: Mapping[str, object]) -> str:
    near = difflib.get_close_matches(key, known, n=1)
    hint = f"did you mean '{near[0]}'?" if near else f"known keys: {', '.join(sorted(known))}"
    return f"{where} is not a known key; {hint}"


def _convert(value: Any, hint: Any, about: Field[Any]) -> Any:
    meta = about.metadata
    if get_origin(hint) in (Union, types.UnionType):
        hint = next(arm for arm in get_args(hint) if arm is not type(None))
    if hint is bool:
        words = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
        if not isinstance(value, bool):
            value = words.get(str(value).strip().lower())
            if value is None:
                raise ValueError("must be true or false")
    elif hint in (int, float):
        if isinstance(value, bool):
            raise ValueError(f"must be a number, not {value}")
        try:
            value = hint(value)
        except (TypeError, ValueError, OverflowError):
            raise ValueError(f"must be a number, not {str(value)[:80]!r}") from None
    elif hint is Path:
        value = Path(str(value)).expanduser()
    elif get_origin(hint) is dict:
        if not isinstance(value, dict):
            raise ValueError("must be a table")
        value = {str(k): str(v) for k, v in value.items()}
    else:
        value = str(value)
    least, most, choices = meta.get("least"), meta.get("most"), meta.get("choices")
    if (least is not None and not value >= least) or (most is not None and not value <= most):
        raise ValueError(f"must be {_range(least, most)}, not {value}")
    if choices and value not in choices:
        raise ValueError(f"must be one of {', '.join(choices)}, not {value!r}")
    return value


def _range(least: float | None, most: float | None) -> str:
    if least is not None and most is not None:
        return f"between {least:g} and {most:g}"
    return f"at least {least:g}" if least is not None else f"at most {most:g}"


def documented(kind: type[Any]) -> list[tuple[str, str, str, str]]:
    """(key, default, environment variable, meaning) of every setting: what the documentation prints."""
    rows = []
    for f in fields(kind):
        default = f.default_factory() if f.default_factory is not MISSING else f.default
        rows.append((f.name, str(default), f.metadata["env"], f.metadata["doc"]))
    return rows
