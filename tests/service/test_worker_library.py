"""What a training process gets from `TrainingOrchestrator` besides barriers: news, logs, figures, plain errors."""

from __future__ import annotations

import asyncio
import logging
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import pytest

from strata import TrainingOrchestrator
from strata.coordinator.grpc.streams import MESSAGES_PER_SECOND
from strata.core.data.ledger import DataCommit, RankRecord
from strata.core.messages import InvalidArgument
from strata.rpc import coordinator_pb2 as pb
from strata.worker import session
from strata.worker.address import coordinator_address, is_secure
from strata.worker.errors import CoordinatorRefused, CoordinatorUnavailable, NotRegistered, SessionClosed
from strata.worker.outbox import LINES_KEPT, LogOutbox
from strata.worker.session import SessionThread, Topology
from tests.service.clients import RawSession, channel, stub
from tests.support import Coordinator, eventually


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever leaves waits until a busy coordinator has read what was said before."""
    monkeypatch.setattr(session, "GOODBYE_S", 60.0)


@pytest.fixture
def worker(shared: Coordinator) -> Iterator[TrainingOrchestrator]:
    made = TrainingOrchestrator(shared.address, job_id="library")
    yield made
    made.close()


def shown(coordinator: Coordinator, name: str) -> dict[str, Any]:
    found: dict[str, Any] = next(w for w in coordinator.get("/api/workers") if w["id"] == name)
    return found


def test_heartbeats_carry_state_and_metrics(shared: Coordinator, worker: TrainingOrchestrator) -> None:
    config = worker.register_worker("beats", port=7, gpu_count=0, memory_bytes=123, metadata={"zone": "b"})
    assert (config.rank, config.world_size) == (0, 1)
    assert config.heartbeat_interval_s == 1.0
    assert worker.heartbeat(41, 2, state="training", task="task-1")
    seen = eventually(
        lambda: w if (w := shown(shared, "beats"))["current_step"] == 41 and w["resources"] else None,
        within_s=30,
    )
    assert (seen["status"], seen["current_epoch"], seen["current_task"]) == ("training", 2, "task-1")
    assert seen["resources"]["memory_used_bytes"] > 1_000_000
    assert seen["resources"]["cpu_percent"] >= 0
    assert seen["metadata"] == {"zone": "b"}
    assert seen["connected"]
    worker.deregister()


def test_states_and_statuses_that_do_not_exist_are_refused(worker: TrainingOrchestrator) -> None:
    worker.register_worker("odd", port=7)
    with pytest.raises(InvalidArgument, match="state: is 'bogus'; it must be one of active, idle, training"):
        worker.heartbeat(1, state="bogus")
    with pytest.raises(InvalidArgument, match="status: is 'bogus'; it must be one of"):
        worker.notify_checkpoint("c", 1, status="bogus")  # type: ignore[arg-type]
    worker.deregister()


def test_a_call_after_close_says_so(shared: Coordinator) -> None:
    worker = TrainingOrchestrator(shared.address, job_id="library")
    worker.close()
    with pytest.raises(SessionClosed, match="was closed by this process"):
        worker.register_worker("late", port=7)


def test_a_call_that_close_cuts_off_says_so() -> None:
    """Nobody listens there: the call would be tried again for a long time."""
    worker = TrainingOrchestrator("127.0.0.1:1", timeout_s=600)
    caught: list[BaseException] = []

    def register() -> None:
        try:
            worker.register_worker("w", port=7)
        except BaseException as error:
            caught.append(error)

    thread = threading.Thread(target=register)
    thread.start()
    eventually(lambda: asyncio.all_tasks(worker._session._loop), within_s=30)
    worker.close()
    thread.join(30)
    assert [type(error) for error in caught] == [SessionClosed]


def test_a_call_that_waits_to_be_tried_again_finds_no_closed_channel() -> None:
    thread = SessionThread("127.0.0.1:1", call_timeout_s=600)
    request = pb.HeartbeatRequest(worker_id="w")
    failures, is_next, stop = [0], thread._is_next, thread._loop.stop

    def count(*arguments: Any) -> bool:
        failures[0] += 1
        return is_next(*arguments)

    thread._is_next = count  # type: ignore[assignment, method-assign]
    calls = [thread.submit(thread.call("Heartbeat", request)) for _ in range(20)]
    eventually(lambda: failures[0] > 40, within_s=60, what="all of them wait between two attempts")

    def stop_later() -> None:
        thread._loop.call_later(3.0, stop)  # They wake up meanwhile.

    thread._loop.stop = stop_later  # type: ignore[method-assign]
    thread.close()
    for each in calls:
        with pytest.raises((SessionClosed, CancelledError)):
            each.result(0)


def test_what_is_given_to_a_session_that_closes_is_refused_or_cut_off() -> None:
    for _ in range(30):
        thread = SessionThread("127.0.0.1:1")
        given: list[Future[Any]] = []

        def give(to: SessionThread = thread, given: list[Future[Any]] = given) -> None:
            with suppress(SessionClosed):
                while True:
                    given.append(to.submit(asyncio.sleep(600)))

        giver = threading.Thread(target=give)
        giver.start()
        thread.close()
        giver.join(60)
        assert not giver.is_alive()
        for each in given:
            with pytest.raises(CancelledError):
                each.result(30)


def test_news_of_others_reaches_a_listener_and_a_failing_one_does_no_harm(shared: Coordinator) -> None:
    heard: list[Topology] = []

    def listen(topology: Topology) -> None:
        heard.append(topology)
        raise RuntimeError("a listener of a user")

    first = TrainingOrchestrator(shared.address, job_id="news", on_topology=listen)
    second = TrainingOrchestrator(shared.address, job_id="news")
    try:
        first.register_worker("first")
        assert first.wait_connected(30)
        second.register_worker("second")
        eventually(
            lambda: any(t.world_size == 2 and "second" in t.reason for t in heard),
            within_s=30,
            what=lambda: f"word of the second worker, not only {heard}",
        )
        second.deregister()
        eventually(lambda: heard[-1].world_size == 1, within_s=30)
        assert first.connected
        first.deregister()
    finally:
        first.close()
        second.close()


def test_log_records_of_the_process_reach_the_coordinator(shared: Coordinator) -> None:
    worker = TrainingOrchestrator(shared.address, job_id="logs", ship_logs=True)
    try:
        worker.register_worker("logger")
        logging.getLogger("training").warning("loss is %s", 3.5)
        logging.getLogger("training").debug("not for the fleet")
        worker.deregister()
        found = eventually(lambda: shared.get("/api/logs?worker_id=logger"), within_s=30)
    finally:
        worker.close()
    assert [(e["level"], e["message"], e["task_id"]) for e in found] == [("warn", "loss is 3.5", "logs")]
    assert not [h for h in logging.getLogger().handlers if type(h).__name__ == "ShippingHandler"]


def test_goodbye_does_not_overtake_what_was_said_before_it(shared: Coordinator) -> None:
    """Also on a session that sends so much that it is read slowly: a call would arrive before the last lines."""
    with stub(shared.address) as calls, channel(shared.address) as own:
        calls.RegisterWorker(pb.RegisterWorkerRequest(worker_id="talkative", job_id="talkative"))
        session = RawSession(own).hello("talkative")
        session.wait_for("welcome")
        for _ in range(int(2.5 * MESSAGES_PER_SECOND)):
            session.send(heartbeat=pb.HeartbeatRequest())
        session.send(logs=pb.LogBatch(entries=[pb.LogEntry(timestamp=time.time(), message="last words")]))
        session.send(goodbye=pb.Goodbye(reason="done"))
        assert session.wait_for("goodbye", within_s=30).reason == "done"
        assert session.ended.wait(30)
        assert session.error is None
    assert [e["message"] for e in shared.get("/api/logs?worker_id=talkative")] == ["last words"]
    assert "talkative" not in {w["id"] for w in shared.get("/api/workers")}


def test_messages_of_a_worker_that_leaves_at_once_all_arrive(shared: Coordinator) -> None:
    for number in range(5):
        worker = TrainingOrchestrator(shared.address, job_id="hasty", ship_logs=True)
        try:
            worker.register_worker(f"hasty-{number}")
            for line in range(1_200):
                logging.getLogger("training").warning("%d", line)
            worker.deregister()
            found = shared.get(f"/api/logs?worker_id=hasty-{number}&limit=2000")
            assert [e["message"] for e in reversed(found)] == [str(n) for n in range(1_200)]
        finally:
            worker.close()


def test_worker_whose_session_is_not_answered_leaves_by_a_call(tmp_path: Path) -> None:
    """A coordinator that does not know a goodbye on the stream is notified by a call."""
    # One that bears with a worker without a stream: whoever has failed cannot leave any more.
    server = Coordinator(tmp_path / "coordinator", env={"STRATA_DISCONNECT_GRACE": "60"}).start()
    worker = TrainingOrchestrator(server.address, job_id="by-call")
    try:
        worker.register_worker("caller")
        assert worker.wait_connected(30)
        asyncio.run_coroutine_threadsafe(worker._session._end_session(), worker._session._loop).result(30)
        worker.deregister()
        assert "caller" not in {w["id"] for w in server.get("/api/workers")}
    finally:
        worker.close()
        server.stop()


def test_outbox_drops_the_oldest_lines_and_counts_them() -> None:
    outbox = LogOutbox()
    for number in range(LINES_KEPT + 25):
        outbox.put(pb.LogEntry(message=str(number)))
    batch = outbox.take()
    assert batch is not None
    assert batch.dropped == 25
    assert batch.entries[0].message == "25"
    outbox.give_back(batch)
    again = outbox.take()
    assert again is not None
    assert (again.dropped, again.entries[0].message) == (25, "25")


def test_training_step_never_waits(shared: Coordinator, worker: TrainingOrchestrator) -> None:
    worker.register_worker("quick")
    worker.register_dataset("quick-data", "/d", "f", 1_000, 100)

    def tell(step: int) -> None:
        worker.heartbeat(step)
        worker.report_progress("quick-data", 0, step % 10, step)

    def is_told_sooner_than_answered() -> bool:
        told_s = sorted(elapsed_s(lambda n=number: tell(n)) for number in range(5_000))  # type: ignore[misc]
        answered_s = statistics.median(elapsed_s(worker.latest_checkpoint) for _ in range(50))
        return told_s[4_950] < answered_s

    # Four microseconds each on a quiet machine, where an answer takes a hundred times as long. One in a hundred may be
    # interrupted by the machine; where it is more, they are counted again.
    eventually(is_told_sooner_than_answered, within_s=60)
    worker.deregister()


def elapsed_s(call: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    call()
    return time.perf_counter() - began_s


def test_wrong_use_is_reported_plainly(worker: TrainingOrchestrator) -> None:
    for call in (worker.barrier, worker.get_shards):
        with pytest.raises(NotRegistered, match="register_worker"):
            call("x")
    with pytest.raises(NotRegistered):
        _ = worker.topology
    with pytest.raises(ValueError, match="port"):
        worker.register_worker("w", port=-1)
    with pytest.raises(ValueError, match="RegisterWorker"):
        worker.register_worker("w", port=2**40)
    with pytest.raises(CoordinatorRefused, match="worker_id"):
        worker.register_worker("")
    with pytest.raises(ValueError, match="RegisterWorker"):
        worker.register_worker("\ud800")
    worker.register_worker("w")
    with pytest.raises(ValueError, match="current_step"):
        worker.heartbeat(-1)
    with pytest.raises(CoordinatorRefused, match="not known here") as unknown:
        worker.get_shards("nothing")
    assert unknown.value.reason_code == "not_found"
    assert unknown.value.hint
    for timeout_s in (-1.0, 0.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="timeout_s"):
            worker.barrier("b", timeout_s=timeout_s)
    with pytest.raises(ValueError, match="samples_done"):
        worker.report_progress("d", 0, 0, -1)
    worker.deregister()


def test_unreachable_coordinator_is_an_error_within_the_time_given() -> None:
    worker = TrainingOrchestrator("127.0.0.1:1", timeout_s=0.5)
    began_s = time.monotonic()
    with pytest.raises(CoordinatorUnavailable, match="strata serve") as error:
        worker.register_worker("w")
    assert time.monotonic() - began_s < 20, "the default is thirty"
    assert error.value.address == "127.0.0.1:1"
    worker.close()


@pytest.mark.parametrize(
    ("given", "address", "secure"),
    [
        ("http://localhost:50051", "localhost:50051", False),
        ("localhost:50051", "localhost:50051", False),
        ("HTTPS://host", "host:50051", True),
        ("grpc://h:1", "h:1", False),
        ("[::1]:5", "[::1]:5", False),
        (" host:7 ", "host:7", False),
        ("http://host:7/path", "host:7", False),
    ],
)
def test_addresses(given: str, address: str, secure: bool) -> None:
    assert coordinator_address(given) == address
    assert is_secure(given) is secure


def test_address_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COORDINATOR_ADDR", raising=False)
    monkeypatch.setenv("COORDINATOR_URL", "http://from-url:1")
    assert coordinator_address(None) == "from-url:1"
    monkeypatch.setenv("COORDINATOR_ADDR", "from-addr:2")
    assert coordinator_address(None) == "from-addr:2"
    assert coordinator_address("given:3") == "given:3"


@pytest.mark.parametrize(
    "given", ["ftp://host", "http://", ":50051", "host:port", "host:99999", "http://[::1"]
)
def test_address_that_is_none(given: str) -> None:
    with pytest.raises(ValueError, match="is not a coordinator address"):
        coordinator_address(given)


def test_latest_checkpoint_is_the_one_to_resume_from(
    shared: Coordinator, worker: TrainingOrchestrator
) -> None:
    worker.register_worker("saver")
    assert worker.latest_checkpoint() is None
    worker.notify_checkpoint("s1", 10, 1, "/c/1", 100, tiers=["memory"], digest="xxh3:1", metadata={"k": "v"})
    worker.notify_checkpoint("s2", 20, 1, "/c/2", 100, status="in_progress")
    worker.notify_checkpoint("s3", 30, 1, "/c/3", 100, status="failed", reason="disk full")
    latest = worker.latest_checkpoint()
    assert latest is not None
    assert (latest.checkpoint_id, latest.step, latest.path, latest.tiers) == ("s1", 10, "/c/1", ("memory",))
    worker.notify_checkpoint("s2", 20, 1, "/c/2", 100)
    assert (latest := worker.latest_checkpoint()) is not None
    assert latest.checkpoint_id == "s2"
    worker.deregister()


def test_leaving_the_with_block_deregisters_and_an_error_does_not(shared: Coordinator) -> None:
    with TrainingOrchestrator(shared.address, job_id="with") as one:
        one.register_worker("polite")
    assert "polite" not in {w["id"] for w in shared.get("/api/workers")}
    with pytest.raises(RuntimeError, match="training failed"):
        _fail(shared)
    eventually(lambda: shown(shared, "rude")["status"] == "failed", within_s=60)


def _fail(shared: Coordinator) -> None:
    with TrainingOrchestrator(shared.address, job_id="with") as worker:
        worker.register_worker("rude")
        assert worker.wait_connected(30)
        raise RuntimeError("training failed")


def test_closed_workers_leave_no_thread(shared: Coordinator) -> None:
    before = set(threading.enumerate())
    for number in range(3):
        with TrainingOrchestrator(shared.address, job_id="threads") as worker:
            worker.register_worker(f"t{number}")
    left = {t.name for t in set(threading.enumerate()) - before if t.name.startswith("strata")}
    assert left == set()


def test_shards_are_shown_as_far_as_they_are_in_the_epoch_being_trained(
    shared: Coordinator, worker: TrainingOrchestrator
) -> None:
    def shown_plan() -> tuple[int, int, list[int], list[int]]:
        plan = shared.get("/api/datasets/rounds/shards?job_id=library")
        shards = plan["shards"]
        return (
            plan["epoch"],
            plan["samples_done"],
            [s["done"] for s in shards],
            [s["reported"] for s in shards],
        )

    worker.register_worker("rounds-0")
    worker.register_dataset("rounds", "/data", "parquet", 40, 10)
    commit = DataCommit()
    for epoch, samples in (
        (0, 25),
        (0, 40),
        (1, 15),
        (2, 25),
    ):  # Trained by position: nobody asks for shards.
        begun = commit.coverage("rounds", epoch).covered.size
        trained = RankRecord(dataset="rounds", epoch=epoch, total=40, rank=0).with_span(begun, samples)
        commit = commit.next([trained], world_size=1)
        step = 100 * epoch + samples
        worker.notify_checkpoint(f"rounds-{step}", step, epoch, path=f"/ckpt/{step}", data=commit.to_json())
        done = [min(10, max(0, samples - start)) for start in (0, 10, 20, 30)]
        assert shown_plan() == (epoch, samples, done, done)

    assert len(worker.get_shards("rounds", 3)) == 4  # Trained by shards: they are asked for, and reported.
    worker.report_progress("rounds", 3, 1, 7)
    eventually(lambda: shown_plan() == (3, 0, [0] * 4, [0, 7, 0, 0]), within_s=30)
    worker.deregister()


def test_the_latest_checkpoint_of_an_unknown_job_is_an_error_and_not_none(shared: Coordinator) -> None:
    with TrainingOrchestrator(shared.address, job_id="known-job") as worker, stub(shared.address) as calls:
        worker.register_worker("knows")
        ask = calls.GetLatestCheckpoint
        answer = ask(pb.GetLatestCheckpointRequest(worker_id="knows", job_id="known-job"), timeout=10)
        assert not answer.has_checkpoint
        with pytest.raises(grpc.RpcError) as caught:
            ask(pb.GetLatestCheckpointRequest(worker_id="knows", job_id="unknown-job"), timeout=10)
        assert caught.value.code() == grpc.StatusCode.NOT_FOUND
        said = caught.value.details() or ""
        assert "'unknown-job' is not known" in said
        assert "Known jobs: " in said
        assert "known-job" in said.partition("Known jobs: ")[2]


def test_a_worker_without_a_name_takes_it_from_the_environment(
    shared: Coordinator, worker: TrainingOrchestrator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORKER_ID", "node-7")
    assert worker.register_worker().worker_id == worker.worker_id == "node-7"
    assert worker.latest() == worker.latest_checkpoint()
    worker.deregister()
