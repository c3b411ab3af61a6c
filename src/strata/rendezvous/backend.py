"""Where the agents of one run find each other: one value on a compare-and-swap server.

Five things that torch's own back ends leave to luck are settled here:

* **Clocks.** Torch compares heartbeat times across machines, so a clock three seconds off would kill a node. Here a
  heartbeat is a counter, and each agent goes by its own clock: a node is alive as long as its counter keeps moving.
* **Outages.** After the server was out of reach every heartbeat is old. No node is declared dead for that: every
  node gets a full keep-alive window from the first reading after the gap.
* **Lost memory.** A server that comes back empty is sent the state again by the first member that notices, before a
  newcomer can take the empty place for a new run. A write that moves nothing but heartbeat counters is soft: the server
  need not keep it through a restart. Counters that jump back are counters that have moved.
* **Lost machines.** A node whose connection dropped (`presence`) counts as silent at once, not after a window, unless its counter
  moves again. Where the server does not know connections, keep-alives decide alone.
* **Earlier runs.** A closed rendezvous belongs to its run as long as one member of it is alive. After that the id is
  free: the next agent starts a new incarnation, and nothing the old one left is read.

Not thread-safe but for what it knows (`has_news`, `is_lost`); the handler takes turns.
"""

from __future__ import annotations

import logging
import math
import time
import uuid
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, NoReturn
from urllib.parse import quote

from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend

from strata.rendezvous.cas import CasClient, CasValue, Token
from strata.rendezvous.presence import KeepAlivesAlone, Presence
from strata.rendezvous.state import SharedState
from strata.torch_compat.rendezvous import Node, unpack_state

