"""How a start of a run was made: its command, configuration and source, as it is reported, kept and shown. Pure.

Bounded, plain text, and without secrets: what looks like a credential, by its name or by itself, is `[redacted]` before it
leaves the process that trains, and once more when it arrives.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from strata.core import checks
from strata.core.messages import InvalidArgument
from strata.core.telemetry.logtext import REDACTED, Tidy

DETAILS_LIMIT_BYTES = 65_536
TEXT_LIMIT = 2_000
KEYS_LIMIT = 1_000
"""Of one mapping; what is beyond it is left out, and counted."""
DEPTH_LIMIT = 8
LEFT_OUT = "…"
TAGS_LIMIT, TAG_LIMIT, NOTES_LIMIT = 20, 64, 16_384

Config = dict[str, Any]
"""As JSON has it."""

tidy = Tidy()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDetails:
    command: str = ""
    """The program and its arguments, as its processes were started."""
    folder: str = ""
    host: str = ""
    commit: str = ""
    """What git had checked out where the program lies; empty where that is no checkout. Local changes are not known."""
    branch: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    """Of Python, torch and this package."""
    world_size: int = 0
    config: Config = field(default_factory=dict)
    """What the loop says it was configured with."""
    options: Config = field(default_factory=dict)
    """Of the elastic job, in effect."""


def packed(details: RunDetails) -> bytes:
    """For the wire. A configuration that is too large is left out, and says so."""
    shown = tidied(details)
    body = _json(shown)
    for part in ("config", "options"):
        if len(body) > DETAILS_LIMIT_BYTES:
            shown = {**shown, part: {LEFT_OUT: f"too large to be kept ({len(_json(shown[part])):,} bytes)"}}
            body = _json(shown)
    return body


def unpacked(body: bytes) -> RunDetails | None:
    """Of what a worker has sent; None where it has sent nothing. Raises `InvalidArgument`."""
    if not body:
        return None
    checks.between("details of a run", len(body), 0, DETAILS_LIMIT_BYTES)
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise InvalidArgument(
            "details of a run", "are not a JSON object.", hint="Use the same version on both sides."
        )
    read: dict[str, Any] = {
        name: str(found.get(name, "")) for name in ("command", "folder", "host", "commit", "branch")
    }
    for name in ("versions", "config", "options"):
        read[name] = value if isinstance(value := found.get(name), dict) else {}
    read["world_size"] = world if isinstance(world := found.get("world_size"), int) else 0
    return RunDetails(**tidied(RunDetails(**read)))


def tidied(details: RunDetails) -> dict[str, Any]:
    return {
        name: value if isinstance(value, int) else _shown(value, DEPTH_LIMIT)
        for name, value in asdict(details).items()
    }


def check_tags(tags: list[str]) -> list[str]:
    """In their order, each once; raises `InvalidArgument`."""
    checks.between("number of tags", len(tags), 0, TAGS_LIMIT)
    for tag in tags:
        checks.name("tag", tag, limit=TAG_LIMIT)
    return list(dict.fromkeys(tag.strip() for tag in tags))


def _shown(value: object, depth: int) -> Any:
    if isinstance(value, str):
        return _text(value)
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if depth == 0:
        return LEFT_OUT
    if isinstance(value, Mapping):
        most = KEYS_LIMIT + (LEFT_OUT in value)  # What says so is not left out the second time.
        kept = list(value.items())[:most]
        shown = {_text(str(key), 200): _of_key(str(key), each, depth) for key, each in kept}
        if len(value) > most:
            shown[LEFT_OUT] = f"{len(value) - most:,} more"
        return shown
    if isinstance(value, list | tuple | set | frozenset):
        shown_items = [_shown(each, depth - 1) for each in list(value)[:KEYS_LIMIT]]
        return [*shown_items, LEFT_OUT] if len(value) > KEYS_LIMIT else shown_items
    return _text(str(value))


def _of_key(key: str, value: object, depth: int) -> Any:
    """A value may be secret because of its name."""
    if isinstance(value, str) and value and REDACTED in tidy(f"{key}={value!r}"):
        return REDACTED
    return _shown(value, depth - 1)


def _text(value: str, limit: int = TEXT_LIMIT) -> str:
    value = tidy(value)
    return value if len(value) <= limit else f"{value[: limit - 1]}{LEFT_OUT}"


def _json(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "replace")
