"""Finds out who is calling, and refuses those who are not allowed to.

A caller is recognised by what it presents, in this order: a token (`Authorization: Bearer …`, or the same as gRPC metadata),
the cookie of a sign-in, a client certificate. A caller that presents nothing on the loopback of the coordinator's machine is
recognised by the kernel as the user that owns the connection: the coordinator's own user, and root, are admins, as long as
the operator has configured no secret; everybody else needs a token. What cannot be known counts for nothing.

Guessing is slow: an address, or a local user, that was wrong too often is not looked at for a while, except with a token
that was right before. Browsers are held to the Host and Origin they came from, so that a foreign page cannot act or read
through a visitor.
"""

from __future__ import annotations

import fnmatch
import hmac
import logging
import os
import pwd
import re
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TypeVar
from urllib.parse import SplitResult, urlsplit

from strata.coordinator.auth.peers import Address, PeerOwners, is_loopback
from strata.coordinator.auth.principals import ROLES, Forbidden, Principal, Role
from strata.coordinator.auth.signing_in import SignIns
from strata.coordinator.auth.tokens import TaskTokens, TokenFileError, TokenStore, digest_of
from strata.core.messages import JobId
from strata.logs import OutageLog

log = logging.getLogger("strata.coordinator.auth")

T = TypeVar("T")

LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
FAILURES_AT_ONCE = 100
FAILURE_FORGIVEN_S = 1.0
"""After so many seconds one more wrong attempt is looked at."""
REMEMBERED = 10_000
DIGEST_PREFIX = "sha256:"
ROOT = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """The verified certificate of a client."""

    common_name: str
    units: tuple[str, ...] = ()


