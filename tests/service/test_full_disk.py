"""A full disk ends nothing: what is known can be read, changes are refused, and accepted again when there is space.

With a real file system that is really full. Nothing that was acknowledged is lost, also by `kill -9` while it is full.
"""

from __future__ import annotations

import asyncio
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from strata.coordinator.auth.tokens import TokenStore
from strata.coordinator.engine import Engine, StorageFull, SystemClock
from strata.coordinator.journal.protocol import JournalFull, JournalSpace
from strata.coordinator.journal.space import Space
from strata.coordinator.journal.sqlite import SqliteJournal
from strata.core.cluster import Cluster
from strata.core.messages import RegisterWorker, SwapValue, ValueSwapped
from strata.rpc import coordinator_pb2 as pb
from strata.worker.errors import CoordinatorStorageFull, CoordinatorUnavailable
from tests.cli.running import strata
from tests.core.builders import worker_spec
from tests.service.clients import RawSession, channel, metric, refusal, stub
from tests.service.fleet import Fleet
from tests.stores.mounts import small_tmpfs
from tests.support import Coordinator, eventually

MB = 1 << 20


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with small_tmpfs(tmp_path / "disk", size_bytes=24 * MB) as place:
        yield place


def fill(place: Path, *, leave_bytes: int = 0) -> Path:
    """Others may write meanwhile: less than was free a moment ago is tried again."""
    ballast = place / "ballast"
    with ballast.open("wb") as file:
        while True:
            free = os.statvfs(place)
            try:
                os.posix_fallocate(file.fileno(), 0, max(1, free.f_bavail * free.f_frsize - leave_bytes))
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
            else:
                return ballast


def is_full(space: JournalSpace) -> bool:
    return space.is_full


def swapped(number: int, size_bytes: int) -> ValueSwapped:
    return ValueSwapped(key="k", body=b"x" * size_bytes, version=number, reason="swapped", at_s=0.0)


# --- the reserve --------------------------------------------------------------------------------------------


def test_reserve_is_private_and_really_there(small_disk: Path) -> None:
    space = Space(small_disk, reserve_bytes=MB)
    found = (small_disk / "reserve").stat()
    assert stat.S_IMODE(found.st_mode) == 0o600
    assert found.st_blocks * 512 >= MB
    assert not is_full(space)
    before = found.st_ino
    Space(small_disk, reserve_bytes=MB)
    assert (small_disk / "reserve").stat().st_ino == before, "a second start takes it over"


