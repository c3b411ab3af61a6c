"""Where the agents of one run find each other: one value on a compare-and-swap server.

Three things that torch's own back ends leave to luck are settled here:

* **Clocks.** Torch compares heartbeat times across machines, so a clock three seconds off would kill a node. Here a
  heartbeat is a counter, and each agent goes by its own clock: a node is alive as long as its counter keeps moving.
* **Outages.** After the server was out of reach everyone's heartbeat is old. Nobody is declared dead for that: every
  node gets a full keep-alive window from the first reading after the gap.
* **Earlier runs.** A closed rendezvous belongs to its run as long as one member of it is alive. After that the id is
  free: the next agent starts a new incarnation, and nothing the old one left is read.

Not thread-safe; the handler takes turns.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, NoReturn
from urllib.parse import quote

from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend

from strata.rendezvous.cas import CasClient, Token
from strata.rendezvous.state import Node, SharedState, from_torch

ROOT = "/torch/elastic"
POLL_S = 0.1


class CasRendezvousBackend(RendezvousBackend):
    """`window_s` is how long a silent node counts as alive."""

    def __init__(
        self,
        *,
        name: str,
        client: CasClient,
        run_id: str,
        window_s: float,
        unreachable: Callable[[Exception], str],
    ) -> None:
        if not run_id:
            raise ValueError("The run id must be a non-empty string.")
        self._name = name
        self._client = client
        self._root = f"{ROOT}/{quote(run_id, safe='')}"
        self._window_s = window_s
        self._unreachable = unreachable
        self._seen: dict[Node, tuple[int, datetime]] = {}
        self._last_read_s: float | None = None
        self._incarnation = ""
        self._entered = False
        self._stale_token: Token | None = None

    @property
    def name(self) -> str:
        return self._name

    @property
    def store_root(self) -> str:
        """Where this incarnation keeps the agents' key-value store."""
        return f"{self._root}/store/{self._incarnation}"

    @property
    def state_key(self) -> str:
        return f"{self._root}/state"

    def get_state(self) -> tuple[bytes, Token] | None:
        self._stale_token = None
        found = self._read()
        if found is None:
            return None
        state, token = found
        if state.closed and not self._entered and (stale_token := self._outlive(state, token)) is not None:
            self._stale_token = stale_token
            return None
        return self._for_torch(state), token

    def set_state(self, state: bytes, token: Any | None = None) -> tuple[bytes, Token, bool] | None:
        mine = from_torch(state)
        if token is None:
            self._incarnation = uuid.uuid4().hex
        beats = {}
        for node, at in mine.last_heartbeats.items():
            beat, seen_at = self._seen.get(node, (0, None))
            beats[node] = beat if at == seen_at else beat + 1
        shared = SharedState(
            incarnation=self._incarnation,
            round=mine.round,
            complete=mine.complete,
            closed=mine.closed,
            deadline=mine.deadline,
            participants=mine.participants,
            wait_list=frozenset(mine.wait_list),
            redundancy_list=frozenset(mine.redundancy_list),
            beats=beats,
        )
        try:
            written, value, new_token = self._client.cas(
                self.state_key, shared.to_json(), self._stale_token if token is None else token
            )
        except ConnectionError as error:
            self._raise_unreachable(error)
        self._stale_token = None
        if written:
            assert new_token is not None
            self._entered = True
            self._seen = {node: (beats[node], at) for node, at in mine.last_heartbeats.items()}
            return state, new_token, True
        if value is None or new_token is None:
            return None
        return self._for_torch(self._adopt(SharedState.from_json(value))), new_token, False

    def leave(self, node: Node) -> None:
        """Take this node out of the shared state, so that its run id is free again without a wait."""
        while (found := self._read()) is not None:
            state, token = found
            if node not in state.beats:
                return
            without = replace(
                state,
                participants={n: rank for n, rank in state.participants.items() if n != node},
                wait_list=state.wait_list - {node},
                redundancy_list=state.redundancy_list - {node},
                beats={n: beat for n, beat in state.beats.items() if n != node},
            )
            try:
                written, _, _ = self._client.cas(self.state_key, without.to_json(), token)
            except ConnectionError as error:
                self._raise_unreachable(error)
            if written:
                return

    def _read(self) -> tuple[SharedState, Token] | None:
        try:
            found = self._client.get(self.state_key)
        except ConnectionError as error:
            self._raise_unreachable(error)
        return None if found is None else (self._adopt(SharedState.from_json(found[0])), found[1])

    def _adopt(self, state: SharedState) -> SharedState:
        """Remember when, by this machine's clocks, each node's counter last moved."""
        now_s, now = time.monotonic(), datetime.now(UTC)
        if self._last_read_s is None or now_s - self._last_read_s > self._window_s:
            self._seen = {}
        self._last_read_s = now_s
        earlier = self._seen
        self._seen = {
            node: earlier[node] if node in earlier and earlier[node][0] == beat else (beat, now)
            for node, beat in state.beats.items()
        }
        self._incarnation = state.incarnation
        return state

    def _for_torch(self, state: SharedState) -> bytes:
        return state.to_torch({node: at for node, (_, at) in self._seen.items()})

    def _outlive(self, state: SharedState, token: Token) -> Token | None:
        """Watch a closed rendezvous of others: its token once all members are silent, None if one is alive."""
        deadline_s = time.monotonic() + self._window_s
        while state.beats and time.monotonic() < deadline_s:
            time.sleep(POLL_S)
            before = state.beats
            if (found := self._read()) is None:
                return None
            state, token = found
            if any(beat != before.get(node) for node, beat in state.beats.items()):
                return None
        return token if state.closed else None

    def _raise_unreachable(self, error: Exception) -> NoReturn:
        raise RendezvousConnectionError(self._unreachable(error)) from error
