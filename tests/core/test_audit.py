"""The audit says exact when it is, and names what is not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.core.audit import Commit, ancestry, audit, audit_all
from strata.core.ledger import Coverage, DataCommit, LedgerError, RankRecord
from strata.core.spans import Spans


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


def test_samples_dropped_on_purpose_are_not_lost_but_told() -> None:
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
    """Memory that is gone, or a save that failed: the weights that came after it hold what it trained."""
    history = History().commit("a", (0, 40)).commit("b", (40, 70)).commit("c", (70, 100), closed=True)
    del history.commits[1]
    history.commits[1] = replace(history.commits[1], parent_id="a")
    report = audit(history.commits, "d", 0)
    assert report.exact
    assert report.vouched == 30
    assert report.commits == ("a", "c")


def test_a_repeat_is_still_known_after_its_checkpoints_are_gone() -> None:
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
    assert "the dataset has 120 samples, the history was made with 100" in report.reason


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
    with pytest.raises(LedgerError, match=r"epoch 3 of 'd'\. It knows 'd' epoch 0"):
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
