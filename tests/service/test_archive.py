"""What several coordinators share in object storage: logs and metrics of one are on the disk of the others, once."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import cast

import pytest

from strata.config import ConfigError
from strata.coordinator import archive as archive_module
from strata.coordinator.archive import Archive, Outbox, Retention
from strata.coordinator.logs.archive import LogArchive, LogFilter
from strata.coordinator.logs.store import LogStore
from strata.coordinator.metrics import run_history
from strata.coordinator.metrics.run_history import RunHistory
from strata.coordinator.settings import read_settings
from strata.core.telemetry import segments
from strata.core.telemetry.loglines import LogLine
from strata.stores import open_store
from strata.stores.faulty import Fault, FaultyStore, scripted, seeded
from strata.stores.protocol import Store, StoreError, Unavailable
from tests.service.test_run_history import batch, pairs, put, started
from tests.support import eventually
from tests.support_seaweed import seaweed

Opens = Callable[[], Store]


class One:
    """What a coordinator has on its disk, and the archive, worked by hand."""

    def __init__(self, folder: Path, opens: Opens, stack: ExitStack, *, limit_bytes: int = 1 << 30) -> None:
        folder.mkdir(exist_ok=True)
        self.folder = folder
        self.logs = LogStore(LogArchive(folder / "logs.sqlite", limit_bytes=1 << 30, keep_s=1e9))
        self.history = RunHistory(folder / "metrics.sqlite", limit_bytes=1 << 30)
        self.archive = Archive(
            opens,
            "test",
            Outbox(folder / "archive.sqlite"),
            retention={
                "logs": Retention(limit_bytes=limit_bytes, keep_s=None),
                "metrics": Retention(limit_bytes=limit_bytes, keep_s=None),
            },
            every_s=0.01,
            import_s=1e9,
        )
        self.archive.gather(self.logs, self.history, lambda action: action())
        self._is_open = True
        stack.callback(self.close)

    def say(self, *messages: str, task: str = "") -> None:
        lines = [LogLine(1_700_000_000.0, "info", message, "stdout", task) for message in messages]
        self.logs.add_lines(lines, sender="worker w", worker_id="w")
        assert self.logs.archive is not None
        assert self.logs.archive.flush(60)

    def said(self, *, task: str | None = None) -> list[str]:
        """Oldest first."""
        found = asyncio.run(self.logs.search(10_000, LogFilter(task_id=task)))
        return [entry.message for entry in found[::-1]]

    def work(self) -> None:
        self.archive.work_once()

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self.logs.close()
            self.history.close()
            self.archive.close()


@pytest.fixture
def opens(tmp_path: Path) -> Opens:
    return lambda: open_store(tmp_path / "store")


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def test_logs_and_metrics_of_one_are_on_the_disk_of_the_other(
    tmp_path: Path, opens: Opens, stack: ExitStack
) -> None:
    one, other = One(tmp_path / "a", opens, stack), One(tmp_path / "b", opens, stack)
    one.say("first", "second", task="t")
    put(one.history, batch(started(1), 1, [1, 2], {"loss": [3.0, 2.0]}))
    one.history.annotate("r", job=None, tags=["kept"], notes="why")
    one.work()
    other.work()
    assert other.said(task="t") == ["first", "second"]
    (loss,) = other.history.curves("r", ["loss"], points=10)
    assert pairs(loss.committed) == [(1, 3.0), (2, 2.0)]
    assert (other.history.info("r").tags, other.history.info("r").notes) == (["kept"], "why")
    one.say("third", task="t")
    put(one.history, batch(started(1), 2, [3], {"loss": [1.0]}))
    for each in (one, other, other, one):
        each.work()
    assert other.said(task="t") == ["first", "second", "third"]
    assert one.said() == ["first", "second", "third"], "nobody takes in its own"
    assert other.history.summary("r").missing_batches == 0
    again = One(tmp_path / "c", opens, stack)  # An empty disk.
    again.work()
    assert again.said() == ["first", "second", "third"]


def test_the_rest_of_a_killed_one_arrives_when_it_is_back_and_is_missing_until_then(
    tmp_path: Path, opens: Opens, stack: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    one, other = One(tmp_path / "a", opens, stack), One(tmp_path / "b", opens, stack)
    one.archive.leads(1)
    one.say("uploaded")
    put(one.history, batch(started(1), 1, [1, 2], {"loss": [1.0, 2.0]}))
    one.work()
    one.say("not uploaded")
    for number in (2, 3):
        put(one.history, batch(started(1), number, [number * 2 - 1, number * 2], {"loss": [3.0, 4.0]}))
    one.archive.close()  # Its thread was never started: nothing is uploaded.
    one.close()
    other.archive.leads(2)
    put(other.history, batch(started(1), 4, [7, 8], {"loss": [7.0, 8.0]}))
    with caplog.at_level(logging.WARNING):
        other.work()
        other.work()
    (missing,) = [record for record in caplog.records if "the previous leader at" in record.message]
    assert "at most 5," in missing.message
    assert other.said() == ["uploaded"]
    assert other.history.summary("r").missing_batches == 2
    back = One(tmp_path / "a", opens, stack)
    back.work()
    with caplog.at_level(logging.WARNING):
        other.work()
    assert any("have arrived" in record.message for record in caplog.records)
    assert other.said() == ["uploaded", "not uploaded"]
    assert other.history.summary("r").missing_batches == 0
    (loss,) = other.history.curves("r", ["loss"], points=100)
    assert [step for step, _ in pairs(loss.committed)] == list(range(1, 9))


def test_a_batch_that_two_have_taken_counts_once(tmp_path: Path, opens: Opens, stack: ExitStack) -> None:
    """The first was killed before its answer arrived, and the worker sent it to the second."""
    one, other, third = (One(tmp_path / name, opens, stack) for name in "abc")
    made = batch(started(1), 1, [1], {"loss": [5.0]})
    for each in (one, other):
        put(each.history, made)
        each.work()
    for each in (one, other, third):
        each.work()
        (found,) = each.history.curves("r", ["loss"], points=10)
        assert pairs(found.committed) == [(1, 5.0)]


def test_values_that_arrive_late_are_at_their_steps_in_every_resolution(
    tmp_path: Path, opens: Opens, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_history, "TAIL_ROWS", 4)
    monkeypatch.setattr(run_history, "VALUES_PER_CHUNK", 64)
    monkeypatch.setattr(run_history, "BUCKETS_PER_CHUNK", 32)
    one, other = One(tmp_path / "a", opens, stack), One(tmp_path / "b", opens, stack)

    def steps(number: int) -> range:
        return range(number * 50, number * 50 + 50)

    for number in range(40):
        kept = one if number < 20 else other  # The second leads from then on, and knows nothing yet.
        put(kept.history, batch(started(1), number + 1, steps(number), {"a": steps(number)}))
    one.work()
    other.work()
    for points in (100_000, 100):
        (found,) = other.history.curves("r", ["a"], points=points)
        assert found.committed.points.last.tolist() == sorted(found.committed.points.last.tolist())
        assert int(found.committed.points.count.sum()) == 2_000
    (part,) = other.history.curves("r", ["a"], first=700, last=1_300, points=10_000)
    assert [step for step, _ in pairs(part.committed)] == list(range(700, 1_301))
    (metric,) = other.history.summary("r").metrics
    assert (metric.count, metric.min, metric.max, metric.last) == (2_000, 0.0, 1_999.0, 1_999.0)


def test_storage_is_away_and_everything_arrives_when_it_is_back(
    tmp_path: Path, opens: Opens, stack: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    away = threading.Event()

    def opened() -> Store:
        if away.is_set():
            raise Unavailable("It does not answer.", tier="S3", key="")
        return opens()

    one, other = One(tmp_path / "a", opened, stack), One(tmp_path / "b", opens, stack)
    away.set()
    for number in range(3):
        one.say(f"line {number}")
        with pytest.raises(StoreError):
            one.work()
    away.clear()
    one.work()
    other.work()
    assert other.said() == ["line 0", "line 1", "line 2"]


def test_one_warning_for_one_outage_and_uploads_continue_by_themselves(
    tmp_path: Path, opens: Opens, stack: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    attempts = 0
    away = threading.Event()
    away.set()

    def opened() -> Store:
        nonlocal attempts
        attempts += 1
        if away.is_set():
            raise Unavailable(f"It does not answer, attempt {attempts}.", tier="S3", key="")
        return opens()

    one, other = One(tmp_path / "a", opened, stack), One(tmp_path / "b", opens, stack)
    with caplog.at_level(logging.WARNING):
        one.archive.start("a:1")
        one.say("while it is away")
        eventually(lambda: attempts >= 3, within_s=30)
        assert one.archive.failures_total >= 2
        assert one.archive.lag_s() > 0
        away.clear()
        eventually(lambda: one.archive.lag_s() == 0 and "answers again" in caplog.text, within_s=60)
    assert caplog.text.count("until it answers") == 1
    assert caplog.text.count("answers again") == 1
    one.close()
    other.work()
    assert other.said() == ["while it is away"]
    eventually(
        lambda: b'"is_closed":true' in opens().read(f"streams/{one.archive.stream}"),
        within_s=60,
        what="stopped in good order: nothing of it is missing",
    )


def test_a_copy_of_a_data_directory_writes_a_stream_of_its_own(
    tmp_path: Path, opens: Opens, stack: ExitStack
) -> None:
    one = One(tmp_path / "a", opens, stack)
    one.say("first")
    put(one.history, batch(started(1), 1, [1], {"loss": [1.0]}))
    one.work()
    one.close()
    shutil.copytree(tmp_path / "a", tmp_path / "copy")
    again, copy = One(tmp_path / "a", opens, stack), One(tmp_path / "copy", opens, stack)
    assert again.archive.stream == one.archive.stream != copy.archive.stream
    again.say("of the first")
    copy.say("of the copy")
    for each in (again, copy, again, copy):
        each.work()
    reader = One(tmp_path / "b", opens, stack)
    reader.work()
    for each in (again, copy, reader):
        assert each.said() == ["first", "of the first", "of the copy"]
    assert reader.history.summary("r").metrics[0].count == 1


@pytest.mark.parametrize("place", ["ftp://host/x", "memory://job", "folder", "s3://", "file:///"])
def test_a_place_that_is_none_is_refused_with_what_to_write(place: str) -> None:
    with pytest.raises(ConfigError, match=r"archive is '.*'; write s3://bucket/prefix"):
        read_settings(flags={"archive": place}, environ={})


@pytest.mark.parametrize(
    "place", ["s3://bucket", "gs://bucket/x", "az://container/x", "/mnt/shared", "file:///mnt/shared"]
)
def test_object_stores_and_shared_folders_are_places(place: str) -> None:
    assert read_settings(flags={"archive": place}, environ={}).archive == place


class Hanging:
    """A store that takes a request and never answers, until it is told to."""

    def __init__(self, inner: Store) -> None:
        self._inner = inner
        self.asked = threading.Event()
        self.answers = threading.Event()

    def __getattr__(self, name: str) -> object:
        def call(*arguments: object, **named: object) -> object:
            self.asked.set()
            self.answers.wait(60)
            return getattr(self._inner, name)(*arguments, **named)

        return call


def test_nobody_waits_for_storage_that_does_not_answer(
    tmp_path: Path, opens: Opens, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    hanging = Hanging(opens())
    one = One(tmp_path / "a", lambda: cast("Store", hanging), stack)
    one.archive.start("a:1")
    assert hanging.asked.wait(30)
    one.say("meanwhile")  # On disk, and handed over.
    put(one.history, batch(started(1), 1, [1], {"a": [1.0]}))
    assert one.said() == ["meanwhile"]
    assert one.archive.outbox.waiting_bytes > 0
    monkeypatch.setattr(archive_module, "CLOSE_S", 0.1)
    one.close()  # Nor does one that stops.
    again = One(tmp_path / "a", opens, stack)  # As one that was deposed, in the same process.
    again.archive.start("a:1")
    again.say("again")
    hanging.answers.set()
    eventually(lambda: again.archive.lag_s() == 0, within_s=60)
    other = One(tmp_path / "b", opens, stack)
    other.work()
    assert other.said() == ["meanwhile", "again"]


def test_a_stream_without_segments_is_forgotten_after_a_day(
    tmp_path: Path, opens: Opens, stack: ExitStack
) -> None:
    one, other = One(tmp_path / "a", opens, stack), One(tmp_path / "b", opens, stack)
    one.work()
    other.work()
    one.archive.tidy(opens())
    assert len(list(opens().list("streams/"))) == 2, "it may yet say something"
    day_before_s = time.time() - 2 * 86_400
    os.utime(tmp_path / "store" / "streams" / other.archive.stream, (day_before_s, day_before_s))
    one.archive.tidy(opens())
    assert [blob.key for blob in opens().list("streams/")] == [f"streams/{one.archive.stream}"]


def test_what_waits_for_storage_is_bounded_and_what_is_lost_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    outbox = Outbox(tmp_path / "archive.sqlite", limit_bytes=100)
    outbox.put("logs", [b"x" * 60])
    outbox.put("logs", [b"y" * 60])
    outbox.put("logs", [b"z" * 60, b"z" * 60])
    assert (outbox.waiting_bytes, outbox.lost_total) == (60, 3)
    monkeypatch.setattr(segments, "SEGMENT_S", -1.0)  # Sealed at once.
    due = outbox.due("logs")
    assert due is not None
    assert outbox.lag_s(2e9) > 0
    outbox.written("logs", due)
    assert (outbox.waiting_bytes, outbox.lag_s(2e9)) == (0, 0.0)
    with caplog.at_level(logging.WARNING):
        outbox.put("logs", [b"x"])
    assert "3 records of logs and metrics since" in caplog.text
    outbox.close()


def test_retention_removes_the_oldest_and_a_reader_continues_after_them(
    tmp_path: Path, opens: Opens, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segments, "SEGMENT_S", -1.0)  # One segment for each upload.
    one = One(tmp_path / "a", opens, stack, limit_bytes=600)
    other = One(tmp_path / "b", opens, stack)
    for number in range(8):
        one.say(f"line {number} " + "".join(chr(97 + (number * n) % 26) for n in range(100)))
        one.work()
        if number == 0:
            other.work()
    store = opens()
    before = len(list(store.list("logs/")))
    one.archive.tidy(store)
    left = list(store.list("logs/"))
    assert sum(blob.size_bytes for blob in left) <= 600
    assert 0 < len(left) < before == 8
    other.work()
    said = [message.split()[1] for message in other.said()]
    assert said == ["0", *map(str, range(8 - len(left), 8))]


def test_a_segment_of_a_newer_version_is_left_alone(
    tmp_path: Path, opens: Opens, stack: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    one, other = One(tmp_path / "a", opens, stack), One(tmp_path / "b", opens, stack)
    one.say("hello")
    one.work()
    (blob,) = opens().list("logs/")
    body = opens().read(blob.key)
    opens().put(blob.key, b"2\n" + body[2:])
    with caplog.at_level(logging.WARNING):
        other.work()
        other.work()
    assert other.said() == []
    assert caplog.text.count("cannot be read and is skipped") == 1


def test_two_entries_of_one_number_are_both_kept(
    tmp_path: Path, opens: Opens, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = One(tmp_path / "a", opens, stack), One(tmp_path / "b", opens, stack)
    with monkeypatch.context() as patched:
        patched.setattr("strata.coordinator.logs.store.time.time_ns", lambda: 1_700_000_000_000_000_000)
        one.say("of a")
        other.say("of b")
    one.work()
    other.work()
    assert sorted(other.said()) == ["of a", "of b"]


@pytest.mark.s3
def test_the_archive_on_a_real_s3_server(tmp_path: Path, stack: ExitStack) -> None:
    server = stack.enter_context(seaweed(tmp_path / "s3"))

    def opens() -> Store:
        return open_store("s3://archive/cluster", **server.options())

    one, other = One(tmp_path / "a", opens, stack), One(tmp_path / "b", opens, stack)
    lines = [f"line {number} {'x' * 100}" for number in range(3_000)]
    for at in range(0, 3_000, 500):
        one.say(*lines[at : at + 500], task="t")
        put(one.history, batch(started(1), at // 500 + 1, range(at, at + 500), {"a": range(500)}))
        one.work()
    other.work()
    assert other.said(task="t") == lines
    (found,) = other.history.curves("r", ["a"], points=10_000)
    assert len(found.committed.points) == 3_000
    one.archive.tidy(opens())
    assert len(list(opens().list("logs/"))) > 0


@pytest.mark.parametrize("seed", range(5))
def test_whatever_storage_does_everything_arrives_once(tmp_path: Path, stack: ExitStack, seed: int) -> None:
    """Requests that are refused, that are done and not answered, and bits that flip on the way."""
    rates = {Fault.REFUSED: 0.15, Fault.LOST_REPLY: 0.15, Fault.DEVICE_ERROR: 0.05, Fault.NO_SPACE: 0.05}
    disturbed = FaultyStore(open_store(tmp_path / "store"), seed=seed, choose=seeded(rates))
    flipping = FaultyStore(disturbed, seed=seed, choose=scripted({10: Fault.BIT_FLIP, 17: Fault.BIT_FLIP}))
    one, other = (
        One(tmp_path / "a", lambda: disturbed, stack),
        One(tmp_path / "b", lambda: flipping, stack),
    )
    for number in range(10):
        one.say(f"line {number}")
        put(one.history, batch(started(1), number + 1, [number], {"a": [number]}))
        for each in (one, other):
            with suppress(StoreError):
                each.work()
    wanted = [f"line {number}" for number in range(10)]

    def all_is_there() -> bool:
        for each in (one, other):
            with suppress(StoreError):
                each.work()
        # Of the metrics nothing may be there yet when all lines are.
        return other.said() == wanted and [m.count for m in other.history.summary("r").metrics] == [10]

    eventually(all_is_there, within_s=60, every_s=0)
    assert other.history.summary("r").missing_batches == 0


def test_a_damaged_segment_is_left_out_and_said_and_the_next_are_read(
    tmp_path: Path,
    opens: Opens,
    stack: ExitStack,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(segments, "SEGMENT_S", -1.0)  # One segment for each upload.
    one, other = One(tmp_path / "a", opens, stack), One(tmp_path / "b", opens, stack)
    for number in range(3):
        one.say(f"line {number}")
        one.work()
    blobs = list(opens().list("logs/"))
    opens().put(blobs[1].key, b"1\nnonsense")
    with caplog.at_level(logging.WARNING):
        for _ in range(4):
            other.work()
    assert other.said() == ["line 0", "line 2"]
    assert caplog.text.count("cannot be read and is skipped") == 1
