"""Finding out what a store lets us do, before a training run depends on it.

Every operation is tried once with a small value under a name of its own, which is removed again. The answers are
for people: `strata doctor` and configuration checks print them.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass

from strata.errors import StrataError
from strata.stores.protocol import AlreadyExists, Store


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing that was tried. `problem` is empty if it worked."""

    name: str
    problem: str = ""

    @property
    def ok(self) -> bool:
        return not self.problem


def probe(store: Store) -> list[Check]:
    """Try to list, write, read, write exclusively, and delete."""
    key, value = f"strata-probe-{uuid.uuid4().hex[:12]}", b"written by strata to see whether it can"

    def read() -> str:
        return "" if store.read(key) == value else f"'{key}' did not read back as it was written."

    def write_exclusively() -> str:
        try:
            store.put(key, b"must not be kept", if_absent=True)
        except AlreadyExists:
            return ""
        return f"{store.url} overwrites values that must not be: it does not support 'If-None-Match'."

    checks = [
        _check("list", lambda: next(store.list(key), None)),
        _check("write", lambda: store.put(key, value)),
    ]
    if checks[-1].ok:
        checks += [
            _check("read", read),
            _check("write exclusively", write_exclusively),
            _check("delete", lambda: store.delete(key)),
        ]
    return checks


def _check(name: str, attempt: Callable[[], object]) -> Check:
    try:
        found = attempt()
    except StrataError as error:
        return Check(name=name, problem=str(error))
    return Check(name=name, problem=found if isinstance(found, str) else "")
