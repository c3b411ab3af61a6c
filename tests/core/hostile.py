"""Commands that nobody sane would send, and many that are almost right: strategies for Hypothesis."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st

from strata.core.faults.failures import Failure, WorkerError
from strata.core.messages import (
    ArriveAtBarrier,
    ArriveTogether,
    BeginAttempt,
    CancelDrain,
    CheckpointId,
    ClearHost,
    Command,
    CreateTask,
    DatasetId,
    DatasetSpec,
    DeregisterWorker,
    DrainHost,
    EndAttempt,
    EndHang,
    ExitCause,
    FileSpan,
    JobId,
    NoteProgress,
    NoteWhereabouts,
    NotifyCheckpoint,
    PlanEpoch,
    QuarantineHost,
    QueueTask,
    ReconcileCheckpoints,
    RegisterDataset,
    RegisterWorker,
    RemoveDataset,
    ReportFailure,
    ReportHandover,
    ReportHealth,
    ReportRecovery,
    ReportSlow,
    RestartTask,
    StopTask,
    SwapValue,
    TaskId,
    TaskSpec,
    WorkerId,
    WorkerSpec,
)
from tests.core.builders import data_json, trained

HUGE = 10**5000

plain_names = st.sampled_from(["a", "b", "d", "t"])
bad_names = st.sampled_from(
    ["", " ", "\0", "a\nb", "\x1b[31m", "\ud800", "a\udcff", "\u2028", "x" * 300, "x" * 1_000_000, "é" * 256]
)
names = st.one_of(plain_names, plain_names, plain_names, bad_names, st.text(max_size=20))
texts = st.one_of(st.just(""), names, st.sampled_from(["x" * 5000, "two\nlines"]))
counts = st.one_of(
    st.integers(0, 3),
    st.integers(0, 3),
    st.sampled_from([-1, 7, 100, 65_536, 2**31, 2**53, 2**53 + 1, 2**63, 2**64, -(2**63), HUGE, -HUGE]),
)
seconds = st.one_of(
    st.floats(0, 10), st.sampled_from([-1.0, 1e300, float("nan"), float("inf"), -float("inf"), 1e-300])
)
pairs: st.SearchStrategy[dict[str, str]] = st.one_of(
    st.just({}), st.dictionaries(names, texts, max_size=3), st.just({str(n): "" for n in range(100)})
)
configs = st.one_of(
    st.just("{}"),
    st.sampled_from(["", "[]", '{"a": NaN}', '{"a": 1e999}', '{"a": "\\ud800"}', "[" * 50_000]),
    st.integers(1, 400).map(lambda depth: '{"a":' * depth + "1" + "}" * depth),
    texts,
)
positions = st.one_of(
    st.just(""),
    st.just(data_json(trained([(0, 15)]))),
    st.sampled_from(["{}", "null", "[" * 50_000, data_json(trained([(0, 500)], total=10))]),
    st.tuples(counts, counts, counts, counts).map(lambda run: json.dumps(_with_run(run))),
)


def _with_run(run: tuple[int, ...]) -> dict[str, Any]:
    record = trained([(0, 15)]).to_json()
    record["epochs"][0]["ranks"] = {"0": [[min(max(number, -(2**80)), 2**80) for number in run]]}
    return record


def built(kind: Any, /, **fields: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.builds(kind, **fields)


workers = names.map(WorkerId)
datasets = names.map(DatasetId)

_arrivals = built(
    ArriveAtBarrier,
    worker_id=workers,
    incarnation=counts,
    generation=counts,
    barrier_id=names,
    step=counts,
    expected=counts,
    call_id=texts,
    timeout_s=seconds,
)

by_kind: dict[type[Command], st.SearchStrategy[Any]] = {
    RegisterWorker: built(
        RegisterWorker,
        spec=built(
            WorkerSpec,
            worker_id=workers,
            job_id=names.map(JobId),
            hostname=texts,
            port=counts,
            gpu_count=counts,
            memory_bytes=counts,
            metadata=pairs,
            run_id=texts,
            run_generation=counts,
        ),
        registration_id=texts,
    ),
    RemoveDataset: built(RemoveDataset, dataset_id=datasets, reason=texts),
    DeregisterWorker: built(DeregisterWorker, worker_id=workers, incarnation=counts, reason=texts),
    RegisterDataset: built(
        RegisterDataset,
        spec=built(
            DatasetSpec,
            dataset_id=datasets,
            path=names,
            format=names,
            total_samples=counts,
            shard_size=counts,
            shuffle=st.booleans(),
            seed=counts,
            metadata=pairs,
            files=st.lists(built(FileSpan, path=texts, samples=counts), max_size=2).map(tuple),
        ),
    ),
    ArriveAtBarrier: _arrivals,
    ArriveTogether: built(ArriveTogether, arrivals=st.lists(_arrivals, max_size=3).map(tuple)),
    NotifyCheckpoint: built(
        NotifyCheckpoint,
        worker_id=workers,
        incarnation=counts,
        generation=counts,
        job_id=st.one_of(st.just(""), names).map(JobId),
        checkpoint_id=names.map(CheckpointId),
        step=counts,
        epoch=counts,
        path=texts,
        size_bytes=counts,
        status=st.sampled_from(["in_progress", "completed", "failed", "removed"]),
        tiers=st.lists(names, max_size=3).map(tuple),
        digest=texts,
        duration_s=seconds,
        parent_id=texts,
        data_json=positions,
        reason=texts,
        metadata=pairs,
        run_id=texts,
        run_generation=counts,
        saved_generation=st.one_of(st.none(), counts),
        succeeded_by=texts,
    ),
    ReconcileCheckpoints: built(
        ReconcileCheckpoints,
        worker_id=workers,
        incarnation=counts,
        job_id=st.one_of(st.just(""), names).map(JobId),
        run_id=texts,
        run_generation=counts,
        present=st.lists(names.map(CheckpointId), max_size=3).map(tuple),
        revision=counts,
    ),
    CreateTask: built(
        CreateTask,
        spec=built(
            TaskSpec,
            task_id=names.map(TaskId),
            name=names,
            type=names,
            dataset_id=st.one_of(st.none(), datasets),
            worker_count=counts,
            config_json=configs,
        ),
    ),
    StopTask: built(StopTask, task_id=names.map(TaskId), reason=texts),
    RestartTask: built(RestartTask, task_id=names.map(TaskId), reason=texts),
    QueueTask: built(QueueTask, task_id=names.map(TaskId), reason=texts),
    NoteWhereabouts: built(NoteWhereabouts, task_id=names.map(TaskId), attempt=counts, reason=texts),
    BeginAttempt: built(BeginAttempt, task_id=names.map(TaskId), reason=texts),
    EndAttempt: built(
        EndAttempt,
        task_id=names.map(TaskId),
        attempt=counts,
        cause=st.one_of(
            st.none(),
            built(
                ExitCause,
                kind=st.sampled_from(["exit", "signal", "lost"]),
                message=texts,
                signal=texts,
                traceback=texts,
                may_retry=st.booleans(),
            ),
        ),
    ),
    NoteProgress: built(
        NoteProgress,
        task_id=names.map(TaskId),
        attempt=counts,
        worker_ids=st.lists(workers, max_size=2).map(tuple),
        step=counts,
        total_steps=counts,
    ),
    PlanEpoch: built(
        PlanEpoch, worker_id=workers, incarnation=counts, generation=counts, dataset_id=datasets, epoch=counts
    ),
    ReportRecovery: built(
        ReportRecovery,
        worker_id=workers,
        incarnation=counts,
        phases_s=st.dictionaries(names, seconds, max_size=3),
        resumed_step=counts,
        lost_steps=counts,
        tier=texts,
        world_before=counts,
        world_after=counts,
        reason=texts,
    ),
    ReportFailure: built(
        ReportFailure,
        failures=st.lists(
            built(
                Failure,
                rank=st.one_of(st.none(), counts),
                host=texts,
                pid=counts,
                gpu=texts,
                at_s=seconds,
                exit_code=st.one_of(st.none(), st.sampled_from([0, 1, -9, -15, 75, 86]), counts),
                error=st.one_of(
                    st.none(),
                    built(
                        WorkerError,
                        type=texts,
                        message=texts,
                        where=st.lists(texts, max_size=2).map(tuple),
                        step=st.one_of(st.none(), counts),
                        traceback=texts,
                    ),
                ),
                oom_killed=st.booleans(),
                device_faults=st.lists(texts, max_size=2).map(tuple),
                last_lines=st.lists(texts, max_size=2).map(tuple),
                replaced=texts,
            ),
            max_size=3,
        ).map(tuple),
        launch=texts,
        job_id=st.one_of(st.none(), names.map(JobId)),
        decision=st.sampled_from(["restart", "stop"]),
        reason=texts,
        quarantine=st.booleans(),
    ),
    QuarantineHost: built(QuarantineHost, host=texts, reason=texts, by=texts),
    ClearHost: built(ClearHost, host=texts, by=texts),
    DrainHost: built(DrainHost, host=texts, within_s=seconds, reason=texts, by=texts, agents=counts),
    CancelDrain: built(CancelDrain, host=texts, by=texts),
    ReportHandover: built(
        ReportHandover,
        host=texts,
        node=texts,
        launch=texts,
        job_id=st.one_of(st.none(), names.map(JobId)),
        saved_step=st.one_of(st.none(), counts),
        lost_steps=st.one_of(st.none(), counts),
        where=texts,
        reason=texts,
    ),
    ReportHealth: built(
        ReportHealth,
        host=texts,
        kind=texts,
        measured=st.dictionaries(texts, seconds, max_size=3),
        failed=st.dictionaries(texts, texts, max_size=3),
        clock_s=seconds,
        seconds=seconds,
        reason=texts,
    ),
    EndHang: built(EndHang, job_id=names.map(JobId), step=counts),
    ReportSlow: built(
        ReportSlow, job_id=names.map(JobId), worker_id=workers, slow=st.booleans(), reason=texts
    ),
    SwapValue: built(
        SwapValue,
        key=names,
        body=st.sampled_from([b"", b"x", b"x" * 300_000]),
        expected_version=counts,
        soft=st.booleans(),
    ),
}

commands: st.SearchStrategy[Command] = st.one_of(*by_kind.values())
