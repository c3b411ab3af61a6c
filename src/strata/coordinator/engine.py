"""The one writer: commands in, events made durable, only then answers out.

Nothing else in the coordinator changes the cluster: hard state through `submit` and `post`, soft state through `observe`.

Commands wait in one bounded queue. A batch is decided and applied (`Cluster.handle`), journaled with a single commit,
and only after that are its callers answered and its listeners notified. While a commit is under way `settled` holds
readers back, so nobody ever sees an event that a crash could take back. A failed commit ends the process: the journal is
the truth, and a restart replays it. Observations (`Cluster.observe`) count at once and are journaled nowhere.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from strata.coordinator.journal.sqlite import Journal, JournalError
from strata.core.cluster import Cluster
from strata.core.messages import (
    SOFT_EVENTS,
    ClockResumed,
    Command,
    Event,
    Instant,
    LoopStalled,
    Observation,
    Rebalance,
    Refused,
    Reply,
    Tick,
)
from strata.errors import StrataError

log = logging.getLogger("strata.coordinator.engine")

MAX_QUEUED = 50_000
MAX_BATCH = 2_000
TICK_S = 0.1
SNAPSHOT_EVERY = 20_000


class Clock(Protocol):
    def now(self) -> Instant: ...


class SystemClock:
    def now(self) -> Instant:
        return Instant(mono_s=time.monotonic(), wall_s=time.time())


class Listener(Protocol):
    """Called with the events of every batch, but for the soft ones, after they are durable. Must not block."""

    def __call__(self, events: Sequence[Event]) -> None: ...


class Unavailable(StrataError):
    """Not now: the command was not looked at, and may be retried in a second."""

    code = "unavailable"


class InternalError(StrataError):
    """A bug in Strata. The command changed nothing."""

    code = "internal"


OnReply = Callable[[Reply | StrataError], None]
"""Called with the durable reply to one command, before any listener is notified of the batch's events."""


