"""Hugging Face `Trainer`: its runs on the coordinator, its weights through Strata's engine.

    trainer = Trainer(..., callbacks=[StrataCallback("runs/bert", coordinator="localhost:50051")])

Steps, loss and learning rate appear with the worker everywhere. Whenever the Trainer saves, model, optimizer and
scheduler also go to `checkpoints` (a folder or URL) in the background: verified, several tiers, never half written.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from strata.checkpoint.manager import CheckpointManager
from strata.errors import MissingDependency
from strata.training.link import CoordinatorLink, open_link

try:
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
except ImportError as error:
    raise MissingDependency("transformers", extra="huggingface", feature="StrataCallback") from error


class StrataCallback(TrainerCallback):
    def __init__(
        self, checkpoints: str | None = None, *, keep_count: int = 3, coordinator: str | None = None
    ) -> None:
        self.checkpoints = checkpoints
        self.keep_count = keep_count
        self.coordinator = coordinator
        self._manager: CheckpointManager | None = None
        self._link: CoordinatorLink | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        job = os.environ.get("STRATA_JOB_ID") or args.run_name or "huggingface"
        self._link = open_link(
            self.coordinator, job=job, rank=args.process_index, metadata={"pid": str(os.getpid())}
        )
        if self.checkpoints is not None and state.is_world_process_zero:
            self._manager = CheckpointManager(self.checkpoints, self.keep_count, observer=self._link)
        self._report(state, "training")

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._report(state, "training")

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        metrics = {k: float(v) for k, v in (logs or {}).items() if isinstance(v, int | float)}
        self._report(state, "training", metrics)

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._manager is None:
            return
        parts = {name: kwargs.get(name) for name in ("model", "optimizer", "lr_scheduler")}
        self._manager.save(
            {f"{name}_state_dict": part.state_dict() for name, part in parts.items() if part is not None},
            step=state.global_step,
            epoch=int(state.epoch or 0),
        )

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._manager is not None:
            self._manager.close()
            self._manager = None
        self._report(state, "idle")
        if self._link is not None:
            self._link.close(leave=True)
            self._link = None

    def _report(self, state: TrainerState, status: str, metrics: Mapping[str, float] | None = None) -> None:
        if self._link is not None:
            self._link.status(status, step=state.global_step, epoch=int(state.epoch or 0), metrics=metrics)
