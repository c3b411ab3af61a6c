"""The one writer: commands in, events made durable, only then answers out.

Nothing else in the coordinator changes the cluster: hard state through `submit` and `post`, soft state through `observe`.

Commands wait in one bounded queue. A batch is decided and applied (`Cluster.handle`), journaled with a single commit,
and only after that are its callers answered and its listeners notified. While a commit is under way `settled` holds
readers back, so no reader ever sees an event that a crash could take back. A failed commit ends the process: the journal is
the truth, and a restart replays it. Observations (`Cluster.observe`) count at once and are journaled nowhere.

On a full disk (`journal.space`) commands that would need space are refused with `StorageFull`, arrivals at barriers wait, and
all that makes the state smaller is still recorded: goodbyes, stops, ends of attempts, and what time brings about. Soft values,
observations and reading need no disk. Where not even that can be recorded (`is_closed`: etcd has no reserve) it waits, and time
brings nothing about. When there is space, everything is accepted again. A client that writes more than its
share is refused (`quotas`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import Literal, Protocol, TypeVar

from strata.coordinator.journal import codec
from strata.coordinator.journal.protocol import (
    Deposed,
    Journal,
    JournalError,
    JournalFull,
    JournalSizes,
    JournalSpace,
    Snapshot,
)
from strata.coordinator.quotas import Quotas
from strata.core.cluster import Cluster
from strata.core.messages import (
    SOFT_EVENTS,
    ArriveAtBarrier,
    ArriveTogether,
    ClockResumed,
    Command,
    DeregisterWorker,
    EndAttempt,
    Event,
    Instant,
    LoopStalled,
    Observation,
    Rebalance,
    Refused,
    Reply,
    StopTask,
    SwapValue,
    Tick,
)
from strata.errors import StrataError

log = logging.getLogger("strata.coordinator.engine")

MAX_QUEUED = 50_000
MAX_BATCH = 2_000
TICK_S = 0.1
SNAPSHOT_EVERY = 20_000
SNAPSHOT_BYTES = 16 << 20
"""A snapshot follows so many bytes of events, or as many as the last one had."""
BATCH_BYTES = 4 << 20
"""A batch ends with the command that brings it to this: a full disk must be noticed before it is written."""
LOOK_S = 1.0
EPOCH = Instant(mono_s=0.0, wall_s=0.0)
"""When the past was, for the state: how long it took is unknown to the monotonic clock."""
PIECE_S = 0.0005
"""How long the state is looked at, at a time, for a snapshot in the background: a heartbeat waits no longer for that."""
PIECE_EVENTS = 100
PIECE_REST, LONGEST_REST_S = 9.0, 0.5
"""Everything else has so many times as long before the next piece, but no longer: a disk that is slow must not hold up the snapshot."""


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


class StorageFull(Unavailable):
    """The disk of the journal is full. The command changed nothing, and may be retried when there is space."""

    code = "storage_full"

    def __init__(self, space: JournalSpace) -> None:
        message, hint = space.explain()
        super().__init__(message, hint=hint)


def when_full(command: Command, *, is_closed: bool = False) -> Literal["decide", "wait", "refuse"]:
    """What becomes of a command on a full disk; `is_closed`: without a reserve."""
    match command:
        case SwapValue(soft=True) | Tick() | Rebalance():
            return "decide"
        case DeregisterWorker() | StopTask() | EndAttempt():
            # At most once for each of what there is: there is an end to them.
            return "wait" if is_closed else "decide"
        case ArriveAtBarrier() | ArriveTogether():
            return "wait"
        case _:
            return "refuse"


class InternalError(StrataError):
    """A bug in Strata. The command changed nothing."""

    code = "internal"


OnReply = Callable[[Reply | StrataError], None]
"""Called with the durable reply to one command, before any listener is notified of the batch's events."""


@dataclass(frozen=True, slots=True)
class Posted:
    command: Command
    answered: OnReply
    client: str
    """Whose budget it is charged to; the coordinator's own commands are charged to none."""


def draw(history: Iterator[Event], *, within_s: float) -> list[Event]:
    """The next piece of it; at least one event, where there is one."""
    end_s = time.perf_counter() + within_s
    piece: list[Event] = []
    for event in islice(history, PIECE_EVENTS):
        piece.append(event)
        if time.perf_counter() >= end_s:
            break
    return piece


_T = TypeVar("_T")


