"""The audit says exact when it is, and names what is not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.core.data.audit import Commit, ancestry, audit, audit_all
from strata.core.data.ledger import Coverage, DataCommit, LedgerChain, LedgerError, RankRecord
from strata.core.data.spans import Spans


class History:
    """Builds commits as a training run would."""

    def __init__(self, total: int = 100) -> None:
        self.total = total
        self.commits: list[Commit] = []

    def commit(self, name: str, *rows: tuple[int, int], parent: str | None = "last", **more: Any) -> History:
        if parent == "last":
            parent = self.commits[-1].checkpoint_id if self.commits else None
        data = next((c.data for c in self.commits if c.checkpoint_id == parent), None) or DataCommit()
        record = RankRecord(dataset="d", epoch=more.pop("epoch", 0), total=self.total, rank=0, **more)
        for start, stop in rows:
            record = record.with_span(start, stop)
        step = len(self.commits)
        data = data.next([record], world_size=1)
        self.commits.append(Commit(checkpoint_id=name, parent_id=parent, step=step, data=data))
        return self


def test_a_whole_epoch_is_exact() -> None:
    report = audit(History().commit("a", (0, 40)).commit("b", (40, 100), closed=True).commits, "d", 0)
    assert report.exact
    assert report.reason == "100 samples, each exactly once"
    assert report.commits == ("a", "b")


def test_a_rolled_back_branch_does_not_count() -> None:
    history = History().commit("a", (0, 40)).commit("b", (40, 70))
    history.commit("c", (40, 60), parent="a").commit("d", (60, 100), closed=True)
    report = audit(history.commits, "d", 0)
    assert report.exact
    assert report.commits == ("a", "c", "d")
    assert report.abandoned == ("b",)


def test_repeated_positions_are_listed_with_who_repeated_them() -> None:
    report = audit(History().commit("a", (0, 40)).commit("b", (35, 100), closed=True).commits, "d", 0)
    assert not report.exact
    assert report.repeated == Spans([(35, 40)])
    assert report.repeated_by == ("b",)
    assert report.reason == "5 samples trained more than once by b (positions 35–39)"


def test_lost_positions_are_listed_once_the_epoch_is_closed() -> None:
    report = audit(History().commit("a", (0, 40)).commit("b", (45, 100), closed=True).commits, "d", 0)
    assert report.lost == Spans([(40, 45)])
    assert report.reason == "5 of 100 samples lost (positions 40–44)"


def test_a_later_epoch_closes_the_one_before() -> None:
    report = audit(History().commit("a", (0, 40)).commit("b", (0, 10), epoch=1).commits, "d", 0)
    assert report.lost == Spans([(40, 100)])


def test_an_open_epoch_is_clean_but_not_exact() -> None:
    report = audit(History().commit("a", (0, 40)).commits, "d", 0)
    assert report.clean
    assert not report.exact
    assert report.remaining == Spans([(40, 100)])
    assert report.reason == "still open: 40 of 100 samples so far, each exactly once"


def test_samples_dropped_on_purpose_are_reported_and_not_lost() -> None:
    history = History().commit("a", (0, 96), closed=True, dropped=Spans([(96, 100)]))
    report = audit(history.commits, "d", 0)
    assert report.exact
    assert report.reason == "96 samples, each exactly once, 4 dropped on purpose"


def test_history_survives_old_checkpoints_being_removed() -> None:
    history = History().commit("a", (0, 40)).commit("b", (40, 70)).commit("c", (70, 100), closed=True)
    report = audit(history.commits[1:], "d", 0)
    assert report.exact
    assert report.vouched == 40
    assert audit(history.commits[2:], "d", 0).exact


def test_a_checkpoint_lost_in_the_middle_is_vouched_for_by_the_next() -> None:
    """Memory that was lost, or a save that failed: the weights that came after it hold what it trained."""
    history = History().commit("a", (0, 40)).commit("b", (40, 70)).commit("c", (70, 100), closed=True)
    del history.commits[1]
    history.commits[1] = replace(history.commits[1], parent_id="a")
    report = audit(history.commits, "d", 0)
    assert report.exact
    assert report.vouched == 30
    assert report.commits == ("a", "c")


def test_a_repeat_is_still_known_after_its_checkpoints_are_removed() -> None:
    history = History().commit("a", (0, 40)).commit("b", (30, 70)).commit("c", (70, 100), closed=True)
    assert audit(history.commits[2:], "d", 0).repeated == Spans([(30, 40)])


def test_a_commit_that_does_not_continue_its_parent_is_a_contradiction() -> None:
    history = History().commit("a", (0, 40)).commit("b", (40, 100), closed=True)
    last = history.commits[-1]
    assert last.data is not None
    forged = replace(last.data.epochs[0], before=Coverage(covered=Spans([(0, 38)])))
    history.commits[-1] = replace(last, data=replace(last.data, epochs=(forged,)))
    report = audit(history.commits, "d", 0)
    assert not report.exact
    assert "b has forgotten positions 38–39 of a" in report.reason
    history.commits[-1] = replace(last, data=DataCommit())
    assert "b has forgotten what a committed" in audit(history.commits, "d", 0).reason


def test_positions_beyond_the_epoch_and_a_wrong_total_are_contradictions() -> None:
    history = History().commit("a", (0, 103), closed=True)
    report = audit(history.commits, "d", 0, total=120)
    assert report.samples == 100
    assert "positions 100–102 do not exist in an epoch of 100" in report.reason
    assert "the dataset has 120 samples, the history was recorded with 100" in report.reason


def test_a_checkpoint_without_data_is_only_a_link() -> None:
    history = History().commit("a", (0, 40))
    weights_only = Commit(checkpoint_id="w", parent_id="a", step=1, data=None)
    history.commit("b", (40, 100), closed=True)
    history.commits[1] = replace(history.commits[1], parent_id="w")
    history.commits.insert(1, weights_only)
    report = audit(history.commits, "d", 0)
    assert report.exact
    assert report.commits == ("a", "b")
    assert report.abandoned == ()


def test_unknown_epochs_say_what_is_known() -> None:
    history = History().commit("a", (0, 40))
    with pytest.raises(LedgerError, match=r"epoch 3 of 'd'\. Known: 'd' epoch 0"):
        audit(history.commits, "d", 3)
    with pytest.raises(LedgerError, match="no data at all"):
        audit([], "d", 0)
    with pytest.raises(LedgerError, match="'x'"):
        audit_all(history.commits, "x")


def test_every_epoch_gets_its_report() -> None:
    history = History().commit("a", (0, 100), closed=True).commit("b", (0, 100), epoch=1, closed=True)
    history.commit("c", (0, 5), epoch=2)
    assert [(r.epoch, r.exact) for r in audit_all(history.commits, "d")] == [(0, True), (1, True), (2, False)]


def test_a_loop_of_parents_ends_with_an_error() -> None:
    a = Commit(checkpoint_id="a", parent_id="b", step=0, data=DataCommit())
    b = Commit(checkpoint_id="b", parent_id="a", step=1, data=DataCommit())
    with pytest.raises(LedgerError, match="its own ancestor"):
        ancestry([a, b])


@given(st.data())
def test_any_tampering_with_spans_is_found(data: st.DataObject) -> None:
    """Cut an epoch into commits and ranks at random, then add or remove one span: exact turns to not exact."""
    total = data.draw(st.integers(2, 60))
    cuts = sorted(data.draw(st.sets(st.integers(1, total - 1), max_size=6)))
    pieces = list(zip([0, *cuts], [*cuts, total], strict=True))
    history = History(total)
    for i, piece in enumerate(pieces):
        history.commit(f"c{i}", piece, closed=piece[1] == total)
    assert audit(history.commits, "d", 0).exact

    tampered = History(total)
    victim = data.draw(st.integers(0, len(pieces) - 1))
    again = data.draw(st.booleans())
    for i, piece in enumerate(pieces):
        rows = [piece] if i != victim else [piece, piece] if again else []
        tampered.commit(f"c{i}", *rows, closed=piece[1] == total)
    report = audit(tampered.commits, "d", 0)
    assert not report.exact
    assert (report.repeated if again else report.lost) == Spans([pieces[victim]])
    assert report.to_json()["exact"] is False


# --- saves that overlap --------------------------------------------------------------------------------------


def trained(*rows: tuple[int, int], epoch: int = 0, total: int = 100, **more: Any) -> list[RankRecord]:
    record = RankRecord(dataset="d", epoch=epoch, total=total, rank=0, **more)
    for start, stop in rows:
        record = record.with_span(start, stop)
    return [record]


def siblings() -> list[Commit]:
    """b and c both continue a: c was saved before anybody knew that b exists. e continues c."""
    chain = LedgerChain()
    records = {"a": chain.commit(trained((0, 30)), "a")}
    chain.confirm("a")
    records["b"] = chain.commit(trained((30, 50)), "b")
    records["c"] = chain.commit(trained((50, 70)), "c")
    chain.confirm("b")
    chain.confirm("c")
    records["e"] = chain.commit(trained((70, 100), closed=True), "e")
    return [
        Commit(checkpoint_id=name, parent_id=None, step=step, data=data)
        for step, (name, data) in enumerate(records.items())
    ]


def test_of_two_overlapping_saves_the_newer_one_counts_and_the_older_is_not_called_abandoned() -> None:
    commits = siblings()
    report = audit(commits, "d", 0)
    assert report.exact, report.reason
    assert report.commits == ("a", "c", "e")
    assert (report.abandoned, report.vouched) == ((), 0)
    for kept in (commits[:2], commits[:3], commits[2:], [commits[0], *commits[2:]], commits[1:]):
        assert audit(kept, "d", 0).clean
        assert audit(kept, "d", 0).abandoned == ()


def test_an_older_save_is_an_ancestor_through_any_of_the_manifests_links() -> None:
    a, b, c, e = siblings()
    assert c.data is not None
    nameless = replace(c, data=replace(c.data, unconfirmed=()))
    assert audit([a, b, nameless, e], "d", 0).abandoned == ("b",)
    assert audit([a, b, replace(nameless, parent_id="b"), e], "d", 0).abandoned == ()
    assert audit([a, b, replace(nameless, trained_from="b"), e], "d", 0).abandoned == ()


def test_a_save_without_what_an_overlapping_older_one_held_is_a_contradiction() -> None:
    a, b, c, e = siblings()
    assert c.data is not None
    less = DataCommit().next(trained((0, 30)), world_size=1).next(trained((45, 70)), world_size=1)
    forged = replace(less, base_known=True, base="a", unconfirmed=("b",))
    report = audit([a, b, replace(c, data=forged), e], "d", 0)
    assert "c has forgotten positions 30–44 of b" in report.reason


def test_a_record_cannot_invent_what_its_base_has_trained() -> None:
    a, _, c, e = siblings()
    assert a.data is not None
    less = replace(a, data=replace(DataCommit().next(trained((0, 20)), world_size=1), base_known=True))
    report = audit([less, c, e], "d", 0)
    assert not report.exact
    assert "c says that a had trained positions 20–29, which it had not" in report.reason


def test_a_record_that_starts_from_nothing_though_its_manifest_has_a_parent_is_a_contradiction() -> None:
    first = LedgerChain().commit(trained((0, 40)), "a")
    anew = LedgerChain().commit(
        trained((40, 100), closed=True), "b"
    )  # The weights were restored, the data was not.
    report = audit(
        [
            Commit(checkpoint_id="a", parent_id=None, step=0, data=first),
            Commit(checkpoint_id="b", parent_id="a", step=1, data=anew),
        ],
        "d",
        0,
    )
    assert not report.exact
    assert "b has forgotten positions 0–39 of a" in report.reason


def test_what_is_older_than_a_gap_in_the_history_is_not_called_abandoned() -> None:
    a, _, c, e = siblings()
    assert audit([a, e], "d", 0).abandoned == ()  # c was removed: whether it came after a is unknown.
    assert audit([a, c, e], "d", 0).abandoned == ()


# --- epochs that are alike -----------------------------------------------------------------------------------


def test_many_epochs_that_are_alike_get_one_report_and_a_fault_among_them_its_own() -> None:
    chain, commits = LedgerChain(), list[Commit]()
    for epoch in range(3_000):
        faulty = epoch == 1_200
        chain.commit(trained((0, 100), *([(5, 7)] if faulty else []), epoch=epoch, closed=True), "c")
        chain.confirm("c")
        if epoch % 1_000 == 999:
            chain.commit([], f"c{epoch}")
            chain.confirm(f"c{epoch}")
            commits.append(Commit(checkpoint_id=f"c{epoch}", parent_id=None, step=epoch, data=chain.base))
    last = chain.commit(trained((0, 10), epoch=3_000), "last")
    commits.append(Commit(checkpoint_id="last", parent_id=None, step=3_000, data=last))
    reports = audit_all(commits, "d")
    assert len(reports) < 20
    assert [e for r in reports for e in range(r.epoch, r.last_epoch + 1)] == list(range(3_001))
    (fault,) = [r for r in reports if not r.clean]
    assert (fault.epoch, fault.last_epoch, fault.repeated) == (1_200, 1_200, Spans([(5, 7)]))
    assert reports[0].reason == "in each of 1,000 epochs: 100 samples, each exactly once"
    assert reports[0].to_json()["last_epoch"] == 999
    assert [(r.epoch, r.exact) for r in reports[-1:]] == [(3_000, False)]
    assert audit(commits, "d", 1_200).repeated == Spans([(5, 7)])
    assert audit(commits, "d", 17).exact


def test_an_epoch_forgotten_within_many_that_are_alike_is_a_contradiction() -> None:
    chain = LedgerChain()
    full = chain.commit([r for e in range(100) for r in trained((0, 100), epoch=e, closed=True)], "a")
    forged = DataCommit().next(
        [r for e in range(100) for r in trained((0, 100 if e != 40 else 90), epoch=e, closed=True)],
        world_size=1,
    )
    forged = replace(forged.next([], world_size=1), base_known=True, base="a")
    commits = [
        Commit(checkpoint_id="a", parent_id=None, step=0, data=full),
        Commit(checkpoint_id="b", parent_id="a", step=1, data=forged),
    ]
    assert [(r.epoch, r.reason) for r in audit_all(commits, "d") if not r.clean] == [
        (40, "b has forgotten positions 90–99 of a")
    ]


def test_of_two_unfinished_epochs_that_are_alike_only_the_older_has_lost_something() -> None:
    data = DataCommit().next(trained((0, 50), epoch=3) + trained((0, 50), epoch=4), world_size=1)
    older, newer = audit_all([Commit(checkpoint_id="a", parent_id=None, step=0, data=data)], "d")
    assert (older.epoch, older.lost) == (3, Spans([(50, 100)]))
    assert (newer.epoch, newer.lost, newer.remaining) == (4, Spans(), Spans([(50, 100)]))
