"""The one thing a rendezvous server must offer, and a PyTorch key-value store made of it.

`CasClient` is compare-and-swap on named values. `CasStore` is what torchrun's agents use next to the rendezvous
itself, to agree on ranks and addresses and to leave together. Its keys live under the incarnation of the
rendezvous, so what an earlier run left behind is never read. Waiting polls, soon only four to eight times a second; a
server that is away is waited for until the store's time-out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Protocol, TypeVar

from torch.distributed import DistStoreError

from strata.backoff import Backoff
from strata.torch_compat.stores import Store

T = TypeVar("T")
Token = str

FIRST_POLL_S, SLOWEST_POLL_S = 0.01, 0.25


class CasClient(Protocol):
    """Named values that change only by compare-and-swap. Raises `ConnectionError` when the server does not answer
    within the client's own deadline; the outcome of that call is then unknown."""

    def get(self, key: str) -> tuple[bytes, Token] | None:
        """The value and its token, or None where there is none."""
        ...

    def cas(
        self, key: str, value: bytes, expected_token: Token | None, *, soft: bool = False
    ) -> tuple[bool, bytes | None, Token | None]:
        """Write if the key still has `expected_token` (None: is still absent). Returns whether it was written, and
        the value and token that are stored now. A `soft` value need not survive a restart of the server, which may
        then show the one before it, under a token that no client has seen."""
        ...


class CasValue:
    """One value of a `CasClient`, under a key that follows the rendezvous."""

    def __init__(self, client: CasClient, key: Callable[[], str]) -> None:
        self._client = client
        self._key = key

    def get(self) -> tuple[bytes, Token] | None:
        return self._client.get(self._key())

    def swap(self, value: bytes, token: Token | None) -> bool:
        return self._client.cas(self._key(), value, token)[0]


class CasStore(Store):
    """A c10d store on top of a `CasClient`. `root` is asked for at each call: it follows the rendezvous."""

    timeout: timedelta
    while_waiting: Callable[[], None] = staticmethod(lambda: None)
    """Called repeatedly while a key is waited for; what it raises ends the wait."""

    def __init__(self, client: CasClient, root: Callable[[], str]) -> None:
        super().__init__()
        self._client = client
        self._root = root

    def set(self, key: str, value: str | bytes) -> None:
        self._change(key, lambda _: _as_bytes(value))

    def add(self, key: str, amount: int) -> int:
        """Add to a decimal counter. If the server fails during the call the amount may count twice."""
        return int(self._change(key, lambda old: str(int(old or b"0") + amount).encode()))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """c10d's meaning: an absent key is set when `expected` is empty; the value that now stands is returned."""

        def swap(old: bytes | None) -> bytes | None:
            return _as_bytes(desired) if (old or b"") == _as_bytes(expected) else None

        return self._change(key, swap, unchanged=_as_bytes(expected))

    def get(self, key: str) -> bytes:
        for _ in self._until(self.timeout, f"the key '{key}'"):
            if (found := self._read(key)) is not None:
                return found[0]
            self.while_waiting()
        raise AssertionError("unreachable: the wait ends with an error")

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        missing = list(keys)
        for _ in self._until(timeout or self.timeout, f"the keys {missing}"):
            missing = [key for key in missing if self._read(key) is None]
            if not missing:
                return
            self.while_waiting()

    def check(self, keys: list[str]) -> bool:
        return all(self._read(key) is not None for key in keys)

    def _read(self, key: str) -> tuple[bytes, Token] | None:
        return self._patiently(lambda: self._client.get(f"{self._root()}/{key}"))

    def _change(
        self, key: str, change: Callable[[bytes | None], bytes | None], *, unchanged: bytes = b""
    ) -> bytes:
        """Apply `change` to the value until no other writer comes between; None leaves it as it is."""
        path = f"{self._root()}/{key}"
        found = self._read(key)
        for _ in self._until(self.timeout, f"a turn to write '{key}'"):
            old, token = found if found is not None else (None, None)
            new = change(old)
            if new is None:
                return unchanged if old is None else old
            written, value, seen = self._patiently(lambda: self._client.cas(path, new, token))  # noqa: B023
            if written:
                return new
            found = (value, seen) if value is not None and seen is not None else None
        raise AssertionError("unreachable: the wait ends with an error")

    def _patiently(self, call: Callable[[], T]) -> T:
        """Repeat a call while the server is away."""
        for _ in self._until(self.timeout, "the rendezvous server"):
            try:
                return call()
            except ConnectionError:
                continue
        raise AssertionError("unreachable: the wait ends with an error")

    @staticmethod
    def _until(timeout: timedelta, what: str) -> Iterator[None]:
        """Yield at growing intervals until the time is over, then raise what torch's callers expect."""
        deadline_s = time.monotonic() + timeout.total_seconds()
        backoff = Backoff(first_s=FIRST_POLL_S, longest_s=SLOWEST_POLL_S)
        yield
        while (left_s := deadline_s - time.monotonic()) > 0:
            time.sleep(min(backoff.pause_s() or 0.0, left_s))  # The last attempt is at the very end.
            yield
        raise DistStoreError(f"Timed out after {timeout.total_seconds():g} s waiting for {what}")


def _as_bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
