"""What people are notified of: rules over the facts and samples of runs, each with one threshold.

A notification is raised when its rule begins to hold and resolved when it no longer does; while it holds it is not raised
again. One that comes back within `QUIET_S` is kept and not sent, and of one run at most `MOST_PER_HOUR` are sent; how many
were held back is said by the next. Nothing here grows with time: runs, values and notifications are kept in bounded numbers.

Facts come after they are durable (`take_events`), values of training loops as they arrive (`take_losses`), the rest once a
second (`take_samples`). A restart of the coordinator continues with what `dump` wrote. Pure: time arrives as `now_s`, in Unix
seconds.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, NamedTuple

from strata.core.event_text import Severity
from strata.core.faults.failures import ADVICE
from strata.core.faults.incidents import Incident
from strata.core.messages import (
    CheckpointCompleted,
    Event,
    IncidentClosed,
    IncidentReported,
    JobId,
    RecoveryRecorded,
    TaskChanged,
    WorkerJoined,
)
from strata.core.text import counted

Rule = Literal[
    "stopped",
    "slow_recovery",
    "repeated",
    "failed_save",
    "overdue_save",
    "loss",
    "throughput",
    "slow_rank",
    "disk",
    "goodput",
    "quarantine",
    "test",
]
State = Literal["raised", "resolved"]

KEPT = 500
ACTIVE_LIMIT = 1_000
RUNS_KEPT = 200
QUIET_S = 600.0
HOUR_S = 3_600.0
MOST_PER_HOUR = 30
"""Of one run; those about the coordinator itself count as a run of their own."""
SILENT_S = 60.0
"""What held of a run whose workers have not reported for so long is over, without a notification."""
OF_LIVE_RUNS: frozenset[Rule] = frozenset(
    {"failed_save", "overdue_save", "loss", "throughput", "slow_rank", "disk", "goodput"}
)
OVERDUE_LEAST_S = 60.0
INTERVALS_KEPT = 5
FAILURES_KEPT = 1_000
FINGERPRINTS_KEPT = 32
LOSSES_KEPT = 100
LOSSES_NEEDED = 20
LOSSES_ABOVE = 3
"""So many in a row are an explosion; one is a bad batch."""
RATES_KEPT = 600
RATES_NEEDED = 60
RATES_RECENT = 20
"""Samples, one a second, of which the median is compared with the usual one."""
GOODPUT_WINDOW_S = 600.0
GOODPUT_POINTS = 11


class RuleAbout(NamedTuple):
    """What a rule means: for the configuration, the command line and the documentation."""

    default: float | None
    """Its threshold; None: it has none."""
    unit: str
    least: float
    most: float
    meaning: str


RULES: dict[Rule, RuleAbout] = {
    "stopped": RuleAbout(None, "", 0, 0, "a run stopped because of a failure"),
    "slow_recovery": RuleAbout(120.0, "seconds", 1, 86_400, "a run takes this long to recover"),
    "repeated": RuleAbout(3.0, "failures", 2, 1_000, "this many failures of the same kind in a run within an hour"),
    "failed_save": RuleAbout(None, "", 0, 0, "a checkpoint could not be saved"),
    "overdue_save": RuleAbout(3.0, "times", 1.5, 1_000, "no checkpoint for this many times the usual interval, at least a "
    "minute"),
    "loss": RuleAbout(5.0, "times", 1.5, 1e6, "the loss is NaN or infinite, or this many times its median, three times in a row"),
    "throughput": RuleAbout(30.0, "percent", 1, 99, "throughput fell this far below its median"),
    "slow_rank": RuleAbout(None, "", 0, 0, "the other ranks wait for a slow one"),
    "disk": RuleAbout(10.0, "percent", 0.1, 90, "less than this is free on a disk of the coordinator or of checkpoints"),
    "goodput": RuleAbout(0.5, "share", 0.01, 0.99, "less than this share of the last ten minutes was training"),
    "quarantine": RuleAbout(None, "", 0, 0, "a machine was quarantined"),
}  # fmt: skip
"""Every rule that can be configured."""

Thresholds = Mapping[Rule, float]
"""Of the rules that count; one that is not named never holds."""


def default_rules() -> dict[Rule, float]:
    return {name: about.default or 0.0 for name, about in RULES.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Notification:
    """One notification, as `/api/notifications` and the event stream show it. Times are Unix seconds."""

    id: int
    """Numbered once, also over restarts of the coordinator."""
    rule: Rule
    run: str
    """The job or task it is about; empty: the coordinator itself."""
    subject: str
    """What of the run it is about, such as a rank or a kind of failure; with rule and run it names the notification."""
    state: State
    severity: Severity
    title: str
    """In a few words; the run is named in it."""
    text: str
    """What happened, with its numbers."""
    next_step: str
    at: float
    held_back: int = 0
    """Notifications of this run that were not sent since the last one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What is known of a run whose workers report, once a second."""

    step: int
    workers: int
    rate: float | None
    """Throughput, in `unit`."""
    unit: str
    training_s: float
    total_s: float
    """Worker-seconds so far, as `core.telemetry.goodput` adds them up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Disk:
    name: str
    """What it is the disk of, for people."""
    run: str
    free_bytes: int
    total_bytes: int


