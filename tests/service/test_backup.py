"""A backup of a running coordinator restores what it had acknowledged, and nothing that is not intact is restored."""

from __future__ import annotations

import io
import json
import sqlite3
import stat
import tarfile
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import grpc
import pytest

from strata import TrainingOrchestrator
from strata.checkpoint.manager import Author, CheckpointManager, Memory
from strata.coordinator.backup import BackupError, back_up, restore
from strata.coordinator.engine import Engine, SystemClock
from strata.coordinator.journal.sqlite import SqliteJournal
from strata.core.cluster import Cluster
from strata.core.messages import ValueSwapped
from strata.rpc import coordinator_pb2 as pb
from tests.cli.running import strata
from tests.service.clients import refusal, stub
from tests.support import Coordinator


def state_in(folder: Path) -> Cluster:
    cluster = Cluster()
    with closing(SqliteJournal(folder)) as journal:
        Engine(cluster, journal, SystemClock()).replay()
    return cluster


def written(folder: Path) -> Path:
    with closing(SqliteJournal(folder)) as journal:
        journal.append([ValueSwapped(key="k", body=b"v" * 5_000, version=7, reason="swapped", at_s=1.0)])
    (folder / "tokens.json").write_text('{"tokens": []}')
    (folder / "recipes").mkdir()
    (folder / "recipes" / "mine.yaml").write_text("name: mine\n")
    return folder


def register(calls: Any, dataset_id: str) -> None:
    calls.RegisterDataset(
        pb.RegisterDatasetRequest(
            dataset_id=dataset_id, path="/d", format="jsonl", total_samples=100, shard_size=10
        )
    )


def join(calls: Any) -> Any:
    return calls.RegisterWorker(pb.RegisterWorkerRequest(worker_id="w", hostname="h", port=1))


def test_running_coordinator_is_backed_up_with_all_that_it_acknowledged(
    coordinator: Coordinator, tmp_path: Path
) -> None:
    file, again = tmp_path / "b.tar.gz", tmp_path / "again"
    with stub(coordinator.address) as calls:
        for number in range(20):
            register(calls, f"d{number}")
        joined = join(calls)
        ran = strata("backup", str(file), "--data-dir", str(coordinator.data_dir))
        assert ran.code == 0, ran.err
        register(calls, "later")
        newer = join(calls)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600

    ran = strata("restore", str(file), "--data-dir", str(again))
    assert ran.code == 0, ran.err
    restored = Coordinator(again).start()
    try:
        with stub(restored.address) as calls:
            known = {dataset.dataset_id for dataset in calls.ListDatasets(pb.ListDatasetsRequest()).datasets}
            assert known == {f"d{number}" for number in range(20)}
            # Who registered after the backup holds a number that this coordinator will never give out.
            beat = pb.HeartbeatRequest(worker_id="w", incarnation=newer.incarnation)
            assert refusal(calls.Heartbeat, beat)[0] == grpc.StatusCode.FAILED_PRECONDITION
            back = join(calls)
            assert back.incarnation > newer.incarnation > joined.incarnation
            assert back.generation > newer.generation
    finally:
        restored.stop()


def test_restored_values_get_versions_that_nobody_has_seen(tmp_path: Path) -> None:
    back_up(written(tmp_path / "data"), tmp_path / "b")
    restore(tmp_path / "b", tmp_path / "again")
    value = state_in(tmp_path / "again").values.get("k")
    assert value is not None
    assert value.body == b"v" * 5_000
    assert value.version > 1_000_000
    assert (tmp_path / "again" / "recipes" / "mine.yaml").read_text() == "name: mine\n"
    assert (tmp_path / "again" / "tokens.json").read_text() == '{"tokens": []}'


def test_backup_without_history_leaves_log_and_metrics_out(tmp_path: Path) -> None:
    data_dir = written(tmp_path / "data")
    for name in ("logs.sqlite", "metrics.sqlite"):
        with closing(sqlite3.connect(data_dir / name)) as db:
            db.execute("CREATE TABLE t(x)")
    everything = back_up(data_dir, tmp_path / "all")
    state = back_up(data_dir, tmp_path / "state", history=False)
    left_out = {file.name for file in everything.files} - {file.name for file in state.files}
    assert left_out == {"logs.sqlite", "metrics.sqlite"}


def rewritten(backup: Path, change: Callable[[str, bytes], tuple[str, bytes]]) -> None:
    with tarfile.open(backup) as archive:
        members = [(m.name, archive.extractfile(m).read()) for m in archive.getmembers()]  # type: ignore[union-attr]
    with tarfile.open(backup, "w:gz") as archive:
        for name, data in (change(*member) for member in members):
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))


