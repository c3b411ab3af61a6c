"""The shell around `strata.core.jobs.finishing`: the agent of a machine uploads what its dead workers have left in memory.

Beside each image of a job lies a small private record (`UploadRecord`): whose workers made it, and where it belongs. With the mark of
the image, which is its manifest, that is all an upload needs. The agent reads both and takes nothing over: workers that come back find
their images as they left them.

What is published is the workers' checkpoint, by the one way there is (`strata.checkpoint.catalog.publish`), under a name that tells
that the agent wrote it: others do not take its payload for that of a dead writer. Before the manifest is put, the bytes have been
compared with the digests that were made when they were saved, the mark is still there, so no save has written over them, and the
destination has been asked again whether a newer generation has started.

Where the state is sharded, agents leave small messages for each other at the destination, below `run/finishing/`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from strata.checkpoint.catalog.listing import Catalog, Entry
from strata.checkpoint.catalog.manifest import CheckpointId, Manifest, TensorEntry
from strata.checkpoint.catalog.naming import manifest_key, new_id
from strata.checkpoint.catalog.publish import publish
from strata.checkpoint.catalog.runs import claimed_generations, read_record
from strata.checkpoint.copying.digest import Digest, digest_of, helping_threads
from strata.checkpoint.copying.staging import Fence, Snapshot, left_images, read_snapshot
from strata.checkpoint.errors import Damaged, PeerFailed, Superseded
from strata.checkpoint.pipeline import FilePayload
from strata.checkpoint.sharded.images import describe_image, nested_state
from strata.checkpoint.sharded.listing import key_of
from strata.checkpoint.sharded.plan import Chunk, Marked, ShardPlan
from strata.checkpoint.sharded.publishing import ShardPublisher, Shards
from strata.core.jobs.finishing import (
    PATIENCE_S,
    Ended,
    Finishing,
    Left,
    Look,
    Meet,
    Outcome,
    Seen,
    Wait,
    Write,
)
from strata.errors import StrataError
from strata.processes import this_process
from strata.stores import open_store
from strata.stores.protocol import AlreadyExists, NotFound, Store, StoreError

log = logging.getLogger("strata.checkpoint")

SCHEMA = 1
MESSAGES = "run/finishing/"
_POLL_S = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadRecord:
    """What lies beside an image for the agent of its machine."""

    agent: str
    """The path of the agent's socket: no other agent has it."""
    job: str
    worker: str
    run: str
    destinations: tuple[str, ...]
    """Their URLs, near to far. Credentials are in the environment, or nowhere."""

    def encode(self) -> bytes:
        body = {
            "schema": SCHEMA,
            "agent": self.agent,
            "job": self.job,
            "worker": self.worker,
            "run": self.run,
            "destinations": self.destinations,
        }
        return (json.dumps(body, sort_keys=True) + "\n").encode()

    @classmethod
    def decode(cls, raw: bytes) -> UploadRecord | None:
        """None for what another version has written, and for what is no record."""
        try:
            body = json.loads(raw)
            if body["schema"] != SCHEMA:
                return None
            return cls(
                agent=str(body["agent"]),
                job=str(body["job"]),
                worker=str(body["worker"]),
                run=str(body["run"]),
                destinations=tuple(map(str, body["destinations"])),
            )
        except (ValueError, KeyError, TypeError):
            return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """An image that a dead worker has left."""

    job_folder: Path
    snapshot: Snapshot
    record: UploadRecord

    @property
    def manifest(self) -> Manifest:
        return self.snapshot.manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """What became of the newest snapshot of one run."""

    record: UploadRecord
    outcomes: tuple[Outcome, ...]
    entries: Mapping[str, tuple[Store, Entry]]
    """What was published, by destination."""

    @property
    def saved(self) -> tuple[Outcome, ...]:
        return tuple(outcome for outcome in self.outcomes if outcome.result == "saved")


class _GivenUp(Exception):
    """Workers are back, or the upload is not waited for any longer."""


class _Known(Exception):
    """Another process has published it meanwhile, or is about to."""


def images_of(agent: str, *, root: Path | None = None) -> list[Image]:
    """What the workers of an agent have left, newest first."""
    found = []
    for folder, snapshot, raw in left_images(root=root):
        record = UploadRecord.decode(raw)
        if record is not None and record.agent == agent and record.run == snapshot.manifest.run:
            found.append(Image(job_folder=folder, snapshot=snapshot, record=record))
    return sorted(found, key=lambda image: image.manifest.order, reverse=True)


def _has_payload(store: Store, manifest: Manifest) -> bool:
    """Somebody may have deleted it, or cut it short, and left the manifest: what is in memory is worth more than that."""
    found = (store.stat(part.key) for part in manifest.parts)
    return all(
        blob is not None and blob.size_bytes == part.size_bytes
        for blob, part in zip(found, manifest.parts, strict=True)
    )


