"""Hugging Face `Trainer`: a run that outlives its machines, every sample exactly once.

    trainer = Trainer(model, arguments, train_dataset=data)
    StrataCallback("runs/bert", coordinator="localhost:50051").attach(trainer)
    trainer.train()

`attach` is all there is to it. `train()` continues the run in `runs/bert` where there is one, at the exact next sample: model,
optimizer, scheduler, scaler, random numbers, the Trainer's own state and the data position come from one checkpoint. Saves go to
memory and to the destinations in the background, SIGTERM saves and ends, what the Trainer logs is kept by the coordinator and by
sinks. The Trainer's own checkpoints (`save_strategy`) are not needed and never read; they may be written beside.

The order of samples is Strata's (seed `data_seed`, else `seed`), whatever the number of ranks. What the Trainer could not resume
exactly is refused when training begins: iterable datasets, samplers of the user, `auto_find_batch_size`, `resume_from_checkpoint`,
FSDP1 and DeepSpeed. With FSDP2 (`fsdp_config={"version": 2}`) every rank saves its own shards.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler

from strata.checkpoint.destinations import Destination
from strata.data.loading.steps import Batch
from strata.errors import MissingDependency
from strata.integrations.loading import CannotPromise, TrainerLoader, announce, said_at_start
from strata.sinks import Sink
from strata.training.job import ElasticJob, ElasticOptions

try:
    from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
    from transformers.trainer_callback import ExportableState
except ImportError as error:
    raise MissingDependency("transformers", extra="huggingface", feature="StrataCallback") from error

AnyTrainer = TypeVar("AnyTrainer", bound=Trainer)

_OF_THIS_START = ("is_local_process_zero", "is_world_process_zero", "max_steps", "num_train_epochs")
"""What of a Trainer's state is not carried over."""


class StrataCallback(TrainerCallback):
    """Drives an elastic job from the Trainer's loop."""

    def __init__(
        self,
        checkpoints: Destination | Sequence[Destination],
        *,
        global_batch_size: int | None = None,
        options: ElasticOptions | None = None,
        coordinator: str | None = None,
        sinks: Sequence[Sink] = (),
        name: str = "data",
        keep_count: int | None = None,
    ) -> None:
        """`checkpoints` are destinations, near to far; the same ones continue the same run. With `global_batch_size`,
        `gradient_accumulation_steps` is set to what that takes with the ranks there are, so that a step is the same at any number
        of them. `options` say how often to save; `coordinator` and `sinks` are where metrics go. `name` is what the ledger calls the
        data; `keep_count` is that of `options`. See `strata.elastic`."""
        self.global_batch_size = global_batch_size
        self._checkpoints = checkpoints
        options = options or ElasticOptions()
        self._options = dataclasses.replace(
            options, commit_on="batch", keep_count=options.keep_count if keep_count is None else keep_count
        )
        self._coordinator = coordinator
        self._sinks = tuple(sinks)
        self._name = name
        self._trainer: Any = None
        self._loader: TrainerLoader | None = None
        self._substeps = 0
        self._made: Sequence[Batch] = []
        """What the last step was made with, until it is settled."""
        self.job: ElasticJob | None = None
        """While training runs: the job that it belongs to."""

    def attach(self, trainer: AnyTrainer) -> AnyTrainer:
        """Give the Trainer this callback, its data loader and its way to resume; returns the Trainer."""
        own: Any = trainer
        self._trainer = own
        if self not in trainer.callback_handler.callbacks:
            trainer.add_callback(self)
        own.get_train_dataloader = self._make_loader(own.get_train_dataloader)
        own.create_scheduler = self._after_scheduler(own.create_scheduler)
        own.train = self._closing(own.train)
        return trainer

    # --- the Trainer's own steps, with ours beside them ---------------------------------------------------------

    def _make_loader(self, own: Callable[[], Any]) -> Callable[[], TrainerLoader]:
        def get_train_dataloader() -> TrainerLoader:
            trainer = self._trainer
            order = _order(trainer)
            made: Any = own()  # What the Trainer has decided of columns, collating and loader processes.
            if isinstance(made.dataset, IterableDataset) or not isinstance(made, DataLoader):
                raise CannotPromise(
                    f"The Trainer reads {type(made.dataset).__name__} in an order of its own: its position cannot be restored exactly.",
                    hint="Pass a map-style dataset (with __getitem__ and __len__).",
                )
            seed = trainer.args.seed if trainer.args.data_seed is None else trainer.args.data_seed
            self._loader = loader = TrainerLoader(
                made.dataset,
                batch_size=trainer.args.train_batch_size,
                global_batch_size=self.global_batch_size,
                seed=seed,
                shuffle=not isinstance(order, SequentialSampler),
                name=self._name,
                num_workers=made.num_workers,
                collate_fn=made.collate_fn,
                pin_memory=made.pin_memory,
                prefetch_factor=made.prefetch_factor,
                persistent_workers=made.persistent_workers,
                multiprocessing_context=made.multiprocessing_context,
                worker_init_fn=made.worker_init_fn,
            )
            arguments = trainer.args
            arguments.gradient_accumulation_steps = loader.accumulation(arguments.gradient_accumulation_steps)
            loader.open(accumulate=arguments.gradient_accumulation_steps)
            return loader

        return get_train_dataloader

    def _after_scheduler(self, own: Callable[..., Any]) -> Callable[..., Any]:
        def create_scheduler(*arguments: Any, **options: Any) -> Any:
            made = own(*arguments, **options)
            if self._trainer.is_in_train and self.job is None and self._loader is not None:
                self._enter(self._loader)
            return made

        return create_scheduler

    def _closing(self, own: Callable[..., Any]) -> Callable[..., Any]:
        def train(resume_from_checkpoint: str | bool | None = None, *arguments: Any, **options: Any) -> Any:
            if resume_from_checkpoint:
                raise CannotPromise(
                    "resume_from_checkpoint names a checkpoint of the Trainer's own, which has no data position that could be "
                    "restored exactly.",
                    hint="Remove it: train() continues the run in the destination of StrataCallback.",
                )
            try:
                return own(None, *arguments, **options)
            except BaseException as error:
                self._close(error)
                raise

        return train

    def _enter(self, loader: TrainerLoader) -> None:
        """Model, optimizer and scheduler are ready, and nothing is trained: restore, or begin."""
        trainer = self._trainer
        arguments, state = trainer.args, trainer.state
        epochs = float(arguments.num_train_epochs)
        is_whole = arguments.max_steps <= 0 and epochs.is_integer()
        has_name = arguments.run_name not in (None, arguments.output_dir)
        job = ElasticJob(
            model=trainer.model,
            optimizer=trainer.optimizer,
            scheduler=trainer.lr_scheduler,
            extra={"trainer": _Progress(trainer)},
            data=loader.elastic,
            checkpoints=self._checkpoints,
            epochs=int(epochs) if is_whole else None,
            max_steps=None if is_whole else state.max_steps,
            options=self._options,
            job=arguments.run_name if has_name else None,
            coordinator=self._coordinator,
            sinks=self._sinks,
        )
        loader.drive(job)
        self.job = job.__enter__()
        self._substeps, self._made = 0, []
        if is_whole:
            sampler = loader.elastic.sampler
            left = len(loader) * (int(epochs) - sampler.epoch) - (len(loader) - loader.left)
            state.max_steps = job.step + left // arguments.gradient_accumulation_steps
        announce(job, said_at_start(loader))

    def _close(self, error: BaseException | None) -> None:
        job, self.job = self.job, None
        if job is not None:
            job.__exit__(type(error) if error is not None else None, error, None)

    # --- events -----------------------------------------------------------------------------------------------

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        if self.job is not None and self.job.step != state.global_step:
            raise CannotPromise(
                f"The Trainer begins at step {state.global_step:,} and its weights at {self.job.step:,}: this version of transformers "
                "sets up training in another order.",
                hint="Use transformers 5.22, or a version of strata-runtime that knows yours.",
            )
        if self.job is None:
            raise CannotPromise(
                "StrataCallback was passed to a Trainer that it is not attached to: nothing would be restored.",
                hint="Create the Trainer without it, then call StrataCallback(...).attach(trainer).",
            )

    def on_substep_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        self._substeps += 1

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        loader = self._loader
        assert loader is not None
        self._made = loader.trained(self._substeps + 1)
        self._substeps = 0
        state.epoch = loader.epochs_at(self._made[-1])  # The Trainer counts those of this start.

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        self._settle()

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        self._settle()

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        if control.should_training_stop and self.job is not None:
            self._settle()
            self.job.finish()  # Before the Trainer puts the best model in its place.

    def _settle(self) -> None:
        """The last step is made, and the Trainer has logged and evaluated what was due after it: what is saved now has all of it."""
        made, self._made = self._made, []
        if made and self.job is not None:
            self.job.made_step(made)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, object] | None = None,
        **kwargs: object,
    ) -> None:
        if self.job is not None:
            metrics = {
                name: float(value) for name, value in (logs or {}).items() if isinstance(value, int | float)
            }
            self.job.log(metrics, step=state.global_step)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        self._close(None)


