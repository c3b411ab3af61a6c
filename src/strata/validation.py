"""What documents that people write may hold: tasks' configurations, recipes, settings. JSON Schema, in our words.

`check` finds everything at once; each problem has the path of its key, what was given, what is allowed and, for a key that
does not exist, the nearest known one. Objects take no keys but their own, unless their schema says otherwise; whole numbers
are written without a point, and numbers are finite. `violations` gives the same as facts, for callers with texts of their own.
`schema_problems` looks at a schema that a user has written.

The `jsonschema` package does the work; it is imported with the first check, so that no other code waits for it. What commands
to the core may hold is checked by `strata.core.checks`, which is pure.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from strata.core.refusals import shorten

Schema = Mapping[str, Any]

_TYPES = {
    "object": "a table of keys",
    "array": "a list",
    "string": "text",
    "secret": "text",
    "boolean": "true or false",
    "integer": "a whole number",
    "number": "a number",
    "null": "nothing",
}
_NUMBER = {"type": "number"}
_TEXT = {"type": "string"}

DIALECT: Schema = {
    "type": "object",
    "properties": {
        "type": {"enum": [kind for kind in _TYPES if kind != "null"]},
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
        "variable": _TEXT,
    },
}
"""The part of JSON Schema that a recipe may use, as a schema: what the dashboard can show as a form. Of our own are the type
`secret`, a text that is never shown, and its `variable` (`strata.launch.recipes`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    path: str
    message: str

    def __str__(self) -> str:
        return f"{self.path} {self.message}" if self.path else self.message


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """One thing that a schema does not allow."""

    path: tuple[Any, ...]
    """The keys and indices that lead to it."""
    keyword: str
    """Of the schema: `type`, `minimum`, …; a key that is not known is one of `additionalProperties`."""
    limit: Any
    """What the keyword says."""
    value: Any
    schema: Schema


def check(schema: Schema, value: Any, path: str = "") -> list[Problem]:
    """Everything about `value` that `schema` does not allow, in our words."""
    return [
        Problem(path=_path(path, violation.path), message=_message(violation))
        for violation in violations(schema, value)
    ]


def violations(schema: Schema, value: Any) -> list[Violation]:
    """Everything about `value` that `schema` does not allow."""
    found = [
        Violation(
            path=tuple(error.absolute_path),
            keyword=error.validator,
            limit=error.validator_value,
            value=error.instance,
            schema=error.schema,
        )
        for error in _validator()(_closed(schema)).iter_errors(value)
    ]
    mistyped = {violation.path for violation in found if violation.keyword == "type"}
    # What else it is not is no news then.
    return [each for each in found if each.keyword == "type" or each.path not in mistyped]


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


def closest(name: str, known: Iterable[str], *, likeness: float = 0.6) -> str | None:
    """The known name that was probably meant."""
    # Comparing takes the square of the length.
    return next(iter(difflib.get_close_matches(name[:200], known, n=1, cutoff=likeness)), None)


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint for a name that is not known."""
    names = list(known)
    near = closest(name, names)
    if near is not None:
        return f"did you mean '{near}'?"
    return f"known are {', '.join(sorted(names))}" if names else "there are none"


def schema_problems(schema: Any, path: str) -> list[str]:
    """What is wrong with a schema that a user has written."""
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
                yield ValidationError("is not known", path=[key])
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
            "secret": lambda _, value: isinstance(value, str),
            "array": lambda _, value: isinstance(value, list | tuple),
            "integer": lambda _, value: isinstance(value, int) and not isinstance(value, bool),
            "number": lambda _, value: _is_finite(value),
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


def _message(violation: Violation) -> str:
    value, limit = violation.value, violation.limit
    if violation.schema.get("type") == "secret" and violation.keyword in ("type", "enum"):
        return "must be text (what was given is not shown)"
    match violation.keyword:
        case "type":
            kinds = " or ".join(_TYPES[kind] for kind in ([limit] if isinstance(limit, str) else limit))
            wanted = "a finite number" if _is_number(value) and not _is_finite(value) else kinds
            return f"must be {wanted}, not {_shown(value)}"
        case "additionalProperties":
            key = str(violation.path[-1])
            return f"is not a known key; {nearest(key, violation.schema.get('properties', {}))}"
        case "required":
            return "is missing"
        case "enum":
            return f"must be one of {', '.join(map(str, limit))}, not {_shown(value)}"
        case "minimum" | "maximum" | "exclusiveMinimum":
            return f"must be {_range(violation.schema)}, not {_shown(value)}"
        case "minLength":
            return "must not be empty" if not value else f"must have at least {limit:,} characters"
        case "maxLength":
            return f"is {len(value):,} characters long; at most {limit:,} are allowed"
        case "maxItems":
            return f"has {len(value):,} items; at most {limit:,} are allowed"
    return f"does not keep to {violation.keyword} {_shown(limit)}"


def _range(schema: Any) -> str:
    """Both ends where there are two: a user who has met one limit should not meet the other next."""
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


def _is_finite(value: Any) -> bool:
    """Whether it is a number that can be reckoned with."""
    try:
        return _is_number(value) and math.isfinite(value)
    except OverflowError:  # A whole number of more than 308 digits.
        return False


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
