"""PyTorch Lightning: checkpoints through Strata's engine.

    trainer = Trainer(plugins=[StrataCheckpointIO()], ...)

Lightning decides when to save and under which name; Strata saves in the background, verified, to a folder or any URL
that `strata.stores` knows. A save's name stands in its manifest and belongs to it alone, however many are under way. A
name that is used again, such as `last.ckpt`, means the newest save; the one before is removed when that is durable, so
there is an intact one at every moment. The file is `last.ckpt.pt`, or has the save's id in it while that is taken.

Strategies that shard the model write and read its checkpoints past the plugin, so a Trainer is not made with one of them and
this plugin: neither FSDP1 and DeepSpeed, nor `ModelParallelStrategy` (FSDP2), whose model `strata.elastic` trains.
"""

from __future__ import annotations

import logging
import threading
from functools import partial
from typing import Any

from strata.checkpoint.catalog.listing import Catalog, Entry
from strata.checkpoint.catalog.manifest import CheckpointId
from strata.checkpoint.catalog.retention import remove
from strata.checkpoint.events import CheckpointInfo, SaveHandle
from strata.checkpoint.manager import CheckpointManager
from strata.errors import MissingDependency, StrataError
from strata.stores import StoreError, open_store
from strata.training.sharding import UnsupportedSharding

try:
    from lightning_fabric.plugins import CheckpointIO
    from pytorch_lightning.strategies import (
        DeepSpeedStrategy,
        FSDPStrategy,
        ModelParallelStrategy,
        Strategy,
    )
except ImportError as error:
    raise MissingDependency("pytorch-lightning", extra="lightning", feature="StrataCheckpointIO") from error


log = logging.getLogger("strata.checkpoint")

_NAME = "name"
"""In a manifest's metadata: what Lightning calls the checkpoint."""


class StrataCheckpointIO(CheckpointIO):
    """Saves without stalling; loads only what verifies. Retention stays Lightning's business."""

    def __init__(self) -> None:
        self._managers: dict[str, CheckpointManager] = {}
        self._lock = threading.Lock()
        self._starting = ""
        self._saving: dict[tuple[str, str], SaveHandle] = {}
        """The last save under each name in each folder."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None
    ) -> None:
        folder, name = _split(path)
        manager = self._manager(folder)
        with self._lock:
            self._starting = name
            handle = manager.save(
                checkpoint,
                step=int(checkpoint.get("global_step", 0)),
                epoch=int(checkpoint.get("epoch", 0)),
                metadata={_NAME: name},
            )
            self._saving[folder, name] = handle
        handle.future.add_done_callback(partial(self._saved, folder, name, handle.checkpoint_id))

    def load_checkpoint(
        self, path: Any, map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        folder, name = _split(path)
        manager = self._manager(folder)
        manager.wait_pending()
        named = self._named(manager, name)
        if not named:
            raise StrataError(
                f"There is no checkpoint '{name}' in {folder}.", hint=f"Look: strata checkpoint ls {folder}"
            )
        state: dict[str, Any] = manager.load(checkpoint_id=named[0].checkpoint_id)
        return state

    def remove_checkpoint(self, path: Any) -> None:
        folder, name = _split(path)
        manager = self._manager(folder)
        with self._lock:
            saving = self._saving.get((folder, name))
        if saving is not None:
            saving.exception()  # Waits; a failure is raised by the next save.
        manager.drop_snapshots([info.checkpoint_id for info in self._named(manager, name)])
        catalog = Catalog(open_store(folder))
        for entry in _entries(catalog, name):
            remove(catalog, entry)

    def teardown(self) -> None:
        for manager in self._managers.values():
            manager.close()
        self._managers.clear()

    def _manager(self, folder: str) -> CheckpointManager:
        if folder not in self._managers:
            self._managers[folder] = CheckpointManager(folder, keep_count=1_000_000, stem=self._stem)
        return self._managers[folder]

    def _stem(self, step: int, checkpoint_id: CheckpointId) -> str:
        """Asked by `save` itself, while `_starting` is the name of that save."""
        return self._starting

    def _saved(self, folder: str, name: str, checkpoint_id: CheckpointId, future: Any) -> None:
        """The save has ended: what had its name before is superseded. Runs on the engine's thread."""
        if future.exception() is not None:
            return
        catalog = Catalog(open_store(folder))
        try:
            named = _entries(catalog, name)
            ids = [entry.manifest.checkpoint_id for entry in named]
            for entry in named[ids.index(checkpoint_id) + 1 :] if checkpoint_id in ids else ():
                remove(catalog, entry)
        except StoreError as error:
            log.warning(
                "'%s' is saved, but what it replaces is still in %s; its next save tries again: %s",
                name,
                folder,
                error,
            )

    @staticmethod
    def _named(manager: CheckpointManager, name: str) -> list[CheckpointInfo]:
        """Newest first."""
        return [info for info in manager.all_checkpoints() if info.metadata.get(_NAME) == name]


def _entries(catalog: Catalog, name: str) -> list[Entry]:
    """Newest first."""
    return [entry for entry in catalog.list().entries if entry.manifest.metadata.get(_NAME) == name]


def _split(path: Any) -> tuple[str, str]:
    folder, _, name = str(path).rpartition("/")
    return folder or ".", name


def _without_plugin(strategy: type[Strategy], reason: str, hint: str) -> None:
    """Lightning hands the plugin to the strategy when the Trainer is made: one that would not use it refuses it there, as
    Lightning's own strategies do with plugins that are not theirs."""
    known: Any = Strategy.checkpoint_io

    def take(self: Strategy, io: Any) -> None:
        inner = io
        while inner is not None and not isinstance(inner, StrataCheckpointIO):
            inner = getattr(inner, "checkpoint_io", None)  # Of a plugin around another.
        if inner is not None:
            raise UnsupportedSharding(
                f"StrataCheckpointIO cannot save for Lightning's {type(self).__name__}: {reason}.", hint=hint
            )
        known.fset(self, io)

    strategy.checkpoint_io = property(known.fget, take)  # type: ignore[method-assign, assignment]


_OWN_LOOP = (
    "train the sharded model with strata.elastic in a loop of your own (docs/tutorials/large-models.md), or leave the plugin "
    "out and let Lightning save by itself."
)
_without_plugin(
    FSDPStrategy,
    "it is FSDP1, whose shards cannot be saved one by one",
    f"Use FSDP2 instead (fully_shard; ModelParallelStrategy in Lightning), and {_OWN_LOOP}",
)
_without_plugin(
    DeepSpeedStrategy,
    "DeepSpeed saves its state by itself",
    f"Use FSDP2 instead (fully_shard; ModelParallelStrategy in Lightning), and {_OWN_LOOP}",
)
_without_plugin(
    ModelParallelStrategy,
    "it writes and reads the shards without asking a checkpoint plugin",
    _OWN_LOOP[0].upper() + _OWN_LOOP[1:],
)