class _Progress:
    """What the Trainer itself knows of a run: steps, history of logs, best metric, and the state of its callbacks."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        trainer = self._trainer
        state = {
            name: value
            for name, value in dataclasses.asdict(trainer.state).items()
            if name not in (*_OF_THIS_START, "stateful_callbacks")
        }
        callbacks = {type(each).__name__: each.state()["attributes"] for each in self._callbacks()}
        return {"state": json.dumps(state), "callbacks": json.dumps(callbacks)}

    def load_state_dict(self, saved: Any) -> None:
        for name, value in json.loads(saved["state"]).items():
            setattr(self._trainer.state, name, value)
        known = json.loads(saved["callbacks"])
        for callback in self._callbacks():
            for name, value in known.get(type(callback).__name__, {}).items():
                setattr(callback, name, value)

    def _callbacks(self) -> list[Any]:
        return [
            each for each in self._trainer.callback_handler.callbacks if isinstance(each, ExportableState)
        ]


def _order(trainer: Any) -> Any:
    """The sampler that the Trainer would read with. Raises for what it could not resume exactly."""
    arguments = trainer.args
    if arguments.auto_find_batch_size:
        raise CannotPromise(
            "auto_find_batch_size trains some samples again with another batch size.",
            hint="Set per_device_train_batch_size, and auto_find_batch_size=False.",
        )
    if trainer.get_sp_size() * trainer.get_cp_size() * trainer.get_tp_size() > 1:
        raise CannotPromise(
            "Several ranks of this Trainer share each batch (sequence, context or tensor parallelism), which StrataCallback does not "
            "count.",
            hint="Use data parallelism (DDP, FSDP2), or strata.elastic with a mesh in a loop of your own.",
        )
    sampler = trainer._get_train_sampler()
    if sampler is not None and not isinstance(sampler, RandomSampler | SequentialSampler):
        raise CannotPromise(
            f"The Trainer would read in the order of a {type(sampler).__name__}, which cannot be continued at another number of "
            "ranks.",
            hint="Remove train_sampling_strategy (group_by_length): the order is Strata's, shuffled by data_seed.",
        )
    return sampler
