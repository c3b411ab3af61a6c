"""Everything that version 0.1 wrote is read by this one, and a newer version's files are refused with what to do."""

from __future__ import annotations

import json
import sqlite3
import tarfile
import warnings
from collections.abc import Callable
from contextlib import closing
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import checkpoint as dcp

import strata
from strata.checkpoint.catalog import manifest as manifests
from strata.checkpoint.dcp import StrataStorageReader
from strata.checkpoint.errors import NewerFormat
from strata.coordinator.engine import Engine, SystemClock
from strata.coordinator.journal import codec
from strata.coordinator.journal.protocol import JournalError
from strata.coordinator.journal.sqlite import SqliteJournal, read_story
from strata.coordinator.logs.archive import LogArchive, LogFilter
from strata.core.cluster import Cluster
from strata.core.messages import CheckpointId, JobId, WorkerId
from strata.data.tokens.errors import InvalidIndex
from strata.data.tokens.format import IndexHeader
from tests.support import unpack

TESTDATA = Path(__file__).parent / "testdata"
FORMATS = TESTDATA / "event_formats.json"


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    with tarfile.open(TESTDATA / "0.1/corpus.tar.xz") as tar:
        unpack(tar, tmp_path / "0.1")
    return tmp_path / "0.1"


# --- the journal --------------------------------------------------------------------------------------------------


def replayed(folder: Path) -> Cluster:
    with closing(SqliteJournal(folder, reserve_bytes=4096)) as journal:
        engine = Engine(Cluster(), journal, SystemClock())
        engine.replay()
    return engine.cluster


def test_the_journal_of_0_1_leads_to_its_state(corpus: Path) -> None:
    cluster = replayed(corpus)
    assert list(cluster.membership.members) == [WorkerId("worker-2")]
    assert cluster.membership.incarnation == 2
    records = cluster.checkpoints.records
    assert {name: (r.status, r.removed) for name, r in records.items()} == {
        "c-1": ("completed", True),
        "c-2": ("completed", False),
        "c-3": ("failed", False),
    }
    assert cluster.checkpoints.latest(JobId("default")) == records[CheckpointId("c-2")]
    assert cluster.datasets.specs.keys() == {"numbers"}
    assert [task.spec.name for task in cluster.tasks.tasks.values()] == ["first"]
    assert len(cluster.recoveries.records) == 1
    assert cluster.values.durable["rendezvous"].body == b"state"
    assert {key[1:] for key, _ in cluster.barriers.ended} == {("start", 1), ("start", 2)}


def test_it_is_a_journal_of_this_version_from_then_on(corpus: Path) -> None:
    """So that 0.1, which takes any other format than its own for another version's, refuses it."""
    replayed(corpus)
    with closing(sqlite3.connect(corpus / "journal.sqlite")) as db:
        meta = dict(db.execute("SELECT key, value FROM meta").fetchall())
    assert (meta["schema"], meta["written_by"]) == (str(codec.FORMAT), strata.__version__)
    assert replayed(corpus).tasks.tasks


def test_its_story_is_shown_before_it_is_taken_over(corpus: Path) -> None:
    kinds = [codec.kind_of(entry.event) for entry in read_story(corpus)]
    assert kinds.count("WorkerJoined") == 2


def test_its_log_is_kept(corpus: Path) -> None:
    archive = LogArchive(corpus / "logs.sqlite", limit_bytes=1 << 20, keep_s=1e9)
    try:
        found = archive.search(10, LogFilter(), below=1 << 62)
    finally:
        archive.close()
    assert any("serving" in entry.message for entry in found)


# --- checkpoints --------------------------------------------------------------------------------------------------


def test_bytes_images_and_shards_of_0_1_are_loaded(corpus: Path) -> None:
    with closing(strata.CheckpointManager(str(corpus / "bytes"))) as manager:
        latest = manager.get_latest()
        assert latest is not None
        assert (latest.step, latest.epoch) == (7, 1)
        assert manager.load() == b"as they are"
    with closing(strata.CheckpointManager(str(corpus / "image"))) as manager:
        state: Any = manager.load()
    assert state["step"] == 9
    assert state["names"] == ["a", "b"]
    assert torch.equal(state["model"]["w"], torch.arange(12.0).reshape(3, 4))
    assert torch.equal(state["model"]["half"], torch.ones(3, dtype=torch.bfloat16))
    into: dict[str, Any] = {"w": torch.zeros(20), "n": 0}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load(into, storage_reader=StrataStorageReader(str(corpus / "sharded")))
    assert torch.equal(into["w"], torch.arange(20.0))
    assert into["n"] == 5


