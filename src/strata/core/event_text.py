"""The sentence and the severity of every event.

The only place where events become text: the event stream, `strata replay`, the log and the dashboard all show what is
written here. A sentence starts in lower case, names its subject, and ends with the event's own reason. Pure.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, assert_never

from strata.core.fleet.recoveries import who_survived
from strata.core.messages import (
    BarrierArrived,
    BarrierBroken,
    BarrierReleased,
    CheckpointCompleted,
    CheckpointFailed,
    CheckpointRemoved,
    CheckpointStarted,
    CountersRestored,
    DatasetRegistered,
    DatasetRemoved,
    Event,
    HandoverRecorded,
    HostCleared,
    HostDrained,
    HostDrainStarted,
    HostExamined,
    HostQuarantined,
    HostUndrained,
    IncidentClosed,
    IncidentReported,
    RecordsForgotten,
    RecoveryRecorded,
    ShardsMoved,
    TaskChanged,
    TaskCreated,
    TaskProgressed,
    ValueDropped,
    ValueRefreshed,
    ValueSwapped,
    VersionsReserved,
    WorkerFailed,
    WorkerForgotten,
    WorkerJoined,
    WorkerLeft,
)
from strata.core.telemetry.stragglers import Change
from strata.core.text import counted

Severity = Literal["debug", "info", "success", "warning", "error"]
"""`debug` is what the state shows anyway (progress, releases); the rest is the history of a run."""


class EventText(NamedTuple):
    severity: Severity
    text: str


def describe(event: Event | Change) -> EventText:
    match event:
        case WorkerJoined():
            again = " again" if event.superseded else ""
            host = f" on {event.spec.hostname}" if event.spec.hostname else ""
            return EventText("success", f"{event.spec.worker_id} joined{again}{host}")
        case WorkerFailed():
            return EventText("error", _because(event, f"{event.worker_id} failed"))
        case WorkerLeft():
            return EventText("info", _because(event, f"{event.worker_id} left"))
        case WorkerForgotten():
            return EventText("info", _because(event, f"{event.worker_id} removed"))
        case Change(slow=True):
            return EventText("warning", _because(event, f"{event.worker_id} is slow"))
        case Change():
            return EventText("success", _because(event, f"{event.worker_id} is no longer slow"))
        case DatasetRegistered():
            return EventText("info", _because(event, f"dataset {event.spec.dataset_id} registered"))
        case DatasetRemoved():
            return EventText("info", _because(event, f"dataset {event.dataset_id} removed"))
        case ShardsMoved():
            what = f"shard plan {event.version} of {event.dataset_id}, epoch {event.epoch}"
            return EventText("info" if any(event.moved.values()) else "debug", _because(event, what))
        case BarrierArrived():
            what = f"{event.worker_id} arrived at barrier {event.barrier_id}, step {event.step:,}"
            return EventText("debug", what)
        case BarrierReleased():
            what = f"barrier {event.barrier_id} released at step {event.step:,}"
            return EventText("debug", _because(event, what))
        case BarrierBroken():
            what = f"barrier {event.barrier_id} broken at step {event.step:,}"
            return EventText("warning", _because(event, what))
        case CheckpointStarted():
            return EventText("debug", f"checkpoint at step {event.step:,} started by {event.worker_id}")
        case CheckpointCompleted():
            what = f"checkpoint at step {event.step:,} completed"
            return EventText("success", _because(event, what))
        case CheckpointFailed():
            return EventText("error", _because(event, f"checkpoint at step {event.step:,} failed"))
        case CheckpointRemoved():
            return EventText("debug", _because(event, f"checkpoint {event.checkpoint_id} removed"))
        case TaskCreated():
            return EventText("info", f"task {event.spec.name} created ({event.spec.task_id})")
        case TaskChanged():
            severity: Severity = "error" if event.status == "failed" else "info"
            return EventText(severity, _because(event, f"task {event.task_id} {event.status}"))
        case TaskProgressed():
            total = f" of {event.total_steps:,}" if event.total_steps else ""
            what = f"task {event.task_id} at step {event.step:,}{total} (attempt {event.attempt})"
            return EventText("debug", what)
        case RecoveryRecorded():
            seconds = sum(event.phases_s.values())
            tier = f" from {event.tier}" if event.tier else ""
            resumed = f"resumed at step {event.resumed_step:,}{tier}"
            lost = f"{counted(event.lost_steps, 'step')} lost"
            what = f"{event.job_id} recovered in {seconds:.1f} s; {resumed}, {lost}"
            return EventText("success", "; ".join(filter(None, (what, who_survived(event), event.cause))))
        case IncidentReported():
            is_failure = event.subject == "run" and event.failure_class != "preemption"
            return EventText("error" if is_failure else "warning", _incident(event))
        case IncidentClosed():
            lost = f", {counted(event.lost_steps, 'step')} lost" if event.lost_steps is not None else ""
            what = f"incident {event.incident_id} of {event.job_id} {event.outcome.replace('_', ' ')}{lost}"
            of: dict[str, Severity] = {"recovered": "success", "stopped": "error", "failed_again": "warning"}
            return EventText(of[event.outcome], _because(event, what))
        case HostQuarantined():
            return EventText("error", _because(event, f"machine {event.host} quarantined by {event.by}"))
        case HostCleared():
            return EventText("success", _because(event, f"machine {event.host} released from quarantine"))
        case HostDrainStarted():
            within_s = max(0.0, event.deadline_s - event.at_s)
            what = f"drain of machine {event.host} started by {event.by}, deadline in {within_s:.0f} s"
            return EventText("warning", _because(event, what))
        case HandoverRecorded():
            lost_so_far = event.lost_steps
            severity = "info" if lost_so_far is None else "warning" if lost_so_far else "success"
            return EventText(severity, _because(event, f"{event.job_id} leaves machine {event.host}"))
        case HostDrained():
            return EventText("info", _because(event, f"machine {event.host} drained"))
        case HostUndrained():
            return EventText("success", _because(event, f"machine {event.host} undrained"))
        case HostExamined():
            if event.failed:
                found = "; ".join(f"{name}: {why}" for name, why in sorted(event.failed.items()))
                return EventText("error", f"machine {event.host} failed its health check: {found}")
            return EventText("debug", _because(event, f"machine {event.host} passed its health check"))
        case RecordsForgotten():
            return EventText("debug", _because(event, "records removed"))
        case ValueSwapped() | ValueRefreshed() | ValueDropped():
            return EventText("debug", _because(event, f"value {event.key}"))
        case CountersRestored():
            return EventText("debug", _because(event, f"counters restored at generation {event.generation}"))
        case VersionsReserved():
            return EventText("debug", _because(event, f"versions up to {event.last:,} reserved"))
    assert_never(event)


def _incident(event: IncidentReported) -> str:
    if event.subject != "run":
        return f"{event.job_id}: {event.what}"
    decided = {"stop": "; stopping", "restart": "; restarting"}.get(event.decision, "")
    because = f": {event.reason}" if decided and event.reason else ""
    return f"{event.job_id}: {event.what} ({event.failure_class}){decided}{because}"


def _because(event: Event | Change, what: str) -> str:
    return f"{what}: {event.reason}" if event.reason else what