class Finisher:
    """Finishes the work of one agent's workers, once. `run` may be given up from another thread."""

    def __init__(self, agent: str, *, patience_s: float = PATIENCE_S, root: Path | None = None) -> None:
        self._agent = agent
        self._patience_s = patience_s
        self._root = root
        self._given_up = threading.Event()
        self._reason = ""

    def give_up(self, reason: str) -> None:
        """From now on nothing is published."""
        self._reason = self._reason or reason
        self._given_up.set()

    def run(self) -> list[Finished]:
        """Return when every destination has an outcome."""
        by_run: dict[str, list[Image]] = {}
        for image in images_of(self._agent, root=self._root):
            by_run.setdefault(image.record.run, []).append(image)
        return [_Run(images, self._patience_s, self).finish() for images in by_run.values()]

    def check(self) -> None:
        if self._given_up.is_set():
            raise _GivenUp(self._reason)

    def sleep(self, seconds: float) -> None:
        self._given_up.wait(seconds)


class _Run:
    """One run that workers of this machine took part in."""

    def __init__(self, images: Sequence[Image], patience_s: float, finisher: Finisher) -> None:
        self._images = images
        self._finisher = finisher
        self._until_s = time.monotonic() + patience_s
        self._yields_until_s = time.monotonic() + patience_s / 2
        """So long others that have the same state are left to save it, if they were first."""
        self._record = images[0].record
        self._stores: dict[str, Store] = {}
        self._entries: dict[str, tuple[Store, Entry]] = {}
        self._tables: dict[str, dict[int, dict[CheckpointId, tuple[Chunk, ...]]]] = {}
        """Of a sharded state, by destination: what each rank holds in each of its snapshots."""
        self._machine = Finishing(_left(images), now_s=time.monotonic(), patience_s=patience_s)

    def finish(self) -> Finished:
        while True:
            try:
                self._finisher.check()
            except _GivenUp as given_up:
                self._machine.give_up(str(given_up))
            instruction = self._machine.decide(time.monotonic())
            if isinstance(instruction, Ended):
                return Finished(record=self._record, outcomes=instruction.outcomes, entries=self._entries)
            if isinstance(instruction, Wait):
                self._finisher.sleep(max(0.0, instruction.until_s - time.monotonic()))
            else:
                self._carry_out(instruction)

    def _carry_out(self, instruction: Look | Meet | Write) -> None:
        name = instruction.destination
        try:
            if isinstance(instruction, Look):
                self._look(name)
            elif isinstance(instruction, Meet):
                held = self._meet(name, instruction.generation)
                self._machine.met(name, held, now_s=time.monotonic())
            else:
                entry = self._write(name, instruction.snapshot)
                self._entries[name] = (self._store(name), entry)
                self._machine.wrote(name, instruction.snapshot)
        except _GivenUp as given_up:
            self._machine.give_up(str(given_up))
        except _Known as known:
            self._machine.away(name, str(known), now_s=time.monotonic())
        except Superseded as error:
            self._machine.refused(name, error.message)
        except Damaged as error:
            assert isinstance(instruction, Write)
            self._machine.damaged(instruction.snapshot.checkpoint_id, error.message)
        except (StrataError, OSError, ValueError, LookupError) as error:
            reason = getattr(error, "message", str(error))
            self._machine.away(name, str(reason), now_s=time.monotonic())

    def _store(self, url: str) -> Store:
        if url not in self._stores:
            self._stores[url] = open_store(url)
        return self._stores[url]

    def _look(self, url: str) -> None:
        store = self._store(url)
        record = read_record(store)
        own = [e.manifest for e in Catalog(store).list().entries if e.manifest.run == self._record.run]
        own.sort(key=lambda manifest: manifest.order, reverse=True)
        newest = next((manifest for manifest in own if _has_payload(store, manifest)), None)
        self._machine.saw(
            url,
            Seen(
                run=record.run if record is not None else "",
                claimed=max(claimed_generations(store), default=0),
                newest=(newest.generation, newest.sequence) if newest is not None else None,
                newest_step=newest.step if newest is not None else None,
            ),
        )

    def _admit(self, snapshot: Left, own_key: str) -> Callable[[Store], None]:
        """Whether it may still be published: asked before the manifest is put, and after it."""

        def admit(store: Store) -> None:
            self._finisher.check()
            claimed = max(claimed_generations(store), default=0)
            there = [
                entry.key
                for entry in Catalog(store).list().entries
                if entry.manifest.checkpoint_id == snapshot.checkpoint_id
                and _has_payload(store, entry.manifest)
            ]
            refusal = self._machine.admit(
                snapshot, claimed=claimed, is_there=any(key != own_key for key in there)
            )
            if refusal == "superseded":
                raise Superseded(where=store.url, generation=snapshot.generation, newest=claimed)
            if refusal is not None:
                raise _Known("another machine has saved it") if refusal == "known" else _GivenUp(refusal)

        return admit

    def _write(self, url: str, snapshot: Left) -> Entry:
        images = [i for i in self._images if i.manifest.checkpoint_id == snapshot.checkpoint_id]
        if snapshot.is_sharded:
            return self._write_parts(self._store(url), images, snapshot)
        return self._write_image(self._store(url), images[0], snapshot)

    # --- a complete state ---------------------------------------------------------------------------------------

    def _write_image(self, store: Store, image: Image, snapshot: Left) -> Entry:
        manifest, part = image.manifest, image.manifest.parts[0]
        board = _StoreBoard(store, manifest.generation, self._finisher, self._until_s)
        if not board.claim(manifest.checkpoint_id) and time.monotonic() < self._yields_until_s:
            raise _Known("another machine uploads it")
        stem = part.key.rpartition(".")[0]
        mine = f"{new_id(manifest.step)}-of-{manifest.checkpoint_id}"
        known = manifest.checkpoint_id in stem
        name = stem.replace(manifest.checkpoint_id, mine) if known else f"{stem}-{mine}"
        with _mapped(image, self._finisher) as payload:

            def digest() -> Digest:
                self._verify(image, payload.view)
                return part.digest

            draft = replace(manifest, parts=())
            admit = self._admit(snapshot, manifest_key(name))
            entry = publish(store, draft, payload, digest, name=name, admit=admit)
        board.clear()
        return entry

    def _verify(self, image: Image, view: memoryview) -> None:
        """What was read is what was saved, and nothing has started to overwrite it. Raises `Damaged`, and `_GivenUp` where the image is
        in use again."""
        digest = image.manifest.parts[0].digest
        with helping_threads() as pool:
            found = digest_of(view, chunk_bytes=digest.chunk_bytes, algorithm=digest.algorithm, pool=pool)
        self._check_unused(image)
        if found != digest:
            raise Damaged(path=str(image.snapshot.path), reason="bytes changed since they were saved")

    def _check_unused(self, image: Image) -> None:
        self._finisher.check()
        now = read_snapshot(image.snapshot.path.parent)
        generation = image.manifest.generation
        if Fence(image.job_folder).newest() > generation or now is None:
            raise _GivenUp("workers use the image again")
        if now.manifest.checkpoint_id != image.manifest.checkpoint_id:
            raise _GivenUp("workers use the image again")

    # --- a sharded state ----------------------------------------------------------------------------------------

    def _meet(self, url: str, generation: int) -> dict[int, list[CheckpointId]]:
        """Report what the ranks of this machine have; what all that have reported have."""
        store = self._store(url)
        board = _StoreBoard(store, generation, self._finisher, self._until_s)
        mine: dict[int, dict[str, Any]] = {}
        for image in self._images:
            if (
                image.manifest.generation == generation
                and (marked := Marked.of(image.manifest.layout)) is not None
            ):
                mine.setdefault(marked.rank, {})[image.manifest.checkpoint_id] = image.manifest.layout
        known = self._tables.setdefault(url, {})
        for rank, held in mine.items():
            if rank not in known:
                board.post(f"held/{rank}", json.dumps(held).encode())
        for rank in range(self._images[0].manifest.world_size):
            if rank not in known and (message := board.peek(f"held/{rank}")) is not None:
                known[rank] = {
                    CheckpointId(name): marked.chunks
                    for name, layout in json.loads(message).items()
                    if (marked := Marked.of(layout)) is not None
                }
        return {rank: list(held) for rank, held in known.items()}

    def _write_parts(self, store: Store, images: Sequence[Image], snapshot: Left) -> Entry:
        manifest = images[0].manifest
        wanted, world = manifest.checkpoint_id, range(manifest.world_size)
        tables = tuple(self._tables[store.url][rank][wanted] for rank in world)
        board = _StoreBoard(store, manifest.generation, self._finisher, self._until_s)
        first: tuple[ShardPublisher, Image] | None = None
        for image in images:
            marked = Marked.of(image.manifest.layout)
            assert marked is not None
            found = describe_image(
                str(image.snapshot.path), image.manifest, name="", rank=marked.rank, machine=""
            )
            shards = Shards(plan=ShardPlan(tables, rank=marked.rank), state=nested_state(found.objects))
            publisher = ShardPublisher(wanted, shards, [store], board)
            with _mapped(image, self._finisher) as payload:
                self._verify(image, payload.view)
                publisher.write(store, image.manifest, payload)
                self._check_unused(image)
            if publisher.is_first:
                first = (publisher, image)
        if first is None:
            board.wait_for_outcome(wanted, store)
            entries = Catalog(store).list().entries
            return next(entry for entry in entries if entry.manifest.checkpoint_id == wanted)
        publisher, image = first
        with _mapped(image, self._finisher) as payload:
            entry = publisher.publish(
                store,
                image.manifest,
                payload,
                is_part=False,
                check=self._finisher.check,
                again=False,
                admit=self._admit(snapshot, key_of(image.manifest)),
            )
        board.clear()
        return entry


