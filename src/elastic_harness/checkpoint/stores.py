"""The stores behind the tiers, and what files are called in them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import NoReturn

from elastic_harness.checkpoint.storage_backends import StorageBackend
from strata.checkpoint.catalog.manifest import CheckpointId
from strata.checkpoint.catalog.naming import step_stem
from strata.checkpoint.image.plain import SUFFIX
from strata.stores.protocol import Blob, BlobWriter, Buffer, Store, StoreError

_PREFIX = "checkpoint_step_"
_MOST_REMEMBERED = 1000


def opened(backend: StorageBackend) -> Store:
    """A backend's store. One that cannot be opened, for want of credentials say, fails when it is used: whether that
    matters is for the policy to say."""
    try:
        return backend.store
    except StoreError as error:
        return UnopenedStore(error, url=getattr(backend, "url", ""))


class UnopenedStore:
    """Answers everything with the reason why it could not be opened."""

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


class StepNames:
    """`checkpoint_step_00000500`, and with the checkpoint's id behind it where that name is taken already: a step that
    is trained again after going back. Decided when a save begins, so that its path is known then."""

    def __init__(self) -> None:
        self.store: Store | None = None
        """Where the save that begins next goes, if asking there is quick."""
        self._highest_step: int | None = None
        self._chosen: dict[CheckpointId, str] = {}
        self._lock = threading.Lock()

    def __call__(self, step: int, checkpoint_id: CheckpointId) -> str:
        with self._lock:
            if checkpoint_id not in self._chosen:
                self._chosen[checkpoint_id] = self._choose(step, checkpoint_id)
                if len(self._chosen) > _MOST_REMEMBERED:
                    del self._chosen[next(iter(self._chosen))]
            return self._chosen[checkpoint_id]

    def key_of(self, checkpoint_id: CheckpointId) -> str:
        return self._chosen[checkpoint_id] + SUFFIX

    def _choose(self, step: int, checkpoint_id: CheckpointId) -> str:
        plain = step_stem(step, checkpoint_id)
        if self.store is None:
            return plain
        try:
            if self._highest_step is None:
                self._highest_step = _highest_step(self.store)
            is_new = step > self._highest_step
            self._highest_step = max(step, self._highest_step)
            if is_new or self.store.stat(plain + SUFFIX) is None:
                return plain
        except StoreError:
            return plain  # The save will say what is wrong.
        return f"{plain}-{checkpoint_id}"


def _highest_step(store: Store) -> int:
    numbers = (blob.key.removeprefix(_PREFIX)[:8] for blob in store.list(_PREFIX))
    return max((int(number) for number in numbers if number.isdecimal()), default=-1)
