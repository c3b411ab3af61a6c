"""How the parts of many ranks become one checkpoint in a store.

Every rank writes its part and reports it (`Board`); the first rank waits for all reports, puts the manifest, and reports
the outcome, which the others wait for: a save has ended alike on every rank. A rank that cannot write its part reports that,
and the save fails everywhere with its reason. Nothing here is a collective, so training continues meanwhile, and a rank that
dies keeps no other waiting for longer than its processes live.
"""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Any, Protocol

import torch

from strata.checkpoint.catalog.listing import Catalog, Entry
from strata.checkpoint.catalog.manifest import SHARDED, CheckpointId, Manifest, TensorEntry
from strata.checkpoint.catalog.publish import Admit, commit
from strata.checkpoint.copying.digest import Digest
from strata.checkpoint.errors import PeerFailed
from strata.checkpoint.image.nested import PLAIN, mapped
from strata.checkpoint.sharded.listing import key_of
from strata.checkpoint.sharded.parts import (
    PartWriter,
    Span,
    WrittenPart,
    check_parts,
    clean_up_own_parts,
    forget,
)
from strata.checkpoint.sharded.plan import ShardPlan, aligned, flattened
from strata.stores.protocol import Store
from strata.torch_compat.dtensors import group_store

WAIT = timedelta(days=7)


class Board(Protocol):
    """Small messages between the ranks of one generation, each under a key of its own."""

    def post(self, key: str, message: bytes) -> None: ...

    def read(self, key: str) -> bytes:
        """Wait for a message, and leave it to others."""
        ...

    def remove(self, key: str) -> None: ...

    def replace_last(self, kind: str, key: str) -> None:
        """Remove the message that was the last of its kind so far."""
        ...


