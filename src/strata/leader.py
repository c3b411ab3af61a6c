"""Which of several coordinators to ask: the one that leads, found by what each of them says. Needs nothing but Python.

`Coordinators` are the addresses that one client was given, and the one that did last. A `Search` is one undertaking among them,
a call or the life of a session: it starts there, follows what a standby says of who leads, and asks the others in turn. After each round
the caller pauses (`strata.backoff`); what every one of them said is kept for the message, should none do.

A standby's word is followed to an address that the user has named. To another one only where every connection is verified by
TLS: the token is sent with each call, and over an open connection an attacker on the way could name the address that it is sent to.
"""

from __future__ import annotations

from collections.abc import Sequence

LEADER_METADATA, LEADER_HEADER = "strata-leader", "Strata-Leader"
"""Where a standby says who leads when it refuses a call: HOST:PORT in gRPC's trailers, a URL in HTTP's headers."""
ROLE_METADATA, ROLE_HEADER = "strata-role", "Strata-Role"
"""Where it says that it is a standby."""
UNLISTED_LIMIT = 8
"""How many addresses beside its own a client follows standbys to, as long as it lives."""


class Coordinators:
    """Of one client; for any thread. `follows_unlisted`: whether connections are verified by TLS."""

    def __init__(self, addresses: Sequence[str], *, follows_unlisted: bool = False) -> None:
        self.addresses = tuple(dict.fromkeys(addresses))
        self.current = self.addresses[0]
        """The one that did last, or is to be asked next."""
        self._follows_unlisted = follows_unlisted
        self._unlisted: set[str] = set()

    @property
    def are_several(self) -> bool:
        return len(self.addresses) + len(self._unlisted) > 1

    def search(self) -> Search:
        return Search(self)

    def may_follow(self, address: str) -> bool:
        if not address:
            return False
        if address in self.addresses or address in self._unlisted:
            return True
        if not self._follows_unlisted or len(self._unlisted) >= UNLISTED_LIMIT:
            return False
        self._unlisted.add(address)
        return True


class Search:
    def __init__(self, among: Coordinators) -> None:
        self._among = among
        self.address = among.current
        """To be asked now."""
        self._asked: set[str] = set()
        """Since the last pause."""
        self._said: dict[str, str] = {}

    def worked(self) -> None:
        self._asked.clear()
        self._said.clear()
        self._among.current = self.address

    def failed(self, said: str, *, leader: str = "") -> bool:
        """It does not do, and `said` why, or who leads. Whether the next one is to be asked at once: it was not asked since the
        last pause."""
        failed, addresses = self.address, self._among.addresses
        if leader and not self._among.may_follow(leader):
            said = f"{said} (it says that {leader} leads, which is not among the addresses given)"
            leader = ""
        self._said[failed] = said
        self._asked.add(failed)
        first = addresses.index(failed) + 1 if failed in addresses else 0
        others = [*addresses[first:], *addresses[:first]]
        wanted = [leader, *others] if leader else others
        left = [address for address in wanted if address not in self._asked]
        if not left:
            self._asked.clear()
        self.address = (left or wanted)[0]
        if self._among.current == failed:  # Not where another undertaking has found the leader meanwhile.
            self._among.current = self.address
        return bool(left)

    def report(self) -> str:
        """What each of them said, in the order they were given."""
        listed = [*self._among.addresses, *(each for each in self._said if each not in self._among.addresses)]
        return "; ".join(f"{each}: {self._said.get(each, 'was not asked')}" for each in listed)
