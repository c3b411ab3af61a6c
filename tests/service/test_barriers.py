"""Barriers over real connections: released together or not at all, whatever happens to the wires."""

from __future__ import annotations

import asyncio
import functools
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import grpc
import pytest

from strata import TrainingOrchestrator
from strata.coordinator.grpc.waits import WAITS_PER_WORKER
from strata.rpc import coordinator_pb2 as pb
from strata.worker import session
from strata.worker.errors import BarrierBroken, CoordinatorUnavailable, StaleWorker
from tests.service.clients import EventStream, RawSession, channel, metric, stub, trailers_of
from tests.service.fleet import Fleet, RemoteError
from tests.support import Coordinator, eventually
from tests.support_proxy import Proxy

Fleets = Callable[..., Fleet]
CALLS = 'strata_grpc_requests_total{method="WaitBarrier"}'


@contextmanager
def workers(address: str, *names: str, job: str) -> Iterator[list[TrainingOrchestrator]]:
    made = [TrainingOrchestrator(address, job_id=job) for _ in names]
    try:
        for worker, name in zip(made, names, strict=True):
            worker.register_worker(name)
        assert all(worker.wait_connected(30) for worker in made)
        yield made
    finally:
        for worker in made:
            try:
                worker.deregister()
            except StaleWorker:
                pass
            finally:
                worker.close()


@contextmanager
def waiting(*calls: Callable[[], Any]) -> Iterator[list[Future[Any]]]:
    """Calls that wait, each in a thread of its own."""
    results: list[Future[Any]] = [Future() for _ in calls]

    def run(call: Callable[[], Any], result: Future[Any]) -> None:
        try:
            result.set_result(call())
        except Exception as error:
            result.set_exception(error)

    for pair in zip(calls, results, strict=True):
        threading.Thread(target=run, args=pair, daemon=True).start()
    yield results


def arrived(coordinator: Coordinator, name: str, count: int) -> None:
    def enough() -> bool:
        waiting = [b for b in coordinator.get("/api/barriers") if b["status"] == "waiting"]
        return any(b["name"] == name and b["arrived"] == count for b in waiting)

    eventually(enough, within_s=30, what=f"{count} have arrived at {name}")


def test_last_arrival_releases_everyone_in_order_of_arrival(shared: Coordinator) -> None:
    with workers(shared.address, "a", "b", "c", job="order") as (a, b, c):
        with waiting(lambda: a.barrier("epoch", 1)) as (first,):
            arrived(shared, "epoch", 1)
            with waiting(lambda: b.barrier("epoch", 1)) as (second,):
                arrived(shared, "epoch", 2)
                assert not first.done()
                third = c.barrier("epoch", 1)
        results = [first.result(30), second.result(30), third]
    assert [r.arrival_order for r in results] == [0, 1, 2]
    assert {(r.participants, r.released) for r in results} == {(3, True)}


def test_one_name_serves_repeatedly(shared: Coordinator) -> None:
    with workers(shared.address, "a", "b", job="rounds") as (a, b):
        for _ in range(20):
            with waiting(lambda: a.barrier("step"), lambda: b.barrier("step")) as both:
                assert sorted(r.result(30).arrival_order for r in both) == [0, 1]


def test_same_call_over_two_connections_counts_once_and_both_are_answered(shared: Coordinator) -> None:
    request = pb.WaitBarrierRequest(
        worker_id="a", barrier_id="b", expected_participants=2, call_id=b"one call", timeout_ms=60_000
    )
    with stub(shared.address) as one, stub(shared.address) as two, stub(shared.address) as three:
        for name in "ab":
            one.RegisterWorker(pb.RegisterWorkerRequest(worker_id=name, job_id="retries"))
        first = one.WaitBarrier.future(request, timeout=30)
        arrived(shared, "b", 1)
        again = two.WaitBarrier.future(request, timeout=30)
        third = three.WaitBarrier.future(request, timeout=30)
        time.sleep(0.3)
        assert not first.done()
        assert not again.done()
        other = one.WaitBarrier(
            pb.WaitBarrierRequest(worker_id="b", barrier_id="b", expected_participants=2), timeout=30
        )
        answers = [first.result(30), again.result(30), third.result(30)]
        assert [(r.arrival_order, r.participants) for r in answers] == [(0, 2)] * 3
        assert (other.arrival_order, other.participants) == (1, 2)
        late = one.WaitBarrier(request, timeout=30)
        assert late.released, "a retry after the release learns of it"