logger = logging.getLogger(__name__)

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
        self._seen: dict[Node, tuple[int, float]] = {}  # Each node's counter, and when it last moved.
        self._handed: dict[Node, datetime] = {}  # The same timestamps as torch received them.
        self._last_read_s: float | None = None
        self._was_away = False
        """The server has not answered since it was last read: no node's keep-alives could be seen meanwhile."""
        self._incarnation = ""
        self._entered = False
        self._stale_token: Token | None = None
        self._known: SharedState | None = None
        self._token: Token | None = None
        self._lost_at: dict[str, int | None] = {}
        """Of those whose connection dropped: the counter at the first reading after that, None where there was none."""
        self._silent: frozenset[Node] = frozenset()
        self.presence: Presence = KeepAlivesAlone()

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

    @property
    def known(self) -> SharedState | None:
        """What the server held when this node last read it: the same for every node, whichever seem silent."""
        return self._known

    @property
    def has_news(self) -> bool:
        """Whether the state has changed, or a node was lost or came back, since it was read."""
        return self.presence.has_changed(self._token) or self.presence.lost != self._lost_at.keys()

    def is_lost(self, node: Node) -> bool:
        """Whether its connection dropped, and its counter has not moved since."""
        lost_at, known = self._lost_at, self._known
        if str(node) not in lost_at:
            return False
        counter = lost_at[str(node)]
        return known is None or known.beats.get(node, counter) == counter

    def wait_for_news(self, timeout_s: float) -> None:
        self.presence.wait(self._token, self._lost_at.keys(), timeout_s)

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
        mine = unpack_state(state)
        if token is None:
            self._incarnation = uuid.uuid4().hex
        now_s = time.monotonic()
        seen = {}
        for node, at in mine.last_heartbeats.items():
            beat, seen_s = self._seen.get(node, (0, now_s))
            seen[node] = (beat, seen_s) if self._handed.get(node) == at else (beat + 1, now_s)
        shared = SharedState(
            incarnation=self._incarnation,
            round=mine.round,
            complete=mine.complete,
            closed=mine.closed,
            deadline=mine.deadline,
            participants=mine.participants,
            wait_list=frozenset(mine.wait_list),
            redundancy_list=frozenset(mine.redundancy_list),
            beats={node: beat for node, (beat, _) in seen.items()},
        )
        soft = token is not None and self._known is not None and shared.differs_in_beats_only(self._known)
        written, now_there = self._cas(shared, self._stale_token if token is None else token, soft=soft)
        self._stale_token = None
        if written:
            assert now_there is not None
            self._entered, self._known, self._token = True, shared, now_there[1]
            self._seen, self._handed = seen, dict(mine.last_heartbeats)
            return state, now_there[1], True
        found = self._restore_state() if now_there is None else now_there
        return None if found is None else (self._for_torch(self._adopt(*found)), found[1], False)

    def announce_recoverable(self) -> bool:
        """This run's workers recover without a restart: whether the server knows now."""
        try:
            self._client.cas(self._recoverable_key, b"1", None)
        except ConnectionError:
            return False
        return True

    def is_recoverable(self) -> bool:
        """Whether a member of this run has announced that."""
        try:
            return self._client.get(self._recoverable_key) is not None
        except ConnectionError:
            return False

    def shared_value(self, name: str) -> CasValue:
        """One that all agents of this run share."""
        return CasValue(self._client, lambda: f"{self.store_root}/strata/{name}")

    @property
    def _recoverable_key(self) -> str:
        return f"{self.store_root}/strata/recoverable"

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
            if self._cas(without, token)[0]:
                self._known = None
                return

    def _read(self) -> tuple[SharedState, Token] | None:
        try:
            found = self._client.get(self.state_key)
        except ConnectionError as error:
            self._raise_unreachable(error)
        there = self._restore_state() if found is None else (SharedState.from_json(found[0]), found[1])
        return None if there is None else (self._adopt(*there), there[1])

    def _cas(
        self, state: SharedState, token: Token | None, *, soft: bool = False
    ) -> tuple[bool, tuple[SharedState, Token] | None]:
        """Whether `state` was written, and what is stored now."""
        try:
            written, value, now_token = self._client.cas(self.state_key, state.to_json(), token, soft=soft)
        except ConnectionError as error:
            self._raise_unreachable(error)
        if value is None or now_token is None:
            return written, None
        return written, (state if written else SharedState.from_json(value), now_token)

    def _restore_state(self) -> tuple[SharedState, Token] | None:
        """Give a server that has lost the state what this member last knew of it. A newcomer knows nothing."""
        if not self._entered or self._known is None or self._known.closed:
            return None
        return self._cas(self._known, None)[1]

    def _adopt(self, state: SharedState, token: Token) -> SharedState:
        """Remember when, by this machine's clock, each node's counter last moved."""
        now_s = time.monotonic()
        if self._last_read_s is None or self._was_away or now_s - self._last_read_s > self._window_s:
            self._seen = {}
        self._last_read_s, self._was_away = now_s, False
        earlier = self._seen
        self._seen = {
            node: earlier[node] if node in earlier and earlier[node][0] == beat else (beat, now_s)
            for node, beat in state.beats.items()
        }
        counters = {str(node): beat for node, beat in state.beats.items()}
        self._lost_at = {name: self._lost_at.get(name, counters.get(name)) for name in self.presence.lost}
        self._incarnation = state.incarnation
        self._known, self._token = state, token
        return state

    def _for_torch(self, state: SharedState) -> bytes:
        # Torch reckons in wall-clock time; worked out anew at each reading, so that a clock that is set does no harm.
        now_s, now = time.monotonic(), datetime.now(UTC)
        ages_s = {node: now_s - seen_s for node, (_, seen_s) in self._seen.items()}
        self._note_silent(frozenset(node for node, age_s in ages_s.items() if age_s > self._window_s))
        self._handed = {
            node: now - timedelta(seconds=2 * self._window_s if self.is_lost(node) else age_s)
            for node, age_s in ages_s.items()
        }
        return state.to_torch(self._handed)

    def _note_silent(self, silent: frozenset[Node]) -> None:
        for node in sorted(silent - self._silent):
            logger.warning("node %s is lost: no keep-alive for more than %g s", node, self._window_s)
        self._silent = silent

    def _outlive(self, state: SharedState, token: Token) -> Token | None:
        """Watch a closed rendezvous of others: its token once all members are silent, None if one is alive."""
        for _ in range(math.ceil(self._window_s / POLL_S)):  # Looks, not seconds: a machine may stand still.
            if not state.beats:
                break
            time.sleep(POLL_S)
            before = state.beats
            if (found := self._read()) is None:
                return None
            state, token = found
            if any(beat != before.get(node) for node, beat in state.beats.items()):
                return None
        return token if state.closed else None

    def _raise_unreachable(self, error: Exception) -> NoReturn:
        self._was_away = True
        raise RendezvousConnectionError(self._unreachable(error)) from error