class Engine:
    def __init__(self, cluster: Cluster, journal: Journal, clock: Clock) -> None:
        self.cluster = cluster
        self.clock = clock
        self.listeners: list[Listener] = []
        self.revision = 0
        """Grows with every durable batch: what readers compare to know that their copy is old."""
        self.on_plan: Callable[[float], None] = lambda seconds: None
        self.on_events: Callable[[int], None] = lambda count: None
        """Called with how many a batch had, soft ones among them."""
        self._journal = journal
        self._queue: deque[tuple[Command, OnReply]] = deque()
        self._wake = asyncio.Event()
        self._settled = asyncio.Event()
        self._settled.set()
        self._disk = ThreadPoolExecutor(1, "journal")
        self._since_snapshot = 0
        self._at_disk_s = 0.0
        """Of the time since the last tick."""
        self._stopping = False

    def replay(self) -> int:
        """Rebuild the state from the journal. Returns how many events there were."""
        count = 0
        epoch = Instant(mono_s=0.0, wall_s=0.0)
        for event in self._journal.load():
            try:
                self.cluster.apply(event, epoch)
            except (LookupError, ValueError, AssertionError) as error:
                raise JournalError(
                    f"The journal {self._journal} has a {type(event).__name__} that does not follow from "
                    f"what came before it ({error!r}).",
                    hint="Restore it from a copy, or start with another --data-dir.",
                ) from error
            count += 1
        self.observe(ClockResumed())
        self._since_snapshot = count
        return count

    def observe(self, observation: Observation) -> None:
        """Take soft state in, now. A refusal may rest on state that is not durable yet: wait for `settled` before answering it."""
        self.cluster.observe(observation, self.clock.now())

    def post(self, command: Command, answered: OnReply) -> None:
        """Take a command in, without waiting for its answer."""
        if len(self._queue) >= MAX_QUEUED or self._stopping:
            what = "is stopping" if self._stopping else "is overloaded"
            raise Unavailable(f"The coordinator {what}.", hint="Retry in a second.")
        self._queue.append((command, answered))
        self._wake.set()

    async def submit(self, command: Command, *, then: Callable[[Reply], None] | None = None) -> Reply:
        """The durable reply. `then` runs with it before any listener is notified of the batch's events."""
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()

        def answered(answer: Reply | StrataError) -> None:
            if isinstance(answer, StrataError):
                if not future.done():
                    future.set_exception(answer)
                return
            if then is not None:
                then(answer)
            if not future.done():
                future.set_result(answer)

        self.post(command, answered)
        return await future

    @property
    def is_settled(self) -> bool:
        """Whether all of the state is durable now. If not, listeners are notified as soon as it is."""
        return self._settled.is_set()

    async def settled(self) -> Cluster:
        """The state, when all of it is durable. Use it before the next await."""
        while not self._settled.is_set():
            await self._settled.wait()
        return self.cluster

    async def run(self) -> None:
        """Runs until `stop`; raises `JournalError` when the history can no longer be written."""
        next_tick_s = 0.0
        while not (self._stopping and not self._queue):
            try:
                async with asyncio.timeout(max(0.0, next_tick_s - time.monotonic())):
                    await self._wake.wait()
            except TimeoutError:
                pass
            self._wake.clear()
            batch = [self._queue.popleft() for _ in range(min(len(self._queue), MAX_BATCH))]
            if self._queue:
                self._wake.set()
            # Whoever stops has closed every connection itself: that is no reason to fail anybody.
            tick = not self._stopping and time.monotonic() >= next_tick_s
            if tick:
                # While the disk was at work messages were read; for the rest of a delay they may not have been.
                stall_s = time.monotonic() - next_tick_s - self._at_disk_s if next_tick_s else 0.0
                self._at_disk_s = 0.0
                if stall_s > TICK_S:
                    self.observe(LoopStalled(stall_s=stall_s))
                next_tick_s = time.monotonic() + TICK_S
            if batch or tick:
                await self._commit(batch, tick=tick)
        if self._since_snapshot:
            await self._in_background(self._journal.snapshot, self.cluster.compact())

    def stop(self) -> None:
        self._stopping = True
        self._wake.set()

    def close(self) -> None:
        self._disk.shutdown(wait=True)
        self._journal.close()

    # --- one batch ------------------------------------------------------------------------------------------

    async def _commit(self, batch: list[tuple[Command, OnReply]], *, tick: bool) -> None:
        now = self.clock.now()
        events: list[Event] = []
        answers: list[tuple[OnReply, Reply | StrataError]] = []
        for command, answered in batch:
            try:
                decision = self.cluster.handle(command, now)
            except Refused as refusal:
                answers.append((answered, refusal))
            except RecursionError:
                answers.append((answered, InternalError("The request is nested too deeply.")))
            else:
                events.extend(decision.events)
                answers.append((answered, decision.reply))
        if tick:
            events.extend(self.cluster.handle(Tick(), now).events)
        if self.cluster.plans_are_stale:
            started_s = time.perf_counter()
            moved = self.cluster.handle(Rebalance(), now).events
            if moved:
                self.on_plan(time.perf_counter() - started_s)
            events.extend(moved)
        hard: list[Event] = [event for event in events if not isinstance(event, SOFT_EVENTS)]
        await self._make_durable(hard)
        if events:
            self.revision += 1
            self.on_events(len(events))
        for answered, answer in answers:
            answered(answer)
        if hard:
            for listener in self.listeners:
                listener(hard)
            await asyncio.sleep(
                0
            )  # Who waited for `settled` has a turn before the next commit, however many follow.

    async def _make_durable(self, events: list[Event]) -> None:
        if not events:
            return
        self._settled.clear()
        try:
            await self._in_background(self._journal.append, events)
            self._since_snapshot += len(events)
            if self._since_snapshot >= SNAPSHOT_EVERY:
                await self._in_background(self._journal.snapshot, self.cluster.compact())
                self._since_snapshot = 0
        except JournalError:
            log.critical("the journal cannot be written; stopping before anything is acknowledged")
            raise
        self._settled.set()

    async def _in_background(self, work: Callable[..., None], argument: Sequence[Event]) -> None:
        started_s = time.monotonic()
        await asyncio.get_running_loop().run_in_executor(self._disk, work, argument)
        self._at_disk_s += time.monotonic() - started_s
