"""The audit reads real manifests, and `strata audit` tells people and programs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from strata.cli.datasets.audit import audit as audit_command
from strata.core.data.ledger import DataCommit, LedgerChain, LedgerError, RankRecord
from strata.core.data.spans import Spans
from strata.data.history import audit, audit_epochs, datasets_in
from tests.data.manifests import publish

app = typer.Typer()
app.command()(audit_command)


def commit(before: DataCommit, *rows: tuple[int, int], epoch: int = 0, closed: bool = False) -> DataCommit:
    record = RankRecord(dataset="d", epoch=epoch, total=100, rank=0, closed=closed)
    for start, stop in rows:
        record = record.with_span(start, stop)
    return before.next([record], world_size=1)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Half an epoch, a branch that was rolled back, the other half."""
    first = commit(DataCommit(), (0, 50))
    publish(tmp_path, "first", parent=None, sequence=1, data=first)
    publish(tmp_path, "lost-branch", parent="first", sequence=2, data=commit(first, (50, 70)))
    publish(tmp_path, "second", parent="first", sequence=3, data=commit(first, (50, 100), closed=True))
    return tmp_path


def test_audit_reads_manifests_and_ignores_the_rolled_back_branch(run: Path) -> None:
    report = audit(run, "d")
    assert report.exact
    assert report.abandoned == ("lost-branch",)
    assert audit(f"file://{run}", "d", 0).exact
    assert datasets_in(run) == ["d"]