@dataclass(slots=True)
class Connection:
    """One connection, as the kernel and TLS describe its other end. The owner is asked for once."""

    peer: Address | None
    ours: Address | None
    owners: PeerOwners
    certificate: Certificate | None = None
    _owner: int | None = None
    _was_asked: bool = False

    @property
    def owner(self) -> int | None:
        """The user at the other end; None where that is not certain."""
        if not self._was_asked and self.peer is not None and self.ours is not None:
            self._owner = self.owners.owner_of(self.peer, self.ours)
        self._was_asked = True
        return self._owner

    @property
    def is_loopback(self) -> bool:
        return self.peer is not None and is_loopback(self.peer[0])

    @property
    def client(self) -> str:
        """Who is held to limits: an address, or on loopback a user where one is known."""
        if self.peer is None:
            return "unknown"
        if self.is_loopback and self.owner is not None:
            return f"uid {self.owner}"
        return self.peer[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessRules:
    """What the operator has decided."""

    secrets: Mapping[str, Role] = field(default_factory=dict)
    """Role by token, or by `sha256:` and a token's digest."""
    hosts: frozenset[str] = frozenset()
    """Names under which the coordinator may be addressed; empty: any."""
    trust_loopback: bool = False
    """Whether every user of this machine is an admin."""
    certificate_roles: Mapping[str, str] = field(default_factory=dict)
    """`role` or `role:job`, by a pattern for the subject's common name."""
    needs_credentials: bool = False
    """Whether the coordinator's own user needs some too: so where a secret or client certificates are configured."""


class Gatekeeper:
    def __init__(
        self,
        rules: AccessRules,
        *,
        tokens: TokenStore,
        task_tokens: TaskTokens,
        is_live: Callable[[str], bool],
        on_failure: Callable[[str], None] = lambda reason: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`is_live`: whether a task has not ended, so that its token still counts."""
        self.tokens = tokens
        self.task_tokens = task_tokens
        self.sign_ins = SignIns(clock=clock)
        self.owners = PeerOwners()
        self._rules = rules
        self._digests = {
            secret.removeprefix(DIGEST_PREFIX)
            if secret.startswith(DIGEST_PREFIX)
            else digest_of(secret): role
            for secret, role in rules.secrets.items()
        }
        self._is_live = is_live
        self._on_failure = on_failure
        self._failures = _Failures(clock)
        self._outage = OutageLog(log, over="tokens can be read again")
        self._uid = os.geteuid()

    # --- who ------------------------------------------------------------------------------------------------

    def identify(self, connection: Connection, *, authorization: str = "", cookie: str = "") -> Principal:
        """Who is calling. Raises `Forbidden` where that is not known."""
        token = bearer_token(authorization)
        found = self.check_token(token, connection) if token is not None else None
        if found is None and cookie:
            found = self.signed_in(cookie)
        if found is None and connection.certificate is not None:
            found = self._of_certificate(connection.certificate)
        if found is None:
            found = self._of_loopback(connection)
        if found is None:
            if token is not None:
                self._wrong(connection)
            raise self._unknown(connection, presented=token is not None)
        return found

    def check_token(self, token: str, connection: Connection) -> Principal | None:
        """Whose token this is. A client that guesses has to wait, whatever it presents."""
        digest = digest_of(token)
        if self._failures.is_blocked(connection.client, digest):
            self._on_failure("throttled")
            raise Forbidden(
                "Too many wrong tokens came from this address.",
                status=429,
                hint="Wait a few seconds, then use a valid token.",
                retry_after_s=int(FAILURE_FORGIVEN_S),
            )
        found = self._of_token(token, digest)
        if found is not None:
            self._failures.was_right(connection.client, digest)
        return found

    def sign_in(self, token: str, connection: Connection) -> str:
        """The cookie of a new sign-in. Raises `Forbidden` for a token that is wrong."""
        found = self.check_token(token, connection)
        if found is None:
            self._wrong(connection)
            raise Forbidden(
                "This token is not valid here.",
                status=401,
                hint="Ask an admin for one: `strata token create --role viewer`. It may have expired or been revoked.",
            )
        return self.sign_ins.start(found)

    def still_counts(self, principal: Principal) -> bool:
        """Whether what let a caller in has not been taken away meanwhile: for streams, which outlive their first call."""
        kind, _, name = principal.credential.partition(" ")
        if kind == "task":
            return self._is_live(name)
        return kind != "token" or self._ask_tokens(lambda: self.tokens.counts(name)) is True

    def signed_in(self, cookie: str) -> Principal | None:
        found = self.sign_ins.find(cookie)
        if found is None or self.still_counts(found):
            return found
        self.sign_ins.end(cookie)
        return None

    def _of_token(self, token: str, digest: str) -> Principal | None:
        configured: Role | None = None
        for known, role in self._digests.items():  # Every one is compared, so that timing reveals nothing.
            if hmac.compare_digest(known, digest):
                configured = role
        if configured is not None:
            return Principal(name=f"configured {configured} token", role=configured)
        task = self.task_tokens.task_of(token)
        if task is not None:
            return (
                Principal(name=f"task {task}", role="worker", job=JobId(task), credential=f"task {task}")
                if self._is_live(task)
                else None
            )
        created = self._ask_tokens(lambda: self.tokens.find(token))
        return created.principal if created is not None else None

    def _ask_tokens(self, ask: Callable[[], T]) -> T | None:
        """None where their file cannot be read: then none of them counts, and everybody else is let in as before."""
        try:
            answer = ask()
        except TokenFileError as error:
            self._outage.met(str(error), level=logging.ERROR)
            return None
        self._outage.ended()
        return answer

    def _of_certificate(self, certificate: Certificate) -> Principal:
        role, job = role_of(certificate, self._rules.certificate_roles)
        if role is None:
            self._on_failure("certificate")
            raise Forbidden(
                f"The certificate of '{certificate.common_name[:100]}' has no role at this coordinator.",
                status=403,
                hint="Add its name to [coordinator.certificate_roles], or issue one with `strata certs issue --role …`.",
            )
        return Principal(name=f"certificate {certificate.common_name}", role=role, job=job)

    def _of_loopback(self, connection: Connection) -> Principal | None:
        if not connection.is_loopback:
            return None
        owner = connection.owner
        if self._rules.trust_loopback:
            return Principal(name=_user_name(owner) if owner is not None else "loopback", role="admin")
        if self._rules.needs_credentials or owner not in (self._uid, ROOT):
            return None
        return Principal(name=_user_name(owner), role="admin")

    def _wrong(self, connection: Connection) -> None:
        self._failures.was_wrong(connection.client)
        self._on_failure("wrong_token")

    def _unknown(self, connection: Connection, *, presented: bool) -> Forbidden:
        hint = "Send 'Authorization: Bearer <token>', or set STRATA_TOKEN for the CLI and workers."
        if presented:
            return Forbidden(
                "The token is wrong, has expired or was revoked.",
                status=401,
                hint=f"{hint} An admin creates one with `strata token create`.",
            )
        self._on_failure("no_token")
        owner = connection.owner if connection.is_loopback else None
        if owner is None or self._rules.needs_credentials:
            return Forbidden("A token is required.", status=401, hint=hint)
        return Forbidden(
            f"A token is required: this coordinator belongs to {_user_name(self._uid)}, and you are {_user_name(owner)}.",
            status=401,
            hint=f"Ask {_user_name(self._uid)} for one (`strata token create --role viewer`); then: {hint}",
        )

    # --- browsers -------------------------------------------------------------------------------------------

    def check_host(self, host: str, connection: Connection) -> None:
        """For every call: a page of another name, which that name's owner pointed here, sees nothing."""
        name = _split(f"//{host}").hostname or ""
        if name in self._rules.hosts:
            return
        # A caller that is trusted for being on this machine must mean this machine.
        by_machine = connection.is_loopback and (
            self._rules.trust_loopback or not self._rules.needs_credentials
        )
        if self._rules.hosts or (by_machine and name not in LOOPBACK_NAMES):
            raise Forbidden(
                f"The Host header '{name[:100]}' does not name this coordinator.",
                status=403,
                hint="Use the address it was started with, or add the name to allowed_hosts.",
            )

    @staticmethod
    def check_origin(host: str, origin: str) -> None:
        """For calls that change something: no foreign page may make them through a visitor's browser."""
        if origin and _split(origin).netloc != host:  # 'null' too: that is what a sandboxed page says.
            raise Forbidden(
                "Calls that change something must come from this coordinator's own pages.",
                status=403,
                hint="Open the dashboard at the coordinator's address, or call without an Origin header.",
            )


def _split(address: str) -> SplitResult:
    """The parts of an address; of one that is none, nothing."""
    try:
        return urlsplit(address)
    except ValueError:  # Such as a bracket that is not closed.
        return SplitResult("", "", "", "", "")


class _Failures:
    """Wrong attempts by client, forgiven one by one. Bounded."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._full_at_s: OrderedDict[str, float] = OrderedDict()
        """When all of a client's failures are forgiven."""
        self._right: OrderedDict[tuple[str, str], None] = OrderedDict()

    def is_blocked(self, client: str, digest: str) -> bool:
        if (client, digest) in self._right:
            return False
        until_s = self._full_at_s.get(client, 0.0)
        return until_s - self._clock() > FAILURES_AT_ONCE * FAILURE_FORGIVEN_S

    def was_wrong(self, client: str) -> None:
        now_s = self._clock()
        self._full_at_s[client] = max(now_s, self._full_at_s.pop(client, 0.0)) + FAILURE_FORGIVEN_S
        while len(self._full_at_s) > REMEMBERED:
            self._full_at_s.popitem(last=False)

    def was_right(self, client: str, digest: str) -> None:
        self._right[client, digest] = None
        self._right.move_to_end((client, digest))
        while len(self._right) > REMEMBERED:
            self._right.popitem(last=False)


def bearer_token(authorization: str) -> str | None:
    """The token in a header; an empty string for a header of another kind, which is as good as a wrong token."""
    if not authorization:
        return None
    kind, _, token = authorization.partition(" ")
    return token.strip() if kind.lower() == "bearer" else ""


def role_of(certificate: Certificate, roles: Mapping[str, str]) -> tuple[Role | None, JobId | None]:
    """By the first pattern that fits the common name; else by an organisational unit that is a role's name."""
    for pattern, meaning in roles.items():
        if fnmatch.fnmatchcase(certificate.common_name, pattern):
            role, _, job = meaning.partition(":")
            return next((r for r in ROLES if r == role), None), JobId(job) if job else None
    for unit in certificate.units:
        role, _, job = unit.partition(":")
        if role in ROLES:
            return next(r for r in ROLES if r == role), JobId(job) if job else None
    return None, None


def parse_subject(subject: str) -> Certificate:
    """A subject as RFC 2253 writes it, with the escapes that keep a name from looking like two."""
    parts = [part.strip() for part in re.split(r"(?<!\\)[,+]", subject)]
    fields = [
        (key, re.sub(r"\\(.)", r"\1", value)) for key, _, value in (part.partition("=") for part in parts)
    ]
    common = next((value for key, value in fields if key == "CN"), "")
    return Certificate(common_name=common, units=tuple(value for key, value in fields if key == "OU"))


@lru_cache(maxsize=1_024)
def _user_name(uid: int) -> str:
    try:
        return f"user {pwd.getpwuid(uid).pw_name} (uid {uid})"
    except KeyError:
        return f"user {uid}"
