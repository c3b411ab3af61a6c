"""Hugging Face `Trainer`: its runs on the coordinator, its weights through Strata's engine.

    trainer = Trainer(..., callbacks=[StrataCallback("runs/bert", coordinator="localhost:50051")])

Steps, loss and learning rate appear with the worker everywhere. Whenever the Trainer saves, model, optimizer and
scheduler also go to `checkpoints` (a folder or URL) in the background: verified, several tiers, never half written.

With FSDP2 (`fsdp_config={"version": 2}`) every rank writes its own shards, verified, and the manifest comes last; the loop
waits for it. FSDP1 and DeepSpeed are refused when training begins.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

from strata.checkpoint.manager import CheckpointManager
from strata.checkpoint.sharded.writer import StrataStorageWriter
from strata.errors import MissingDependency
from strata.torch_compat.dtensors import is_distributed_tensor
from strata.training.link import CoordinatorLink, open_link
from strata.training.sharding import refuse_unsupported

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
        self._writer: StrataStorageWriter | None = None
        """Of sharded state, on every rank."""
        self._link: CoordinatorLink | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.checkpoints is not None:
            refuse_unsupported(kwargs["model"], kwargs.get("optimizer"))
        job = os.environ.get("STRATA_JOB_ID") or args.run_name or "huggingface"
        self._link = open_link(
            self.coordinator, job=job, rank=args.process_index, metadata={"pid": str(os.getpid())}
        )
        if self.checkpoints is not None and any(map(is_distributed_tensor, kwargs["model"].parameters())):
            self._writer = StrataStorageWriter(self.checkpoints, keep_count=self.keep_count)
        elif self.checkpoints is not None and state.is_world_process_zero:
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
        parts = {name: kwargs.get(name) for name in ("model", "optimizer", "lr_scheduler")}
        if self._writer is not None:
            self._writer.step, self._writer.epoch = state.global_step, int(state.epoch or 0)
            dcp.save(_shards(**parts), storage_writer=self._writer)
        if self._manager is None:
            return
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
        self._writer = None
        self._report(state, "idle")
        if self._link is not None:
            self._link.close(leave=True)
            self._link = None

    def _report(self, state: TrainerState, status: str, metrics: Mapping[str, float] | None = None) -> None:
        if self._link is not None:
            self._link.status(status, step=state.global_step, epoch=int(state.epoch or 0), metrics=metrics)


def _shards(*, model: Any, optimizer: Any, lr_scheduler: Any) -> dict[str, Any]:
    """This rank's part of the state, under the names that unsharded state has. Collective."""
    state: dict[str, Any] = {"model_state_dict": get_model_state_dict(model)}
    if optimizer is not None:
        own = getattr(optimizer, "optimizer", optimizer)  # Accelerate's is a wrapper of it.
        state["optimizer_state_dict"] = get_optimizer_state_dict(model, own)
    if lr_scheduler is not None:
        state["lr_scheduler_state_dict"] = lr_scheduler.state_dict()
    return state
