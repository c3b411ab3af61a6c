"""The log of the fleet stays bounded, honest about what it dropped, and can be searched after a crash."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from strata.coordinator import database_writer
from strata.coordinator.logs import archive as log_archive
from strata.coordinator.logs.archive import LogArchive, LogFilter, SearchTooLong
from strata.coordinator.logs.store import BURST_S, FLEET_LINES_PER_SECOND, LINES_PER_SECOND, LogStore, Missed
from strata.core.telemetry.loglines import LogLine
from strata.core.telemetry.logtext import Tidy
from strata.core.views import LogView
from tests.support import eventually

EVERYTHING = LogFilter()
NOW_US = time.time_ns() // 1_000
BURST = int(BURST_S * LINES_PER_SECOND)


def line(message: str, level: str = "info", *, task_id: str = "", at_s: float | None = None) -> LogLine:
    return LogLine(time.time() if at_s is None else at_s, level, message, "test", task_id)


def opened(folder: Path, *, limit_mb: float = 100, keep_s: float = 1e6) -> LogArchive:
    return LogArchive(folder / "logs.sqlite", limit_bytes=int(limit_mb * 1e6), keep_s=keep_s)


@pytest.fixture
def archive(tmp_path: Path) -> Iterator[LogArchive]:
    made = opened(tmp_path)
    yield made
    made.close()


async def messages(store: LogStore, limit: int = 10_000, **wanted: object) -> list[str]:
    return [e.message for e in await store.search(limit, LogFilter(**wanted))]  # type: ignore[arg-type]


# --- taking in ------------------------------------------------------------------------------------------------


def test_flood_is_dropped_counted_and_reported() -> None:
    store = LogStore()
    store.add_lines([line(str(n)) for n in range(BURST + 700)], sender="worker w", worker_id="w", dropped=11)
    assert 600 + BURST * 0.2 <= store.dropped_total <= 711 + BURST * 0.2
    dropped = store.dropped_total
    store.report_drops()
    newest = store.newest(1, EVERYTHING)[0]
    assert (newest.level, newest.worker_id, newest.source) == ("warn", "w", "coordinator")
    assert newest.message.startswith(f"{dropped:,} log lines of 'w' were dropped")
    store.report_drops()
    assert store.newest(1, EVERYTHING)[0] is newest, "a drop is reported once"


def test_the_log_of_a_task_says_what_was_dropped_of_its_workers_and_its_agent() -> None:
    store = LogStore()
    flood = [line("noise", task_id="t")] * (2 * BURST)
    store.add_lines(flood, sender="worker t-rank0", worker_id="t-rank0")
    store.add_lines([], sender="task t", dropped=7)
    store.report_drops()
    told = [e for e in store.newest(9, LogFilter(task_id="t")) if e.level == "warn"]
    assert {(e.worker_id, e.message.partition(" log lines of ")[2][:12]) for e in told} == {
        ("t-rank0", "'t-rank0' we"),
        (None, "'t' were dro"),
    }


def test_flood_does_not_hide_the_error_behind_it() -> None:
    store = LogStore()
    store.add_lines([line("noise")] * (2 * BURST), sender="task t")
    store.add_lines([line("out of memory", "error", task_id="t")], sender="task t")
    assert store.newest(1, LogFilter(level="error", task_id="t"))[0].message == "out of memory"
    store.add_lines([line("x", "error")] * (2 * BURST), sender="task t")
    assert store.total < 2 * BURST, "errors have a limit too"


def test_flood_of_one_worker_costs_no_other_a_line() -> None:
    store = LogStore()
    store.add_lines([line("noise")] * (2 * BURST), sender="worker loud", worker_id="loud")
    store.add_lines([line("important")], sender="worker calm", worker_id="calm")
    assert store.newest(1, LogFilter(worker_id="calm"))[0].message == "important"


def test_flood_of_everyone_together_is_bounded() -> None:
    began_s = time.monotonic()
    store = LogStore(entries_kept=200_000)
    for n in range(200):
        store.add_lines([line("noise")] * 1_000, sender=f"worker w{n}")
    elapsed_s = time.monotonic() - began_s
    assert store.total <= (1.0 + elapsed_s) * FLEET_LINES_PER_SECOND
    assert store.total + store.dropped_total == 200_000


def test_log_is_bounded_by_entries_and_by_size() -> None:
    by_count = LogStore(entries_kept=10)
    by_size = LogStore(characters_kept=1_000)
    for n in range(100):
        for store in (by_count, by_size):
            store.add(level="info", message=f"{n:100d}", source="test", at_s=0.0)
    for store in (by_count, by_size):
        assert [entry.message.strip() for entry in store] == [str(n) for n in range(90, 100)]


def test_budgets_of_quiet_workers_are_forgotten() -> None:
    store = LogStore()
    for n in range(100):
        store.add_lines([], sender=f"worker w{n}")
    store.report_drops()
    assert store._budgets == {}


def test_what_comes_in_is_tidied() -> None:
    store = LogStore(tidy=Tidy(["top-secret"]))
    store.add_lines([line("fine"), line("\x1b[31mtop-secret\x07")], sender="worker w")
    assert [e.message for e in store] == ["fine", "[redacted]�"]


# --- on disk --------------------------------------------------------------------------------------------------


async def test_search_finds_the_same_in_memory_and_on_disk(archive: LogArchive) -> None:
    now_s = time.time()
    levels = ("debug", "info", "warn", "error")
    lines = [
        line(
            f"message {n} 100%_{'Odd' if n % 2 else 'even'}",
            levels[n % 4],
            task_id=f"t{n % 3}",
            at_s=now_s + n,
        )
        for n in range(400)
    ]
    wide, narrow = LogStore(), LogStore(archive, entries_kept=150)
    ids = {}
    for store in (wide, narrow):
        for n, item in enumerate(lines):
            store.add_lines([item], sender=f"worker w{n % 5}", worker_id=f"w{n % 5}")
        assert archive.flush(60)
        ids[store] = [e.id for e in await store.search(10_000, EVERYTHING)][::-1]
    questions: list[dict[str, object]] = [
        {},
        {"level": "warn"},
        {"task_id": "t1"},
        {"worker_id": "w3", "level": "error"},
        {"text": "oDD"},
        {"text": "%_e"},
        {"text": "100%_odd", "task_id": "t2"},
        {"text": "nowhere"},
        {"since_s": now_s + 390},
        {"until_s": now_s + 7},
        {"since_s": now_s + 100, "until_s": now_s + 110, "worker_id": "w0"},
    ]
    for wanted in questions:
        for limit in (3, 10_000):
            assert await messages(wide, limit, **wanted) == await messages(narrow, limit, **wanted), wanted
    for store in (wide, narrow):
        assert await messages(store, after=ids[store][397]) == [m.message for m in lines[:397:-1]]
        assert await messages(store, 2, before=ids[store][100]) == [lines[99].message, lines[98].message]


def on_disk(path: Path) -> int:
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=30)) as db:
        count: int = db.execute("SELECT count(*) FROM entries").fetchone()[0]
    return count


def write_and_be_killed(tmp_path: Path) -> None:
    script = (
        "import sys, time; sys.path[:0] = sys.argv[2:]\n"
        "from pathlib import Path\nfrom strata.coordinator.logs.archive import LogArchive\n"
        "from strata.coordinator.logs.store import LogStore\n"
        "async def main():\n"
        "    store = LogStore(LogArchive(Path(sys.argv[1]) / 'logs.sqlite', limit_bytes=10**7, keep_s=1e6))\n"
        "    for n in range(3000): store.add(level='info', message=str(n), source='s', at_s=time.time())\n"
        "    print('handed over', flush=True)\n"
        "    time.sleep(600)\n"
        "import asyncio; asyncio.run(main())\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"handed over\n"
    eventually(lambda: on_disk(tmp_path / "logs.sqlite") == 3000, within_s=60)  # A moment later, by itself.
    os.kill(process.pid, signal.SIGKILL)
    process.wait(30)
    process.stdout.close()


async def test_entries_survive_the_process_and_numbers_continue(tmp_path: Path) -> None:
    write_and_be_killed(tmp_path)
    after = LogStore(opened(tmp_path))
    assert await messages(after) == [str(n) for n in range(2999, -1, -1)]
    last = (await after.search(1, EVERYTHING))[0].id
    after.add(level="info", message="new life", source="s", at_s=0.0)
    assert await messages(after, after=last) == ["new life"]
    after.close()


async def test_archive_is_bounded_by_size_and_by_age(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database_writer, "TIDY_EVERY_S", 0.0)
    monkeypatch.setattr(log_archive, "DROP_AT_A_TIME", 500)
    archive = opened(tmp_path, limit_mb=1.0)
    store = LogStore(archive, entries_kept=10)
    for n in range(40):
        for _ in range(250):
            store.add(level="info", message=f"{n} " + "x" * 400, source="s", at_s=0.0)
        assert archive.flush(60)
    assert archive.used_bytes() <= 1_100_000
    assert (tmp_path / "logs.sqlite").stat().st_size < 4_000_000, "space is used again"
    kept = await messages(store)
    assert kept[0].startswith("39 ")
    assert 500 < len(kept) < 3_000
    store.close()
    brief = LogStore(opened(tmp_path, keep_s=0.0), entries_kept=1)
    brief.add(level="info", message="old in an instant", source="s", at_s=0.0)
    brief.add(level="info", message="in memory", source="s", at_s=0.0)
    assert brief.archive is not None
    assert brief.archive.flush(60)
    eventually(lambda: on_disk(tmp_path / "logs.sqlite") == 0, within_s=30, what="all of them are too old")
    assert await messages(brief) == ["in memory"]
    brief.close()


def test_unreadable_log_is_put_aside(tmp_path: Path) -> None:
    (tmp_path / "logs.sqlite").write_bytes(b"not a database at all" * 1000)
    archive = opened(tmp_path)
    archive.put([view(1)])
    assert archive.flush(60)
    assert len(archive.search(10, EVERYTHING, below=2**62)) == 1
    archive.close()
    assert [p.name.split("-")[0] for p in tmp_path.glob("*unreadable*")] == ["logs.sqlite.unreadable"]


def test_disk_that_does_not_take_lines_costs_them_and_is_counted(archive: LogArchive) -> None:
    lock = sqlite3.connect(archive.path, isolation_level=None, timeout=30)
    lock.execute("BEGIN IMMEDIATE")
    try:
        archive._db.execute("PRAGMA busy_timeout=50")
        archive.put([view(n) for n in range(1, 101)])
        assert archive.flush(60)
        assert archive.refused_total == 100
    finally:
        lock.execute("ROLLBACK")
        lock.close()
    store = LogStore(archive)
    store.report_drops()
    assert store.newest(1, EVERYTHING)[0].message.startswith("100 log lines are not on disk")
    archive.put([view(n) for n in range(1, log_archive.PENDING_LIMIT + 51)])
    assert archive.refused_total >= 150
    assert archive.flush(60)
    assert len(archive.search(10, EVERYTHING, below=2**62)) == 10, "and written again when it can be"


def test_search_that_takes_too_long_is_ended(archive: LogArchive, monkeypatch: pytest.MonkeyPatch) -> None:
    archive.put([view(n) for n in range(1, 20_000)])
    assert archive.flush(60)
    monkeypatch.setattr(log_archive, "SEARCH_LIMIT_S", 0.0)
    with pytest.raises(SearchTooLong, match="Narrow it down"):
        archive.search(10, LogFilter(text="nowhere"), below=2**62)


def test_notes_are_there_after_a_restart(tmp_path: Path) -> None:
    first = opened(tmp_path)
    assert first.note("goodput") is None
    first.keep_note("goodput", b"{}")
    first.close()
    second = opened(tmp_path)
    assert second.note("goodput") == b"{}"
    second.close()


def view(number: int) -> LogView:
    return LogView(
        id=f"log_{NOW_US + number:08x}",
        timestamp=1.0,
        level="info",
        message="x" * 50,
        source="s",
        task_id=None,
        worker_id=None,
    )


# --- following ------------------------------------------------------------------------------------------------


async def test_follower_gets_what_it_asked_for_and_what_it_missed() -> None:
    store = LogStore(entries_kept=50)
    store.add(level="error", message="before", source="s", at_s=0.0)
    follower = store.follow(LogFilter(level="warn"))
    waiting = asyncio.ensure_future(anext(follower))
    await asyncio.sleep(0)
    for n in range(60):
        store.add(level="error" if n % 10 == 0 else "info", message=str(n), source="s", at_s=0.0)
    assert await waiting == Missed(count=10)
    told = await anext(follower)
    assert isinstance(told, list)
    assert [e.message for e in told] == ["10", "20", "30", "40", "50"]
    store.end_followers()
    with pytest.raises(StopAsyncIteration):
        await anext(follower)
    assert store.followers == 0


async def test_follower_continues_after_the_entry_it_knows() -> None:
    store = LogStore()
    for n in range(5):
        store.add(level="info", message=str(n), source="s", at_s=0.0)
    known = store.newest(3, EVERYTHING)[-1].id
    follower = store.follow(LogFilter(after=known))
    told = await anext(follower)
    assert isinstance(told, list)
    assert [e.message for e in told] == ["3", "4"]
    await follower.aclose()  # type: ignore[attr-defined]
