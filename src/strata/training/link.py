"""The job's link to the coordinator: present when there is one, silent when there is none.

Training never waits for it. Notices go through a bounded queue to a thread of their own; when the coordinator is
away they wait there, and when the queue is full the oldest go, because the manifests are the truth and the
registry can be rebuilt from them: the link remembers which checkpoints exist, and when a notice may have been lost,
or the coordinator has lost its memory, it tells all of them again (`reconcile`). So what was said in vain is reflected
in the end.

A process that was taken for dead registers again, ever more slowly. One whose place another process has taken, or whose
name belongs to another live run, falls silent and says so (`superseded`, `refused`): two processes under one name must
not fence each other for ever.
"""

from __future__ import annotations

import logging
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal

from strata.agent.trace import Recovery
from strata.backoff import Backoff
from strata.checkpoint.catalog.manifest import CheckpointId
from strata.checkpoint.events import MEMORY, CheckpointInfo, Started
from strata.core.faults.failures import Failure
from strata.core.jobs.lineage import CompletionOrder
from strata.core.text import as_identifier
from strata.data.loading.sampler import ElasticSampler
from strata.errors import StrataError
from strata.files import is_on_network
from strata.worker.errors import CoordinatorRefused, CoordinatorUnavailable, StaleWorker
from strata.worker.orchestrator import TrainingOrchestrator
from strata.worker.outbox import MetricOutbox

log = logging.getLogger("strata.training")

NOTICES_KEPT = 256
JOIN_TIMEOUT_S = 3.0
CLOSE_S, CRASH_S = 10.0, 1.0
"""How long the last notices are waited for: when a job ends, and when its process fails and should end at once."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 10.0
"""Between two registrations, when one after the other is over soon."""
METRICS_S = 1.0
"""How long the last metrics of a process that fails may take."""
SETTLED_S = 30.0
"""A registration that has lasted so long was none of those."""
SHARDS_SHOWN = 256

Facts = dict[str, Any]
"""All that the registry wants to know about a completed checkpoint: `notify_checkpoint`'s arguments."""


