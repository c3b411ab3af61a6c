"""Tokens of several coordinators, in the etcd of their journal: one key for each digest, which is not enough to use it.

Beside the journal, not in it: a standby changes them too, and a reader of old journals finds none. Raises `TokensUnreachable` where
etcd does not answer; then nothing is known to have changed.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import TypeVar

from strata.coordinator.engine import Unavailable
from strata.coordinator.journal.etcd import EtcdLocation, EtcdLog
from strata.etcd import FAILURES

FOLDER = "tokens"
NAME_KEY = "keys/tokens"
TIMEOUT_S = 2.0

T = TypeVar("T")


class TokensUnreachable(Unavailable):
    """Tokens are kept with other coordinators, and the place cannot be reached."""


class EtcdTokens:
    """See `SharedTokens`."""

    def __init__(self, location: EtcdLocation) -> None:
        self._log = EtcdLog(location, timeout_s=TIMEOUT_S)
        self._name = ""

    def name(self) -> str:
        if not self._name:
            proposed = secrets.token_hex(8).encode()
            self._name = self._ask(lambda: self._log.agree(NAME_KEY, proposed)).decode()
        return self._name

    def mark(self) -> object:
        return self._ask(lambda: self._log.mark_of(FOLDER))

    def all(self) -> dict[str, bytes]:
        return dict(self._ask(lambda: self._log.under(FOLDER)))

    def put(self, digest: str, body: bytes) -> None:
        self._ask(lambda: self._log.keep(f"{FOLDER}/{digest}", body))

    def delete(self, digest: str) -> None:
        self._ask(lambda: self._log.forget(f"{FOLDER}/{digest}"))

    def close(self) -> None:
        self._log.close()

    def _ask(self, request: Callable[[], T]) -> T:
        try:
            return request()
        except FAILURES as error:
            raise TokensUnreachable(
                f"Tokens are kept in etcd at {self._log.location.address}, which does not answer: {error}",
                hint="Retry when etcd has a majority; until then, the tokens known here stay valid.",
            ) from error
