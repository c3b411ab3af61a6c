"""Sign-ins of browsers: a cookie for a token, or for a link that an admin made and that works once.

The cookie is random, held by the browser where no script can read it, and known here alone: a restart of the coordinator
signs everybody out. A sign-in ends with its time and with a sign-out; that it ends with the token it was made from, by way of a
link or not, is the gatekeeper's work.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace

from strata.coordinator.auth.principals import Forbidden, Principal
from strata.core.messages import Overloaded

SIGN_IN_S = 12 * 3_600.0
LINK_S = 600.0
SIGN_INS_LIMIT = 10_000
LINKS_LIMIT = 1_000


@dataclass(frozen=True, slots=True)
class _Entry:
    principal: Principal
    expires_s: float


class SignIns:
    def __init__(self, *, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._signed_in: dict[str, _Entry] = {}
        self._links: dict[str, _Entry] = {}

    def start(self, principal: Principal) -> str:
        """The cookie's value."""
        return self._add(self._signed_in, principal, SIGN_IN_S, SIGN_INS_LIMIT)

    def find(self, cookie: str) -> Principal | None:
        entry = self._signed_in.get(_digest(cookie))
        if entry is None or self._clock() >= entry.expires_s:
            self.end(cookie)
            return None
        return entry.principal

    def end(self, cookie: str) -> None:
        self._signed_in.pop(_digest(cookie), None)

    def create_link(self, principal: Principal) -> str:
        """A code that signs in once, as `principal`, within ten minutes."""
        if principal.by_link:
            raise Forbidden(
                "A browser that signed in with a link cannot create links.",
                status=403,
                hint="Ask the admin who created yours, or sign in with a token.",
            )
        return self._add(self._links, replace(principal, by_link=True), LINK_S, LINKS_LIMIT)

    def redeem(self, code: str) -> str:
        """The cookie's value for a link's code."""
        entry = self._links.pop(_digest(code), None)
        if entry is None or self._clock() >= entry.expires_s:
            raise Forbidden(
                "This link has been used, or is older than ten minutes.",
                status=401,
                hint="Create a new one with `strata dashboard-link`.",
            )
        return self.start(entry.principal)

    def _add(
        self,
        entries: dict[str, _Entry],
        principal: Principal,
        lasts_s: float,
        limit: int,
    ) -> str:
        now_s = self._clock()
        if len(entries) >= limit:
            for key in [key for key, entry in entries.items() if now_s >= entry.expires_s]:
                del entries[key]
        if len(entries) >= limit:
            raise Overloaded(
                f"{limit:,} sign-ins are open already, which is the limit.", hint="Sign some out."
            )
        value = secrets.token_urlsafe(24)
        entries[_digest(value)] = _Entry(principal, now_s + lasts_s)
        return value


def _digest(value: str) -> str:
    return hashlib.sha256(value.encode()).hexdigest()
