"""PyTorch Lightning: runs that outlive their machines, and checkpoints through Strata's engine.

    loader = TrainerLoader(dataset, batch_size=8, num_workers=2)
    trainer = Trainer(callbacks=[StrataCallback("runs/a", coordinator="localhost:50051")], max_epochs=3)
    trainer.fit(model, loader)

`StrataCallback` makes `fit` an elastic job: it continues the run in `runs/a` where there is one, at the exact next sample and at any
number of ranks; saves to memory and to the destinations in the background; saves and ends on SIGTERM; and what the module logs is kept
by the coordinator and by sinks. `ckpt_path` is not needed, and refused.

    trainer = Trainer(plugins=[StrataCheckpointIO()], callbacks=[ModelCheckpoint("ckpts", save_last=True)], ...)
    trainer.fit(model, loader, ckpt_path="last")

`StrataCheckpointIO` is for who wants to keep Lightning's checkpoints: Lightning decides when to save, under which name, and what to
remove; Strata saves in the background, verified, to a folder or any URL that `strata.stores` knows. With a `TrainerLoader` they hold
the data position and the record of what was trained. Each save is a payload and a manifest of its own; its name (`last.ckpt`) is a
link to the newest one, replaced when that is durable, so there is an intact one at every moment.

Strategies that shard the model write and read its checkpoints past the plugin, so a Trainer is not made with one of them and
this plugin: neither FSDP1 and DeepSpeed, nor `ModelParallelStrategy` (FSDP2), whose model `strata.elastic` trains.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import threading
from collections.abc import Mapping, Sequence
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

from strata.checkpoint.catalog.listing import Catalog, Entry
from strata.checkpoint.catalog.manifest import CheckpointId
from strata.checkpoint.catalog.retention import remove
from strata.checkpoint.destinations import Destination
from strata.checkpoint.events import CheckpointInfo, SaveHandle
from strata.checkpoint.manager import CheckpointManager
from strata.errors import MissingDependency, StrataError
from strata.integrations.loading import (
    RECORD,
    RESTORED_FROM,
    CannotPromise,
    announce,
    batches_of,
    said_at_start,
)
from strata.integrations.loading import TrainerLoader as TrainerLoader
from strata.sinks import Sink
from strata.stores import Store, StoreError, open_store
from strata.training.exchange import rank_and_world
from strata.training.job import ElasticJob, ElasticOptions
from strata.training.sharded.kinds import UnsupportedSharding

try:
    from lightning_fabric.plugins import CheckpointIO
    from pytorch_lightning import Callback, LightningModule, Trainer
    from pytorch_lightning.callbacks import GradientAccumulationScheduler
    from pytorch_lightning.loggers.logger import Logger
    from pytorch_lightning.strategies import (
        DeepSpeedStrategy,
        FSDPStrategy,
        ModelParallelStrategy,
        Strategy,
    )
except ImportError as error:
    raise MissingDependency(
        "pytorch-lightning", extra="lightning", feature="strata.integrations.lightning"
    ) from error


log = logging.getLogger("strata.checkpoint")

_NAME = "name"
"""In a manifest's metadata: what Lightning calls the checkpoint."""
_CKPT = ".ckpt"