class Engine:
    def __init__(self, cluster: Cluster, journal: Journal, clock: Clock) -> None:
        self.cluster = cluster
        self.clock = clock
        self.listeners: list[Listener] = []
        self.revision = 0
        """Grows with every durable batch: what readers compare to know that their copy is old."""
        self.require_leading: Callable[[], None] = lambda: None
        """Raises what commands are refused with while another coordinator leads."""
        self.confirmed: Callable[[], Awaitable[None]] | None = None
        """Among several coordinators: returns when no other coordinator can have led up to now, or raises what to answer instead. What is
        answered without being written (refusals, swaps that were too late) rests on it."""
        self.on_plan: Callable[[float], None] = lambda seconds: None
        self.on_events: Callable[[int], None] = lambda count: None
        """Called with how many a batch had, soft ones among them."""
        self.on_tick: Callable[[], None] = lambda: None
        """Called after every tick, when all of its consequences are durable and stalls are credited."""
        self.space = journal.space
        self.refused_full_total = 0
        """Commands that were refused for lack of space."""
        self._journal = journal
        self._quotas = Quotas()
        self._queue: deque[Posted] = deque()
        self._waiting: list[Posted] = []
        """Arrivals at barriers, while the disk is full."""
        self._looked_s = 0.0
        self._wake = asyncio.Event()
        self._settled = asyncio.Event()
        self._settled.set()
        self._disk = ThreadPoolExecutor(1, "journal")
        self._since_snapshot = 0
        self._since_snapshot_bytes = 0
        self._snapshot_bytes = 0
        self._at_disk_s = 0.0
        """Of the time since the last tick."""
        self._stopping = False
        self._compaction: asyncio.Task[None] | None = None
        self.compactions_total = 0

    def replay(self, *, leads: bool = True) -> int:
        """Rebuild the state from the journal. Returns how many events there were. One that does not lead calls `resume` when it does."""
        count = self._apply_history(self._journal.load())
        if leads:
            self.resume()
        return count

    def follow(self, events: Sequence[Event]) -> None:
        """Take in what another coordinator, which leads, has made durable."""
        self._apply_history(events)
        self.revision += 1
        self.on_events(len(events))
        for listener in self.listeners:
            listener(events)

    def resume(self) -> None:
        """From here on time counts: everybody has the full time again to report."""
        self.observe(ClockResumed())

    def _apply_history(self, events: Iterable[Event]) -> int:
        count = size_bytes = 0
        for event in events:
            try:
                self.cluster.apply(event, EPOCH)
            except (
                LookupError,
                ValueError,
                AssertionError,
                ArithmeticError,  # Numbers that no decision has made: a shard size of zero,
                MemoryError,  # or as many shards as there are numbers.
            ) as error:
                raise JournalError(
                    f"The journal {self._journal} has a {type(event).__name__} that does not fit the events before it "
                    f"({error!r}).",
                    hint="Restore it from a copy, or start with another --data-dir.",
                ) from error
            count += 1
            size_bytes += codec.size_bytes(event)
        self._since_snapshot += count
        self._since_snapshot_bytes += size_bytes
        return count

    def observe(self, observation: Observation) -> None:
        """Take soft state in, now. A refusal may rest on state that is not durable yet: wait for `settled` before answering it."""
        self.cluster.observe(observation, self.clock.now())

    def post(self, command: Command, answered: OnReply, *, client: str = "") -> None:
        """Take a command in, without waiting for its answer."""
        self.require_leading()
        if len(self._queue) >= MAX_QUEUED or self._stopping:
            what = "is stopping" if self._stopping else "is overloaded"
            raise Unavailable(f"The coordinator {what}.", hint="Retry in a second.")
        if self.space.is_blocked and when_full(command, is_closed=True) == "refuse":
            self.refused_full_total += 1
            raise StorageFull(self.space)
        self._queue.append(Posted(command, answered, client))
        self._wake.set()

    async def submit(
        self, command: Command, *, client: str = "", then: Callable[[Reply], None] | None = None
    ) -> Reply:
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

        self.post(command, answered, client=client)
        return await future

    @property
    def journal_sizes(self) -> JournalSizes | None:
        return self._journal.sizes()

    @property
    def is_settled(self) -> bool:
        """Whether all of the state is durable now. If not, listeners are notified as soon as it is."""
        return self._settled.is_set()

    async def settled(self) -> Cluster:
        """The state, when all of it is durable. Use it before the next await. Raises `StorageFull` where that may take long."""
        while not self._settled.is_set():
            if self.space.is_blocked:
                raise StorageFull(self.space)
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._settled.wait()
        return self.cluster

    async def run(self) -> None:
        """Runs until `stop`; raises `JournalError` when the history can no longer be written."""
        try:
            await self._run()
        finally:
            if self._compaction is not None:  # The journal has failed: nothing more is written to it.
                self._compaction.cancel()

    async def _run(self) -> None:
        next_tick_s = 0.0
        while not (self._stopping and not self._queue):
            try:
                async with asyncio.timeout(max(0.0, next_tick_s - time.monotonic())):
                    await self._wake.wait()
            except TimeoutError:
                pass
            self._wake.clear()
            await self._look_at_space()
            batch = [self._queue.popleft() for _ in range(min(len(self._queue), MAX_BATCH))]
            if self._queue:
                self._wake.set()
            # A coordinator that stops has closed every connection itself: that is no reason to fail a worker.
            tick = not self._stopping and time.monotonic() >= next_tick_s
            if tick and self.space.is_closed:  # What time would bring about could not be recorded.
                tick, next_tick_s = False, time.monotonic() + TICK_S
            if tick:
                # While the disk was at work messages were read; for the rest of a delay they may not have been.
                stall_s = time.monotonic() - next_tick_s - self._at_disk_s if next_tick_s else 0.0
                self._at_disk_s = 0.0
                if stall_s > TICK_S:
                    self.observe(LoopStalled(stall_s=stall_s))
                next_tick_s = time.monotonic() + TICK_S
            if batch or tick:
                await self._commit(batch, tick=tick)
            await self._end_compaction(wait=False)
        self._waiting.clear()  # They arrive again where the coordinator is started again.
        await self._end_compaction(wait=True)
        if self._since_snapshot:
            await self._snapshot()

    def stop(self) -> None:
        self._stopping = True
        self._wake.set()

    def close(self) -> None:
        self._disk.shutdown(wait=True)
        self._journal.close()

    # --- one batch ------------------------------------------------------------------------------------------

    async def _look_at_space(self) -> None:
        if self._stopping or time.monotonic() - self._looked_s < LOOK_S:
            return
        self._looked_s = time.monotonic()
        await self._in_background(self.space.look)
        if not self.space.is_full and self._waiting:
            self._queue.extendleft(reversed(self._waiting))
            self._waiting.clear()
            self._wake.set()

    def _may_proceed(self, posted: Posted, now: Instant) -> bool:
        """Whether a command may be decided now; if not, it waits for space. Raises `StorageFull` and `Overloaded`."""
        if self.space.is_full:
            fate = when_full(posted.command, is_closed=self.space.is_closed)
            if fate == "wait" and len(self._waiting) < MAX_QUEUED and not self._stopping:
                self._waiting.append(posted)
                return False
            if fate != "decide":
                self.refused_full_total += 1
                raise StorageFull(self.space)
        if posted.client:
            self._quotas.check(posted.client, now.mono_s)
        return True

    async def _commit(self, batch: list[Posted], *, tick: bool) -> None:
        now = self.clock.now()
        events: list[Event] = []
        answers: list[tuple[OnReply, Reply | StrataError]] = []
        batch_bytes = 0
        for number, posted in enumerate(batch):
            if batch_bytes >= BATCH_BYTES:
                self._queue.extendleft(reversed(batch[number:]))
                self._wake.set()
                break
            try:
                if not self._may_proceed(posted, now):
                    continue
                decision = self.cluster.handle(posted.command, now)
            except (Refused, StorageFull) as refusal:
                answers.append((posted.answered, refusal))
            except RecursionError:
                answers.append((posted.answered, InternalError("The request is nested too deeply.")))
            else:
                events.extend(decision.events)
                answers.append((posted.answered, decision.reply))
                batch_bytes += self._charge(posted.client, decision.events, now)
        own: list[Event] = []
        if tick:
            own.extend(self.cluster.handle(Tick(), now).events)
        if self.cluster.plans_are_stale:
            started_s = time.perf_counter()
            moved = self.cluster.handle(Rebalance(), now).events
            if moved:
                self.on_plan(time.perf_counter() - started_s)
            own.extend(moved)
        self._charge("", own, now)
        events.extend(own)
        hard: list[Event] = [event for event in events if not isinstance(event, SOFT_EVENTS)]
        await self._make_durable(hard)
        if answers and not hard and self.confirmed is not None:
            try:
                await self.confirmed()
            except StrataError as error:
                answers = [(answered, error) for answered, _ in answers]
        if events:
            self.revision += 1
            self.on_events(len(events))
        for answered, answer in answers:
            answered(answer)
        if tick:
            self.on_tick()
        if hard:
            for listener in self.listeners:
                listener(hard)
            # Who waited for `settled` has a turn before the next commit, however many follow.
            await asyncio.sleep(0)

    def _charge(self, client: str, events: Sequence[Event], now: Instant) -> int:
        """How many bytes these are in the journal."""
        hard = [event for event in events if not isinstance(event, SOFT_EVENTS)]
        size_bytes = sum(map(codec.size_bytes, hard))
        if client and hard:
            self._quotas.charge(client, events=len(hard), size_bytes=size_bytes, now_s=now.mono_s)
        self._since_snapshot_bytes += size_bytes
        return size_bytes

    async def _make_durable(self, events: list[Event]) -> None:
        if not events:
            return
        self._settled.clear()
        try:
            await self._in_background(self._journal.append, events)
            self._since_snapshot += len(events)
            most_bytes = max(SNAPSHOT_BYTES, self._snapshot_bytes)
            is_due = self._since_snapshot >= SNAPSHOT_EVERY or self._since_snapshot_bytes >= most_bytes
            if is_due and not self.space.is_full:
                await self._start_compaction()
        except Deposed:
            raise
        except JournalError:
            log.critical("the journal cannot be written; stopping before anything is acknowledged")
            raise
        self._settled.set()

    async def _start_compaction(self) -> None:
        """The state of now becomes the snapshot, in the background, in pieces: no commit waits for more than one of them."""
        if self._compaction is None:
            started = asyncio.get_running_loop().run_in_executor(self._disk, self._journal.begin_snapshot)
            self._compaction = asyncio.create_task(self._compact(self.cluster.compaction(), await started))
            self._since_snapshot = self._since_snapshot_bytes = 0

    async def _compact(self, history: Iterator[Event], snapshot: Snapshot) -> None:
        """Between pieces everything else has its turn, for several times as long as a piece has taken."""
        started_s = time.monotonic()
        size_bytes = 0
        try:
            while piece := draw(history, within_s=PIECE_S):
                drawn_s = time.monotonic()
                size_bytes += await self._beside(snapshot.add, piece)
                await self._rest(time.monotonic() - drawn_s + PIECE_S)
            await self._beside(snapshot.commit)
        except JournalFull as error:
            log.warning("%s Nothing is lost: it holds every event.", error)
        else:
            self._snapshot_bytes = size_bytes
        with suppress(JournalFull):
            more = True
            while more:
                more = await self._beside(snapshot.clean)
                await self._rest(PIECE_S)
        self.compactions_total += 1
        log.debug("compacted to %d bytes in %.1f s", size_bytes, time.monotonic() - started_s)

    async def _rest(self, worked_s: float) -> None:
        await asyncio.sleep(0.0 if self._stopping else min(PIECE_REST * worked_s, LONGEST_REST_S))

    async def _end_compaction(self, *, wait: bool) -> None:
        """Raises what it has failed with, when it has ended."""
        if self._compaction is not None and (wait or self._compaction.done()):
            compaction, self._compaction = self._compaction, None
            await compaction

    async def _beside(self, work: Callable[..., _T], *arguments: object) -> _T:
        """In the journal's thread, between commits, while no caller waits for it."""
        return await asyncio.get_running_loop().run_in_executor(self._disk, work, *arguments)

    async def _snapshot(self) -> None:
        history = self.cluster.compact()
        try:
            await self._in_background(self._journal.snapshot, history)
        except JournalFull as error:
            log.warning("%s Nothing is lost: it holds every event.", error)
        else:
            self._snapshot_bytes = sum(map(codec.size_bytes, history))
        self._since_snapshot = self._since_snapshot_bytes = 0

    async def _in_background(self, work: Callable[..., None], *arguments: object) -> None:
        started_s = time.monotonic()
        await asyncio.get_running_loop().run_in_executor(self._disk, work, *arguments)
        self._at_disk_s += time.monotonic() - started_s