def test_a_run_of_0_1_is_audited_and_continued(corpus: Path) -> None:
    assert strata.audit(str(corpus / "run"), "sums", epoch=0).reason == "96 samples, each exactly once"
    with closing(strata.CheckpointManager(str(corpus / "run"))) as manager:
        state: Any = manager.load()
    weights = json.loads((corpus / "weights.json").read_text())
    assert [p.tolist() for p in state["model_state_dict"].values()] == weights

    inputs = torch.randn(96, 3)
    dataset = torch.utils.data.TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = strata.ElasticLoader(
        dataset, strata.ElasticSampler(len(dataset), global_batch_size=8, dataset="sums")
    )
    steps = []
    with strata.elastic(
        model=model, optimizer=optimizer, data=loader, checkpoints=str(corpus / "run"), epochs=2
    ) as job:
        assert [p.tolist() for p in model.parameters()] == weights
        for batch in job:
            steps.append(batch.step.epoch)
            optimizer.step()
    assert steps == [1] * 12
    assert strata.audit(str(corpus / "run"), "sums", epoch=1).reason == "96 samples, each exactly once"


def test_a_checkpoint_of_the_harness_is_loaded(corpus: Path) -> None:
    from elastic_harness.checkpoint import CheckpointConfig, CheckpointManager, CheckpointTier

    manager = CheckpointManager(CheckpointConfig(nvme_path=str(corpus / "harness"), async_save=False))
    state = manager.load_checkpoint(tier=CheckpointTier.NVME)
    assert state is not None
    assert state.step == 3
    assert all(torch.all(value == 0.5) for value in state.model_state_dict.values())


def test_a_token_index_of_0_1_is_read(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from elastic_harness.data.index_builder import TokenIndexFile

    monkeypatch.chdir(corpus)
    index = TokenIndexFile("text.index")
    assert index.num_files == 1
    assert index.find_position(index.total_tokens - 1)[0] == 0


# --- what is newer than this version ------------------------------------------------------------------------------


def newer_journal(corpus: Path) -> None:
    replayed(corpus)
    with closing(sqlite3.connect(corpus / "journal.sqlite")) as db, db:
        db.execute("UPDATE meta SET value = ? WHERE key = 'schema'", (str(codec.FORMAT + 1),))
        db.execute("UPDATE meta SET value = '9.8.7' WHERE key = 'written_by'")


@pytest.mark.parametrize("read", [replayed, lambda folder: list(read_story(folder))], ids=["serve", "replay"])
def test_a_journal_of_a_newer_version_is_refused_and_left_alone(
    corpus: Path, read: Callable[[Path], object]
) -> None:
    newer_journal(corpus)
    with closing(sqlite3.connect(corpus / "journal.sqlite")) as db:
        before = "\n".join(db.iterdump())
    with pytest.raises(JournalError) as refused:
        read(corpus)
    text = str(refused.value)
    assert f"has format {codec.FORMAT + 1}, written by Strata 9.8.7" in text
    assert f"this is Strata {strata.__version__}" in text
    assert "strata restore" in text
    with closing(sqlite3.connect(corpus / "journal.sqlite")) as db:
        assert "\n".join(db.iterdump()) == before


def test_a_checkpoint_of_a_newer_version_is_refused_rather_than_fallen_back_behind(
    corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifests, "READABLE", (1,))
    with pytest.raises(NewerFormat, match="manifest schema 2, written by a newer Strata") as refused:
        strata.CheckpointManager(str(corpus / "image")).load()
    assert "Upgrade Strata here" in refused.value.hint


def test_a_token_index_of_a_newer_version_is_refused(corpus: Path) -> None:
    data = bytearray((corpus / "text.index").read_bytes())
    data[8:12] = (99).to_bytes(4, "little")
    with pytest.raises(InvalidIndex, match=r"format version 99, written by a newer Strata.*Upgrade Strata"):
        IndexHeader.from_bytes(bytes(data))


# --- formats of events --------------------------------------------------------------------------------------------


def events() -> dict[str, list[str]]:
    return {name: [each.name for each in fields(kind)] for name, kind in sorted(codec.KINDS.items())}


def test_a_change_of_the_events_is_a_new_format_of_the_journal() -> None:
    """Of a format that is not released yet, write the file again: python -m tests.test_corpus."""
    formats = json.loads(FORMATS.read_text())
    assert max(map(int, formats)) == codec.FORMAT
    assert formats[str(codec.FORMAT)] == events(), (
        "grow codec.FORMAT, or update tests/testdata/event_formats.json"
    )


def test_no_format_has_lost_a_kind_or_a_field_of_an_earlier_one() -> None:
    formats = json.loads(FORMATS.read_text())
    for earlier, later in zip(sorted(formats, key=int), sorted(formats, key=int)[1:], strict=False):
        for kind, names in formats[earlier].items():
            assert set(names) <= set(formats[later][kind]), kind


if __name__ == "__main__":
    known = json.loads(FORMATS.read_text()) if FORMATS.exists() else {}
    FORMATS.write_text(json.dumps({**known, str(codec.FORMAT): events()}, indent=1) + "\n")
