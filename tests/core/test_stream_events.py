"""What the event stream carries: every event is published as its schema says, with its one sentence."""

from __future__ import annotations

import json
import types
from collections.abc import Mapping
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, Literal, NewType, Union, get_args, get_origin, get_type_hints

import jsonschema_rs
import orjson
import pytest

from strata.core import stream_events
from strata.core.event_text import describe
from strata.core.messages import Event
from strata.core.telemetry.stragglers import Change

SCHEMA: dict[str, Any] = json.loads(
    (Path(__file__).parents[2] / "docs" / "reference" / "events.schema.json").read_text()
)
PLAIN = {int: 3, str: "x", float: 0.5, bool: True, bytes: b"b"}


def strict(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema with everything required that it names, and nothing allowed beyond it."""
    for definition in schema["$defs"].values():
        if "properties" in definition:
            definition |= {"additionalProperties": False, "required": list(definition["properties"])}
    return schema


VALIDATOR = jsonschema_rs.Draft202012Validator(strict(SCHEMA))
KINDS = set(SCHEMA["discriminator"]["mapping"])


def sample(of: Any) -> Any:
    """A value of the type, with something in every list and every optional field."""
    if of in PLAIN:
        return PLAIN[of]
    if isinstance(of, NewType):
        return sample(of.__supertype__)
    if is_dataclass(of) and isinstance(of, type):
        return of(**{name: sample(hint) for name, hint in get_type_hints(of).items()})
    inner = get_args(of)
    if get_origin(of) is Literal:
        return inner[0]
    if get_origin(of) in (types.UnionType, Union):
        return sample(inner[0])
    if get_origin(of) is tuple:
        return (sample(inner[0]),) if inner[1:] == (...,) else tuple(map(sample, inner))
    if get_origin(of) is list:
        return [sample(inner[0])]
    assert get_origin(of) is Mapping, f"no sample of {of}"
    return {sample(inner[0]): sample(inner[1])}


def as_read(published: stream_events.Published) -> dict[str, Any]:
    """As a reader of the stream gets it, checked against the schema."""
    data: dict[str, Any] = json.loads(orjson.dumps(published.data))
    VALIDATOR.validate({"id": "boot-1", "at": 1.0, "event": published.kind, "data": data})
    return data


@pytest.mark.parametrize("kind", get_args(Event), ids=lambda kind: kind.__name__)
def test_event_is_published_as_the_schema_says_with_the_sentence_that_every_reader_shows(
    kind: type[Event],
) -> None:
    event = sample(kind)
    published = stream_events.publish(event)
    assert (published is not None) == (stream_events.kind_of(kind) in KINDS)
    severity, text = describe(event)
    assert text
    if published is not None:
        data = as_read(published)
        assert (data["severity"], data["text"]) == (severity, text)


@pytest.mark.parametrize("slow", [True, False])
def test_slow_rank_is_published_with_its_time(slow: bool) -> None:
    change = Change(**{**{n: sample(t) for n, t in get_type_hints(Change).items()}, "slow": slow})
    published = stream_events.publish_change(change, at_s=7.0)
    assert published.kind == ("worker_slow" if slow else "worker_caught_up")
    assert as_read(published)["at_s"] == 7.0


def test_values_that_agents_agree_on_are_nobody_elses() -> None:
    assert {kind for kind in KINDS if kind.startswith(("value", "versions", "counters"))} == set()
    assert {"metrics", "logs", "logs_skipped", "resync", "worker_joined", "recovery_recorded"} <= KINDS
