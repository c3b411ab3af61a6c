"""Events as bytes and back: msgpack of the plain dataclass, beside the name of its kind."""

from __future__ import annotations

from typing import get_args

import msgspec

from strata.core.messages import Event

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
