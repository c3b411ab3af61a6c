"""A store that fails when it is used, not when it is opened: whether that matters is for its user's policy to say."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NoReturn

from strata.stores.protocol import Blob, BlobWriter, Buffer, Store, StoreError


def open_deferred(open_place: Callable[[], Store], *, url: str) -> Store:
    """What `open_place` opens; where that fails, for want of credentials say, a store that answers everything with the
    reason."""
    try:
        return open_place()
    except StoreError as error:
        return UnopenedStore(error, url=url)


class UnopenedStore:
    def __init__(self, error: StoreError, *, url: str) -> None:
        self._error = error
        self.tier = error.tier
        self.url = url

    def _refuse(self) -> NoReturn:
        raise self._error

    def put(self, key: str, data: Buffer, *, if_absent: bool = False) -> None:
        self._refuse()

    def open_write(
        self, key: str, *, size_hint_bytes: int | None = None, if_absent: bool = False
    ) -> BlobWriter:
        self._refuse()

    def read(self, key: str, *, offset: int = 0, length: int | None = None) -> bytes:
        self._refuse()

    def read_into(self, key: str, buffer: memoryview, *, offset: int = 0) -> None:
        self._refuse()

    def stat(self, key: str) -> Blob | None:
        self._refuse()

    def list(self, prefix: str = "") -> Iterator[Blob]:
        self._refuse()

    def delete(self, key: str) -> None:
        self._refuse()

    def free_bytes(self) -> int | None:
        return None