def test_a_damaged_manifest_is_left_out_and_its_child_vouches(
    run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = run / "first.manifest.json"
    path.write_bytes(path.read_bytes().replace(b'"step":1', b'"step":7'))
    report = audit(run, "d")
    assert report.exact
    assert report.vouched == 50
    assert "left out of the audit" in caplog.text


def test_a_directory_without_checkpoints_is_distinguished_from_an_unknown_dataset(
    run: Path, tmp_path: Path
) -> None:
    with pytest.raises(LedgerError, match="There is no checkpoint in"):
        audit(tmp_path / "nowhere", "d")
    with pytest.raises(LedgerError, match="Known: 'd' epoch 0"):
        audit(run, "other")


def test_checkpoints_of_other_loaders_are_links_only(run: Path) -> None:
    publish(run, "weights", parent="second", sequence=4, data=None)
    assert audit(run, "d").exact


def test_the_command_prints_a_table_and_exits_zero_when_exact(run: Path) -> None:
    result = CliRunner().invoke(app, ["d", "--source", str(run)])
    assert result.exit_code == 0, result.output
    assert "exact" in result.output
    assert "100 samples, each exactly once" in result.output
    assert "lost-branch" in result.output


def test_the_command_guesses_the_only_dataset_and_prints_json(run: Path) -> None:
    result = CliRunner().invoke(app, ["--source", str(run), "--json"])
    answer = json.loads(result.output)
    assert answer["exact"] is True
    assert answer["epochs"][0]["samples"] == 100


def test_the_command_exits_one_when_something_is_repeated(tmp_path: Path) -> None:
    first = commit(DataCommit(), (0, 50))
    publish(tmp_path, "a", parent=None, sequence=1, data=first)
    publish(tmp_path, "b", parent="a", sequence=2, data=commit(first, (40, 100), closed=True))
    result = CliRunner().invoke(app, ["d", "--source", str(tmp_path), "--json"])
    assert result.exit_code == 1
    assert json.loads(result.output)["epochs"][0]["repeated"] == [[40, 50]]


def test_an_open_last_epoch_passes_unless_it_is_the_one_asked_for(run: Path) -> None:
    whole = commit(DataCommit(), (0, 100), closed=True)
    publish(run, "third", parent=None, sequence=5, data=commit(whole, (0, 10), epoch=1))
    assert [r.exact for r in audit_epochs(run, "d")] == [True, False]
    assert CliRunner().invoke(app, ["d", "-s", str(run)]).exit_code == 0
    assert CliRunner().invoke(app, ["d", "-s", str(run), "--epoch", "1"]).exit_code == 1
    assert audit(run, "d").remaining == Spans([(10, 100)])


@pytest.mark.parametrize(
    "arguments",
    [
        ["d"],
        ["d", "--source", "/nowhere/at/all"],
        ["d", "--source", "ftp://x/y"],
        ["nobody", "--source", "RUN"],
    ],
)
def test_an_unanswerable_question_exits_two_without_a_traceback(run: Path, arguments: list[str]) -> None:
    result = CliRunner().invoke(
        app, [str(run) if a == "RUN" else a for a in arguments], env={"CHECKPOINT_BUCKET": ""}
    )
    assert result.exit_code == 2
    assert "error:" in result.output
    assert "Traceback" not in result.output
    as_json = CliRunner().invoke(
        app, [*(str(run) if a == "RUN" else a for a in arguments), "--json"], env={"CHECKPOINT_BUCKET": ""}
    )
    assert "error" in json.loads(as_json.output)


LONG = "run-7f3a9c2e5b1d-step-000000123456-" + "x" * 70


def test_ids_are_never_broken_at_eighty_columns(tmp_path: Path) -> None:
    first = commit(DataCommit(), (0, 50))
    publish(tmp_path, f"{LONG}-1", parent=None, sequence=1, data=first)
    publish(tmp_path, f"{LONG}-2", parent=f"{LONG}-1", sequence=2, data=commit(first, (50, 70)))
    again = commit(first, (40, 100), closed=True)
    publish(tmp_path, f"{LONG}-3", parent=f"{LONG}-1", sequence=3, data=again)
    result = CliRunner().invoke(app, ["d", "-s", str(tmp_path)], env={"COLUMNS": "80"})
    assert result.exit_code == 1
    assert f"  {LONG}-2" in result.output.splitlines()
    assert f"10 samples trained more than once by {LONG}-3 (positions 40–49)" in result.output


def test_many_epochs_that_are_alike_are_one_line_and_one_entry(tmp_path: Path) -> None:
    chain = LedgerChain()
    record = RankRecord(dataset="d", epoch=0, total=100, rank=0, closed=True).with_span(0, 100)
    chain.commit([replace(record, epoch=epoch) for epoch in range(5_000)], "a")
    chain.confirm("a")
    data = chain.commit([replace(record, epoch=5_000, runs=(), closed=False).with_span(0, 10)], "b")
    publish(tmp_path, "a", parent=None, sequence=1, data=chain.base)
    publish(tmp_path, "b", parent="a", sequence=2, data=data)
    result = CliRunner().invoke(app, ["d", "-s", str(tmp_path)], env={"COLUMNS": "80"})
    assert result.exit_code == 0, result.output
    assert len(result.output.splitlines()) < 10
    assert "epoch 0–4,999: in each of 5,000 epochs: 100 samples, each exactly once" in result.output
    answer = json.loads(CliRunner().invoke(app, ["d", "-s", str(tmp_path), "--json"]).output)
    assert [(r["epoch"], r["last_epoch"]) for r in answer["epochs"]] == [(0, 4_999), (5_000, 5_000)]
    one = CliRunner().invoke(app, ["d", "-s", str(tmp_path), "--epoch", "1234", "--json"])
    assert json.loads(one.output)["epochs"][0]["epoch"] == 1_234


def test_the_audit_of_manifests_follows_the_records_own_links(tmp_path: Path) -> None:
    """Two saves overlapped: both continue the first, whatever the manifests call their parent."""
    chain = LedgerChain()
    record = RankRecord(dataset="d", epoch=0, total=100, rank=0)
    publish(tmp_path, "a", parent=None, sequence=1, data=chain.commit([record.with_span(0, 30)], "a"))
    publish(tmp_path, "b", parent="a", sequence=2, data=chain.commit([record.with_span(30, 60)], "b"))
    chain.confirm("b")
    last = replace(record, closed=True).with_span(60, 100)
    publish(tmp_path, "c", parent="b", sequence=3, data=chain.commit([last], "c"))
    report = audit(tmp_path, "d")
    assert report.exact, report.reason
    assert (report.commits, report.abandoned) == (("b", "c"), ())
