"""What moves through the pipeline besides images: bytes given by the caller, and copies that are on a local disk."""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from strata.checkpoint.digest import Digest, digest_of
from strata.checkpoint.manifest import Manifest, TensorEntry


class BytesPayload:
    """Immutable bytes: they are stored as they are, from where they are."""

    def __init__(self, data: bytes, on_release: Callable[[], None]) -> None:
        self._data = data
        self._on_release = on_release

    @property
    def view(self) -> memoryview:
        return memoryview(self._data)

    @property
    def tensors(self) -> tuple[TensorEntry, ...]:
        return ()

    def wait(self, upto_bytes: int | None = None) -> None:
        """They are all there."""

    def digest(self) -> Digest:
        return digest_of(self.view)

    def keep(self, manifest: Manifest) -> str | None:
        return None

    def release(self) -> None:
        self._data = b""
        self._on_release()


class FilePayload:
    """A copy that has arrived on a local disk, on its way to the next tier: the image is free for the next save."""

    def __init__(self, path: str, tensors: tuple[TensorEntry, ...]) -> None:
        with open(path, "rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.tensors = tensors

    @property
    def view(self) -> memoryview:
        return memoryview(self._map)

    def wait(self, upto_bytes: int | None = None) -> None:
        """It is all there."""

    def digest(self) -> Digest:
        return digest_of(self.view)

    def keep(self, manifest: Manifest) -> str | None:
        return None

    def release(self) -> None:
        with suppress(BufferError):  # A view that an error still holds; the mapping goes with it.
            self._map.close()


class ByteBudget:
    """Room for bytes under way. One payload larger than the whole budget may pass alone."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._used_bytes = 0
        self._changed = threading.Condition()

    def take(self, size_bytes: int, *, timeout_s: float | None) -> bool:
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        with self._changed:
            while self._used_bytes and self._used_bytes + size_bytes > self.limit_bytes:
                remaining_s = None if deadline_s is None else deadline_s - time.monotonic()
                if remaining_s is not None and remaining_s <= 0:
                    return False
                self._changed.wait(remaining_s)
            self._used_bytes += size_bytes
            return True

    def give_back(self, size_bytes: int) -> None:
        with self._changed:
            self._used_bytes -= size_bytes
            self._changed.notify_all()
