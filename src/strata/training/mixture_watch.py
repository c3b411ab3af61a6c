"""A job's eye on the board of its mixture: requests to change its weights come from there, and what became of them goes there.

Rank 0 reads and writes the board at the coordinator, on a thread of its own; training never waits for it, but for a few
seconds when a job starts, so that a start after a crash knows every change that the one before it had adopted. All ranks
decide together, in `settle`: from what rank 0 has read, at the step they have all reached (`strata.core.data.mixture_changes`).
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import replace

from strata.core.data.mixture import MixtureError
from strata.core.data.mixture_changes import Board, Request, board_key, decide, unsettled
from strata.data.loading.sampler import ElasticSampler
from strata.training.exchange import gather

log = logging.getLogger("strata.training")

LOOK_EVERY_S = 0.5
START_S = 10.0
"""How long a start waits for the coordinator's word on changes."""
ATTEMPT_S = 3.0
CLOSE_S = 3.0


class MixtureWatch:
    """One rank's part in changing the weights of the mixture it reads."""

    def __init__(
        self, sampler: ElasticSampler, *, job: str, run: str, rank: int, coordinator: str | None
    ) -> None:
        self._sampler = sampler
        self._run = run
        self._key = board_key(job)
        self._requests: tuple[Request, ...] = ()
        """As the board had them last; on rank 0 alone."""
        self._outcomes: dict[int, Request] = {}
        """That are not on the board yet."""
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        address = coordinator or os.environ.get("COORDINATOR_ADDR") or os.environ.get("COORDINATOR_URL")
        if rank == 0 and address:
            self._open(address)

    @property
    def _order(self) -> tuple[Request, ...]:
        with self._lock:
            return self._requests

    # --- in the training loop -------------------------------------------------------------------------------

    @property
    def has_news(self) -> bool:
        """Whether rank 0 knows of a request that has to be decided about."""
        mixture = self._sampler.mixture
        return mixture is not None and bool(unsettled(self._order, mixture.plan))

    def settle(self, *, lead: int = 0) -> bool:
        """Decide, with all ranks, about what rank 0 has read, and change the weights; whether they were changed.
        Collective, between two steps."""
        requests: Sequence[Request] = gather(self._order)[0]
        mixture = self._sampler.mixture
        assert mixture is not None
        decided = decide(requests, mixture.plan, next_step=self._sampler.next_step, lead=lead)
        for change in decided.changes:
            self._sampler.change_weights(change)
        if self._thread is not None:
            with self._lock:
                self._outcomes.update((request.number, request) for request in decided.requests)
                known = {request.number: request for request in decided.requests}
                self._requests = tuple(known.get(each.number, each) for each in self._requests)
            self._wake.set()
            for request in decided.requests:
                _log(request)
        return bool(decided.changes)

    def close(self) -> None:
        if self._thread is not None:
            self._closing.set()
            self._wake.set()
            self._thread.join(CLOSE_S)

    # --- rank 0, beside it ----------------------------------------------------------------------------------

    def _open(self, address: str) -> None:
        from strata.rpc.cas import CoordinatorCasClient
        from strata.worker.address import coordinator_address

        self._client = CoordinatorCasClient(coordinator_address(address), timeout_s=ATTEMPT_S)
        deadline_s = time.monotonic() + START_S
        while not self._look():
            if time.monotonic() > deadline_s:
                log.warning(
                    "the coordinator is unreachable, so changes of the mixture's weights are unknown; using the weights "
                    "in the checkpoint"
                )
                break
            time.sleep(LOOK_EVERY_S)
        self._thread = threading.Thread(target=self._work, name="strata-mixture", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        while not self._closing.is_set():
            self._wake.wait(LOOK_EVERY_S)
            self._wake.clear()
            self._look()
        if self._outcomes:
            self._look()
        self._client.close()

    def _look(self) -> bool:
        """Read the board, and bring it up to date where it is not. One attempt; whether it was successful."""
        try:
            found = self._client.get(self._key)
            board = self._known(found[0]) if found is not None else self._empty()
            with self._lock:
                outcomes = dict(self._outcomes)
            wanted = board.decided(outcomes.values())
            if found is None or wanted.to_bytes() != found[0]:
                made, body, _ = self._client.cas(self._key, wanted.to_bytes(), found[1] if found else None)
                if not made:
                    self._wake.set()  # Another writer was faster.
                    return False
                board = Board.from_bytes(body) if body else wanted
        except ConnectionError as error:
            log.debug("the requested changes of the mixture cannot be read: %s", error)
            return False
        with self._lock:
            for number in outcomes:
                if self._outcomes.get(number) == outcomes[number]:
                    del self._outcomes[number]
            self._requests = board.decided(self._outcomes.values()).requests
        return True

    def _empty(self) -> Board:
        """A board for this run. What its checkpoint knows to be changed was requested once."""
        assert self._sampler.mixture is not None
        plan = self._sampler.mixture.plan
        known = tuple(Request.adopted(change) for change in plan.changes)
        return Board(
            run=self._run,
            definition=plan.definition,
            global_batch_size=plan.global_batch_size,
            requests=known,
        )

    def _known(self, body: bytes) -> Board:
        """The board as it is; that of another run, or of a mixture that was defined anew, is of no use."""
        ours = self._empty()
        try:
            board = Board.from_bytes(body)
        except MixtureError:
            return ours
        if board.run != self._run or board.definition != ours.definition:
            return ours
        return replace(board, global_batch_size=ours.global_batch_size)


def _log(request: Request) -> None:
    what = ", ".join(f"{name}={weight:g}" for name, weight in request.weights.items())
    if request.status == "adopted":
        log.info("weights change at step %s: %s", f"{request.from_step:,}", what)
    else:
        log.warning("weights are not changed to %s: %s", what, request.reason)
