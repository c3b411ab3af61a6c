"""How the agent of a machine speaks for its workers: their sessions ride on one stream to the coordinator.

Guarantees:

* A worker acts as itself alone: what it says goes up under the member number of the connection that it came by. Numbers are never
  used again, so an answer that is late reaches no other worker.
* A folded heartbeat names only members that sent one since the last: the agent never beats for a worker that is silent. It
  leaves when all have sent one, and an interval after the last at the latest. A report that has not changed is not said again.
* Arrivals at one barrier wait for those of the machine's other members, `hold_s` at most, and go up as one message. Each keeps the
  call id and the generation that its worker named, so each counts once, and the coordinator refuses each for itself. The last one
  of a machine never waits.
* A worker whose connection drops is reported at once, and what it had not sent yet is not sent. A stream that is lost loses no worker:
  the next one attaches all of them again, and one that waits at a barrier arrives again under the same call id.

Pure: time arrives as `now_s`; reports and other messages are carried, not read. One caller at a time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, assert_never

from strata.core.types import WorkerId

HOLD_S = 0.02
MAX_MEMBERS = 1_024
"""On one stream."""
MAX_CALLS = 256
"""That one worker waits by; one that makes more is no longer spoken for."""

Payload = Any
"""What is carried and not read: a report, a batch of log lines, an answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """What all who arrive together have in common."""

    barrier_id: str
    step: int
    generation: int
    expected: int
    timeout_ms: int


# --- what happens to it -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOpened:
    """A worker has connected to the agent: connections are numbered once and never again."""

    connection: int
    worker_id: WorkerId
    incarnation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerBeat:
    connection: int
    report: Payload


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerArrived:
    connection: int
    meeting: Meeting
    call_id: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSaid:
    """Anything else: it goes up as it is."""

    connection: int
    message: Payload


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerDropped:
    """The connection has ended, with or without a goodbye before."""

    connection: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamOpened:
    """The coordinator has welcomed this machine's stream: streams are numbered once and never again."""

    stream: int
    interval_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamLost:
    stream: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberAnswered:
    """Something for one worker, which it gets as it is. With `ends` it is the last: it has left, or its incarnation is over."""

    stream: int
    member: int
    message: Payload
    ends: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TopologyChanged:
    """A new generation, with the rank of each member in it."""

    stream: int
    ranks: tuple[tuple[int, int], ...]
    topology: Payload


@dataclass(frozen=True, slots=True, kw_only=True)
class MeetingEnded:
    """How a barrier has ended for these calls: member, call id and order of arrival."""

    stream: int
    calls: tuple[tuple[int, bytes, int], ...]
    outcome: Payload


@dataclass(frozen=True, slots=True, kw_only=True)
class TimePassed:
    pass


Stimulus = (
    WorkerOpened
    | WorkerBeat
    | WorkerArrived
    | WorkerSaid
    | WorkerDropped
    | StreamOpened
    | StreamLost
    | MemberAnswered
    | TopologyChanged
    | MeetingEnded
    | TimePassed
)


