"""The job's link to the coordinator: present when there is one, silent when there is none.

Training never waits for it. Notices go through a bounded queue to a thread of their own; when the coordinator is
away they wait there, and when the queue is full the oldest go, because the manifests are the truth and the
registry can be rebuilt from them.
"""

from __future__ import annotations

import logging
import os
import queue
import socket
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from strata.checkpoint.events import CheckpointInfo, Started
from strata.data.sampler import ElasticSampler
from strata.errors import StrataError
from strata.training.trace import Recovery
from strata.worker.errors import CoordinatorUnavailable, StaleWorker
from strata.worker.orchestrator import TrainingOrchestrator

log = logging.getLogger("strata.training")

NOTICES_KEPT = 256
JOIN_TIMEOUT_S = 3.0
SHARDS_SHOWN = 256


class CoordinatorLink:
    """One worker's presence at the coordinator. Also the checkpoint engine's observer."""

    def __init__(self, address: str, *, job: str, worker_id: str, metadata: Mapping[str, str]) -> None:
        self.worker_id = worker_id
        self._metadata = dict(metadata)
        self._orchestrator = TrainingOrchestrator(
            address, job_id=job, timeout_s=JOIN_TIMEOUT_S, ship_logs=_ships_logs(), on_stale=self._on_stale
        )
        self._notices: queue.Queue[Callable[[], None] | None] = queue.Queue(NOTICES_KEPT)
        self._closing = False
        self._thread = threading.Thread(target=self._work, name="strata-notices", daemon=True)
        self._thread.start()
        self._put(self._register)

    # --- told by the training loop, never waiting -----------------------------------------------------------

    def status(
        self, state: str, *, step: int, epoch: int, metrics: Mapping[str, float] | None = None
    ) -> None:
        with suppress(StaleWorker):  # The notice thread registers anew.
            self._orchestrator.heartbeat(step, epoch, state=state, metrics=metrics)

    def describe_data(
        self, sampler: ElasticSampler, path: str, data_format: str, metadata: Mapping[str, str]
    ) -> None:
        """So that everyone can see which data this is, how far it has come and what is being read."""

        def register() -> None:
            self._orchestrator.register_dataset(
                sampler.dataset,
                path,
                data_format,
                sampler.total,
                -(-sampler.total // SHARDS_SHOWN),
                sampler.shuffle,
                sampler.seed,
                metadata,
            )

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
            )
        )

    def flush_logs(self) -> None:
        self._orchestrator.flush_logs()

    def close(self, *, leave: bool) -> None:
        """Deliver what waits, for a few seconds; with `leave`, say goodbye."""
        self._closing = True
        if leave:
            self._put(lambda: self._orchestrator.deregister("training ended"))
        self._put(None)
        self._thread.join(10)
        self._orchestrator.close()

    # --- the checkpoint engine's observer, on its threads ---------------------------------------------------

    def on_started(self, save: Started) -> None:
        if _lasts(save.tiers):
            self._notify(save, "in_progress")

    def on_tier(self, save: Started, *, tier: str, size_bytes: int, seconds: float) -> None:
        pass  # `on_completed` has the tiers; a tier that is still being written to is not safe yet.

    def on_completed(self, save: Started, info: CheckpointInfo, *, seconds: float) -> None:
        if _lasts(info.tiers):
            self._notify(
                save,
                "completed",
                path=info.path,
                size_bytes=info.size_bytes,
                tiers=info.tiers,
                digest=info.digest,
                duration_s=seconds,
                parent_id=info.durable_parent or "",
                data=info.data if isinstance(info.data, dict) else None,
            )

    def on_failed(self, save: Started, error: BaseException, *, seconds: float) -> None:
        if _lasts(save.tiers):
            self._notify(save, "failed", reason=str(error)[:1000])

    def _notify(self, save: Started, status: str, **facts: Any) -> None:
        values = {"path": save.path, "size_bytes": save.size_bytes, **facts}
        self._put(
            lambda: self._orchestrator.notify_checkpoint(
                save.checkpoint_id,
                save.step,
                save.epoch,
                status=status,  # type: ignore[arg-type]
                **values,
            )
        )

    # --- inside ---------------------------------------------------------------------------------------------

    def _put(self, notice: Callable[[], None] | None) -> None:
        while True:
            try:
                self._notices.put_nowait(notice)
                return
            except queue.Full:
                try:
                    self._notices.get_nowait()
                    log.warning("the coordinator is away; the oldest notice to it was dropped")
                except queue.Empty:
                    pass

    def _work(self) -> None:
        while (notice := self._notices.get()) is not None:
            while True:
                try:
                    notice()
                except CoordinatorUnavailable as error:
                    if not self._closing:
                        log.debug("waiting for the coordinator: %s", error)
                        continue
                    log.warning("%s", error)
                except StaleWorker as error:
                    log.warning("registering anew: %s", error)
                    self._register()
                    continue
                except StrataError as error:
                    log.warning("the coordinator refused a notice: %s", error)
                break

    def _register(self) -> None:
        self._orchestrator.register_worker(
            self.worker_id, socket.gethostname(), 0, _gpu_count(), metadata=self._metadata
        )

    def _on_stale(self, reason: str) -> None:
        if not self._closing:
            self._put(self._register)


def open_link(
    address: str | None, *, job: str, rank: int, metadata: Mapping[str, str]
) -> CoordinatorLink | None:
    """A link where a coordinator is named (by argument or environment); None where there is none."""
    address = address or os.environ.get("COORDINATOR_ADDR") or os.environ.get("COORDINATOR_URL")
    if not address:
        return None
    task = os.environ.get("STRATA_TASK_ID")
    metadata = {**metadata, **({"task_id": task} if task else {})}
    return CoordinatorLink(address, job=job, worker_id=f"{job}-rank{rank}", metadata=metadata)


def _ships_logs() -> bool:
    """Not where whoever launched this process already takes what it prints to the coordinator."""
    return os.environ.get("STRATA_SHIP_LOGS", "1") != "0"


def _lasts(tiers: tuple[str, ...]) -> bool:
    return any(tier != "MEMORY" for tier in tiers)


def _gpu_count() -> int:
    import torch

    return 1 if torch.cuda.is_available() else 0
