"""Compaction in the background: what a commit waits for, and what a crash at any moment of it leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest

from strata.coordinator import engine as engines
from strata.coordinator.engine import Engine, SystemClock, draw
from strata.coordinator.journal import sqlite
from strata.coordinator.journal.sqlite import SqliteJournal, SqliteSnapshot
from strata.core.cluster import Cluster
from strata.core.messages import CreateTask, Event, Instant, StopTask, SwapValue, TaskId, TaskSpec

MOMENT = Instant(mono_s=1.0, wall_s=1.0)


def create(number: int) -> CreateTask:
    spec = TaskSpec(
        task_id=TaskId(f"t-{number}"),
        name="a task",
        type="training",
        dataset_id=None,
        worker_count=1,
        config_json="{}",
    )
    return CreateTask(spec=spec)


def journal_in(folder: Path) -> SqliteJournal:
    return SqliteJournal(folder, reserve_bytes=4096)


def state_in(folder: Path) -> list[Event]:
    with closing(journal_in(folder)) as journal:
        cluster = Cluster()
        for event in journal.load():
            cluster.apply(event, MOMENT)
    return cluster.compact()


class Recorded(SqliteJournal):
    """Notes the order of what is written."""

    calls: list[tuple[str, int]]

    def append(self, events: Sequence[Event]) -> None:
        self.calls.append(("append", len(events)))
        super().append(events)

    def begin_snapshot(self) -> SqliteSnapshot:
        journal = self

        class Noted(SqliteSnapshot):
            def add(self, events: Sequence[Event]) -> int:
                journal.calls.append(("add", len(events)))
                return super().add(events)

            def commit(self) -> None:
                journal.calls.append(("commit", 0))
                super().commit()

        return Noted(self)


async def test_commits_continue_between_the_pieces_of_a_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each command is answered after at most one piece, and the snapshot is of the state when it was started."""
    monkeypatch.setattr(engines, "PIECE_EVENTS", 20)
    Recorded.calls = []
    journal = Recorded(tmp_path, reserve_bytes=4096)
    engine = Engine(Cluster(), journal, SystemClock())
    running = asyncio.create_task(engine.run())
    await asyncio.gather(*(engine.submit(create(n)) for n in range(500)))
    monkeypatch.setattr(engines, "SNAPSHOT_EVERY", 1)
    await engine.submit(create(500))
    monkeypatch.setattr(engines, "SNAPSHOT_EVERY", 10**9)
    stopped = 0
    while engine.compactions_total == 0:
        await engine.submit(StopTask(task_id=TaskId(f"t-{stopped % 500}"), reason=""))
        stopped += 1
    calls = Recorded.calls
    pieces = [n for kind, n in calls if kind == "add"]
    assert sum(pieces) == 1 + 2 * 501  # Of each task that it was created and how it stands; and the counters.
    assert max(pieces) <= 20
    first, last = calls.index(("add", pieces[0])), calls.index(("commit", 0))
    between = [kind for kind, _ in calls[first:last]]
    assert between.count("append") >= 10, between
    state = engine.cluster.compact()
    engine.stop()
    await running
    engine.close()
    assert state_in(tmp_path) == state


def some(cluster: Cluster, first: int, count: int) -> list[Event]:
    events: list[Event] = []
    for n in range(first, first + count):
        events += cluster.handle(create(n), MOMENT).events
        swap = SwapValue(key=f"k-{n % 7}", body=b"v" * 600, expected_version=0, soft=False)
        events += cluster.handle(swap, MOMENT).events
        if n % 3 == 0:
            events += cluster.handle(StopTask(task_id=TaskId(f"t-{n}"), reason=""), MOMENT).events
    return events


@pytest.mark.parametrize("crash_after", range(16))
def test_a_crash_at_any_piece_leaves_the_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, crash_after: int
) -> None:
    monkeypatch.setattr(sqlite, "CLEANED_AT_ONCE", 30)
    monkeypatch.setattr(sqlite, "STORY_EVENTS_KEPT", 40)
    cluster, steps = Cluster(), 0

    class Crashed(Exception):
        pass

    def step(journal: SqliteJournal) -> None:
        """Something else is written after every piece; then the power fails."""
        nonlocal steps
        journal.append(some(cluster, 1000 + steps, 1))
        steps += 1
        if steps > crash_after:
            raise Crashed

    def compact(journal: SqliteJournal) -> None:
        history, snapshot = cluster.compaction(), journal.begin_snapshot()
        while piece := draw(history, within_s=1.0)[:500]:
            for at in range(0, len(piece), 25):
                snapshot.add(piece[at : at + 25])
                step(journal)
        snapshot.commit()
        step(journal)
        while snapshot.clean():
            step(journal)

    with closing(journal_in(tmp_path)) as journal:
        journal.append(some(cluster, 0, 30))
        journal.snapshot(cluster.compact())
        journal.append(some(cluster, 30, 30))
        try:
            while True:
                compact(journal)
        except Crashed:
            pass
    assert state_in(tmp_path) == cluster.compact()
    with closing(journal_in(tmp_path)) as journal:  # And the next compaction finds nothing in its way.
        journal.snapshot(cluster.compact())
    assert state_in(tmp_path) == cluster.compact()


def test_a_piece_ends_with_its_time() -> None:
    cluster = Cluster()
    some(cluster, 0, 10)
    history = cluster.compaction()
    assert len(draw(history, within_s=0.0)) == 1
    assert len(draw(history, within_s=60.0)) == len(cluster.compact()) - 1


def test_what_is_no_longer_needed_goes_and_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite, "CLEANED_AT_ONCE", 50)
    monkeypatch.setattr(sqlite, "STORY_EVENTS_KEPT", 100)
    cluster = Cluster()
    with closing(journal_in(tmp_path)) as journal:
        for n in range(0, 500, 50):
            journal.append(some(cluster, n, 50))
            journal.snapshot(cluster.compact())
        sizes = journal.sizes()
    with closing(journal_in(tmp_path)) as journal:  # Opened again it is counted from what is there.
        again = journal.sizes()
    assert (again.story_bytes, again.snapshot_bytes) == (sizes.story_bytes, sizes.snapshot_bytes)
    assert sizes.story_bytes < 100 * 700
    assert sizes.file_bytes > sizes.story_bytes + sizes.snapshot_bytes
