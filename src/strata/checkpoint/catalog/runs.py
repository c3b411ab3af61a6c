"""A run's identity and its newest generation, kept with its checkpoints: the shell around `strata.core.jobs.runs`.

    run.json                       who the run is: written once, and the same at every destination
    run/00000007.claim.json        one for each start of the run, created by exactly one process

The farthest destination is the one that all machines share, so it decides: the identity is created there first, and
generations are claimed there. The nearer ones get copies, because each destination refuses a superseded process by what
stands in itself. A claim is renewed from a thread while the job lives, which also notices when a newer one has appeared.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace

from strata.checkpoint.catalog.listing import Catalog
from strata.checkpoint.errors import RunInUse, RunMismatch, Superseded
from strata.core.jobs.job import Fence
from strata.core.jobs.runs import (
    RENEW_S,
    Claim,
    InUse,
    RunRecord,
    RunRecordError,
    Take,
    identify,
    is_superseded,
    judge,
)
from strata.processes import LAUNCH_VARIABLE, Process, parent_process, this_process
from strata.stores.protocol import AlreadyExists, NotFound, Store, StoreError

log = logging.getLogger("strata.checkpoint")

RECORD_KEY = "run.json"
CLAIMS = "run/"
CLAIMS_KEPT = 4
WATCH_S = 0.5
_held_here: set[tuple[str, int]] = set()
"""Claims that jobs of this process hold: destination and generation."""


def launch_key() -> str:
    """What started this process: the same for all restarts of one launch, another for every other launch."""
    run = os.environ.get("TORCHELASTIC_RUN_ID", "")
    agent = os.environ.get(LAUNCH_VARIABLE, "")
    if agent.startswith(f"{run}:"):  # Or it is that of an agent which this one was started by.
        return f"torchrun:{agent}"
    if run not in ("", "none"):
        return f"torchrun:{run}"
    return parent_process().token if run else f"{this_process().token}:{uuid.uuid4().hex[:8]}"


def open_run(stores: Sequence[Store], *, name: str = "") -> RunRecord:
    """The run that these destinations, near to far, belong to; a new one where all of them are empty of one.

    Raises the store's error where one does not answer, and `RunMismatch` where they belong to different runs.
    """
    found = {store.url: read_record(store) for store in stores}
    try:
        known = identify(found, name=name)
    except RunRecordError as error:
        raise RunMismatch(error.message, hint=error.hint) from None
    wanted = known or RunRecord(run=uuid.uuid4().hex, name=name, created_at=time.time())
    for store in reversed(stores):
        if found[store.url] is not None:
            continue
        try:
            store.put(RECORD_KEY, wanted.encode(), if_absent=True)
        except AlreadyExists:  # Another start of the run was quicker, or the reply to our own was lost.
            there = read_record(store)
            if known is None and there is not None:
                known = wanted = there
            elif there is not None and there.run != wanted.run:
                return open_run(stores, name=name)
        known = wanted
    return wanted


class RunClaim:
    """The right of one start of a run to publish, until a newer start takes over."""

    def __init__(self, stores: Sequence[Store], claim: Claim) -> None:
        self._stores = tuple(stores)
        self._claim = claim
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self.step = 0
        """How far training has come, for the process that reads the claim after this one has ended."""
        self.superseded: str | None = None
        """Why this process may publish nothing any more."""
        self._thread = threading.Thread(target=self._renew, name="strata-claim", daemon=True)
        _held_here.add(self._key)
        self._thread.start()

    @classmethod
    def take(
        cls,
        stores: Sequence[Store],
        *,
        launch: str,
        on_wait: Callable[[str], None] = log.warning,
    ) -> RunClaim:
        """Claim the next generation of the run at these destinations. Raises `RunInUse` while another job lives there."""
        farthest = stores[-1]
        saved = max((_newest_saved(store) for store in stores), default=0)
        newest = newest_claim(farthest)
        first, since_s, reported = newest, time.monotonic(), False
        while True:
            if newest != first and (newest is None or first is None or newest.generation != first.generation):
                first, since_s = newest, time.monotonic()
            decision = judge(
                newest,
                launch=launch,
                holder_has_ended=_holder_has_ended(newest, farthest),
                changed=newest != first,
                unchanged_s=time.monotonic() - since_s,
            )
            if isinstance(decision, InUse):
                raise RunInUse(where=farthest.url, holder=decision.claim.who)
            if isinstance(decision, Take):
                claim = Claim(
                    generation=max(decision.generation, saved + 1),
                    launch=launch,
                    holder=this_process().token,
                    host=socket.gethostname(),
                    pid=os.getpid(),
                    step=newest.step if newest is not None else 0,
                    fences=newest.fences if newest is not None else (),
                )
                try:
                    farthest.put(claim_key(claim.generation), claim.encode(), if_absent=True)
                except AlreadyExists:
                    newest = newest_claim(farthest)
                    if newest is None or newest.holder != claim.holder:
                        continue  # Another process was quicker; otherwise the reply to our own was lost.
                for store in stores[:-1]:
                    store.put(claim_key(claim.generation), claim.encode())
                for store in stores:
                    _remove_old_claims(store, claim.generation)
                log.info(
                    "generation %d of the run at %s: %s", claim.generation, farthest.url, decision.reason
                )
                return cls(stores, claim)
            if not reported:
                reported = True
                on_wait(f"waiting: {decision.reason}")
            time.sleep(WATCH_S)
            newest = newest_claim(farthest)

    @property
    def generation(self) -> int:
        return self._claim.generation

    @property
    def fences(self) -> tuple[Fence, ...]:
        return self._claim.fences

    @property
    def last_known_step(self) -> int:
        """About how far the start before this one had come."""
        return self._claim.step

    @property
    def _key(self) -> tuple[str, int]:
        return (self._stores[-1].url, self._claim.generation)

    def fence(self, fence: Fence) -> None:
        """This generation has looked: what an older one publishes from now on does not count."""
        with self._lock:
            self._claim = self._claim.with_fence(fence)
        for store in self._stores:
            self._put(store)

    def admit(self, store: Store) -> None:
        """Asked before a manifest is put into a store: raises `Superseded` where a newer generation has been claimed."""
        claimed = claimed_generations(store)
        if is_superseded(self.generation, claimed):
            error = Superseded(where=store.url, generation=self.generation, newest=max(claimed))
            self.superseded = error.message
            raise error

    def release(self, *, ended: bool) -> None:
        """Stop renewing; `ended` lets the next start begin without waiting."""
        if self._stop.is_set():
            return
        self._stop.set()
        _held_here.discard(self._key)
        self._thread.join(2 * RENEW_S if ended else 0.5)  # It may be waiting for an unreachable destination.
        if ended:
            with self._lock:
                self._claim = replace(self._claim, ended=True, step=self.step)
            for store in self._stores:
                with contextlib.suppress(StoreError):
                    self._put(store)

    def _renew(self) -> None:
        while not self._stop.wait(RENEW_S):
            with self._lock:
                self._claim = replace(self._claim, count=self._claim.count + 1, step=self.step)
            with contextlib.suppress(StoreError):  # An unreachable destination is updated once it is back.
                self._put(self._stores[-1])
                claimed = claimed_generations(self._stores[-1])
                if is_superseded(self.generation, claimed):
                    where = self._stores[-1].url
                    self.superseded = Superseded(
                        where=where, generation=self.generation, newest=max(claimed)
                    ).message
                    return

    def _put(self, store: Store) -> None:
        with self._lock:
            store.put(claim_key(self._claim.generation), self._claim.encode())


def claim_key(generation: int) -> str:
    return f"{CLAIMS}{generation:08d}.claim.json"


def newest_claim(store: Store) -> Claim | None:
    claimed = claimed_generations(store)
    if not claimed:
        return None
    key = claim_key(max(claimed))
    try:
        return Claim.decode(store.read(key), where=f"{store.url}/{key}")
    except NotFound:
        return newest_claim(store)  # Removed since it was listed, because there is a newer one.
    except RunRecordError as error:
        raise RunMismatch(error.message, hint=error.hint) from None


def claimed_generations(store: Store) -> list[int]:
    """The starts of the run that a destination knows of."""
    names = [blob.key.removeprefix(CLAIMS).partition(".")[0] for blob in store.list(CLAIMS)]
    return [int(name) for name in names if name.isdecimal()]


def _newest_saved(store: Store) -> int:
    """The newest generation that has saved here; 0 where the claims can tell, which is everywhere but where they were
    deleted."""
    if claimed_generations(store):
        return 0
    return max((entry.manifest.generation for entry in Catalog(store).list().entries), default=0)


def _remove_old_claims(store: Store, newest: int) -> None:
    with contextlib.suppress(StoreError):
        for generation in claimed_generations(store):
            if generation <= newest - CLAIMS_KEPT:
                store.delete(claim_key(generation))


def read_record(store: Store) -> RunRecord | None:
    try:
        return RunRecord.decode(store.read(RECORD_KEY), where=f"{store.url}/{RECORD_KEY}")
    except NotFound:
        return None
    except RunRecordError as error:
        raise RunMismatch(error.message, hint=error.hint) from None


def _holder_has_ended(claim: Claim | None, store: Store) -> bool | None:
    """Whether the process that holds a claim has ended; None where this machine cannot know."""
    if claim is None:
        return None
    try:
        holder = Process.parse(claim.holder)
    except ValueError:
        return None
    if holder == this_process():
        return (store.url, claim.generation) not in _held_here
    return holder.has_ended() if holder.machine == this_process().machine else None