def test_full_is_noticed_before_the_last_byte_and_ends_by_itself(
    small_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    space = Space(small_disk, reserve_bytes=MB)
    ballast = fill(small_disk, leave_bytes=MB - 4096)
    for _ in range(3):
        space.look()
    assert is_full(space)
    os.truncate(ballast, ballast.stat().st_size - 100_000)
    space.look()
    assert is_full(space), "a little more than the mark is not enough: the state would flutter"
    ballast.unlink()
    space.look()
    assert not is_full(space)
    assert len(caplog.records) == 2, "once at each change"


def test_write_that_fails_for_lack_of_space_is_made_with_the_reserve(small_disk: Path) -> None:
    journal = SqliteJournal(small_disk, reserve_bytes=4 * MB)
    journal.append([swapped(1, 100)])
    ballast = fill(small_disk)
    journal.append([swapped(2, MB)])
    assert is_full(journal.space)
    assert not (small_disk / "reserve").exists()
    with pytest.raises(JournalFull, match="Free some disk space"):
        journal.append([swapped(3, 8 * MB)])
    journal.append([swapped(3, 100)])
    ballast.unlink()
    journal.space.look()
    assert not is_full(journal.space)
    assert (small_disk / "reserve").stat().st_size == 4 * MB
    assert [event.version for event in journal.load() if isinstance(event, ValueSwapped)] == [1, 2, 3]
    journal.close()


def test_journal_opens_on_a_disk_without_a_byte(small_disk: Path) -> None:
    journal = SqliteJournal(small_disk, reserve_bytes=4 * MB)
    journal.append([swapped(1, 100)])
    journal.close()
    fill(small_disk)
    journal = SqliteJournal(small_disk, reserve_bytes=4 * MB)
    assert is_full(journal.space)
    assert list(journal.load()) == [swapped(1, 100)]
    journal.append([swapped(2, 100)])
    journal.close()


@pytest.mark.parametrize("leave_bytes", [MB, 2 * MB, 4 * MB])
async def test_snapshot_leaves_the_reserve_alone_and_may_fail(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch, leave_bytes: int
) -> None:
    monkeypatch.setattr("strata.coordinator.engine.SNAPSHOT_EVERY", 1)
    monkeypatch.setattr("strata.coordinator.engine.LOOK_S", 3600.0)
    engine = Engine(Cluster(), SqliteJournal(small_disk, reserve_bytes=MB), SystemClock())
    running = asyncio.create_task(engine.run())
    for number in range(20):
        await engine.submit(SwapValue(key=f"k{number}", body=b"x" * 200_000, expected_version=0))
    await engine._end_compaction(wait=True)  # It would write beside what fills the disk.
    fill(small_disk, leave_bytes=leave_bytes)  # Space for one more value, and not for all of them once more.
    await engine.submit(SwapValue(key="last", body=b"x" * 1000, expected_version=0))
    await engine._end_compaction(wait=True)
    engine.space.look()
    assert (small_disk / "reserve").exists()
    assert not is_full(engine.space), "what changes need is left for them"
    engine.stop()
    await running
    engine.close()
    again = Engine(Cluster(), SqliteJournal(small_disk, reserve_bytes=MB), SystemClock())
    again.replay()
    assert len(again.cluster.values.durable) == 21
    again.close()


async def test_flood_in_one_moment_is_refused_before_it_exceeds_the_reserve(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is looked at once a second: what comes in between must fit what is kept free."""
    monkeypatch.setattr("strata.coordinator.engine.BATCH_BYTES", MB)
    engine = Engine(Cluster(), SqliteJournal(small_disk, reserve_bytes=4 * MB), SystemClock())
    running = asyncio.create_task(engine.run())
    flood = [
        engine.submit(SwapValue(key=f"k{number}", body=b"x" * 200_000, expected_version=0))
        for number in range(300)
    ]
    answers = await asyncio.gather(*flood, return_exceptions=True)
    refused = [answer for answer in answers if isinstance(answer, BaseException)]
    assert len(refused) > 100
    assert {type(answer) for answer in refused} == {StorageFull}
    assert not running.done()
    engine.stop()
    await running
    engine.close()
    again = Engine(Cluster(), SqliteJournal(small_disk, reserve_bytes=4 * MB), SystemClock())
    again.replay()
    assert len(again.cluster.values.durable) == len(answers) - len(refused)
    again.close()


# --- a coordinator ------------------------------------------------------------------------------------------


def notice(number: int) -> pb.NotifyCheckpointRequest:
    return pb.NotifyCheckpointRequest(worker_id="w", checkpoint_id=f"c{number}", step=number, path="/c")


def test_coordinator_on_a_full_disk_reads_refuses_and_resumes(small_disk: Path) -> None:
    coordinator = Coordinator(small_disk / "data", env={"STRATA_HEARTBEAT_TIMEOUT": "600"}).start()
    with channel(coordinator.address) as opened, stub(coordinator.address) as calls:
        joined = calls.RegisterWorker(pb.RegisterWorkerRequest(worker_id="w"))
        calls.RegisterWorker(pb.RegisterWorkerRequest(worker_id="leaves"))
        session = RawSession(opened).hello("w", joined.incarnation)
        session.wait_for("welcome")
        calls.NotifyCheckpoint(notice(0))
        hard = calls.SwapValue(pb.SwapValueRequest(key="k", value=b"hard"))
        ballast = fill(small_disk)
        acknowledged = ["c0"]

        def until_refused() -> None:
            for number in range(1, 10_000):
                calls.NotifyCheckpoint(notice(number), timeout=30)
                acknowledged.append(f"c{number}")

        status, code, message, hint = refusal(until_refused)
        assert (status, code) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "storage_full")
        assert "disk is full" in message
        assert str(small_disk / "data") in message
        assert "automatically" in hint

        # What is known can be read, and what needs no disk still works.
        assert coordinator.get("/api/status")["storage"]["is_full"] is True
        assert {c["id"] for c in coordinator.get("/api/checkpoints")} == set(acknowledged)
        assert calls.ReadValue(pb.ReadValueRequest(key="k")).value == b"hard"
        assert calls.Heartbeat(
            pb.HeartbeatRequest(worker_id="w", incarnation=joined.incarnation)
        ).acknowledged
        soft = calls.SwapValue(
            pb.SwapValueRequest(key="k", value=b"soft", expected_version=hard.version, soft=True)
        )
        assert soft.swapped
        assert metric(coordinator.url, "strata_storage_full") == 1
        assert metric(coordinator.url, "strata_storage_refused_total") >= 1
        shown = strata("status", "--api", coordinator.url)
        assert "FULL: changes are refused" in shown.out
        body = {"dataset_id": "d", "path": "/d", "format": "bin", "total_samples": 10}
        http_status, answer = coordinator.post("/api/datasets", body)
        assert (http_status, answer["code"]) == (507, "storage_full")

        # Who leaves may leave; who arrives at a barrier waits.
        calls.DeregisterWorker(pb.DeregisterWorkerRequest(worker_id="leaves", reason="done"))
        arrival = pb.WaitBarrierRequest(barrier_id="b", step=1, expected_participants=1, call_id=b"1")
        session.send(barrier=arrival)

        coordinator.kill()
        coordinator.start()  # There is still no space.
        assert coordinator.get("/api/status")["storage"]["is_full"] is True
        assert set(acknowledged) <= {c["id"] for c in coordinator.get("/api/checkpoints")}
        assert "leaves" not in {w["id"] for w in coordinator.get("/api/workers") if w["status"] == "active"}

    with channel(coordinator.address) as opened, stub(coordinator.address) as calls:
        session = RawSession(opened).hello("w", joined.incarnation)
        session.wait_for("welcome")
        session.send(barrier=arrival)
        assert refusal(calls.NotifyCheckpoint, notice(-1 % 2**32))[1] == "storage_full"
        assert not [m for m in session.received if m.WhichOneof("body") == "barrier"]
        ballast.unlink()
        assert session.wait_for("barrier").outcome.released
        calls.NotifyCheckpoint(notice(77_777), timeout=30)
        assert coordinator.get("/api/status")["storage"]["is_full"] is False
        session.close()
    assert coordinator.stop() == 0
    output = "".join(coordinator.output)
    assert "Traceback" not in output
    assert output.count("changes are refused until") == 2, "once in each life"
    assert output.count("changes are accepted") == 1


def test_worker_waits_for_space_as_for_a_coordinator_that_is_away(small_disk: Path) -> None:
    coordinator = Coordinator(small_disk / "data", env={"STRATA_HEARTBEAT_TIMEOUT": "600"}).start()
    try:
        with Fleet(coordinator.address, env={}) as fleet:
            fleet.register("w")
            ballast = fill(small_disk)
            eventually(
                lambda: coordinator.get("/api/status")["storage"]["is_full"], within_s=30, what="it is full"
            )
            notified = fleet.begin(
                "w", "notify_checkpoint", checkpoint_id="c", step=1, epoch=0, path="/c", size_bytes=1
            )
            eventually(
                lambda: metric(coordinator.url, "strata_storage_refused_total") >= 2,
                within_s=30,
                what="it is tried again",
            )
            ballast.unlink()
            notified.result(60)
            assert [c["id"] for c in coordinator.get("/api/checkpoints")] == ["c"]
    finally:
        code = coordinator.stop()
    assert code == 0
    assert issubclass(CoordinatorStorageFull, CoordinatorUnavailable)


# --- an attacker --------------------------------------------------------------------------------------------


def test_worker_that_overwrites_a_value_cannot_fill_the_disk(tmp_path: Path) -> None:
    coordinator = Coordinator(tmp_path / "data", env={"STRATA_TOKEN": "admin-of-this-test"}).start()
    secret, _ = TokenStore(tmp_path / "data").create(name="attacker", role="worker", job="theirs")
    credential = (("authorization", f"Bearer {secret}"),)
    written = 0
    with stub(coordinator.address) as calls:
        version = 0
        for _ in range(600):  # 150 MB
            request = pb.SwapValueRequest(key="k", value=os.urandom(250_000), expected_version=version)
            answer = calls.SwapValue(request, metadata=credential)
            version, written = answer.version, written + 250_000
    on_disk = sum(file.stat().st_size for file in (tmp_path / "data").glob("journal.sqlite*"))
    assert coordinator.stop() == 0
    assert written == 150_000_000
    assert on_disk < 64e6, f"{on_disk / 1e6:.0f} MB"


async def test_client_that_writes_more_than_its_share_is_refused_and_others_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("strata.coordinator.quotas.BYTES_AT_ONCE", 1e6)
    monkeypatch.setattr("strata.coordinator.quotas.BYTES_PER_S", 1.0)
    engine = Engine(Cluster(), SqliteJournal(tmp_path, reserve_bytes=MB), SystemClock())
    running = asyncio.create_task(engine.run())

    async def swap(key: str, client: str, *, soft: bool = False) -> None:
        command = SwapValue(key=key, body=b"x" * 200_000, expected_version=0, soft=soft)
        await engine.submit(command, client=client)

    for number in range(5):
        await swap(f"greedy{number}", "job greedy")
    with pytest.raises(Exception, match=r"'job greedy' writes more than its share") as caught:
        await swap("greedy5", "job greedy")
    assert caught.value.code == "overloaded"  # type: ignore[attr-defined]
    await swap("modest", "job modest")
    await engine.submit(RegisterWorker(spec=worker_spec("w"), registration_id="r"))
    engine.stop()
    await running
    engine.close()
