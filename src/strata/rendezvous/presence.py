"""What an agent knows of the others beyond the shared state: who is lost, and whether the state has changed.

`Presence` is what a server may offer beside compare-and-swap. Where it does not, `KeepAlivesAlone` stands in: no node is known to be
lost before its keep-alives have been missing for the whole window, and changes are found by polling.
"""

from __future__ import annotations

import time
from collections.abc import Set
from typing import Protocol

from strata.rendezvous.cas import Token


class Presence(Protocol):
    """One agent's view. Safe to use from several threads."""

    @property
    def is_connected(self) -> bool:
        """Whether news would arrive by itself now."""
        ...

    @property
    def lost(self) -> Set[str]:
        """Names of other nodes whose connection dropped and did not come back, as far as this agent was notified."""
        ...

    def has_changed(self, since: Token | None) -> bool:
        """Whether the shared state is known to have changed since it had this token."""
        ...

    def wait(self, since: Token | None, lost: Set[str], timeout_s: float) -> None:
        """Until the state has changed, others than `lost` are lost, or the time is over."""
        ...

    def close(self) -> None:
        """Leave in good order: no other node takes this one for lost."""
        ...


class KeepAlivesAlone:
    is_connected = False
    lost: Set[str] = frozenset()

    def has_changed(self, since: Token | None) -> bool:
        return False

    def wait(self, since: Token | None, lost: Set[str], timeout_s: float) -> None:
        time.sleep(timeout_s)

    def close(self) -> None:
        pass
