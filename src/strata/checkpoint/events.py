"""What callers see of a save: the handle, the description of a checkpoint, and the hook for code that reports on it."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from strata.checkpoint.catalog.manifest import CheckpointId, Json, Manifest

MEMORY = "MEMORY"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointInfo:
    """One checkpoint, as found in the tiers."""

    checkpoint_id: CheckpointId
    step: int
    epoch: int
    path: str
    """Path of the payload, in the first durable tier that has it."""
    size_bytes: int
    created_at: float
    digest: str
    tiers: tuple[str, ...]
    failures: tuple[str, ...] = ()
    """Requested tiers that did not receive it, each with the reason."""
    skipped: tuple[str, ...] = ()
    """Tiers that were skipped because a newer checkpoint overtook this one, each with the reason. Not a failure."""
    metadata: Mapping[str, Json] = field(default_factory=dict)
    data: Json = None
    world_size: int = 1
    generation: int = 0
    author: str = ""
    run: str = ""
    sequence: int = 0
    lineage: str = ""
    parent: CheckpointId | None = None
    durable_parent: CheckpointId | None = None

    @property
    def order(self) -> tuple[int, int]:
        return (self.generation, self.sequence)

    @property
    def lasting_parent(self) -> CheckpointId | None:
        """`durable_parent`, by its name in earlier versions."""
        return self.durable_parent

    @classmethod
    def of(
        cls,
        manifest: Manifest,
        *,
        copies: Sequence[tuple[str, str]],
        failures: tuple[str, ...] = (),
        skipped: tuple[str, ...] = (),
    ) -> CheckpointInfo:
        """`copies`: tier and path, fastest first. What is in memory ends with the job; anything more durable is the
        better path to hand out."""
        durable = [path for tier, path in copies if tier != MEMORY] or [path for _, path in copies]
        return cls(
            checkpoint_id=manifest.checkpoint_id,
            step=manifest.step,
            epoch=manifest.epoch,
            path=durable[0],
            size_bytes=manifest.size_bytes,
            created_at=manifest.created_at,
            digest=manifest.digest,
            tiers=tuple(tier for tier, _ in copies),
            failures=failures,
            skipped=skipped,
            metadata=manifest.metadata,
            data=manifest.data,
            world_size=manifest.world_size,
            generation=manifest.generation,
            author=manifest.author,
            run=manifest.run,
            sequence=manifest.sequence,
            lineage=manifest.lineage,
            parent=manifest.parent,
            durable_parent=manifest.durable_parent,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """A save that has started: the facts known before a byte has moved."""

    checkpoint_id: CheckpointId
    step: int
    epoch: int
    size_bytes: int
    path: str
    tiers: tuple[str, ...]


class Observer(Protocol):
    """Notified of every save, from the engine's own threads; exceptions it raises are logged and ignored."""

    def on_started(self, save: Started) -> None: ...

    def on_tier(self, save: Started, *, tier: str, size_bytes: int, seconds: float) -> None:
        """The checkpoint exists in this tier; `seconds` since the save began."""
        ...

    def on_skipped(self, save: Started, *, tier: str, reason: str) -> None:
        """A newer save overtook this one on its way to this tier."""
        ...

    def on_completed(self, save: Started, info: CheckpointInfo, *, seconds: float) -> None: ...

    def on_failed(self, save: Started, error: BaseException, *, seconds: float) -> None: ...

    def on_removed(
        self, checkpoint_id: CheckpointId, *, step: int, epoch: int, path: str, reason: str
    ) -> None:
        """The checkpoint is no longer in any durable tier."""
        ...


class SaveHandle:
    """A save in progress. It continues whether or not anything waits for it."""

    def __init__(self, checkpoint_id: CheckpointId, step: int) -> None:
        self.checkpoint_id = checkpoint_id
        self.step = step
        self.future: concurrent.futures.Future[CheckpointInfo] = concurrent.futures.Future()
        self.copied: Callable[[], None] = lambda: None
        self.path = ""
        """Of the payload in the first store it goes to, unless another writer takes the name meanwhile."""
        self.tiers: tuple[str, ...] = ()
        """Where it has arrived so far."""

    def wait_copied(self) -> None:
        """Return when the state has been copied, which on CUDA may be after `save` has returned."""
        self.copied()

    def done(self) -> bool:
        return self.future.done()

    def wait(self, timeout_s: float) -> bool:
        """Whether it ended in time, successfully or not."""
        return not concurrent.futures.wait([self.future], timeout_s).not_done

    def result(self, timeout: float | None = None) -> CheckpointInfo:
        """The checkpoint, once every tier has it. Raises `SaveFailed`, `SaveSkipped`, or `TimeoutError`."""
        return self.future.result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        return self.future.exception(timeout)

    def __repr__(self) -> str:
        state = "under way" if not self.done() else "failed" if self.future.exception() else "complete"
        return f"SaveHandle({self.checkpoint_id!r}, {state})"
