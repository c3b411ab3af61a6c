"""`ElasticJob`: an ordinary training loop that outlives its machines.

    with strata.elastic(model=model, optimizer=optimizer, data=loader, checkpoints="runs/a", epochs=3) as job:
        for batch in job:
            loss = criterion(model(batch.data)) * batch.weight
            loss.backward()
            if batch.step.ends_step:
                optimizer.step()
                optimizer.zero_grad()

Entering restores the newest state that any machine or destination has, on every rank; iterating trains from the exact
next step. After each step the job saves by interval (shared memory often, destinations less often), keeps the ledger of
trained samples, informs the coordinator, and asks whether any rank was asked to stop. A batch counts as trained when the
optimizer has stepped on it: work that a crash, a `break` or an exception interrupts is neither saved nor in the ledger.

What is restored, saved, continued and given up is decided by `strata.core.jobs.job`; this module carries it out.
"""

from __future__ import annotations

import logging
import math
import os
import socket
import sys
import threading
import time
import uuid
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, overload

import torch
from torch.distributed.device_mesh import DeviceMesh

from strata.agent import torchrun_trap
from strata.agent.channel import AGENT_VARIABLE, KEEPS_IMAGES_VARIABLE
from strata.agent.leaving import write_outcome
from strata.agent.trace import (
    Footprints,
    GeneratorTrace,
    Recovery,
    Tracer,
    clear_run,
    generators,
    note_saved,
    was_saved,
)
from strata.backoff import Backoff
from strata.checkpoint import Author, CheckpointManager, Memory, Policy, SaveHandle
from strata.checkpoint.catalog.manifest import SHARDED, Manifest
from strata.checkpoint.catalog.naming import Stem, new_id, unique_stem
from strata.checkpoint.catalog.runs import RunClaim, launch_key, open_run
from strata.checkpoint.copying.staging import read_snapshot, release_mapped
from strata.checkpoint.destinations import Destination, open_stores, without_peers
from strata.checkpoint.errors import (
    CheckpointError,
    FinalSaveFailed,
    LoadFailed,
    RunInUse,
    SaveFailed,
    StateMismatch,
    Superseded,
)
from strata.checkpoint.finishing import UploadRecord
from strata.checkpoint.image.in_place import load_mapped
from strata.checkpoint.image.layout import Prepared
from strata.checkpoint.peers.link import PeerLink
from strata.checkpoint.peers.wire import PeerError, parse_rate
from strata.checkpoint.pipeline import OnError
from strata.checkpoint.sharded.plan import Marked
from strata.checkpoint.sharded.publishing import Board, GroupBoard, OwnBoard
from strata.core.faults.failures import EXIT_AGAIN, Failure, WorkerError
from strata.core.jobs.handover import Outcome, choose_save
from strata.core.jobs.job import (
    AwaitSave,
    Finished,
    JobProtocol,
    Load,
    LoadReport,
    LoadShards,
    LookAgain,
    Offer,
    Ready,
    Resume,
    Save,
    SaveEnded,
    Skip,
    StartAnew,
    Stop,
    Survey,
)
from strata.core.jobs.live import Complete, judge
from strata.core.jobs.peers import PEER
from strata.core.jobs.replicas import Odd, Undecided
from strata.core.jobs.roster import Changes, Entrant, Roster, enter
from strata.core.pauses import FIRST_DELAY_S, LONGEST_DELAY_S
from strata.core.telemetry.run_details import packed
from strata.core.text import counted
from strata.core.types import CheckpointId
from strata.data.errors import DataError
from strata.data.loading.adapt import AnyData, as_elastic_loader
from strata.data.loading.commits import DataLedger
from strata.data.loading.loader import ElasticLoader
from strata.data.loading.steps import Batch
from strata.devices import device_of
from strata.errors import StrataError, require_linux
from strata.processes import machine_token
from strata.shared_memory import folder_name, memory_root, note_run, own_rack
from strata.sinks import Sink, SinkRun
from strata.stores.local import LocalStore
from strata.stores.protocol import NoSpace, NotFound, Store, StoreError
from strata.torch_compat.groups import outlive_reducers, settle_at_exit
from strata.training import evaluation, live, rng
from strata.training.data_world import DataWorld
from strata.training.exchange import broadcast_state, gather, is_distributed, rank_and_world, smallest
from strata.training.link import CoordinatorLink, given_worker_id, open_link
from strata.training.metrics.account import TimeAccount
from strata.training.metrics.metric_log import MetricLog, Metrics
from strata.training.metrics.run_details import gathered
from strata.training.metrics.utilization import gradient_norm, model_flops_utilization, own_peak_flops
from strata.training.mixture_watch import MixtureWatch
from strata.training.peer_copies import PeerCopies, machines_with
from strata.training.preemption import Preemption
from strata.training.replicas import Replicas
from strata.training.sharded.kinds import refuse_unsupported
from strata.training.sharded.shards import is_sharded
from strata.training.sharded.slots import (
    drop_left_over,
    left_over_images,
    local_world_size,
    own_slot,
    slot_name,
)
from strata.training.state import Stateful, TrainingState, plain_optimizer, tensor_bytes
from strata.training.watchdog import Policy as HangPolicy
from strata.training.watchdog import Watchdog
from strata.worker.outbox import MetricOutbox

if TYPE_CHECKING:
    from strata.training.sharded.job import ShardedJob

log = logging.getLogger("strata.training")

AGREE_EVERY_S = 0.5
AWAIT_S = 2.0
"""Ranks that wait for the final save report that to each other this often: no collective waits long enough to time out."""
OFFERS = 20
"""How many checkpoints of each destination are reported to the other ranks: the newest."""
UNSTEPPED_LIMIT = 1000
"""After so many batches without a step of the optimizer, it is taken to be the wrong one."""
MEMORY_RUN = "memory-"
"""How the identities of runs begin that have no destination."""
RESCUE_S = 20.0
"""How long a survivor may take to save its live state, and how long it waits for an image to save it to."""
SHOWN_METRICS = ("loss", "tokens_per_second")
"""What heartbeats carry of what is logged, from every rank."""
REPAIRS = 3
"""A rank whose copy of the state had to be replaced so often ends."""
RECENT_S = 600.0
"""A process that died longer ago than this was not recovered from: the run was resumed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticOptions:
    """How often a job saves, and how it behaves when things go wrong."""

    save_every: int = 500
    """Steps between durable checkpoints; the final state is always saved."""
    snapshot_every: int = 50
    """Steps between snapshots in shared memory, which is the most work a crash loses. 0 makes no snapshots."""
    snapshot_count: int = 2
    """Number of snapshots to keep in memory. With one, there is none while the next is made; a sharded state needs two."""
    keep_count: int = 3
    """Number of durable checkpoints to keep."""
    wait_for_saves: bool = False
    """Continue only when each save is complete at every destination."""
    snapshot_limit_bytes: int | None = None
    """A state larger than this makes no snapshots between its durable checkpoints; for a sharded state, the largest part of
    a rank counts."""
    memory_root: str | os.PathLike[str] | None = None
    """Where snapshots live; by default `STRATA_MEMORY_ROOT`, else shared memory, else a disk where that is too small."""
    peer_rate: str = "2GB/s"
    """Maximum rate at which snapshots are sent to other machines' memory, if `checkpoints` names `peer`."""
    on_error: OnError = "warn"
    """What to do when a save fails: warn, fail or retry. The final state must reach every destination in any case."""
    retries: int = 3
    retry_delay_s: float = 5.0
    unreachable_timeout_s: float = 60.0
    """How long the job waits at its start for a destination that does not answer."""
    preemption_deadline_s: float = 25.0
    """Time between SIGTERM or Ctrl-C and the exit, including the final checkpoint."""
    hang_timeout_s: float = 0.0
    """A rank that completes no step for this long is reported with its stacks. 0 disables the watchdog."""
    hang_policy: HangPolicy = "warn"
    compare_every: int = 0
    """Steps between comparisons of the ranks' parameters and optimizer states, which are also compared before every save: a
    corrupted copy is found and replaced. 0 disables it. Not for sharded state, of which there is only one copy."""
    commit_on: Literal["optimizer_step", "batch"] = "optimizer_step"
    """When a batch counts as trained: when the optimizer has stepped on it, or (for optimizers of other libraries,
    whose steps cannot be observed) when the loop asks for the next batch."""

    log_gradient_norm: bool = False
    """Log the norm of the gradients before each step as `grad_norm`."""
    flops_per_token: float = 0.0
    """Floating-point operations of a forward and backward pass for one token, about 6 × parameters. With `tokens` that the loop
    reports, `mfu` is logged: the share of the devices' peak. 0: not known."""
    peak_flops: float = 0.0
    """Peak floating-point operations of one device per second. 0: looked up by name for common GPUs."""

    def __post_init__(self) -> None:
        for name in ("flops_per_token", "peak_flops"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} ({getattr(self, name)!r}) must be a number that is not negative")
        for name, least in (
            ("save_every", 1),
            ("snapshot_every", 0),
            ("snapshot_count", 1),
            ("keep_count", 1),
            ("compare_every", 0),
        ):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise ValueError(f"{name} ({value!r}) must be a whole number of at least {least}")
        for name in ("unreachable_timeout_s", "preemption_deadline_s", "hang_timeout_s"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} ({getattr(self, name)!r}) must not be negative")
        try:
            parse_rate(self.peer_rate)
        except ValueError as error:
            raise ValueError(f"peer_rate: {error}") from None
        _policy(self)
        if self.hang_policy not in ("warn", "restart"):
            raise ValueError(f"hang_policy ({self.hang_policy!r}) must be 'warn' or 'restart'")
        if self.commit_on not in ("optimizer_step", "batch"):
            raise ValueError(f"commit_on ({self.commit_on!r}) must be 'optimizer_step' or 'batch'")


