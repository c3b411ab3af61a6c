"""What an agent finds in memory of its dead workers, and what becomes of it at real destinations."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from strata.checkpoint import Author, CheckpointManager, Memory
from strata.checkpoint.catalog.listing import Catalog
from strata.checkpoint.catalog.runs import RunClaim, open_run
from strata.checkpoint.copying.staging import MARK_NAME, RECORD_NAME
from strata.checkpoint.finishing import Finished, Finisher, UploadRecord, images_of
from strata.checkpoint.locating import locate
from strata.checkpoint.verify import verify_store
from strata.stores import Store, open_store
from strata.stores.faulty import Fault, FaultyStore
from tests.checkpoint.states import small_state

AGENT = "/run/agent/socket"


@pytest.fixture(autouse=True)
def memory_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "memory"
    root.mkdir()
    monkeypatch.setenv("STRATA_MEMORY_ROOT", str(root))
    return root


def die_after(
    stores: Sequence[Store], *steps: int, durable: int = 0, root: Path | None = None, agent: str = AGENT
) -> str:
    """A start of a run that saved one step durably and these in memory, and has died: the run's id."""
    run = open_run(stores).run
    claim = RunClaim.take(stores, launch="launch")
    record = UploadRecord(
        agent=agent, job="job", worker="w0", run=run, destinations=tuple(store.url for store in stores)
    )
    manager = CheckpointManager(
        stores,
        memory=Memory(job=f"run-{run}", record=record.encode(), root=root),
        author=Author(run=run, generation=claim.generation),
        admit=claim.admit,
    )
    if durable:
        manager.save(small_state(durable), step=durable).result(60)
    for step in steps:
        manager.save(small_state(step), step=step, tiers=["MEMORY"]).result(60)
    manager.abandon()
    claim.release(ended=False)
    return run


def steps_in(store: Store) -> list[int]:
    return sorted(entry.manifest.step for entry in Catalog(store).list().entries)


def finish(**options: Any) -> Finished:
    [finished] = Finisher(AGENT, **options).run()
    return finished


def test_newest_snapshot_becomes_the_workers_own_checkpoint(tmp_path: Path, memory_root: Path) -> None:
    stores = [open_store(tmp_path / "near"), open_store(tmp_path / "far")]
    die_after(stores, 12, 14, durable=8)
    image = images_of(AGENT)[0]
    record = next(memory_root.rglob(RECORD_NAME))
    assert record.stat().st_mode & 0o077 == 0
    finished = finish()
    assert [(o.result, o.step, o.steps_saved) for o in finished.outcomes] == [("saved", 14, 6)] * 2
    for store in stores:
        assert steps_in(store) == [8, 14]
        entries = Catalog(store).list().entries
        assert all(verified.is_intact for verified in verify_store(store, entries))
        saved = entries[0].manifest
        left = image.manifest
        assert (saved.checkpoint_id, saved.order, saved.lineage) == (
            left.checkpoint_id,
            left.order,
            left.lineage,
        )
        assert (saved.parent, saved.durable_parent, saved.run) == (left.parent, left.durable_parent, left.run)
        assert saved.digest == left.digest
    manager = CheckpointManager(stores[1], memory=Memory(job="another"))
    assert manager.load()["step"] == small_state(14)["step"]
    manager.close()
    assert images_of(AGENT), "what is in memory stays there for workers that come back"
    assert {o.result for o in finish().outcomes} == {"known"}


def test_checkpoint_whose_payload_was_deleted_is_not_taken_for_saved(tmp_path: Path) -> None:
    near, far = (open_store(tmp_path / name) for name in ("near", "far"))
    die_after([near, far], durable=14)
    (entry,) = Catalog(near).list().entries
    near.delete(entry.manifest.parts[0].key)
    finished = finish()
    assert {o.destination: o.result for o in finished.outcomes} == {near.url: "saved", far.url: "known"}
    manager = CheckpointManager(near, memory=Memory(job="another"))
    assert manager.load()["step"] == small_state(14)["step"]


def test_images_of_other_agents_and_without_a_record_are_left_alone(
    tmp_path: Path, memory_root: Path
) -> None:
    die_after([open_store(tmp_path / "one")], 2, agent="/another/socket")
    assert Finisher(AGENT).run() == []
    next(memory_root.rglob(RECORD_NAME)).write_text('{"schema": 99}')
    assert Finisher("/another/socket").run() == []


