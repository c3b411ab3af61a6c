"""Server-sent events: in order, the same for everyone, resumed where a reader left off."""

from __future__ import annotations

import time
import urllib.request

from strata.rpc import coordinator_pb2 as pb
from tests.service.clients import EventStream, RawSession, channel, stub
from tests.support import Coordinator, eventually


def register(coordinator: Coordinator, *names: str) -> None:
    with stub(coordinator.address) as calls:
        for name in names:
            calls.RegisterWorker(pb.RegisterWorkerRequest(worker_id=name, job_id=name))


def joined(stream: EventStream) -> list[str]:
    return [e.data["spec"]["worker_id"] for e in stream.received if e.kind == "worker_joined"]


def number(event_id: str) -> int:
    return int(event_id.rpartition("-")[2])


def test_events_come_in_order_with_ids_that_grow(shared: Coordinator) -> None:
    names = [f"order-{n}" for n in range(30)]
    with EventStream(shared.http_port) as stream:
        register(shared, *names)
        stream.wait_for("worker_joined", lambda e: e["spec"]["worker_id"] == names[-1])
    assert joined(stream) == names
    numbers = [number(e.id) for e in stream.received]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    assert all(e.data["reason"] for e in stream.received if e.kind == "worker_joined")


def test_two_readers_get_identical_bytes(shared: Coordinator) -> None:
    with EventStream(shared.http_port) as one, EventStream(shared.http_port) as two:
        for turn in range(5):
            register(shared, f"twins-{turn}")
            time.sleep(0.05)
        for stream in (one, two):
            stream.wait_for("worker_joined", lambda e: e["spec"]["worker_id"] == "twins-4")
        last = min(number(one.received[-1].id), number(two.received[-1].id))
        first = max(number(one.received[0].id), number(two.received[0].id))

    def between(stream: EventStream) -> list[bytes]:
        blocks = [b for b in stream.raw.split(b"\n\n") if b.startswith(b"id: ")]
        return [b for b in blocks if first <= number(b.split(b"\n")[0].decode()) <= last]

    assert len(between(one)) >= 5
    assert between(one) == between(two)


def test_reader_resumes_after_the_last_event_it_saw(shared: Coordinator) -> None:
    with EventStream(shared.http_port) as before:
        register(shared, "resume-1", "resume-2")
        seen = before.wait_for("worker_joined", lambda e: e["spec"]["worker_id"] == "resume-1")
    register(shared, "resume-3")
    with EventStream(shared.http_port, last_event_id=seen.id) as after:
        after.wait_for("worker_joined", lambda e: e["spec"]["worker_id"] == "resume-3")
    assert number(after.received[0].id) == number(seen.id) + 1
    assert joined(after) == ["resume-2", "resume-3"]
    assert "resync" not in {e.kind for e in after.received}


def test_reader_that_names_an_unknown_event_must_resync(shared: Coordinator) -> None:
    for last in ("nonsense", "deadbeef-5", "-1", "x" * 5_000):
        with EventStream(shared.http_port, last_event_id=last) as stream:
            told = stream.wait_for("resync")
            assert told.data["reason"]


def test_reader_of_an_earlier_life_must_resync_and_continues(coordinator: Coordinator) -> None:
    with EventStream(coordinator.http_port) as before:
        register(coordinator, "first")
        seen = before.wait_for("worker_joined")
    coordinator.kill()
    coordinator.start()
    with EventStream(coordinator.http_port, last_event_id=seen.id) as after:
        resync = after.wait_for("resync")
        register(coordinator, "second")
        after.wait_for("worker_joined", lambda e: e["spec"]["worker_id"] == "second")
    assert after.received[0] is resync
    assert resync.id != seen.id
    assert joined(after) == ["second"], "what was before the resync is not told again"


def test_logs_and_metrics_ride_along(shared: Coordinator) -> None:
    with (
        stub(shared.address) as calls,
        channel(shared.address) as own,
        EventStream(shared.http_port) as stream,
    ):
        calls.RegisterWorker(pb.RegisterWorkerRequest(worker_id="talker", job_id="talker"))
        session = RawSession(own).hello("talker")
        session.send(logs=pb.LogBatch(entries=[pb.LogEntry(timestamp=time.time(), message="one\ntwo")]))
        # Lines that others say at the same time come in the same event.
        told = stream.wait_for("logs", lambda entries: any(e["worker_id"] == "talker" for e in entries))
        assert [e["message"] for e in told.data if e["worker_id"] == "talker"] == ["one\ntwo"]
        assert stream.wait_for("metrics").data["total_workers"] >= 1
        session.close()


def test_page_is_fresh_once_its_event_has_been_published(shared: Coordinator) -> None:
    with EventStream(shared.http_port) as stream:
        for turn in range(10):
            register(shared, f"fresh-{turn}")
            stream.wait_for("worker_joined", lambda e, t=turn: e["spec"]["worker_id"] == f"fresh-{t}")  # type: ignore[misc]
            assert f"fresh-{turn}" in {w["id"] for w in shared.get("/api/workers")}


def test_what_happened_before_a_reader_came_can_be_asked_for(shared: Coordinator) -> None:
    with EventStream(shared.http_port) as stream:
        register(shared, "story-1", "story-2")
        heard = [
            stream.wait_for("worker_joined", lambda e, n=name: e["spec"]["worker_id"] == n)  # type: ignore[misc]
            for name in ("story-1", "story-2")
        ]
    recent = shared.get("/api/events/recent")
    told = {e["id"]: e for e in recent}
    assert [told[e.id]["data"] for e in heard] == [e.data for e in heard]
    assert [number(e["id"]) for e in recent] == sorted(number(e["id"]) for e in recent)
    assert all(abs(e["at"] - time.time()) < 3_600 for e in recent)
    assert "metrics" not in {e["event"] for e in recent}


def test_stream_says_how_it_must_be_handled(shared: Coordinator) -> None:
    with urllib.request.urlopen(shared.url + "/api/events", timeout=30) as answer:
        assert answer.headers["Content-Type"].startswith("text/event-stream")
        assert answer.headers["Cache-Control"] == "no-store"
        assert answer.readline() == b"retry: 1000\n"


def test_readers_are_forgotten_when_they_go(shared: Coordinator) -> None:
    import psutil

    process = psutil.Process(shared.pid)
    before = len(process.net_connections())
    for _ in range(10):
        with EventStream(shared.http_port):
            pass
    eventually(lambda: len(process.net_connections()) <= before + 1, within_s=30)