class GroupBoard:
    """In the store of the default process group. A thread that waits has a connection of its own, and does no harm if it waits
    for ever: a rank that will not answer has died, and then this process ends too."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._connections = threading.local()
        self._last: dict[str, str] = {}

    @property
    def _store(self) -> Any:
        if not hasattr(self._connections, "store"):
            self._connections.store = group_store(f"strata/{self._name}")
        return self._connections.store

    def post(self, key: str, message: bytes) -> None:
        self._store.set(key, message)

    def read(self, key: str) -> bytes:
        self._store.wait([key], WAIT)
        return bytes(self._store.get(key))

    def remove(self, key: str) -> None:
        self._store.delete_key(key)

    def replace_last(self, kind: str, key: str) -> None:
        if (before := self._last.get(kind)) is not None:
            self.remove(before)
        self._last[kind] = key


class OwnBoard:
    """For a rank that is alone."""

    def __init__(self) -> None:
        self._messages: dict[str, bytes] = {}

    def post(self, key: str, message: bytes) -> None:
        self._messages[key] = message

    def read(self, key: str) -> bytes:
        return self._messages[key]

    def remove(self, key: str) -> None:
        self._messages.pop(key, None)

    def replace_last(self, kind: str, key: str) -> None:
        self.remove(key)


class Image(Protocol):
    """The filled image of a rank."""

    @property
    def view(self) -> memoryview: ...

    @property
    def tensors(self) -> tuple[TensorEntry, ...]: ...

    def wait(self, upto_bytes: int | None = None) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Report:
    """What a rank has written, or why it has not."""

    part: WrittenPart | None = None
    objects: Mapping[str, tuple[int, int]] | None = None
    """Where in the part each object is."""
    error: str = ""

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, message: bytes) -> _Report:
        found = json.loads(message)
        part = found["part"]
        if part is not None:
            digest = part["digest"]
            part = WrittenPart(
                key=part["key"],
                size_bytes=part["size_bytes"],
                digest=Digest(**{**digest, "chunks": tuple(digest["chunks"])}),
            )
        objects = {name: (start, size) for name, (start, size) in (found["objects"] or {}).items()}
        return cls(part=part, objects=objects, error=found["error"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Shards:
    """What one rank saves of a sharded state, and what the others do."""

    plan: ShardPlan
    state: Mapping[str, Any]
    """With what this rank holds in the place of distributed tensors."""


class ShardPublisher:
    """One sharded save on its way into the stores, as one rank sees it."""

    def __init__(
        self, checkpoint_id: CheckpointId, shards: Shards, stores: Sequence[Store], board: Board
    ) -> None:
        """`stores` are those that every rank writes it to."""
        plan, state = shards.plan, shards.state
        self._id = checkpoint_id
        self._open = {store.url for store in stores}
        """Where others may still wait for this rank."""
        self._plan = plan
        self._board = board
        self._objects = {
            ".".join(map(str, path)): _settled(value)
            for path, value in flattened(state)
            if not isinstance(value, torch.Tensor) and stores
        }
        self._written: dict[str, _Report] = {}
        """By the store's URL: what an earlier attempt has achieved."""

    @property
    def is_first(self) -> bool:
        """Whether this rank puts the manifest."""
        return self._plan.rank == 0

    def publish(
        self,
        store: Store,
        draft: Manifest,
        payload: Image,
        *,
        is_part: bool,
        check: Callable[[], None],
        again: bool,
        admit: Admit | None,
    ) -> Entry:
        """Write this rank's part, and return when the checkpoint exists. The payload is its image, or its part as it was written
        to a store before. `check` raises when it is no longer wanted. Raises `PeerFailed` where another rank has failed, and the
        store's errors."""
        if store.url not in self._written:
            clean_up_own_parts(Catalog(store))
            self.write(store, draft, payload, is_part=is_part)
        report = self._written[store.url]
        assert report.part is not None
        if self.is_first:
            entry = self._complete(store, draft, check, again, admit)
            self._tell(store.url, "")
            self._open.discard(store.url)
        else:
            outcome = json.loads(self._board.read(self._key(store.url, "outcome")))
            check()
            if error := outcome.get("error"):
                raise PeerFailed(str(error))
            entry = Entry(key=key_of(draft), manifest=replace(draft, parts=(report.part.part,)))
        forget(store, [report.part.key])
        return entry

    def write(self, store: Store, draft: Manifest, payload: Image, *, is_part: bool = False) -> None:
        """Write this rank's part and report it: the first half of `publish`, for those who write the parts of several ranks."""
        report = self._copy(store, draft, payload) if is_part else self._write(store, draft, payload)
        self._written[store.url] = report
        self._board.post(self._key(store.url, self._plan.rank), report.encode())

    def digest(self, store: Store) -> Digest:
        """Of what this rank has written to a store."""
        part = self._written[store.url].part
        assert part is not None
        return part.digest

    def fail(self, store: Store, reason: str) -> None:
        """This rank will not write to a store, or not put the manifest there: tell those who wait for it, before it turns to another
        store and waits for them."""
        self._fail(store.url, reason)

    def end(self, reason: str) -> None:
        """This rank's part in the save is over."""
        for url in list(self._open):
            self._fail(url, reason)

    def _fail(self, url: str, reason: str) -> None:
        if url not in self._open:
            return
        self._open.discard(url)
        if self.is_first:
            self._tell(url, reason)
        elif url not in self._written:
            self._board.post(self._key(url, self._plan.rank), _Report(error=reason).encode())

    def _tell(self, url: str, error: str) -> None:
        """The outcome, for all. That of the save before has been read by now: a save begins when the ones before it to the same
        stores have ended on every rank."""
        self._board.post(self._key(url, "outcome"), json.dumps({"error": error}).encode())
        self._board.replace_last(url, self._key(url, "outcome"))

    def _key(self, url: str, what: int | str) -> str:
        return f"{self._id}/{url}/{what}"

    def _write(self, store: Store, draft: Manifest, image: Image) -> _Report:
        chunks = self._plan.written_by(self._plan.rank)
        writer = PartWriter(store, draft.step, size_hint_bytes=sum(aligned(chunk.nbytes) for chunk in chunks))
        entries = {entry.name: entry for entry in image.tensors}
        objects: dict[str, tuple[int, int]] = {}
        try:
            for chunk in chunks:
                if chunk.dtype:
                    entry = entries[chunk.name]
                    end_bytes = entry.offset_bytes + entry.size_bytes
                    image.wait(end_bytes)
                    writer.add(image.view[entry.offset_bytes : end_bytes])
                else:
                    objects[chunk.name] = writer.add(_pickled(self._objects[chunk.name]))
            part = writer.finish()
        except BaseException:
            writer.abort()
            raise
        return _Report(part=part, objects=objects)

    def _copy(self, store: Store, draft: Manifest, part: Image) -> _Report:
        before = next(iter(self._written.values()))
        assert before.part is not None
        writer = PartWriter(store, draft.step, size_hint_bytes=before.part.size_bytes)
        try:
            writer.add(part.view)
            return _Report(part=writer.finish(), objects=before.objects)
        except BaseException:
            writer.abort()
            raise

    def _complete(
        self,
        store: Store,
        draft: Manifest,
        check: Callable[[], None],
        again: bool,
        admit: Admit | None,
    ) -> Entry:
        reports: dict[int, _Report] = {}
        for rank in range(len(self._plan.tables)):
            key = self._key(store.url, rank)
            reports[rank] = _Report.decode(self._board.read(key))
            check()
            if error := reports[rank].error:
                raise PeerFailed(f"Rank {rank} could not write its part: {error}")
        parts = [report.part for report in reports.values() if report.part is not None]
        spans = {
            name: Span(part=number, offset_bytes=start, size_bytes=size)
            for number, report in enumerate(reports.values())
            for name, (start, size) in (report.objects or {}).items()
        }
        manifest = replace(
            draft,
            format=SHARDED,
            tensors=(),
            parts=tuple(part.part for part in parts),
            layout=self._plan.layout({rank: rank for rank in reports}, spans),
            world_size=len(reports),
        )

        def complete() -> Manifest:
            check_parts(store, manifest.parts)
            return manifest

        entry = commit(store, draft.checkpoint_id, complete, at=key_of(draft), again=again, admit=admit)
        for rank in reports:
            self._board.remove(self._key(store.url, rank))
        return entry


def _settled(value: Any) -> Any:
    """An object that stays as it is while training continues."""

    def copied(_: Any, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return leaf.detach().clone()
        return leaf if type(leaf) in PLAIN else deepcopy(leaf)

    return mapped(value, copied, leaf=torch.Tensor)


def _pickled(value: Any) -> memoryview:
    made = io.BytesIO()
    torch.save(value, made)
    return memoryview(made.getbuffer())
