"""What an agent says for its workers: see also `tests/sim/test_machines.py`, where everything goes wrong around it."""

from __future__ import annotations

from strata.core.fleet.multiplexer import (
    MAX_CALLS,
    MAX_MEMBERS,
    Action,
    Arrivals,
    Attach,
    Beats,
    Close,
    Detach,
    Forward,
    Meeting,
    MeetingEnded,
    MemberAnswered,
    Multiplexer,
    StreamLost,
    StreamOpened,
    Tell,
    TellEnd,
    TellTopology,
    TimePassed,
    TopologyChanged,
    WorkerArrived,
    WorkerBeat,
    WorkerDropped,
    WorkerOpened,
    WorkerSaid,
)
from strata.core.types import WorkerId

HOLD_S = 0.5
MEETING = Meeting(barrier_id="b", step=1, generation=0, expected=0, timeout_ms=0)


def opened(connection: int) -> WorkerOpened:
    return WorkerOpened(connection=connection, worker_id=WorkerId(f"w{connection}"), incarnation=connection)


def machine(workers: int, *, stream: int = 1) -> Multiplexer:
    """With a stream, and its first `workers` connections attached as members of the same numbers."""
    mux = Multiplexer(hold_s=HOLD_S)
    mux.handle(StreamOpened(stream=stream, interval_s=10.0), 0.0)
    for connection in range(1, workers + 1):
        mux.handle(opened(connection), 0.0)
    return mux


def arrive(
    mux: Multiplexer, connection: int, now_s: float, *, call: bytes = b"", meeting: Meeting = MEETING
) -> list[Action]:
    call_id = call or f"call-{connection}".encode()
    return mux.handle(WorkerArrived(connection=connection, meeting=meeting, call_id=call_id), now_s)


def beat(mux: Multiplexer, connection: int, now_s: float, report: object = "well") -> list[Action]:
    return mux.handle(WorkerBeat(connection=connection, report=report), now_s)


def test_a_folded_heartbeat_is_sent_when_all_members_have_reported() -> None:
    mux = machine(2)
    assert beat(mux, 1, 1.0) == []
    assert beat(mux, 2, 1.5) == [Beats(members=(1, 2), reports=((1, "well"), (2, "well")))]
    assert beat(mux, 1, 2.0) == []
    assert beat(mux, 2, 2.5, "slow") == [Beats(members=(1, 2), reports=((2, "slow"),))]


def test_nobody_beats_for_a_silent_worker_and_it_keeps_the_others_for_an_interval_at_most() -> None:
    mux = machine(2)
    beat(mux, 1, 1.0)
    assert mux.due_s == 11.0
    assert mux.handle(TimePassed(), 10.9) == []
    assert mux.handle(TimePassed(), 11.0) == [Beats(members=(1,), reports=((1, "well"),))]
    assert mux.due_s is None


def test_the_last_arrival_of_a_machine_takes_the_others_along() -> None:
    mux = machine(3)
    assert arrive(mux, 2, 1.0) == arrive(mux, 1, 1.1) == []
    calls = ((2, b"call-2"), (1, b"call-1"), (3, b"call-3"))
    assert arrive(mux, 3, 1.2) == [Arrivals(meeting=MEETING, calls=calls)]


def test_arrivals_wait_a_moment_for_a_neighbour_that_does_not_come_and_it_never_waits_then() -> None:
    mux = machine(3)
    arrive(mux, 1, 1.0)
    arrive(mux, 2, 1.1)
    assert mux.due_s == 1.0 + HOLD_S
    early = Arrivals(meeting=MEETING, calls=((1, b"call-1"), (2, b"call-2")))
    assert mux.handle(TimePassed(), 1.0 + HOLD_S) == [early]
    assert arrive(mux, 3, 9.0) == [Arrivals(meeting=MEETING, calls=((3, b"call-3"),))]


def test_a_barrier_of_two_does_not_wait_for_the_rest_of_the_machine() -> None:
    mux = machine(8)
    pair = Meeting(barrier_id="pair", step=1, generation=0, expected=2, timeout_ms=0)
    assert arrive(mux, 1, 1.0, meeting=pair) == []
    assert len(arrive(mux, 2, 1.0, meeting=pair)) == 1


def test_arrivals_of_two_generations_are_two_messages() -> None:
    mux = machine(2)
    stale = Meeting(barrier_id="b", step=1, generation=4, expected=0, timeout_ms=0)
    arrive(mux, 1, 1.0, meeting=stale)
    arrive(mux, 2, 1.0)
    assert mux.handle(TimePassed(), 1.0 + HOLD_S) == [
        Arrivals(meeting=stale, calls=((1, b"call-1"),)),
        Arrivals(meeting=MEETING, calls=((2, b"call-2"),)),
    ]


def test_a_repeated_call_is_sent_once() -> None:
    mux = machine(1)
    assert len(arrive(mux, 1, 1.0)) == 1
    assert arrive(mux, 1, 1.1) == []


def test_a_dropped_worker_is_reported_at_once_and_its_neighbours_no_longer_wait_for_it() -> None:
    mux = machine(3)
    arrive(mux, 1, 1.0)
    arrive(mux, 2, 1.0)
    beat(mux, 1, 1.0)
    beat(mux, 2, 1.0)
    assert mux.handle(WorkerDropped(connection=3), 1.1) == [
        Detach(member=3),
        Beats(members=(1, 2), reports=((1, "well"), (2, "well"))),
        Arrivals(meeting=MEETING, calls=((1, b"call-1"), (2, b"call-2"))),
    ]