class Key(NamedTuple):
    rule: Rule
    run: str
    subject: str


@dataclass(slots=True)
class _Run:
    """What the rules remember of one run."""

    fingerprints: dict[str, deque[float]] = field(default_factory=dict)
    counted_incident: int = 0
    saved_at_s: float | None = None
    seen_at_s: float | None = None
    """Since when its workers report without a pause."""
    silent_at_s: float | None = None
    """Since when they no longer do."""
    save_intervals_s: deque[float] = field(default_factory=lambda: deque(maxlen=INTERVALS_KEPT))
    losses: deque[float] = field(default_factory=lambda: deque(maxlen=LOSSES_KEPT))
    losses_above: int = 0
    rates: deque[float] = field(default_factory=lambda: deque(maxlen=RATES_KEPT))
    recent_rates: deque[float] = field(default_factory=lambda: deque(maxlen=RATES_RECENT))
    rate_unit: str = ""
    spent: deque[tuple[float, float, float]] = field(default_factory=lambda: deque(maxlen=GOODPUT_POINTS))
    sent_at_s: deque[float] = field(default_factory=lambda: deque(maxlen=MOST_PER_HOUR))
    held_back: int = 0


class Notifications:
    def __init__(self, rules: Thresholds | None = None) -> None:
        self.rules = dict(default_rules() if rules is None else rules)
        self.active: dict[Key, Notification] = {}
        """What holds now."""
        self.recent: deque[Notification] = deque(maxlen=KEPT)
        """Oldest first."""
        self.count = 0
        self._runs: dict[str, _Run] = {}
        self._raised_at_s: dict[Key, float] = {}
        """When each was last sent."""
        self._unsaid: set[Key] = set()
        """Of those that hold, the ones that were held back."""

    # --- facts ----------------------------------------------------------------------------------------------

    def take_events(
        self, events: Iterable[Event], incidents: Mapping[int, Incident], now_s: float
    ) -> list[Notification]:
        """What the events of one batch raise and resolve. `incidents` are those that are known, these among them."""
        found: list[Notification] = []
        # An incident says more about the end of a task than the task does.
        for event in sorted(events, key=lambda event: isinstance(event, TaskChanged)):
            match event:
                case IncidentReported():
                    found += self._reported(event, now_s)
                case IncidentClosed():
                    incident = incidents.get(event.incident_id)
                    if incident is not None:
                        found += self._closed(incident, event, now_s)
                case TaskChanged(status="failed"):
                    found += self._stopped(event.task_id, event.reason, ADVICE["unknown"], now_s)
                case TaskChanged(status="running"):
                    found += self._runs_again(event.task_id, now_s)
                case RecoveryRecorded():
                    found += self._runs_again(event.job_id, now_s)
                case WorkerJoined():
                    found += self._runs_again(event.spec.job_id, now_s)
                case CheckpointCompleted():
                    found += self._saved(event, now_s)
                case _:
                    pass
        return found

    def _reported(self, event: IncidentReported, now_s: float) -> list[Notification]:
        run = event.job_id
        if event.subject == "save":
            return self._raise(
                Key("failed_save", run, ""),
                *("error", f"{run}: a checkpoint could not be saved", event.what, ADVICE["storage"]),
                now_s,
            )
        if event.subject == "slow_rank":
            return self._raise(
                Key("slow_rank", run, event.launch),
                *("warning", f"{run}: a rank is slow", event.what),
                "Check that machine: its GPU clocks, its disk, and other processes on it.",
                now_s,
            )
        if event.subject == "quarantine":
            return self._raise(
                Key("quarantine", run, event.launch),
                *("error", f"the machine {event.launch} is quarantined", f"{event.what}. {event.reason}"),
                f"Fix it, then: strata quarantine clear {event.launch}",
                now_s,
            )
        if event.failure_class == "preemption":
            return []
        known = self._run(run)
        if event.incident_id <= known.counted_incident:
            return []  # More became known of it.
        known.counted_incident = event.incident_id
        times = known.fingerprints.setdefault(event.fingerprint, deque(maxlen=FAILURES_KEPT))
        if len(known.fingerprints) > FINGERPRINTS_KEPT:
            del known.fingerprints[next(iter(known.fingerprints))]
        times.append(now_s)
        while times and now_s - times[0] > HOUR_S:
            times.popleft()
        if "repeated" not in self.rules or len(times) < self.rules["repeated"]:
            return []
        title = f"{run} failed {counted(len(times), 'time')} within an hour"
        text = f"The same kind of failure each time ({event.fingerprint}); the newest: {event.what}"
        advice = ADVICE[event.failure_class]
        return self._raise(Key("repeated", run, event.fingerprint), "error", title, text, advice, now_s)

    def _closed(self, incident: Incident, event: IncidentClosed, now_s: float) -> list[Notification]:
        known, run = incident.reported, event.job_id
        if known.subject == "save":
            return self._resolve(
                Key("failed_save", run, ""), f"{run}: checkpoints are saved again", event.reason, now_s
            )
        if known.subject == "slow_rank":
            title = f"{run}: a rank is no longer slow"
            return self._resolve(Key("slow_rank", run, known.launch), title, event.reason, now_s)
        if known.subject == "quarantine":
            title = f"the machine {known.launch} may be used again"
            return self._resolve(Key("quarantine", run, known.launch), title, event.reason, now_s)
        if event.outcome == "stopped":
            text = f"{known.what}. Stopped: {event.reason}" if event.reason else known.what
            found = self._resolve(Key("slow_recovery", run, ""), "", "", now_s, quietly=True)
            return found + self._stopped(run, text, ADVICE[known.failure_class], now_s)
        if event.outcome != "recovered":
            return []
        recovery_s = sum(event.phases_s.values()) or max(0.0, event.at_s - incident.opened_at_s)
        text = f"Recovery took {recovery_s:,.0f} s. {known.what}"
        key = Key("slow_recovery", run, "")
        if key in self.active:
            return self._resolve(key, f"{run} has recovered", text, now_s)
        if event.phases_s and recovery_s >= self.rules.get("slow_recovery", math.inf):
            raised = self._raise(
                key,
                "warning",
                f"{run} recovered slowly",
                text,
                "See where the time went: strata why.",
                now_s,
            )
            self._drop(key)  # It is over.
            return raised
        return []

    def _stopped(self, run: str, text: str, advice: str, now_s: float) -> list[Notification]:
        return self._raise(Key("stopped", run, ""), "error", f"{run} has stopped", text, advice, now_s)

    def _runs_again(self, run: str, now_s: float) -> list[Notification]:
        return self._resolve(Key("stopped", run, ""), f"{run} runs again", "It was started again.", now_s)

    def _saved(self, event: CheckpointCompleted, now_s: float) -> list[Notification]:
        run = event.job_id
        if event.succeeded_by:
            return []  # It was reported late: a newer one is known.
        known = self._run(run)
        since_s = max(known.saved_at_s or 0.0, known.seen_at_s or 0.0)
        # Only what lies within one stretch of training says how often it saves.
        if known.saved_at_s is not None and since_s == known.saved_at_s and now_s > since_s:
            known.save_intervals_s.append(now_s - since_s)
        known.saved_at_s = now_s
        text = f"The checkpoint of step {event.step:,} was completed."
        return self._resolve(Key("overdue_save", run, ""), f"{run}: a checkpoint was saved", text, now_s)

    # --- values of training loops -----------------------------------------------------------------------------

    def take_losses(self, run: str, values: Sequence[float], step: int, now_s: float) -> list[Notification]:
        """Losses in their order; `step` is that of the last."""
        if "loss" not in self.rules:
            return []
        known, found, times = self._run(run), list[Notification](), self.rules["loss"]
        key = Key("loss", run, "")
        for value in values:
            if not math.isfinite(value):
                if key not in self.active:
                    what = "NaN" if math.isnan(value) else "infinite"
                    text = f"At step {step:,}. Every later step trains on it."
                    advice = (
                        "Stop it and continue from a checkpoint before that step, with a smaller learning rate, gradient "
                        "clipping, or without the batch that caused it."
                    )
                    found += self._raise(key, "error", f"{run}: the loss is {what}", text, advice, now_s)
                continue
            usual = _median(known.losses) if len(known.losses) >= LOSSES_NEEDED else None
            if usual is not None and value - usual > (times - 1) * max(abs(usual), 1e-6):
                known.losses_above += 1
                if known.losses_above >= LOSSES_ABOVE and key not in self.active:
                    text = f"{value:,.4g} at step {step:,}; its median before was {usual:,.4g}."
                    advice = "Check the gradient norm; a smaller learning rate or clipping may help."
                    found += self._raise(key, "error", f"{run}: the loss explodes", text, advice, now_s)
                continue  # What is out of bounds does not move them.
            known.losses_above = 0
            known.losses.append(value)
            if key in self.active:
                text = f"{value:,.4g} at step {step:,}."
                found += self._resolve(key, f"{run}: the loss is back to normal", text, now_s)
        return found

    # --- once a second ----------------------------------------------------------------------------------------

    def take_samples(
        self,
        samples: Mapping[JobId, Sample],
        disks: Sequence[Disk],
        open_incidents: Sequence[Incident],
        now_s: float,
    ) -> list[Notification]:
        """`samples` are of all runs whose workers report now; `open_incidents` of runs that would report a recovery."""
        found: list[Notification] = []
        for run, sample in samples.items():
            known = self._run(run)
            if known.seen_at_s is None:
                known.seen_at_s = now_s
            found += self._overdue(run, known, sample, now_s)
            found += self._slower(run, known, sample, now_s)
            found += self._goodput(run, known, sample, now_s)
        for name, known in self._runs.items():
            if name in samples:
                known.silent_at_s = None
            elif known.seen_at_s is not None:
                known.seen_at_s, known.silent_at_s = None, now_s
                known.recent_rates.clear()
                known.spent.clear()
            elif known.silent_at_s is not None and now_s - known.silent_at_s > SILENT_S:
                known.silent_at_s = None
                self._forget(name)
        for disk in disks:
            found += self._disk(disk, now_s)
        for incident in open_incidents:
            found += self._open(incident, now_s)
        for key in [key for key in self.active if key.rule == "repeated"]:
            times = self._run(key.run).fingerprints.get(key.subject)
            if not times or now_s - times[-1] > HOUR_S:
                found += self._resolve(key, f"{key.run}: no such failure for an hour", key.subject, now_s)
        return found

    def _overdue(self, run: str, known: _Run, sample: Sample, now_s: float) -> list[Notification]:
        if "overdue_save" not in self.rules or known.saved_at_s is None or not known.save_intervals_s:
            return []
        usual_s = _median(known.save_intervals_s)
        since_s = now_s - max(known.saved_at_s, known.seen_at_s or 0.0)
        if since_s < max(OVERDUE_LEAST_S, self.rules["overdue_save"] * usual_s):
            return []
        text = (
            f"No checkpoint for {since_s:,.0f} s, at step {sample.step:,}; usually one every {usual_s:,.0f} s. "
            "Steps since the last one would be lost with the machines."
        )
        return self._raise(
            *(Key("overdue_save", run, ""), "warning", f"{run}: a checkpoint is overdue", text),
            "Check the destination and the log: strata logs --level warn, strata doctor.",
            now_s,
        )

    def _slower(self, run: str, known: _Run, sample: Sample, now_s: float) -> list[Notification]:
        if "throughput" not in self.rules or sample.rate is None or not 0 < sample.rate < math.inf:
            return []
        if sample.unit != known.rate_unit:
            known.rates.clear()
            known.recent_rates.clear()
            known.rate_unit = sample.unit
        known.recent_rates.append(sample.rate)
        key, share = Key("throughput", run, ""), self.rules["throughput"] / 100
        if len(known.recent_rates) < RATES_RECENT or len(known.rates) < RATES_NEEDED:
            known.rates.append(sample.rate)
            return []
        usual, now = _median(known.rates), _median(known.recent_rates)
        text = (
            f"{now:,.4g} {sample.unit} with {counted(sample.workers, 'worker')}; its median is {usual:,.4g}."
        )
        if key in self.active:
            if now < usual * (1 - share / 2):
                return []
            return self._resolve(key, f"{run}: throughput is back to normal", text, now_s)
        if now < usual * (1 - share):
            title = f"{run}: throughput is down by {(1 - now / usual) * 100:.0f} %"
            advice = "Check for a slow rank, lost workers or slow data: strata workers, strata status."
            return self._raise(key, "warning", title, text, advice, now_s)
        known.rates.append(sample.rate)
        return []

    def _goodput(self, run: str, known: _Run, sample: Sample, now_s: float) -> list[Notification]:
        if "goodput" not in self.rules or sample.total_s <= 0:
            return []
        step_s = GOODPUT_WINDOW_S / (GOODPUT_POINTS - 1)
        if not known.spent or now_s - known.spent[-1][0] >= step_s:
            known.spent.append((now_s, sample.training_s, sample.total_s))
        began_s, training_s, total_s = known.spent[0]
        if now_s - began_s < GOODPUT_WINDOW_S * 0.9 or sample.total_s <= total_s:
            return []
        share = (sample.training_s - training_s) / (sample.total_s - total_s)
        key, least = Key("goodput", run, ""), self.rules["goodput"]
        text = f"{share:.0%} of the last {(now_s - began_s) / 60:.0f} minutes was training."
        if share < least:
            title = f"{run}: goodput is under {least:.0%}"
            return self._raise(
                key, "warning", title, text, "See where the time goes: strata status, strata why.", now_s
            )
        if share >= least + 0.05:
            return self._resolve(key, f"{run}: goodput is back to normal", text, now_s)
        return []

    def _disk(self, disk: Disk, now_s: float) -> list[Notification]:
        if "disk" not in self.rules or disk.total_bytes <= 0:
            return []
        key, least = Key("disk", disk.run, disk.name), self.rules["disk"]
        percent = disk.free_bytes / disk.total_bytes * 100
        text = f"{disk.name}: {disk.free_bytes / 1e9:,.1f} GB of {disk.total_bytes / 1e9:,.1f} GB are free ({percent:.0f} %)."
        who = f"{disk.run}: " if disk.run else "the coordinator: "
        if percent < least:
            advice = "Free space there, or keep fewer checkpoints: a save that does not fit fails."
            return self._raise(key, "warning", f"{who}a disk is filling up", text, advice, now_s)
        if percent >= least * 1.1:
            return self._resolve(key, f"{who}the disk has space again", text, now_s)
        return []

    def _open(self, incident: Incident, now_s: float) -> list[Notification]:
        known, open_s = incident.reported, now_s - incident.opened_at_s
        if open_s < self.rules.get("slow_recovery", math.inf):
            return []
        run = known.job_id
        title = f"{run} has not recovered for {open_s:,.0f} s"
        advice = ADVICE[known.failure_class]
        return self._raise(Key("slow_recovery", run, ""), "error", title, known.what, advice, now_s)

    # --- over a restart of the coordinator --------------------------------------------------------------------

    def dump(self) -> bytes:
        return json.dumps(
            {
                "count": self.count,
                "recent": [asdict(each) for each in self.recent],
                "active": [asdict(each) for each in self.active.values()],
                "unsaid": list(self._unsaid),
                "raised_at_s": [[*key, at_s] for key, at_s in self._raised_at_s.items()],
                "runs": {
                    name: {
                        "counted_incident": known.counted_incident,
                        "fingerprints": {name: list(times) for name, times in known.fingerprints.items()},
                        "saved_at_s": known.saved_at_s,
                        "save_intervals_s": list(known.save_intervals_s),
                        "sent_at_s": list(known.sent_at_s),
                    }
                    for name, known in self._runs.items()
                },
            }
        ).encode()

    def load(self, body: bytes) -> None:
        """Take up what `dump` wrote. Raises `ValueError` for anything else, and is then as it was."""
        taken = Notifications(self.rules)
        try:
            found = json.loads(body)
            taken.count = int(found["count"])
            taken.recent.extend(_read(each) for each in found["recent"])
            for each in map(_read, found["active"]):
                taken.active[Key(each.rule, each.run, each.subject)] = each
            taken._unsaid = {Key(*each) for each in found["unsaid"]}
            taken._raised_at_s = {Key(*each[:3]): float(each[3]) for each in found["raised_at_s"]}
            for name, kept in found["runs"].items():
                known = taken._run(name)
                known.counted_incident = int(kept["counted_incident"])
                for what, times in kept["fingerprints"].items():
                    known.fingerprints[what] = deque(map(float, times), maxlen=FAILURES_KEPT)
                known.saved_at_s = None if kept["saved_at_s"] is None else float(kept["saved_at_s"])
                known.save_intervals_s.extend(map(float, kept["save_intervals_s"]))
                known.sent_at_s.extend(map(float, kept["sent_at_s"]))
        except (KeyError, TypeError, AttributeError, IndexError) as error:
            raise ValueError(f"not what was written: {error!r}") from None
        for part in ("count", "recent", "active", "_unsaid", "_raised_at_s", "_runs"):
            setattr(self, part, getattr(taken, part))

    # --- inside -----------------------------------------------------------------------------------------------

    def _forget(self, run: str) -> None:
        for key in [key for key in self.active if key.run == run and key.rule in OF_LIVE_RUNS]:
            self._drop(key)

    def _drop(self, key: Key) -> None:
        self.active.pop(key, None)
        self._unsaid.discard(key)

    def _run(self, name: str) -> _Run:
        known = self._runs.pop(name, None) or _Run()
        self._runs[name] = known  # The one that was looked at last is the last to go.
        if len(self._runs) > RUNS_KEPT:
            del self._runs[next(iter(self._runs))]
        return known

    def _raise(
        self, key: Key, severity: Severity, title: str, text: str, next_step: str, now_s: float
    ) -> list[Notification]:
        if key.rule not in self.rules or key in self.active:
            return []
        if len(self.active) >= ACTIVE_LIMIT:
            self._drop(next(iter(self.active)))
        self.count += 1
        raised = Notification(
            id=self.count,
            rule=key.rule,
            run=key.run,
            subject=key.subject,
            state="raised",
            severity=severity,
            title=title,
            text=text,
            next_step=next_step,
            at=now_s,
        )
        known = self._run(key.run)
        came_back = key.rule != "stopped" and now_s - self._raised_at_s.get(key, -math.inf) < QUIET_S
        while known.sent_at_s and now_s - known.sent_at_s[0] > HOUR_S:
            known.sent_at_s.popleft()
        if came_back or len(known.sent_at_s) >= MOST_PER_HOUR:
            known.held_back += 1
            self.active[key] = raised
            self._unsaid.add(key)
            return []
        known.sent_at_s.append(now_s)
        raised, known.held_back = replace(raised, held_back=known.held_back), 0
        self._raised_at_s.pop(key, None)
        self._raised_at_s[key] = now_s
        if len(self._raised_at_s) > ACTIVE_LIMIT:
            del self._raised_at_s[next(iter(self._raised_at_s))]
        self.active[key] = raised
        self.recent.append(raised)
        return [raised]

    def _resolve(
        self, key: Key, title: str, text: str, now_s: float, *, quietly: bool = False
    ) -> list[Notification]:
        raised = self.active.pop(key, None)
        if raised is None or quietly or key in self._unsaid:
            self._unsaid.discard(key)
            return []  # Its start was not notified.
        self.count += 1
        resolved = replace(
            raised,
            id=self.count,
            state="resolved",
            severity="success",
            title=title,
            text=text,
            next_step="",
            at=now_s,
            held_back=0,
        )
        self.recent.append(resolved)
        return [resolved]


def _read(raw: dict[str, Any]) -> Notification:
    return Notification(**raw)


def _median(values: Iterable[float]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
