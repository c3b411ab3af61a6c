"""What agents agree on, over the smallest server there can be: who is alive, whose the run is, and what each may read."""

from __future__ import annotations

import json
import os
import pickle
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from torch.distributed import DistStoreError
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousParameters,
    RendezvousStateError,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    _Action,
    _NodeDesc,
    _RendezvousContext,
    _RendezvousState,
)

from strata.coordinator.journal import codec
from strata.core.cluster import Cluster
from strata.core.messages import SOFT_EVENTS, Instant, Swapped, SwapValue
from strata.rendezvous import FAST_RECOVERY, RENDEZVOUS_BACKENDS, rdzv_conf
from strata.rendezvous.backend import CasRendezvousBackend
from strata.rendezvous.cas import CasStore
from strata.rendezvous.handler import CasRendezvousHandler, create_cas_handler

WINDOW_S = 1.0
PATIENCE_S = 60.0


@pytest.fixture
def run_id() -> str:
    return "run"


def backend(client: Any, run_id: str, *, window_s: float = WINDOW_S) -> CasRendezvousBackend:
    return CasRendezvousBackend(name="etcd", client=client, run_id=run_id, window_s=window_s, unreachable=str)


def node(number: int) -> _NodeDesc:
    return _NodeDesc("host", number, 0)


def state_of(*nodes: _NodeDesc, closed: bool = False, at: datetime | None = None) -> bytes:
    state = _RendezvousState()
    state.complete, state.closed = True, closed
    state.participants = {member: rank for rank, member in enumerate(nodes)}
    state.last_heartbeats = dict.fromkeys(nodes, at or datetime.now(UTC))
    return pickle.dumps(state)


class Member:
    """One that has entered a run which is closed by now, and beats when it is told to."""

    def __init__(self, client: Any, run_id: str) -> None:
        self.backend = backend(client, run_id)
        self.state, self.token, _ = self.backend.set_state(state_of(node(1), closed=True))  # type: ignore[misc]

    def beat(self) -> None:
        mine = pickle.loads(self.state)
        mine.last_heartbeats[node(1)] = datetime.now(UTC)
        self.state, self.token, _ = self.backend.set_state(pickle.dumps(mine), self.token)  # type: ignore[misc]


class DictCasClient:
    """The smallest honest server, for what does not depend on which one it is."""

    def __init__(self) -> None:
        self.values: dict[str, tuple[bytes, str]] = {}
        self.lock = threading.Lock()
        self.soft: list[bool] = []
        """Of every write: whether it was."""

    def get(self, key: str) -> tuple[bytes, str] | None:
        return self.values.get(key)

    def cas(
        self, key: str, value: bytes, expected_token: str | None, *, soft: bool = False
    ) -> tuple[bool, bytes | None, str | None]:
        with self.lock:
            found = self.values.get(key)
            if (found[1] if found else None) != expected_token:
                return False, *(found or (None, None))
            self.values[key] = (value, str(int(expected_token or "0") + 1))
            self.soft.append(soft)
            return True, *self.values[key]


# --- the store


def test_store_waits_for_a_key_and_names_the_one_that_never_comes(run_id: str) -> None:
    store = CasStore(DictCasClient(), lambda: run_id)
    store.set_timeout(timedelta(seconds=PATIENCE_S))
    threading.Timer(0.05, store.set, ("late", "value")).start()
    assert store.get("late") == b"value"
    store.wait(["late"])
    assert store.check(["late"])
    assert not store.check(["late", "never"])
    with pytest.raises(DistStoreError, match=r"waiting for the keys \['never'\]"):
        store.wait(["never"], timedelta(milliseconds=30))


def test_store_compare_set_has_torchs_meaning(run_id: str) -> None:
    store = CasStore(DictCasClient(), lambda: run_id)
    assert store.compare_set("key", "", "first") == b"first"
    assert store.compare_set("key", "other", "second") == b"first"
    assert store.compare_set("key", "first", "second") == b"second"
    assert store.compare_set("absent", "something", "second") == b"something"


# --- the shared state


def test_another_machines_clock_does_not_decide_who_is_alive(run_id: str) -> None:
    server = DictCasClient()
    wrong_by_an_hour = datetime.now(UTC) - timedelta(hours=1)
    backend(server, run_id).set_state(state_of(node(1), at=wrong_by_an_hour))
    found = backend(server, run_id).get_state()
    assert found is not None
    seen = pickle.loads(found[0]).last_heartbeats[node(1)]
    assert abs(seen - datetime.now(UTC)) < timedelta(seconds=30)


