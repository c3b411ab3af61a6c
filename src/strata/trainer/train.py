"""The trainer: a GPT on token data that survives crashes, joins and leaves.

    strata torchrun --nproc-per-node=2 -m strata.trainer.train --config examples/configs/small.yaml training.max_steps=200

What makes it elastic is `strata.elastic`; the rest is an ordinary loop: build, iterate, backward, step.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from strata.agent.trace import Tracer
from strata.checkpoint.catalog.naming import step_stem
from strata.checkpoint.destinations import Destination
from strata.checkpoint.errors import SaveFailed
from strata.core.faults.failures import EXIT_AGAIN
from strata.data.loading.loader import ElasticLoader
from strata.data.loading.sampler import ElasticSampler
from strata.data.loading.steps import Batch
from strata.errors import StrataError
from strata.logs import formatter, level
from strata.stores import open_store
from strata.stores.deferred import open_deferred
from strata.torch_compat import lazy_dynamo
from strata.trainer.config import TrainConfig, coordinator_address, read_train_config
from strata.trainer.data import ResumableDataset, SequenceDataset, collate
from strata.trainer.distributed import (
    WorldInfo,
    cleanup_distributed,
    ensure_enough_nodes,
    setup_distributed_environment,
)
from strata.trainer.error_translation import save_error
from strata.trainer.errors import ConfigurationError, TopologyChangeError
from strata.trainer.metrics import TrainingMetrics
from strata.trainer.model import GPT, GPTConfig
from strata.trainer.parallel import build_mesh, clip, exchange_gradients, sizes, spread
from strata.trainer.scaling import (
    ElasticScalingManager,
    GradAccumulationConfig,
    RoundingMode,
    ScalingConfig,
    ScalingRule,
    cosine_factor,
)
from strata.trainer.sync import SyncTimer
from strata.trainer.validation import vocabulary_problem
from strata.training.job import ElasticJob, ElasticOptions

log = logging.getLogger("strata.trainer")


class Trainer:
    """One rank of one training job."""

    def __init__(self, config: TrainConfig, world: WorldInfo, tracer: Tracer) -> None:
        self.config = config
        self.world = world
        self.device = _device(config, world)
        _seed_everything(config.training.seed, deterministic=config.training.deterministic)
        self.tokens = tokens = _open_tokens(config)
        self.mesh = build_mesh(config.parallel, world.world_size, self.device.type)
        self.readers = world.world_size if self.mesh is None else self.mesh["dp"].size()
        """Workers, or groups of them, that read different data."""
        self.model = self._build_model(tokens)
        self.wrapped = self._wrap(self.model)
        self.optimizer = self._build_optimizer()
        self.scaling = self._build_scaling()
        self.metrics = TrainingMetrics()
        self._tokens, self._seconds = 0, 0.0  # Of the step being made.
        self.loader = self._build_loader(tokens)
        self.job = self._build_job(tracer)

    # --- building -------------------------------------------------------------------------------------------

    def _build_model(self, tokens: ResumableDataset) -> GPT:
        section = self.config.model
        if problem := vocabulary_problem(tokens.index, section.vocab_size):
            raise ConfigurationError(problem, section="model", suggestions=["Leave model.vocab_size out."])
        known = section.vocab_size or tokens.index.meta.vocab_size or int(tokens.index.tokens.max()) + 1
        vocab_size = section.vocab_size or -(-known // 64) * 64
        model = GPT(
            GPTConfig(
                vocab_size=vocab_size,
                n_layer=section.n_layer,
                n_head=section.n_head,
                n_embd=section.n_embd,
                seq_length=section.seq_length,
                dropout=section.dropout,
            )
        )
        if section.gradient_checkpointing:
            model.gradient_checkpointing_enable()
        return model

    def _wrap(self, model: GPT) -> nn.Module:
        if self.mesh is not None and self.config.parallel is not None:
            spread(model, self.mesh, fsdp=self.config.parallel.fsdp, compiled=self.config.model.compile)
            return model.to(self.device)
        return self._replicate(model.to(self.device))

    def _replicate(self, model: nn.Module) -> nn.Module:
        if self.config.model.compile:
            model = torch.compile(model)  # type: ignore[assignment]
        if not distributed.is_initialized() or self.world.world_size == 1:
            return model
        wrapped = DistributedDataParallel(
            model, device_ids=[self.device.index] if self.device.type == "cuda" else None
        )
        self.sync = SyncTimer(wrapped)
        return wrapped

    def _build_optimizer(self) -> torch.optim.AdamW:
        decayed = [p for p in self.model.parameters() if p.dim() >= 2]
        others = [p for p in self.model.parameters() if p.dim() < 2]
        groups = [
            {"params": decayed, "weight_decay": self.config.training.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
        section = self.config.training
        return torch.optim.AdamW(groups, lr=section.lr, betas=section.betas)

    def _build_scaling(self) -> ElasticScalingManager:
        section, training = self.config.scaling, self.config.training
        lr_config = ScalingConfig(
            base_lr=section.base_lr or training.lr,
            base_batch_size=section.base_batch_size or training.batch_size,
            base_world_size=section.base_world_size,
            scaling_rule=ScalingRule(section.scaling_rule),
            warmup_steps=section.warmup_steps,
            min_lr=section.min_lr,
            max_lr=section.max_lr,
        )
        accumulation = None
        if section.target_global_batch_size:
            accumulation = GradAccumulationConfig(
                target_global_batch_size=section.target_global_batch_size,
                local_batch_size=training.batch_size,
                base_world_size=section.base_world_size,
                rounding_mode=RoundingMode(section.rounding_mode or RoundingMode.CEIL),
            )
        manager = ElasticScalingManager(lr_config, accumulation, self.optimizer, section.strategy)  # type: ignore[arg-type]
        self._follow_world(manager)
        return manager

    def _follow_world(self, manager: ElasticScalingManager) -> None:
        batch_size = self.config.training.batch_size
        if (manager.world_size, manager.lr.batch_size) != (self.readers, batch_size):
            manager.on_topology_change(self.readers, batch_size)

    def _build_loader(self, tokens: ResumableDataset) -> ElasticLoader:
        training, data, scaling = self.config.training, self.config.data, self.config.scaling
        constant = scaling.strategy == "constant_batch"
        exact = constant and scaling.rounding_mode is None
        batch_size = training.batch_size * (self.scaling.accumulation_steps if constant else 1)
        dataset = SequenceDataset(tokens.reader)
        sampler = ElasticSampler(
            len(dataset),
            global_batch_size=scaling.target_global_batch_size if exact else None,
            batch_size=None if exact else batch_size,
            micro_batch_size=training.batch_size if constant else None,
            shuffle=data.shuffle,
            seed=data.seed,
            dataset=tokens.index.path.stem,
        )
        return ElasticLoader(
            dataset,
            sampler,
            commit="explicit",
            num_workers=data.num_workers,
            persistent_workers=data.num_workers > 0,
            pin_memory=self.device.type == "cuda",
            collate_fn=collate,
        )

    def _build_job(self, tracer: Tracer) -> ElasticJob:
        saving, elastic = self.config.checkpoint, self.config.elastic
        destinations: list[Destination] = [saving.nvme_path] if saving.nvme_path else []
        if saving.s3_bucket:
            url = f"s3://{saving.s3_bucket}/{saving.s3_prefix}".rstrip("/")
            region = saving.s3_region
            destinations.append(
                open_deferred(lambda: open_store(url, region=region), url=url) if region else url
            )
        return ElasticJob(
            model=self.wrapped,
            optimizer=self.optimizer,
            data=self.loader,
            checkpoints=destinations,
            extra={"scaling": self.scaling, "metrics": self.metrics},
            epochs=self.config.training.epochs,
            max_steps=self.config.training.max_steps,
            mesh=None if self.mesh is None else self.mesh["dp"],
            job=elastic.job_id,
            coordinator=coordinator_address(self.config),
            stem=step_stem,
            tracer=tracer,
            data_path=str(self.tokens.index.path),
            data_format="tokens",
            data_metadata={"seq_length": str(self.config.model.seq_length)},
            config=asdict(self.config),
            on_restored=self._on_restored,
            options=ElasticOptions(
                save_every=saving.checkpoint_interval,
                snapshot_every=saving.memory_snapshot_interval,
                snapshot_count=saving.max_snapshots,
                keep_count=saving.keep_last_n,
                wait_for_saves=not saving.async_save,
                on_error=saving.async_save_policy,  # type: ignore[arg-type]
                retries=saving.async_save_retries,
                retry_delay_s=saving.async_save_retry_delay,
                snapshot_limit_bytes=int(saving.max_memory_mb * 2**20) if saving.max_memory_mb else None,
                unreachable_timeout_s=saving.unreachable_timeout,
                preemption_deadline_s=elastic.shutdown_timeout,
                hang_timeout_s=elastic.hang_timeout,
                hang_policy="restart",
            ),
        )

    # --- training -------------------------------------------------------------------------------------------

    def run(self) -> None:
        if self.config.training.deterministic:
            self._settle_buckets()
        with self.job as job:
            self._check_recovered()
            for batch in job:
                self._train(batch)
        if self.world.is_main:
            print(f"Training complete! {job.step} steps, loss {job.metrics.get('loss', float('nan')):.4f}")

    def _train(self, batch: Batch) -> None:
        began_s = time.perf_counter()
        inputs = batch.data["input_ids"].to(self.device, non_blocking=True)
        labels = batch.data["labels"].to(self.device, non_blocking=True)
        with self._without_sync(batch), self._autocast():
            loss = self.wrapped(inputs, labels)
        with self._without_sync(batch):
            (loss * batch.weight).backward()
        self._tokens += inputs.numel()
        self._seconds += time.perf_counter() - began_s
        if not batch.step.ends_step:
            return
        if isinstance(self.wrapped, DistributedDataParallel):
            self.job.waited(self.sync.wait_s)
        norm = self._clip()
        self.scaling.step(self._schedule())
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self._report(loss, norm)

    def _without_sync(self, batch: Batch) -> AbstractContextManager[Any]:
        """Gradients travel once per step, with its last micro-batch."""
        if isinstance(self.wrapped, DistributedDataParallel) and not batch.step.ends_step:
            return self.wrapped.no_sync()
        exchange_gradients(self.model, wanted=batch.step.ends_step)
        return nullcontext()

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.config.training.precision == "bf16":
            return torch.autocast(self.device.type, dtype=torch.bfloat16)
        return nullcontext()

    def _clip(self) -> float | None:
        limit = self.config.training.max_norm
        return None if limit is None else clip(self.model, limit)

    def _schedule(self) -> float:
        section = self.config.training
        if section.max_steps is None:
            return min(1.0, (self.job.step + 1) / max(1, section.warmup_steps))
        return cosine_factor(
            self.job.step,
            warmup_steps=section.warmup_steps,
            total_steps=section.max_steps,
            min_ratio=section.min_lr_ratio,
        )

    def _settle_buckets(self) -> None:
        """One pass whose result is thrown away.

        DDP lays its gradient buckets out anew after the first backward pass, and with more than two workers the
        layout decides in which order floats are added. A fresh start and a restart must add in the same order.
        """
        if not isinstance(self.wrapped, DistributedDataParallel):
            return
        state = torch.get_rng_state()
        tokens = torch.zeros((1, self.config.model.seq_length), dtype=torch.long, device=self.device)
        with self._autocast():
            self.wrapped(tokens, tokens).backward()
        self.optimizer.zero_grad(set_to_none=True)
        torch.set_rng_state(state)

    # --- recovery and reporting -----------------------------------------------------------------------------

    def _on_restored(self, state: Mapping[str, Any]) -> None:
        self._follow_world(self.scaling)

    def _check_recovered(self) -> None:
        """After a restart there must be a state, if one was ever saved."""
        if self.job.had_saved and not self.job.restored:
            raise TopologyChangeError.no_checkpoint()

    def _report(self, loss: torch.Tensor, norm: float | None) -> None:
        step, section = self.job.step + 1, self.config.training
        tokens, seconds = self._tokens * self.readers, self._seconds
        self._tokens, self._seconds = 0, 0.0
        lr = float(self.optimizer.param_groups[0]["lr"])
        self.metrics.record_step(seconds, tokens=tokens)
        self.metrics.lr.record(lr)
        if norm is not None:
            self.metrics.gradient.record(norm, max_norm=section.max_norm)
            self.job.log({"grad_norm": norm})
        if step % section.log_interval and step != 1:
            return
        value = float(loss.detach())
        per_second = tokens / max(seconds, 1e-9)
        self.job.report(loss=value, lr=lr, tokens_per_second=per_second)
        if self.world.is_main:
            log.info("step %d: loss %.4f, lr %.2e, %.0f tokens/s", step, value, lr, per_second)


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0 trained to the end or left in good order, 1 training failed, 2 the configuration is wrong, 75 to be
    started again: there were too few workers."""
    parser = argparse.ArgumentParser(prog="strata.trainer.train", description=__doc__)
    default = os.environ.get("CONFIG_FILE") or None
    parser.add_argument(
        "--config", required=default is None, default=default, type=Path, help="YAML file [CONFIG_FILE]"
    )
    parser.add_argument("overrides", nargs="*", help="section.key=value")
    options = parser.parse_args(arguments)
    try:
        _log_to_stderr()
        config, warnings = read_train_config(options.config, options.overrides)
    except StrataError as error:
        _complain(error)
        return 2
    tracer = Tracer.begin(config.elastic.job_id or _run_id())
    tracer.mark("ready")
    try:
        world = setup_distributed_environment(config.training.backend)  # type: ignore[arg-type]
        tracer.mark("joined")
        if world.is_main:
            for warning in [*warnings, *_other_launch(config, world)]:
                log.warning("configuration: %s", warning)
        try:
            _check_world(config, world, tracer)
        except TopologyChangeError as error:
            _complain(error)
            return EXIT_AGAIN  # Not a fault of the program: with more workers it will train.
        if not config.model.compile:
            lazy_dynamo.install()
        Trainer(config, world, tracer).run()
    except StrataError as error:
        # A save that failed under the policy `fail` is reported in the words that the guide explains.
        _complain(
            save_error(error, tier=error.tier, path=error.path) if isinstance(error, SaveFailed) else error
        )
        return 1
    finally:
        cleanup_distributed()
    return 0


