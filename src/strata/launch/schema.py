"""What a task's `config` may be: a part of JSON Schema, checked all at once, with the path of every key that is wrong.

Known are `type` (object, array, string, integer, number, boolean), `properties`, `required`, `items`, `enum`, `default`,
`minimum`, `maximum`, `exclusiveMinimum`, `minLength`, `maxLength`, `maxItems`, `title`, `description`, `examples`. Objects
take no keys but their own. Pure.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from strata.core.messages import InvalidArgument, shorten

Schema = Mapping[str, Any]
PROBLEMS_SHOWN = 20
KEYWORDS = frozenset(
    [
        "type",
        "properties",
        "required",
        "additionalProperties",
        "items",
        "enum",
        "default",
        "minimum",
        "maximum",
        "exclusiveMinimum",
        "minLength",
        "maxLength",
        "maxItems",
        "title",
        "description",
        "examples",
    ]
)
_TYPES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "object": ("a table of keys", lambda v: isinstance(v, Mapping)),
    "array": ("a list", lambda v: isinstance(v, list)),
    "string": ("text", lambda v: isinstance(v, str)),
    "boolean": ("true or false", lambda v: isinstance(v, bool)),
    "integer": ("a whole number", lambda v: isinstance(v, int) and not isinstance(v, bool)),
    "number": (
        "a number",
        lambda v: isinstance(v, int | float) and not isinstance(v, bool) and math.isfinite(v),
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    path: str
    message: str

    def __str__(self) -> str:
        return f"{self.path} {self.message}"


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


def check(schema: Schema, value: Any, path: str = "config") -> list[Problem]:
    """Everything about `value` that `schema` does not allow."""
    wanted = schema.get("type")
    if wanted is not None:
        words, fits = _TYPES[wanted]
        if not fits(value):
            return [Problem(path=path, message=f"must be {words}, not {_shown(value)}")]
    problems = [Problem(path=path, message=message) for message in _limits(schema, value)]
    if isinstance(value, Mapping):
        problems += _check_keys(schema, value, path)
    if isinstance(value, list) and "items" in schema:
        for number, item in enumerate(value):
            problems += check(schema["items"], item, f"{path}[{number}]")
    return problems


def filled(schema: Schema, value: Mapping[str, Any]) -> dict[str, Any]:
    """`value` with the defaults of the keys it does not name."""
    result = dict(value)
    for name, part in schema.get("properties", {}).items():
        if name not in result and "default" in part:
            result[name] = part["default"]
        if part.get("type") == "object" and isinstance(result.get(name, {}), Mapping):
            inner = filled(part, result.get(name, {}))
            if inner or name in result:
                result[name] = inner
    return result


def nearest(name: str, known: Mapping[str, Any] | list[str]) -> str:
    """A hint for a name that is not known."""
    near = difflib.get_close_matches(name[:200], list(known), n=1)
    if near:
        return f"did you mean '{near[0]}'?"
    return f"known are {', '.join(sorted(known))}" if known else "there are none"


def schema_problems(schema: Any, path: str) -> list[str]:
    """What is wrong with a schema that somebody has written."""
    if not isinstance(schema, Mapping):
        return [f"{path} must be a table"]
    problems = [
        f"{path}.{key} is not known; {nearest(key, dict.fromkeys(KEYWORDS))}"
        for key in schema
        if key not in KEYWORDS
    ]
    wanted = schema.get("type")
    if wanted is not None and (not isinstance(wanted, str) or wanted not in _TYPES):
        return [*problems, f"{path}.type must be one of {', '.join(_TYPES)}, not {_shown(wanted)}"]
    properties = schema.get("properties", {})
    if not isinstance(properties, Mapping):
        return [*problems, f"{path}.properties must be a table"]
    for name, part in properties.items():
        problems += schema_problems(part, f"{path}.properties.{name}")
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(name in properties for name in required):
        problems.append(f"{path}.required must be a list of names that are in properties")
    if "items" in schema:
        problems += schema_problems(schema["items"], f"{path}.items")
    for key in ("minimum", "maximum", "exclusiveMinimum", "minLength", "maxLength", "maxItems"):
        if key in schema and not _TYPES["number"][1](schema[key]):
            problems.append(f"{path}.{key} must be a number")
    if "enum" in schema and not isinstance(schema["enum"], list):
        problems.append(f"{path}.enum must be a list")
    if not problems and "default" in schema:
        problems += [f"{path}.default {p.message}" for p in check(schema, schema["default"], "")]
    return problems


def _check_keys(schema: Schema, value: Mapping[str, Any], path: str) -> list[Problem]:
    properties: Mapping[str, Schema] = schema.get("properties", {})
    problems = []
    for name, item in value.items():
        inner = f"{path}.{shorten(str(name), 60)}"
        if name in properties:
            problems += check(properties[name], item, inner)
        elif not schema.get("additionalProperties", False):
            problems.append(
                Problem(path=inner, message=f"is not a known key; {nearest(str(name), properties)}")
            )
    for name in schema.get("required", []):
        if name not in value:
            problems.append(Problem(path=f"{path}.{name}", message="is missing"))
    return problems


def _limits(schema: Schema, value: Any) -> list[str]:
    problems = []
    if "enum" in schema and value not in schema["enum"]:
        problems.append(f"must be one of {', '.join(map(str, schema['enum']))}, not {_shown(value)}")
    if isinstance(value, int | float) and not isinstance(value, bool):
        if "minimum" in schema and value < schema["minimum"]:
            problems.append(f"must be at least {schema['minimum']}, not {_shown(value)}")
        if "exclusiveMinimum" in schema and value <= schema["exclusiveMinimum"]:
            problems.append(f"must be more than {schema['exclusiveMinimum']}, not {_shown(value)}")
        if "maximum" in schema and value > schema["maximum"]:
            problems.append(f"must be at most {schema['maximum']}, not {_shown(value)}")
    if isinstance(value, str):
        if len(value) < schema.get("minLength", 0):
            problems.append("must not be empty")
        if len(value) > schema.get("maxLength", math.inf):
            problems.append(f"is {len(value):,} characters long; at most {schema['maxLength']:,} are allowed")
    if isinstance(value, list) and len(value) > schema.get("maxItems", math.inf):
        problems.append(f"has {len(value):,} items; at most {schema['maxItems']:,} are allowed")
    return problems


def _shown(value: Any) -> str:
    return shorten(repr(value), 60)
