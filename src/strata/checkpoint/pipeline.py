"""Moving images from memory to every tier, in the background, in order, within bounds.

Each save goes through the stores one after the other (local disk before object storage), and each store has a thread
of its own, so a slow upload does not hold up the next save's local copy. The digest is computed beside the first
write. A save holds its image until the last store has it; how many saves can be under way is bounded by the images
and bytes there are, which is decided before a save gets here. Errors follow the policy and always end in the handle.

Threads are joined when the interpreter exits, so the last save of a script is not lost.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

from strata.checkpoint.catalog import Entry, where
from strata.checkpoint.digest import Digest
from strata.checkpoint.errors import SaveFailed
from strata.checkpoint.events import MEMORY, CheckpointInfo, Observer, SaveHandle, Started
from strata.checkpoint.manifest import Manifest, Part, TensorEntry
from strata.checkpoint.naming import Stem
from strata.checkpoint.payloads import FilePayload
from strata.checkpoint.publish import publish
from strata.stores.protocol import NoSpace, Store, StoreError

log = logging.getLogger("strata.checkpoint")

_MANIFEST_ROOM_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What happens when a save cannot go as planned."""

    on_error: Literal["warn", "fail", "retry"] = "fail"
    """`warn`: log, training goes on. `fail`: also raise at the next call. `retry`: try again first, then as `fail`."""
    retries: int = 3
    retry_delay_s: float = 5.0
    when_full: Literal["wait", "skip"] = "wait"
    """Whether a save waits for an image to become free, or is skipped with a reason."""

    def __post_init__(self) -> None:
        if self.on_error not in ("warn", "fail", "retry"):
            raise ValueError(f"on_error ({self.on_error!r}) must be 'warn', 'fail' or 'retry'")
        if self.when_full not in ("wait", "skip"):
            raise ValueError(f"when_full ({self.when_full!r}) must be 'wait' or 'skip'")
        if self.retries < 0 or self.retry_delay_s < 0:
            raise ValueError("retries and retry_delay_s must not be negative")


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


@dataclass(slots=True, kw_only=True)
class Save:
    """One checkpoint on its way through the tiers."""

    draft: Manifest
    """The manifest, less its parts: those are known when the bytes have been hashed and have a place."""
    stores: tuple[Store, ...]
    key: str
    """What the payload is called, where that name is free."""
    size_bytes: int
    handle: SaveHandle
    begun_s: float
    payload: Payload | None = None
    hashed: Future[Digest] = field(default_factory=Future)
    places: list[tuple[str, str]] = field(default_factory=list)
    """Where it has arrived: tier and path."""
    failures: list[SaveFailed] = field(default_factory=list)

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