def _policy(options: ElasticOptions) -> Policy:
    """Raises `ValueError` where the options make none."""
    return Policy(
        on_error=options.on_error,
        retries=options.retries,
        retry_delay_s=options.retry_delay_s,
        when_full="skip",  # A slow disk costs a snapshot, with a reason, and never a step.
    )


class Preempted(SystemExit):
    """A rank was asked to stop, and the job has saved its state.

    Ends the process: with status 0 if it was this one, else with one that makes torchrun start it again, in the world
    that is left.
    """

    def __init__(self, *, asked: bool) -> None:
        super().__init__(0 if asked else EXIT_AGAIN)


class ReplicasDiffer(StrataError):
    """Copies of the state that must be equal are not, and it is not known which is right."""


class ReplicaDamaged(StrataError):
    """This rank's copy of the state was wrong again and again: its machine is not to be trusted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Opened:
    """What rank 0 found out about the run, for all ranks."""

    run: str = ""
    destination: str = ""
    generation: int = 0
    last_known_step: int = 0
    board: str = ""
    """What the ranks of this start call their board."""
    destinations: tuple[str, ...] = ()
    """The URLs of its destinations, where another process of this user can open them by those."""
    error: StrataError | None = None


class ElasticJob:
    """See `strata.elastic`."""

    def __init__(
        self,
        *,
        model: torch.nn.Module,
        optimizer: Stateful,
        data: AnyData,
        global_batch_size: int | None = None,
        checkpoints: Destination | Sequence[Destination] | None = None,
        scheduler: Stateful | None = None,
        extra: Mapping[str, Stateful] | None = None,
        options: ElasticOptions | None = None,
        epochs: int | None = None,
        max_steps: int | None = None,
        mesh: DeviceMesh | None = None,
        job: str | None = None,
        coordinator: str | None = None,
        sinks: Sequence[Sink] = (),
        stem: Stem = unique_stem,
        tracer: Tracer | None = None,
        data_path: str = "",
        data_format: str = "samples",
        data_metadata: Mapping[str, str] | None = None,
        config: Mapping[str, Any] | None = None,
        on_restored: Callable[[Mapping[str, Any]], None] | None = None,
    ) -> None:
        require_linux()
        if epochs is None and max_steps is None:
            raise ValueError("pass epochs, max_steps or both, so that training ends")
        loader = as_elastic_loader(data, global_batch_size=global_batch_size)
        self.options = options or ElasticOptions()
        self.name = job or os.environ.get("STRATA_JOB_ID") or _launch_name() or "default"
        self.rank, self.world_size = rank_and_world()
        self.step = 0
        """Optimizer steps made, in this and all earlier lives of the job."""
        self.run = ""
        """The run's identity, which lives with its durable checkpoints."""
        self.generation = 0
        """Which start of the run this is."""
        self.recovery: Recovery | None = None
        """What this process's start recovered from, if it did."""
        self.restored = False
        """Whether training continues from a checkpoint."""
        self.metrics: dict[str, float] = {}
        """Shown with this worker everywhere; `report` adds to it."""
        self.live_reason = ""
        """In a recoverable run, once it was left with an error: why its live state was saved, or was not."""
        # A task's name is given by the coordinator, not by the user: another task may continue its run.
        self._given_name = job if job and job != os.environ.get("STRATA_TASK_ID") else ""
        self._data = loader
        self._data_place = (data_path or loader.dataset, data_format, dict(data_metadata or {}))
        self._config = dict(config or {})
        self._evaluated: dict[int, ElasticLoader] = {}
        """Loaders of evaluation data, by the identity of what was given,"""
        self._kept_data: list[AnyData] = []
        """which is kept, so that no other object gets its identity."""
        self._epochs = epochs
        self._max_steps = max_steps
        outlive_reducers(model)
        settle_at_exit()
        optimizer, beside = plain_optimizer(optimizer)
        self._state = TrainingState(
            model=model, optimizer=optimizer, scheduler=scheduler, extra={**beside, **(extra or {})}
        )
        self._on_restored = on_restored
        self._peer_copies, self._checkpoints = without_peers(checkpoints)
        """How many copies in other machines' memory are wanted, and the destinations."""
        self._peers: PeerCopies | None = None
        self._machines: tuple[str, ...] = ()
        """Of all ranks."""
        self._has_old_copies = False
        """The agent may have copies that only earlier generations could need."""
        self._stem = stem
        self._memory_root = Path(root) if (root := self.options.memory_root) else None
        self._tracer = tracer or self._begin_trace()
        self._account = self._begin_account()
        self._changes = Changes(roster=Roster())
        """Who the ranks are, beside those before."""
        self._data_world = DataWorld(mesh)
        self._ledger = DataLedger(loader, gather=self._data_world.gather)
        self._local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self._coordinator = coordinator
        self._sinks = tuple(sinks)
        for sink in self._sinks:
            sink.check()
        self._launch = launch_key()
        self._stores: list[Store] = []
        self._tokens: float | None = None
        self._gradient_norm: torch.Tensor | None = None
        self._norm_hook: Any = None
        self._peak_flops: float | None = None
        self._protocol = JobProtocol(
            run="",
            save_every=self.options.save_every,
            snapshot_every=self.options.snapshot_every,
            patience_s=self.options.unreachable_timeout_s,
        )
        self._claim: RunClaim | None = None
        self._manager: CheckpointManager | None = None
        self._link: CoordinatorLink | None = None
        self._metric_log: MetricLog | None = None
        self._mixture: MixtureWatch | None = None
        """Where data is a mixture: what is asked about its weights."""
        self._has_changed_data = False
        """What the loader has read ahead is not what comes next any longer."""
        self._is_in_step = False
        """Whether the loop has a batch: what it logs belongs to the step being made."""
        self._reported: dict[str, float] = {}
        """By `report`, for the step being made."""
        self._lr: Any = None
        """Of the first group of parameters, in the last step of the optimizer."""
        self._covering: deque[SaveHandle] = deque()
        """Saves under way; a complete one covers what was logged up to its step."""
        self._watchdog: Watchdog | None = None
        self._preemption: Preemption | None = None
        self._footprints: Footprints | None = None
        self._step_hook: Any = None
        self._live_run: live.LiveRun | None = None
        self._live: live.LiveState | None = None
        self._replicas: Replicas | None = None
        self._distrust = ""
        """Why this rank's state must not be saved."""
        self._opened = _Opened()
        self._is_sharded = is_sharded(self._state)
        """Every rank keeps its own part of the state."""
        self._shards: ShardedJob | None = None
        self._largest_part_bytes = 0
        """Of all ranks' parts of the state, when they were last looked at."""
        self._has_left_over = False
        """There may be images in memory that no process here takes over."""
        self._resumed_from: CheckpointId | None = None
        self._batches: weakref.ref[Generator[Batch]] | None = None
        self._is_closed = False
        self._saving: dict[CheckpointId, SaveHandle] = {}
        """Durable saves under way: rank 0 writes them and reports the outcome of each to the others."""
        self._durable: list[tuple[str, Manifest]] = []
        """What the destinations had when this job started, each with where."""
        self._first: SaveHandle | None = None
        """The first save, until it is complete; then the run is known to have a state."""
        self._first_is_noted = False
        self._snapshot_step = -1
        self._durable_step = -1
        """The newest that this rank has written to every destination."""
        self._durable_s: float | None = None
        """How long the last durable save took."""
        self._newest_save: SaveHandle | None = None
        self._last_save: Literal["durable", "memory"] = "durable"
        """What is saved before ranks leave."""
        self._next_agreement = 1
        self._steps_here = 0
        self._has_stepped = False
        self._step_began_s = 0.0
        self._step_s = 0.0
        self._taken: list[Batch] = []
        """Handed to the loop and not committed: the optimizer has not stepped on them."""
        self._optimizer_steps = 0
        self._steps_seen = 0
        self._leaving = False
        self._everyone_leaves = False
        self._has_finished = False

    # --- entering and leaving -------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        self._tracer.mark("ready")
        self._tracer.mark("joined")
        self._data.check_trainable()
        if self._max_steps is None and self._data.sampler.is_endless:
            raise ValueError("the sources of this mixture repeat, so it never ends: pass max_steps")
        self._data_world.join(self._data)
        self._data.commit_explicitly()
        self._preemption = Preemption(
            deadline_s=self.options.preemption_deadline_s, on_late=self._note_too_late
        )
        try:
            self._start()
        except BaseException:
            self._close(failed=True)
            raise
        if self._live_run is not None:
            self._live_run.attach(self)
        return self

    def _begin_trace(self) -> Tracer:
        run = live.current()
        if run is None or run.reentry is None:
            return Tracer.begin(self.name, root=self._memory_root)
        times = run.reentry
        return Tracer.begin_again(
            self.name, noticed_s=times.noticed_s, left_s=times.left_s, root=self._memory_root
        )

    def _begin_account(self) -> TimeAccount:
        before, kept = self._tracer.before, self._kept
        if kept is None or before is None:
            return TimeAccount(before)
        kept.account.resume(before)
        return kept.account

    @property
    def _kept(self) -> live.Presence | None:
        """In a process that has survived: what it was before."""
        run = live.current()
        return run.presence if run is not None else None

    def _start(self) -> None:
        refuse_unsupported(self._state.model, self._state.optimizer, self._state.extra)
        if (trap := torchrun_trap.warning()) is not None and self.rank == 0:
            announce(logging.WARNING, trap)
        if not self._keeps_state:
            release_mapped()  # Of an earlier entry as another rank: the process that keeps the images now has a mapping of its own.
        opened, entrants = self._open_run()
        self._opened = opened
        self.run = self._protocol.lineage.run = opened.run
        if self.name in ("default", "none"):
            self.name = f"{opened.destination or 'job'}-{self.run[:6]}"
        if self._tracer.find_before(self._memory_name, root=self._memory_root, within_s=RECENT_S):
            self._account = self._begin_account()
        self.metrics["total_steps"] = float(self._total_steps())
        self._changes = enter(entrants, job=self.name)
        self._open_link(opened)
        self._report("recovering" if self._restarts != "0" or self._changes.survived else "loading")
        if self._keeps_state:
            self._peers = self._open_peers()
            self._manager = self._open_manager(opened)
            if isinstance(self._state.optimizer, torch.optim.Optimizer):
                self._manager.guard(self._state.optimizer)
        self._restore(opened)
        self._watch_mixture()
        self._tracer.mark("loaded")
        self._open_metric_log()
        if self.rank == 0 and self._manager is not None:
            # What dead writers left, beside training: nothing waits for it.
            threading.Thread(target=self._manager.remove_orphans, name="strata-orphans", daemon=True).start()
        note_run(self.name, self._memory_name, root=self._memory_root)
        self._footprints = Footprints(self.name, self._memory_name, rank=self.rank, root=self._memory_root)
        self._step_hook = self._watch_optimizer()
        self._peak_flops = self.options.peak_flops or own_peak_flops()
        self._watch_live_state()
        self._watch_replicas()
        if self.options.hang_timeout_s > 0:
            self._watchdog = Watchdog(
                timeout_s=self.options.hang_timeout_s,
                policy=self.options.hang_policy,
                name=f"rank {self.rank} of job '{self.name}'",
                before_end=self._link.flush_logs if self._link is not None else None,
                on_hang=self._report_hang,
            )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        batches = self._batches() if self._batches is not None else None
        if kind is None and batches is not None:  # It is still referenced, so `break` did not close it.
            batches.close()
        if kind is None and not self._has_finished:  # The loop ended by `break`, or never started.
            try:
                self._finish()
            except BaseException:
                self._close(failed=True)
                raise
        self._close(failed=not (kind is None or kind is Preempted), left=kind is Preempted)

    def _close(self, *, failed: bool, left: bool = False) -> None:
        """Let go of everything. After a failure nothing is waited for: this process will be started again, and finds
        its newest snapshot in memory; in a recoverable run, that of the step it had reached."""
        self._is_closed = True
        if failed and self._live_run is not None:
            self._rescue(self._live_run)
        if self._norm_hook is not None:
            self._norm_hook.remove()
        if self._step_hook is not None:
            self._step_hook.remove()
        if self._watchdog is not None:
            self._watchdog.close()
        if self._manager is not None:
            if failed:
                self._manager.abandon(stay_mapped=self._live is not None)
            else:
                self._manager.close(keep_memory=left and not self._everyone_leaves)
        if self._peers is not None:
            if not failed and (not left or self._everyone_leaves) and self._is_first_here:
                self._peers.forget(self.run, self.generation)
            self._peers.close()
        if self._claim is not None:
            self._claim.release(ended=not failed and not (left and not self._everyone_leaves))
        self._note_covered()
        if self._metric_log is not None:
            self._metric_log.close(failed=failed)
        if self._mixture is not None:
            self._mixture.close()
        self._close_link(failed=failed)
        if self._footprints is not None:
            self._footprints.close()
        if self._live is not None:
            self._live.close()
        if self._preemption is not None:
            self._preemption.close()
        if not failed and (not left or self._everyone_leaves) and self._is_first_here:
            if self._has_left_over:
                self._drop_left_over()
            for run in {self.name, self._memory_name, os.environ.get("TORCHELASTIC_RUN_ID", self.name)}:
                clear_run(run, root=self._memory_root)
        if self._live_run is not None:
            self._live_run.detach(self)
            self._live_run = None
            if failed and self._preemption is not None and self._preemption.number is not None:
                # Who is asked to leave while it leaves a generation enters no other.
                os.kill(os.getpid(), self._preemption.number)

    @property
    def had_saved(self) -> bool:
        """Whether this run has saved anything on this machine: then a restart must find a checkpoint."""
        return was_saved(self._memory_name, root=self._memory_root)

    @property
    def _keeps_state(self) -> bool:
        """One process per machine keeps images; of those, rank 0 writes to the destinations. Of a sharded state, every rank does
        both with its part."""
        return self._is_sharded or self._is_first_here

    @property
    def _is_first_here(self) -> bool:
        """Of this machine's ranks. In a recoverable run that need not be the one with the lowest number."""
        return os.environ.get(KEEPS_IMAGES_VARIABLE, str(int(self._local_rank == 0))) == "1"

    @property
    def is_sharded(self) -> bool:
        """Whether every rank keeps its own part of the state."""
        return self._is_sharded

    @property
    def _restarts(self) -> str:
        return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")

    @property
    def _memory_name(self) -> str:
        """What the run is called in this machine's memory."""
        return f"run-{self.run}"

    # --- who this run is ------------------------------------------------------------------------------------

    def _open_run(self) -> tuple[_Opened, list[Entrant]]:
        """Rank 0 opens the destinations, finds out whose they are and claims the next generation, for all ranks; and these report
        who they are."""
        mine = self._open_destinations() if self.rank == 0 else None
        everyone = gather((mine, self._entrant()))
        opened = everyone[0][0]
        assert opened is not None
        if opened.error is not None:
            raise opened.error
        if self._is_sharded:
            self._open_stores_of_others()
        return opened, [entrant for _, entrant in everyone]

    def _entrant(self) -> Entrant:
        run, kept = live.current(), self._kept
        if run is None or kept is None:
            return Entrant(given=given_worker_id(), host=socket.gethostname())
        cause = run.reentry.reason if run.reentry is not None else ""
        return Entrant(name=kept.name, left=kept.roster, cause=cause, host=socket.gethostname())

    def _open_stores_of_others(self) -> None:
        """Every rank writes and reads its own part."""
        error: StrataError | None = None
        try:
            if self.rank:
                self._stores = open_stores(self._checkpoints)
        except StrataError as refused:
            error = refused
        for found in gather(error):
            if found is not None:
                raise found

    def _open_destinations(self) -> _Opened:
        try:
            self._stores = open_stores(self._checkpoints)
            if not self._stores:
                return _Opened(run=self._identity_in_memory(), board=uuid.uuid4().hex)
            record = self._patiently(lambda: open_run(self._stores, name=self._given_name))
            self._claim = self._patiently(lambda: RunClaim.take(self._stores, launch=self._launch))
        except StrataError as error:
            return _Opened(error=error)
        return _Opened(
            run=record.run,
            destination=self._stores[0].url.rstrip("/").rpartition("/")[2],
            generation=self._claim.generation,
            last_known_step=self._claim.last_known_step,
            board=uuid.uuid4().hex,
            destinations=tuple(store.url for store in self._stores),
        )

    def _patiently(self, attempt: Callable[[], Any]) -> Any:
        """Ask a destination that does not answer again, for as long as the options allow."""
        backoff = Backoff(
            first_s=FIRST_DELAY_S, longest_s=LONGEST_DELAY_S, budget_s=self.options.unreachable_timeout_s
        )
        while True:
            try:
                return attempt()
            except NoSpace:
                raise  # It has answered.
            except StoreError as error:
                if (pause_s := backoff.pause_s()) is None:
                    raise _unreachable([str(error.message)]) from error
                announce(
                    logging.WARNING,
                    f"a destination does not answer, retrying in {pause_s:.1f} s: {error.message}",
                )
            time.sleep(pause_s)

    def _identity_in_memory(self) -> str:
        """A run that keeps its state in memory alone is known by the name it was given, else by its launch's, else by what
        launched it."""
        launched = f"torchrun:{name}" if (name := _launch_name()) else self._launch
        return f"{MEMORY_RUN}{self._given_name or launched}"

    def _report_hang(self, error: WorkerError) -> None:
        if self._link is not None:
            self._link.hangs(
                Failure(
                    rank=self.rank,
                    host=socket.gethostname(),
                    pid=os.getpid(),
                    gpu=device_of(self._local_rank),
                    at_s=time.time(),
                    error=error,
                )
            )

    def _open_link(self, opened: _Opened) -> None:
        run, kept = live.current(), self._kept
        name = self._changes.roster.names[self.rank]
        if kept is not None and not kept.continues(self.name, self.run):
            kept.close()
        if kept is not None and kept.link is not None:
            self._link = kept.link
            self._link.continues(generation=opened.generation)
        else:
            self._link = open_link(
                self._coordinator,
                job=self.name,
                rank=self.rank,
                worker_id=name,
                run_id=self.run,
                generation=opened.generation,
                metadata={
                    "restarts": self._restarts,
                    "pid": str(os.getpid()),
                    "state": "sharded" if self._is_sharded else "replicated",
                    "rack": own_rack(),
                },
            )
        if run is not None:
            run.presence = live.Presence(
                job=self.name,
                run=self.run,
                name=name,
                roster=self._changes.roster,
                account=self._account,
                link=self._link,
            )
        if self._link is not None and self.rank == 0 and self._data.sampler.is_bounded:
            path, kind, metadata = self._data_place
            self._link.describe_data(self._data.sampler, path, kind, metadata)

    def _close_link(self, *, failed: bool) -> None:
        """A process that may enter its job again stays the worker that it is."""
        kept = self._kept
        if self._link is None or (failed and kept is not None and kept.link is self._link):
            return
        # A process that enters again at once does not wait for the coordinator.
        self._link.close(leave=not failed, deliver=self._live_run is None)
        if kept is not None:
            kept.link = None

    def _open_metric_log(self) -> None:
        """Rank 0 logs for all, where a coordinator or a sink takes what it logs."""
        if self.rank != 0 or (self._link is None and not self._sinks):
            return
        outbox = None
        if self._link is not None:
            outbox = MetricOutbox(
                generation=self.generation,
                started_ms=int(time.time() * 1000),
                resumed_step=self.step,
                details=self._details(),
            )
            self._link.send_metrics(outbox)
        self._metric_log = MetricLog(
            run=SinkRun(run=self.run, job=self.name, generation=self.generation, resumed_step=self.step),
            outbox=outbox,
            sinks=self._sinks,
            step=lambda: self.step,
            folders=[store.root for store in self._stores if isinstance(store, LocalStore)],
            on_latest=self.metrics.__setitem__,
        )

    def _watch_mixture(self) -> None:
        """Weights that were changed after the checkpoint was made are changed again, before anything is read."""
        if self._data.sampler.mixture is None:
            return
        self._mixture = MixtureWatch(
            self._data.sampler, job=self.name, run=self.run, rank=self.rank, coordinator=self._coordinator
        )
        self._mixture.settle()

    def _details(self) -> bytes:
        stores = [store.url for store in self._stores]
        ends = {"epochs": self._epochs, "max_steps": self._max_steps}
        options = {**asdict(self.options), **ends, "checkpoints": stores}
        return packed(gathered(world_size=self.world_size, config=self._config, options=options))

    def _open_manager(self, opened: _Opened) -> CheckpointManager:
        options = self.options
        board: Board | None = None
        if self._is_sharded:
            board = GroupBoard(opened.board) if is_distributed() else OwnBoard()
        return CheckpointManager(
            self._stores,
            options.keep_count,
            memory=Memory(
                job=self._images_name,
                images=options.snapshot_count,
                root=options.memory_root,
                launch=self._launch,
                record=self._upload_record(opened),
            ),
            policy=_policy(options),
            author=Author(
                worker=f"{self.name}-rank{self.rank}",
                world_size=self.world_size,
                generation=opened.generation,
                run=self.run,
            ),
            stem=self._stem,
            observer=self._link if self.rank == 0 else None,
            admit=self._claim.admit if self._claim is not None else None,
            board=board,
            on_kept=self._peers.kept if self._peers is not None else None,
        )

    def _open_peers(self) -> PeerCopies | None:
        """Where copies on other machines are wanted: what this rank has to do with them."""
        if not self._peer_copies:
            return None
        link = PeerLink.open()
        reason = "this process was not started by `strata torchrun` or `strata run`"
        if link is not None:
            try:
                if link.want(self._machine):
                    return PeerCopies(
                        link,
                        copies=self._peer_copies,
                        rate_bytes=parse_rate(self.options.peer_rate),
                        slot=f"{self._machine}/{self._images_name}",
                        holders=self._holders,
                    )
                reason = (
                    "the run has one machine: its agents use neither a coordinator nor etcd (--rdzv-endpoint)"
                )
            except PeerError as error:
                reason = error.message
            link.close()
        if self.rank == 0:
            announce(logging.WARNING, f"no snapshot is copied to another machine's memory: {reason}")
        return None

    def _holders(self, manifest: Manifest) -> tuple[str, ...] | None:
        """The machines that have made the same snapshot of the same part; None where another rank reports it."""
        if not self._is_sharded:
            return tuple(dict.fromkeys(self._machines)) if self.rank == 0 else None
        names = self._sharded.part_names
        if names.index(names[self.rank]) != self.rank:
            return None
        return machines_with(names[self.rank], names, self._machines)

    def _upload_record(self, opened: _Opened) -> bytes:
        """What the agent of this machine needs to finish the work of its workers; nothing where there is no agent that could."""
        agent = os.environ.get(AGENT_VARIABLE, "")
        if not agent or not opened.destinations:
            return b""
        record = UploadRecord(
            agent=agent,
            job=self.name,
            worker=self._changes.roster.names[self.rank],
            run=self.run,
            destinations=opened.destinations,
        )
        return record.encode()

    @property
    def _images_name(self) -> str:
        if self._is_sharded:
            return slot_name(self._memory_name, own_slot())
        return folder_name(self._memory_name)

    # --- restoring ------------------------------------------------------------------------------------------

    def _restore(self, opened: _Opened) -> None:
        """Carry out what the protocol says until there is a state to train from."""
        instruction: LookAgain | Load | LoadShards | Resume | StartAnew | Stop
        instruction = LookAgain(after_s=0.0, reason="")
        state: Any = None
        while isinstance(instruction, LookAgain):
            if instruction.reason and self.rank == 0:
                announce(
                    logging.WARNING,
                    f"looking for checkpoints again in {instruction.after_s:g} s: {instruction.reason}",
                )
            time.sleep(instruction.after_s)
            instruction = self._protocol.surveyed(self._exchange_surveys(opened))
            if isinstance(instruction, Load | LoadShards | StartAnew):
                self._fence()
            while isinstance(instruction, Load | LoadShards):
                state, report = self._load(instruction)
                instruction = self._protocol.loaded(gather(report))
        if isinstance(instruction, Stop):
            raise _error_of(instruction)
        self.generation = self._protocol.generation
        if self._link is not None and self.rank == 0 and self._manager is not None:
            self._link.generation = self.generation
            present = list(dict.fromkeys(manifest.checkpoint_id for _, manifest in self._durable))
            self._link.reconcile(present, infos=self._manager.all_checkpoints())
        if isinstance(instruction, StartAnew):
            self._start_anew(instruction, opened)
        else:
            assert isinstance(instruction, Resume)
            self._resume(instruction, state, opened)

    def _exchange_surveys(self, opened: _Opened) -> list[Survey]:
        error: StrataError | None = None
        survey = Survey(machine=self._machine)
        try:
            survey = self._survey(opened)
        except StrataError as refused:
            error = refused
        everyone = gather((survey, error))
        for _, found in everyone:
            if found is not None:
                raise found
        self._machines = tuple(survey.machine for survey, _ in everyone)
        return [survey for survey, _ in everyone]

    @property
    def _machine(self) -> str:
        """Ranks with the same one share memory."""
        return f"{machine_token()}:{memory_root(self._memory_root)}"

    def _survey(self, opened: _Opened) -> Survey:
        if self._manager is None:
            return Survey(machine=self._machine)
        self._check_memory_is_free()
        surveyed = self._manager.survey(tiers=None if self.rank == 0 or not self._is_sharded else ["MEMORY"])
        self._durable = [(each.where, each.manifest) for each in surveyed.copies if each.distance]
        copies = [(each.manifest, each.tier, each.where, each.distance) for each in surveyed.copies]
        if self._is_sharded and self._is_first_here:
            left = left_over_images(
                self._memory_name, root=self._memory_root, local_world_size=local_world_size()
            )
            self._has_left_over = bool(left)
            copies += [(manifest, "MEMORY", path, 0) for path, manifest in left]
        offers = [
            _offer(manifest, tier=tier, where=where, distance=distance)
            for manifest, tier, where, distance in copies
        ]
        if self._peers is not None and self._is_first_here:
            kept = self._peers.offers(self.run, generation=opened.generation, everywhere=self.rank == 0)
            self._has_old_copies = bool(kept)
            offers += kept
        return Survey(
            machine=self._machine,
            offers=tuple(_newest_of_each(offers)),
            unreachable=tuple(str(error.message) for error in surveyed.unreachable),
            unreadable=surveyed.unreadable,
            removed=surveyed.removed,
            destinations=tuple(store.url for store in self._stores),
            generation=opened.generation if self.rank == 0 else 0,
            fences=self._claim.fences if self._claim is not None else (),
        )

    def _check_memory_is_free(self) -> None:
        """A run in memory alone has no destination that could say that another job lives in it."""
        assert self._manager is not None
        for holder in self._manager.holders() if self.run.startswith(MEMORY_RUN) else ():
            if holder.launch != self._launch:
                raise RunInUse(
                    where=f"the memory of run '{self._given_name or self.run}'", holder=str(holder)
                )

    def _fence(self) -> None:
        """From now on nothing that an earlier generation publishes counts."""
        if self._manager is not None:
            self._manager.fence(self._protocol.generation)
        if self._peers is not None and self._is_first_here:
            self._peers.fence(self.run, self._protocol.generation)
        if self._claim is not None:
            self._claim.fence(self._protocol.fence)

    def _load(self, load: Load | LoadShards) -> tuple[Any, LoadReport]:
        """This rank's part: load its copy, map its machine's, or wait for what the others say."""
        self._alive("loading")
        if isinstance(load, LoadShards):
            return self._load_shards(load)
        if self._is_sharded:
            return None, LoadReport(error=_REPLICATED, fault="state")
        try:
            if self.rank == load.source and load.offer.tier == PEER:
                assert self._peers is not None
                state, manifest = self._peers.load(
                    load.offer, into=self._state.targets(), may_tear=load.may_tear
                )
                return {**state, "position": manifest.data}, LoadReport()
            if self.rank == load.source:
                assert self._manager is not None
                restored = self._manager.restore_copy(
                    load.offer.checkpoint_id,
                    where=load.offer.where,
                    into=self._state.targets(),
                    tear_ok=load.may_tear,
                )
                return {**restored.state, "position": restored.info.data}, LoadReport()
            if self.rank in load.mapped:
                image = load.images[load.mapped.index(self.rank)]
                found = read_snapshot(Path(image).parent)
                if found is None or found.manifest.checkpoint_id != load.offer.checkpoint_id:
                    return None, LoadReport(error="the image no longer exists", fault="copy")
                # Its owner verifies it meanwhile; where nothing may be torn, each rank looks for itself.
                state = load_mapped(
                    found.path, found.manifest, into=self._state.targets(), verify=not load.may_tear
                )
                return {**state, "position": found.manifest.data}, LoadReport()
        except StateMismatch as error:
            return None, LoadReport(error=error.message, fault="state")
        except LoadFailed as error:
            is_away = any(
                isinstance(cause, StoreError) and not isinstance(cause, NotFound) for cause in error.causes
            )
            return None, LoadReport(error=error.message, fault="away" if is_away else "copy")
        except (StoreError, CheckpointError, PeerError, OSError) as error:
            return None, LoadReport(error=getattr(error, "message", str(error)), fault="copy")
        return None, LoadReport()

    def _load_shards(self, load: LoadShards) -> tuple[Any, LoadReport]:
        stores = self._stores or open_stores(self._checkpoints)
        wanted = load.offer.checkpoint_id
        return self._sharded.load(
            load,
            manager=self._manager if self._is_sharded else None,
            stores=stores,
            manifests={where: each for where, each in self._durable if each.checkpoint_id == wanted},
            peers=self._peers,
        )

    @property
    def _sharded(self) -> ShardedJob:
        if self._shards is None:
            from strata.training.sharded.job import ShardedJob  # Imports much that other jobs never need.

            self._shards = ShardedJob(
                self._state,
                rank=self.rank,
                world_size=self.world_size,
                machine=self._machine,
                data_world=self._data_world,
            )
        return self._shards

    def _resume(self, resume: Resume, state: Any, opened: _Opened) -> None:
        load = resume.load
        offer = load.offer
        if isinstance(load, Load) and load.receivers:
            into = self._state.targets() if self.rank in load.receivers else None
            received = broadcast_state(state, source=load.source, into=into)
            if self.rank in load.receivers:
                state = received
        if state["position"] is None:
            log.warning("the checkpoint has no data position: data is read from the start")
        else:
            self._ledger.restore(
                state["position"], checkpoint_id=offer.checkpoint_id, durable=resume.is_durable
            )
        if isinstance(load, LoadShards):
            self._sharded.adopt(state)
        else:
            self._state.adopt(state, rank=self.rank)
        if self._manager is not None and not self._state.targets().is_on_cpu:
            self._manager.lock_ahead()
        self.step = int(state["step"])
        self.restored = True
        self._resumed_from = offer.checkpoint_id
        if self._peer_copies and self.rank == 0:
            for reason in resume.reasons:
                announce(logging.WARNING, f"could not be used: {reason}")
        self._describe_start(
            resumed=self.step,
            tier=_tier_of(load),
            world_before=int(state.get("world_size", self.world_size)),
            opened=opened,
            reasons=resume.reasons,
        )
        if self._on_restored is not None:
            self._on_restored(state)

    def _start_anew(self, start: StartAnew, opened: _Opened) -> None:
        for reason in start.reasons:
            announce(logging.WARNING, f"could not be used: {reason}")
        before = self._tracer.before
        world_before = before.world_size if before is not None else self.world_size
        self._describe_start(
            resumed=0, tier="nowhere", world_before=world_before, opened=opened, reasons=start.reasons
        )

    def _describe_start(
        self, *, resumed: int, tier: str, world_before: int, opened: _Opened, reasons: tuple[str, ...]
    ) -> None:
        """One line on every start that is not a run's first; and the recovery, if this is one."""
        before = self._tracer.before
        reached = max(before.step if before is not None else 0, opened.last_known_step)
        lost = max(0, reached - resumed)
        if before is None and not self.restored:
            return
        self.recovery = Recovery(
            phases={},
            resumed_step=resumed,
            lost_steps=lost,
            tier=tier,
            world_before=world_before,
            world_after=self.world_size,
            reasons=reasons,
            survived=self._changes.survived,
            lost=self._changes.lost,
            joined=self._changes.joined,
            cause=self._changes.cause,
            hosts=self._changes.hosts,
        )
        if self.rank == 0:
            what = (
                f"resumed at step {resumed:,} from {tier}"
                if self.restored
                else "training starts from scratch"
            )
            announce(
                logging.INFO,
                f"{what}, {counted(lost, 'step')} lost (run {self.run[:8]}, generation {self.generation})",
            )

    # --- training -------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Batch]:
        batches = self._iterate()
        self._batches = weakref.ref(
            batches
        )  # No more: a loop that is left by `break` lets go of it, and so must we.
        return batches

    def _iterate(self) -> Generator[Batch]:
        self._drop_uncommitted()
        self._has_finished = False
        self._step_began_s = time.monotonic()
        while not self.is_done():
            self._has_changed_data = False
            for batch in self._data:
                if self._live_run is not None:
                    self._live_run.check()
                self.give()
                try:
                    yield batch
                except GeneratorExit:
                    # The loop was left: a batch that the optimizer has stepped on is trained. Unless the job itself was left
                    # before, and this iterator is collected only now.
                    self._is_in_step = False
                    if not self._is_closed:
                        self._take(batch)
                    raise
                self._is_in_step = False
                if self._take(batch):
                    self._stepped(batch)
                    if self.is_done() or self._has_changed_data:
                        break
                self._alive("reading data")
                self._account.enter("waiting")
            # What is left of an epoch without a step belongs to the next step, which no save comes before.
            self._commit_taken()
        self._finish()

    # --- loops that belong to a trainer -----------------------------------------------------------------------

    def give(self) -> None:
        """The loop gets a batch. Called by `__iter__`; a trainer that has a loop of its own calls it, `made_step` and `finish`."""
        self._alive("training")
        self._account.enter_step(self.step)
        self._is_in_step = True

    def made_step(self, batches: Sequence[Batch]) -> None:
        """An optimizer step was made with these batches, the next ones of this rank: count them, save what is due, and leave with
        `Preempted` if a rank was asked to. Every rank calls it at the same step."""
        if not batches or not batches[-1].step.ends_step:
            raise StrataError(
                "The optimizer stepped in the middle of a global batch, which would train part of it twice.",
                hint="The trainer must accumulate gradients over as many batches as the sampler has in a step.",
            )
        self._is_in_step = False
        self._taken = list(batches)
        self._count_step()
        self._stepped(batches[-1])

    def finish(self) -> None:
        """Training has ended: return when its state is in every destination, or raise what is missing."""
        self._finish()

    def watch_signals(self, *, on: bool) -> None:
        """Whether this job handles SIGTERM and Ctrl-C, or the handlers that were set before it was entered."""
        assert self._preemption is not None
        if on:
            self._preemption.watch()
        else:
            self._preemption.unwatch()

    def report(self, **metrics: float) -> None:
        """Metrics of the current step (loss, tokens, …) that are shown with this worker, and logged. Never blocks.

        `tokens`, those that all ranks together train in this step, become `tokens_per_second`, and `mfu` where
        `ElasticOptions(flops_per_token=…)` says what one costs.
        """
        self.metrics.update(metrics)
        self._reported.update(metrics)

    def log(self, metrics: Metrics, *, step: int | None = None) -> None:
        """Keep values of training by step: numbers, 0-dimensional tensors, or mappings of names to them, whose names are put
        together with '/'; many values at once as `strata.Histogram(values)`. NaN and infinity are values too.

        They belong to the step being made, or outside of the loop to the last one; `step` says which optimizer step they belong
        to otherwise. The coordinator keeps them for the run, over restarts of everything, and every sink gets them. Values of
        rank 0 are kept: for a mean over ranks, log what `all_reduce` gives. Never waits, neither for the coordinator nor for
        a device; without a coordinator or sink it does nothing.
        """
        for name in SHOWN_METRICS:
            if type(value := metrics.get(name)) is float:
                self.metrics[name] = value
        if type(tokens := metrics.get("tokens")) in (int, float):
            self._tokens = tokens
        if self._metric_log is not None:
            self._metric_log.log(metrics, self.step + self._is_in_step if step is None else step)

    @overload
    def evaluate(
        self, data: AnyData, measure: None = None, *, even: bool | None = None
    ) -> Generator[Batch]: ...

    @overload
    def evaluate(self, data: AnyData, measure: evaluation.Measure) -> dict[str, float]: ...

    def evaluate(
        self, data: AnyData, measure: evaluation.Measure | None = None, *, even: bool | None = None
    ) -> Generator[Batch] | dict[str, float]:
        """Read evaluation data once on all ranks together, without a sample twice, at whatever world size there is now. Every
        rank calls it, at the same step. The position of training and its random numbers stay as they are.

        With `measure`, which gives means over one batch by name, the means over all samples are returned, the same on every
        rank; the model is in evaluation mode meanwhile, without gradients. Without, this rank's batches are yielded.

        data: as for `strata.elastic`. Keep one loader for all calls, so that its processes can be persistent.
        even: yield as many batches on every rank, by one of weight 0 (`len(batch.step) == 0`) where a rank has no samples left:
            for models whose forward pass all ranks make together. By default where the model is sharded.
        """
        if (loader := self._evaluated.get(id(data))) is None:
            loader = as_elastic_loader(data, global_batch_size=self._data.sampler.global_batch_size)
            if loader is self._data:
                raise DataError(
                    "The training loader cannot be used for evaluation at the same time.",
                    hint="Create another one for evaluation; it may read the same dataset.",
                )
            self._evaluated[id(data)] = loader
            self._kept_data.append(data)
        found = evaluation.batches(
            loader,
            rank=self._data_world.rank,
            world_size=self._data_world.size,
            even=measure is not None or (self._is_sharded if even is None else even),
            alive=lambda: self._alive("evaluating"),
        )
        if measure is None:
            return found
        return evaluation.reduced(found, self._state.model, measure)

    def waited(self, seconds: float) -> None:
        """So much of the step being made was waiting for other ranks: who waits least is whom the others wait for."""
        self.metrics["sync_wait_s"] = seconds
        self._account.waited(seconds)

    def _watch_optimizer(self) -> Any:
        optimizer = self._state.optimizer
        if self.options.commit_on == "batch" or not isinstance(optimizer, torch.optim.Optimizer):
            return None

        def stepped(*_: object) -> None:
            self._optimizer_steps += 1
            self._lr = optimizer.param_groups[0]["lr"]

        if self.options.log_gradient_norm:
            self._norm_hook = optimizer.register_step_pre_hook(self._measure_gradients)
        return optimizer.register_step_post_hook(stepped)

    def _measure_gradients(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        self._gradient_norm = gradient_norm(optimizer, wanted=self._metric_log is not None)

    def _take(self, batch: Batch) -> bool:
        """The loop is done with a batch; whether a step has been made with it."""
        self._taken.append(batch)
        has_stepped = self._optimizer_steps > self._steps_seen
        self._steps_seen = self._optimizer_steps
        if self._step_hook is None:
            has_stepped = batch.step.ends_step
        elif has_stepped and not batch.step.ends_step:
            raise StrataError(
                "The optimizer stepped in the middle of a global batch, which would train part of it twice.",
                hint="Step only where batch.step.ends_step, or leave out micro_batch_size.",
            )
        if not has_stepped:
            if len(self._taken) >= UNSTEPPED_LIMIT and not self._steps_seen:
                raise StrataError(
                    f"{UNSTEPPED_LIMIT:,} batches were taken, and the optimizer given to strata.elastic has not stepped.",
                    hint="Pass the optimizer that steps, or set ElasticOptions(commit_on='batch').",
                )
            return False
        self._count_step()
        return True

    def _count_step(self) -> None:
        self._commit_taken()
        self.step += 1
        self._steps_here += 1
        if self._footprints is not None:
            self._footprints.leave(self.step, self.world_size)

    def _stepped(self, batch: Batch) -> None:
        """A step was made, whose last batch is this."""
        if self._live is not None:
            self._live.reach(self.step)
        self._after_step(batch.step.batch_stop - batch.step.batch_start)

    def _commit_taken(self) -> None:
        for batch in self._taken:
            self._data.commit(batch)
        self._taken = []

    def _drop_uncommitted(self) -> None:
        """Batches of an iteration that was left, and that no step was made with, are read again; so what they added to
        the gradients must not stay."""
        if self._taken and isinstance(self._state.optimizer, torch.optim.Optimizer):
            self._state.optimizer.zero_grad(set_to_none=True)
        self._taken = []

    def is_done(self) -> bool:
        """Whether all epochs or steps are trained."""
        if self._max_steps is not None and self.step >= self._max_steps:
            return True
        return self._epochs is not None and self._data.epoch >= self._epochs

    def _total_steps(self) -> int:
        """How many steps training has altogether, as far as can be known beforehand."""
        sampler = self._data.sampler
        if sampler.is_endless or not sampler.is_bounded:
            return self._max_steps or 0
        by_epochs = sampler.plan((0, 0)).steps * (self._epochs or 0)
        limits = [limit for limit in (self._max_steps, by_epochs) if limit]
        return min(limits, default=0)

    def _after_step(self, samples: int) -> None:
        now_s = time.monotonic()
        self._account.made_step()
        self._step_s, self._step_began_s = now_s - self._step_began_s, now_s
        if self._claim is not None:
            self._claim.step = self.step
        if not self._has_stepped:
            self._has_stepped = True
            self._first_step()
        self.metrics["step_time_s"] = self._step_s
        self.metrics["samples_per_second"] = samples / max(self._step_s, 1e-9)
        self.metrics["data_position"] = float(self._data.position)
        self._note_tokens()
        self._log_step()
        self._report("training")
        self._account.enter("waiting")
        self._agree()
        self._account.enter("checkpoint")
        self._note_first_save()
        if self._leaving:
            self._leave()
        # A change of weights is in the next checkpoint; the sooner there is one, the less depends on anything else.
        due = "durable" if self._has_changed_data else self._protocol.due(self.step)
        self._compare_replicas(is_saving=due is not None)
        if due is not None:
            self._save(durable=due == "durable")
            if self.options.wait_for_saves:
                self._await_save()
        self._account.enter("waiting")
        self._step_began_s = time.monotonic()

    def _note_tokens(self) -> None:
        """How many tokens a second, and what share of the devices' peak that is, where it is known."""
        tokens = self._reported.get("tokens", self._tokens)
        self._tokens = None
        if tokens is None:
            return
        rate = self._reported["tokens_per_second"] = tokens / max(self._step_s, 1e-9)
        self.metrics["tokens_per_second"] = rate
        if self._peak_flops and self.options.flops_per_token:
            self.metrics["mfu"] = self._reported["mfu"] = model_flops_utilization(
                flops_per_token=self.options.flops_per_token,
                tokens_per_second=rate,
                ranks=self.world_size,
                peak=self._peak_flops,
            )

    def _log_step(self) -> None:
        """What is known of the step that was made, whatever the loop has logged itself."""
        reported, self._reported = self._reported, {}
        self._note_covered()
        if self._metric_log is None:
            return
        known: dict[str, Any] = {
            "step_time_s": self._step_s,
            "samples_per_second": self.metrics["samples_per_second"],
        }
        if self._lr is not None:
            known["lr"] = self._lr
        if self._gradient_norm is not None:
            known["grad_norm"], self._gradient_norm = self._gradient_norm, None
        self._metric_log.log({**known, **reported}, self.step)

    def _note_covered(self) -> None:
        """A save that is in any tier, also in memory, is one that a restart continues from."""
        while self._covering and (self._covering[0].tiers or self._covering[0].done()):
            handle = self._covering.popleft()
            if handle.tiers:
                self.metrics["snapshot_step"] = float(handle.step)
                if self._peers is not None and self._peers.copied_step >= 0:
                    self.metrics["peer_step"] = float(self._peers.copied_step)
                if self._metric_log is not None:
                    self._metric_log.committed(handle.step)

    def _agree(self) -> None:
        """Every half second or so all ranks ask each other whether one of them was asked to stop, or superseded."""
        if self._steps_here < self._next_agreement:
            return
        assert self._preemption is not None
        patience = max(1, min(1000, int(AGREE_EVERY_S / max(self._step_s, 1e-6))))
        asked, superseded = self._preemption.requested, self._superseded()
        has_news = self._mixture is not None and self._mixture.has_news
        durable_s = -1.0 if self._durable_s is None else self._durable_s
        stay, gap, all_asked, current, no_news, left_s, slowest = smallest(
            [
                *(float(not asked), float(patience), float(asked)),
                *(float(superseded is None), float(not has_news)),
                *(self._preemption.left_s, -durable_s),
            ]
        )
        if not current:
            raise superseded or Superseded(
                where="another rank", generation=self.generation, newest=self.generation + 1
            )
        self._leaving = stay == 0.0
        self._everyone_leaves = all_asked == 1.0
        if self._leaving:
            self._last_save = choose_save(
                left_s=left_s,
                durable_s=None if slowest > 0.0 else -slowest,
                has_destinations=bool(self._protocol.destinations),
                others_stay=not self._everyone_leaves,
                is_sharded=self._is_sharded,
            )
        self._next_agreement = self._steps_here + int(gap)
        if self._mixture is not None and not no_news:
            self._has_changed_data = self._mixture.settle(lead=int(gap))

    def _superseded(self) -> StrataError | None:
        """Why this process may not continue: another start of the run has taken over, or another run has its name."""
        if self._claim is not None and self._claim.superseded is not None:
            return CheckpointError(
                self._claim.superseded, hint="This process ends; the run continues elsewhere."
            )
        if self._link is not None and self._link.superseded is not None:
            return CheckpointError(
                self._link.superseded, hint="This process ends; the run continues elsewhere."
            )
        if self._link is not None and self._link.refused is not None:
            return CheckpointError(self._link.refused)
        return None

    def _leave(self) -> None:
        """Some ranks were asked to stop: save what there is time for. Those who were end; the others continue without them."""
        assert self._preemption is not None
        is_durable = bool(self._protocol.destinations) and self._last_save == "durable"
        if self._last_save == "durable":
            self._finish()
        if not is_durable and self._snapshot_step != self.step:
            if self._is_sharded:
                self._settle_shards()
            self._compare_replicas(is_saving=True)
            self._save(durable=False)
            if self._newest_save is not None:
                self._newest_save.wait(min(self.options.preemption_deadline_s, self._preemption.left_s))
        asked = self._preemption.requested
        who = "asked to stop" if asked else "other ranks were asked to stop"
        where = (
            "" if is_durable or not self._protocol.destinations else " in memory only, because time ran out"
        )
        announce(logging.INFO, f"{who}: step {self.step:,} is saved{where}, ending")
        if asked:
            write_outcome(
                Outcome(
                    step=self.step,
                    saved_step=self.step,
                    where="durable" if is_durable else "memory",
                    others_stay=not self._everyone_leaves,
                    in_time=True,
                )
            )
        is_leaving = self._machine_leaves(asked=asked)
        if not asked and self._live_run is not None and not is_leaving:
            self._live_run.others_leave(
                f"ranks on another machine were asked to leave after step {self.step:,}"
            )
        raise Preempted(asked=asked)

    def _machine_leaves(self, *, asked: bool) -> bool:
        """Whether a rank of this machine was asked to stop: then its agent starts the others again, if it is to go on at all."""
        machine = (socket.gethostname(), os.environ.get(AGENT_VARIABLE, ""))
        return (machine, True) in gather((machine, asked))

    def _note_too_late(self) -> None:
        """On another thread, before this process ends: what is saved, though not what it had reached."""
        saved, where = max(
            (self._durable_step, "durable"), (self._snapshot_step if self._keeps_state else -1, "memory")
        )
        write_outcome(
            Outcome(
                step=self.step,
                saved_step=saved if saved >= 0 else None,
                where=("durable" if where == "durable" else "memory") if saved >= 0 else "nothing",
                others_stay=self.world_size > local_world_size(),
                in_time=False,
            )
        )

    def _first_step(self) -> None:
        self._tracer.mark("stepped")
        if self._live_run is not None:
            self._live_run.stepped(self.step)
        if self.recovery is None or self.rank != self._changes.reporter:
            return
        self.recovery = replace(self.recovery, phases=self._tracer.phases())
        log.info("%s", self.recovery)
        if self._link is not None:
            self._link.recovered(self.recovery)

    # --- saving ---------------------------------------------------------------------------------------------

    def _exchange_news(self) -> tuple[CheckpointId, int, dict[str, Any]]:
        """All ranks learn the outcome of the saves in flight, and the name and time of the next one, which are rank
        0's; and they exchange their random number generators."""
        everyone = gather((rng.capture(), self._news(), new_id(self.step), int(time.time() * 1000)))
        self._learn([ended for _, news, _, _ in everyone for ended in news])
        rng_states = {str(rank): states for rank, (states, _, _, _) in enumerate(everyone)}
        return everyone[0][2], everyone[0][3], rng_states

    def _learn(self, news: Sequence[SaveEnded]) -> None:
        learned = self._protocol.learn(news)
        if learned.stop is not None:
            raise _error_of(learned.stop)
        for checkpoint_id in learned.confirmed:
            self._ledger.confirm(checkpoint_id)
        for checkpoint_id in learned.failed:
            self._ledger.fail(checkpoint_id)

    def _news(self) -> tuple[SaveEnded, ...]:
        """The outcome of this rank's durable saves since it was last asked."""
        ended = [handle for handle in self._saving.values() if handle.done()]
        for handle in ended:
            del self._saving[handle.checkpoint_id]
        if self.rank:  # A sharded save has ended alike on every rank.
            return ()
        return tuple(_outcome(handle, [store.url for store in self._stores]) for handle in ended)

    def _save(self, *, durable: bool) -> None:
        if self._is_sharded:
            self._save_shards(durable=durable)
            return
        checkpoint_id, now_ms, rng_states = self._exchange_news()
        save = self._protocol.save(checkpoint_id, step=self.step, now_ms=now_ms, durable=durable)
        self._carry_out(save, rng_states)

    def _save_shards(self, *, durable: bool) -> None:
        """All ranks save their parts, or none does."""
        prepared, ready, checkpoint_id, now_ms = self._look_at_shards()
        save = self._protocol.save_shards(
            checkpoint_id, ready, step=self.step, now_ms=now_ms, durable=durable
        )
        if isinstance(save, Save):
            self._carry_out_shards(save, prepared)
        elif self.rank == 0:
            log.warning("step %d was not saved: %s", self.step, save.reason)

    def _look_at_shards(self) -> tuple[Prepared, list[Ready], CheckpointId, int]:
        """The state as it is now, what every rank says before it is saved, and the name and time that rank 0 gives to the save."""
        assert self._manager is not None
        prepared = self._sharded.capture(self._manager, step=self.step, epoch=self._data.epoch)
        everyone = gather(
            (
                self._sharded.needs_plan(prepared),
                self._readiness(prepared),
                self._news(),
                new_id(self.step),
                int(time.time() * 1000),
                prepared.plan.tensor_bytes,
            )
        )
        self._learn([ended for _, _, news, *_ in everyone for ended in news])
        if any(needs_plan for needs_plan, *_ in everyone):
            self._sharded.make_plan(prepared)
        self._largest_part_bytes = max(each[5] for each in everyone)
        return prepared, [each[1] for each in everyone], everyone[0][3], everyone[0][4]

    def _readiness(self, prepared: Prepared) -> Ready:
        assert self._manager is not None
        ready = self._manager.ready(prepared.plan, part=self._sharded.part)
        sending = self._peers.pending() if self._peers is not None else frozenset[CheckpointId]()
        return replace(ready, sending=sending & ready.held)

    def _drop_old_copies(self) -> None:
        """This generation has a complete snapshot of its own."""
        if self._peers is not None and self._has_old_copies and self._is_first_here:
            self._peers.settle(self.run, self.generation)
        self._has_old_copies = False

    def _carry_out_shards(self, save: Save, prepared: Prepared) -> None:
        assert self._manager is not None
        if save.keep not in (None, self._resumed_from):
            self._drop_old_copies()
        position = self._ledger.commit(save.placement.checkpoint_id, durable=save.durable)
        self._snapshot_step = self.step
        if not save.durable and not self._fits(self._largest_part_bytes):
            return  # Where one rank has no space for its part, the others' would be of no use.
        self._report("checkpointing")
        if self._has_left_over and save.keep not in (None, self._resumed_from):
            self._drop_left_over()  # The ranks of now have a complete snapshot of their own.
        handle = self._manager.save(
            prepared,
            self.step,
            self._data.epoch,
            position=position,
            tiers=None if save.durable else ["MEMORY"],
            placement=save.placement,
            must_arrive=save.final,
            shards=self._sharded.shards(),
            destinations=save.destinations,
            keep=save.keep,
        )
        self._note_started(save, handle)

    def _drop_left_over(self) -> None:
        self._has_left_over = False
        drop_left_over(self._memory_name, root=self._memory_root, local_world_size=local_world_size())

    def _settle_shards(self) -> None:
        """Return when no rank has a save under way."""
        assert self._manager is not None
        while not all(gather(self._manager.wait_idle(AWAIT_S))):
            pass

    def _note_started(self, save: Save, handle: SaveHandle) -> None:
        self._newest_save = handle
        if save.durable and self._stores:
            self._saving[save.placement.checkpoint_id] = handle
            began_s = time.monotonic()
            handle.future.add_done_callback(lambda _: self._note_durable(handle, began_s))
        if self._first is None and not self._first_is_noted:
            self._first = handle
        if self._metric_log is not None or self._link is not None:
            self._covering.append(handle)
        self._report("training")

    def _note_durable(self, handle: SaveHandle, began_s: float) -> None:
        """On the thread that has written it."""
        if not handle.future.cancelled() and handle.exception() is None:
            self._durable_s = time.monotonic() - began_s
            self._durable_step = max(self._durable_step, handle.step)

    def _await_save(self) -> None:
        """Return when the newest save has ended on every rank, well or not, or one is asked to stop."""
        if self._watchdog is not None:
            self._watchdog.suspend()  # A slow destination is no hang.
        assert self._preemption is not None
        while True:
            has_ended = self._newest_save is None or self._newest_save.wait(AWAIT_S)
            everyone = gather((has_ended, self._preemption.requested))
            if all(ended for ended, _ in everyone) or any(asked for _, asked in everyone):
                return

    def _carry_out(self, save: Save, rng_states: Mapping[str, Any]) -> None:
        checkpoint_id = save.placement.checkpoint_id
        position = self._ledger.commit(checkpoint_id, durable=save.durable)
        self._snapshot_step = self.step
        if self._manager is None:
            return
        self._report("checkpointing")
        state = self._state.capture(
            step=self.step, epoch=self._data.epoch, rng_states=rng_states, world_size=self.world_size
        )
        if not save.durable and not self._fits(tensor_bytes(state)):
            return
        if self._first_is_noted:
            self._drop_old_copies()
        handle = self._manager.save(
            state,
            self.step,
            self._data.epoch,
            position=position,
            tiers=None if save.durable else ["MEMORY"],
            placement=save.placement,
            must_arrive=save.final,
        )
        self._note_started(save, handle)

    def _finish(self) -> None:
        """Training has ended here: return when its state is in every destination, or raise what is missing."""
        if self._has_finished or not (self._steps_here or self.restored):
            self._has_finished = True
            return
        self._account.enter("checkpoint")
        if self._watchdog is not None:
            self._watchdog.suspend()  # A slow destination is no hang.
        self._compare_replicas(is_saving=True)
        while True:
            prepared: Prepared | None = None
            ready: list[Ready] | None = None
            rng_states: Mapping[str, Any] = {}
            if self._is_sharded:
                prepared, ready, checkpoint_id, now_ms = self._look_at_shards()
            else:
                checkpoint_id, now_ms, rng_states = self._exchange_news()
            instruction = self._protocol.finish(self.step, checkpoint_id, now_ms=now_ms, ready=ready)
            if isinstance(instruction, Save) and prepared is not None:
                self._carry_out_shards(instruction, prepared)
            elif isinstance(instruction, Save):
                self._carry_out(instruction, rng_states)
            elif isinstance(instruction, AwaitSave):
                if (handle := self._saving.get(instruction.checkpoint_id)) is not None:
                    handle.wait(AWAIT_S)
            elif isinstance(instruction, Skip):
                assert self._manager is not None
                self._manager.wait_idle(AWAIT_S)
            elif isinstance(instruction, Stop):
                raise _error_of(instruction, step=self.step)
            else:
                assert isinstance(instruction, Finished)
                break
        self._has_finished = True
        self._report("idle")

    def _fits(self, needed_bytes: int) -> bool:
        limit_bytes = self.options.snapshot_limit_bytes
        if limit_bytes is None:
            return True
        if needed_bytes > limit_bytes:
            log.warning(
                "Cannot save snapshot: %.1fMB required, but only %.1fMB available; only durable checkpoints are written",
                needed_bytes / 2**20,
                limit_bytes / 2**20,
            )
        return needed_bytes <= limit_bytes

    def _note_first_save(self) -> None:
        if self._first is None or not self._first.done():
            return
        if self._first.exception() is None:
            note_saved(self._memory_name, root=self._memory_root)
            self._first_is_noted = True
        self._first = None

    # --- surviving others -----------------------------------------------------------------------------------

    def freeze(self) -> None:
        """Process groups are about to be aborted: what they end with is not to be taken for a result. From any thread, as often as
        one likes; never waits."""
        if self._live is not None:
            self._live.freeze()

    def _watch_live_state(self) -> None:
        """In a recoverable run."""
        self._live_run = live.current()
        if self._live_run is not None:
            trace = GeneratorTrace(
                self._memory_name, rank=self.rank, generation=self.generation, root=self._memory_root
            )
            self._live = live.LiveState(self._state, self._data, step=self.step, trace=trace)

    # --- copies that must be equal --------------------------------------------------------------------------

    def _watch_replicas(self) -> None:
        if not self.options.compare_every or self.world_size == 1:
            return
        if self._is_sharded:
            raise StrataError(
                "compare_every compares copies of one state, but this state is sharded: every rank has a different part.",
                hint="Leave compare_every out.",
            )
        self._replicas = Replicas(self._state, every=self.options.compare_every)

    def _compare_replicas(self, *, is_saving: bool) -> None:
        """Nothing is saved that the ranks do not agree on. Where most of them do, the others' copies are replaced."""
        if self._replicas is None:
            return
        while (found := self._replicas.compare(self.step, is_saving=is_saving)) is not None:
            if isinstance(found.verdict, Undecided):
                self._distrust = str(found)
                raise ReplicasDiffer(
                    f"{found}.",
                    hint="Start it again: training continues from the newest checkpoint, on which all ranks agreed. With "
                    "three or more ranks, a majority decides which copy is wrong.",
                )
            if self.rank == 0:
                announce(logging.ERROR, str(found))
            if self._live is not None:
                self._live.reach(self.step)
            self._check_repairs(found.verdict)

    def _check_repairs(self, odd: Odd) -> None:
        """A rank whose copy was replaced again and again is on a machine that must not be trusted."""
        assert self._replicas is not None
        if self.rank in odd.ranks and (times := self._replicas.repairs[self.rank]) >= REPAIRS:
            self._distrust = f"the state of this rank was replaced {times} times"
            raise ReplicaDamaged(
                f"The state of rank {self.rank} was corrupted {times} times: its memory or its device is failing.",
                hint="Quarantine the machine, and test its memory and its GPUs.",
            )

    def _rescue(self, run: live.LiveRun) -> None:
        """Others are lost, and cannot be asked: save the state alone, if it is known to be complete. The error that the job is left
        with stays the one that is raised."""
        assert self._live is not None
        try:
            if self._distrust:
                self.live_reason = self._distrust
                return
            facts = self._live.facts(is_sharded=self._is_sharded, sees_steps=self._step_hook is not None)
            judged = judge(facts)
            self.live_reason = judged.reason
            if isinstance(judged, Complete) and run.may_rescue(judged.step):
                self._save_alone(judged.step)
                run.rescued(judged.step)
                if self._metric_log is not None:
                    self._metric_log.committed(judged.step)
        except Exception as error:
            self.live_reason = f"{self.live_reason or 'the live state'} could not be saved: {getattr(error, 'message', error)}"
            log.warning("rank %d at step %d: %s", self.rank, self.step, self.live_reason)

    def _save_alone(self, step: int) -> None:
        """Make a snapshot in this machine's memory, for the next start."""
        assert self._live is not None
        if self._manager is None:  # The process that kept the images is lost, or its state is not complete.
            self._manager = self._open_manager(self._opened)
            self._manager.fence(self.generation)
        if any((info.generation, info.step) == (self.generation, step) for info in self._manager.snapshots()):
            return  # It was saved with the step.
        self._live.put_back()
        save = self._protocol.rescue(CheckpointId(f"{step:08d}-{self._opened.board}"), step=step)
        position = self._ledger.commit_alone(save.placement.checkpoint_id)
        known = generators(self._memory_name, step=step, generation=self.generation, root=self._memory_root)
        known[self.rank] = self._live.generators()
        state = self._state.capture(
            step=step,
            epoch=self._data.epoch,
            rng_states={str(rank): rng.Taken(*taken).states() for rank, taken in sorted(known.items())},
            world_size=self.world_size,
        )
        if not self._fits(tensor_bytes(state)):
            raise CheckpointError("It is larger than the limit for snapshots (snapshot_limit_bytes).")
        with suppress(SaveFailed):
            self._manager.raise_failure()  # Of an earlier save; it is in the log.
        handle = self._manager.save(
            state,
            step,
            self._data.epoch,
            position=position,
            tiers=["MEMORY"],
            placement=save.placement,
            wait_s=RESCUE_S,
        )
        handle.result(RESCUE_S)

    # --- reporting ------------------------------------------------------------------------------------------

    def _report(self, state: str) -> None:
        if self._link is not None:
            metrics = {**self.metrics, **self._account.totals()}
            self._link.status(state, step=self.step, epoch=self._data.epoch, metrics=metrics)

    def _alive(self, doing: str) -> None:
        if self._watchdog is not None:
            self._watchdog.alive(doing)


_REPLICATED = (
    "The checkpoint holds the state of an unsharded model, but this model is sharded. Export it (strata checkpoint export "
    "--format dcp) and import that into another destination (strata checkpoint import)."
)


def _offer(manifest: Manifest, *, tier: str, where: str, distance: int) -> Offer:
    marked = Marked.of(manifest.layout)
    return Offer(
        checkpoint_id=manifest.checkpoint_id,
        run=manifest.run,
        step=manifest.step,
        generation=manifest.generation,
        sequence=manifest.sequence,
        lineage=manifest.lineage,
        parent=manifest.parent,
        durable_parent=manifest.durable_parent,
        tier=tier,
        where=where,
        distance=distance,
        is_sharded=manifest.format == SHARDED or marked is not None,
        part=marked.part if marked is not None else "",
        parts=marked.parts if marked is not None else (),
    )


def _tier_of(load: Load | LoadShards) -> str:
    """Where a state came from: of a sharded one, the farthest place that something had to be read from."""
    tier, found, wanted = load.offer.tier, set[str](), set(load.offer.parts)
    for source in load.sources if isinstance(load, LoadShards) else ():
        if wanted and found >= wanted:
            break
        if not source.offer.parts:
            return source.offer.tier  # It has all of it.
        if source.offer.part not in found:
            tier = source.offer.tier
        found.add(source.offer.part)
        wanted.update(source.offer.parts)
    return tier


def _launch_name() -> str | None:
    run = os.environ.get("TORCHELASTIC_RUN_ID")
    return None if run == "none" else run


def _newest_of_each(offers: Sequence[Offer]) -> list[Offer]:
    """The newest offers of each destination."""
    newest = sorted(offers, key=lambda offer: offer.order, reverse=True)
    in_memory = [offer for offer in newest if not offer.is_durable]
    return in_memory + [
        o
        for where in {o.distance for o in offers if o.is_durable}
        for o in [n for n in newest if n.distance == where][:OFFERS]
    ]


def _outcome(handle: SaveHandle, destinations: Sequence[str]) -> SaveEnded:
    """What a durable save came to, for the protocol."""
    error = handle.exception()
    is_durable = any(tier != "MEMORY" for tier in handle.tiers)
    if error is None:
        info = handle.result()
        return SaveEnded(checkpoint_id=handle.checkpoint_id, is_durable=is_durable, missing=info.failures)
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, Superseded):
        cause = cause.__cause__
    return SaveEnded(
        checkpoint_id=handle.checkpoint_id,
        is_durable=is_durable,
        missing=(str(getattr(error, "message", error)),),
        superseded=str(cause.message) if isinstance(cause, Superseded) else "",
    )


