"""The journal keeps what was acknowledged, and says clearly when it cannot."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from strata.coordinator.engine import Engine, SystemClock
from strata.coordinator.journal.codec import decode, encode
from strata.coordinator.journal.protocol import JournalError
from strata.coordinator.journal.sqlite import SqliteJournal, read_story
from strata.core.cluster import Cluster
from strata.core.messages import (
    DatasetId,
    DatasetRegistered,
    DatasetSpec,
    Event,
    JobId,
    RecoveryRecorded,
    ValueSwapped,
    WorkerFailed,
    WorkerId,
)
from strata.rpc import coordinator_pb2 as pb
from tests.cli.running import Ran, strata
from tests.service.clients import refusal, stub
from tests.support import Coordinator


def event(number: int) -> Event:
    spec = DatasetSpec(
        dataset_id=DatasetId(f"d{number}"),
        path="/d",
        format="f",
        total_samples=10,
        shard_size=1,
        shuffle=False,
        seed=0,
    )
    return DatasetRegistered(spec=spec, reason="test", at_s=float(number))


def written(folder: Path, count: int = 300) -> Path:
    journal = SqliteJournal(folder)
    for number in range(count):
        journal.append([event(number)])
    journal.close()
    return folder / "journal.sqlite"


def serve(data_dir: Path) -> Ran:
    """`strata serve` that is expected to refuse."""
    return strata("serve", "--grpc-port", "0", "--http-port", "0", "--data-dir", str(data_dir))


def test_everything_appended_is_loaded_in_order(tmp_path: Path) -> None:
    written(tmp_path, 5)
    journal = SqliteJournal(tmp_path)
    assert list(journal.load()) == [event(n) for n in range(5)]
    journal.append([event(5), event(6)])
    assert [e.at_s for e in journal.load()] == [0, 1, 2, 3, 4, 5, 6]
    journal.close()


def test_recovery_that_was_written_before_it_said_who_survived_is_still_read() -> None:
    now = RecoveryRecorded(
        job_id=JobId("job"),
        worker_id=WorkerId("w"),
        phases_s={"load": 0.5},
        resumed_step=7,
        lost_steps=1,
        tier="MEMORY",
        world_before=3,
        world_after=2,
        reason="recovered",
        at_s=1.0,
        survived=2,
        lost=(WorkerId("lost"),),
        joined=(WorkerId("new"),),
        cause="killed",
    )
    assert decode("RecoveryRecorded", encode(now)) == now
    fields = msgspec.msgpack.decode(encode(now))
    for name in ("survived", "lost", "joined", "cause"):
        del fields[name]
    then = decode("RecoveryRecorded", msgspec.msgpack.encode(fields))
    assert then == replace(now, survived=0, lost=(), joined=(), cause="")


def test_snapshot_takes_the_place_of_what_it_sums_up_and_the_story_stays(tmp_path: Path) -> None:
    written(tmp_path, 5)
    journal = SqliteJournal(tmp_path)
    journal.snapshot([event(100)])
    journal.append([event(6)])
    journal.close()
    journal = SqliteJournal(tmp_path)
    assert list(journal.load()) == [event(100), event(6)]
    journal.close()
    assert [entry.event for entry in read_story(tmp_path)] == [*(event(n) for n in range(5)), event(6)]


def test_second_coordinator_is_refused(tmp_path: Path) -> None:
    journal = SqliteJournal(tmp_path)
    with pytest.raises(JournalError, match="Another coordinator"):
        SqliteJournal(tmp_path)
    journal.close()
    SqliteJournal(tmp_path).close()


def test_odd_names_of_directories_are_no_trouble(tmp_path: Path) -> None:
    folder = tmp_path / "odd #1 ?mode=rw&x=%41 ü"
    written(folder, 3)
    assert len(list(read_story(folder))) == 3


def damaged(folder: Path, kind: str) -> None:
    path = written(folder)
    size = path.stat().st_size
    match kind:
        case "garbage":
            path.write_bytes(os.urandom(10_000))
        case "text":
            path.write_text("this is not a journal\n" * 100)
        case "truncated":
            os.truncate(path, size // 2)
        case "zeroed pages":
            with path.open("r+b") as file:
                file.seek(8_192)
                file.write(b"\0" * (size - 8_192))
        case "noise in the middle":
            with path.open("r+b") as file:
                file.seek(4_096)
                file.write(os.urandom(size - 8_192))
        case "missing events":
            _edit(path, "DELETE FROM events WHERE seq BETWEEN 100 AND 120")
        case "unknown kind":
            _edit(path, "UPDATE events SET kind = 'WorkerDanced' WHERE seq = 7")
        case "body of another kind":
            _edit(path, "UPDATE events SET kind = 'WorkerFailed' WHERE seq = 7")
        case "fact about nobody":
            journal = SqliteJournal(folder)
            journal.append(
                [
                    WorkerFailed(
                        worker_id=WorkerId("ghost"),
                        job_id=JobId("j"),
                        incarnation=1,
                        generation=1,
                        reason="never joined",
                        at_s=0.0,
                    )
                ]
            )
            journal.close()
        case "newer format":
            _edit(path, "UPDATE meta SET value = '99' WHERE key = 'schema'")
        case "format that is no number":
            _edit(path, "UPDATE meta SET value = 'new' WHERE key = 'schema'")
        case "a directory":
            path.unlink()
            path.mkdir()


DAMAGES = [
    "garbage",
    "text",
    "truncated",
    "zeroed pages",
    "noise in the middle",
    "missing events",
    "unknown kind",
    "body of another kind",
    "fact about nobody",
    "newer format",
    "format that is no number",
    "a directory",
]


@pytest.mark.parametrize("kind", DAMAGES)
def test_damaged_journal_is_a_clear_error_and_never_a_partial_history(tmp_path: Path, kind: str) -> None:
    damaged(tmp_path, kind)
    with pytest.raises(JournalError) as caught:
        replay(tmp_path)
    assert str(tmp_path) in caught.value.message
    assert caught.value.hint


def replay(folder: Path) -> None:
    with closing(SqliteJournal(folder)) as journal:
        Engine(Cluster(), journal, SystemClock()).replay()


def test_coordinator_with_a_damaged_journal_says_so_and_stops(tmp_path: Path) -> None:
    damaged(tmp_path, "missing events")
    done = serve(tmp_path)
    assert done.code == 1
    assert "has lost events: 121 follows 99" in done.err
    assert "what to do:" in done.err
    assert "Traceback" not in done.err + done.out


def test_directory_that_cannot_be_used_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/strata")):
        with pytest.raises(JournalError, match="cannot be used") as caught:
            SqliteJournal(place)
        assert "--data-dir" in caught.value.hint
    done = serve(tmp_path / "file")
    assert done.code == 1
    assert f"The data directory {tmp_path / 'file'} cannot be used" in done.err
    assert "Traceback" not in done.err + done.out


def value(number: int, size_bytes: int) -> ValueSwapped:
    body = number.to_bytes(4, "big") * (size_bytes // 4)
    return ValueSwapped(key="k", body=body, version=number + 1, reason="swapped", at_s=0.0)


def test_overwrites_of_one_value_do_not_grow_the_file_beyond_what_is_between_two_snapshots(
    tmp_path: Path,
) -> None:
    journal = SqliteJournal(tmp_path, reserve_bytes=1 << 20)
    largest = 0
    for number in range(400):  # 100 MB of values
        journal.append([value(number, 256 * 1024)])
        if number % 40 == 39:
            journal.snapshot([value(number, 256 * 1024)])
        largest = max(largest, sum(file.stat().st_size for file in tmp_path.iterdir()))
    assert largest < 40e6
    assert list(journal.load()) == [value(399, 256 * 1024)]
    journal.close()
    story = [entry.event for entry in read_story(tmp_path)]
    assert [event.version for event in story if isinstance(event, ValueSwapped)] == list(range(1, 401))
    assert {event.body for event in story if isinstance(event, ValueSwapped)} == {b""}


def test_story_is_bounded_in_bytes_and_what_follows_the_snapshot_is_never_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("strata.coordinator.journal.sqlite.STORY_BYTES_KEPT", 10_000)
    journal = SqliteJournal(tmp_path, reserve_bytes=1 << 20)
    journal.append([event(n) for n in range(1_000)])
    journal.snapshot([event(5_000)])
    journal.append([event(n) for n in range(1_000, 1_500)])
    journal.close()
    kept = [entry.event.at_s for entry in read_story(tmp_path)]
    assert kept[-500:] == [float(n) for n in range(1_000, 1_500)]
    assert 520 < len(kept) < 700, "the newest of the story before the snapshot"
    journal = SqliteJournal(tmp_path)  # It counts what is there.
    journal.snapshot([event(6_000)])
    assert len(list(read_story(tmp_path))) < 200
    assert list(journal.load()) == [event(6_000)]
    journal.append([event(7)])
    assert list(journal.load()) == [event(6_000), event(7)]
    journal.close()


def test_failed_fsync_stops_the_coordinator_before_it_acknowledges(
    tmp_path: Path, program: Callable[[str], str]
) -> None:
    strace = [program("strace"), "-f", "-qq", "-o", "/dev/null"]
    coordinator = Coordinator(tmp_path / "data").start()
    inject = ["-e", "trace=fsync,fdatasync", "-e", "inject=fsync,fdatasync:error=EIO"]
    tracer = subprocess.Popen([*strace, *inject, "-p", str(coordinator.pid)])
    try:
        with stub(coordinator.address) as calls:

            def register() -> None:
                for number in range(10_000):  # Until the tracer is there, which may take long to start.
                    calls.RegisterWorker(pb.RegisterWorkerRequest(worker_id=f"w{number}"), timeout=30)
                    acknowledged.append(f"w{number}")
                    time.sleep(0.01)

            acknowledged: list[str] = []
            refusal(register)
        assert coordinator.ended() == 1
        output = "".join(coordinator.output)
        assert "cannot be written" in output
        assert "Traceback" not in output
    finally:
        tracer.kill()
        tracer.wait(30)
    coordinator.start()
    try:
        assert set(acknowledged) <= {w["id"] for w in coordinator.get("/api/workers")}
    finally:
        coordinator.stop()


def _edit(path: Path, statement: str) -> None:
    db = sqlite3.connect(path)
    with db:
        db.execute(statement)
    db.close()
