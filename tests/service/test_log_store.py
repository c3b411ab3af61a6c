"""The log of the fleet stays bounded, honest about what it dropped, and free of anything but text."""

from __future__ import annotations

import time

from strata.coordinator.logs import BURST_LINES, LogFilter, LogStore

EVERYTHING = LogFilter()


def line(message: str) -> tuple[float, str, str, str, str]:
    return (time.time(), "info", message, "test", "")


def test_flood_is_dropped_counted_and_reported() -> None:
    store = LogStore()
    store.add_from_worker("w", [line(str(n)) for n in range(int(BURST_LINES) + 700)], dropped=11)
    assert 600 <= store.dropped_total <= 711
    dropped = store.dropped_total
    store.report_drops()
    newest = store.newest(1, EVERYTHING)[0]
    assert (newest.level, newest.worker_id, newest.source) == ("warn", "w", "coordinator")
    assert newest.message.startswith(f"{dropped:,} log lines of 'w' were dropped")
    store.report_drops()
    assert store.newest(1, EVERYTHING)[0] is newest, "a drop is reported once"


def test_flood_of_one_worker_costs_no_other_a_line() -> None:
    store = LogStore()
    store.add_from_worker("loud", [line("noise")] * (2 * int(BURST_LINES)))
    store.add_from_worker("calm", [line("important")])
    assert store.newest(1, LogFilter(worker_id="calm"))[0].message == "important"


def test_log_is_bounded_by_entries_and_by_size() -> None:
    by_count = LogStore(entries_kept=10)
    by_size = LogStore(characters_kept=1_000)
    for n in range(100):
        for store in (by_count, by_size):
            store.add(level="info", message=f"{n:100d}", source="test", at_s=0.0)
    for store in (by_count, by_size):
        assert [entry.message.strip() for entry in store] == [str(n) for n in range(90, 100)]


def test_ids_grow_over_restarts() -> None:
    before = LogStore()
    before.add(level="info", message="first", source="test", at_s=0.0)
    last = before.newest(1, EVERYTHING)[0].id
    time.sleep(0.002)
    after = LogStore()
    after.add(level="info", message="second", source="test", at_s=0.0)
    assert [e.message for e in after.newest(10, LogFilter(after=last))] == ["second"]


def test_budgets_of_quiet_workers_are_forgotten() -> None:
    store = LogStore()
    for n in range(100):
        store.add_from_worker(f"w{n}", [])
    store.report_drops()
    assert store._budgets == {}
