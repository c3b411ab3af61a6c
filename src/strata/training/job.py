"""`ElasticJob`: an ordinary training loop that outlives its machines.

    with strata.elastic(model=model, optimizer=optimizer, data=loader, checkpoints="runs/a") as job:
        for batch in job:
            loss = criterion(model(batch.data)) * batch.weight
            loss.backward()
            if batch.step.ends_step:
                optimizer.step()
                optimizer.zero_grad()

Entering restores the newest state from the fastest tier that verifies, on every rank; iterating trains from the
exact next step. After each step the job saves by interval (shared memory often, lasting tiers less often), keeps the
ledger of trained samples, tells the coordinator, and looks whether anybody was asked to leave. A batch counts as
trained when the loop asks for the next one: work that a crash interrupts is neither saved nor in the ledger.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Literal

import torch

from strata.checkpoint import Author, CheckpointInfo, CheckpointManager, Memory, Policy, SaveHandle
from strata.checkpoint.errors import CheckpointNotFound, LoadFailed
from strata.checkpoint.naming import Stem, unique_stem
from strata.data.commits import DataLedger
from strata.data.loader import ElasticLoader
from strata.data.steps import Batch
from strata.shared_memory import folder_name
from strata.training import rng
from strata.training.account import TimeAccount
from strata.training.exchange import broadcast_state, gather, rank_and_world, smallest
from strata.training.link import CoordinatorLink, open_link
from strata.training.preemption import EXIT_AGAIN, Preemption
from strata.training.state import Stateful, TrainingState, tensor_bytes
from strata.training.trace import Footprints, Recovery, Tracer, clear_run, note_saved, was_saved
from strata.training.watchdog import Policy as HangPolicy
from strata.training.watchdog import Watchdog

log = logging.getLogger("strata.training")

OnError = Literal["warn", "fail", "retry"]

AGREE_EVERY_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticOptions:
    """How often a job saves, and how it behaves when things go wrong."""

    save_every: int = 500
    """Steps between lasting checkpoints; the last step is always saved."""
    snapshot_every: int = 50
    """Steps between snapshots in shared memory: at most this much work is lost. 0 makes none."""
    keep_count: int = 3
    snapshot_limit_bytes: int | None = None
    """A state larger than this makes no snapshots between its lasting checkpoints."""
    on_error: OnError = "warn"
    """What a failed save does to training: warn, fail or retry."""
    retries: int = 3
    retry_delay_s: float = 5.0
    preemption_deadline_s: float = 25.0
    """Time between SIGTERM and the end, final checkpoint included."""
    hang_timeout_s: float = 0.0
    """A rank without a step for this long is named with its stacks. 0 looks at nothing."""
    hang_policy: HangPolicy = "warn"


class Preempted(SystemExit):
    """Somebody was asked to leave, and the job has saved its state.

    Ends the process: with status 0 if it was this one, else with one that makes torchrun start it again, in the world
    that is left.
    """

    def __init__(self, *, asked: bool) -> None:
        super().__init__(0 if asked else EXIT_AGAIN)


class ElasticJob:
    def __init__(
        self,
        *,
        model: torch.nn.Module,
        optimizer: Stateful,
        data: ElasticLoader,
        checkpoints: Any = None,
        scheduler: Stateful | None = None,
        extra: Mapping[str, Stateful] | None = None,
        options: ElasticOptions | None = None,
        epochs: int | None = None,
        max_steps: int | None = None,
        job: str | None = None,
        coordinator: str | None = None,
        stem: Stem = unique_stem,
        tracer: Tracer | None = None,
        data_path: str = "",
        data_format: str = "samples",
        data_metadata: Mapping[str, str] | None = None,
        on_restored: Callable[[Mapping[str, Any]], None] | None = None,
    ) -> None:
        if epochs is None and max_steps is None:
            raise ValueError("say when training ends: epochs, max_steps, or both")
        self.options = options or ElasticOptions()
        self.name = (
            job or os.environ.get("STRATA_JOB_ID") or os.environ.get("TORCHELASTIC_RUN_ID") or "default"
        )
        self.rank, self.world_size = rank_and_world()
        self.step = 0
        """Optimizer steps made, in this and all earlier lives of the job."""
        self.recovery: Recovery | None = None
        """What this process's start made good, if it did."""
        self.restored = False
        """Whether training goes on from a checkpoint."""
        self.metrics: dict[str, float] = {}
        """Shown with this worker everywhere; `report` adds to it."""
        self._data = data
        self._data_place = (data_path or data.dataset, data_format, dict(data_metadata or {}))
        self._epochs = epochs
        self._max_steps = max_steps
        self._state = TrainingState(model=model, optimizer=optimizer, scheduler=scheduler, extra=extra)
        self._on_restored = on_restored
        self._checkpoints = checkpoints
        self._stem = stem
        self._tracer = tracer or Tracer.begin(self.name)
        self._ledger = DataLedger(data, gather=gather)
        self._local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self._coordinator = coordinator
        self._manager: CheckpointManager | None = None
        self._link: CoordinatorLink | None = None
        self._watchdog: Watchdog | None = None
        self._first: SaveHandle | None = None
        """The first save, until it is complete; then the run is known to have a state."""
        self._first_is_noted = False
        self._saved_step = -1  # Of the newest lasting save: the same on every rank.
        self._next_agreement = 1
        self._account = TimeAccount(self._tracer.before)
        self._steps_here = 0
        self._step_began_s = 0.0
        self._step_s = 0.0
        self._leaving = False

    # --- entering and leaving -------------------------------------------------------------------------------

    def __enter__(self) -> ElasticJob:
        self._tracer.mark("ready")
        self._tracer.mark("joined")
        self._preemption = Preemption(deadline_s=self.options.preemption_deadline_s)
        self._data.set_world(self.rank, self.world_size)
        self.metrics["total_steps"] = float(self._total_steps())
        self._link = open_link(
            self._coordinator,
            job=self.name,
            rank=self.rank,
            metadata={"restarts": self._restarts, "pid": str(os.getpid())},
        )
        if self._link is not None and self.rank == 0:
            path, kind, metadata = self._data_place
            self._link.describe_data(self._data.sampler, path, kind, metadata)
        self._tell("recovering" if self._restarts != "0" else "loading")
        if self._keeps_state:
            self._manager = CheckpointManager(
                self._checkpoints if self.rank == 0 else [],
                self.options.keep_count,
                memory=Memory(job=folder_name(self.name)),
                policy=Policy(
                    on_error=self.options.on_error,
                    retries=self.options.retries,
                    retry_delay_s=self.options.retry_delay_s,
                    when_full="skip",  # A slow disk costs a snapshot, with a reason, and never a step.
                ),
                author=Author(worker=f"{self.name}-rank{self.rank}", world_size=self.world_size),
                stem=self._stem,
                observer=self._link if self.rank == 0 else None,
            )
            if isinstance(self._state.optimizer, torch.optim.Optimizer):
                self._manager.guard(self._state.optimizer)
        self._restore()
        self._tracer.mark("loaded")
        self._footprints = Footprints(self.name, self.rank)
        if self.options.hang_timeout_s > 0:
            self._watchdog = Watchdog(
                timeout_s=self.options.hang_timeout_s,
                policy=self.options.hang_policy,
                name=f"rank {self.rank} of job '{self.name}'",
                before_end=self._link.flush_logs if self._link is not None else None,
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        ended_well = kind is None or (kind is Preempted)
        if self._watchdog is not None:
            self._watchdog.close()
        self._preemption.close()
        if self._manager is not None:
            if ended_well:
                self._manager.wait_pending()
            # The next process of a job that did not end here starts from the images.
            self._manager.close(keep_memory=kind is not None)
        if self._link is not None:
            self._link.close(leave=ended_well)
        self._footprints.close()
        if kind is None and self._local_rank == 0:
            for run in {self.name, os.environ.get("TORCHELASTIC_RUN_ID", self.name)}:
                clear_run(run)

    @property
    def had_saved(self) -> bool:
        """Whether this run has saved anything on this machine: then a restart must find a state."""
        return was_saved(self.name)

    @property
    def _keeps_state(self) -> bool:
        """One process per machine keeps images; of those, rank 0 writes to the lasting tiers."""
        return self._local_rank == 0

    @property
    def _restarts(self) -> str:
        return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")

    # --- training -------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Batch]:
        self._step_began_s = time.monotonic()
        while not self._is_done():
            for batch in self._data:
                self._alive("training")
                self._account.enter_step(self.step)
                yield batch
                # The loop has come back: this batch is trained.
                self._data.commit(batch)
                if batch.step.ends_step:
                    self._after_step(batch.step.batch_stop - batch.step.batch_start)
                    if self._is_done():
                        break
                self._alive("reading data")
                self._account.enter("waiting")
        self._finish()

    def report(self, **metrics: float) -> None:
        """Figures of the step being made (loss, tokens_per_second, …), for everyone who watches. Never waits."""
        self.metrics.update(metrics)

    def waited(self, seconds: float) -> None:
        """So much of the step being made was waiting for other ranks: who waits least is whom the others wait for."""
        self.metrics["sync_wait_s"] = seconds
        self._account.waited(seconds)

    def _is_done(self) -> bool:
        if self._max_steps is not None and self.step >= self._max_steps:
            return True
        return self._epochs is not None and self._data.epoch >= self._epochs

    def _total_steps(self) -> int:
        """How many steps training has altogether, as far as can be known beforehand."""
        sampler = self._data.sampler
        each, rest = divmod(sampler.total, sampler.global_batch_size)
        by_epochs = (each + (rest > 0 and not sampler.drop_last)) * (self._epochs or 0)
        limits = [limit for limit in (self._max_steps, by_epochs) if limit]
        return min(limits, default=0)

    def _after_step(self, samples: int) -> None:
        now_s = time.monotonic()
        self._account.made_step()
        self._step_s, self._step_began_s = now_s - self._step_began_s, now_s
        self.step += 1
        self._steps_here += 1
        self._footprints.leave(self.step, self.world_size)
        if self._steps_here == 1:
            self._first_step()
        self.metrics["step_time_s"] = self._step_s
        self.metrics["samples_per_second"] = samples / max(self._step_s, 1e-9)
        self.metrics["data_position"] = float(self._data.position)
        self._tell("training")
        self._account.enter("waiting")
        self._agree()
        self._account.enter("checkpoint")
        self._note_first_save()
        options = self.options
        if self._leaving:
            self._save_finally()
        elif self.step % options.save_every == 0:
            self._save(lasting=True)
        elif options.snapshot_every and self.step % options.snapshot_every == 0:
            self._save(lasting=False)
        if self._leaving:
            self._leave()
        self._account.enter("waiting")
        self._step_began_s = time.monotonic()

    def _agree(self) -> None:
        """Every half second or so all ranks ask each other whether one of them was told to leave."""
        if self._steps_here < self._next_agreement:
            return
        patience = max(1, min(1000, int(AGREE_EVERY_S / max(self._step_s, 1e-6))))
        stay, gap = smallest([0.0 if self._preemption.requested else 1.0, float(patience)])
        self._leaving = stay == 0.0
        self._next_agreement = self._steps_here + int(gap)

    def _leave(self) -> None:
        if self._manager is not None:
            self._manager.wait_pending(self.options.preemption_deadline_s)
        asked = self._preemption.requested
        who = "asked to leave" if asked else "others were asked to leave"
        log.info("%s: step %d is saved, ending", who, self.step)
        raise Preempted(asked=asked)

    def _finish(self) -> None:
        self._account.enter("checkpoint")
        if self._saved_step != self.step:
            self._save_finally()
        if self._manager is not None:
            self._manager.wait_pending()
        self._tell("idle")

    def _first_step(self) -> None:
        self._tracer.mark("stepped")
        if self.recovery is None or self.rank != 0:
            return
        self.recovery = replace(self.recovery, phases=self._tracer.phases())
        log.info("%s", self.recovery)
        if self._link is not None:
            self._link.recovered(self.recovery)

    def _save_finally(self) -> None:
        """The last save of this process waits for those before it, so that it is never skipped."""
        if self._manager is not None:
            self._manager.wait_pending(self.options.preemption_deadline_s)
        self._save(lasting=True)

    # --- saving and restoring -------------------------------------------------------------------------------

    def _save(self, *, lasting: bool) -> None:
        rng_states = {str(r): states for r, states in enumerate(gather(rng.capture()))}
        position = self._ledger.commit(durable=lasting)
        if lasting:
            self._saved_step = self.step
        if self._manager is None:
            return
        self._tell("checkpointing")
        state = self._state.capture(
            step=self.step, epoch=self._data.epoch, rng_states=rng_states, world_size=self.world_size
        )
        if not lasting and not self._fits(state):
            return
        handle = self._manager.save(
            state,
            self.step,
            self._data.epoch,
            position=position,
            tiers=None if lasting else ["MEMORY"],
        )
        if self._first is None and not self._first_is_noted:
            self._first = handle
        self._tell("training")

    def _fits(self, state: Mapping[str, Any]) -> bool:
        limit_bytes = self.options.snapshot_limit_bytes
        if limit_bytes is None:
            return True
        needed_bytes = tensor_bytes(state)
        if needed_bytes > limit_bytes:
            log.warning(
                "Cannot save snapshot: %.1fMB required, but only %.1fMB available; only lasting checkpoints are made",
                needed_bytes / 2**20,
                limit_bytes / 2**20,
            )
        return needed_bytes <= limit_bytes

    def _note_first_save(self) -> None:
        if self._first is None or not self._first.done():
            return
        if self._first.exception() is None:
            note_saved(self.name)
            self._first_is_noted = True
        self._first = None

    def _restore(self) -> None:
        """Find the newest state any machine has, and give it to every rank."""
        found = self._newest()
        offers = gather(_order(found))
        best = max(range(len(offers)), key=lambda r: (offers[r], -r))
        state: dict[str, Any] | None = None
        if any(offers[best]):
            if best == self.rank:
                state = self._load()
            state = broadcast_state(state, source=best)
        if state is None:
            self._describe_new_beginning()
            return
        self.restored = True
        self._state.restore(state, rank=self.rank)
        if state["position"] is None:
            log.warning("the checkpoint says nothing about data: it is read from its beginning")
        else:
            self._ledger.restore(state["position"])
        self.step = int(state["step"])
        self._describe_recovery(state)
        if self._on_restored is not None:
            self._on_restored(state)

    def _newest(self) -> CheckpointInfo | None:
        if self._manager is None:
            return None
        return self._manager.get_latest()

    def _load(self) -> dict[str, Any] | None:
        assert self._manager is not None
        try:
            restored = self._manager.restore()
        except (CheckpointNotFound, LoadFailed) as error:
            log.warning("no checkpoint could be restored, training starts anew: %s", error)
            return None
        return {
            **restored.state,
            "position": restored.info.data,
            "tier": restored.tier,
            "reasons": list(restored.reasons),
        }

    def _describe_recovery(self, state: Mapping[str, Any]) -> None:
        before = self._tracer.before
        self.recovery = Recovery(
            phases={},
            resumed_step=self.step,
            lost_steps=max(0, before.step - self.step) if before is not None else 0,
            tier=str(state["tier"]),
            world_before=int(state["world_size"]),
            world_after=self.world_size,
            reasons=tuple(state["reasons"]),
        )

    def _describe_new_beginning(self) -> None:
        """A crash before the first snapshot is a recovery too: it costs what was made until then."""
        before = self._tracer.before
        if before is not None:
            self.recovery = Recovery(
                phases={},
                resumed_step=0,
                lost_steps=before.step,
                tier="nowhere",
                world_before=before.world_size,
                world_after=self.world_size,
            )

    # --- telling --------------------------------------------------------------------------------------------

    def _tell(self, state: str) -> None:
        if self._link is not None:
            metrics = {**self.metrics, **self._account.totals()}
            self._link.status(state, step=self.step, epoch=self._data.epoch, metrics=metrics)

    def _alive(self, doing: str) -> None:
        if self._watchdog is not None:
            self._watchdog.alive(doing)


def _order(info: CheckpointInfo | None) -> tuple[int, float]:
    return (info.step + 1, info.created_at) if info is not None else (0, 0.0)
