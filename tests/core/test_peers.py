"""Who gets copies, and what an agent accepts: whatever the roster, and in whatever order things arrive."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.core.jobs.peers import Accepted, Copy, CopyTable, Peer, Refused, copies_wanted, targets
from strata.core.types import CheckpointId

rosters = st.lists(st.sampled_from(["", "r1", "r2", "r3"]), min_size=1, max_size=9).map(
    lambda racks: [Peer(machine=f"m{n}", agent=f"a{n}", rack=rack) for n, rack in enumerate(racks)]
)


def copy(step: int, *, slot: str = "s", generation: int = 1, size_bytes: int = 1, run: str = "run") -> Copy:
    return Copy(
        run=run,
        slot=slot,
        checkpoint_id=CheckpointId(f"{generation}-{step}"),
        generation=generation,
        sequence=step,
        size_bytes=size_bytes,
    )


@given(rosters, st.data())
def test_copies_are_elsewhere_and_never_all_in_one_domain(roster: list[Peer], data: st.DataObject) -> None:
    sender = data.draw(st.sampled_from(roster))
    holders = {sender.machine, *data.draw(st.sets(st.sampled_from([p.machine for p in roster])))}
    copies = data.draw(st.integers(1, 3))
    chosen = targets(sender.machine, holders, roster, copies=copies)
    machines = [peer.machine for peer in chosen]
    assert len(set(machines)) == len(machines)
    assert not set(machines) & holders
    assert len(holders) + len(chosen) >= min(copies + 1, len(roster))
    domains = {peer.domain for peer in roster if peer.machine in holders | set(machines)}
    assert len(domains) > 1 or len({peer.domain for peer in roster}) == 1
    assert chosen == targets(sender.machine, holders, reversed(roster), copies=copies)


def test_every_machine_keeps_one_copy_where_all_make_one() -> None:
    for racks in (["", "", "", ""], ["r1", "r1", "r2", "r2"], ["r1", "r2", "r1", "r2"]):
        roster = [Peer(machine=f"m{n}", rack=rack) for n, rack in enumerate(racks)]
        chosen = [targets(p.machine, {p.machine}, roster, copies=1)[0].machine for p in roster]
        assert sorted(chosen) == [peer.machine for peer in roster]


def test_what_is_on_enough_machines_already_is_not_sent() -> None:
    roster = [Peer(machine=f"m{n}") for n in range(4)]
    assert targets("m0", {"m0", "m1"}, roster, copies=1) == []
    assert [peer.machine for peer in targets("m0", {"m0", "m1"}, roster, copies=2)] == ["m2"]


def test_newest_complete_copy_stays_until_the_next_is_complete() -> None:
    copy_table = CopyTable(10)
    for step in (1, 2, 3):
        assert isinstance(copy_table.begin(copy(step)), Accepted)
        assert [c.sequence for c in copy_table.complete.get("s", [])] == list(
            range(step - 1, max(0, step - 2), -1)
        )
        assert copy_table.finish(copy(step)) is None
    assert isinstance(copy_table.begin(copy(4)), Accepted)
    copy_table.abandon(copy(4))
    assert [c.sequence for c in copy_table.complete["s"]] == [3]
    answer = copy_table.begin(copy(3))
    assert isinstance(answer, Accepted)
    assert answer.is_there
    assert isinstance(copy_table.begin(copy(2)), Refused)


def test_superseded_generations_change_nothing() -> None:
    copy_table = CopyTable(10)
    copy_table.begin(copy(1))
    copy_table.finish(copy(1))
    arriving = copy(2)
    copy_table.begin(arriving)
    copy_table.fence("run", 2)
    late = copy_table.finish(arriving)
    assert late is not None
    assert late.is_stale
    assert isinstance(copy_table.begin(copy(3)), Refused)
    assert copy_table.settle("run", 1) == []
    assert copy_table.forget("run", 1) == []
    assert copy_table.complete["s"] == [copy(1)]
    assert copy_table.settle("run", 2) == [copy(1)]


def test_nothing_beyond_the_budget_is_kept_and_a_refusal_changes_nothing() -> None:
    copy_table = CopyTable(10)
    copy_table.begin(copy(1, size_bytes=6))
    copy_table.finish(copy(1, size_bytes=6))
    before = (dict(copy_table.complete), dict(copy_table.arriving))
    assert isinstance(copy_table.begin(copy(2, size_bytes=6)), Refused)
    assert isinstance(copy_table.begin(copy(2, slot="t", size_bytes=11)), Refused)
    assert (copy_table.complete, copy_table.arriving) == before
    assert isinstance(copy_table.begin(copy(1, slot="t", size_bytes=4)), Accepted)
    assert copy_table.used_bytes == 10


@pytest.mark.parametrize(
    ("text", "copies"), [("peer", 1), ("peer:2", 2), ("peer:8", 8), ("peers", None), ("s3://peer", None)]
)
def test_names_of_the_tier(text: str, copies: int | None) -> None:
    assert copies_wanted(text) == copies


@pytest.mark.parametrize("text", ["peer:", "peer:0", "peer:9", "peer:two"])
def test_wrong_numbers_of_copies_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="copies, 1 to 8"):
        copies_wanted(text)
