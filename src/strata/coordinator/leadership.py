"""The shell around `core.leadership`: whether this coordinator leads, and what it does until then and after.

Alone (a journal in SQLite) it always leads. Among several (a journal in etcd) it is a **standby** first: it follows the log by a
watch, applies what the leader appended and serves reading. When no coordinator leads it campaigns; once elected it reads what it has not
seen, and only then answers as the leader. One that loses its lease, or whose append is refused, answers nothing more and starts
again from the log (`Deposed`, which `server.serve` knows).

Two threads: one looks, campaigns and renews, whatever the event loop does; the other follows. Both end with `close`.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, Literal, Protocol

from strata.coordinator.engine import Unavailable
from strata.coordinator.journal.etcd import Compacted, EtcdJournal, EtcdLog
from strata.coordinator.journal.protocol import Deposed, JournalError
from strata.core.leadership import (
    Campaign,
    Instruction,
    Leader,
    Leadership,
    Renew,
    StepDown,
    standby_text,
)
from strata.core.messages import Event
from strata.etcd import FAILURES, LeaseLost
from strata.logs import OutageLog

log = logging.getLogger("strata.coordinator.leadership")

LOOK_S = 0.5
ROLL_CALL_S = 1.0
PERIODS_PER_LEASE = 8.0
FOLLOW_AGAIN_S = 0.2
CATCH_UP_S = 2.0
POLL_S = 0.005


class Standby(Unavailable):
    """This coordinator does not lead. The command changed nothing; the one that leads takes it."""

    code = "standby"

    def __init__(self, leader: Leader | None) -> None:
        hint = (
            f"Send it there: gRPC {leader.grpc}, API {leader.http}."
            if leader is not None
            else "Retry in a second: one of the coordinators takes over automatically once etcd has a majority."
        )
        text = standby_text(leader)
        super().__init__(f"{text[0].upper()}{text[1:]}.", hint=hint)
        self.leader = leader


class Standing(Protocol):
    """Whether this coordinator leads."""

    @property
    def role(self) -> Literal["leader", "standby"]: ...

    @property
    def leader(self) -> Leader | None:
        """The coordinator that leads, where that is known and another one."""
        ...

    @property
    def others(self) -> tuple[str, ...]:
        """Where workers reach the other coordinators."""
        ...

    @property
    def term(self) -> int:
        """Of the coordinator that leads, as far as is known; 0 where there is only one."""
        ...

    @property
    def elections_total(self) -> int:
        """How often a coordinator began to lead while this one looked on."""
        ...

    @property
    def position(self) -> int:
        """How far the history goes that is applied here; 0 where that is not counted."""
        ...

    @property
    def behind(self) -> int:
        """How many records more the leader has appended, as far as is known."""
        ...

    def require(self) -> None:
        """Raises `Standby` unless this coordinator leads."""
        ...

    async def confirmed(self) -> None:
        """Returns when no other coordinator can have led up to now. Raises `Standby`."""
        ...

    async def caught_up(self) -> None:
        """Returns when everything that was acknowledged up to now, by whomever, is applied here. Raises `Standby`."""
        ...


class Alone:
    """The only coordinator there is."""

    role: Literal["leader", "standby"] = "leader"
    leader: Leader | None = None
    others: tuple[str, ...] = ()
    term = elections_total = position = behind = 0

    def require(self) -> None:
        return

    async def confirmed(self) -> None:
        return

    async def caught_up(self) -> None:
        return


def boot_time_s() -> float:
    """A clock that cannot be set and that runs while the machine sleeps."""
    clock = getattr(time, "CLOCK_BOOTTIME", None)
    return time.clock_gettime(clock) if clock is not None else time.monotonic()


class Election:
    """Among several. Made before the event loop's server is up; `start` begins."""

    def __init__(self, journal: EtcdJournal, *, lease_s: float) -> None:
        self._journal = journal
        self._lease_s = lease_s
        self._leadership = Leadership(lease_s=lease_s)
        self._lock = threading.Lock()
        # Of several endpoints a silent one must not cost the lease.
        self._lease_log = EtcdLog(journal.location, timeout_s=max(0.3, lease_s / 4))
        self._watch_log = EtcdLog(journal.location, timeout_s=2.0)
        self._me = Leader(name=secrets.token_hex(8), term=0)
        self._lease = ""
        self._last_position = 0
        self._stuck_at = -1
        self._applied = 0
        self._serves = False
        self._is_registered = False
        self._others: tuple[str, ...] = ()
        self.elections_total = 0
        self._last_term = 0
        self._next_roll_call_s = 0.0
        self._closing = threading.Event()
        self._poke = threading.Event()
        self._outage = OutageLog(log, over=f"etcd at {journal.location.address} answers again")
        self._lease_thread = threading.Thread(target=self._keep, name="leadership", daemon=True)
        self._follower = threading.Thread(target=self._follow, name="following", daemon=True)
        self._on_events: Callable[[list[Event]], None] = lambda events: None
        self._won = asyncio.Event()
        self._deposed: asyncio.Future[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        journal.is_led = lambda: self._leadership.role == "leader" and not self._closing.is_set()

    # --- standing -------------------------------------------------------------------------------------------

    @property
    def role(self) -> Literal["leader", "standby"]:
        return "leader" if self._serves and self._leadership.role == "leader" else "standby"

    @property
    def leader(self) -> Leader | None:
        known = self._leadership.leader
        return known if known is not None and known.name != self._me.name else None

    @property
    def others(self) -> tuple[str, ...]:
        """Where workers reach the other coordinators."""
        return self._others

    @property
    def term(self) -> int:
        known = self._leadership.leader
        return self._leadership.term or (known.term if known is not None else 0)

    @property
    def position(self) -> int:
        return self._journal.position if self._serves else self._applied

    @property
    def behind(self) -> int:
        return 0 if self._serves else max(0, self._last_position - self._applied)

    def require(self) -> None:
        if self.role != "leader":
            raise Standby(self.leader)

    async def confirmed(self) -> None:
        give_up_s = boot_time_s() + self._leadership.patience_s
        while not (self._serves and self._leadership.may_answer(boot_time_s())):
            # Elected, and still reading; or a leader whose lease is about to be renewed, or lost.
            if self._leadership.role != "leader" or boot_time_s() > give_up_s:
                raise Standby(self.leader)
            await asyncio.sleep(POLL_S)

    async def caught_up(self) -> None:
        if self._leadership.role == "leader":
            await self.confirmed()
            return
        try:
            seen = await asyncio.to_thread(self._journal.log.look)
        except FAILURES:
            raise Standby(self.leader) from None
        give_up_s = boot_time_s() + CATCH_UP_S
        while self._applied < seen.position:
            if boot_time_s() > give_up_s:
                raise Standby(self.leader)
            await asyncio.sleep(POLL_S)

    # --- from standby to leader -----------------------------------------------------------------------------

    def start(self, *, grpc: str, http: str, on_events: Callable[[list[Event]], None]) -> None:
        """Follow and campaign, from where the journal was loaded. `on_events`: applies what the leader has appended."""
        self._me = replace(self._me, grpc=grpc, http=http)
        self._on_events = on_events
        self._loop = asyncio.get_running_loop()
        self._deposed = self._loop.create_future()
        self._applied = self._last_position = self._journal.tail.position
        self._follower.start()
        self._lease_thread.start()

    async def elected(self) -> list[Event]:
        """Waits until this coordinator leads: the events that it has not applied yet. Raises `Deposed`."""
        await self._or_deposed(self._won.wait())
        return await asyncio.to_thread(self._take_over)

    def serves(self) -> None:
        """All is applied: from now on it answers as the leader."""
        self._serves = True
        log.warning(
            "this coordinator leads now (term %d, record %d of the log)", self.term, self._journal.position
        )

    async def leading(self, work: asyncio.Task[None]) -> None:
        """Until the work ends or another coordinator may lead, which raises `Deposed`."""
        await self._or_deposed(work)

    def close(self) -> None:
        """Ends the threads. A leader gives its lease back: the next leader need not wait for its end."""
        self._closing.set()
        self._poke.set()
        self._journal.log.client.abort()
        self._watch_log.close()
        for thread in (self._lease_thread, self._follower):
            if thread.ident is not None:
                thread.join()
        try:
            if self._lease:
                self._lease_log.revoke(self._lease)
            if self._is_registered:
                self._lease_log.forget(f"coordinators/{self._me.grpc}")
        except FAILURES as error:
            log.info("the lease could not be released and will expire: %s", error)
        self._lease_log.close()
        if self._deposed is not None and self._deposed.done():
            self._deposed.exception()  # It is known by now.

    async def _or_deposed(self, work: Awaitable[object]) -> None:
        assert self._deposed is not None
        task = asyncio.ensure_future(work)
        try:
            both: set[asyncio.Future[Any]] = {task, self._deposed}
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if self._deposed.done():
                self._deposed.result()
            await task
        finally:
            task.cancel()

    def _take_over(self) -> list[Event]:
        self._watch_log.client.end_streams()
        self._follower.join()
        events: list[Event] = []
        while True:
            try:
                for record in self._journal.log.records(self._journal.tail.position):
                    events += self._journal.take(record)
                break
            except FAILURES as error:
                if not self._journal.is_led():
                    raise Deposed("This coordinator lost its lease before it could lead.") from error
                time.sleep(FOLLOW_AGAIN_S)
            except JournalError as error:
                raise self._too_far_behind(error) from error
        self._journal.lead(self.term)
        return events

    # --- looking, campaigning, renewing ---------------------------------------------------------------------

    def _keep(self) -> None:
        next_look_s = 0.0
        while not self._closing.is_set():
            now_s = boot_time_s()
            with self._lock:
                instructions = self._leadership.tick(now_s)
            for instruction in instructions:
                self._carry_out(instruction)
            if self._leadership.role == "standby" and now_s >= next_look_s:
                next_look_s = now_s + LOOK_S
                self._look()
            if now_s >= self._next_roll_call_s:
                self._next_roll_call_s = now_s + ROLL_CALL_S
                self._call_the_roll()
            self._poke.wait(self._lease_s / PERIODS_PER_LEASE)
            self._poke.clear()

    def _carry_out(self, instruction: Instruction) -> None:
        match instruction:
            case Campaign():
                self._campaign()
            case Renew():
                self._renew()
            case StepDown(reason=reason):
                self._depose(reason)

    def _campaign(self) -> None:
        sent_s = boot_time_s()
        try:
            leader, lease, revision = self._lease_log.campaign(self._me, lease_s=self._lease_s)
        except (*FAILURES, LeaseLost) as error:
            self._outage.met(
                f"no coordinator leads, and etcd at {self._journal.location.address} does not answer: {error}"
            )
            with self._lock:
                self._leadership.not_won(None, revision=0, now_s=sent_s)
            return
        self._outage.ended()
        with self._lock:
            if lease and leader is not None:
                self._lease = lease
                self._leadership.won(leader, sent_s=sent_s)
                self._note_term(leader.term, is_own=True)
            else:
                self._leadership.not_won(leader, revision=revision, now_s=sent_s)
        if lease:
            self._in_loop(self._won.set)
        elif leader is not None:
            log.info("%s", standby_text(leader))

    def _renew(self) -> None:
        sent_s = boot_time_s()
        try:
            lives = self._lease_log.renew(self._lease)
        except LeaseLost:
            lives = False
        except FAILURES as error:
            self._outage.met(f"the lease of this leader cannot be renewed: {error}")
            return
        self._outage.ended()
        with self._lock:
            if lives:
                self._leadership.renewed(sent_s=sent_s)
            else:
                self._leadership.resign()
        if not lives:
            self._lease = ""
            self._depose("its lease has expired")

    def _look(self) -> None:
        try:
            seen = self._lease_log.look()
        except FAILURES as error:
            self._outage.met(f"etcd at {self._journal.location.address} does not answer: {error}")
            return
        self._outage.ended()
        self._last_position = max(self._last_position, seen.position)
        if seen.pointer is not None:
            self._journal.pointed(seen.pointer)
        self._see(seen.leader, seen.revision)
        # A watch on a member that is cut off reports nothing: another member is asked.
        if self._applied < seen.position and self._applied == self._stuck_at:
            self._watch_log.client.end_streams()
        self._stuck_at = self._applied

    def _call_the_roll(self) -> None:
        """Say where this coordinator is, and find out where the others are."""
        try:
            if not self._is_registered:
                self._lease_log.keep(f"coordinators/{self._me.grpc}", self._me.http.encode())
                self._is_registered = True
            found = self._lease_log.under("coordinators")
        except FAILURES:
            return
        self._others = tuple(address for address, _ in found if address != self._me.grpc)

    def _see(self, leader: Leader | None, revision: int) -> None:
        if leader is not None and leader.name == self._me.name:
            return  # What its own campaign brought about is its own to say.
        with self._lock:
            before = self._leadership.leader
            self._leadership.leader_seen(leader, revision=revision, now_s=boot_time_s())
            after = self._leadership.leader
            if after is not None:
                self._note_term(after.term)
        if after != before:
            if after is not None:
                log.info("%s", standby_text(after))
            self._poke.set()

    def _note_term(self, term: int, *, is_own: bool = False) -> None:
        """The first that is seen of another coordinator began before this one looked."""
        if term > self._last_term:
            self.elections_total += bool(self._last_term) or is_own
            self._last_term = term

    def _depose(self, reason: str) -> None:
        error = Deposed(f"This coordinator no longer leads: {reason}.", hint="It restarts as a standby.")

        def tell() -> None:
            if self._deposed is not None and not self._deposed.done():
                self._deposed.set_exception(error)

        self._in_loop(tell)

    # --- following ------------------------------------------------------------------------------------------

    def _follow(self) -> None:
        revision = self._journal.revision + 1
        while self._is_following():
            try:
                for changes in self._watch_log.watch(revision):
                    for change in changes:
                        if change.record is not None:
                            self._deliver(self._journal.take(change.record))
                        else:
                            self._see(change.leader, change.revision)
                    if changes:
                        revision = changes[-1].revision + 1
                    if not self._is_following():
                        return
            except Compacted:
                revision = self._read_on() or revision
            except FAILURES:
                if self._is_following():
                    self._watch_log.client.try_another_endpoint()
                    self._closing.wait(FOLLOW_AGAIN_S)
            except JournalError as error:
                self._fell_behind(error)
                return

    def _is_following(self) -> bool:
        return not self._closing.is_set() and self._leadership.role == "standby"

    def _read_on(self) -> int:
        """etcd has cleared what the watch would have reported: it is read instead. The revision to watch from; 0: not known."""
        try:
            seen = self._watch_log.look()
            for record in self._watch_log.records(self._journal.tail.position, revision=seen.revision):
                self._deliver(self._journal.take(record))
        except (Compacted, *FAILURES):
            self._closing.wait(FOLLOW_AGAIN_S)
            return 0
        self._see(seen.leader, seen.revision)
        return seen.revision + 1

    def _deliver(self, events: list[Event]) -> None:
        position = self._journal.tail.position

        def apply() -> None:
            if events:
                self._on_events(events)
            self._applied = position
            self._last_position = max(self._last_position, position)

        self._in_loop(apply)

    def _fell_behind(self, error: JournalError) -> None:
        failure = self._too_far_behind(error)
        with self._lock:
            self._leadership.resign()

        def tell() -> None:
            if self._deposed is not None and not self._deposed.done():
                self._deposed.set_exception(failure)

        self._in_loop(tell)

    @staticmethod
    def _too_far_behind(error: JournalError) -> Deposed:
        return Deposed(
            f"This standby fell behind and reads the journal again: {error.message}",
            hint="It restarts as a standby.",
        )

    def _in_loop(self, action: Callable[[], None]) -> None:
        assert self._loop is not None
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(action)