def test_what_a_dropped_worker_had_not_sent_is_not_sent() -> None:
    mux = machine(2)
    arrive(mux, 1, 1.0)
    assert mux.handle(WorkerDropped(connection=1), 1.1) == [Detach(member=1)]
    assert arrive(mux, 2, 1.2) == [Arrivals(meeting=MEETING, calls=((2, b"call-2"),))]


def test_a_lost_stream_loses_nobody_and_who_waits_arrives_again_under_the_same_call() -> None:
    mux = machine(2)
    arrive(mux, 1, 1.0)
    arrive(mux, 2, 1.0)
    beat(mux, 1, 1.0)
    beat(mux, 2, 1.0)
    assert mux.handle(StreamLost(stream=1), 2.0) == []
    assert mux.due_s is None
    assert mux.handle(StreamOpened(stream=2, interval_s=10.0), 3.0) == [
        Attach(member=1, worker_id=WorkerId("w1"), incarnation=1),
        Attach(member=2, worker_id=WorkerId("w2"), incarnation=2),
        Arrivals(meeting=MEETING, calls=((1, b"call-1"), (2, b"call-2"))),
    ]
    assert beat(mux, 1, 4.0) == []
    assert len(beat(mux, 2, 4.0)) == 1, "the next stream hears every report anew"


def test_who_drops_while_there_is_no_stream_is_not_attached_again() -> None:
    mux = machine(2)
    mux.handle(StreamLost(stream=1), 2.0)
    assert mux.handle(WorkerDropped(connection=1), 2.5) == []
    assert mux.handle(StreamOpened(stream=2, interval_s=10.0), 3.0) == [
        Attach(member=2, worker_id=WorkerId("w2"), incarnation=2)
    ]


def test_each_worker_gets_its_own_rank_order_and_answers() -> None:
    mux = machine(2)
    arrive(mux, 1, 1.0)
    arrive(mux, 2, 1.0)
    ended = MeetingEnded(stream=1, calls=((2, b"call-2", 7), (1, b"call-1", 6)), outcome="released")
    assert mux.handle(ended, 2.0) == [
        TellEnd(connection=2, call_id=b"call-2", order=7, outcome="released"),
        TellEnd(connection=1, call_id=b"call-1", order=6, outcome="released"),
    ]
    assert mux.handle(ended, 2.1) == [], "once"
    topology = TopologyChanged(stream=1, ranks=((1, 40), (2, 41), (3, 42)), topology="g")
    assert mux.handle(topology, 3.0) == [
        TellTopology(connection=1, rank=40, topology="g"),
        TellTopology(connection=2, rank=41, topology="g"),
    ]
    assert mux.handle(MemberAnswered(stream=1, member=2, message="kept"), 3.0) == [
        Tell(connection=2, message="kept")
    ]


def test_a_reply_to_another_worker_or_from_an_earlier_stream_is_dropped() -> None:
    mux = machine(2)
    arrive(mux, 1, 1.0)
    arrive(mux, 2, 1.0)
    wrong = MeetingEnded(stream=1, calls=((1, b"call-2", 0),), outcome="released")
    assert mux.handle(wrong, 2.0) == []
    mux.handle(StreamLost(stream=1), 2.0)
    mux.handle(StreamOpened(stream=2, interval_s=10.0), 3.0)
    late = MeetingEnded(stream=1, calls=((1, b"call-1", 0),), outcome="released")
    assert mux.handle(late, 3.0) == []
    mux.handle(WorkerDropped(connection=1), 4.0)
    mux.handle(opened(9), 4.0)
    assert mux.handle(MemberAnswered(stream=2, member=1, message="for the one before"), 5.0) == []


def test_a_session_that_the_coordinator_ends_is_closed_after_its_last_word() -> None:
    mux = machine(2)
    stale = MemberAnswered(stream=1, member=1, message="stale", ends=True)
    assert mux.handle(stale, 1.0) == [Tell(connection=1, message="stale"), Close(connection=1)]
    assert mux.handle(WorkerDropped(connection=1), 1.1) == [], "there is nobody left to report"
    assert len(beat(mux, 2, 2.0)) == 1, "the other one does not wait for it"


def test_what_is_said_goes_up_under_the_number_of_its_connection_and_waits_for_nothing() -> None:
    mux = machine(2)
    assert mux.handle(WorkerSaid(connection=2, message="log"), 1.0) == [Forward(member=2, message="log")]
    assert mux.handle(WorkerSaid(connection=77, message="log"), 1.0) == []
    mux.handle(StreamLost(stream=1), 2.0)
    assert mux.handle(WorkerSaid(connection=2, message="log"), 2.0) == []


def test_members_and_calls_are_bounded() -> None:
    mux = machine(MAX_MEMBERS)
    assert mux.handle(opened(MAX_MEMBERS + 1), 1.0) == [Close(connection=MAX_MEMBERS + 1)]
    mux = machine(1)
    for number in range(MAX_CALLS):
        assert len(arrive(mux, 1, 1.0, call=b"%d" % number)) == 1
    assert arrive(mux, 1, 1.0, call=b"one more") == [Close(connection=1), Detach(member=1)]