class StrataCallback(Callback):
    """Drives an elastic job from Lightning's loop."""

    def __init__(
        self,
        checkpoints: Destination | Sequence[Destination],
        *,
        options: ElasticOptions | None = None,
        coordinator: str | None = None,
        sinks: Sequence[Sink] = (),
        job: str | None = None,
    ) -> None:
        """`checkpoints` are destinations, near to far; the same ones continue the same run. `options` say how often to save;
        `coordinator` and `sinks` are where metrics go, as often as Lightning logs (`log_every_n_steps`); `job` is a name for people.
        See `strata.elastic`."""
        self._checkpoints = checkpoints
        self._options = dataclasses.replace(options or ElasticOptions(), commit_on="batch")
        self._coordinator = coordinator
        self._sinks = tuple(sinks)
        self._name = job
        self._loader: TrainerLoader | None = None
        self._given = 0
        """Batches since the last step."""
        self._steps = 0
        """As Lightning counts them."""
        self.job: ElasticJob | None = None
        """While `fit` runs: the job that it belongs to."""

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Model and optimizers are ready, and nothing is trained: restore, or begin."""
        self._loader = loader = _loader_of(trainer)
        _refuse(trainer, pl_module)
        trainer.accumulate_grad_batches = accumulate = loader.accumulation(trainer.accumulate_grad_batches)
        optimizer, *others = trainer.optimizers
        schedulers = {
            f"scheduler {n}": config.scheduler for n, config in enumerate(trainer.lr_scheduler_configs)
        }
        progress = _Progress(trainer)
        elastic = loader.open(accumulate=accumulate)
        job = ElasticJob(
            model=pl_module,
            optimizer=optimizer,
            extra={
                "lightning": progress,
                **schedulers,
                **{f"optimizer {n}": each for n, each in enumerate(others, 1)},
            },
            data=elastic,
            checkpoints=self._checkpoints,
            epochs=trainer.max_epochs if (trainer.max_epochs or -1) >= 0 else None,
            max_steps=trainer.max_steps if trainer.max_steps >= 0 else None,
            options=self._options,
            job=self._name,
            coordinator=self._coordinator,
            sinks=self._sinks,
        )
        loader.drive(job)
        self.job = job.__enter__()
        progress.apply(loader)
        self._given, self._steps = 0, trainer.global_step
        trainer.loggers = [*trainer.loggers, _JobLogger(job)]
        job.watch_signals(on=False)  # Lightning takes them now, and gives back what it has found.
        announce(job, said_at_start(loader))

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert self.job is not None
        self.job.watch_signals(on=True)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        job, loader = self.job, self._loader
        assert job is not None
        assert loader is not None
        self._given += 1
        if trainer.global_step == self._steps and pl_module.automatic_optimization:
            return
        self._steps = trainer.global_step
        batches, self._given = loader.trained(self._given), 0
        job.made_step(batches)
        if job.is_done():
            job.finish()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.job is not None:
            self.job.finish()
            self.job.watch_signals(on=False)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._close(trainer, exception)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._close(trainer, None)

    def _close(self, trainer: Trainer, error: BaseException | None) -> None:
        job, self.job = self.job, None
        if job is not None:
            trainer.loggers = [each for each in trainer.loggers if not isinstance(each, _JobLogger)]
            job.__exit__(type(error) if error is not None else None, error, None)


def _loader_of(trainer: Trainer) -> TrainerLoader:
    source: Any = trainer.fit_loop._data_source
    given = source.dataloader() if source.is_module() else source.instance
    if not isinstance(given, TrainerLoader):
        raise CannotPromise(
            f"StrataCallback cannot restore the position of a {type(given).__name__} exactly.",
            hint="Pass the Trainer one strata.integrations.lightning.TrainerLoader(dataset, batch_size=...) to train on.",
        )
    source.instance, source.name = given, ""  # The one that Lightning will ask for.
    return given


def _refuse(trainer: Any, module: LightningModule) -> None:
    """What Lightning could not resume exactly."""
    if trainer.ckpt_path is not None:
        raise CannotPromise(
            f"ckpt_path='{trainer.ckpt_path}' names a checkpoint of Lightning's own beside the run of StrataCallback.",
            hint="Remove it: fit() continues the run in the destination of StrataCallback.",
        )
    if trainer.limit_train_batches != 1.0 or trainer.overfit_batches:
        raise CannotPromise(
            "limit_train_batches, overfit_batches and fast_dev_run end epochs before their data does.",
            hint="Remove them, or train without StrataCallback while you experiment.",
        )
    if any(isinstance(each, GradientAccumulationScheduler) for each in _callbacks(trainer)):
        raise CannotPromise(
            "GradientAccumulationScheduler changes how many batches make a step.",
            hint="Use one accumulate_grad_batches, or TrainerLoader(..., global_batch_size=...).",
        )
    if trainer.reload_dataloaders_every_n_epochs:
        raise CannotPromise(
            "reload_dataloaders_every_n_epochs makes another loader in the middle of a run.",
            hint="Remove it: a TrainerLoader continues with the next epoch by itself.",
        )
    if not module.automatic_optimization and trainer.accumulate_grad_batches > 1:
        raise CannotPromise(
            "With manual optimization, only the module knows which batches make a step.",
            hint="Let it step once for each batch (accumulate_grad_batches=1): a batch then counts when training_step returns.",
        )
    if isinstance(trainer.strategy, FSDPStrategy | DeepSpeedStrategy | ModelParallelStrategy):
        raise UnsupportedSharding(
            f"StrataCallback does not train with Lightning's {type(trainer.strategy).__name__}, which shards the model by itself.",
            hint=_OWN_LOOP[0].upper() + _OWN_LOOP[1:],
        )


class _Progress:
    """What Lightning itself knows of a run: its loops, its callbacks, its precision and the data module."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._loops: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        trainer = self._trainer
        callbacks = {each.state_key: each.state_dict() for each in _callbacks(trainer)}
        return {
            "loops": trainer.fit_loop.state_dict(),
            "callbacks": {key: state for key, state in callbacks.items() if state},
            "precision": trainer.precision_plugin.state_dict(),
            "datamodule": trainer.datamodule.state_dict() if trainer.datamodule is not None else {},
        }

    def load_state_dict(self, saved: Any) -> None:
        trainer = self._trainer
        self._loops = saved["loops"]
        for callback in _callbacks(trainer):
            if (state := saved["callbacks"].get(callback.state_key)) is not None:
                callback.load_state_dict(deepcopy(state))
        if saved["precision"]:
            trainer.precision_plugin.load_state_dict(saved["precision"])
        if trainer.datamodule is not None and saved["datamodule"]:
            trainer.datamodule.load_state_dict(saved["datamodule"])

    def apply(self, loader: TrainerLoader) -> None:
        """Let Lightning's loops continue, where a state was restored: the data is at its position now."""
        if self._loops is not None:
            self._trainer.fit_loop.load_state_dict(
                counted_in_batches(self._loops, whole=len(loader), left=loader.left)
            )


