"""Moving images from memory to every tier, in the background, in order, within bounds.

Each save goes through the stores one after the other (local disk before object storage), and each store has a thread
of its own, so a slow upload does not hold up the next save's local copy. The digest is computed beside the first
write. A save holds its image until the last store has it, or until a copy on a local disk takes its place. Errors follow
the policy and always end in the handle.

A store has at most one save under way and one waiting. A newer save overtakes the one that waits, which is skipped for
this store, with a reason: the newest wins, and a slow store never builds up a backlog. Skipping is no error. Two things are
never skipped: a save that must arrive, and, with `when_full='wait'`, one that waits for its first store (then the next
save waits for an image instead).

The threads are daemons: a process that crashes ends at once. One that ends normally finishes its saves first, at exit.
`close` finishes them as well, for as long as it is given; `abandon` gives them up. What was given up publishes nothing
more, although a store may still be busy with its bytes.
"""

from __future__ import annotations

import logging
import mmap
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

from strata.checkpoint.catalog.listing import Entry, where
from strata.checkpoint.catalog.manifest import Manifest, Part, TensorEntry
from strata.checkpoint.catalog.publish import Admit, publish, replace_at
from strata.checkpoint.copying.digest import CHUNK_BYTES, Digest, digest_of
from strata.checkpoint.errors import PeerFailed, SaveFailed, SaveSkipped
from strata.checkpoint.events import MEMORY, CheckpointInfo, Observer, SaveHandle, Started
from strata.processes import at_exit
from strata.stores.protocol import NoSpace, Store, StoreError


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

    def digest(self, chunk_bytes: int = CHUNK_BYTES) -> Digest:
        return digest_of(self.view, chunk_bytes=chunk_bytes)

    def keep(self, manifest: Manifest) -> str | None:
        return None

    def release(self) -> None:
        with suppress(BufferError):  # A view that an error still holds; the mapping goes with it.
            self._map.close()


class ByteBudget:
    """Space for bytes in flight. One payload larger than the whole budget may pass alone."""

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


log = logging.getLogger("strata.checkpoint")

_MANIFEST_RESERVE_BYTES = 1 << 20
_IDLE_S = 10.0
"""A thread that has had nothing to do for so long ends; the next save starts another."""