# --- what it does -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Attach:
    """Up: from now on `member` is this worker."""

    member: int
    worker_id: WorkerId
    incarnation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Detach:
    """Up: the connection of this member has ended."""

    member: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Beats:
    """Up: these members are alive, and some of them have something new to report."""

    members: tuple[int, ...]
    reports: tuple[tuple[int, Payload], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrivals:
    """Up: these members have arrived, each by a call of its own."""

    meeting: Meeting
    calls: tuple[tuple[int, bytes], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Forward:
    """Up: what one member says."""

    member: int
    message: Payload


@dataclass(frozen=True, slots=True, kw_only=True)
class Tell:
    """Down, to one connection."""

    connection: int
    message: Payload


@dataclass(frozen=True, slots=True, kw_only=True)
class TellTopology:
    connection: int
    rank: int
    topology: Payload


@dataclass(frozen=True, slots=True, kw_only=True)
class TellEnd:
    """Down: how the barrier ended that this call arrived at."""

    connection: int
    call_id: bytes
    order: int
    outcome: Payload


@dataclass(frozen=True, slots=True, kw_only=True)
class Close:
    """Nothing more will be said on this connection."""

    connection: int


Up = Attach | Detach | Beats | Arrivals | Forward
Down = Tell | TellTopology | TellEnd | Close
Action = Up | Down


# --- the machine ------------------------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class _Member:
    number: int
    connection: int
    worker_id: WorkerId
    incarnation: int
    report: Payload = None
    """The newest; whether the coordinator has it is in `is_reported`."""
    is_reported: bool = False
    calls: dict[bytes, Meeting] = field(default_factory=dict)
    """That it waits by."""


class Multiplexer:
    def __init__(self, *, hold_s: float = HOLD_S) -> None:
        self._hold_s = hold_s
        self._interval_s = 1.0
        self._stream: int | None = None
        self._count = 0
        self._members: dict[int, _Member] = {}
        self._by_connection: dict[int, _Member] = {}
        self._beating: dict[int, _Member] = {}
        """Since the last folded heartbeat."""
        self._arrived: Counter[Meeting] = Counter()
        """How many calls wait at each, sent or not."""
        self._held: dict[Meeting, float] = {}
        """Meetings with calls that have not been sent, and when the first of these came."""
        self._unsent: dict[Meeting, dict[int, bytes]] = {}
        """Of those: the call of each member."""
        self._beat_due_s: float | None = None

    def __len__(self) -> int:
        return len(self._members)

    @property
    def due_s(self) -> float | None:
        """When `TimePassed` has something to do, unless something else happens before."""
        if self._stream is None:
            return None
        times_s = [since_s + self._hold_s for since_s in self._held.values()]
        if self._beat_due_s is not None:
            times_s.append(self._beat_due_s)
        return min(times_s, default=None)

    def handle(self, stimulus: Stimulus, now_s: float) -> list[Action]:
        match stimulus:
            case WorkerBeat():
                return self._beat(stimulus, now_s)
            case WorkerArrived():
                return self._arrive(stimulus, now_s)
            case WorkerSaid():
                return self._say(stimulus)
            case WorkerOpened():
                return self._open(stimulus, now_s)
            case WorkerDropped():
                return self._drop(stimulus.connection, now_s)
            case StreamOpened():
                return self._stream_opened(stimulus, now_s)
            case StreamLost():
                if stimulus.stream == self._stream:
                    self._stream = None
                return []
            case TimePassed():
                return [*self._fold(now_s), *self._release_held(now_s)]
            case MemberAnswered() | TopologyChanged() | MeetingEnded():
                # What a stream says that is over counts for nothing: the next one says what holds.
                return self._answered(stimulus, now_s) if stimulus.stream == self._stream else []
        assert_never(stimulus)

    # --- workers --------------------------------------------------------------------------------------------

    def _open(self, opened: WorkerOpened, now_s: float) -> list[Action]:
        if len(self._members) >= MAX_MEMBERS:
            return [Close(connection=opened.connection)]
        self._count += 1
        member = _Member(
            number=self._count,
            connection=opened.connection,
            worker_id=opened.worker_id,
            incarnation=opened.incarnation,
        )
        self._members[member.number] = self._by_connection[opened.connection] = member
        return [_attach(member)] if self._stream is not None else []

    def _drop(self, connection: int, now_s: float) -> list[Action]:
        member = self._by_connection.get(connection)
        if member is None:
            return []
        self._forget(member)
        if self._stream is None:
            return []  # Who is not attached again is not there.
        # Those that are left may have waited for this one alone.
        return [Detach(member=member.number), *self._fold(now_s), *self._release_held(now_s)]

    def _forget(self, member: _Member) -> None:
        del self._members[member.number]
        del self._by_connection[member.connection]
        self._beating.pop(member.number, None)
        for meeting in member.calls.values():
            self._count_out(meeting)
        for meeting in list(self._unsent):
            self._unsent[meeting].pop(member.number, None)
            if not self._unsent[meeting]:
                del self._unsent[meeting], self._held[meeting]

    def _beat(self, beat: WorkerBeat, now_s: float) -> list[Action]:
        member = self._by_connection.get(beat.connection)
        if member is None:
            return []
        if beat.report != member.report:
            member.report, member.is_reported = beat.report, False
        self._beating[member.number] = member
        if self._beat_due_s is None:
            self._beat_due_s = now_s + self._interval_s
        return self._fold(now_s)

    def _fold(self, now_s: float) -> list[Action]:
        if self._stream is None or self._beat_due_s is None:
            return []
        if len(self._beating) < len(self._members) and now_s < self._beat_due_s:
            return []
        beating, self._beating, self._beat_due_s = self._beating, {}, None
        if not beating:
            return []
        news = [member for member in beating.values() if not member.is_reported]
        for member in news:
            member.is_reported = True
        reports = tuple((member.number, member.report) for member in news)
        return [Beats(members=tuple(beating), reports=reports)]

    def _say(self, said: WorkerSaid) -> list[Action]:
        member = self._by_connection.get(said.connection)
        if member is None or self._stream is None:
            return []  # What is lost with a stream is said again by the worker that needs an answer.
        return [Forward(member=member.number, message=said.message)]

    # --- barriers -------------------------------------------------------------------------------------------

    def _arrive(self, arrived: WorkerArrived, now_s: float) -> list[Action]:
        member = self._by_connection.get(arrived.connection)
        if member is None or arrived.call_id in member.calls:
            return []
        if len(member.calls) >= MAX_CALLS:
            return [Close(connection=member.connection), *self._drop(member.connection, now_s)]
        meeting = arrived.meeting
        # Another call of the same worker does not fit into one message with its first.
        is_again = member.number in self._unsent.get(meeting, {})
        actions = self._send_calls([meeting]) if is_again else []
        member.calls[arrived.call_id] = meeting
        self._arrived[meeting] += 1
        self._unsent.setdefault(meeting, {})[member.number] = arrived.call_id
        self._held.setdefault(meeting, now_s)
        return [*actions, *self._release_held(now_s)]

    def _release_held(self, now_s: float) -> list[Action]:
        if self._stream is None:
            return []
        return self._send_calls(
            meeting
            for meeting, since_s in list(self._held.items())
            if now_s >= since_s + self._hold_s
            or self._is_complete(meeting)  # As in `due_s`, to the last bit.
        )

    def _is_complete(self, meeting: Meeting) -> bool:
        """No other worker of this machine is to come."""
        return self._arrived[meeting] >= min(len(self._members), meeting.expected or len(self._members))

    def _count_out(self, meeting: Meeting) -> None:
        self._arrived[meeting] -= 1
        if not self._arrived[meeting]:
            del self._arrived[meeting]

    def _send_calls(self, meetings: Iterable[Meeting]) -> list[Action]:
        if self._stream is None:
            return []  # They go up with all the others, when there is a stream.
        actions: list[Action] = []
        for meeting in meetings:
            calls = self._unsent.pop(meeting)
            del self._held[meeting]
            actions.append(Arrivals(meeting=meeting, calls=tuple(calls.items())))
        return actions

    # --- the stream -----------------------------------------------------------------------------------------

    def _stream_opened(self, opened: StreamOpened, now_s: float) -> list[Action]:
        self._stream, self._interval_s = opened.stream, opened.interval_s
        actions: list[Action] = []
        waiting: dict[tuple[Meeting, int], list[tuple[int, bytes]]] = {}
        for member in self._members.values():
            actions.append(_attach(member))
            member.is_reported = False
            before: Counter[Meeting] = Counter()
            for call_id, meeting in member.calls.items():
                waiting.setdefault((meeting, before[meeting]), []).append((member.number, call_id))
                before[meeting] += 1
        self._beating.clear()  # Being attached says as much.
        self._beat_due_s = None
        self._unsent.clear()
        self._held.clear()
        for (meeting, _), calls in waiting.items():
            actions.append(Arrivals(meeting=meeting, calls=tuple(calls)))
        return actions

    def _answered(
        self, answer: MemberAnswered | TopologyChanged | MeetingEnded, now_s: float
    ) -> list[Action]:
        match answer:
            case MemberAnswered():
                return self._tell(answer, now_s)
            case TopologyChanged():
                return [
                    TellTopology(connection=member.connection, rank=rank, topology=answer.topology)
                    for number, rank in answer.ranks
                    if (member := self._members.get(number)) is not None
                ]
            case MeetingEnded():
                actions: list[Action] = []
                for number, call_id, order in answer.calls:
                    member = self._members.get(number)
                    meeting = member.calls.pop(call_id, None) if member is not None else None
                    if member is not None and meeting is not None:
                        self._count_out(meeting)
                        actions.append(
                            TellEnd(
                                connection=member.connection,
                                call_id=call_id,
                                order=order,
                                outcome=answer.outcome,
                            )
                        )
                return actions

    def _tell(self, answer: MemberAnswered, now_s: float) -> list[Action]:
        member = self._members.get(answer.member)
        if member is None:
            return []
        actions: list[Action] = [Tell(connection=member.connection, message=answer.message)]
        if answer.ends:
            self._forget(member)
            actions.append(Close(connection=member.connection))
            actions += [*self._fold(now_s), *self._release_held(now_s)]
        return actions


def _attach(member: _Member) -> Attach:
    return Attach(member=member.number, worker_id=member.worker_id, incarnation=member.incarnation)
