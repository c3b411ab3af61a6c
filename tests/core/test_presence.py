"""Agents of a rendezvous: there while they hold a stream, lost when it dropped and stayed away, and never before they were seen."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from strata.core.fleet.presence import FORGOTTEN_AFTER_S, MAX_DROPPED, PresenceLimits
from strata.core.messages import AgentConnected, AgentDisconnected, ClockResumed, InvalidArgument
from tests.core.builders import Fleet, instant

GRACE_S = PresenceLimits().grace_s


class Meeting:
    """Agents of rendezvous, as the coordinator observes them."""

    def __init__(self) -> None:
        self.fleet = Fleet()

    def open(self, node: str, key: str = "run") -> None:
        self.fleet.observe(AgentConnected(key=key, node=node))

    def end(self, node: str, key: str = "run", *, goodbye: bool = False) -> None:
        self.fleet.observe(AgentDisconnected(key=key, node=node, said_goodbye=goodbye))

    def after(self, seconds: float) -> dict[str, frozenset[str]]:
        self.fleet.now_s += seconds
        return dict(self.fleet.cluster.presence.lost(instant(self.fleet.now_s)))


def test_an_agent_whose_stream_dropped_is_lost_after_the_grace_and_not_before() -> None:
    meeting = Meeting()
    for node in "ab":
        meeting.open(node)
    meeting.end("a")
    assert meeting.after(0.9 * GRACE_S) == {}
    assert meeting.after(0.2 * GRACE_S) == {"run": frozenset("a")}


def test_an_agent_that_is_back_within_the_grace_was_never_lost_and_one_that_comes_later_is_lost_no_longer() -> (
    None
):
    meeting = Meeting()
    meeting.open("a")
    meeting.end("a")
    assert meeting.after(0.5 * GRACE_S) == {}
    meeting.open("a")
    assert meeting.after(GRACE_S) == {}
    meeting.end("a")
    assert meeting.after(GRACE_S) == {"run": frozenset("a")}
    meeting.open("a")
    assert meeting.after(0.0) == {}


def test_a_goodbye_is_no_loss() -> None:
    meeting = Meeting()
    meeting.open("a")
    meeting.end("a", goodbye=True)
    assert meeting.after(GRACE_S) == {}


def test_the_late_end_of_a_stream_that_was_replaced_means_nothing() -> None:
    meeting = Meeting()
    meeting.open("a")
    meeting.open("a")  # The coordinator has not noticed yet that the first one is over.
    meeting.end("a")
    assert meeting.after(GRACE_S) == {}
    meeting.end("a")
    assert meeting.after(GRACE_S) == {"run": frozenset("a")}


def test_rendezvous_do_not_hear_of_each_others_losses() -> None:
    meeting = Meeting()
    for key in ("one", "other"):
        meeting.open("a", key)
    meeting.end("a", "one")
    assert meeting.after(GRACE_S) == {"one": frozenset("a")}


def test_while_the_coordinator_read_nothing_nobody_could_come_back() -> None:
    meeting = Meeting()
    meeting.open("a")
    meeting.end("a")
    meeting.fleet.now_s += 10.0
    meeting.fleet.stall(10.0)
    assert meeting.after(0.0) == {}
    assert meeting.after(GRACE_S) == {"run": frozenset("a")}


def test_a_restarted_coordinator_has_lost_nobody() -> None:
    meeting = Meeting()
    meeting.open("a")
    meeting.end("a")
    again = Meeting()
    again.fleet.observe(ClockResumed())
    again.open("b")
    assert again.after(FORGOTTEN_AFTER_S / 2) == {}


def test_the_lost_are_forgotten_in_time_and_in_number() -> None:
    meeting = Meeting()
    for node in range(MAX_DROPPED + 10):
        meeting.open(f"n{node}")
        meeting.end(f"n{node}")
    assert len(meeting.fleet.cluster.presence.dropped_mono_s) <= MAX_DROPPED
    assert not meeting.fleet.cluster.presence.streams
    assert meeting.after(GRACE_S + FORGOTTEN_AFTER_S) == {}
    meeting.open("another")
    assert not meeting.fleet.cluster.presence.dropped_mono_s


@pytest.mark.parametrize(
    ("key", "node"), [("", "a"), ("k", ""), ("k" * 2000, "a"), ("k", "n" * 300), ("k", "\n")]
)
def test_names_that_cannot_be_shown_are_refused(key: str, node: str) -> None:
    meeting = Meeting()
    with pytest.raises(InvalidArgument):
        meeting.open(node, key)
    assert not meeting.fleet.cluster.presence.streams


class Streams(RuleBasedStateMachine):
    """Beside a model that remembers everything: an agent is lost exactly if it has no stream, and its last one ended without a
    goodbye long enough ago."""

    nodes = st.sampled_from("abc")

    def __init__(self) -> None:
        super().__init__()
        self.meeting = Meeting()
        self.open_now = dict.fromkeys("abc", 0)
        self.dropped_s: dict[str, float] = {}

    @rule(node=nodes)
    def opens(self, node: str) -> None:
        self.meeting.open(node)
        self.open_now[node] += 1
        self.dropped_s.pop(node, None)

    @precondition(lambda self: any(self.open_now.values()))
    @rule(data=st.data(), goodbye=st.booleans())
    def ends(self, data: st.DataObject, goodbye: bool) -> None:
        node = data.draw(st.sampled_from([node for node, count in self.open_now.items() if count]))
        self.meeting.end(node, goodbye=goodbye)
        self.open_now[node] -= 1
        if not self.open_now[node] and not goodbye:
            self.dropped_s[node] = self.meeting.fleet.now_s

    @rule(seconds=st.sampled_from([0.0, 0.5 * GRACE_S, GRACE_S, 0.6 * FORGOTTEN_AFTER_S]))
    def passes(self, seconds: float) -> None:
        self.meeting.after(seconds)

    @invariant()
    def lost_are_those_whose_last_stream_dropped(self) -> None:
        now_s = self.meeting.fleet.now_s
        lost = {
            n for n, at_s in self.dropped_s.items() if GRACE_S <= now_s - at_s < GRACE_S + FORGOTTEN_AFTER_S
        }
        assert self.meeting.after(0.0) == ({"run": frozenset(lost)} if lost else {})


TestStreams = Streams.TestCase
TestStreams.settings = settings(max_examples=50, deadline=None)
