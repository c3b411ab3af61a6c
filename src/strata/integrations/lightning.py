"""PyTorch Lightning: checkpoints through Strata's engine.

    trainer = Trainer(plugins=[StrataCheckpointIO()], ...)

Lightning decides when to save and under which name; Strata saves in the background, verified, to a folder or any URL
that `strata.stores` knows. A checkpoint called `last.ckpt` is the file `last.ckpt.pt` with its manifest beside it.
"""

from __future__ import annotations

import os
from typing import Any

from strata.checkpoint.catalog import Catalog
from strata.checkpoint.cleaning import remove
from strata.checkpoint.events import CheckpointInfo
from strata.checkpoint.manager import CheckpointManager
from strata.errors import MissingDependency, StrataError
from strata.stores import open_store

try:
    from lightning_fabric.plugins import CheckpointIO
except ImportError as error:
    raise MissingDependency("pytorch-lightning", extra="lightning", feature="StrataCheckpointIO") from error


class StrataCheckpointIO(CheckpointIO):
    """Saves without stalling; loads only what verifies. Retention stays Lightning's business."""

    def __init__(self) -> None:
        self._managers: dict[str, CheckpointManager] = {}
        self._name = ""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None
    ) -> None:
        folder, name = _split(path)
        manager = self._manager(folder)
        if self._find(manager, name) is not None:  # Lightning reuses names such as `last.ckpt`.
            self.remove_checkpoint(path)
        self._name = name
        manager.save(
            checkpoint, step=int(checkpoint.get("global_step", 0)), epoch=int(checkpoint.get("epoch", 0))
        )

    def load_checkpoint(
        self, path: Any, map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        folder, name = _split(path)
        manager = self._manager(folder)
        manager.wait_pending()
        found = self._find(manager, name)
        if found is None:
            raise StrataError(
                f"There is no checkpoint '{name}' in {folder}.", hint=f"Look: strata checkpoint ls {folder}"
            )
        state: dict[str, Any] = manager.load(checkpoint_id=found.checkpoint_id)
        return state

    def remove_checkpoint(self, path: Any) -> None:
        folder, name = _split(path)
        manager = self._manager(folder)
        manager.wait_pending()
        found = self._find(manager, name)
        catalog = Catalog(open_store(folder))
        for entry in catalog.list().entries:
            if found is not None and entry.manifest.checkpoint_id == found.checkpoint_id:
                remove(catalog, entry)

    def teardown(self) -> None:
        for manager in self._managers.values():
            manager.close()
        self._managers.clear()

    def _manager(self, folder: str) -> CheckpointManager:
        if folder not in self._managers:
            self._managers[folder] = CheckpointManager(
                folder, keep_count=1_000_000, stem=lambda step, checkpoint_id: self._name
            )
        return self._managers[folder]

    @staticmethod
    def _find(manager: CheckpointManager, name: str) -> CheckpointInfo | None:
        names = (f"{name}.pt", f"{name}.bin")
        return next(
            (info for info in manager.all_checkpoints() if os.path.basename(info.path) in names), None
        )


def _split(path: Any) -> tuple[str, str]:
    folder, _, name = str(path).rpartition("/")
    return folder or ".", name