def test_newer_start_of_the_run_wins(tmp_path: Path) -> None:
    store = open_store(tmp_path / "run")
    die_after([store], 4, durable=2)
    RunClaim.take([store], launch="launch").release(ended=False)
    [outcome] = finish().outcomes
    assert outcome.result == "refused"
    assert outcome.reason == "generation 2 of the run has started, this is generation 1"
    assert steps_in(store) == [2]


def test_newer_start_wins_while_the_snapshot_is_uploaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It claims the run when all bytes are there and the manifest is not."""
    real = open_store(tmp_path / "run")
    die_after([real], 4, durable=2)

    def take_over(operation: Any, _: object) -> Fault | None:
        if operation.name == "write" and "-of-" in operation.key and operation.key.endswith(".pt"):
            RunClaim.take([real], launch="launch").release(ended=False)
        return None

    monkeypatch.setattr(
        "strata.checkpoint.finishing.open_store", lambda url: FaultyStore(open_store(url), choose=take_over)
    )
    [outcome] = finish().outcomes
    assert outcome.result == "refused"
    assert steps_in(real) == [2]
    assert not [blob.key for blob in real.list() if "-of-" in blob.key], "its payload is removed again"


def test_changed_image_makes_way_for_the_one_before_it(tmp_path: Path) -> None:
    store = open_store(tmp_path / "run")
    die_after([store], 4, 6, durable=2)
    path = images_of(AGENT)[0].snapshot.path
    with path.open("r+b") as file:
        file.seek(-5000, os.SEEK_END)
        byte = file.read(1)
        file.seek(-5000, os.SEEK_END)
        file.write(bytes([byte[0] ^ 1]))
    assert [(o.result, o.step) for o in finish().outcomes] == [("saved", 4)]
    assert steps_in(store) == [2, 4]


def test_workers_that_come_back_find_their_image_and_nothing_is_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(tmp_path / "run")
    run = die_after([store], 4, durable=2)
    finisher = Finisher(AGENT)
    held, going = threading.Event(), threading.Event()

    def hold(operation: Any, _: object) -> Fault | None:
        if operation.name == "write" and "-of-" in operation.key and operation.key.endswith(".pt"):
            held.set()
            assert going.wait(60)
        return None

    monkeypatch.setattr(
        "strata.checkpoint.finishing.open_store", lambda url: FaultyStore(open_store(url), choose=hold)
    )
    found: list[Finished] = []
    thread = threading.Thread(target=lambda: found.extend(finisher.run()))
    thread.start()
    assert held.wait(60)
    finisher.give_up("workers are started again")
    manager = CheckpointManager(store, memory=Memory(job=f"run-{run}"), author=Author(run=run))
    back = [info.step for info in manager.snapshots()]  # While the upload is under way.
    going.set()
    thread.join(60)
    assert back == [4, 2]
    assert [o.result for o in found[0].outcomes] == ["given up"]
    assert steps_in(store) == [2]
    manager.close()


def test_destination_that_is_away_is_said_and_the_other_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stores = [open_store(tmp_path / "near"), open_store(tmp_path / "far")]
    die_after(stores, 4, durable=2)

    def opened(url: str) -> Store:
        real = open_store(url)
        is_far = url.rstrip("/").endswith("far")
        return FaultyStore(real, choose=lambda *_: Fault.REFUSED if is_far else None)

    monkeypatch.setattr("strata.checkpoint.finishing.open_store", opened)
    near, far = finish(patience_s=1.0).outcomes
    assert (near.result, far.result) == ("saved", "failed")
    assert (steps_in(stores[0]), steps_in(stores[1])) == ([2, 4], [2])


def test_copies_are_located_and_what_would_be_lost_is_known(tmp_path: Path) -> None:
    store = open_store(tmp_path / "run")
    die_after([store], 4, durable=2)
    found = locate([store], step=4)
    assert [each.kind for each in found.copies] == ["memory"]
    assert found.safe_in == ("process",)
    assert [loss.text for loss in found.losses][:2] == ["0 steps", "everything, no copy off the machine"]
    assert [each.verified for each in locate([store], step=4, verify=True).copies] == [True]
    path = Path(found.copies[0].where)
    path.write_bytes(path.read_bytes()[:-64] + bytes(64))
    assert [each.verified for each in locate([store], step=4, verify=True).copies] == [False]
    assert locate([store], step=4, verify=True).safe_in == ()
    assert [each.kind for each in locate([store], step=2).copies] == ["memory", "disk"]
    assert (path.parent / MARK_NAME).exists()
