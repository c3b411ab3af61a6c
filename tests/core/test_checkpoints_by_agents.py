"""What the agent of a machine reports of its dead workers' checkpoint: it is no worker, and the run's generation fences it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from strata.core import views
from strata.core.cluster import Cluster
from strata.core.messages import (
    AGENT,
    SAVED_BY,
    CheckpointId,
    Instant,
    JobId,
    NotifyCheckpoint,
    RegisterWorker,
    Stale,
    Unknown,
    WorkerId,
    WorkerSpec,
)

NOW = Instant(mono_s=0.0, wall_s=100.0)
JOB = JobId("job")


def cluster(generation: int = 3) -> Cluster:
    found = Cluster()
    spec = WorkerSpec(
        worker_id=WorkerId("w0"),
        job_id=JOB,
        hostname="a",
        port=0,
        gpu_count=0,
        memory_bytes=0,
        run_id="run",
        run_generation=generation,
    )
    found.handle(RegisterWorker(spec=spec, registration_id="r"), NOW)
    return found


def notice(**changes: object) -> NotifyCheckpoint:
    said = NotifyCheckpoint(
        worker_id=WorkerId("gone"),
        incarnation=0,
        generation=0,
        job_id=JOB,
        checkpoint_id=CheckpointId("c14"),
        step=14,
        epoch=0,
        path="/run/c14.pt",
        size_bytes=10,
        status="completed",
        tiers=("LOCAL", "S3"),
        digest="d",
        duration_s=0.0,
        parent_id="",
        data_json="",
        reason="its workers had died: the agent of a uploaded it, which saved 6 steps",
        metadata={SAVED_BY: AGENT, "host": "a"},
        run_id="run",
        run_generation=3,
    )
    return replace(said, **changes)  # type: ignore[arg-type]


def test_checkpoint_is_recorded_with_who_saved_it_and_why() -> None:
    found = cluster()
    found.handle(notice(), NOW)
    record = found.checkpoints.records[CheckpointId("c14")]
    assert (record.status, record.metadata[SAVED_BY]) == ("completed", AGENT)
    assert record.reason.endswith("which saved 6 steps")
    safety = views.safety(found, JOB, step=14, now_s=100.0, verified={"c14": True})
    assert [(c.kind, c.host, c.verified) for c in safety.copies] == [
        ("disk", "a", True),
        ("bucket", "", None),
    ]
    assert safety.safe_in == ("process", "machine", "site")


def test_earlier_generation_is_refused_and_so_is_a_run_that_never_started() -> None:
    found = cluster(generation=4)
    with pytest.raises(Stale):
        found.handle(notice(), NOW)
    for unknown in (notice(run_id="other"), notice(run_id=""), notice(job_id=JobId("other"))):
        with pytest.raises(Unknown):
            cluster().handle(unknown, NOW)
    with pytest.raises(Unknown):
        cluster().handle(notice(status="failed"), NOW)


def test_whoever_is_no_agent_must_be_a_worker() -> None:
    with pytest.raises(Unknown):
        cluster().handle(notice(metadata={}), NOW)
