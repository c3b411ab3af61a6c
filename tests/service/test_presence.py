"""Agents at a real coordinator: a dropped connection is a loss at once, a goodbye, a short gap or a restart of the coordinator is none."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest

from strata.rpc import coordinator_pb2 as pb
from strata.rpc import coordinator_pb2_grpc
from strata.rpc.cas import CoordinatorCasClient
from strata.rpc.presence import AgentPresence
from tests.service.clients import channel, refusal
from tests.support import Coordinator, eventually
from tests.support_proxy import Proxy

PATIENCE_S = 60.0
GRACE_S = 5.0


class Agent:
    """One that is connected through a proxy of its own, and counts what it is notified of."""

    def __init__(self, stack: ExitStack, coordinator: Coordinator, name: str, key: str) -> None:
        self.name, self.key = name, key
        self.proxy = stack.enter_context(Proxy(coordinator.grpc_port))
        self.client = CoordinatorCasClient(self.proxy.address, timeout_s=PATIENCE_S)
        self.presence: AgentPresence = self.client.join(
            key, node=name, run_id="run", host="h", on_leave=lambda reason, within_s: None
        )
        stack.callback(self.client.close)
        stack.callback(self.presence.close)
        self.until_connected()

    def until_connected(self) -> None:
        eventually(lambda: self.presence.is_connected, within_s=PATIENCE_S, what=f"{self.name} is connected")

    def until_lost(self, *names: str) -> None:
        eventually(lambda: self.presence.lost == {*names}, within_s=PATIENCE_S, what=f"{names} lost")

    def swap(self, body: bytes, token: str | None, *, soft: bool = False) -> str:
        written, _, now = self.client.cas(self.key, body, token, soft=soft)
        assert written
        assert now is not None
        return now


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def agents(stack: ExitStack, coordinator: Coordinator, key: str, count: int = 3) -> list[Agent]:
    return [Agent(stack, coordinator, f"host_{number}_0", key) for number in range(count)]


def patient(tmp_path: Path, stack: ExitStack) -> Coordinator:
    """One that gives agents on a slow machine the time to come back."""
    coordinator = Coordinator(tmp_path / "coordinator", env={"STRATA_AGENT_GRACE": f"{GRACE_S}"}).start()
    stack.callback(coordinator.stop)
    return coordinator


def losses(coordinator: Coordinator, key: str, last: Agent) -> list[str]:
    """What the coordinator has printed about lost agents, up to the last, which others may know of before it is read here."""

    def found() -> list[str]:
        return [line for line in coordinator.output if f"'{key}' is lost" in line]

    eventually(lambda: any(f"agent {last.name} of" in line for line in found()), within_s=PATIENCE_S)
    return found()


def test_all_agents_are_notified_of_a_dropped_connection_and_of_its_return(
    shared: Coordinator, stack: ExitStack
) -> None:
    one, two, three = agents(stack, shared, "drops")
    three.proxy.refusing = True
    three.proxy.cut()
    for other in (one, two):
        other.until_lost(three.name)
    assert any("its connection dropped" in line for line in losses(shared, "drops", three))
    three.proxy.refusing = False
    three.until_connected()
    assert three.presence.lost == set(), "no agent is notified of its own loss"
    for other in (one, two):
        other.until_lost()


def test_a_wait_for_news_ends_with_a_loss(shared: Coordinator, stack: ExitStack) -> None:
    one, two = agents(stack, shared, "waits", 2)
    waiting = threading.Thread(target=one.presence.wait, args=(None, frozenset(), 10 * PATIENCE_S))
    waiting.start()
    two.proxy.refusing = True
    two.proxy.cut()
    waiting.join(PATIENCE_S)
    assert not waiting.is_alive()


def test_one_that_reconnects_at_once_and_one_that_says_goodbye_are_not_lost(
    tmp_path: Path, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On a busy machine too the goodbye is heard before its stream is cut.
    monkeypatch.setattr("strata.rpc.presence.GOODBYE_S", PATIENCE_S)
    coordinator = patient(tmp_path, stack)
    one, two, three = agents(stack, coordinator, "gaps")
    assert two.proxy.cut(), "it has a connection to lose"
    three.presence.close()
    two.until_connected()
    last = Agent(stack, coordinator, "last", "gaps")
    last.proxy.refusing = True
    last.proxy.cut()
    one.until_lost(last.name)  # Whoever dropped earlier would be known by now.
    assert len(losses(coordinator, "gaps", last)) == 1


def test_a_connection_that_is_there_and_silent_is_a_loss_after_the_heartbeat_timeout(
    tmp_path: Path, stack: ExitStack
) -> None:
    coordinator = Coordinator(tmp_path / "coordinator", "--heartbeat-timeout", "5").start()
    stack.callback(coordinator.stop)
    one, two = agents(stack, coordinator, "silent", 2)
    two.proxy.refusing = True  # The network is cut: what was open stays open, and nothing new gets through.
    two.proxy.stall()
    one.until_lost(two.name)


def test_a_killed_coordinator_that_comes_back_has_lost_nobody_but_who_drops_then(
    tmp_path: Path, stack: ExitStack
) -> None:
    coordinator = Coordinator(tmp_path / "coordinator").start()
    stack.callback(coordinator.stop)
    one, two, three = agents(stack, coordinator, "restart")
    for end in (coordinator.kill, coordinator.stop):
        end()
        # Each knows that it is away: who is connected below is so to the coordinator that has come back.
        eventually(
            lambda: not any(agent.presence.is_connected for agent in (one, two, three)),
            within_s=PATIENCE_S,
            what="the coordinator is away",
        )
        coordinator.start()
        for agent in (one, two, three):
            agent.until_connected()
            assert agent.presence.lost == set()
    three.proxy.refusing = True
    three.proxy.cut()
    one.until_lost(three.name)
    assert len(losses(coordinator, "restart", three)) == 1


def test_a_frozen_coordinator_takes_nobody_for_lost_who_came_back_meanwhile(
    tmp_path: Path, stack: ExitStack
) -> None:
    coordinator = patient(tmp_path, stack)
    one, two = agents(stack, coordinator, "frozen", 2)
    coordinator.process.send_signal(signal.SIGSTOP)  # type: ignore[union-attr]
    two.proxy.cut()
    time.sleep(2 * GRACE_S)  # Longer than an agent may be away.
    coordinator.process.send_signal(signal.SIGCONT)  # type: ignore[union-attr]
    two.until_connected()
    last = Agent(stack, coordinator, "last", "frozen")
    last.proxy.refusing = True
    last.proxy.cut()
    one.until_lost(last.name)
    assert len(losses(coordinator, "frozen", last)) == 1


def test_a_change_is_announced_and_a_keep_alive_is_not(shared: Coordinator, stack: ExitStack) -> None:
    one, two = agents(stack, shared, "changes", 2)
    first = one.swap(b"first", None)
    eventually(lambda: two.presence.has_changed(None), within_s=PATIENCE_S, what="two knows")
    assert not two.presence.has_changed(first)
    soft = one.swap(b"alive", first, soft=True)
    hard = one.swap(b"second", soft)
    eventually(lambda: two.presence.has_changed(soft), within_s=PATIENCE_S, what="two knows")
    assert not two.presence.has_changed(hard)
    late = Agent(stack, shared, "late", "changes")
    assert late.presence.has_changed(soft), "known from the first notice"
    assert not late.presence.has_changed(hard)


def test_a_coordinator_of_an_earlier_version_is_asked_once() -> None:
    server = grpc.server(ThreadPoolExecutor(1))  # Knows no method at all.
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    client = CoordinatorCasClient(f"127.0.0.1:{port}", timeout_s=PATIENCE_S)
    presence = client.join("old", node="n", run_id="run", host="h", on_leave=lambda reason, within_s: None)
    presence._thread.join(PATIENCE_S)
    assert not presence._thread.is_alive()
    assert not presence.is_connected, "so it polls, and goes by keep-alives"
    presence.close()
    client.close()
    server.stop(None).wait()


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [pb.AgentMessage(goodbye=pb.Goodbye())],
        [pb.AgentMessage(hello=pb.AgentHello(key="", node="n"))],
        [pb.AgentMessage(hello=pb.AgentHello(key="k", node=""))],
        [pb.AgentMessage(hello=pb.AgentHello(key="k", node="n"))] * 2,
    ],
    ids=["nothing", "goodbye first", "no key", "no node", "two hellos"],
)
def test_what_an_agent_may_not_say_ends_its_stream_with_a_reason(
    shared: Coordinator, messages: list[pb.AgentMessage]
) -> None:
    with channel(shared.address) as opened:
        calls: Any = coordinator_pb2_grpc.CoordinatorStub(opened)
        status, code, message, hint = refusal(
            lambda: list(calls.Presence(iter(messages), timeout=PATIENCE_S))
        )
    assert (status, code) == (grpc.StatusCode.INVALID_ARGUMENT, "invalid_argument"), message
    assert hint


def test_bytes_that_are_no_message_end_a_stream_with_a_reason(shared: Coordinator) -> None:
    hello = pb.AgentMessage(hello=pb.AgentHello(key="k", node="n")).SerializeToString()
    with channel(shared.address) as opened:
        stream = opened.stream_stream(
            "/strata.v1.Coordinator/Presence", request_serializer=bytes, response_deserializer=bytes
        )
        for bodies in ([b"\x0a\x04\x0a\x02\xff\xfe"], [hello, b"\xff" * 20]):
            status, *_ = refusal(lambda: list(stream(iter(bodies), timeout=PATIENCE_S)))  # noqa: B023
            assert status == grpc.StatusCode.INVALID_ARGUMENT