class _StoreBoard:
    """Messages between agents that know nothing of each other but a destination and a generation."""

    def __init__(self, store: Store, generation: int, finisher: Finisher, until_s: float) -> None:
        self._store = store
        self._folder = f"{MESSAGES}{generation:08d}/"
        self._finisher = finisher
        self._until_s = until_s

    def _at(self, key: str) -> str:
        return f"{self._folder}{hashlib.sha256(key.encode()).hexdigest()[:32]}"

    def claim(self, checkpoint_id: CheckpointId) -> bool:
        """Whether this process is the first that wants to save a checkpoint."""
        mine, key = this_process().token.encode(), f"writer/{checkpoint_id}"
        try:
            self._store.put(self._at(key), mine, if_absent=True)
        except AlreadyExists:
            return self.peek(key) == mine
        return True

    def post(self, key: str, message: bytes) -> None:
        self._store.put(self._at(key), message)

    def peek(self, key: str) -> bytes | None:
        with contextlib.suppress(NotFound):
            return self._store.read(self._at(key))
        return None

    def read(self, key: str) -> bytes:
        """Raises `PeerFailed` for a message that does not come in time."""
        while (message := self.peek(key)) is None:
            self._finisher.check()
            if time.monotonic() > self._until_s:
                raise PeerFailed(f"An agent of another machine has not reported ({key.rpartition('/')[2]}).")
            self._finisher.sleep(_POLL_S)
        return message

    def remove(self, key: str) -> None:
        with contextlib.suppress(StoreError):
            self._store.delete(self._at(key))

    def replace_last(self, kind: str, key: str) -> None:
        """Each is the only one of its kind."""

    def wait_for_outcome(self, checkpoint_id: CheckpointId, store: Store) -> None:
        outcome = json.loads(self.read(f"{checkpoint_id}/{store.url}/outcome"))
        if error := outcome.get("error"):
            raise PeerFailed(str(error))

    def clear(self) -> None:
        """What agents of earlier generations have left. Of this one, others may still read."""
        with contextlib.suppress(StoreError):
            for blob in list(self._store.list(MESSAGES)):
                if not blob.key.startswith(self._folder):
                    self._store.delete(blob.key)