class CoordinatorLink:
    """One worker's presence at the coordinator. Also the checkpoint engine's observer."""

    def __init__(
        self,
        address: str,
        *,
        job: str,
        worker_id: str,
        metadata: Mapping[str, str],
        run_id: str = "",
        generation: int = 0,
    ) -> None:
        self.worker_id = worker_id
        self.run_id = run_id
        self.generation = generation
        """Of the run: what this process says from now on is said for it."""
        self.superseded: str | None = None
        """Why this process should stop: another one has taken its place, or a later generation of its run has started."""
        self.refused: str | None = None
        """Why this process should stop: another live run has the name of this job."""
        self._metadata = dict(metadata)
        self._orchestrator = TrainingOrchestrator(
            address, job_id=job, timeout_s=JOIN_TIMEOUT_S, ship_logs=_ships_logs(), on_stale=self._on_stale
        )
        self._notices: queue.Queue[Callable[[], None] | None] = queue.Queue(NOTICES_KEPT)
        self._lock = threading.Lock()
        self._existing: dict[str, Facts | None] | None = None
        """Every checkpoint of the run that is in a durable place, those that can be described oldest first; None until
        that is known."""
        self._order = CompletionOrder()
        self._is_behind = False
        """Whether the registry may have missed some of them, or some removals."""
        self._noted = self._subsumed = 0
        """How many notifications about checkpoints were sent; up to which of them `_catch_up` has reported the outcome."""
        self._describe: Callable[[], None] | None = None
        self._registered_s: float | None = None
        self._must_register = True
        self._backoff = Backoff(first_s=FIRST_PAUSE_S, longest_s=LONGEST_PAUSE_S)
        self._is_away = False
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._work, name="strata-notices", daemon=True)
        self._thread.start()
        self._put(_nothing)  # Whatever is delivered first, a registration comes before it.

    # --- called by the training loop, never blocking -----------------------------------------------------------

    def status(
        self, state: str, *, step: int, epoch: int, metrics: Mapping[str, float] | None = None
    ) -> None:
        with suppress(StaleWorker):  # The notice thread registers again, or has fallen silent.
            self._orchestrator.heartbeat(step, epoch, state=state, metrics=metrics)

    def describe_data(
        self, sampler: ElasticSampler, path: str, data_format: str, metadata: Mapping[str, str]
    ) -> None:
        """So that everyone can see which data this is, how far it has come and what is being read."""

        dataset_id = as_identifier(sampler.dataset)  # Usually the same; a name may hold anything.

        # A mixture may have no end; what can be said of it is how much its sources have.
        mixture = sampler.mixture
        total = sampler.total if mixture is None else mixture.mixture.samples_in_sources

        def register() -> None:
            self._orchestrator.register_dataset(
                dataset_id,
                path,
                data_format,
                total,
                -(-total // SHARDS_SHOWN),
                sampler.shuffle,
                sampler.seed,
                metadata,
            )

        self._describe = register
        self._put(register)

    def recovered(self, recovery: Recovery) -> None:
        self._put(
            lambda: self._orchestrator.report_recovery(
                recovery.phases,
                resumed_step=recovery.resumed_step,
                lost_steps=recovery.lost_steps,
                tier=recovery.tier,
                world_before=recovery.world_before,
                world_after=recovery.world_after,
                reason=str(recovery),
                survived=recovery.survived,
                lost=recovery.lost,
                joined=recovery.joined,
                cause=recovery.cause,
                hosts=recovery.hosts,
            )
        )

    def hangs(self, failure: Failure) -> None:
        """This process makes no step, and is not ended for that."""
        self._put(lambda: self._orchestrator.report_failure(failure))

    def continues(self, *, generation: int) -> None:
        """This process has entered its job again: the same worker, in a later generation of its run. What it knew of the run's
        checkpoints and data was the business of the rank that it was."""
        with self._lock:
            self.generation = generation
            self._existing, self._is_behind = None, False
            self._order = CompletionOrder()
        self._describe = None

    def send_metrics(self, outbox: MetricOutbox) -> None:
        self._orchestrator.send_metrics(outbox)

    def flush_logs(self) -> None:
        self._orchestrator.flush_logs()

    def reconcile(self, present: Sequence[CheckpointId], infos: Sequence[CheckpointInfo] = ()) -> None:
        """These checkpoints of the run exist in a durable place, and no others do: what the registry calls completed and
        is not among them becomes removed. Those of them that it does not know are reported to it, as far as `infos` describe
        them. To be said before the first save; the link keeps account from then on."""
        described = {info.checkpoint_id: info for info in infos}
        created_at = {info.checkpoint_id: info.created_at for info in infos}
        with self._lock:
            self._existing = {
                checkpoint_id: checkpoint_facts(info)
                if (info := described.get(checkpoint_id)) is not None
                else None
                for checkpoint_id in sorted(present, key=lambda each: created_at.get(each, 0.0))
            }
            self._is_behind = True
        self._put(_nothing)

    def close(self, *, leave: bool, deliver: bool = True) -> None:
        """Deliver what waits, for a few seconds; with `leave`, deregister. Who fails and is in a hurry may leave out the last
        metrics (`deliver`)."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._put(None)
        self._thread.join(CLOSE_S if leave else CRASH_S)
        if not leave and deliver:
            self._orchestrator.flush_metrics(METRICS_S)  # The last values before a failure say most about it.
        if leave and not self._thread.is_alive() and not self._is_away:
            with suppress(StrataError):
                self._orchestrator.deregister("training ended")
        self._orchestrator.close()

    # --- the checkpoint engine's observer, on its threads ---------------------------------------------------

    def on_started(self, save: Started) -> None:
        if _lasts(save.tiers):
            self._notify("in_progress", _beginning(save))

    def on_tier(self, save: Started, *, tier: str, size_bytes: int, seconds: float) -> None:
        pass  # `on_completed` has the tiers; a tier that is still being written to is not safe yet.

    def on_skipped(self, save: Started, *, tier: str, reason: str) -> None:
        pass  # `on_completed` has the tiers that were reached, `on_failed` the reason where there are none.

    def on_completed(self, save: Started, info: CheckpointInfo, *, seconds: float) -> None:
        if _lasts(info.tiers):
            facts = {**checkpoint_facts(info), "duration_s": seconds}
            self._notify("completed", facts)

    def on_failed(self, save: Started, error: BaseException, *, seconds: float) -> None:
        if _lasts(save.tiers):
            self._notify("failed", {**_beginning(save), "reason": str(error)[:1000]})

    def on_removed(
        self, checkpoint_id: CheckpointId, *, step: int, epoch: int, path: str, reason: str
    ) -> None:
        facts = {"checkpoint_id": checkpoint_id, "step": step, "epoch": epoch, "path": path}
        self._notify("removed", {**facts, "reason": reason[:1000]})

    def _notify(self, status: Literal["in_progress", "completed", "failed", "removed"], facts: Facts) -> None:
        with self._lock:
            self._noted = number = self._noted + 1
            if status == "completed":
                newer = self._order.completed(facts["checkpoint_id"], facts["step"])
                if self._existing is not None:
                    _insert(self._existing, facts, before=newer)
                    _forget_oldest(self._existing)
                if newer is not None:
                    facts = {**facts, "succeeded_by": newer}
            elif status == "removed":
                self._order.removed(facts["checkpoint_id"])
                if self._existing is not None:
                    self._existing.pop(facts["checkpoint_id"], None)

        def notify() -> None:
            if number > self._subsumed or status == "failed":
                self._orchestrator.notify_checkpoint(
                    status=status, run_id=self.run_id, run_generation=self.generation, **facts
                )

        self._put(notify)

    # --- inside ---------------------------------------------------------------------------------------------

    def _put(self, notice: Callable[[], None] | None) -> None:
        while True:
            try:
                self._notices.put_nowait(notice)
                return
            except queue.Full:
                with suppress(queue.Empty):
                    self._notices.get_nowait()
                    if not self._is_behind:
                        log.warning("the coordinator is unreachable; dropping the oldest notifications to it")
                    self._is_behind = True

    @property
    def _is_silent(self) -> bool:
        return self.superseded is not None or self.refused is not None

    def _work(self) -> None:
        while (notice := self._notices.get()) is not None:
            while not self._is_silent and not self._is_delivered(notice):
                pass

    def _is_delivered(self, notice: Callable[[], None]) -> bool:
        """One attempt. True as well where another would be of no use."""
        try:
            self._register()
            self._catch_up()
            notice()
            self._is_away = False
        except CoordinatorUnavailable as error:
            self._is_away = True
            if not self._closing.is_set():
                log.debug("waiting for the coordinator: %s", error)
                return False
            log.warning("%s", error)
        except StaleWorker as error:
            self._must_register = True
            self._become_stale(error.cause, str(error))
            return False
        except CoordinatorRefused as error:
            if error.reason_code == "name_in_use":
                self.refused = str(error)
            # What was never reported need not be removed.
            level = logging.DEBUG if error.reason_code == "not_found" else logging.WARNING
            log.log(level, "the coordinator rejected a notification: %s", error)
        except StrataError as error:
            log.warning("the coordinator could not be notified: %s", error)
        return True

    def _register(self) -> None:
        if self._orchestrator.is_current and not self._must_register:
            return
        if self._registered_s is None or time.monotonic() - self._registered_s > SETTLED_S:
            self._backoff.worked()
        self._closing.wait(self._backoff.pause_s() or 0.0)
        self._orchestrator.register_worker(
            self.worker_id,
            socket.gethostname(),
            0,
            _gpu_count(),
            metadata=self._metadata,
            run_id=self.run_id,
            run_generation=self.generation,
        )
        self._registered_s = time.monotonic()
        self._must_register = False

    def _on_stale(self, reason: str) -> None:
        """The session was notified that this incarnation has ended."""
        self._become_stale(self._orchestrator.stale_cause, reason)
        if not self._closing.is_set():
            self._put(_nothing)

    def _become_stale(self, cause: str, reason: str) -> None:
        if StaleWorker("stale", reason, cause=cause).superseded:
            if self.superseded is None:
                log.warning(
                    "this process was superseded and no longer reports to the coordinator: %s", reason
                )
            self.superseded = reason
            return
        if cause == "unknown":  # It has lost its memory, also of what was reported before.
            self._is_behind = True
            if self._describe is not None:
                self._put(self._describe)
        log.warning("registering again: %s", reason)

    def _catch_up(self) -> None:
        """Tell which checkpoints exist, and describe those that the registry does not know."""
        with self._lock:
            if not self._is_behind:
                return
            existing = dict(self._existing) if self._existing is not None else None
            noted = self._noted
            self._is_behind = False
        if existing is None:
            return
        run: Facts = {"run_id": self.run_id, "run_generation": self.generation}
        try:
            report_existing(self._orchestrator, existing, run)
            self._subsumed = noted
        except (CoordinatorUnavailable, StaleWorker):
            self._is_behind = True
            raise
        except CoordinatorRefused as error:
            log.warning("the coordinator's list of checkpoints may be out of date: %s", error)


def open_link(
    address: str | None,
    *,
    job: str,
    rank: int,
    metadata: Mapping[str, str],
    worker_id: str = "",
    run_id: str = "",
    generation: int = 0,
) -> CoordinatorLink | None:
    """A link where a coordinator is named (by argument or environment); None where there is none. Without a `worker_id` the
    worker is called as the user has it, or by its rank."""
    address = address or os.environ.get("COORDINATOR_ADDR") or os.environ.get("COORDINATOR_URL")
    if not address:
        return None
    task = os.environ.get("STRATA_TASK_ID")
    return CoordinatorLink(
        address,
        job=job,
        worker_id=worker_id or given_worker_id() or f"{job}-rank{rank}",
        metadata={**metadata, **({"task_id": task} if task else {})},
        run_id=run_id,
        generation=generation,
    )


def _nothing() -> None:
    """A notice that says nothing: what must come before any notice comes before it."""


def _beginning(save: Started) -> Facts:
    return {
        "checkpoint_id": save.checkpoint_id,
        "step": save.step,
        "epoch": save.epoch,
        "path": save.path,
        "size_bytes": save.size_bytes,
    }


def report_existing(orchestrator: TrainingOrchestrator, existing: dict[str, Facts | None], run: Facts) -> int:
    """These checkpoints of a run exist, oldest first, and no others do; those that the registry does not know are described. Returns
    how many it did not know."""
    unknown = set(orchestrator.reconcile_checkpoints(list(existing), **run))
    newer = ""
    for checkpoint_id, facts in reversed(existing.items()):
        if checkpoint_id in unknown:
            if facts is None:
                continue
            orchestrator.notify_checkpoint(**facts, **run, succeeded_by=newer)
        newer = checkpoint_id
    return len(unknown)


def checkpoint_facts(info: CheckpointInfo) -> Facts:
    """What is reported to the registry of a checkpoint."""
    return {
        "checkpoint_id": info.checkpoint_id,
        "step": info.step,
        "epoch": info.epoch,
        "path": info.path,
        "size_bytes": info.size_bytes,
        "tiers": list(info.tiers),
        "digest": info.digest,
        "parent_id": info.durable_parent or "",
        "data": info.data if isinstance(info.data, dict) else None,
        "saved_generation": info.generation,
        # What is on a disk of this machine is lost with it.
        **({"metadata": {"disk": "network"}} if is_on_network(info.path) else {}),
    }


def _insert(existing: dict[str, Facts | None], facts: Facts, *, before: str | None) -> None:
    """A checkpoint that is older than one that completed before it keeps its place."""
    existing.pop(facts["checkpoint_id"], None)
    newer = list(existing)[list(existing).index(before) :] if before in existing else []
    existing[facts["checkpoint_id"]] = facts
    for checkpoint_id in newer:
        existing[checkpoint_id] = existing.pop(checkpoint_id)


def _forget_oldest(existing: dict[str, Facts | None]) -> None:
    """Of very many checkpoints only the newest are remembered in full: enough to report again what was lost on the way."""
    if len(existing) > NOTICES_KEPT:
        known = [checkpoint_id for checkpoint_id, facts in existing.items() if facts is not None]
        for checkpoint_id in known[:-NOTICES_KEPT]:
            existing[checkpoint_id] = None


def _ships_logs() -> bool:
    """Not where the process that launched this one already takes what it prints to the coordinator."""
    return os.environ.get("STRATA_SHIP_LOGS", "1") != "0"


def _lasts(tiers: tuple[str, ...]) -> bool:
    return any(tier != MEMORY for tier in tiers)


def _gpu_count() -> int:
    import torch

    return 1 if torch.cuda.is_available() else 0


def given_worker_id() -> str:
    """`WORKER_ID`, which names a machine's only worker; of several each adds its number there. A task names its own."""
    name = os.environ.get("WORKER_ID", "") if "STRATA_TASK_ID" not in os.environ else ""
    if name and os.environ.get("LOCAL_WORLD_SIZE", "1") != "1":
        return f"{name}-{os.environ.get('LOCAL_RANK', '0')}"
    return name
