"""Bytes and JSON made wrong: a few changes to something right, as accidents and attackers make them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

NUMBERS = (
    0,
    1,
    2,
    7,
    0x7F,
    0x80,
    0xFF,
    0x7FFF,
    0xFFFF,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**53,
    2**63 - 1,
    2**63,
    2**64 - 1,
)
TEXTS = (
    "",
    " ",
    "\0",
    "a" * 300,
    "../../etc/passwd",
    "/proc/self/environ",
    "\ud800",
    "\u202e",
    "%s%n{0}",
    "${oc.env:HOME}",
    "nan",
    "-1",
    "1e999",
    "true",
    "9" * 5000,
)
VALUES: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    -1,
    1,
    0.5,
    1e308,
    2**63,
    2**64,
    10**30,
    [],
    {},
    [[]],
    [None],
    {"a": {}},
    *TEXTS,
)
LONGEST = 1 << 20


def mutated(data: bytes, chance: Random, others: Sequence[bytes] = ()) -> bytes:
    """One to a few changes; now and then a part of another."""
    out = bytearray(data)
    for _ in range(chance.choice((1, 1, 1, 2, 3, 8))):
        chance.choice(_CHANGES)(out, chance)
    if others and chance.random() < 0.1:
        other = chance.choice(others)
        cut = chance.randrange(len(out) + 1)
        out = out[:cut] + other[chance.randrange(len(other) + 1) :]
    return bytes(out[:LONGEST])


def _flip(out: bytearray, chance: Random) -> None:
    if out:
        out[chance.randrange(len(out))] ^= 1 << chance.randrange(8)


def _put(out: bytearray, chance: Random) -> None:
    if out:
        out[chance.randrange(len(out))] = chance.choice((0, 0xFF, 0x7F, 0x80, chance.randrange(256)))


def _number(out: bytearray, chance: Random) -> None:
    size = chance.choice((1, 2, 4, 8))
    if len(out) >= size:
        at = chance.randrange(len(out) - size + 1)
        value = (chance.choice(NUMBERS) + chance.choice((-1, 0, 0, 1))) % (1 << 8 * size)
        out[at : at + size] = value.to_bytes(size, chance.choice(("little", "big")))


def _cut(out: bytearray, chance: Random) -> None:
    del out[chance.randrange(len(out) + 1) :]


def _remove(out: bytearray, chance: Random) -> None:
    at = chance.randrange(len(out) + 1)
    del out[at : at + chance.choice((1, 2, 4, 16, 256))]


def _double(out: bytearray, chance: Random) -> None:
    at = chance.randrange(len(out) + 1)
    piece = bytes(out[at : at + chance.choice((1, 4, 16, 64, 512))])
    out[at:at] = piece * chance.choice((1, 1, 2, 16))


def _insert(out: bytearray, chance: Random) -> None:
    at = chance.randrange(len(out) + 1)
    piece = chance.choice(
        (b"\0" * 8, b"\xff" * 8, chance.randbytes(chance.choice((1, 3, 16, 100))), b"\n", b'"', b"{[" * 50)
    )
    out[at:at] = piece


def _text(out: bytearray, chance: Random) -> None:
    at = chance.randrange(len(out) + 1)
    out[at : at + chance.choice((0, 1, 8))] = chance.choice(TEXTS).encode(errors="surrogatepass")


_CHANGES: tuple[Callable[[bytearray, Random], None], ...] = (
    _flip,
    _flip,
    _put,
    _number,
    _number,
    _cut,
    _remove,
    _double,
    _insert,
    _text,
)


def mutated_json(document: Any, chance: Random) -> Any:
    """A copy in which some values are others, are missing, or stand elsewhere."""
    for _ in range(chance.choice((1, 1, 2, 4))):
        document = _changed(document, chance, depth=0)
    return document


def _changed(node: Any, chance: Random, *, depth: int) -> Any:
    if isinstance(node, dict) and node and chance.random() < 0.95:
        key = chance.choice(list(node))
        fate = chance.random()
        if fate < 0.08:
            return {k: v for k, v in node.items() if k != key}
        if fate < 0.14:
            return {**node, chance.choice([t for t in TEXTS if t.isascii()]): node[key]}
        return {**node, key: _changed(node[key], chance, depth=depth + 1)}
    if isinstance(node, list) and node and chance.random() < 0.9:
        at = chance.randrange(len(node))
        fate = chance.random()
        if fate < 0.1:
            return node[:at] + node[at + 1 :]
        if fate < 0.2:
            return node + [node[at]] * chance.choice((1, 2, 50))
        return [*node[:at], _changed(node[at], chance, depth=depth + 1), *node[at + 1 :]]
    if isinstance(node, int) and not isinstance(node, bool) and chance.random() < 0.5:
        return chance.choice((node + 1, node - 1, -node, node * 2, chance.choice(NUMBERS)))
    if isinstance(node, str) and node and chance.random() < 0.4:
        return mutated(node.encode(errors="replace"), chance).decode(errors="replace")
    if chance.random() < 0.02:
        deep: Any = chance.choice(VALUES)
        for _ in range(chance.choice((10, 2_000))):
            deep = [deep]
        return deep
    return chance.choice(VALUES)
