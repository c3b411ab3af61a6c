"""Who may do what: one role per token, checked by the middleware of HTTP and gRPC.

On loopback without tokens everybody is an admin, because whoever is on the machine is. As soon as a token is
set, every call must carry one (`Authorization: Bearer …`, or the same as gRPC metadata). Browsers are held to
the Host and Origin they came from, so that a foreign page cannot act through a visitor.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from urllib.parse import urlsplit

from strata.errors import StrataError

RANKS = {"viewer": 0, "worker": 1, "operator": 2, "admin": 3}


class Forbidden(StrataError):
    """The call is understood and refused: no token, a wrong one, or one that may not do this."""

    code = "forbidden"

    def __init__(self, message: str, *, status: int, hint: str) -> None:
        super().__init__(message, hint=hint)
        self.status = status


class Gatekeeper:
    def __init__(self, secrets: Mapping[str, str], *, hosts: frozenset[str]) -> None:
        self._secrets = [(token.encode(), role) for token, role in secrets.items()]
        self._hosts = hosts

    @property
    def open(self) -> bool:
        return not self._secrets

    def check_role(self, authorization: str, need: str) -> None:
        if self.open:
            return
        role = self._role(authorization)
        if role is None:
            raise Forbidden(
                "A token is required.",
                status=401,
                hint="Send 'Authorization: Bearer <token>', or set STRATA_TOKEN for the CLI and workers.",
            )
        if RANKS[role] < RANKS[need]:
            raise Forbidden(
                f"This token is a {role}'s; the call needs {need} or more.",
                status=403,
                hint="Use a token with that role.",
            )

    def check_browser(self, host: str, origin: str) -> None:
        """For calls that change something: no foreign page may make them through a visitor's browser."""
        name = urlsplit(f"//{host}").hostname or ""
        if self._hosts and name not in self._hosts:
            raise Forbidden(
                f"The Host '{name[:100]}' is not this coordinator.",
                status=403,
                hint="Use the address it was started with.",
            )
        if origin and urlsplit(origin).netloc != host:  # 'null' too: that is what a sandboxed page says.
            raise Forbidden(
                "Calls that change something must come from this coordinator's own pages.",
                status=403,
                hint="Open the dashboard at the coordinator's address, or call without an Origin header.",
            )

    def _role(self, authorization: str) -> str | None:
        kind, _, token = authorization.partition(" ")
        if kind.lower() != "bearer":
            return None
        given = token.strip().encode()
        found = None
        for known, role in self._secrets:  # Every token is compared, so that timing reveals nothing.
            if hmac.compare_digest(known, given):
                found = role
        return found