def _log_to_stderr() -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(formatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")))
    logging.basicConfig(level=level(logging.INFO), handlers=[handler])


def _check_world(config: TrainConfig, world: WorldInfo, tracer: Tracer) -> None:
    before = tracer.before.world_size if tracer.before is not None else config.elastic.max_nodes
    ensure_enough_nodes(world, min_nodes=config.elastic.min_nodes, previous_world_size=before)
    if config.parallel is not None:
        sizes(config.parallel, world.world_size)


def _other_launch(config: TrainConfig, world: WorldInfo) -> Iterator[str]:
    """How many workers there are is said to the launcher; a configuration that says something else changes nothing."""
    wanted = config.elastic.nproc_per_node
    if isinstance(wanted, int) and wanted != world.local_world_size:
        yield (
            f"elastic.nproc_per_node: this machine has {world.local_world_size} of {wanted} workers; "
            f"their number is given to what starts them: strata torchrun --nproc-per-node={wanted}"
        )


def _complain(error: StrataError) -> None:
    print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)


def _run_id() -> str:
    return os.environ.get("STRATA_JOB_ID") or os.environ.get("TORCHELASTIC_RUN_ID") or "default"


def _open_tokens(config: TrainConfig) -> ResumableDataset:
    data = config.data
    index_file = data.index_file or str(Path(data.files[0]).with_suffix(".index"))
    return ResumableDataset(
        data.files,
        index_file,
        data.tokenizer,
        config.model.seq_length,
        text_key=data.text_key,
        seed=data.seed,
        shuffle=data.shuffle,
    )


def _device(config: TrainConfig, world: WorldInfo) -> torch.device:
    wanted, gpus = config.training.device, torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted == "cuda" and world.local_rank >= gpus:
        raise ConfigurationError(
            f"device is cuda, and local rank {world.local_rank} has no GPU: this machine has {gpus}",
            section="training",
            suggestions=(
                "See what the driver finds: nvidia-smi",
                "Start fewer workers per node (--nproc-per-node), or write training.device: cpu",
            ),
        )
    if wanted == "cuda" or (wanted == "auto" and gpus >= world.local_world_size):
        return torch.device("cuda", world.local_rank)
    return torch.device("cpu")


def _seed_everything(seed: int, *, deterministic: bool) -> None:
    import random

    import numpy

    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    if deterministic:
        # `torch.use_deterministic_algorithms` would also load the compiler, to configure it.
        lazy_dynamo.use_deterministic_algorithms()


if __name__ == "__main__":
    sys.exit(main())
