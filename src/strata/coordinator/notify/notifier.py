"""The shell around `core.faults.notifications`: facts and samples in, notifications out to channels, the event stream and the log.

Nothing here waits: the engine's listener and the pulse put notifications into bounded queues, and a thread for each channel
sends them, in order, again after ever longer pauses where that may help (`strata.backoff`). What does not fit into a queue is
dropped, the oldest first; what was dropped or given up is counted, and said in the log. What was notified lately and what still holds
outlives a restart of the coordinator.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from strata.backoff import Backoff
from strata.coordinator.engine import Engine
from strata.coordinator.logs.store import LogStore
from strata.coordinator.metrics.watch import JobMetrics, Watch
from strata.coordinator.notify.channels import send
from strata.coordinator.notify.settings import Channel, NotifySettings
from strata.core.faults.notifications import RULES, Disk, Notification, Notifications, Rule, Sample
from strata.core.messages import Event, JobId, Unknown
from strata.core.telemetry.run_metrics import MetricBatch

log = logging.getLogger("strata.coordinator.notify")

QUEUED_LIMIT = 100
FIRST_PAUSE_S, LONGEST_PAUSE_S, BUDGET_S = 1.0, 60.0, 1_800.0
"""Between attempts, and how long they are made for one notification."""
LAST_WORDS_S = 3.0
"""What a coordinator that stops still gives its channels."""
KEEP_EVERY_S = 2.0
NOTE = "notifications"
LOSS_NAMES = ("loss", "train/loss", "train_loss", "training_loss")
"""What loops call the loss that they train on; the first that is there counts."""
LOSSES_AT_ONCE = 200
"""Of a batch, so many of the newest are judged; what is not finite always is."""
LOGGED_S = 60.0
"""A run that has logged its loss within this is judged by that, and not by its heartbeats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelView:
    """One channel, without its secrets."""

    name: str
    kind: str
    address: str
    rules: list[str]
    """Only these; empty: all that count."""
    runs: list[str]
    """Patterns of runs; empty: all."""
    sent: int
    failed: int
    """Given up, after every attempt."""
    dropped: int
    """Not attempted: too many waited."""
    waiting: int
    last_sent_at: float | None
    last_error: str
    """Of the newest attempt; empty where it succeeded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleView:
    name: str
    enabled: bool
    threshold: float | None
    """Null where the rule has none."""
    unit: str
    meaning: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NotifyView:
    channels: list[ChannelView]
    rules: list[RuleView]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliveryView:
    """The outcome of a test notification."""

    channel: str
    kind: str
    delivered: bool
    error: str


class _Outbox:
    """What waits for one channel, and the thread that sends it."""

    def __init__(self, channel: Channel, dashboard_url: str, count: Callable[[str], None]) -> None:
        self.channel = channel
        self._dashboard_url = dashboard_url
        self._count = count
        self._waiting: deque[Notification] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._ends_at_s = math.inf
        self._sent = self._failed = self._dropped = 0
        self._sent_at_s: float | None = None
        self._error = ""
        self._thread: threading.Thread | None = None

    def put(self, notification: Notification) -> None:
        with self._changed:
            if self._closing:
                return
            if len(self._waiting) >= QUEUED_LIMIT:
                self._waiting.popleft()
                self._dropped += 1
                self._count("dropped")
            self._waiting.append(notification)
            self._changed.notify_all()
            if self._thread is None:
                name = f"notify-{self.channel.name}"
                self._thread = threading.Thread(target=self._work, name=name, daemon=True)
                self._thread.start()

    def attempt(self, notification: Notification) -> str:
        """One attempt, now, beside what waits. Blocks; the error, or empty."""
        sent = send(self.channel, notification, dashboard_url=self._dashboard_url)
        with self._changed:
            self._error = sent.error
            if sent.is_delivered:
                self._sent_at_s = time.time()
        return sent.error

    def view(self) -> ChannelView:
        channel = self.channel
        with self._changed:
            return ChannelView(
                name=channel.name,
                kind=channel.kind,
                address=channel.address,
                rules=list(channel.rules),
                runs=list(channel.runs),
                sent=self._sent,
                failed=self._failed,
                dropped=self._dropped,
                waiting=len(self._waiting),
                last_sent_at=self._sent_at_s,
                last_error=self._error,
            )

    def begin_to_close(self, until_mono_s: float) -> None:
        with self._changed:
            self._closing = True
            self._ends_at_s = until_mono_s
            self._changed.notify_all()

    def join(self, until_mono_s: float) -> None:
        if self._thread is not None:
            self._thread.join(max(0.0, until_mono_s - time.monotonic()))

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closing or bool(self._waiting))
                if not self._waiting or time.monotonic() > self._ends_at_s:
                    return
                notification = self._waiting[0]
            try:
                self._deliver(notification)
            except Exception:  # A bug here must not silence the channel for good.
                log.exception("a notification was lost")
            with self._changed:
                if self._waiting and self._waiting[0] is notification:
                    self._waiting.popleft()
                self._changed.notify_all()

    def _deliver(self, notification: Notification) -> None:
        backoff = Backoff(first_s=FIRST_PAUSE_S, longest_s=LONGEST_PAUSE_S, budget_s=BUDGET_S)
        channel, is_first = self.channel, True
        while True:
            sent = send(channel, notification, dashboard_url=self._dashboard_url)
            with self._changed:
                self._error = sent.error
                if sent.is_delivered:
                    self._sent += 1
                    self._sent_at_s = time.time()
            if sent.is_delivered:
                self._count("sent")
                return
            pause_s = backoff.pause_s() if sent.again else None
            if pause_s is None or self._waits_in_vain(max(pause_s, sent.after_s)):
                break
            if is_first:
                is_first = False
                log.warning(
                    "channel %s did not accept a notification; retrying: %s", channel.name, sent.error
                )
        log.error("channel %s was not notified that %s: %s", channel.name, notification.title, sent.error)
        with self._changed:
            self._failed += 1
        self._count("failed")

    def _waits_in_vain(self, pause_s: float) -> bool:
        """Pause; True where the coordinator ends first."""
        with self._changed:
            self._changed.wait_for(lambda: self._closing, pause_s)
            return self._closing and time.monotonic() + FIRST_PAUSE_S > self._ends_at_s


class Notifier:
    def __init__(
        self,
        engine: Engine,
        watch: Watch,
        logs: LogStore,
        publish: Callable[[str, Any], None],
        count: Callable[[str], None],
        settings: NotifySettings,
    ) -> None:
        self.notifications = Notifications(settings.rules)
        self._engine = engine
        self._watch = watch
        self._logs = logs
        self._publish = publish
        self._outboxes = [_Outbox(channel, settings.dashboard_url, count) for channel in settings.channels]
        self._logged_at_s: dict[JobId, float] = {}
        self._steps: dict[JobId, int] = {}
        self._is_dirty = False
        self._kept_mono_s = 0.0
        self._recall()

    # --- for the event loop, never waiting ------------------------------------------------------------------

    def committed(self, events: Sequence[Event]) -> None:
        """A listener of the engine."""
        found = self.notifications.take_events(events, self._engine.cluster.incidents.records, time.time())
        self._tell(found)

    def logged(self, job: JobId, batch: MetricBatch) -> None:
        """What a training loop has logged."""
        for rows in batch.rows:
            name = next((name for name in LOSS_NAMES if name in rows.names), None)
            if name is None or not len(rows.steps):
                continue
            now_s = time.time()
            self._logged_at_s[job] = now_s
            losses = rows.values[:, rows.names.index(name)]
            bad = np.flatnonzero(~np.isfinite(losses[:-LOSSES_AT_ONCE]))
            if len(bad):  # Of many that come at once, these are not overlooked.
                first = int(bad[0])
                self._judge(job, losses[first : first + 1], int(rows.steps[first]), now_s)
            newest = losses[-LOSSES_AT_ONCE:]
            bad = np.flatnonzero(~np.isfinite(newest))
            step = rows.steps[-LOSSES_AT_ONCE:][int(bad[0])] if len(bad) else rows.steps[-1]
            self._judge(job, newest, int(step), now_s)

    def pulse(self) -> None:
        """Once a second."""
        now_s, cluster, watch = time.time(), self._engine.cluster, self._watch
        samples = {job: self._sample(job, metrics) for job, metrics in watch.jobs.items()}
        jobs = cluster.membership.job_generations
        waiting = [
            incident
            for incident in cluster.incidents.records.values()
            # A launch whose workers do not register reports no recovery.
            if incident.is_open and incident.is_about_run and incident.reported.job_id in jobs
        ]
        self._tell(self.notifications.take_samples(samples, self._disks(), waiting, now_s))
        self._judge_reported_losses(now_s)
        self._logged_at_s = {job: at_s for job, at_s in self._logged_at_s.items() if now_s - at_s < LOGGED_S}
        self._steps = {job: step for job, step in self._steps.items() if job in watch.jobs}
        self._keep()

    def shown(self, run: str | None = None) -> list[Notification]:
        """Newest first."""
        return [each for each in reversed(self.notifications.recent) if run is None or each.run == run]

    def view(self) -> NotifyView:
        rules = self.notifications.rules
        return NotifyView(
            channels=[outbox.view() for outbox in self._outboxes],
            rules=[
                RuleView(
                    name=name,
                    enabled=name in rules,
                    threshold=rules.get(name, about.default) if about.default is not None else None,
                    unit=about.unit,
                    meaning=about.meaning,
                )
                for name, about in RULES.items()
            ],
        )

    async def test(self, name: str | None) -> list[DeliveryView]:
        """Send a test to one channel, or to all; one attempt each, waited for."""
        outboxes = [outbox for outbox in self._outboxes if name in (None, outbox.channel.name)]
        if name is not None and not outboxes:
            known = ", ".join(outbox.channel.name for outbox in self._outboxes) or "none"
            raise Unknown("channel", name, hint=f"Configured channels: {known}.")
        text = "If you can read this, notifications of this channel work."
        notification = _test(text, time.time())
        errors = await asyncio.gather(*(asyncio.to_thread(each.attempt, notification) for each in outboxes))
        return [
            DeliveryView(channel=each.channel.name, kind=each.channel.kind, delivered=not error, error=error)
            for each, error in zip(outboxes, errors, strict=True)
        ]

    def close(self) -> None:
        """What waits has a little time left."""
        self._keep(now=True)
        until_mono_s = time.monotonic() + LAST_WORDS_S
        for outbox in self._outboxes:
            outbox.begin_to_close(until_mono_s)
        for outbox in self._outboxes:
            outbox.join(until_mono_s)

    # --- inside -----------------------------------------------------------------------------------------------

    def _tell(self, found: Iterable[Notification]) -> None:
        for notification in found:
            self._is_dirty = True
            level = logging.INFO if notification.state == "resolved" else logging.WARNING
            log.log(level, "%s. %s", notification.title, notification.text)
            self._publish("notification", notification)
            for outbox in self._outboxes:
                if outbox.channel.wants(notification):
                    outbox.put(notification)

    def _sample(self, job: JobId, metrics: JobMetrics) -> Sample:
        spent = self._watch.goodput.view(job)
        rate, unit = metrics.tokens_per_second, "tokens/s"
        if rate is None:
            rate, unit = metrics.samples_per_second, "samples/s"
        if rate is None and metrics.step_time_s:
            rate, unit = 1 / metrics.step_time_s, "steps/s"
        return Sample(
            step=metrics.step,
            workers=metrics.workers,
            rate=rate,
            unit=unit,
            training_s=spent.training_s,
            total_s=spent.total_s,
        )

    def _disks(self) -> list[Disk]:
        space = self._engine.space
        own = Disk(
            name=f"the disk of {space.folder}",
            run="",
            free_bytes=space.free_bytes,
            total_bytes=space.total_bytes,
        )
        of_runs = [
            Disk(
                name="the disk of its checkpoints",
                run=job,
                free_bytes=int(metrics.disk_free_bytes),
                total_bytes=int(metrics.disk_total_bytes),
            )
            for job, metrics in self._watch.jobs.items()
            if metrics.disk_free_bytes is not None and metrics.disk_total_bytes
        ]
        return [own, *of_runs]

    def _judge_reported_losses(self, now_s: float) -> None:
        """Of runs that say their loss with heartbeats alone."""
        for job, metrics in self._watch.jobs.items():
            if job in self._logged_at_s:
                continue
            if metrics.loss_is_nonfinite:
                losses = [math.nan]
            elif metrics.loss is not None and metrics.step != self._steps.get(job):
                losses = [metrics.loss]
            else:
                continue
            self._steps[job] = metrics.step
            self._tell(self.notifications.take_losses(job, losses, metrics.step, now_s))

    def _judge(self, job: JobId, losses: npt.NDArray[np.float64], step: int, now_s: float) -> None:
        self._tell(self.notifications.take_losses(job, losses.tolist(), step, now_s))

    def _keep(self, *, now: bool = False) -> None:
        if not self._is_dirty or self._logs.archive is None:
            return
        if now or time.monotonic() - self._kept_mono_s >= KEEP_EVERY_S:
            self._is_dirty = False
            self._kept_mono_s = time.monotonic()
            self._logs.archive.keep_note(NOTE, self.notifications.dump())

    def _recall(self) -> None:
        body = self._logs.archive.note(NOTE) if self._logs.archive is not None else None
        if body is not None:
            try:
                self.notifications.load(body)
            except ValueError as error:
                log.warning("the history of notifications is lost: %s", error)


def _test(text: str, now_s: float) -> Notification:
    rule: Rule = "test"
    return Notification(
        id=0,
        rule=rule,
        run="",
        subject="",
        state="raised",
        severity="info",
        title="A test notification of Strata",
        text=text,
        next_step="",
        at=now_s,
    )
