"""Tokens that the coordinator gave out: kept as digests, with a role, perhaps a job, and a time at which they end.

A token is shown once, when it is created; the file holds its SHA-256 alone, which is enough because a token is 192 random
bits. `tokens.json` in the data directory is private, written atomically under a lock, and read again whenever it changes, so
that `strata token` works beside a running coordinator and without one.

Several coordinators keep them together (`SharedTokens`, in etcd): a token that one creates or revokes exists, or not, before that is
answered, and every other brings its own file up to date a second later (`TokenStore.sync`). The file says which tokens it had in
common with the others when it was last brought up to date: what is in it beyond those was created here meanwhile, and what is
missing was revoked here, by `strata token --data-dir` say. So neither a token nor its end is lost, whichever coordinator was away.

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
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

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
    raise InvalidArgument("role", f"'{text[:40]}' is not a role.", hint=f"Choose from {', '.join(ROLES)}.")


class SharedTokens(Protocol):
    """Where several coordinators keep tokens together. Raises `StrataError` where that cannot be reached."""

    def name(self) -> str:
        """Of this place and no other: not of one that is at the same address later."""
        ...

    def mark(self) -> object:
        """Differs when something has been changed."""
        ...

    def all(self) -> dict[str, bytes]:
        """By digest."""
        ...

    def put(self, digest: str, body: bytes) -> None: ...

    def delete(self, digest: str) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Merged:
    """What is to be done with tokens that are kept here and together with others."""

    publish: frozenset[str]
    withdraw: frozenset[str]
    kept: frozenset[str]
    """Here, when that is done."""


def merge(*, here: AbstractSet[str], in_common: AbstractSet[str], together: AbstractSet[str]) -> Merged:
    """`in_common`: what was both here and there when they were last compared. Pure."""
    created, revoked = here - in_common, in_common - here
    return Merged(
        publish=frozenset(created - together),
        withdraw=frozenset(revoked & together),
        kept=frozenset((together - revoked) | created),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Content:
    """Of the file."""

    tokens: dict[str, Token]
    shared_with: str = ""
    in_common: frozenset[str] = frozenset()

    def in_common_with(self, name: str) -> frozenset[str]:
        return self.in_common if self.shared_with == name else frozenset()


class TokenStore:
    """The file, and what it said last. Raises `TokenFileError` for a file that cannot be used."""

    def __init__(self, data_dir: Path, shared: SharedTokens | None = None) -> None:
        self.path = data_dir / "tokens.json"
        self._shared = shared
        self._seen: tuple[int, int, int] | None = None
        self._synced: tuple[object, object] | None = None
        self._content = _Content(tokens={})

    @property
    def _by_digest(self) -> dict[str, Token]:
        return self._content.tokens

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
            if self._shared is not None:
                self._shared.put(token.digest, msgspec.json.encode(token))
            tokens[token.digest] = token
        return secret, token

    def revoke(self, token_id: str) -> Token:
        with self._changing() as tokens:
            found = next((token for token in tokens.values() if token.id == token_id), None)
            if found is None:
                raise Unknown("token", token_id, hint="`strata token ls` lists the ids.")
            if self._shared is not None:
                self._shared.delete(found.digest)
            del tokens[found.digest]
        return found

    def sync(self) -> None:
        """Bring this file and what is kept together with others up to date. Waits for others; raises what they raise."""
        if self._shared is None:
            return
        mark = self._shared.mark()
        if self._synced is not None and self._synced == (mark, self._stamp()):
            return
        with self._locked():
            before = self._content
            name = self._shared.name()
            found = {digest: _shared_token(digest, body) for digest, body in self._shared.all().items()}
            together = {digest: token for digest, token in found.items() if token is not None}
            merged = merge(
                here=before.tokens.keys(), in_common=before.in_common_with(name), together=together.keys()
            )
            for digest in merged.publish:
                self._shared.put(digest, msgspec.json.encode(before.tokens[digest]))
            for digest in merged.withdraw:
                self._shared.delete(digest)
            tokens = {digest: (together | before.tokens)[digest] for digest in merged.kept}
            after = _Content(tokens=tokens, shared_with=name, in_common=merged.kept)
            if after != before:
                self._write(after)
        self._synced = (mark, self._stamp())

    @contextmanager
    def _changing(self) -> Iterator[dict[str, Token]]:
        with self._locked():
            before = self._content
            now_s = time.time()
            tokens = {
                digest: token
                for digest, token in before.tokens.items()
                if token.expires_at_s is None or token.expires_at_s + EXPIRED_KEPT_S > now_s
            }
            yield tokens
            after = replace(before, tokens=tokens)
            if self._shared is not None:
                name, created = self._shared.name(), tokens.keys() - before.tokens.keys()
                in_common = before.in_common_with(name) | created
                after = _Content(tokens=tokens, shared_with=name, in_common=in_common)
            self._write(after)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """With what the file says now."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with _exclusively(self.path.with_suffix(".lock")):
                self._seen = None
                self._refresh()
                yield
        except OSError as error:
            raise TokenFileError(
                f"The tokens in {self.path} cannot be changed: {error.strerror or error}.",
                hint="Is the disk full, or does the data directory belong to another user?",
            ) from error

    def _write(self, content: _Content) -> None:
        found: dict[str, Any] = {"version": 1, "tokens": [asdict(token) for token in content.tokens.values()]}
        if content.shared_with:
            found |= {"shared_with": content.shared_with, "in_common": sorted(content.in_common)}
        write_file(self.path, json.dumps(found, indent=1), durable=True, mode=0o600)
        self._seen = None

    def _stamp(self) -> tuple[int, int, int] | None:
        try:
            status = os.stat(self.path)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise TokenFileError(f"The tokens in {self.path} cannot be read: {error.strerror}.") from error
        return (status.st_ino, status.st_mtime_ns, status.st_size)

    def _refresh(self) -> None:
        seen = self._stamp()
        if seen is None:
            self._seen, self._content = None, _Content(tokens={})
            return
        if seen == self._seen:
            return
        try:
            found = json.loads(self.path.read_bytes())
            tokens = msgspec.convert(found["tokens"], list[Token])
            self._content = _Content(
                tokens={token.digest: token for token in tokens},
                shared_with=msgspec.convert(found.get("shared_with", ""), str),
                in_common=msgspec.convert(found.get("in_common", ()), frozenset[str]),
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError, msgspec.MsgspecError) as error:
            raise TokenFileError(
                f"The tokens in {self.path} cannot be read: {error}.",
                hint="Restore the file, or remove it and create the tokens again.",
            ) from error
        self._seen = seen


def _shared_token(digest: str, body: bytes) -> Token | None:
    """None for what is no token, or not the one it is kept as: it lets no caller in."""
    try:
        token = msgspec.json.decode(body, type=Token)
    except msgspec.MsgspecError:
        return None
    return token if token.digest == digest else None


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
            hint="Remove it: a new one is created, and tasks that are running can no longer reach the coordinator.",
        )
    return key