def _left(images: Iterable[Image]) -> list[Left]:
    """The snapshots that all images of this machine's ranks together make up."""
    ranks: dict[CheckpointId, dict[int | None, Image]] = {}
    for image in images:
        marked = Marked.of(image.manifest.layout)
        ranks.setdefault(image.manifest.checkpoint_id, {})[marked.rank if marked else None] = image
    found = []
    for checkpoint_id, parts in ranks.items():
        image = next(iter(parts.values()))
        manifest = image.manifest
        found.append(
            Left(
                checkpoint_id=checkpoint_id,
                run=manifest.run,
                step=manifest.step,
                generation=manifest.generation,
                sequence=manifest.sequence,
                destinations=image.record.destinations,
                ranks=tuple(sorted(rank for rank in parts if rank is not None)),
                world_size=manifest.world_size,
            )
        )
    return found


@contextlib.contextmanager
def _mapped(image: Image, finisher: Finisher) -> Iterator[_Mapped]:
    try:
        payload = _Mapped(str(image.snapshot.path), image.manifest.tensors, finisher)
    except (OSError, ValueError) as error:
        raise Damaged(path=str(image.snapshot.path), reason=f"the image cannot be read ({error})") from error
    try:
        size_bytes = image.manifest.parts[0].size_bytes
        if len(payload.view) != size_bytes:
            raise Damaged(
                path=str(image.snapshot.path),
                reason=f"the image has {len(payload.view)} bytes, its mark says {size_bytes}",
            )
        yield payload
    finally:
        payload.release()


class _Mapped(FilePayload):
    """An image, read as long as no worker wants it back."""

    def __init__(self, path: str, tensors: tuple[TensorEntry, ...], finisher: Finisher) -> None:
        super().__init__(path, tensors)
        self._finisher = finisher

    def wait(self, upto_bytes: int | None = None) -> None:
        self._finisher.check()
