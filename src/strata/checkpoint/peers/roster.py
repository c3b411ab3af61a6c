"""Which agents of a run keep copies for each other, and the secret they share: one value where the agents meet.

It is JSON and changes by compare-and-swap. An agent that was killed stays in it until another one notices, which then asks
the next: the roster says whom to ask, not who is alive.
"""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, Protocol

from strata.core.jobs.peers import Peer

LOOK_S = 2.0


class SharedValue(Protocol):
    """One value on a compare-and-swap server. Raises `ConnectionError` where that does not answer."""

    def get(self) -> tuple[bytes, str] | None: ...

    def swap(self, value: bytes, token: str | None) -> bool: ...


class Roster:
    def __init__(self, value: SharedValue) -> None:
        self._value = value
        self._lock = threading.Lock()
        self._known: list[Peer] = []
        self._looked_s = float("-inf")

    def secret(self) -> str:
        """Of this run; made by the first agent that asks."""

        def begin(found: dict[str, Any]) -> dict[str, Any]:
            return {"secret": secrets.token_hex(32), "agents": {}, **found}

        return str(self._change(begin)["secret"])

    def enter(self, peer: Peer) -> None:
        """In the place of the agent that was there for the same machine, if any."""

        def entered(found: dict[str, Any]) -> dict[str, Any]:
            others = {n: each for n, each in found["agents"].items() if each["machine"] != peer.machine}
            return {**found, "agents": {**others, peer.agent: asdict(peer)}}

        self._change(entered)

    def leave(self, *agents: str) -> None:
        def left(found: dict[str, Any]) -> dict[str, Any]:
            return {**found, "agents": {n: each for n, each in found["agents"].items() if n not in agents}}

        self._change(left)

    def peers(self, *, fresh: bool = False) -> list[Peer]:
        """Who is there, as it was two seconds ago at most. Raises `ConnectionError`."""
        with self._lock:
            if not fresh and time.monotonic() - self._looked_s < LOOK_S:
                return self._known
        found = self._value.get()
        peers = _peers_in(json.loads(found[0])) if found is not None else []
        with self._lock:
            self._known, self._looked_s = peers, time.monotonic()
        return peers

    def _change(self, change: Callable[[dict[str, Any]], dict[str, Any]]) -> dict[str, Any]:
        while True:
            found = self._value.get()
            before = json.loads(found[0]) if found is not None else {"agents": {}}
            after = change(before)
            if after == before and found is not None:
                return after
            if self._value.swap(json.dumps(after).encode(), found[1] if found is not None else None):
                with self._lock:
                    self._looked_s = float("-inf")
                return after


def _peers_in(found: dict[str, Any]) -> list[Peer]:
    return [Peer(**{name: str(value) for name, value in each.items()}) for each in found["agents"].values()]
