"""`strata replay` tells what happened, beside a running coordinator and after it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from strata import TrainingOrchestrator
from strata.rpc import coordinator_pb2 as pb
from tests.cli.running import strata
from tests.service.clients import stub
from tests.support import Coordinator


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Coordinator]:
    server = Coordinator(tmp_path_factory.mktemp("history") / "data").start()
    with TrainingOrchestrator(server.address) as worker:
        worker.register_worker("worker-01", hostname="host-a")
        worker.register_dataset("images", "/data/images", "parquet", 1_000, 100)
        worker.notify_checkpoint("c1", 5, path="/ckpt/1", tiers=["local"])
        worker.notify_checkpoint("c2", 6, status="failed", reason="the disk was full")
        worker.barrier("epoch", 1, participants=1)
        worker.deregister("all done")
    with stub(server.address) as calls:
        for _ in range(20):
            calls.RegisterWorker(pb.RegisterWorkerRequest(worker_id="visitor"))
            calls.DeregisterWorker(pb.DeregisterWorkerRequest(worker_id="visitor"))
    yield server
    server.stop()


STORY = [
    ("WorkerJoined", "worker-01 joined on host-a"),
    ("DatasetRegistered", "dataset images registered: 1,000 samples in 10 shards"),
    ("ShardsMoved", "shard plan 1 of images, epoch 0"),
    ("CheckpointCompleted", "checkpoint at step 5 completed: saved to local"),
    ("CheckpointFailed", "checkpoint at step 6 failed: the disk was full"),
    ("BarrierReleased", "barrier epoch released at step 1: all 1 arrived"),
    ("WorkerLeft", "worker-01 left: all done"),
]


def test_replay_is_in_order_beside_a_running_coordinator(history: Coordinator) -> None:
    ran = strata("replay", "--data-dir", str(history.data_dir))
    assert (ran.code, ran.err) == (0, "")
    places = [
        next(i for i, line in enumerate(ran.out.splitlines()) if all(w in line for w in x)) for x in STORY
    ]
    assert places == sorted(places)


def test_json_is_one_event_a_line(history: Coordinator) -> None:
    ran = strata("replay", "--data-dir", str(history.data_dir), "--json")
    entries = [json.loads(line) for line in ran.out.splitlines()]
    assert [e["seq"] for e in entries] == list(range(1, len(entries) + 1))
    assert [kind for kind, _ in STORY] == [e["kind"] for e in entries if e["kind"] in dict(STORY)][
        : len(STORY)
    ]
    assert all(e["event"]["reason"] and e["event"]["at_s"] > 0 for e in entries)


def test_story_can_be_narrowed_down(history: Coordinator) -> None:
    folder = str(history.data_dir)
    ran = strata("replay", "--data-dir", folder, "--kind", "WorkerJoined", "--kind", "WorkerLeft", "--json")
    assert [json.loads(line)["kind"] for line in ran.out.splitlines()] == ["WorkerJoined", "WorkerLeft"] * 21
    assert len(strata("replay", "--data-dir", folder, "--last", "2").out.splitlines()) == 2
    ran = strata("replay", "--data-dir", folder, "--kind", "WorkerJoint")
    assert ran.code == 2
    assert "WorkerJoined" in ran.err, "the nearest kind is suggested"


def test_history_is_still_there_after_a_clean_stop_and_a_start_from_the_snapshot(
    history: Coordinator,
) -> None:
    before = strata("replay", "--data-dir", str(history.data_dir), "--json").out
    history.stop()
    assert "Traceback" not in "".join(history.output)
    history.start()
    assert history.get("/api/datasets")[0]["id"] == "images"
    assert [c["id"] for c in history.get("/api/checkpoints")] == ["c2", "c1"]
    after = strata("replay", "--data-dir", str(history.data_dir), "--json").out
    assert after.startswith(before)
    replayed = next(line for line in history.output[::-1] if "events replayed" in line)
    count = int(replayed.rpartition("(")[2].split()[0])
    assert count < len(before.splitlines()), "the snapshot is shorter than the history"


def test_no_journal_is_a_sentence(tmp_path: Path) -> None:
    for place in (tmp_path, tmp_path / "nowhere"):
        ran = strata("replay", "--data-dir", str(place))
        assert ran.code == 1
        assert f"There is no journal in {place}" in ran.err
        assert "--data-dir" in ran.err
    (tmp_path / "journal.sqlite").write_text("garbage, and more garbage than a header needs" * 50)
    ran = strata("replay", "--data-dir", str(tmp_path))
    assert ran.code == 1
    assert "cannot be read" in ran.err
