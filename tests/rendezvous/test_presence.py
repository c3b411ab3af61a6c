"""What an agent makes of news about the others: who is silent at once, when a round waits for nobody, what is answered from memory."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Set
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from torch.distributed.elastic.rendezvous import RendezvousParameters

from strata.rendezvous.backend import CasRendezvousBackend
from strata.rendezvous.cas import Token
from strata.rendezvous.handler import ALREADY, CasRendezvousHandler, create_cas_handler
from tests.rendezvous.test_state import DictCasClient, backend, node, state_of
from tests.support import eventually

PATIENCE_S = 60.0
WINDOW_S = 3_600.0
"""Nobody here is ever silent for so long."""


class KnownPresence:
    """News as a test tells them."""

    def __init__(self) -> None:
        self.is_connected = True
        self.lost: Set[str] = frozenset()
        self.version = 0

    def has_changed(self, since: Token | None) -> bool:
        return self.version > int(since or 0)

    def wait(self, since: Token | None, lost: Set[str], timeout_s: float) -> None:
        threading.Event().wait(timeout_s)

    def close(self) -> None:
        self.is_connected = False


class Run:
    """Two members, of which the first is this process's, and what it reads of the second."""

    def __init__(self) -> None:
        self.server, self.known = DictCasClient(), KnownPresence()
        self.mine, self.other = (backend(self.server, "run", window_s=WINDOW_S) for _ in range(2))
        self.mine.presence = self.known
        self.state, self.token, _ = self.other.set_state(state_of(node(1), node(2)))  # type: ignore[misc]

    def is_silent(self) -> bool:
        found = self.mine.get_state()
        assert found is not None
        age = datetime.now(UTC) - pickle.loads(found[0]).last_heartbeats[node(2)]
        return bool(age > timedelta(seconds=WINDOW_S))

    def beat(self) -> None:
        theirs = pickle.loads(self.state)
        theirs.last_heartbeats[node(2)] = datetime.now(UTC)
        self.state, self.token, _ = self.other.set_state(pickle.dumps(theirs), self.token)  # type: ignore[misc]


def test_a_node_whose_connection_dropped_is_silent_at_once_and_alive_when_it_is_back() -> None:
    run = Run()
    assert not run.is_silent()
    run.known.lost = {str(node(2))}
    assert run.mine.has_news
    assert run.is_silent()
    assert run.mine.is_lost(node(2))
    run.known.lost = frozenset()
    assert not run.is_silent()


def test_a_node_that_was_alive_until_it_dropped_is_silent_whatever_was_read_before() -> None:
    run = Run()
    run.is_silent()
    run.beat()  # Its last one, which nobody has read yet.
    run.known.lost = {str(node(2))}
    assert run.is_silent()


def test_a_node_whose_counter_moves_after_its_connection_dropped_is_alive() -> None:
    run = Run()
    run.known.lost = {str(node(2))}
    assert run.is_silent()
    run.beat()
    assert not run.is_silent()
    assert not run.mine.is_lost(node(2))


def test_a_node_that_was_between_two_rounds_when_it_dropped_and_joins_the_next_is_alive() -> None:
    run = Run()
    run.other.leave(node(2))
    run.known.lost = {str(node(2))}
    found = run.mine.get_state()
    assert found is not None
    assert run.mine.is_lost(node(2))
    state = pickle.loads(found[0])
    state.participants[node(2)], state.last_heartbeats[node(2)] = 1, datetime.now(UTC)
    run.other.get_state()
    assert run.other.set_state(pickle.dumps(state), found[1])[2]  # type: ignore[index]
    assert not run.is_silent()


# --- the handler


class CountingReads(DictCasClient):
    reads = 0

    def get(self, key: str) -> tuple[bytes, str] | None:
        self.reads += 1
        return super().get(key)


def handlers(server: DictCasClient, count: int = 2, **conf: Any) -> list[CasRendezvousHandler]:
    """Nobody's silence is noticed here, and a round that has not its most members waits for them longer than a test may take."""
    conf = {"keep_alive_interval": WINDOW_S, "last_call_timeout": WINDOW_S, "timeout": PATIENCE_S, **conf}
    params = RendezvousParameters("strata", "", "run", 1, 2, local_addr="127.0.0.1", **conf)
    made = [create_cas_handler(server, params, unreachable=str) for _ in range(count)]
    for handler in made:
        handler.backend.presence = KnownPresence()
    return made


def known(of: CasRendezvousHandler) -> KnownPresence:
    presence = of.backend.presence
    assert isinstance(presence, KnownPresence)
    return presence