def test_a_clock_that_is_set_kills_nobody(run_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Set(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return datetime.now(tz) + timedelta(hours=1)

    server = DictCasClient()
    reader = backend(server, run_id)
    began_s = time.monotonic()
    reader.set_state(state_of(node(1)))
    monkeypatch.setattr("strata.rendezvous.backend.datetime", Set)
    found = reader.get_state()
    assert found is not None
    age = Set.now(UTC) - pickle.loads(found[0]).last_heartbeats[node(1)]
    assert age.total_seconds() < time.monotonic() - began_s + WINDOW_S


def test_a_counter_that_stands_still_ages_and_one_that_moves_does_not(run_id: str) -> None:
    server = DictCasClient()
    # A window that nothing here outlasts: after a longer silence of its own a reader counts everybody anew.
    writer, reader = (backend(server, run_id, window_s=3_600.0) for _ in range(2))
    first = writer.set_state(state_of(node(1), node(2)))
    assert first is not None
    before = pickle.loads(reader.get_state()[0]).last_heartbeats  # type: ignore[index]
    mine = pickle.loads(first[0])
    mine.last_heartbeats[node(1)] = datetime.now(UTC) + timedelta(seconds=1)
    assert writer.set_state(pickle.dumps(mine), first[1])[2]  # type: ignore[index]
    after = pickle.loads(reader.get_state()[0]).last_heartbeats  # type: ignore[index]
    assert after[node(1)] > before[node(1)]
    assert abs(after[node(2)] - before[node(2)]) < after[node(1)] - before[node(1)]


def test_nobody_is_declared_dead_for_an_outage_of_the_server(run_id: str) -> None:
    server = DictCasClient()
    backend(server, run_id).set_state(state_of(node(1)))
    reader = backend(server, run_id)
    reader.get_state()
    outage_s = (
        3_600.0  # As if nothing had been read, and nobody's counter had been seen to move, for that long.
    )
    reader._last_read_s -= outage_s  # type: ignore[operator]
    reader._seen = {node: (beat, seen_s - outage_s) for node, (beat, seen_s) in reader._seen.items()}
    found = reader.get_state()
    assert found is not None
    age = datetime.now(UTC) - pickle.loads(found[0]).last_heartbeats[node(1)]
    assert age.total_seconds() < outage_s / 2


def test_an_outage_shorter_than_the_window_is_no_silence_either(
    run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other node's last keep-alive was seen a while before the outage: together they are longer than the window."""
    clock = SimpleNamespace(now_s=100.0)
    monkeypatch.setattr("strata.rendezvous.backend.time.monotonic", lambda: clock.now_s)
    server = DictCasClient()
    mine, other = backend(server, run_id), node(2)
    mine.set_state(state_of(node(1), other))
    mine.get_state()
    clock.now_s += 0.6 * WINDOW_S
    mine.get_state()
    answers = server.get
    server.get = _away  # type: ignore[method-assign]
    clock.now_s += 0.3 * WINDOW_S
    with pytest.raises(RendezvousConnectionError):
        mine.get_state()
    server.get = answers  # type: ignore[method-assign]
    clock.now_s += 0.3 * WINDOW_S
    found = mine.get_state()
    assert found is not None
    seen = pickle.loads(found[0]).last_heartbeats[other]
    assert datetime.now(UTC) - seen < timedelta(seconds=WINDOW_S)


def _away(key: str) -> tuple[bytes, str] | None:
    raise ConnectionError("refused")


def test_server_that_lost_its_memory_gets_the_state_from_a_member_and_not_from_a_newcomer(
    run_id: str,
) -> None:
    server = DictCasClient()
    member, onlooker = backend(server, run_id), backend(server, run_id)
    _, token, _ = member.set_state(state_of(node(1), node(2)))  # type: ignore[misc]
    onlooker.get_state()
    server.values.clear()
    assert onlooker.get_state() is None
    found = member.set_state(state_of(node(1)), token)
    assert found is not None
    assert not found[2]
    root = member.store_root
    newcomer = backend(server, run_id)
    assert set(pickle.loads(newcomer.get_state()[0]).participants) == {node(1), node(2)}  # type: ignore[index]
    assert newcomer.store_root == root


def test_only_a_write_that_says_that_nodes_are_alive_is_soft(run_id: str) -> None:
    server = DictCasClient()
    member = backend(server, run_id)
    state, token, _ = member.set_state(state_of(node(1)))  # type: ignore[misc]

    def write(change: Callable[[_RendezvousState], None]) -> None:
        nonlocal state, token
        mine = pickle.loads(state)
        mine.last_heartbeats[node(1)] = datetime.now(UTC)
        change(mine)
        state, token, written = member.set_state(pickle.dumps(mine), token)  # type: ignore[misc]
        assert written

    def waits(mine: _RendezvousState) -> None:
        mine.wait_list.add(node(2))
        mine.last_heartbeats[node(2)] = datetime.now(UTC)

    write(lambda mine: None)
    write(waits)
    write(lambda mine: None)
    write(lambda mine: setattr(mine, "round", 1))
    write(lambda mine: setattr(mine, "deadline", datetime.now(UTC)))
    write(lambda mine: None)
    write(lambda mine: setattr(mine, "closed", True))
    assert server.soft == [False, True, False, True, False, False, True, False]


def test_counters_that_a_restart_of_the_server_sets_back_have_moved(run_id: str) -> None:
    """The server shows the last state that was not soft: the same nodes, with counters of long ago."""
    server = DictCasClient()
    member, other = backend(server, run_id), backend(server, run_id)
    state, token, _ = member.set_state(state_of(node(1)))  # type: ignore[misc]
    durable = server.values[member.state_key][0]
    for _ in range(3):
        mine = pickle.loads(state)
        mine.last_heartbeats[node(1)] = datetime.now(UTC)
        state, token, _ = member.set_state(pickle.dumps(mine), token)  # type: ignore[misc]
    other.get_state()
    other._seen = {n: (beat, seen_s - 0.9 * WINDOW_S) for n, (beat, seen_s) in other._seen.items()}
    server.values[member.state_key] = (durable, "1000")
    found = other.get_state()
    assert found is not None
    age = datetime.now(UTC) - pickle.loads(found[0]).last_heartbeats[node(1)]
    assert age.total_seconds() < 0.5 * WINDOW_S
    answer = member.set_state(state, token)
    assert answer is not None
    assert not answer[2]
    assert member.set_state(answer[0], answer[1])[2]  # type: ignore[index]


class CoreCasClient:
    """The coordinator's values without the coordinator, and how much it would have to write down for them."""

    def __init__(self, *, knows_soft: bool) -> None:
        self.cluster = Cluster()
        self.knows_soft = knows_soft
        self.journaled_bytes = 0

    def get(self, key: str) -> tuple[bytes, str] | None:
        value = self.cluster.values.get(key)
        return (value.body, str(value.version)) if value is not None else None

    def cas(
        self, key: str, value: bytes, expected_token: str | None, *, soft: bool = False
    ) -> tuple[bool, bytes | None, str | None]:
        command = SwapValue(
            key=key, body=value, expected_version=int(expected_token or 0), soft=soft and self.knows_soft
        )
        decision = self.cluster.handle(command, Instant(mono_s=time.monotonic(), wall_s=time.time()))
        hard = [event for event in decision.events if not isinstance(event, SOFT_EVENTS)]
        self.journaled_bytes += sum(len(codec.encode(event)) for event in hard)
        answer = cast(Swapped, decision.reply)
        return answer.made, answer.body, str(answer.version)


def journaled_bytes(*, agents: int, seconds: int, knows_soft: bool) -> int:
    """What the keep-alives of so many agents, one a second each, bring into the journal."""
    server = CoreCasClient(knows_soft=knows_soft)
    nodes = [_NodeDesc(f"node-{number:03d}.cluster.example", 10_000 + number, 0) for number in range(agents)]
    members = [backend(server, "run") for _ in nodes]
    members[0].set_state(state_of(*nodes))
    began_bytes = server.journaled_bytes
    for _ in range(seconds):
        for this, member in zip(nodes, members, strict=True):
            state, token = member.get_state()  # type: ignore[misc]
            mine = pickle.loads(state)
            mine.last_heartbeats[this] = datetime.now(UTC)
            assert member.set_state(pickle.dumps(mine), token)[2]  # type: ignore[index]
    return server.journaled_bytes - began_bytes


def test_keep_alives_of_a_hundred_agents_do_not_fill_the_journal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    seconds = 5
    hard, soft = (journaled_bytes(agents=100, seconds=seconds, knows_soft=known) for known in (False, True))
    with capsys.disabled():
        print(
            f"\n100 agents: {hard * 3.6e3 / seconds / 1e9:.1f} GB an hour before, {soft} bytes in all now",
            end=" ",
        )
    assert hard * 3_600 / seconds > 1e9
    assert soft < 100, "one entry, which reserves versions for the next million keep-alives"


def test_closed_state_of_silent_members_gives_way_to_a_new_incarnation(run_id: str) -> None:
    server = DictCasClient()
    old = backend(server, run_id)
    old.set_state(state_of(node(1), closed=True))
    new = backend(server, run_id)
    assert new.get_state() is None
    assert new.set_state(state_of(node(2)))[2]  # type: ignore[index]
    assert new.store_root != old.store_root
    late = backend(server, run_id)
    assert pickle.loads(late.get_state()[0]).participants == {node(2): 0}  # type: ignore[index]
    assert late.store_root == new.store_root


def test_closed_state_is_respected_while_a_member_is_alive(run_id: str) -> None:
    server = DictCasClient()
    member = Member(server, run_id)
    stop = threading.Event()

    def beat() -> None:
        while not stop.wait(0.05):
            member.beat()

    beating = threading.Thread(target=beat)
    beating.start()
    try:
        found = backend(server, run_id).get_state()
        assert found is not None
        assert pickle.loads(found[0]).closed
    finally:
        stop.set()
        beating.join()


def test_a_pause_of_the_onlooker_is_not_taken_for_silence_of_the_members(run_id: str) -> None:
    window_s = 0.3

    class Paused(DictCasClient):
        """Everything stands still while the onlooker looks for the second time; then the member continues."""

        looks = 0

        def get(self, key: str) -> tuple[bytes, str] | None:
            self.looks += 1
            if self.looks == 2:
                time.sleep(2 * window_s)
            elif self.looks > 2:
                member.beat()
            return super().get(key)

    server = Paused()
    member = Member(server, run_id)
    found = backend(server, run_id, window_s=window_s).get_state()
    assert found is not None, "taken for a new run while a member of the old one is alive"
    assert pickle.loads(found[0]).closed


def test_only_json_leaves_the_process_and_pickles_are_never_opened(run_id: str, tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
            return os.system, (f"touch {tmp_path}/opened",)

    server = DictCasClient()
    ours = backend(server, run_id)
    ours.set_state(state_of(node(1)))
    assert json.loads(server.values[ours.state_key][0])["participants"] == [["host", 1, 0, 0]]
    server.values[ours.state_key] = (pickle.dumps(Evil()), "7")
    with pytest.raises(RendezvousStateError, match="Stale state detected"):
        backend(server, run_id).get_state()
    assert not (tmp_path / "opened").exists()


def test_leaving_frees_the_id_without_a_wait(run_id: str) -> None:
    server = DictCasClient()
    member = backend(server, run_id)
    member.set_state(state_of(node(1), closed=True))
    member.leave(node(1))
    began_s = time.monotonic()
    assert backend(server, run_id, window_s=PATIENCE_S).get_state() is None
    assert time.monotonic() - began_s < PATIENCE_S


# --- the handler


def handler_with(server: DictCasClient, run_id: str, **conf: Any) -> CasRendezvousHandler:
    params = RendezvousParameters("etcd", "", run_id, 1, 1, local_addr="127.0.0.1", **conf)
    return create_cas_handler(server, params, unreachable=str)


@pytest.mark.parametrize(("members", "pause_s"), [(1, 0.1), (20, 0.1), (100, 0.5), (200, 1.0), (5_000, 1.0)])
def test_a_node_that_waits_looks_as_often_as_the_server_can_bear(
    run_id: str, monkeypatch: pytest.MonkeyPatch, members: int, pause_s: float
) -> None:
    server, paused_s, seen = DictCasClient(), [], []
    others = backend(server, run_id)
    state, token, _ = others.set_state(state_of(*map(node, range(members))))  # type: ignore[misc]

    def pause(seconds: float) -> None:
        """Meanwhile the others go on."""
        nonlocal state, token
        paused_s.append(seconds)
        theirs = pickle.loads(state)
        theirs.round += 1
        state, token, _ = others.set_state(pickle.dumps(theirs), token)  # type: ignore[misc]

    def look(context: _RendezvousContext, deadline: float) -> _Action:
        seen.append(context.state.round)
        return _Action.SYNC if len(seen) < 4 else _Action.FINISH

    handler = handler_with(
        server, run_id, keep_alive_interval=PATIENCE_S
    )  # A slow machine loses nobody here.
    monkeypatch.setattr("strata.torch_compat.rendezvous.time", SimpleNamespace(sleep=pause))
    handler._op_executor.run(look, deadline=0.0)
    assert seen == [0, 1, 2, 3], "each look is at what stands there now"
    assert paused_s == [pause_s] * 3


def test_defaults_are_seconds_and_every_backend_has_a_name(run_id: str) -> None:
    handler = handler_with(DictCasClient(), run_id)
    settings = handler.settings
    assert settings.keep_alive_interval * settings.keep_alive_max_attempt == timedelta(seconds=3)
    assert settings.timeout.last_call == timedelta(seconds=1)
    assert handler.use_agent_store, "each round has a store that its agent holds"
    assert rdzv_conf({"last_call_timeout": 5}).endswith("last_call_timeout=5,close_timeout=10")
    assert {"etcd", "strata"} < set(RENDEZVOUS_BACKENDS)
    with pytest.raises(ValueError, match="must be positive"):
        handler_with(DictCasClient(), run_id, keep_alive_interval=0)
    assert FAST_RECOVERY["keep_alive_max_attempt"] == 3
