"""Tasks made real: the queue is watched, a launcher starts what fits, and what it observes becomes facts.

Every decision is the core's; this shell carries it out. An attempt is durable before its processes exist and over only
when they have exited, so that a coordinator killed at any moment finds each task either running, and adopts it, or to be run.
Oldest first: a task that waits for capacity lets none behind it pass, unless there could never be enough here.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import replace

from strata.coordinator.engine import Engine, StorageFull, Unavailable
from strata.coordinator.logs.archive import LogFilter
from strata.coordinator.logs.store import LogStore
from strata.coordinator.tasks.plans import Planner
from strata.core.cluster import Cluster
from strata.core.fleet.tasks import ENDED, Task
from strata.core.messages import (
    BeginAttempt,
    EndAttempt,
    Event,
    ExitCause,
    JobId,
    NoteProgress,
    NoteWhereabouts,
    QueueTask,
    Refused,
    Reply,
    TaskChanged,
    TaskCreated,
    TaskId,
)
from strata.core.pauses import pause_after_s
from strata.core.telemetry.loglines import LineAssembler, LogLine
from strata.core.telemetry.logtext import Tidy
from strata.errors import StrataError
from strata.launch.concealer import Concealer
from strata.launch.protocol import (
    Capacity,
    Exited,
    Launcher,
    LaunchFailed,
    LaunchPlan,
    Listener,
    Lost,
    Observation,
    Output,
    Started,
)
from strata.logs import OutageLog

log = logging.getLogger("strata.coordinator.tasks")

LOOK_S = 0.5
PROGRESS_S = 1.0
RETRY_FIRST_S = 1.0
RETRY_MOST_S = 60.0
CAUSE_CHARACTERS = 1_000
KNOWN_ENTRIES = 5_000
FORGET_AGAIN = 20
ELSEWHERE_S = 30.0
"""How long a stop waits for the machine of another coordinator, beyond what a task has to stop."""
AWAY_S = 5.0
"""So long the coordinator of another machine may be silent before that is said of its tasks."""
TOTAL_STEPS = "total_steps"
"""The metric by which workers say how many steps there will be."""


class TaskRunner:
    def __init__(
        self,
        engine: Engine,
        logs: LogStore,
        planner: Planner,
        make_launcher: Callable[[Listener], Launcher],
        *,
        stop_timeout_s: float,
        here: str = "",
        report_end: Callable[[EndAttempt], Awaitable[None]] | None = None,
    ) -> None:
        """`here`: the name of this coordinator among several, where a launcher sees this machine alone; attempts of others are left to
        them. `report_end`: for a standby, which starts nothing: how the leader is notified of an end."""
        self._here = here
        self._report_end = report_end
        self._engine = engine
        self._logs = logs
        self._planner = planner
        self._launcher = make_launcher(self._observe)
        self._stop_timeout_s = stop_timeout_s
        self._wake = asyncio.Event()
        self._changed = asyncio.Event()
        self._stopping: set[str] = set()
        """Runs that the launcher was asked to stop."""
        self._unended: set[TaskId] = set()
        """Tasks that have not ended, or that the launcher has still to forget."""
        self._retry_mono_s: dict[TaskId, float] = {}
        self._assemblers: dict[str, dict[tuple[int | None, str], LineAssembler]] = {}
        self._known: dict[str, dict[tuple[str | None, str], float]] = {}
        """By adopted run: the timestamp of each stream's newest line in the log."""
        self._conceal: dict[str, Concealer] = {}
        """By run: what hides its secrets."""
        self._endings: set[asyncio.Task[None]] = set()
        self._progress_mono_s = 0.0
        self._stop_seen_mono_s: dict[str, float] = {}
        """By attempt of another coordinator: when it was first seen that it is to stop."""
        self._attended: frozenset[str] = frozenset()
        self._missed_mono_s: dict[str, float] = {}
        """By coordinator, as in `Task.where`: since when no coordinator looks after what it has started."""
        engine.listeners.append(self._committed)

    async def run(self) -> None:
        """Until cancelled; the launched processes continue."""
        adopted = False
        outage = OutageLog(log, over="tasks are supervised again")
        try:
            while True:
                try:
                    if not adopted:
                        await self._adopt()
                        adopted = True
                    await self._look()
                    outage.ended()
                except Unavailable:
                    pass  # The coordinator is stopping, or has too much to do for a moment.
                except StrataError as error:
                    outage.met(f"tasks cannot be supervised: {error}", level=logging.ERROR)
                except Exception as error:  # A mistake here must not take the coordinator down.
                    text = f"tasks could not be supervised; retrying: {error!r}"
                    outage.met(text, level=logging.ERROR, traceback=True)
                try:
                    async with asyncio.timeout(LOOK_S):
                        await self._wake.wait()
                except TimeoutError:
                    pass
                self._wake.clear()
        finally:
            await self._launcher.close()
            # An attempt that is not over yet is seen to end by the next coordinator.
            for ending in self._endings:
                ending.cancel()
            for run_id in list(self._assemblers):
                self._close_output(run_id)

    def take_ends(self, ends: Sequence[EndAttempt], taken: Callable[[EndAttempt], None]) -> None:
        """What standbys have seen end on their machines; `taken` is called for each when that is durable."""
        for end in ends:

            def answered(answer: Reply | StrataError, end: EndAttempt = end) -> None:
                if not isinstance(answer, Unavailable):
                    taken(end)

            self._engine.post(end, answered)

    def see_attended(self, places: Iterable[str]) -> None:
        """Which standbys look after what is on their machines."""
        self._attended = frozenset(places)

    def capacity(self) -> Capacity:
        return self._launcher.capacity()

    async def ended(self, task_id: TaskId, *, timeout_s: float) -> Task:
        """The task when it has ended and nothing is left of it, or as it is after `timeout_s`."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            self._changed.clear()
            task = (await self._engine.settled()).tasks.get(task_id)
            left_s = deadline_s - time.monotonic()
            if (task.status in ENDED and task_id not in self._unended) or left_s <= 0:
                return task
            try:
                async with asyncio.timeout(left_s):
                    await self._changed.wait()
            except TimeoutError:
                pass

    def _committed(self, events: Sequence[Event]) -> None:
        if any(isinstance(event, TaskCreated | TaskChanged) for event in events):
            self._wake.set()
            self._changed.set()

    # --- from facts to processes ----------------------------------------------------------------------------

    async def _adopt(self) -> None:
        cluster = await self._engine.settled()
        running = [
            task for task in cluster.tasks.tasks.values() if task.status == "running" and self._is_here(task)
        ]
        # Those that ended last as well: a coordinator that was killed may not have come to forget them.
        self._unended.update(list(cluster.tasks.tasks)[-FORGET_AGAIN:])
        self._unended.update(t.spec.task_id for t in cluster.tasks.tasks.values() if t.status not in ENDED)
        plans = [self._planner.plan_to_take_up(task) for task in running]
        for plan in plans:
            self._conceal[plan.run_id] = Concealer(plan.secrets)
            await self._look_up_known(plan)
        await self._launcher.adopt(plans)

    async def _look_up_known(self, plan: LaunchPlan) -> None:
        """The newest line of each stream that is in the log already: launchers repeat some lines."""
        known = self._known.setdefault(plan.run_id, {})
        for entry in await self._logs.search(KNOWN_ENTRIES, LogFilter(task_id=plan.task_id)):
            stream = (entry.worker_id, entry.source)
            known[stream] = max(known.get(stream, 0.0), entry.timestamp)

    async def _look(self) -> None:
        cluster = await self._engine.settled()
        tasks = list(cluster.tasks.tasks.values())
        running = [task for task in tasks if task.status == "running"]
        for task in running:
            if not self._is_here(task):
                self._say_who_attends(task)
                self._give_up_if_silent(cluster, task)
                continue
            run_id = self._planner.run_id(task)
            if task.stopping and run_id not in self._stopping:
                self._stopping.add(run_id)
                await self._launcher.stop(run_id, patience_s=self._stop_timeout_s)
        await self._forget_ended(cluster)
        self._release_idle_output()
        if self._report_end is not None:
            return
        self._note_progress(cluster, running)
        here = [task for task in running if self._is_here(task)]
        await self._start_what_fits([task for task in tasks if task.status == "pending"], here)

    def _is_here(self, task: Task) -> bool:
        return task.where in ("", self._here)

    def _say_who_attends(self, task: Task) -> None:
        if self._report_end is not None:
            return
        host = task.where.partition(":")[0]
        if task.where in self._attended:
            self._missed_mono_s.pop(task.where, None)
            reason = f"attempt {task.attempt} on {host}, supervised by a standby"
        elif time.monotonic() - self._missed_mono_s.setdefault(task.where, time.monotonic()) >= AWAY_S:
            reason = (
                f"attempt {task.attempt} on {host}, whose coordinator is unreachable: until it is back, only what the "
                "workers report is known"
            )
        else:
            return
        if reason != task.reason and not task.stopping:
            self._post(NoteWhereabouts(task_id=task.spec.task_id, attempt=task.attempt, reason=reason))

    def _give_up_if_silent(self, cluster: Cluster, task: Task) -> None:
        """An attempt on the machine of another coordinator is that one's to end. If it is to stop, nothing reports it, and no
        coordinator ends it, its machine is lost; should it come back, what is left of the attempt is ended there."""
        if not task.stopping or self._report_end is not None:
            return
        members, job = cluster.membership, JobId(task.spec.task_id)
        pulses = (members.pulses.get(worker) for worker in members.roster(job))
        first_s = self._stop_seen_mono_s.setdefault(self._planner.run_id(task), time.monotonic())
        if time.monotonic() - first_s < self._stop_timeout_s + ELSEWHERE_S or any(
            p and p.connected for p in pulses
        ):
            return
        cause = ExitCause(
            kind="lost", message=f"lost: neither the task nor {task.where} has reported", may_retry=False
        )
        self._post(EndAttempt(task_id=task.spec.task_id, attempt=task.attempt, cause=cause))

    async def _forget_ended(self, cluster: Cluster) -> None:
        alive = {task_id for task_id, task in cluster.tasks.tasks.items() if task.status not in ENDED}
        for task_id in self._unended - alive:
            self._retry_mono_s.pop(task_id, None)
            await self._launcher.forget(task_id)
            task = cluster.tasks.tasks.get(task_id)
            if task is None or task.status == "completed":  # Others may be run again.
                self._planner.secrets.forget(task_id)
        self._unended = alive
        self._changed.set()

    async def _start_what_fits(self, pending: list[Task], running: list[Task]) -> None:
        capacity = self.capacity()
        free = Capacity(
            workers=capacity.workers - sum(task.spec.worker_count for task in running),
            gpus=capacity.gpus - sum(_gpus(task) for task in running),
        )
        place = 0
        for task in pending:
            wait_s = self._retry_mono_s.get(task.spec.task_id, 0.0) - time.monotonic()
            if not _fits(task, capacity):
                self._queue(
                    task, f"waiting for more capacity: it needs {_needs(task)}, and {_has(capacity)} here"
                )
            elif wait_s > 0:
                continue  # Its reason names the failure.
            elif place == 0 and _fits(task, free):
                free = Capacity(workers=free.workers - task.spec.worker_count, gpus=free.gpus - _gpus(task))
                await self._start(task)
            else:
                place += 1
                self._queue(
                    task, f"number {place} in the queue: it needs {_needs(task)}, and {_has(free)} free"
                )

    def _queue(self, task: Task, reason: str) -> None:
        if task.reason != reason:
            self._post(QueueTask(task_id=task.spec.task_id, reason=reason))

    async def _start(self, task: Task) -> None:
        task_id = task.spec.task_id
        cluster = await self._engine.settled()
        saved = cluster.checkpoints.latest(JobId(task_id))
        begins = f"from the checkpoint at step {saved.step}" if saved is not None else "from step 0"
        try:
            await self._engine.submit(
                BeginAttempt(
                    task_id=task_id,
                    reason=f"attempt {task.attempt + 1} on '{self._launcher.name}', {begins}",
                    where=self._here,
                )
            )
        except (Refused, StorageFull):
            return  # It was stopped in between, or it begins when there is space.
        cluster = await self._engine.settled()
        task = cluster.tasks.get(task_id)
        try:
            plan = self._planner.plan(cluster, task)
            self._conceal[plan.run_id] = Concealer(plan.secrets)
            self._planner.prepare(plan, cluster, task)
            await self._launcher.start(plan)
        except StrataError as error:
            self._end(task_id, task.attempt, _cannot_launch(error))

    # --- from processes to facts ----------------------------------------------------------------------------

    def _observe(self, observation: Observation) -> None:
        match observation:
            case Started():
                self._say(observation.task_id, "info", f"started on {observation.where}")
            case Output():
                self._take_output(observation)
            case Exited():
                self._close_output(observation.run_id)
                self._end(observation.task_id, _attempt(observation.run_id), observation.cause)
            case Lost():
                self._close_output(observation.run_id)
                cause = ExitCause(kind="lost", message=f"lost: {observation.reason}")
                self._end(observation.task_id, _attempt(observation.run_id), cause)

    def _end(self, task_id: TaskId, attempt: int, cause: ExitCause | None) -> None:
        task = self._engine.cluster.tasks.tasks.get(task_id)
        conceal = self._conceal.pop(f"{task_id}-{attempt}", _conceal_nothing)
        cause = _tidied(cause, conceal) if cause is not None else None
        if cause is not None and task is not None:
            failures = task.failures + 1  # With this one, which is not durable yet.
            wait_s = pause_after_s(failures, first_s=RETRY_FIRST_S, longest_s=RETRY_MOST_S)
            self._retry_mono_s[task_id] = time.monotonic() + wait_s
            details = f"\n{cause.traceback}" if cause.traceback else ""
            self._say(task_id, "error", f"attempt {attempt} ended: {cause.message}{details}")
        ending = asyncio.create_task(self._end_when_logged(task_id, attempt, cause))
        self._endings.add(ending)
        ending.add_done_callback(self._endings.discard)

    async def _end_when_logged(self, task_id: TaskId, attempt: int, cause: ExitCause | None) -> None:
        """The output of an attempt that is over is not read again: what it said must not be lost with this process."""
        await self._logs.flush()
        end = EndAttempt(task_id=task_id, attempt=attempt, cause=cause)
        if self._report_end is not None:
            await self._report_end(end)
        else:
            self._post(end)

    def _note_progress(self, cluster: Cluster, running: list[Task]) -> None:
        now_s = time.monotonic()
        if now_s - self._progress_mono_s < PROGRESS_S:
            return
        self._progress_mono_s = now_s
        for task in running:
            task_id = task.spec.task_id
            workers = tuple(cluster.membership.roster(JobId(task_id)))
            reports = [r for w in workers if (r := cluster.membership.reports.get(w)) is not None]
            total = max((int(r.metrics.get(TOTAL_STEPS, 0.0)) for r in reports), default=0)
            if total <= 0:
                continue  # No worker has said anything yet, or they have just been started anew.
            step = max(r.step for r in reports)
            seen = (task.step, task.total_steps, task.worker_ids, task.progressed_attempt)
            if seen != (step, total, workers, task.attempt):
                self._post(
                    NoteProgress(
                        task_id=task_id,
                        attempt=task.attempt,
                        worker_ids=workers,
                        step=step,
                        total_steps=total,
                    )
                )

    def _post(self, command: QueueTask | EndAttempt | NoteProgress | NoteWhereabouts) -> None:
        def answered(answer: Reply | StrataError) -> None:
            # A full disk is logged once, by the engine.
            if isinstance(answer, StrataError) and not isinstance(answer, StorageFull):
                log.warning("task %s: %s", command.task_id, answer)

        try:
            self._engine.post(command, answered)
        except Unavailable:
            if isinstance(command, EndAttempt):  # Everything else is seen again at the next look.
                asyncio.get_running_loop().call_later(LOOK_S, self._post, command)

    # --- output ---------------------------------------------------------------------------------------------

    def _take_output(self, output: Output) -> None:
        streams = self._assemblers.setdefault(output.run_id, {})
        done: dict[int | None, list[LogLine]] = {}
        known = self._known.get(output.run_id, {})
        conceal = self._conceal.get(output.run_id, _conceal_nothing)
        for line in output.lines:
            if known and line.at_s <= known.get((_worker(output.task_id, line.rank), line.stream), 0.0):
                continue
            assembler = streams.get((line.rank, line.stream))
            if assembler is None:
                assembler = LineAssembler(source=line.stream, task_id=output.task_id)
                streams[line.rank, line.stream] = assembler
            text = conceal(line.text).encode(errors="replace") + b"\n"
            done.setdefault(line.rank, []).extend(assembler.feed(text, line.at_s))
        for rank, entries in done.items():
            self._add(output.task_id, rank, entries)
        if output.dropped:
            self._logs.add_lines([], sender=f"task {output.task_id}", dropped=output.dropped)

    def _release_idle_output(self) -> None:
        now_s = time.time()
        for run_id, streams in self._assemblers.items():
            for (rank, _), assembler in streams.items():
                self._add(_task(run_id), rank, assembler.idle(now_s))

    def _close_output(self, run_id: str) -> None:
        self._known.pop(run_id, None)
        for (rank, _), assembler in self._assemblers.pop(run_id, {}).items():
            self._add(_task(run_id), rank, assembler.close(time.time()))

    def _add(self, task_id: TaskId, rank: int | None, entries: list[LogLine]) -> None:
        if not entries:
            return
        worker_id = _worker(task_id, rank)
        sender = f"worker {worker_id}" if worker_id is not None else f"task {task_id}"
        self._logs.add_lines(entries, sender=sender, worker_id=worker_id)

    def _say(self, task_id: TaskId, level: str, message: str) -> None:
        self._logs.add(level=level, message=message, source="coordinator", at_s=time.time(), task_id=task_id)


def _worker(task_id: TaskId, rank: int | None) -> str | None:
    return f"{task_id}-rank{rank}" if rank is not None else None


def _task(run_id: str) -> TaskId:
    return TaskId(run_id.rpartition("-")[0])


def _attempt(run_id: str) -> int:
    return int(run_id.rpartition("-")[2])


def _gpus(task: Task) -> int:
    return task.spec.worker_count * task.spec.gpus_per_worker


def _fits(task: Task, free: Capacity) -> bool:
    return task.spec.worker_count <= free.workers and _gpus(task) <= free.gpus


def _needs(task: Task) -> str:
    gpus = _gpus(task)
    return f"{task.spec.worker_count} workers" + (f" and {gpus} GPUs" if gpus else "")


def _has(free: Capacity) -> str:
    return (
        f"{max(0, free.workers)} workers"
        + (f" and {max(0, free.gpus)} GPUs" if free.gpus > 0 else "")
        + " are"
    )


def _tidied(cause: ExitCause, conceal: Concealer) -> ExitCause:
    """Texts from programs, such that they can be written down."""
    return replace(
        cause,
        message=_tidy(conceal(cause.message))[:CAUSE_CHARACTERS],
        signal=_tidy(cause.signal)[:32],
        traceback=_tidy(conceal(cause.traceback)),
    )


def _cannot_launch(error: StrataError) -> ExitCause:
    return ExitCause(kind="launch", message=str(error), may_retry=isinstance(error, LaunchFailed))


_tidy = Tidy()
_conceal_nothing = Concealer(())