def meet(*those: CasRendezvousHandler) -> list[int]:
    """The sizes of their worlds."""
    with ThreadPoolExecutor(len(those)) as pool:
        return [info.world_size for info in pool.map(lambda handler: handler.next_rendezvous(), those)]


def test_a_round_after_a_loss_waits_for_nobody_once_all_who_are_left_have_joined() -> None:
    one, two = handlers(DictCasClient())
    assert meet(one, two) == [2, 2]
    two._stop_heartbeats()
    known(one).lost = {str(two.this_node)}
    assert meet(one) == [1], "neither the keep-alives of the lost one nor the last call are waited for"
    one.shutdown()


def test_a_first_round_waits_for_machines_that_start_later() -> None:
    server = DictCasClient()
    one, two = handlers(server)
    with ThreadPoolExecutor(1) as pool:
        early = pool.submit(one.next_rendezvous)
        eventually(
            lambda: one.backend.known is not None and one.this_node in one.backend.known.participants,
            within_s=PATIENCE_S,
            what="the first has joined",
        )
        assert meet(two) == [2]
        assert early.result(PATIENCE_S).world_size == 2
    for handler in (one, two):
        handler.shutdown()


def test_the_last_call_is_cut_short_only_where_nobody_may_be_on_the_way() -> None:
    one, two = handlers(DictCasClient())
    assert meet(one, two) == [2, 2]
    later = datetime.now(UTC) + timedelta(hours=1)

    def deadline_of(round_: int, *joined: Any, waiting: Any = ()) -> datetime | None:
        state = pickle.loads(state_of(*joined))
        state.round, state.complete, state.deadline, state.wait_list = round_, False, later, {*waiting}
        one.shorten_last_call(state)
        deadline: datetime | None = state.deadline
        return deadline

    me, other, newcomer = one.this_node, two.this_node, node(99)
    assert deadline_of(1, me) == later, "the other may be about to join"
    assert deadline_of(1, me, other) == ALREADY
    assert deadline_of(1, me, other, newcomer) == ALREADY
    assert deadline_of(1, me, other, waiting=[newcomer]) == later, "one who waited has not joined yet"
    assert deadline_of(2, me, other) == later, "who was in the round between is not known here"
    known(one).lost = {str(other)}
    assert one.num_nodes_waiting() == 1
    assert deadline_of(1, me) == ALREADY
    for handler in (one, two):
        handler.shutdown()


def test_an_agent_whose_stream_is_open_asks_the_server_only_when_there_is_news() -> None:
    server = CountingReads()
    one, two = handlers(server)
    meet(one, two)
    known(one).version = int(one.backend._token or 0)
    before = server.reads
    assert [one.num_nodes_waiting() for _ in range(100)] == [0] * 100
    assert server.reads == before

    state = pickle.loads(two.backend.get_state()[0])  # type: ignore[index]
    state.wait_list, state.last_heartbeats[node(99)] = {node(99)}, datetime.now(UTC)
    assert two.backend.set_state(pickle.dumps(state), two.backend._token)[2]  # type: ignore[index]
    before = server.reads
    known(one).version = int(two.backend._token or 0)
    assert eventually(one.num_nodes_waiting, within_s=PATIENCE_S, what="the newcomer") == 1
    assert server.reads == before + 1

    known(one).is_connected = False
    one.expire_state()
    one.num_nodes_waiting()
    assert server.reads == before + 2, "without a stream it polls"
    for handler in (one, two):
        handler.shutdown()


def test_a_lost_member_needs_another_round_and_a_lost_stranger_does_not() -> None:
    one, two = handlers(DictCasClient())
    meet(one, two)
    known(one).lost = {"somebody_1_0"}
    assert one.num_nodes_waiting() == 0
    known(one).lost = {"somebody_1_0", str(two.this_node)}
    assert eventually(one.num_nodes_waiting, within_s=PATIENCE_S, what="the loss") == 1
    known(one).lost = frozenset()
    assert eventually(lambda: one.num_nodes_waiting() == 0, within_s=PATIENCE_S, what="its return")
    for handler in (one, two):
        handler.shutdown()


def test_an_etcd_server_knows_no_connections() -> None:
    alone = CasRendezvousBackend(
        name="etcd", client=DictCasClient(), run_id="run", window_s=1, unreachable=str
    )
    assert not alone.presence.is_connected
    assert not alone.has_news
    assert not alone.is_lost(node(1))


@pytest.mark.parametrize("connected", [True, False])
def test_a_closed_handler_takes_its_leave(connected: bool) -> None:
    (one,) = handlers(DictCasClient(), 1, last_call_timeout=0.1)
    known(one).is_connected = connected
    meet(one)
    one.shutdown()
    assert not known(one).is_connected