def _unreachable(reasons: Sequence[str]) -> StrataError:
    return LoadFailed(
        "A destination of this job does not answer, so it is unknown which checkpoints exist. Nothing was changed.",
        reasons=reasons,
        hint="Check credentials, network and the address, then start the job again.",
    )


def _error_of(stop: Stop, *, step: int = -1) -> StrataError:
    """The protocol's reason to end, as the error that a user sees."""
    if stop.kind == "unreachable":
        return _unreachable(stop.reasons)
    if stop.kind == "mismatch":
        return StateMismatch(
            stop.reasons[-1],
            hint="The model or optimizer is not the one that was saved. Nothing was removed.",
        )
    if stop.kind == "unloadable":
        return LoadFailed(
            "This run has checkpoints, but none of them can be loaded. Nothing was removed.",
            reasons=stop.reasons,
            hint="Check them with: strata checkpoint verify. To start over, choose another destination.",
        )
    if stop.kind == "superseded":
        return CheckpointError(stop.reasons[0], hint="This process ends; the run continues elsewhere.")
    return FinalSaveFailed(step=step, missing=stop.reasons)


def announce(level: int, text: str) -> None:
    """A line that a user must see, also in a script that has not configured logging."""
    if log.isEnabledFor(level) and log.hasHandlers():
        log.log(level, "%s", text)
    else:
        print(f"strata: {text}", file=sys.stderr, flush=True)
