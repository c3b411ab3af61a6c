"""`AsyncCheckpointWriter`: a checkpoint written piece by piece, of any size, to any store.

    with AsyncCheckpointWriter("s3://bucket/run", step=500) as writer:
        for piece in pieces:
            writer.write(piece)
    writer.info.path

Pieces are gathered into buffers and handed to a thread that hashes and uploads them, so `write` waits only when
storage is slower than the caller by two buffers. The checkpoint exists when `close` returns; leaving the block with
an exception, or `abort`, leaves nothing behind. What was written comes back from `CheckpointManager.load` as bytes.
"""

from __future__ import annotations

import asyncio
import os
import queue
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from types import TracebackType
from typing import Self

from strata.checkpoint.catalog.lineage import place_next, read_lineage
from strata.checkpoint.catalog.listing import Catalog, where
from strata.checkpoint.catalog.manifest import BYTES, Json, Manifest, Part, plain_json
from strata.checkpoint.catalog.naming import manifest_key, new_id, payload_key, unique_stem
from strata.checkpoint.catalog.publish import commit
from strata.checkpoint.copying.digest import StreamingDigest
from strata.checkpoint.errors import InvalidSave, ManagerClosed, SaveFailed
from strata.checkpoint.events import CheckpointInfo
from strata.checkpoint.restore import StoreSource
from strata.stores import open_store
from strata.stores.protocol import Buffer, Store

_BUFFERS_UNDER_WAY = 2


class AsyncCheckpointWriter:
    def __init__(
        self,
        path: str | os.PathLike[str] | Store,
        step: int,
        epoch: int = 0,
        metadata: Mapping[str, Json] | None = None,
        *,
        position: Json = None,
        buffer_bytes: int = 16 << 20,
    ) -> None:
        if step < 0 or epoch < 0 or buffer_bytes < 1:
            raise InvalidSave(f"step ({step}), epoch ({epoch}), buffer_bytes ({buffer_bytes}): too small.")
        plain_json(metadata or {}, name="metadata")
        plain_json(position, name="position")
        self._store = open_store(path) if isinstance(path, str | os.PathLike) else path
        self._draft = Manifest(
            checkpoint_id=new_id(step),
            step=step,
            epoch=epoch,
            created_at=time.time(),
            format=BYTES,
            parts=(),
            metadata=dict(metadata or {}),
            data=position,
        )
        self.checkpoint_id = self._draft.checkpoint_id
        self.info: CheckpointInfo | None = None
        self._stem = unique_stem(step, self.checkpoint_id)
        self._key = payload_key(self._stem, BYTES)
        self._digest = StreamingDigest()
        self._buffer = bytearray()
        self._buffer_bytes = buffer_bytes
        self._handed_bytes = 0
        self._blob = self._store.open_write(self._key)
        self._error: Exception | None = None
        self._is_open = True
        self._queue: queue.Queue[bytes | None] = queue.Queue(_BUFFERS_UNDER_WAY)
        self._thread = threading.Thread(target=self._run, name="strata-writer", daemon=True)
        self._thread.start()

    @property
    def bytes_written(self) -> int:
        """Bytes accepted so far; they are durable once `close` has returned."""
        return self._handed_bytes + len(self._buffer)

    def write(self, data: Buffer) -> None:
        """Add bytes. Raises `SaveFailed` as soon as the store has refused some; then no checkpoint is kept."""
        if not self._is_open:
            raise ManagerClosed
        self._check()
        self._buffer += data
        while len(self._buffer) >= self._buffer_bytes:
            self._hand_over(bytes(self._buffer[: self._buffer_bytes]))
            del self._buffer[: self._buffer_bytes]

    def close(self) -> CheckpointInfo:
        """Finish: the payload becomes durable, then the manifest is published."""
        if self.info is not None:
            return self.info
        if not self._is_open:
            raise ManagerClosed
        try:
            if not self.bytes_written:
                raise InvalidSave("There are no bytes to save.")
            if self._buffer:
                self._hand_over(bytes(self._buffer))
            self._stop()
            self._check()
            self.info = self._publish()
        except BaseException:
            self.abort()
            raise
        self._is_open = False
        return self.info

    def abort(self) -> None:
        """Abort: everything written so far is removed."""
        if self._is_open:
            self._is_open = False
            self._error = self._error or InterruptedError("aborted")
            self._stop()
            self._blob.abort()

    async def write_async(self, data: Buffer) -> None:
        await asyncio.to_thread(self.write, data)

    async def close_async(self) -> CheckpointInfo:
        return await asyncio.to_thread(self.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None and self._is_open:
            self.close()
        else:
            self.abort()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.__exit__, kind, error, trace)

    def _hand_over(self, piece: bytes) -> None:
        self._handed_bytes += len(piece)
        self._queue.put(piece)

    def _run(self) -> None:
        while (piece := self._queue.get()) is not None:
            if self._error is not None:
                continue  # Keep the queue moving, so that the caller is not blocked before it learns of the error.
            try:
                self._digest.update(piece)
                self._blob.write(piece)
            except Exception as error:
                self._error = error

    def _stop(self) -> None:
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()

    def _check(self) -> None:
        if self._error is not None:
            raise self._failed(self._error)

    def _publish(self) -> CheckpointInfo:
        def write() -> Manifest:
            self._blob.commit()
            part = Part(key=self._key, size_bytes=self._digest.size_bytes, digest=self._digest.finish())
            lineage = read_lineage([StoreSource(Catalog(self._store))])
            return place_next(lineage, replace(self._draft, parts=(part,)))

        try:
            entry = commit(
                self._store, self.checkpoint_id, write, at=manifest_key(self._stem), payload=(self._key,)
            )
        except Exception as error:
            raise self._failed(error) from error
        return CheckpointInfo.of(entry.manifest, copies=[(self._store.tier, where(self._store, self._key))])

    def _failed(self, error: Exception) -> SaveFailed:
        return SaveFailed.because(
            error,
            tier=self._store.tier,
            path=where(self._store, self._key),
            checkpoint_id=self.checkpoint_id,
            step=self._draft.step,
        )