def flip(name: str, data: bytes) -> tuple[str, bytes]:
    return name, data[:-1] + bytes([data[-1] ^ 1]) if name == "journal.sqlite" else data


def newer_format(name: str, data: bytes) -> tuple[str, bytes]:
    return name, json.dumps({**json.loads(data), "format": 99}).encode() if name == "backup.json" else data


def path_outside(name: str, data: bytes) -> tuple[str, bytes]:
    return name.replace("tokens.json", "../out"), data.replace(b"tokens.json", b"../out")


def no_journal(name: str, data: bytes) -> tuple[str, bytes]:
    return name.replace("journal.sqlite", "other"), data.replace(b"journal.sqlite", b"other")


def nested(name: str, data: bytes) -> tuple[str, bytes]:
    return name, b"[" * 100_000 if name == "backup.json" else data


DAMAGES: dict[str, Callable[[Path], object]] = {
    "flipped bit": lambda path: rewritten(path, flip),
    "newer format": lambda path: rewritten(path, newer_format),
    "path outside": lambda path: rewritten(path, path_outside),
    "no journal": lambda path: rewritten(path, no_journal),
    "nested": lambda path: rewritten(path, nested),
    "cut off": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "garbage": lambda path: path.write_bytes(b"\x1f\x8b" + b"no backup" * 100),
    "empty": lambda path: path.write_bytes(b""),
    "missing": lambda path: path.unlink(),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_backup_is_refused_and_leaves_nothing(tmp_path: Path, damage: str) -> None:
    back_up(written(tmp_path / "data"), tmp_path / "b")
    DAMAGES[damage](tmp_path / "b")
    before = sorted(tmp_path.iterdir())
    with pytest.raises(BackupError) as caught:
        restore(tmp_path / "b", tmp_path / "again")
    assert caught.value.hint
    assert sorted(tmp_path.iterdir()) == before


def test_nothing_that_exists_is_overwritten(tmp_path: Path) -> None:
    data_dir = written(tmp_path / "data")
    back_up(data_dir, tmp_path / "b")
    with pytest.raises(BackupError, match="exists already"):
        back_up(data_dir, tmp_path / "b")
    with pytest.raises(BackupError, match="is not empty"):
        restore(tmp_path / "b", data_dir)
    with pytest.raises(BackupError, match="no journal"):
        back_up(tmp_path / "nowhere", tmp_path / "c")
    with pytest.raises(BackupError, match="could not be written"):
        back_up(data_dir, tmp_path / "nowhere" / "c")
    (tmp_path / "again").mkdir()
    restore(tmp_path / "b", tmp_path / "again")
    assert "k" in state_in(tmp_path / "again").values.durable


def saved(folder: Path, *, generation: int, steps: Sequence[int]) -> list[str]:
    author = Author(run="run-of-job", generation=generation, worker="w")
    with CheckpointManager(folder, memory=Memory(job=f"test-{folder.parent.name}"), author=author) as manager:
        return [manager.save(b"weights", step=step).result(60).checkpoint_id for step in steps]


def test_list_of_checkpoints_is_rebuilt_from_their_manifests(
    coordinator: Coordinator, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    ids = [*saved(folder, generation=1, steps=[10, 20]), *saved(folder, generation=2, steps=[30])]
    ran = strata("rebuild", str(folder), "--job", "job", "--api", coordinator.url)
    assert ran.code == 0, ran.err
    assert "3 checkpoints, up to step 30; 3 were added" in ran.out
    shown = coordinator.get("/api/checkpoints")
    assert {each["id"]: each["status"] for each in shown} == dict.fromkeys(ids, "completed")
    with stub(coordinator.address) as calls:
        latest = calls.GetLatestCheckpoint(pb.GetLatestCheckpointRequest(job_id="job"))
    assert latest.latest_checkpoint.step == 30

    assert "0 were added" in strata("rebuild", str(folder), "--job", "job", "--api", coordinator.url).out
    assert coordinator.get("/api/checkpoints") == shown


def test_rebuilding_is_refused_beside_a_live_job_and_without_checkpoints(
    coordinator: Coordinator, tmp_path: Path
) -> None:
    saved(tmp_path / "run", generation=1, steps=[1])
    with TrainingOrchestrator(coordinator.address, job_id="job") as worker:
        worker.register_worker("w")
        ran = strata("rebuild", str(tmp_path / "run"), "--job", "job", "--api", coordinator.url)
        assert ran.code == 1
        assert "is running (w)" in ran.err
    (tmp_path / "empty").mkdir()
    ran = strata("rebuild", str(tmp_path / "empty"), "--job", "job", "--api", coordinator.url)
    assert ran.code == 1
    assert "no checkpoints" in ran.err