def _callbacks(trainer: Any) -> list[Any]:
    return [each for each in trainer.callbacks if not isinstance(each, StrataCallback)]


def counted_in_batches(loops: Mapping[str, Any], *, whole: int, left: int) -> dict[str, Any]:
    """Lightning's progress, where an epoch has `whole` batches of which `left` are left: with another number of ranks these are
    others than were counted. The totals over all epochs stay, which nothing but logs is decided by."""
    found = deepcopy(dict(loops))
    batches = found["epoch_loop.batch_progress"]
    current = batches["current"]
    done = whole if batches["is_last_batch"] else whole - left
    unfinished = (
        current["ready"] - current["completed"]
    )  # Saved after a batch and before Lightning has counted it.
    current.update(ready=done, started=done, processed=done, completed=done - unfinished)
    return found


class _JobLogger(Logger):
    """What the module logs, for the job's history and sinks."""

    def __init__(self, job: ElasticJob) -> None:
        super().__init__()
        self._job = job

    @property
    def name(self) -> str:
        return "strata"

    @property
    def version(self) -> str:
        return self._job.run

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """They are not metrics."""

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self._job.log(
            {name: value for name, value in metrics.items() if name != "epoch"}, step=self._job.step
        )


class StrataCheckpointIO(CheckpointIO):
    """Saves without stalling; loads only what verifies. Retention stays Lightning's business."""

    def __init__(self) -> None:
        self._managers: dict[str, CheckpointManager] = {}
        self._lock = threading.Lock()
        self._linking = threading.Lock()
        """Not the one that a save holds, which may wait for the thread that links."""
        self._starting = ""
        self._saving: dict[tuple[str, str], SaveHandle] = {}
        """The last save under each name in each folder."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: object = None
    ) -> None:
        folder, name = _split(path)
        manager = self._manager(folder)
        loader = next(iter(_loader_states(checkpoint)), {})
        with self._lock:
            self._starting = name
            handle = manager.save(
                checkpoint,
                step=int(checkpoint.get("global_step", 0)),
                epoch=int(checkpoint.get("epoch", 0)),
                metadata={_NAME: name},
                position=loader.get(RECORD),
            )
            self._saving[folder, name] = handle
        handle.future.add_done_callback(partial(self._saved, folder, name, handle.checkpoint_id))

    def load_checkpoint(
        self, path: str | os.PathLike[str], map_location: object = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        folder, name = _split(path)
        manager = self._manager(folder)
        manager.wait_pending()
        named = self._named(manager, name)
        if not named:
            raise StrataError(
                f"There is no checkpoint '{name}' in {folder}.",
                hint=f"List them: strata checkpoint ls {folder}",
            )
        wanted = named[0].checkpoint_id
        rank, world_size = rank_and_world()
        state: dict[str, Any]
        if rank == 0:  # Who saves: the next save continues this one.
            state = manager.restore(checkpoint_id=wanted).state
        else:
            state = manager.load(checkpoint_id=wanted)
        for loader in _loader_states(state):
            if RECORD in loader:
                loader[RESTORED_FROM] = wanted
                fit_loop = state["loops"]["fit_loop"]
                whole, left = batches_of(loader, world_size=world_size)
                fit_loop.update(counted_in_batches(fit_loop, whole=whole, left=left))
        return state

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        folder, name = _split(path)
        manager = self._manager(folder)
        with self._lock:
            saving = self._saving.get((folder, name))
        if saving is not None:
            saving.exception()  # Waits; a failure is raised by the next save.
        manager.drop_snapshots([info.checkpoint_id for info in self._named(manager, name)])
        catalog = Catalog(open_store(folder))
        _unlink(catalog.store, name)
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
        return f"{self._starting.removesuffix(_CKPT)}-{checkpoint_id}"

    def _saved(self, folder: str, name: str, checkpoint_id: CheckpointId, future: Any) -> None:
        """The save has ended: its name means it now, and what had it before is superseded. Runs on the engine's thread."""
        if future.exception() is not None:
            return
        catalog = Catalog(open_store(folder))
        try:
            with self._linking:
                named = _entries(catalog, name)
                ids = [entry.manifest.checkpoint_id for entry in named]
                if checkpoint_id not in ids:
                    return  # Removed since.
                if ids[0] == checkpoint_id:
                    _link(catalog.store, name, named[0])
            for entry in named[ids.index(checkpoint_id) + 1 :]:
                remove(catalog, entry)
        except (StoreError, OSError) as error:
            log.warning(
                "'%s' is saved, but the checkpoint it replaces is still in %s; the next save retries: %s",
                name,
                folder,
                error,
            )

    @staticmethod
    def _named(manager: CheckpointManager, name: str) -> list[CheckpointInfo]:
        """Newest first."""
        return [info for info in manager.all_checkpoints() if info.metadata.get(_NAME) == name]


