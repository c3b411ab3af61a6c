"""Tokens that the coordinator gave out: kept as digests, with a role, perhaps a job, and a time at which they end.

A token is shown once, when it is created; the file holds its SHA-256 alone, which is enough because a token is 192 random
bits. `tokens.json` in the data directory is private, written atomically under a lock, and read again whenever it changes, so
that `strata token` works beside a running coordinator and without one.

Not for tokens of the configuration: those are the operator's, who keeps them.
"""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import json
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec

from strata.coordinator.auth.principals import ROLES, Principal, Role
from strata.core import checks
from strata.core.messages import InvalidArgument, JobId, Overloaded, Unknown
from strata.errors import StrataError
from strata.files import write_file

PREFIX = "strata_"
"""So that a token that leaked can be found by a search."""
TASK_PREFIX = "strata_task_"
TOKEN_BYTES = 24
KEY_BYTES = 32
TOKENS_LIMIT = 10_000
EXPIRED_KEPT_S = 86_400.0
_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3_600.0, "d": 86_400.0, "w": 604_800.0}


class TokenFileError(StrataError):
    """The file of tokens cannot be read or written."""

    code = "tokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """What is known of one, which is not enough to use it."""

    id: str
    name: str
    role: Role
    job: str | None
    created_at_s: float
    expires_at_s: float | None
    digest: str
    created_by: str

    def public(self, now_s: float) -> dict[str, Any]:
        """What may be shown."""
        return {
            "id": self.id,
            "name": self.name,
            "role": self.role,
            "job_id": self.job,
            "created_at": self.created_at_s,
            "expires_at": self.expires_at_s,
            "created_by": self.created_by,
            "expired": self.has_expired(now_s),
        }

    def has_expired(self, now_s: float) -> bool:
        return self.expires_at_s is not None and now_s >= self.expires_at_s

    @property
    def principal(self) -> Principal:
        return Principal(
            name=f"token {self.name} ({self.id})",
            role=self.role,
            job=JobId(self.job) if self.job else None,
            credential=f"token {self.id}",
        )


def digest_of(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


def parse_expiry(text: str) -> float | None:
    """Seconds of '7d', '12h', '30m'; None for 'never'."""
    if text == "never":
        return None
    match = re.fullmatch(r"(\d{1,6}(?:\.\d{1,3})?)([smhdw])", text)
    if match is None or float(match[1]) == 0:
        raise InvalidArgument(
            "expires", f"'{text[:40]}' is not a time span.", hint="Write 7d, 12h or 30m; or 'never'."
        )
    return float(match[1]) * _UNITS_S[match[2]]


def as_role(text: str) -> Role:
    for role in ROLES:
        if role == text:
            return role
    raise InvalidArgument("role", f"'{text[:40]}' is not one.", hint=f"There are {', '.join(ROLES)}.")


class TokenStore:
    """The file, and what it said last. Raises `TokenFileError` for a file that cannot be used."""

    def __init__(self, data_dir: Path) -> None:
        self.path = data_dir / "tokens.json"
        self._seen: tuple[int, int, int] | None = None
        self._by_digest: dict[str, Token] = {}

    def find(self, token: str, *, now_s: float | None = None) -> Token | None:
        """The one this is, if it is one and has not expired."""
        self._refresh()
        found = self._by_digest.get(digest_of(token))
        if found is None or found.has_expired(time.time() if now_s is None else now_s):
            return None
        return found

    def counts(self, token_id: str) -> bool:
        """Whether a token of this id is still there and has not expired."""
        self._refresh()
        now_s = time.time()
        return any(t.id == token_id and not t.has_expired(now_s) for t in self._by_digest.values())

    def all(self) -> list[Token]:
        """Oldest first, expired ones of the last day among them."""
        self._refresh()
        return sorted(self._by_digest.values(), key=lambda token: token.created_at_s)

    def create(
        self,
        *,
        name: str,
        role: Role,
        job: str | None = None,
        expires_s: float | None = None,
        created_by: str = "",
    ) -> tuple[str, Token]:
        """The token itself, which is not kept, and what is."""
        checks.name("name", name, limit=64)
        if job is not None:
            checks.name("job", job)
        if role == "admin" and job is not None:
            raise InvalidArgument(
                "role", "admin cannot be bound to a job.", hint="Leave out the job, or use operator."
            )
        secret = PREFIX + secrets.token_urlsafe(TOKEN_BYTES)
        now_s = time.time()
        token = Token(
            id=secrets.token_hex(4),
            name=name,
            role=role,
            job=job,
            created_at_s=now_s,
            expires_at_s=now_s + expires_s if expires_s is not None else None,
            digest=digest_of(secret),
            created_by=created_by,
        )
        with self._changing() as tokens:
            if len(tokens) >= TOKENS_LIMIT:
                raise Overloaded(
                    f"{TOKENS_LIMIT:,} tokens are kept already, which is the limit.",
                    hint="Revoke some: `strata token ls`, `strata token revoke ID`.",
                )
            tokens[token.digest] = token
        return secret, token

    def revoke(self, token_id: str) -> Token:
        with self._changing() as tokens:
            found = next((token for token in tokens.values() if token.id == token_id), None)
            if found is None:
                raise Unknown("token", token_id, hint="`strata token ls` lists the ids.")
            del tokens[found.digest]
        return found

    @contextmanager
    def _changing(self) -> Iterator[dict[str, Token]]:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with _exclusively(self.path.with_suffix(".lock")):
                self._seen = None
                self._refresh()
                now_s = time.time()
                tokens = {
                    digest: token
                    for digest, token in self._by_digest.items()
                    if token.expires_at_s is None or token.expires_at_s + EXPIRED_KEPT_S > now_s
                }
                yield tokens
                body = json.dumps(
                    {"version": 1, "tokens": [asdict(token) for token in tokens.values()]}, indent=1
                )
                write_file(self.path, body, durable=True, mode=0o600)
                self._seen = None
        except OSError as error:
            raise TokenFileError(
                f"The tokens in {self.path} cannot be changed: {error.strerror or error}.",
                hint="Is the disk full, or does the data directory belong to another user?",
            ) from error

    def _refresh(self) -> None:
        try:
            status = os.stat(self.path)
        except FileNotFoundError:
            self._seen, self._by_digest = None, {}
            return
        except OSError as error:
            raise TokenFileError(f"The tokens in {self.path} cannot be read: {error.strerror}.") from error
        seen = (status.st_ino, status.st_mtime_ns, status.st_size)
        if seen == self._seen:
            return
        try:
            found = json.loads(self.path.read_bytes())
            tokens = msgspec.convert(found["tokens"], list[Token])
            self._by_digest = {token.digest: token for token in tokens}
        except (OSError, ValueError, KeyError, TypeError, msgspec.MsgspecError) as error:
            raise TokenFileError(
                f"The tokens in {self.path} cannot be read: {error}.",
                hint="Restore the file, or remove it and create the tokens again.",
            ) from error
        self._seen = seen


@contextmanager
def _exclusively(path: Path) -> Iterator[None]:
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


class TaskTokens:
    """A worker's token for each task, bound to the task's job. None is kept: they follow from one private key.

    The same task has the same token in every attempt, so that its processes outlive a coordinator; whether the task is
    still one that may act is for the caller to ask.
    """

    def __init__(self, data_dir: Path, *, agree: Callable[[bytes], bytes] | None = None) -> None:
        """`agree`: what several coordinators use together, given what this one would."""
        path = data_dir / "task-tokens.key"
        self._key = _private_key(path)
        if agree is not None and (agreed := agree(self._key)) != self._key:
            write_file(path, agreed, durable=True, mode=0o600)
            self._key = _private_key(path)

    def of(self, task_id: str) -> str:
        return f"{TASK_PREFIX}{task_id}_{self._proof(task_id)}"

    def task_of(self, token: str) -> str | None:
        """The task whose token this is."""
        if not token.startswith(TASK_PREFIX):
            return None
        task_id, _, proof = token.removeprefix(TASK_PREFIX).rpartition("_")
        is_ours = hmac.compare_digest(self._proof(task_id).encode(), proof.encode())
        return task_id if is_ours else None

    def _proof(self, task_id: str) -> str:
        return hmac.new(self._key, task_id.encode(), hashlib.sha256).hexdigest()


def _private_key(path: Path) -> bytes:
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not path.exists():
            write_file(path, secrets.token_bytes(KEY_BYTES), durable=True, mode=0o600)
        key = path.read_bytes()
    except OSError as error:
        raise TokenFileError(
            f"The key of the tasks' tokens in {path} cannot be used: {error.strerror or error}.",
            hint="Is the disk full, or does the data directory belong to another user?",
        ) from error
    if len(key) != KEY_BYTES:
        raise TokenFileError(
            f"{path} holds {len(key)} bytes, not a key of {KEY_BYTES}.",
            hint="Remove it: a new one is made, and tasks that run now can no longer reach the coordinator.",
        )
    return key
