"""Values on their way into an object store, chunk by chunk."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import TracebackType
from typing import Any

from strata.stores.protocol import Buffer, StoreError

Fail = Callable[[Exception], StoreError]


class StreamWriter:
    """Sends parts while later ones are still being written; the object appears on `commit`.

    `file` is an obstore writer. `settle` is called with the error of a commit that failed: it returns if the
    object exists nevertheless, and raises otherwise.
    """

    def __init__(self, file: Any, *, key: str, fail: Fail, settle: Callable[[Exception], None]) -> None:
        self._file = file
        self._key = key
        self._fail = fail
        self._settle = settle

    def write(self, chunk: Buffer) -> None:
        file = self._opened()
        try:
            # A copy: the client sends from the memory it is given, later, and by then its owner may have reused it.
            file.write(chunk if isinstance(chunk, bytes) else bytes(memoryview(chunk).cast("B")))
        except Exception as error:
            self.abort()
            raise self._fail(error) from error

    def commit(self) -> None:
        file = self._opened()
        self._file = None
        try:
            file.close()
        except Exception as error:
            self._settle(error)

    def abort(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(Exception):  # What cannot be reached cannot be tidied up.
                file.__exit__(InterruptedError, InterruptedError("aborted"), None)

    def __enter__(self) -> StreamWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()

    def _opened(self) -> Any:
        if self._file is None:
            raise ValueError(f"the writer of '{self._key}' is closed")
        return self._file


class GatheringWriter:
    """Holds the whole value until `commit`, for writes that must be a single request."""

    def __init__(self, *, key: str, send: Callable[[memoryview], None]) -> None:
        self._key = key
        self._send = send
        self._gathered: bytearray | None = bytearray()

    def write(self, chunk: Buffer) -> None:
        self._opened().extend(memoryview(chunk).cast("B"))

    def commit(self) -> None:
        gathered = self._opened()
        self.abort()
        self._send(memoryview(gathered))

    def abort(self) -> None:
        self._gathered = None

    def __enter__(self) -> GatheringWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()

    def _opened(self) -> bytearray:
        if self._gathered is None:
            raise ValueError(f"the writer of '{self._key}' is closed")
        return self._gathered
