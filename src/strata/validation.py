"""What documents that people write may hold: tasks' configurations, recipes, settings. JSON Schema, in our words.

`check` finds everything at once; each problem has the path of its key, what was given, what is allowed and, for a key that
does not exist, the nearest known one. Objects take no keys but their own, unless their schema says otherwise; whole numbers
are written without a point, and numbers are finite. `schema_problems` looks at a schema that somebody has written.

The `jsonschema` package does the work; it is imported with the first check, so that nobody else waits for it. What commands
to the core may hold is checked by `strata.core.checks`, which is pure.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from strata.core.refusals import shorten

if TYPE_CHECKING:
    from jsonschema import ValidationError

Schema = Mapping[str, Any]

_TYPES = {
    "object": "a table of keys",
    "array": "a list",
    "string": "text",
    "boolean": "true or false",
    "integer": "a whole number",
    "number": "a number",
}
_NUMBER = {"type": "number"}
_TEXT = {"type": "string"}

DIALECT: Schema = {
    "type": "object",
    "properties": {
        "type": {"enum": list(_TYPES)},
        "properties": {"type": "object", "additionalProperties": {"$ref": "#"}},
        "required": {"type": "array", "items": _TEXT},
        "additionalProperties": {"type": "boolean"},
        "items": {"$ref": "#"},
        "enum": {"type": "array"},
        "default": {},
        "minimum": _NUMBER,
        "maximum": _NUMBER,
        "exclusiveMinimum": _NUMBER,
        "minLength": _NUMBER,
        "maxLength": _NUMBER,
        "maxItems": _NUMBER,
        "title": _TEXT,
        "description": _TEXT,
        "examples": {},
    },
}
"""The part of JSON Schema that a recipe may use, as a schema: what the dashboard can show as a form."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    path: str
    message: str

    def __str__(self) -> str:
        return f"{self.path} {self.message}" if self.path else self.message


def check(schema: Schema, value: Any, path: str = "") -> list[Problem]:
    """Everything about `value` that `schema` does not allow."""
    found = [
        (_path(path, error.absolute_path), error)
        for error in _validator()(_closed(schema)).iter_errors(value)
    ]
    mistyped = {where for where, error in found if error.validator == "type"}
    return [
        Problem(path=where, message=_message(error))
        for where, error in found
        if error.validator == "type" or where not in mistyped  # What else it is not is no news then.
    ]


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


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint for a name that is not known."""
    names = list(known)
    near = difflib.get_close_matches(name[:200], names, n=1)
    if near:
        return f"did you mean '{near[0]}'?"
    return f"known are {', '.join(sorted(names))}" if names else "there are none"


def schema_problems(schema: Any, path: str) -> list[str]:
    """What is wrong with a schema that somebody has written."""
    problems = [str(problem) for problem in check(DIALECT, schema, path)]
    return problems or list(_contradictions(schema, path))


def _contradictions(schema: Schema, path: str) -> Iterator[str]:
    properties = schema.get("properties", {})
    if not all(name in properties for name in schema.get("required", [])):
        yield f"{path}.required must be a list of names that are in properties"
    if "default" in schema:
        yield from (f"{path}.default {p.message}" for p in check(schema, schema["default"]))
    for name, part in properties.items():
        yield from _contradictions(part, f"{path}.properties.{name}")
    if "items" in schema:
        yield from _contradictions(schema["items"], f"{path}.items")


# --- JSON Schema, as it is meant here -------------------------------------------------------------------------


@cache
def _validator() -> Any:
    """The library's validator, with our types, and a path of its own for each key that is missing or one too many."""
    from jsonschema import Draft202012Validator, ValidationError
    from jsonschema.validators import extend

    def additional(validator: Any, allowed: Any, value: Any, schema: Schema) -> Iterator[ValidationError]:
        if not isinstance(value, Mapping) or allowed is True:
            return
        known = schema.get("properties", {})
        for key in value:
            if key in known:
                continue
            if allowed is False:
                message = f"is not a known key; {nearest(str(key), known)}"
                yield ValidationError(message, path=[key])
            else:
                yield from validator.descend(value[key], allowed, path=key)

    def required(
        validator: Any, names: Sequence[str], value: Any, schema: Schema
    ) -> Iterator[ValidationError]:
        for name in names:
            if isinstance(value, Mapping) and name not in value:
                yield ValidationError("is missing", path=[name])

    types = Draft202012Validator.TYPE_CHECKER.redefine_many(
        {
            "object": lambda _, value: isinstance(value, Mapping),
            "integer": lambda _, value: isinstance(value, int) and not isinstance(value, bool),
            "number": lambda _, value: _is_number(value) and _is_finite(value),
        }
    )
    keywords = {"additionalProperties": additional, "required": required}
    return extend(Draft202012Validator, keywords, type_checker=types)


def _closed(schema: Any) -> Any:
    """The schema, with objects that take no keys but their own where it does not say otherwise."""
    if not isinstance(schema, Mapping):
        return schema
    closed = dict(schema)
    if "properties" in schema:
        closed["properties"] = {name: _closed(part) for name, part in schema["properties"].items()}
    if "items" in schema:
        closed["items"] = _closed(schema["items"])
    if schema.get("type") == "object" or "properties" in schema:
        closed["additionalProperties"] = _closed(schema.get("additionalProperties", False))
    return closed


def _message(error: ValidationError) -> str:
    value, limit = error.instance, error.validator_value
    match error.validator:
        case "type":
            wanted = "a finite number" if _is_number(value) and not _is_finite(value) else _TYPES[limit]
            return f"must be {wanted}, not {_shown(value)}"
        case "enum":
            return f"must be one of {', '.join(map(str, limit))}, not {_shown(value)}"
        case "minimum" | "maximum" | "exclusiveMinimum":
            return f"must be {_range(error.schema)}, not {_shown(value)}"
        case "minLength":
            return "must not be empty" if not value else f"must have at least {limit:,} characters"
        case "maxLength":
            return f"is {len(value):,} characters long; at most {limit:,} are allowed"
        case "maxItems":
            return f"has {len(value):,} items; at most {limit:,} are allowed"
    return str(error.message)


def _range(schema: Any) -> str:
    """Both ends where there are two: whoever has met one limit should not meet the other next."""
    low, above, high = (schema.get(name) for name in ("minimum", "exclusiveMinimum", "maximum"))
    if low is not None and high is not None:
        return f"between {_number(low)} and {_number(high)}"
    words = [
        f"{word} {_number(limit)}"
        for word, limit in (("at least", low), ("more than", above), ("at most", high))
        if limit is not None
    ]
    return " and ".join(words)


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def _is_finite(value: float) -> bool:
    return isinstance(value, int) or math.isfinite(value)  # An integer may be beyond what a float can hold.


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _path(start: str, parts: Iterable[str | int]) -> str:
    path = start
    for part in parts:
        if isinstance(part, int):
            path += f"[{part}]"
        else:
            path += f".{shorten(str(part), 60)}" if path else shorten(str(part), 60)
    return path


def _shown(value: Any) -> str:
    return shorten(repr(value), 60)
