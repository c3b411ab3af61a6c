"""Events as bytes and back: msgpack of the plain dataclass, beside the name of its kind.

A journal has a format, a number that grows whenever a kind of event or a field of one is added after a release: an older
Strata must refuse what it would read without them. Kinds and fields are never taken away, and what is added has a default, so
every earlier format is read. `tests/testdata/event_formats.json` says which events each format has.
"""

from __future__ import annotations

from typing import get_args

import msgspec

from strata.core.messages import Event

FORMAT = 2
"""What this version writes. 1: 0.1. 2: 0.2, with incidents, quarantine, drains, health and what is forgotten."""

KINDS: dict[str, type[Event]] = {kind.__name__: kind for kind in get_args(Event)}
_DECODERS = {name: msgspec.msgpack.Decoder(kind) for name, kind in KINDS.items()}
_ENCODER = msgspec.msgpack.Encoder()


def kind_of(event: Event) -> str:
    return type(event).__name__


def encode(event: Event) -> bytes:
    return _ENCODER.encode(event)


def size_bytes(event: Event) -> int:
    return len(_ENCODER.encode(event))


def decode(kind: str, body: bytes) -> Event:
    """Raises `KeyError` for a kind this version does not know, `msgspec.MsgspecError` for bytes that are not it."""
    return _DECODERS[kind].decode(body)