def test_seven_of_eight_get_an_error_that_names_the_killed_one(
    shared: Coordinator, fleets: Fleets, capsys: pytest.CaptureFixture[str]
) -> None:
    coordinator = shared
    survivors, victim = (fleets(coordinator.address, job="eight") for _ in range(2))
    names = [f"w{n}" for n in range(7)]
    survivors.register(*names)
    victim.register("victim")
    begun = [survivors.begin(name, "barrier", "all", 5) for name in names]
    arrived(coordinator, "all", 7)
    killed_s = victim.kill()
    elapsed_s = 0.0
    for wait in begun:
        error = wait.exception(60)
        assert isinstance(error, RemoteError)
        assert error.kind == "BarrierBroken"
        assert error.facts["missing"] == ["victim"]
        assert "victim" in error.message
        elapsed_s = max(elapsed_s, error.at_mono_s - killed_s)
    with capsys.disabled():
        print(f"\nall seven knew {elapsed_s:.2f} s after SIGKILL", end=" ")
    assert elapsed_s < 60.0  # One second is the promise on a quiet machine; silence would take ten minutes.


def test_worker_cut_off_at_the_release_learns_of_it_when_it_is_back(mortal: Coordinator) -> None:
    with Proxy(mortal.grpc_port) as proxy, workers(mortal.address, "near", job="cut") as (near,):
        with workers(proxy.address, "far", job="cut") as (far,):
            with waiting(lambda: far.barrier("b", participants=2)) as (far_wait,):
                arrived(mortal, "b", 1)
                proxy.refusing = True
                assert proxy.cut() >= 1
                assert near.barrier("b", participants=2).arrival_order == 1
                assert not far_wait.done()
                proxy.refusing = False
                assert far_wait.result(30).arrival_order == 0


def test_cut_connection_comes_back_under_the_same_incarnation(mortal: Coordinator) -> None:
    with Proxy(mortal.grpc_port) as proxy, EventStream(mortal.http_port) as events:
        with workers(proxy.address, "w", job="again") as (worker,):
            before = _worker(mortal, "w")["incarnation"]
            for cut in range(3):
                assert proxy.cut() >= 1
                # Over the old connection nothing comes back: an answer proves that there is a new one.
                assert worker.barrier(f"after cut {cut}", participants=1, timeout_s=20).participants == 1
            assert _worker(mortal, "w")["incarnation"] == before
        assert not _failures(events, "w")


def test_connection_that_only_looks_alive_is_given_up_for_a_new_one(shared: Coordinator) -> None:
    """Half-open: both ends believe in it and nothing gets through. Pings find out."""
    with Proxy(shared.grpc_port) as proxy, EventStream(shared.http_port) as events:
        with workers(proxy.address, "half", job="half-open") as (worker,):
            before = _worker(shared, "half")["incarnation"]
            proxy.stall()
            with waiting(lambda: worker.barrier("b", participants=1)) as (wait,):
                assert wait.result(60).participants == 1
            assert _worker(shared, "half")["incarnation"] == before
        assert not _failures(events, "half")


def test_slow_network_is_no_reason_to_fail(shared: Coordinator) -> None:
    with Proxy(shared.grpc_port) as proxy:
        proxy.latency_s = 0.2
        with workers(proxy.address, "far-away", job="slow") as (worker,):
            assert worker.barrier("b", participants=1, timeout_s=10).participants == 1
            assert _worker(shared, "far-away")["status"] == "active"


@pytest.fixture(scope="module")
def mortal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Coordinator]:
    """A coordinator that tests kill and start again. It bears with workers that a busy machine keeps from coming back
    at once."""
    env = {"STRATA_DISCONNECT_GRACE": "60"}
    server = Coordinator(tmp_path_factory.mktemp("mortal") / "coordinator", env=env).start()
    yield server
    server.stop()


def test_barriers_and_their_outcomes_outlive_the_coordinator(mortal: Coordinator, fleets: Fleets) -> None:
    coordinator = mortal
    host = fleets(coordinator.address)
    names = ["a", "b", "c"]
    host.register(*names)
    ended = pb.WaitBarrierRequest(
        worker_id="once", barrier_id="b", expected_participants=1, call_id=b"the same call"
    )
    with stub(coordinator.address) as calls:
        calls.RegisterWorker(pb.RegisterWorkerRequest(worker_id="once", job_id="remembered"))
        released = calls.WaitBarrier(ended, timeout=30)
    begun = [host.begin(name, "barrier", "across", 3) for name in names[:2]]
    arrived(coordinator, "across", 2)
    coordinator.kill()
    coordinator.start()
    arrived(coordinator, "across", 2)
    assert not any(wait.done() for wait in begun)
    last = host.call("c", "barrier", "across", 3)
    assert sorted(w.result(30).value["arrival_order"] for w in begun) == [0, 1]
    assert last["arrival_order"] == 2
    with stub(coordinator.address) as calls:
        assert calls.WaitBarrier(ended, timeout=30, wait_for_ready=True) == released, "it is remembered"


