"""Who leads, what becomes of an append, and when a leader no longer answers."""

from __future__ import annotations

import pytest

from strata.core.leadership import (
    Appender,
    Campaign,
    Gap,
    Leader,
    Leadership,
    Record,
    Refusal,
    Renew,
    StepDown,
    Tail,
    standby_text,
)

ME, OTHER = Leader(name="me", term=7), Leader(name="other", term=5, grpc="b:50051")


def record(
    position: int, *, term: int = 1, batch: int = 0, part: int = 0, parts: int = 1, body: bytes = b"x"
) -> Record:
    return Record(position=position, term=term, batch=batch, part=part, parts=parts, body=body)


def leading(lease_s: float = 2.0, *, now_s: float = 100.0) -> Leadership:
    leadership = Leadership(lease_s=lease_s)
    assert leadership.tick(now_s) == [Campaign()]
    leadership.won(ME, sent_s=now_s)
    return leadership


def test_batches_come_out_once_and_in_order() -> None:
    tail = Tail()
    assert tail.take(record(1, body=b"a")) == b"a"
    assert tail.take(record(1, body=b"a")) is None, "a watch repeats some"
    assert tail.take(record(2, batch=1, part=0, parts=2, body=b"b")) is None
    assert tail.take(record(3, batch=1, part=1, parts=2, body=b"c")) == b"bc"
    with pytest.raises(Gap, match="after 3 comes 5"):
        tail.take(record(5, batch=2))
    assert tail.take(record(4, batch=2, body=b"d")) == b"d", "what a gap has shown is not taken"


def test_parts_that_nobody_completed_count_for_nothing() -> None:
    tail = Tail()
    assert tail.take(record(1, part=0, parts=3)) is None
    assert tail.take(record(2, part=1, parts=3)) is None
    assert tail.take(record(3, term=2, body=b"next")) == b"next"


@pytest.mark.parametrize("wrong", [record(2, term=0), record(2, batch=1, part=1, parts=2)])
def test_what_no_leader_writes_is_an_error(wrong: Record) -> None:
    tail = Tail()
    tail.take(record(1))
    with pytest.raises(ValueError, match="record 2"):
        tail.take(wrong)


def test_fate_of_an_append_is_what_the_store_says() -> None:
    appender = Appender(7, position=10)
    (sent,) = appender.records(b"abc", part_bytes=100)
    assert (sent.position, sent.term) == (11, 7)
    assert appender.fate(sent, Refusal(term=7, found=None)) == "again"
    assert appender.fate(sent, Refusal(term=9, found=None)) == "deposed"
    assert appender.fate(sent, Refusal(term=0, found=None)) == "deposed"
    assert appender.fate(sent, Refusal(term=9, found=record(11, term=9))) == "deposed"
    assert appender.fate(sent, Refusal(term=7, found=record(11, term=6))) == "foreign"
    assert appender.position == 10
    assert appender.fate(sent, Refusal(term=9, found=sent)) == "landed", "before it was deposed: it is there"
    assert appender.position == 11


def test_large_batches_are_several_records_and_the_next_continues_after_them() -> None:
    appender = Appender(7, position=0)
    parts = appender.records(b"abcdefgh", part_bytes=3)
    assert [(each.position, each.part, each.parts, each.body) for each in parts] == [
        (1, 0, 3, b"abc"),
        (2, 1, 3, b"def"),
        (3, 2, 3, b"gh"),
    ]
    for each in parts:
        appender.fate(each, None)
    (after,) = appender.records(b"", part_bytes=3)
    assert (after.position, after.batch, after.body) == (4, 1, b"")


def test_lease_counts_from_when_its_renewal_was_sent_less_a_margin() -> None:
    leadership = leading(2.0, now_s=100.0)
    assert leadership.may_answer(101.89)
    assert not leadership.may_answer(101.91)
    leadership.renewed(sent_s=101.0)
    assert leadership.may_answer(102.89)
    leadership.renewed(sent_s=100.5)  # An answer that comes late takes nothing back.
    assert leadership.may_answer(102.89)


def test_leader_renews_waits_for_the_store_and_then_steps_down() -> None:
    leadership = leading(2.0, now_s=100.0)
    assert leadership.tick(100.4) == []
    assert leadership.tick(100.5) == [Renew()]
    assert leadership.tick(100.6) == []
    assert leadership.tick(104.0) == [Renew()], "its lease may be over, and nobody else has said so"
    assert not leadership.may_answer(104.0)
    (last,) = leadership.tick(106.0)
    assert last == StepDown("its lease could not be renewed for 6.0 s")
    assert leadership.role == "deposed"
    leadership.renewed(sent_s=106.0)
    leadership.won(ME, sent_s=106.0)
    assert not leadership.may_answer(106.1), "whoever was deposed starts anew"
    assert leadership.tick(107.0) == []


def test_standby_campaigns_when_nobody_leads_and_once_at_a_time() -> None:
    leadership = Leadership(lease_s=2.0)
    leadership.leader_seen(OTHER, revision=5, now_s=100.0)
    assert leadership.tick(100.5) == []
    leadership.leader_seen(None, revision=9, now_s=101.0)
    leadership.leader_seen(OTHER, revision=8, now_s=101.1)  # Old news.
    assert leadership.tick(101.2) == [Campaign()]
    assert leadership.tick(101.3) == []
    leadership.not_won(OTHER, revision=10, now_s=101.4)
    assert leadership.tick(101.5) == []
    assert leadership.leader == OTHER


def test_standby_that_hears_nothing_of_the_store_knows_of_no_leader() -> None:
    leadership = Leadership(lease_s=2.0)
    leadership.leader_seen(OTHER, revision=5, now_s=100.0)
    leadership.tick(105.9)
    assert leadership.leader == OTHER
    assert leadership.tick(106.0) == [Campaign()]
    assert standby_text(leadership.leader) == standby_text(None)
    leadership.not_won(OTHER, revision=5, now_s=107.0)
    assert leadership.leader == OTHER


def test_refusals_name_the_leader() -> None:
    assert standby_text(OTHER) == "this coordinator is a standby; b:50051 leads"
    assert standby_text(None) == "this coordinator is a standby; no coordinator leads right now"
