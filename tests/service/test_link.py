"""The job's link: what it says is reflected in the end, and a process that is one too many falls silent."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from strata import TrainingOrchestrator
from strata.checkpoint.catalog.manifest import CheckpointId
from strata.checkpoint.events import CheckpointInfo, Started
from strata.coordinator.journal.sqlite import read_story
from strata.core.messages import WorkerJoined
from strata.rpc import coordinator_pb2 as pb
from strata.training.link import NOTICES_KEPT, CoordinatorLink, open_link
from strata.worker.errors import CoordinatorRefused, StaleWorker
from tests.service.clients import refusal, stub
from tests.support import Coordinator, eventually

PATIENCE_S = 60.0

Links = Callable[..., CoordinatorLink]


@pytest.fixture
def links(shared: Coordinator) -> Iterator[Links]:
    """Links to the shared coordinator, or to another; they are closed in the end."""
    made: list[CoordinatorLink] = []

    def make(*, job: str, coordinator: Coordinator = shared, rank: int = 0, **named: Any) -> CoordinatorLink:
        named = {"run_id": f"run of {job}", "generation": 1, **named}
        link = open_link(coordinator.address, job=job, rank=rank, metadata={}, **named)
        assert link is not None
        made.append(link)
        return link

    yield make
    for link in made:
        link.close(leave=False)


@pytest.fixture
def mortal(tmp_path: Path) -> Iterator[Coordinator]:
    server = Coordinator(tmp_path / "coordinator", env={"STRATA_HEARTBEAT_TIMEOUT": "600"}).start()
    yield server
    server.stop()


def started(step: int, *, job: str) -> Started:
    return Started(
        checkpoint_id=CheckpointId(f"{job}-{step}"),
        step=step,
        epoch=0,
        size_bytes=10,
        path=f"/c/{step}",
        tiers=("MEMORY", "LOCAL"),
    )


def info(step: int, *, job: str, generation: int = 1) -> CheckpointInfo:
    return CheckpointInfo(
        checkpoint_id=CheckpointId(f"{job}-{step}"),
        step=step,
        epoch=0,
        path=f"/c/{step}",
        size_bytes=10,
        created_at=float(step),
        digest=f"xxh3:{step}",
        tiers=("MEMORY", "LOCAL"),
        generation=generation,
    )


def save(link: CoordinatorLink, step: int, *, job: str) -> None:
    link.on_started(started(step, job=job))
    link.on_completed(started(step, job=job), info(step, job=job), seconds=0.1)


def remove(link: CoordinatorLink, step: int, *, job: str) -> None:
    link.on_removed(CheckpointId(f"{job}-{step}"), step=step, epoch=0, path=f"/c/{step}", reason="keep 2")


def completed(coordinator: Coordinator, job: str) -> list[int]:
    """The steps that the registry shows as completed, newest first."""
    shown = coordinator.get("/api/checkpoints")
    return [c["step"] for c in shown if c["job_id"] == job and c["status"] == "completed"]


def until_completed(coordinator: Coordinator, job: str, steps: set[int]) -> None:
    eventually(
        lambda: set(completed(coordinator, job)) == steps,
        within_s=PATIENCE_S,
        what=lambda: f"{steps}, not {completed(coordinator, job)}",
    )


def worker(coordinator: Coordinator, name: str) -> dict[str, Any] | None:
    return next((w for w in coordinator.get("/api/workers") if w["id"] == name), None)


def until_there(coordinator: Coordinator, name: str) -> dict[str, Any]:
    found: dict[str, Any] = eventually(
        lambda: w if (w := worker(coordinator, name)) and w["connected"] else None, within_s=PATIENCE_S
    )
    return found


def joins(coordinator: Coordinator, job: str) -> int:
    """How often workers of a job are in the journal."""
    story = (entry.event for entry in read_story(coordinator.data_dir))
    return sum(1 for e in story if isinstance(e, WorkerJoined) and e.spec.job_id == job)


# --- the registry follows -------------------------------------------------------------------------------------


def test_what_retention_removes_leaves_the_registry(shared: Coordinator, links: Links) -> None:
    link = links(job="tidy")
    link.reconcile([])
    for step in range(12):
        save(link, step, job="tidy")
        if step >= 2:
            remove(link, step - 2, job="tidy")
    until_completed(shared, "tidy", {10, 11})
    record = next(c for c in shared.get("/api/checkpoints") if c["id"] == "tidy-11")
    assert (record["run_id"], record["generation"]) == ("run of tidy", 1)


def test_a_save_that_a_newer_one_overtook_does_not_become_the_newest(
    shared: Coordinator, links: Links
) -> None:
    link = links(job="overtaken", worker_id="overtaken-0")
    link.reconcile([])
    for step in (
        1,
        3,
        2,
    ):  # The second was still being uploaded when the third was skipped by that destination.
        save(link, step, job="overtaken")
    until_completed(shared, "overtaken", {1, 2, 3})
    latest = link._orchestrator.latest_checkpoint()
    assert latest is not None
    assert latest.step == 3


def test_a_job_that_starts_reports_what_exists_and_the_rest_is_removed(
    shared: Coordinator, links: Links
) -> None:
    before = links(job="again")
    before.on_started(started(9, job="again"))  # Never completed: its process is killed.
    for step in range(4):
        save(before, step, job="again")
    until_completed(shared, "again", {0, 1, 2, 3})
    before.close(leave=False)
    link = links(job="again", generation=2)
    existing = [info(step, job="again") for step in (2, 3, 4)]
    link.reconcile([i.checkpoint_id for i in existing], existing)
    until_completed(shared, "again", {2, 3, 4})
    failed = next(c for c in shared.get("/api/checkpoints") if c["id"] == "again-9")
    assert (failed["status"], failed["reason"]) == (
        "failed",
        "its process ended before the checkpoint completed",
    )


def test_another_jobs_and_another_runs_checkpoints_are_left_alone(shared: Coordinator, links: Links) -> None:
    for job, run in (("mine", "run-1"), ("mine", "run-0"), ("yours", "run-1")):
        link = links(job=job, run_id=run)
        save(link, 1 if run == "run-1" else 2, job=f"{job}-{run}")
        started = f"{job}-{run}"

        def is_known(started: str = started) -> bool:
            return any(c["id"].startswith(started) for c in shared.get("/api/checkpoints"))

        eventually(is_known, within_s=PATIENCE_S)
        link.close(leave=True)
    link = links(job="mine", run_id="run-1")
    link.reconcile([])
    until_completed(shared, "mine", {2})
    assert completed(shared, "yours") == [1]


def test_notices_that_were_dropped_in_an_outage_are_made_up_for(mortal: Coordinator, links: Links) -> None:
    link = links(job="outage", coordinator=mortal)
    link.reconcile([])
    for step in range(3):
        save(link, step, job="outage")
    until_completed(mortal, "outage", {0, 1, 2})
    mortal.kill()
    last = NOTICES_KEPT  # Three notices each: most of them are dropped, the first removals among them.
    for step in range(3, last):
        save(link, step, job="outage")
        remove(link, step - 3, job="outage")
    mortal.start()
    until_completed(mortal, "outage", {last - 3, last - 2, last - 1})
    assert _latest(mortal, "outage") == last - 1


def test_a_coordinator_that_lost_its_memory_gets_all_of_it_again(mortal: Coordinator, links: Links) -> None:
    link = links(job="amnesia", coordinator=mortal, generation=7)
    old = [info(step, job="amnesia", generation=3) for step in (1, 2)]
    link.reconcile([i.checkpoint_id for i in old], old)
    save(link, 3, job="amnesia")
    until_completed(mortal, "amnesia", {1, 2, 3})
    mortal.kill()
    shutil.rmtree(mortal.data_dir)
    remove(link, 1, job="amnesia")
    save(link, 4, job="amnesia")
    mortal.start()
    until_completed(mortal, "amnesia", {2, 3, 4})
    assert _latest(mortal, "amnesia") == 4, "an index that is rebuilt keeps the order of what it lists"
    generations = {c["step"]: c["generation"] for c in mortal.get("/api/checkpoints")}
    assert generations == {2: 3, 3: 1, 4: 1}
    assert link.superseded is None


def test_a_notice_that_is_refused_as_stale_is_given_again(shared: Coordinator, links: Links) -> None:
    link = links(job="taken-for-dead")
    until_there(shared, "taken-for-dead-rank0")
    session = link._orchestrator._session
    asyncio.run_coroutine_threadsafe(session._end_session(), session._loop).result(PATIENCE_S)
    eventually(
        lambda: (worker(shared, "taken-for-dead-rank0") or {})["status"] == "failed", within_s=PATIENCE_S
    )
    save(link, 5, job="taken-for-dead")
    until_completed(shared, "taken-for-dead", {5})
    assert until_there(shared, "taken-for-dead-rank0")["status"] == "active"
    assert link.superseded is None


def _latest(coordinator: Coordinator, job: str) -> int:
    with stub(coordinator.address) as calls:
        answer = calls.GetLatestCheckpoint(pb.GetLatestCheckpointRequest(job_id=job), timeout=PATIENCE_S)
    return int(answer.resume_step)


# --- one too many ---------------------------------------------------------------------------------------------


def test_of_two_processes_under_one_name_one_learns_it_and_the_journal_stays_small(
    shared: Coordinator, links: Links
) -> None:
    first = links(job="twins")
    before = until_there(shared, "twins-rank0")["incarnation"]
    second = links(job="twins")
    reason = eventually(lambda: first.superseded, within_s=PATIENCE_S)
    assert "fenced" in reason
    # A registration that is answered late is repeated; once the second is connected, both have joined.
    eventually(lambda: until_there(shared, "twins-rank0")["incarnation"] > before, within_s=PATIENCE_S)
    both = joins(shared, "twins")
    ends_s = time.monotonic() + 2.0  # They used to fence each other three hundred times a second.
    while time.monotonic() < ends_s:
        save(first, 1, job="twins-first")
        first.status("training", step=1, epoch=0)
        second.status("training", step=2, epoch=0)
        time.sleep(0.05)
    assert joins(shared, "twins") == both
    assert (second.superseded, second.refused, first.refused) == (None, None, None)
    save(second, 2, job="twins")
    until_completed(shared, "twins", {2})
    first.close(leave=True)
    eventually(
        lambda: until_there(shared, "twins-rank0")["current_step"] == 2,
        within_s=PATIENCE_S,
        what="a goodbye of the first is not the second's",
    )


def test_a_process_that_learns_it_only_by_a_call_falls_silent_too(shared: Coordinator, links: Links) -> None:
    first = links(job="deaf")
    before = until_there(shared, "deaf-rank0")["incarnation"]
    session = first._orchestrator._session
    asyncio.run_coroutine_threadsafe(session._end_session(), session._loop).result(PATIENCE_S)
    links(job="deaf")
    eventually(lambda: until_there(shared, "deaf-rank0")["incarnation"] > before, within_s=PATIENCE_S)
    both = joins(shared, "deaf")
    save(first, 1, job="deaf")
    assert "replaced it" in eventually(lambda: first.superseded, within_s=PATIENCE_S)
    assert joins(shared, "deaf") == both


def test_an_earlier_generation_of_a_run_is_superseded_by_a_later_one(
    shared: Coordinator, links: Links
) -> None:
    zombie = links(job="zombies", rank=5, generation=3)
    until_there(shared, "zombies-rank5")
    links(job="zombies", rank=0, generation=4)
    until_there(shared, "zombies-rank0")
    save(zombie, 1, job="zombies")
    reason = eventually(lambda: zombie.superseded, within_s=PATIENCE_S)
    assert "Generation 4 of run 'run of zombies' has started" in reason
    late = links(job="zombies", rank=6, generation=2)
    assert "Generation 4" in eventually(lambda: late.superseded, within_s=PATIENCE_S)
    assert completed(shared, "zombies") == []


def test_the_name_of_a_live_run_is_refused_to_another_one(shared: Coordinator, links: Links) -> None:
    first = links(job="popular", run_id="run-a")
    until_there(shared, "popular-rank0")
    alone = joins(shared, "popular")
    for rank in (0, 3):
        second = links(job="popular", rank=rank, run_id="run-b")
        reason = eventually(lambda link=second: link.refused, within_s=PATIENCE_S)  # type: ignore[misc]
        assert "used by another live run" in reason
        assert "run-a" in reason
        assert "job=" in reason
    assert first.superseded is None
    assert joins(shared, "popular") == alone
    first.close(leave=True)
    third = links(job="popular", run_id="run-b")
    assert until_there(shared, "popular-rank0")["run_id"] == "run-b"
    assert third.refused is None


def test_the_library_says_why_a_worker_is_stale(shared: Coordinator) -> None:
    heard: list[str] = []
    one, two = (TrainingOrchestrator(shared.address, job_id="why", on_stale=heard.append) for _ in range(2))
    try:
        one.register_worker("w")
        assert one.wait_connected(PATIENCE_S)
        two.register_worker("w")
        eventually(lambda: heard, within_s=PATIENCE_S)
        assert one.stale_cause == "superseded"
        with pytest.raises(StaleWorker) as stale:
            one.notify_checkpoint("c", 1, path="/c")
        assert stale.value.superseded
        with pytest.raises(CoordinatorRefused) as refused:
            two.register_worker("w", run_id="x" * 1000)
        assert refused.value.reason_code == "invalid_argument"
    finally:
        one.close()
        two.close()


def test_a_client_without_a_run_id_is_as_free_as_ever(shared: Coordinator, links: Links) -> None:
    links(job="old-clients")
    until_there(shared, "old-clients-rank0")
    request = pb.RegisterWorkerRequest(worker_id="plain", job_id="old-clients")
    with stub(shared.address) as calls:
        first = calls.RegisterWorker(request, timeout=PATIENCE_S).incarnation
        assert calls.RegisterWorker(request, timeout=PATIENCE_S).incarnation > first
        other = pb.RegisterWorkerRequest(worker_id="x", job_id="old-clients", run_id="another")
        status, code, _, hint = refusal(calls.RegisterWorker, other, timeout=PATIENCE_S)
        assert (status.name, code) == ("ALREADY_EXISTS", "name_in_use")
        assert "job=" in hint


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({}, "named-rank0"),
        ({"WORKER_ID": "node-7"}, "node-7"),
        ({"WORKER_ID": "node-7", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}, "node-7"),
        ({"WORKER_ID": "node-7", "LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "1"}, "node-7-1"),
        ({"WORKER_ID": "node-7", "STRATA_TASK_ID": "t1"}, "named-rank0"),
    ],
)
def test_a_worker_has_the_name_it_was_given(
    links: Links, monkeypatch: pytest.MonkeyPatch, given: dict[str, str], name: str
) -> None:
    for variable in ("WORKER_ID", "LOCAL_WORLD_SIZE", "LOCAL_RANK", "STRATA_TASK_ID"):
        monkeypatch.delenv(variable, raising=False)
    for variable, value in given.items():
        monkeypatch.setenv(variable, value)
    assert links(job="named").worker_id == name
