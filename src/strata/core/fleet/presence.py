"""Which agents of a rendezvous are there, and which are lost: each holds a stream, and a lost one is known by its stream's end.

Guarantees:

* An agent is lost when its stream ended without a goodbye and was not opened again within the grace. It is lost no longer
  once it is back.
* No agent is lost that was never seen: a coordinator that has just started knows no streams, and their ends at its own end say
  nothing about their agents.
* What is remembered is bounded in time and in number: after `FORGOTTEN_AFTER_S` the keep-alives of the rendezvous have informed the
  rest.

Soft: nothing of it is journaled. Pure: time arrives as `now`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from strata.core import checks
from strata.core.messages import AgentConnected, AgentDisconnected, Instant

FORGOTTEN_AFTER_S = 60.0
"""How long a lost one is spoken of."""
MAX_DROPPED = 20_000
KEY_LIMIT = 1024

Agent = tuple[str, str]
"""The key of a rendezvous, and a name within it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PresenceLimits:
    grace_s: float = 0.25
    """How long an agent whose stream dropped may take to open another. A live one needs some milliseconds."""


class Presence:
    def __init__(self, limits: PresenceLimits) -> None:
        self.limits = limits
        self.streams: Counter[Agent] = Counter()
        """How many each agent has open: the new one of an agent may be open before the end of its old one is noticed."""
        self.dropped_mono_s: dict[Agent, float] = {}
        """When the last stream of each agent ended without a goodbye. Those of longest ago come first."""

    def take_connection(self, opened: AgentConnected, now: Instant) -> None:
        checks.name("key", opened.key, limit=KEY_LIMIT)
        checks.name("node", opened.node)
        self._forget(now)
        agent = (opened.key, opened.node)
        self.streams[agent] += 1
        self.dropped_mono_s.pop(agent, None)

    def take_disconnection(self, ended: AgentDisconnected, now: Instant) -> None:
        self._forget(now)
        agent = (ended.key, ended.node)
        self.streams[agent] -= 1
        if self.streams[agent] > 0:
            return
        del self.streams[agent]
        if not ended.said_goodbye:
            self.dropped_mono_s[agent] = now.mono_s

    def credit_stall(self, stall_s: float, now: Instant) -> None:
        """For so long the coordinator may have read nothing: an agent that came back meanwhile has not been seen yet."""
        for agent, at_s in self.dropped_mono_s.items():
            self.dropped_mono_s[agent] = min(now.mono_s, at_s + stall_s)

    def lost(self, now: Instant) -> Mapping[str, frozenset[str]]:
        """By rendezvous."""
        found: dict[str, set[str]] = {}
        for (key, node), at_s in self.dropped_mono_s.items():
            if self.limits.grace_s <= now.mono_s - at_s < self.limits.grace_s + FORGOTTEN_AFTER_S:
                found.setdefault(key, set()).add(node)
        return {key: frozenset(nodes) for key, nodes in found.items()}

    def _forget(self, now: Instant) -> None:
        kept_s = self.limits.grace_s + FORGOTTEN_AFTER_S
        while self.dropped_mono_s:
            oldest, at_s = next(iter(self.dropped_mono_s.items()))
            if now.mono_s - at_s < kept_s and len(self.dropped_mono_s) < MAX_DROPPED:
                return
            del self.dropped_mono_s[oldest]
