"""Workers whose sessions ride on the stream of their machine's agent, with a real coordinator, real agents and real processes."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from strata.rpc import coordinator_pb2 as pb
from strata.rpc.frames import frame, json_frame
from strata.sockets import connect_to_path
from tests.service.clients import RawSession, channel, metric, stub
from tests.service.fleet import Fleet, RemoteError
from tests.service.relay import RelayProcess
from tests.service.test_versions import earlier_alone
from tests.support import Coordinator, eventually

RANKS = [f"rank-{number}" for number in range(4)]
Machine = tuple[RelayProcess, Callable[..., Fleet]]


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[Coordinator]:
    server = Coordinator(tmp_path / "coordinator", env={"STRATA_HEARTBEAT_TIMEOUT": "600"}).start()
    yield server
    assert server.stop() == 0, "".join(server.output)
    assert "Traceback" not in "".join(server.output), "".join(server.output)


@pytest.fixture
def machine(tmp_path: Path, coordinator: Coordinator) -> Iterator[Machine]:
    """An agent, and what starts processes of its workers."""
    with ExitStack() as stack:
        relay = RelayProcess(tmp_path / "sessions")
        stack.callback(relay.close)

        def start(address: str = "") -> Fleet:
            return stack.enter_context(
                Fleet(address or coordinator.address, env={"STRATA_SESSIONS": str(relay.path)})
            )

        yield relay, start


def said(coordinator: Coordinator, kind: str) -> float:
    return metric(coordinator.url, f'strata_grpc_requests_total{{method="Session.{kind}"}}')


def shown(coordinator: Coordinator) -> dict[str, Any]:
    return {worker["id"]: worker for worker in coordinator.get("/api/workers")}


def meet(fleet: Fleet, ranks: list[str], step: int) -> list[Any]:
    waiting = [fleet.begin(rank, "barrier", "b", step, timeout_s=30.0) for rank in ranks]
    return [each.result(60).value for each in waiting]


def test_the_coordinator_sees_one_machine_and_each_of_its_workers(
    coordinator: Coordinator, machine: Machine
) -> None:
    _, start = machine
    fleet = start()
    fleet.register(*RANKS)
    assert (said(coordinator, "machine"), said(coordinator, "attach"), said(coordinator, "hello")) == (
        1,
        4,
        0,
    )
    for number, rank in enumerate(RANKS):
        fleet.call(rank, "heartbeat", 100 + number)
    eventually(
        lambda: [shown(coordinator)[rank]["current_step"] for rank in RANKS] == [100, 101, 102, 103],
        within_s=30,
        what="each worker's own step",
    )
    assert said(coordinator, "heartbeat") == 0
    assert said(coordinator, "beats") > 0
    results = meet(fleet, RANKS, 1)
    assert {result["participants"] for result in results} == {4}
    assert sorted(result["arrival_order"] for result in results) == [0, 1, 2, 3]
    assert 1 <= said(coordinator, "arrivals") <= 4
    assert said(coordinator, "barrier") == 0
    fleet.call(RANKS[0], "deregister")
    eventually(
        lambda: fleet.call(RANKS[1], "topology")["world_size"] == 3, within_s=30, what="the new generation"
    )
    assert len(shown(coordinator)) == 3


def test_a_worker_that_dies_is_reported_at_once_and_its_neighbours_stay(
    coordinator: Coordinator, machine: Machine
) -> None:
    _, start = machine
    staying, dying = start(), start()
    staying.register(*RANKS[:3])
    dying.register(RANKS[3])
    waiting = [staying.begin(rank, "barrier", "b", 1, timeout_s=120.0) for rank in RANKS[:3]]
    # Those who arrive after the loss would wait for each other alone.
    eventually(
        lambda: [each["arrived"] for each in coordinator.get("/api/barriers")] == [3],
        within_s=60,
        what="three have arrived",
    )
    killed_s = dying.kill()
    for each in waiting:
        with pytest.raises(RemoteError, match="'rank-3' was lost") as broken:
            each.result(60)
        assert broken.value.at_mono_s - killed_s < 60, (
            "no heartbeat has to be missed for that: those are ten minutes"
        )
    assert [w["status"] == "failed" for w in shown(coordinator).values()] == [False, False, False, True]
    assert len(meet(staying, RANKS[:3], 2)) == 3


def test_without_their_agent_workers_speak_for_themselves_and_nobody_is_lost(
    tmp_path: Path,
) -> None:
    coordinator = Coordinator(tmp_path / "patient", env={"STRATA_DISCONNECT_GRACE": "20"}).start()
    relay = RelayProcess(tmp_path / "sessions")
    try:
        with Fleet(coordinator.address, env={"STRATA_SESSIONS": str(relay.path)}) as fleet:
            before = fleet.register(*RANKS)
            waiting = [fleet.begin(rank, "barrier", "b", 1, timeout_s=60.0) for rank in RANKS[:3]]
            eventually(lambda: said(coordinator, "arrivals"), within_s=30)
            relay.close()
            eventually(lambda: said(coordinator, "hello") == 4, within_s=30, what="four sessions")
            waiting.append(fleet.begin(RANKS[3], "barrier", "b", 1, timeout_s=60.0))
            assert {each.result(60).value["participants"] for each in waiting} == {4}
            newest = max(config["generation"] for config in before)
            assert {fleet.call(rank, "topology")["generation"] for rank in RANKS} == {newest}
    finally:
        relay.close()
        coordinator.stop()


def test_after_an_outage_of_the_coordinator_they_come_back_on_one_stream_and_arrive_again(
    coordinator: Coordinator, machine: Machine
) -> None:
    _, start = machine
    fleet = start()
    fleet.register(*RANKS)
    waiting = [fleet.begin(rank, "barrier", "b", 1, timeout_s=120.0) for rank in RANKS[:3]]
    eventually(lambda: said(coordinator, "arrivals"), within_s=30)
    coordinator.kill()
    coordinator.start()
    eventually(lambda: said(coordinator, "attach") == 4, within_s=60, what="all four are attached again")
    assert (said(coordinator, "machine"), said(coordinator, "hello")) == (1, 0)
    waiting.append(fleet.begin(RANKS[3], "barrier", "b", 1, timeout_s=120.0))
    assert {each.result(120).value["participants"] for each in waiting} == {4}


def test_with_a_coordinator_of_the_version_before_each_worker_has_a_session_of_its_own(
    coordinator: Coordinator, machine: Machine
) -> None:
    _, start = machine
    with earlier_alone(coordinator.address) as address:
        fleet = start(address)
        fleet.register(*RANKS)
        assert {result["participants"] for result in meet(fleet, RANKS, 1)} == {4}
        assert (said(coordinator, "machine"), said(coordinator, "hello")) == (0, 4)


def test_a_superseded_worker_is_fenced_alone(coordinator: Coordinator, machine: Machine) -> None:
    _, start = machine
    first, second = start(), start()
    first.register(*RANKS[:2])
    second.register(RANKS[0])
    eventually(lambda: _is_stale(first, RANKS[0]), within_s=30, what="that it was superseded")
    waiting = [first.begin(RANKS[1], "barrier", "b", 1), second.begin(RANKS[0], "barrier", "b", 1)]
    assert {each.result(60).value["participants"] for each in waiting} == {2}


def _is_stale(fleet: Fleet, rank: str) -> bool:
    try:
        fleet.call(rank, "heartbeat", 1)
    except RemoteError as refusal:
        return refusal.kind == "StaleWorker"
    return False


SCRIPT = """
import os
from strata import TrainingOrchestrator

