"""Everything one coordinator holds, put together once: engine, sessions, logs, feed, metrics and pages."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import get_args

import orjson

import strata
from strata.coordinator.auth.paths import ReadRules
from strata.coordinator.engine import Engine, SystemClock
from strata.coordinator.grpc.presence import Agents
from strata.coordinator.grpc.sessions import Sessions
from strata.coordinator.http.feed import Feed
from strata.coordinator.http.pages import Pages
from strata.coordinator.http.streams import StreamSlots
from strata.coordinator.inspection.checkpoints import Verifications
from strata.coordinator.inspection.datasets import DatasetInspection
from strata.coordinator.inspection.processes import VERIFYING_VARIABLES, InspectionProcesses
from strata.coordinator.journal.protocol import Journal
from strata.coordinator.leadership import Alone, Standing
from strata.coordinator.logs.archive import LogFilter
from strata.coordinator.logs.store import LogStore
from strata.coordinator.metrics.collectors import (
    JobCollector,
    LeadershipCollector,
    LogCollector,
    StorageCollector,
)
from strata.coordinator.metrics.instruments import CoordinatorMetrics
from strata.coordinator.metrics.run_history import RunHistory
from strata.coordinator.metrics.watch import Watch
from strata.coordinator.notify.notifier import Notifier
from strata.coordinator.notify.settings import NotifySettings
from strata.coordinator.tasks.runner import TaskRunner
from strata.coordinator.tasks.secrets import TaskSecrets
from strata.core import views
from strata.core.cluster import Cluster, Limits
from strata.core.faults.cost import PriceList
from strata.core.fleet import task_views
from strata.core.fleet.task_views import TaskView
from strata.core.fleet.tasks import ENDED
from strata.core.messages import Event, TaskId, TaskStatus
from strata.core.stream_events import LogsSkipped
from strata.core.types import WORKER_STATES
from strata.core.views import LogView
from strata.launch.recipes import Recipe, Recipes
from strata.launch.recipes_builtin import BUILT_IN

CHECKPOINTS_SHOWN = 500
BARRIERS_SHOWN = 100
LOGS_SHOWN = 100
TASKS_SHOWN = 500
LOGS_EVERY_S = 0.1
LOGS_AT_ONCE = 500
"""Of a flood, browsers are sent the newest lines and how many there were besides."""


@dataclass
class Runtime:
    engine: Engine
    sessions: Sessions
    agents: Agents
    logs: LogStore
    feed: Feed
    metrics: CoordinatorMetrics
    pages: Pages
    watch: Watch
    notifier: Notifier
    started_at_s: float
    recipes: Recipes
    inspection: DatasetInspection
    verifications: Verifications
    standing: Standing = field(default_factory=Alone)
    """Whether this coordinator leads."""
    prices: PriceList = field(default_factory=PriceList)
    run_history: RunHistory | None = None
    """What training loops have logged; none where there is no place on disk for it."""
    tasks: TaskRunner | None = None
    """Once it runs; none where tasks are only kept."""
    task_secrets: TaskSecrets | None = None
    """Where secret values of tasks are kept; none where there is no folder for them."""
    event_readers: StreamSlots = field(
        default_factory=lambda: StreamSlots(
            "events", most=4_096, most_per_client=256, instead="poll /api/events/recent"
        )
    )
    log_followers: StreamSlots = field(  # Each costs something with every line.
        default_factory=lambda: StreamSlots(
            "the log", most=256, most_per_client=16, instead="poll /api/logs with `after`"
        )
    )
    address: str = ""
    _readers: tuple[InspectionProcesses, ...] = ()
    _fresh_logs: list[LogView] = field(default_factory=list)

    @classmethod
    def create(
        cls,
        journal: Journal,
        limits: Limits,
        logs: LogStore,
        recipes: Iterable[Recipe] = BUILT_IN,
        read_rules: ReadRules | None = None,
        run_history: RunHistory | None = None,
        notify: NotifySettings | None = None,
        standing: Standing | None = None,
    ) -> Runtime:
        """A runtime with the journal's state; its engine is not running yet."""
        cluster, clock = Cluster(limits), SystemClock()
        engine = Engine(cluster, journal, clock)
        metrics, feed = CoordinatorMetrics(), Feed(boot_id=secrets.token_hex(4))
        # Verifying takes long: it does not take the places of work that a caller waits for.
        watch = Watch(engine, metrics, logs, feed.publish, lambda: fleet_metrics(cluster, metrics))
        quick, slow = InspectionProcesses(), InspectionProcesses(variables=VERIFYING_VARIABLES)
        runtime = cls(
            engine=engine,
            sessions=Sessions(engine),
            agents=Agents(engine),
            logs=logs,
            feed=feed,
            metrics=metrics,
            pages=Pages(engine),
            watch=watch,
            notifier=Notifier(
                engine, watch, logs, feed.publish, metrics.notified, notify or NotifySettings()
            ),
            started_at_s=time.time(),
            recipes=Recipes(recipes),
            inspection=DatasetInspection(quick, read_rules),
            verifications=Verifications(slow, read_rules),
            run_history=run_history,
            standing=standing or Alone(),
            _readers=(quick, slow),
        )
        engine.require_leading = runtime.standing.require
        engine.listeners += [
            runtime.metrics.committed,
            runtime.sessions.committed,
            runtime.agents.committed,
            runtime.feed.committed,
            runtime.watch.committed,
            runtime._notify,
        ]
        metrics.registry.register(LogCollector(logs))
        metrics.registry.register(StorageCollector(engine))
        metrics.registry.register(LeadershipCollector(runtime.standing))
        metrics.registry.register(JobCollector(runtime.watch, cluster.checkpoints))
        engine.on_tick = runtime.agents.look
        engine.on_plan = runtime.metrics.planned
        engine.on_events = runtime.metrics.decided
        runtime.logs.on_entries = runtime._publish_logs
        runtime._define_pages()
        return runtime

    def _notify(self, events: Sequence[Event]) -> None:
        """Several coordinators see the same events: the one that leads says so, once."""
        if self.standing.role == "leader":
            self.notifier.committed(events)

    def is_live(self, task_id: str) -> bool:
        """Whether a task may still act: it is known and has not ended."""
        task = self.engine.cluster.tasks.tasks.get(TaskId(task_id))
        return task is not None and task.status not in ENDED

    def end_readers(self) -> None:
        """No caller waits for files any more."""
        for processes in self._readers:
            processes.close()

    async def pulse(self) -> None:
        """Once a second: what changes all the time is measured and published together."""
        self.metrics.sample()
        self.logs.report_drops()
        self.watch.pulse()
        if self.standing.role == "leader":
            self.notifier.pulse()
        if self.feed.readers:
            self.feed.publish("metrics", self._metrics(await self.engine.settled()))

    async def prometheus(self) -> bytes:
        self.measure(await self.engine.settled())
        return self.metrics.exposition()

    def measure(self, cluster: Cluster) -> None:
        """Bring everything that is only looked at now and then up to date."""
        self.metrics.bring_up()
        counts: dict[str, int] = {}
        for member in cluster.membership.members.values():
            status = views.worker_status(cluster, member)
            counts[status] = counts.get(status, 0) + 1
        for state in WORKER_STATES:
            self.metrics.workers.labels(state).set(counts.get(state, 0))
        self.metrics.generation.set(cluster.membership.generation)
        self.metrics.sessions.set(len(self.sessions))
        self.metrics.agents.set(len(self.agents))
        self.metrics.event_readers.set(self.feed.readers)
        tasks = Counter(task.status for task in cluster.tasks.tasks.values())
        for task_status in get_args(TaskStatus):
            self.metrics.tasks.labels(task_status).set(tasks[task_status])

    def _publish_logs(self, entries: Sequence[LogView]) -> None:
        """Gathered for a moment: one event for many lines."""
        if not self.feed.readers:
            return
        if not self._fresh_logs:
            asyncio.get_running_loop().call_later(LOGS_EVERY_S, self._send_logs)
        self._fresh_logs += entries

    def _send_logs(self) -> None:
        fresh, self._fresh_logs = self._fresh_logs, []
        skipped = len(fresh) - LOGS_AT_ONCE
        if skipped > 0:
            self.feed.publish("logs_skipped", LogsSkipped(count=skipped))
        self.feed.publish("logs", fresh[-LOGS_AT_ONCE:])

    # --- pages ----------------------------------------------------------------------------------------------

    def _define_pages(self) -> None:
        self.pages.define("status", self._status)
        self.pages.define("workers", views.workers)
        self.pages.define("datasets", self._datasets)
        self.pages.define("checkpoints", self._checkpoints)
        self.pages.define("barriers", self._barriers)
        self.pages.define("recoveries", self._recoveries)
        self.pages.define("metrics", self._metrics)
        self.pages.define("tasks", self._tasks)
        self.pages.define("dashboard", self._dashboard)

    def _status(self, cluster: Cluster) -> views.StatusView:
        now_s = time.time()
        return views.StatusView(
            connected=True,
            address=self.address,
            uptime=now_s - self.started_at_s,
            version=strata.__version__,
            leader=self.standing.role == "leader",
            role=self.standing.role,
            led_by=self._led_by(),
            position=self.standing.position,
            behind=self.standing.behind,
            others=list(self.standing.others),
            generation=cluster.membership.generation,
            started_at=self.started_at_s,
            server_time=now_s,
            jobs={str(job): number for job, number in cluster.membership.job_changes.items()},
            storage=views.StorageView(
                is_full=self.engine.space.is_full,
                free_bytes=self.engine.space.free_bytes,
                needed_bytes=self.engine.space.low_bytes,
            ),
        )

    def _led_by(self) -> str:
        if self.standing.role == "leader":
            return self.address
        return self.standing.leader.grpc if self.standing.leader is not None else ""

    def _datasets(self, cluster: Cluster) -> list[views.DatasetView]:
        return [views.dataset(cluster, spec) for spec in cluster.datasets.specs.values()]

    def _checkpoints(self, cluster: Cluster) -> list[views.CheckpointView]:
        return [views.checkpoint(record) for record in cluster.checkpoints.shown()[:CHECKPOINTS_SHOWN]]

    def _barriers(self, cluster: Cluster) -> list[views.BarrierView]:
        return list(views.barriers(cluster, limit=BARRIERS_SHOWN))

    def _recoveries(self, cluster: Cluster) -> list[views.RecoveryView]:
        return [views.recovery(record) for record in reversed(cluster.recoveries.records)]

    def _metrics(self, cluster: Cluster) -> views.MetricsView:
        return fleet_metrics(cluster, self.metrics)

    def _tasks(self, cluster: Cluster) -> list[TaskView]:
        newest = list(reversed(cluster.tasks.tasks.values()))[:TASKS_SHOWN]
        return [task_views.task(task, orjson.loads(task.spec.config_json)) for task in newest]

    def _dashboard(self, cluster: Cluster) -> views.DashboardView:
        return views.DashboardView(
            coordinator=self._status(cluster),
            workers=views.workers(cluster),
            datasets=self._datasets(cluster),
            checkpoints=self._checkpoints(cluster)[:100],
            barriers=self._barriers(cluster),
            metrics=self._metrics(cluster),
            tasks=self._tasks(cluster)[:100],
            logs=self.logs.newest(LOGS_SHOWN, LogFilter()),
            jobs=self.watch.last_reported(),
        )


def fleet_metrics(cluster: Cluster, metrics: CoordinatorMetrics) -> views.MetricsView:
    return views.MetricsView(
        checkpoint_throughput=metrics.checkpoint_mb_s(),
        coordinator_rps=metrics.requests_per_second(),
        active_workers=views.active_workers(cluster),
        total_workers=len(cluster.membership.members),
        barrier_latency_p99=metrics.barrier_p99_ms(),
        shard_assignment_time=metrics.plan_ms(),
    )