def _loader_states(checkpoint: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What a Trainer's checkpoint has of its loaders that keep a position."""
    loops = checkpoint.get("loops") or {}
    found = loops.get("fit_loop", {}).get("state_dict", {}).get("combined_loader", [])
    return [state for state in found if isinstance(state, dict)]


def _entries(catalog: Catalog, name: str) -> list[Entry]:
    """Newest first."""
    return [entry for entry in catalog.list().entries if entry.manifest.metadata.get(_NAME) == name]


def _link(store: Store, name: str, entry: Entry) -> None:
    """Let Lightning find the checkpoint under its name: a link to the payload, or the payload's key where there are no links."""
    key = entry.manifest.parts[0].key
    path_of: Any = getattr(store, "path_of", None)
    if path_of is None:
        store.put(name, key.encode())
        return
    link = Path(path_of(name))
    made = link.with_name(f".{link.name}-{entry.manifest.checkpoint_id}")
    made.unlink(missing_ok=True)
    made.symlink_to(Path(path_of(key)).name)
    made.replace(link)


def _unlink(store: Store, name: str) -> None:
    path_of: Any = getattr(store, "path_of", None)
    if path_of is None:
        store.delete(name)
    else:
        Path(path_of(name)).unlink(missing_ok=True)


def _split(path: str | os.PathLike[str]) -> tuple[str, str]:
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
    "train the sharded model with strata.elastic in a loop of your own (docs/tutorials/large-models.md), "
    "or remove the plugin and let Lightning save by itself."
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