class Pipeline:
    def __init__(
        self,
        stores: Sequence[Store],
        *,
        stem: Stem,
        policy: Policy,
        observer: Observer | None,
        on_published: Callable[[Store, Entry], None],
        on_ended: Callable[[Save, SaveFailed | None], None],
        admit: Callable[[Store], None] | None = None,
    ) -> None:
        self._stem = stem
        self._policy = policy
        self._observer = observer
        self._on_published = on_published
        self._on_ended = on_ended
        self._admit = admit
        self._hashing = ThreadPoolExecutor(1, thread_name_prefix="strata-digest")
        self._writing = {
            id(store): ThreadPoolExecutor(1, thread_name_prefix=f"strata-{store.tier.lower()}")
            for store in stores
        }
        self._stopping = threading.Event()

    def check_room(self, save: Save) -> None:
        """Leave out the stores that have no room; with none left, raise before the save has begun."""
        if self._policy.on_error == "retry":
            return  # There may be room at the next try.
        roomy = []
        for store in save.stores:
            free_bytes = store.free_bytes()
            if free_bytes is None or free_bytes >= save.size_bytes + _MANIFEST_ROOM_BYTES:
                roomy.append(store)
                continue
            numbers = f"{save.size_bytes / 1e6:.1f} MB needed, {free_bytes / 1e6:.1f} MB free"
            error = NoSpace(
                f"There is not enough room: {numbers}.",
                tier=store.tier,
                key=save.key,
                hint="Remove old checkpoints (df -h shows the space), or keep fewer (keep_count).",
                reason=f"No space left on device ({numbers}).",
                required_bytes=save.size_bytes,
                available_bytes=free_bytes,
            )
            save.failures.append(save.failed(error, store))
            log.warning("%s", save.failures[-1])
        if save.stores and not roomy:
            raise save.failures.pop()
        save.stores = tuple(roomy)

    def submit(self, save: Save) -> None:
        """Begin to move a save whose payload is being filled."""
        # Everything is queued now and waits for its turn on its own thread: once the interpreter is exiting,
        # threads still drain their queues but nothing new can be queued.
        save.hashed = self._hashing.submit(self._hash, save)
        before: Future[None] | None = None
        last = self._hashing
        for store in save.stores:
            last = self._writing[id(store)]
            before = last.submit(self._write, save, store, before)
        last.submit(self._end, save)

    def give_up(self, save: Save, error: Exception) -> None:
        """End a save that could not begin."""
        save.failures.insert(0, save.failed(error))
        log.warning("%s", save.failures[0])
        self._tell("on_started", save.started)
        self._end(save)

    def close(self) -> None:
        """Finish what is under way, without further retries."""
        self._stopping.set()
        for pool in [self._hashing, *self._writing.values()]:
            pool.shutdown(wait=True)

    def _hash(self, save: Save) -> Digest:
        assert save.payload is not None
        self._tell("on_started", save.started)
        save.payload.wait()
        digest = save.payload.digest()
        try:
            part = Part(key=save.key, size_bytes=save.size_bytes, digest=digest)
            path = save.payload.keep(replace(save.draft, parts=(part,)))
        except Exception as error:
            save.failures.append(save.failed(error))
            log.warning("%s", save.failures[-1])
        else:
            if path is not None:
                self._arrived(save, MEMORY, path)
        return digest

    def _write(self, save: Save, store: Store, before: Future[None] | None) -> None:
        assert save.payload is not None
        if before is not None:
            before.exception()  # One tier after the other, whatever became of the one before.
        retries = self._policy.retries if self._policy.on_error == "retry" else 0
        for attempt in range(retries + 1):
            try:
                entry = publish(
                    store,
                    save.draft,
                    save.payload,
                    save.hashed.result,
                    stem=self._stem,
                    again=attempt > 0,
                    admit=self._admit,
                )
            except Exception as error:
                failure = save.failed(error, store)
                if attempt == retries or self._stopping.is_set():
                    save.failures.append(failure)
                    log.warning("%s", failure)
                    return
                log.warning("%s Trying again in %.1f s.", failure, self._policy.retry_delay_s)
                self._stopping.wait(self._policy.retry_delay_s)
            else:
                break
        path = where(store, entry.manifest.parts[0].key)
        self._arrived(save, store.tier, path)
        if store is not save.stores[-1]:
            self._hand_over(save, path)
        try:
            self._on_published(store, entry)
        except Exception:
            log.exception("cleaning up after a save failed; the save itself is complete")

    def _hand_over(self, save: Save, path: str) -> None:
        """Let the tiers after a local disk read from there, so that a slow one never keeps an image from the next
        save. The copy is read back and must be the image, or the image serves on."""
        assert save.payload is not None
        try:
            copy = FilePayload(path, save.payload.tensors)
        except (OSError, ValueError):
            return  # Not a local file.
        if copy.digest() != save.hashed.result():
            copy.release()
            log.warning("%s does not hold what was written to it; the next tier gets the original", path)
            return
        save.payload.release()
        save.payload = copy

    def _end(self, save: Save) -> None:
        digest = self._digest_of(save)
        seconds = time.monotonic() - save.begun_s
        if save.payload is not None:
            save.payload.release()
        # With stores, a save is judged by them: memory is what they are filled from, and a failure there is told.
        counted = [each for each in save.failures if each.tier != MEMORY or not save.places]
        is_saved = any(tier != MEMORY or not save.stores for tier, _ in save.places)
        error = counted[0] if counted else None
        if error is not None and is_saved and self._policy.on_error == "warn":
            error = None
        info: CheckpointInfo | None = None
        if error is None:
            assert digest is not None
            part = Part(key=save.key, size_bytes=save.size_bytes, digest=digest)
            failures = tuple(str(failure) for failure in save.failures)
            info = CheckpointInfo.of(
                replace(save.draft, parts=(part,)), places=save.places, failures=failures
            )
        self._on_ended(save, error)
        if info is not None:
            self._tell("on_completed", save.started, info, seconds=seconds)
            save.handle.future.set_result(info)
        elif error is not None:
            self._tell("on_failed", save.started, error, seconds=seconds)
            save.handle.future.set_exception(error)

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
        save.places.append((tier, path))
        seconds = time.monotonic() - save.begun_s
        size = save.size_bytes / 1e6
        log.info(
            "checkpoint %s is in %s: %.1f MB after %.3f s", save.draft.checkpoint_id, tier, size, seconds
        )
        self._tell("on_tier", save.started, tier=tier, size_bytes=save.size_bytes, seconds=seconds)

    def _tell(self, event: str, *args: object, **facts: object) -> None:
        if self._observer is None:
            return
        try:
            getattr(self._observer, event)(*args, **facts)
        except Exception:
            log.exception("the checkpoint observer failed in %s", event)