def test_heartbeats_continue_while_a_worker_waits(shared: Coordinator) -> None:
    with workers(shared.address, "patient", "late", job="beats") as (patient, late):
        with waiting(lambda: patient.barrier("b")) as (wait,):
            arrived(shared, "b", 1)
            heard_s = _worker(shared, "patient")["last_heartbeat"]
            patient.heartbeat(current_step=41)
            eventually(
                lambda: (
                    (w := _worker(shared, "patient"))["current_step"] == 41 and w["last_heartbeat"] > heard_s
                ),
                within_s=30,
            )
            assert not wait.done()
            late.barrier("b")
            wait.result(30)


def test_time_out_names_the_missing_and_how_long_they_are_silent(
    shared: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    # It is the coordinator that says so, however busy it is, and not the worker that gives up before.
    monkeypatch.setattr(session, "ANSWER_MARGIN_S", 60.0)
    with workers(shared.address, "here", "elsewhere", job="timeout") as (here, _):
        began_s = time.monotonic()
        with pytest.raises(BarrierBroken) as broken:
            here.barrier("b", 7, timeout_s=0.5)
        assert 0.4 < time.monotonic() - began_s < 60.0
    assert broken.value.missing == ("elsewhere",)
    for words in ("'b' at step 7", "1 of 2 arrived", "timed out", "elsewhere (last heartbeat"):
        assert words in str(broken.value)


def test_plain_clients_and_sessions_meet_at_one_barrier(shared: Coordinator) -> None:
    with workers(shared.address, "session", job="mixed") as (session,), stub(shared.address) as calls:
        calls.RegisterWorker(pb.RegisterWorkerRequest(worker_id="plain", job_id="mixed"))
        with waiting(lambda: session.barrier("b")) as (wait,):
            answer = calls.WaitBarrier(pb.WaitBarrierRequest(worker_id="plain", barrier_id="b"), timeout=30)
            assert answer.released
            assert {answer.arrival_order, wait.result(30).arrival_order} == {0, 1}
        calls.DeregisterWorker(pb.DeregisterWorkerRequest(worker_id="plain"))


def test_plain_client_learns_who_is_missing(shared: Coordinator) -> None:
    with stub(shared.address) as calls:
        for name in ("one", "two"):
            calls.RegisterWorker(pb.RegisterWorkerRequest(worker_id=name, job_id="plain-missing"))
        request = pb.WaitBarrierRequest(worker_id="one", barrier_id="b", timeout_ms=200)
        with pytest.raises(grpc.RpcError) as broken:
            calls.WaitBarrier(request, timeout=30)
        assert broken.value.code() == grpc.StatusCode.ABORTED
        trailers = trailers_of(broken.value)
        assert trailers["strata-code"] == "barrier_broken"
        assert trailers["strata-missing-bin"] == b"two"
        assert "two" in str(broken.value.details())
        assert trailers["strata-hint-bin"], "whose turn it is, and what to do"


def test_async_twins_do_what_their_elders_do(shared: Coordinator) -> None:
    async def take_part(name: str, step: int) -> tuple[int, int, str | None]:
        worker = TrainingOrchestrator(shared.address, job_id="async")
        try:
            config = await worker.register_worker_async(name)
            await worker.register_dataset_async("async-data", "/d", "parquet", 100, 10)
            await worker.notify_checkpoint_async(f"{name}-c", step, path="/c")
            result = await worker.barrier_async("meet", participants=2)
            shards = await worker.get_shards_async("async-data")
            latest = await worker.latest_checkpoint_async()
            await worker.barrier_async("part", participants=2)
            await worker.deregister_async()
            return len(shards), config.rank + result.participants, latest.checkpoint_id if latest else None
        finally:
            worker.close()

    async def both() -> list[tuple[int, int, str | None]]:
        return list(await asyncio.gather(take_part("a", 1), take_part("b", 2)))

    done = asyncio.run(both())
    assert sum(shards for shards, _, _ in done) == 10
    assert {latest for _, _, latest in done} <= {"a-c", "b-c"}


def test_cancelled_wait_leaves_nothing_behind_for_its_worker(shared: Coordinator) -> None:
    """A plain client that gives up and calls again is one participant, however often it does."""
    with stub(shared.address) as calls:
        for name in ("impatient", "steady"):
            calls.RegisterWorker(pb.RegisterWorkerRequest(worker_id=name, job_id="give-up"))
        heard = metric(shared.url, CALLS)
        request = pb.WaitBarrierRequest(worker_id="impatient", barrier_id="g", expected_participants=2)
        for number in range(1, 22):
            again = calls.WaitBarrier.future(request, timeout=60)
            eventually(functools.partial(_heard_calls, shared, heard + number), within_s=30)
            if number < 21:
                again.cancel()
        last = pb.WaitBarrierRequest(worker_id="steady", barrier_id="g", expected_participants=2)
        assert calls.WaitBarrier(last, timeout=30).participants == 2
        assert again.result(30).released


def test_disagreeing_about_the_number_is_refused_and_changes_nothing(shared: Coordinator) -> None:
    with stub(shared.address) as calls:
        for name in ("x", "y"):
            calls.RegisterWorker(pb.RegisterWorkerRequest(worker_id=name, job_id="disagree"))
        first = calls.WaitBarrier.future(
            pb.WaitBarrierRequest(worker_id="x", barrier_id="n", expected_participants=2), timeout=30
        )
        arrived(shared, "n", 1)
        with pytest.raises(grpc.RpcError) as refused:
            calls.WaitBarrier(
                pb.WaitBarrierRequest(worker_id="y", barrier_id="n", expected_participants=3), timeout=30
            )
        assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        calls.WaitBarrier(
            pb.WaitBarrierRequest(worker_id="y", barrier_id="n", expected_participants=2), timeout=30
        )
        assert first.result(30).participants == 2


def test_session_refuses_a_bad_barrier_and_stays(shared: Coordinator) -> None:
    with stub(shared.address) as calls, channel(shared.address) as own:
        incarnation = calls.RegisterWorker(pb.RegisterWorkerRequest(worker_id="r", job_id="raw")).incarnation
        session = RawSession(own).hello("r", incarnation)
        session.send(barrier=pb.WaitBarrierRequest(barrier_id="", call_id=b"1"))
        outcome = session.wait_for("barrier")
        assert outcome.error_code == "invalid_argument"
        assert not outcome.outcome.released
        session.send(barrier=pb.WaitBarrierRequest(barrier_id="ok", call_id=b"2", expected_participants=1))
        eventually(
            lambda: (
                [m.barrier.outcome.released for m in session.received if m.HasField("barrier")][1:] == [True]
            ),
            within_s=30,
        )
        session.close()


def test_wait_ends_when_its_time_out_passes_without_an_answer(
    mortal: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    # It gives up after a second, and a coordinator that lives would long wait on: what ends the wait is certain.
    monkeypatch.setattr(session, "ANSWER_MARGIN_S", -599.0)
    coordinator = mortal
    with workers(coordinator.address, "lonely", job="gone") as (worker,):
        with waiting(lambda: worker.barrier("b", participants=2, timeout_s=600.0)) as (wait,):
            arrived(coordinator, "b", 1)
            coordinator.kill()
            assert isinstance(wait.exception(30), CoordinatorUnavailable)
        coordinator.start()
        assert worker.wait_connected(30)


def test_plain_client_whose_worker_is_replaced_is_notified_and_not_left_waiting(shared: Coordinator) -> None:
    with stub(shared.address) as calls:
        calls.RegisterWorker(pb.RegisterWorkerRequest(worker_id="replaced", job_id="left"))
        pending = calls.WaitBarrier.future(
            pb.WaitBarrierRequest(worker_id="replaced", barrier_id="l", expected_participants=2), timeout=30
        )
        arrived(shared, "l", 1)
        calls.RegisterWorker(pb.RegisterWorkerRequest(worker_id="replaced", job_id="left"))
        error = pending.exception(30)
        assert error.code() == grpc.StatusCode.ABORTED
        assert trailers_of(error)["strata-missing-bin"] == b"replaced"


def test_one_worker_can_wait_only_so_often(shared: Coordinator) -> None:
    with stub(shared.address) as calls:
        calls.RegisterWorker(pb.RegisterWorkerRequest(worker_id="greedy", job_id="greedy"))
        waits = [
            calls.WaitBarrier.future(
                pb.WaitBarrierRequest(worker_id="greedy", barrier_id=f"g{n}", expected_participants=2)
            )
            for n in range(200)
        ]
        # None of those that may wait ends by itself: the rest can be told apart, however long it takes.
        refused = 200 - WAITS_PER_WORKER
        eventually(lambda: sum(wait.done() for wait in waits) == refused, within_s=60)
        calls.DeregisterWorker(pb.DeregisterWorkerRequest(worker_id="greedy"))
        codes = Counter(wait.exception(30).code() for wait in waits)
    assert codes == {
        grpc.StatusCode.RESOURCE_EXHAUSTED: refused,
        grpc.StatusCode.ABORTED: WAITS_PER_WORKER,
    }


def _heard_calls(coordinator: Coordinator, count: float) -> bool:
    return metric(coordinator.url, CALLS) == count


def _failures(events: EventStream, worker: str) -> list[str]:
    """Of this worker only: those that other tests left without a goodbye fail meanwhile, half a minute later."""
    return [
        e.data["reason"]
        for e in events.received
        if e.kind == "worker_failed" and e.data["worker_id"] == worker
    ]


def _worker(coordinator: Coordinator, name: str) -> dict[str, Any]:
    found: dict[str, Any] = next(w for w in coordinator.get("/api/workers") if w["id"] == name)
    return found