OnError = Literal["warn", "fail", "retry"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What happens when a save fails or has to wait."""

    on_error: OnError = "fail"
    """`warn`: log, training continues. `fail`: also raise at the next call. `retry`: retry first, then as `fail`."""
    retries: int = 3
    retry_delay_s: float = 5.0
    when_full: Literal["wait", "skip"] = "wait"
    """What happens when all images are in use: `wait` makes training wait for one, `skip` skips a save with a reason (an
    older one that still waits for its store, else the new one)."""

    def __post_init__(self) -> None:
        if self.on_error not in ("warn", "fail", "retry"):
            raise ValueError(f"on_error ({self.on_error!r}) must be 'warn', 'fail' or 'retry'")
        if self.when_full not in ("wait", "skip"):
            raise ValueError(f"when_full ({self.when_full!r}) must be 'wait' or 'skip'")
        if type(self.retries) is not int or self.retries < 0:
            raise ValueError(f"retries ({self.retries!r}) must be a whole number of at least 0")
        if not self.retry_delay_s >= 0:
            raise ValueError(f"retry_delay_s ({self.retry_delay_s!r}) must not be negative")


class Payload(Protocol):
    """The bytes of one save, and what happens to them afterwards."""

    @property
    def view(self) -> memoryview: ...

    @property
    def tensors(self) -> tuple[TensorEntry, ...]: ...

    def wait(self, upto_bytes: int | None = None) -> None:
        """Return when the bytes before this offset, or all of them, are in place."""
        ...

    def digest(self) -> Digest:
        """Of all bytes, when they are in place."""
        ...

    def keep(self, manifest: Manifest) -> str | None:
        """Make the bytes a checkpoint of the memory tier; its path, or None where there is no such tier for them."""
        ...

    def release(self) -> None:
        """All tiers have the bytes: their place may be used again."""
        ...


class Publisher(Protocol):
    """How a save that many ranks make together gets into a store (`strata.checkpoint.sharded.publishing`)."""

    @property
    def is_first(self) -> bool: ...

    def publish(
        self,
        store: Store,
        draft: Manifest,
        payload: Payload,
        *,
        is_part: bool,
        check: Callable[[], None],
        again: bool,
        admit: Admit | None,
    ) -> Entry:
        """The payload is this rank's image, or its part as it was written to a store before."""
        ...

    def digest(self, store: Store) -> Digest:
        """Of what this rank has written to a store."""
        ...

    def fail(self, store: Store, reason: str) -> None: ...

    def end(self, reason: str) -> None: ...


@dataclass(slots=True, kw_only=True)
class Save:
    """One checkpoint on its way through the tiers."""

    draft: Manifest
    """The manifest, less its parts: those are known when the bytes have been hashed and have a place."""
    stores: tuple[Store, ...]
    stem: str
    key: str
    """What the payload is called, where that name is free."""
    size_bytes: int
    handle: SaveHandle
    started_s: float
    must_arrive: bool = False
    """No newer save may overtake it."""
    wait_s: float | None = None
    """How long it may wait for an image, where that is not the policy's decision."""
    replaces: bool = False
    """Its key is the caller's choice, and what is there makes way."""
    publisher: Publisher | None = None
    """Of a sharded save: the payload is this rank's part."""
    payload: Payload | None = None
    hashed: Future[Digest] = field(default_factory=Future)
    copies: list[tuple[str, str]] = field(default_factory=list)
    """Where it has arrived: tier and path."""
    failures: list[SaveFailed] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    """Why stores were left out."""
    stage: int = 0
    """Which of its stores it waits for, or is being written to."""
    holds_image: bool = False
    """Its payload is an image, which a newer save could use."""
    is_over: bool = False
    """Its handle has an outcome, or is about to get it."""

    @property
    def started(self) -> Started:
        return Started(
            checkpoint_id=self.draft.checkpoint_id,
            step=self.draft.step,
            epoch=self.draft.epoch,
            size_bytes=self.size_bytes,
            path=where(self.stores[0], self.key) if self.stores else self.key,
            tiers=tuple(store.tier for store in self.stores),
        )

    def failed(self, error: Exception, store: Store | None = None) -> SaveFailed:
        """The error as one of this save: on its way to a store, or before any."""
        if store is None and isinstance(error, StoreError):
            store = next((known for known in self.stores if known.tier == error.tier), None)
        return SaveFailed.because(
            error,
            tier=store.tier if store is not None else MEMORY,
            path=where(store, self.key) if store is not None else "shared memory",
            checkpoint_id=self.draft.checkpoint_id,
            step=self.draft.step,
        )


class _Thread:
    """A daemon thread that does one thing after the other. It ends when it has had nothing to do for a while, or is asked to
    stay no longer than there is something."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._tasks: deque[Callable[[], object]] = deque()
        self._changed = threading.Condition()
        self._is_running = False
        self._is_dismissed = False

    def dismiss(self) -> None:
        with self._changed:
            self._is_dismissed = True
            self._changed.notify()

    def submit(self, task: Callable[[], object]) -> None:
        with self._changed:
            self._tasks.append(task)
            self._changed.notify()
            if not self._is_running:
                threading.Thread(target=self._run, name=self._name, daemon=True).start()
                self._is_running = True

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._tasks or self._is_dismissed, _IDLE_S)
                if not self._tasks:
                    self._is_running = False
                    return
                task = self._tasks.popleft()
            try:
                task()
            except BaseException:  # The thread must continue, or the next save would wait for ever.
                log.exception("saving a checkpoint failed unexpectedly")
            del task  # What it holds may go while the thread waits.


class _Lane:
    """The way into one store: one save at a time."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.thread = _Thread(f"strata-{store.tier.lower()}")
        self.under_way: Save | None = None
        self.waiting: list[Save] = []


class _GivenUp(Exception):
    """Stops the work for a save that was given up."""


class Pipeline:
    def __init__(
        self,
        stores: Sequence[Store],
        *,
        policy: Policy,
        observer: Observer | None,
        on_published: Callable[[Store, Entry], None],
        on_ended: Callable[[Save, SaveFailed | None], None],
        admit: Callable[[Store], None] | None = None,
        on_kept: Callable[[Manifest, str], None] | None = None,
    ) -> None:
        """`on_kept` is called with each snapshot in memory and its path, as soon as it is one."""
        self._policy = policy
        self._on_kept = on_kept
        self._observer = observer
        self._on_published = on_published
        self._on_ended = on_ended
        self._admit = admit
        self._hashing = _Thread("strata-digest")
        self._lanes = {id(store): _Lane(store) for store in stores}
        self._stopping = threading.Event()
        self._saves: list[Save] = []
        """Under way, oldest first."""
        self._changed = threading.Condition()
        self._pid = os.getpid()
        _pipelines.add(self)

    def check_space(self, save: Save) -> None:
        """Leave out the stores that have no space; with none left, raise before the save has started."""
        if self._policy.on_error == "retry":
            return  # There may be space at the next attempt.
        roomy = []
        for store in save.stores:
            free_bytes = store.free_bytes()
            if free_bytes is None or free_bytes >= save.size_bytes + _MANIFEST_RESERVE_BYTES:
                roomy.append(store)
                continue
            numbers = f"{save.size_bytes / 1e6:.1f} MB needed, {free_bytes / 1e6:.1f} MB free"
            error = NoSpace(
                f"Not enough space: {numbers}.",
                tier=store.tier,
                key=save.key,
                hint="Remove old checkpoints (df -h shows the space), or keep fewer (keep_count).",
                reason=f"No space left on device ({numbers}).",
                required_bytes=save.size_bytes,
                available_bytes=free_bytes,
            )
            save.failures.append(save.failed(error, store))
            log.warning("%s", save.failures[-1])
            if save.publisher is not None:
                save.publisher.fail(store, str(save.failures[-1]))
        if save.stores and not roomy:
            raise save.failures.pop()
        save.stores = tuple(roomy)

    def submit(self, save: Save) -> None:
        """Begin to move a save whose payload is being filled."""
        with self._changed:
            self._saves.append(save)
        self._hashing.submit(lambda: self._hash(save))
        self._continue(save)

    def busy(self) -> frozenset[str]:
        """The URLs of the stores that a save is on its way to."""
        with self._changed:
            return frozenset(
                store.url for save in self._saves if not save.is_over for store in save.stores[save.stage :]
            )

    def overtake(self, newer: Save) -> bool:
        """Skip the oldest save that waits for a store and keeps an image, to make way for a newer one that found none. False
        where no such save can make way at once."""
        with self._changed:
            for older in self._saves:
                lane = self._lane_of(older)
                if (
                    lane is not None
                    and older in lane.waiting
                    and not older.must_arrive
                    and older.holds_image
                    and older.hashed.done()
                    and all(store in newer.stores for store in older.stores[older.stage :])
                ):
                    lane.waiting.remove(older)
                    break
            else:
                return False
            under_way = lane.under_way
        for store in older.stores[older.stage :]:
            self._skip(older, store, newer, under_way)
        older.stage = len(older.stores)
        self._end(older)
        return True

    def _lane_of(self, save: Save) -> _Lane | None:
        return self._lanes[id(save.stores[save.stage])] if save.stage < len(save.stores) else None

    def give_up(self, save: Save, error: Exception) -> None:
        """End a save that could not begin."""
        save.failures.insert(0, save.failed(error))
        log.warning("%s", save.failures[0])
        self._notify("on_started", save.started)
        self._end(save)

    def close(self, timeout_s: float | None = None) -> None:
        """Finish what is under way, without further retries; give up what is not finished in time."""
        if self._pid != os.getpid():
            return  # A forked child has none of the threads.
        self._stopping.set()
        deadline = (
            "" if timeout_s is None else f"it was not finished {timeout_s:.1f} s after the manager was closed"
        )
        with self._changed:
            is_done = self._changed.wait_for(lambda: not self._saves, timeout_s)
        if not is_done:
            self._give_up_all(deadline)
        self._dismiss_threads()

    def abandon(self) -> None:
        """Give up what is under way, at once."""
        self._stopping.set()
        self._give_up_all("the process ended after an error, and its saves were abandoned")
        self._dismiss_threads()

    def _dismiss_threads(self) -> None:
        for thread in (self._hashing, *(lane.thread for lane in self._lanes.values())):
            thread.dismiss()

    def drain(self) -> None:
        """At the end of a process in which this was not closed: wait for the saves under way."""
        if self._pid == os.getpid():
            with self._changed:
                self._changed.wait_for(lambda: not self._saves)

    def _give_up_all(self, reason: str) -> None:
        with self._changed:
            given_up, self._saves = [save for save in self._saves if not save.is_over], []
            for save in given_up:
                save.is_over = True
            for lane in self._lanes.values():
                lane.waiting.clear()
        for save in given_up:
            store = save.stores[save.stage] if save.stage < len(save.stores) else None
            error = SaveFailed(
                tier=store.tier if store is not None else MEMORY,
                path=where(store, save.key) if store is not None else "shared memory",
                reason=reason,
                checkpoint_id=save.draft.checkpoint_id,
                step=save.draft.step,
            )
            save.failures.append(error)
            log.warning("%s", error)
            self._on_ended(save, error)
            self._notify("on_failed", save.started, error, seconds=time.monotonic() - save.started_s)
            save.handle.future.set_exception(error)

    def _continue(self, save: Save) -> None:
        """Let a save queue for its next store, or end."""
        if save.stage == len(save.stores):
            # A save that went to no store, or was skipped by the last one, ends where its bytes are looked at.
            self._hashing.submit(lambda: self._end(save))
            return
        store = save.stores[save.stage]
        lane = self._lanes[id(store)]
        overtaken: list[Save] = []
        with self._changed:
            if save.is_over:
                return
            if not (save.stage == 0 and self._policy.when_full == "wait"):
                overtaken = [older for older in lane.waiting if not older.must_arrive]
            lane.waiting = [older for older in lane.waiting if older not in overtaken]
            lane.waiting.append(save)
            under_way = lane.under_way
            if under_way is None:
                self._begin_next(lane)
        for older in overtaken:
            self._skip(older, store, save, under_way)
            older.stage += 1
            self._continue(older)

    def _begin_next(self, lane: _Lane) -> None:
        lane.under_way = lane.waiting.pop(0) if lane.waiting else None
        if (save := lane.under_way) is not None:
            lane.thread.submit(lambda: self._pass_through(lane, save))

    def _pass_through(self, lane: _Lane, save: Save) -> None:
        """Write a save to a store, and let the next one in."""
        try:
            self._write(save, lane.store)
        finally:
            with self._changed:
                self._begin_next(lane)
            save.stage += 1
            if save.stage == len(save.stores):
                self._end(save)
            else:
                self._continue(save)

    def _skip(self, older: Save, store: Store, newer: Save, under_way: Save | None) -> None:
        busy = f" while step {under_way.draft.step} was still being uploaded" if under_way is not None else ""
        reason = f"step {older.draft.step} was not uploaded to {store.tier}: step {newer.draft.step} overtook it{busy}"
        older.skipped.append(reason)
        log.warning("%s", reason)
        self._notify("on_skipped", older.started, tier=store.tier, reason=reason)

    def _hash(self, save: Save) -> None:
        try:
            save.hashed.set_result(self._hash_and_keep(save))
        except BaseException as error:
            save.hashed.set_exception(error)

    def _hash_and_keep(self, save: Save) -> Digest:
        assert save.payload is not None
        payload = save.payload
        self._notify("on_started", save.started)
        digest = payload.digest()
        try:
            self._check_wanted(save)
            part = Part(key=save.key, size_bytes=save.size_bytes, digest=digest)
            manifest = replace(save.draft, parts=(part,))
            path = payload.keep(manifest)
        except _GivenUp:
            pass
        except Exception as error:
            save.failures.append(save.failed(error))
            log.warning("%s", save.failures[-1])
        else:
            if path is not None:
                self._arrived(save, MEMORY, path)
                if self._on_kept is not None:
                    self._on_kept(manifest, path)
        return digest

    def _check_wanted(self, save: Save) -> None:
        if save.is_over:
            raise _GivenUp

    def _write(self, save: Save, store: Store) -> None:
        assert save.payload is not None
        payload = save.payload

        def digest() -> Digest:
            found = save.hashed.result()
            self._check_wanted(save)  # The manifest comes next.
            return found

        retries = self._policy.retries if self._policy.on_error == "retry" else 0
        for attempt in range(retries + 1):
            try:
                self._check_wanted(save)
                if save.publisher is not None:
                    entry = save.publisher.publish(
                        store,
                        save.draft,
                        payload,
                        is_part=not save.holds_image,
                        check=lambda: self._check_wanted(save),
                        again=attempt > 0,
                        admit=self._admit,
                    )
                elif save.replaces:
                    entry = replace_at(store, save.draft, payload, digest, key=save.key, admit=self._admit)
                else:
                    entry = publish(
                        store,
                        save.draft,
                        payload,
                        digest,
                        name=save.stem,
                        again=attempt > 0,
                        admit=self._admit,
                    )
            except _GivenUp:
                return
            except BaseException as error:
                cause = error if isinstance(error, Exception) else RuntimeError(repr(error))
                failure = save.failed(cause, store)
                if attempt == retries or self._stopping.is_set() or isinstance(error, PeerFailed):
                    save.failures.append(failure)
                    log.warning("%s", failure)
                    if save.publisher is not None:
                        save.publisher.fail(store, str(failure))
                    return
                log.warning("%s Retrying in %.1f s.", failure, self._policy.retry_delay_s)
                self._stopping.wait(self._policy.retry_delay_s)
            else:
                break
        path = where(store, entry.manifest.parts[0].key)
        self._arrived(save, store.tier, path)
        if store is not save.stores[-1]:
            written = save.publisher.digest(store) if save.publisher is not None else save.hashed.result()
            self._hand_over(save, path, written)
        if save.publisher is not None and not save.publisher.is_first:
            return
        try:
            self._on_published(store, entry)
        except Exception:
            log.exception("cleaning up after a save failed; the save itself is complete")

    def _hand_over(self, save: Save, path: str, written: Digest) -> None:
        """Let the tiers after a local disk read from there, so that a slow one never keeps an image from the next
        save. The copy is read back and must be what was written, or the image serves on."""
        assert save.payload is not None
        try:
            copy = FilePayload(path, save.payload.tensors)
        except (OSError, ValueError):
            return  # Not a local file.
        if copy.digest(chunk_bytes=written.chunk_bytes) != written:
            copy.release()
            log.warning("%s did not store what was written; the next tier gets the original", path)
            return
        save.hashed.result()  # Nothing reads the image any more.
        save.payload.release()
        save.payload, save.holds_image = copy, False

    def _end(self, save: Save) -> None:
        digest = self._digest_of(save)
        seconds = time.monotonic() - save.started_s
        if save.payload is not None:
            save.payload.release()
        if save.publisher is not None:
            save.publisher.end(str(save.failures[0]) if save.failures else "; ".join(save.skipped))
        with self._changed:
            if save.is_over:
                return
            save.is_over = True
        # With stores, a save is judged by them: memory is what they are filled from, and a failure there is reported.
        counted = [each for each in save.failures if each.tier != MEMORY or not save.copies]
        is_saved = any(tier != MEMORY or not save.stores for tier, _ in save.copies)
        failed = counted[0] if counted else None
        if is_saved and self._policy.on_error == "warn":
            failed = None
        error: SaveFailed | SaveSkipped | None = failed
        if error is None and not is_saved:
            error = SaveSkipped(reason="; ".join(save.skipped))
        info: CheckpointInfo | None = None
        if error is None:
            assert digest is not None
            part = Part(key=save.key, size_bytes=save.size_bytes, digest=digest)
            info = CheckpointInfo.of(
                replace(save.draft, parts=(part,)),
                copies=save.copies,
                failures=tuple(str(failure) for failure in save.failures),
                skipped=tuple(save.skipped),
            )
        self._on_ended(save, failed)
        if info is not None:
            self._notify("on_completed", save.started, info, seconds=seconds)
            save.handle.future.set_result(info)
        elif error is not None:
            self._notify("on_failed", save.started, error, seconds=seconds)
            save.handle.future.set_exception(error)
        with self._changed:
            if save in self._saves:
                self._saves.remove(save)
            self._changed.notify_all()

    def _digest_of(self, save: Save) -> Digest | None:
        """The digest, once nothing reads the payload any more."""
        if save.payload is None:
            return None
        try:
            return save.hashed.result()
        except Exception as error:
            if not save.failures:
                save.failures.append(save.failed(error))
            return None

    def _arrived(self, save: Save, tier: str, path: str) -> None:
        save.copies.append((tier, path))
        save.handle.tiers = (*save.handle.tiers, tier)
        seconds = time.monotonic() - save.started_s
        size = save.size_bytes / 1e6
        log.info(
            "checkpoint %s is in %s: %.1f MB after %.3f s", save.draft.checkpoint_id, tier, size, seconds
        )
        self._notify("on_tier", save.started, tier=tier, size_bytes=save.size_bytes, seconds=seconds)

    def _notify(self, event: str, *args: object, **facts: object) -> None:
        if self._observer is None:
            return
        try:
            getattr(self._observer, event)(*args, **facts)
        except Exception:
            log.exception("the checkpoint observer failed in %s", event)


_pipelines: weakref.WeakSet[Pipeline] = weakref.WeakSet()


@at_exit
def _finish_at_exit() -> None:
    """The last save of a script that ends normally is not lost; a crash waits for nothing."""
    crash = sys.exc_info()[1]  # The program of a warm worker ends within a function.
    if not hasattr(sys, "ps1"):  # Where a person types, an error ends nothing.
        crash = crash or getattr(sys, "last_value", None)
    if crash is None or isinstance(crash, SystemExit):
        for pipeline in list(_pipelines):
            pipeline.drain()