with TrainingOrchestrator() as link:
    link.register_worker(f"rank-{os.environ['RANK']}")
    result = link.barrier("b", 1, participants=2, timeout_s=60.0)
    print("met", result.participants, flush=True)
    link.deregister()
"""


def test_ranks_under_torchrun_ride_on_the_stream_of_their_agent(
    coordinator: Coordinator, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "strata.launch.agent", "--nproc-per-node=2", str(script)]
    env = {**os.environ, "COORDINATOR_ADDR": coordinator.address, "STRATA_MEMORY_ROOT": str(tmp_path)}
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, timeout=120)
    assert (done.returncode, done.stdout.count("met 2")) == (0, 2), done.stdout
    assert (said(coordinator, "machine"), said(coordinator, "attach"), said(coordinator, "hello")) == (
        1,
        2,
        0,
    )
    assert shown(coordinator) == {}, "both have said goodbye"
    assert not list(tmp_path.rglob("sessions")), "the agent's socket is removed with it"


# --- a worker acts as itself alone ----------------------------------------------------------------------------


class LocalSession:
    """A worker's end of its agent's socket, spoken by hand."""

    def __init__(self, relay: RelayProcess, address: str, worker_id: str, incarnation: int) -> None:
        self.connection = connect_to_path(relay.path)
        self.connection.settimeout(30)
        hello = {"address": address, "token": "", "secure": False, "several": False, "tls": ["", "", ""]}
        self.connection.sendall(json_frame({**hello, "worker_id": worker_id, "incarnation": incarnation}))
        assert self._frame() == b'{"open": true}'

    def say(self, **body: Any) -> None:
        self.connection.sendall(frame(pb.WorkerMessage(**body).SerializeToString()))

    def hear(self) -> pb.CoordinatorMessage:
        return pb.CoordinatorMessage.FromString(self._frame())

    def _frame(self) -> bytes:
        with self.connection.makefile("rb", buffering=0) as data:
            (length,) = struct.unpack(">I", data.read(4) or b"")
            return _exactly(data, length)


def _exactly(data: Any, length: int) -> bytes:
    found = b""
    while len(found) < length:
        found += data.read(length - len(found))
    return found


def register(address: str, worker_id: str) -> int:
    with stub(address) as calls:
        return int(calls.RegisterWorker(pb.RegisterWorkerRequest(worker_id=worker_id)).incarnation)


def test_what_a_worker_says_in_the_name_of_its_neighbour_is_its_own_or_nothing(
    coordinator: Coordinator, machine: Machine
) -> None:
    relay, _ = machine
    sessions = []
    for name in ("victim", "rogue"):
        session = LocalSession(relay, coordinator.address, name, register(coordinator.address, name))
        while session.hear().WhichOneof("body") != "welcome":
            pass
        sessions.append(session)
    victim, rogue = sessions
    status = pb.WorkerStatus(state="training", current_step=666)
    rogue.say(beats=pb.Beats(members=[1], reports=[pb.Report(member=1, status=status)]))
    rogue.say(member=1, detach=pb.Detach())
    rogue.say(member=1, arrivals=pb.Arrivals(barrier=pb.WaitBarrierRequest(barrier_id="b"), members=[1]))
    rogue.say(member=1, goodbye=pb.Goodbye(reason="as somebody else"))
    while (answer := rogue.hear()).WhichOneof("body") != "goodbye":
        pass
    assert answer.goodbye.reason == "as somebody else"
    assert list(shown(coordinator)) == ["victim"]
    assert shown(coordinator)["victim"]["current_step"] == 0
    assert said(coordinator, "detach") == 0
    victim.say(barrier=pb.WaitBarrierRequest(barrier_id="b", step=1, call_id=b"1", worker_id="rogue"))
    while (answer := victim.hear()).WhichOneof("body") != "barrier":
        pass
    assert answer.barrier.outcome.released
    for session in sessions:
        session.connection.close()


def test_a_member_that_may_not_be_attached_does_not_cost_the_others_their_stream(
    coordinator: Coordinator,
) -> None:
    incarnation = register(coordinator.address, "welcome")
    with channel(coordinator.address) as opened:
        session = RawSession(opened)
        session.send(machine=pb.MachineHello(host="h"))
        session.wait_for("welcome")
        session.send(member=1, attach=pb.Attach(worker_id="nobody", incarnation=1))
        assert session.wait_for("stale").cause == "unknown"
        session.send(member=2, attach=pb.Attach(worker_id="welcome", incarnation=incarnation))
        session.send(beats=pb.Beats(members=[1, 2, 77]))
        topologies = session.wait_for("topologies")
        assert (list(topologies.members), list(topologies.ranks)) == ([2], [0])
        session.send(member=2, attach=pb.Attach(worker_id="welcome", incarnation=incarnation))
        assert session.ended.wait(30), "a number that was used before is refused"
        assert "used on this stream before" in str(session.error)
        session.close()


def test_a_socket_that_says_nothing_sensible_is_closed(machine: Machine) -> None:
    relay, _ = machine
    for garbage in (b"\xff\xff\xff\xff", frame(b"no json"), json_frame({"address": 3})):
        connection = connect_to_path(relay.path)
        connection.settimeout(30)
        connection.sendall(garbage)
        assert _rest(connection) == b""


def _rest(connection: socket.socket) -> bytes:
    with connection:
        try:
            return connection.recv(1)
        except ConnectionResetError:
            return b""
