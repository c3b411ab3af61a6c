"""Tasks on this machine: one torchrun agent for each run, kept by a process that outlives the coordinator.

Everything about a run is in its folder (see `strata.launch.supervisor`), so that a new coordinator takes it up where the old
one was killed: a run whose supervisor lives is watched on, one that has ended is reported, one that is no longer wanted is ended. Output
resumes at a position a few seconds before the last that was reported, so some lines are reported twice and none is lost.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from strata.core.messages import ExitCause, TaskId
from strata.files import write_file
from strata.launch.cleanup import RUN_VARIABLE, end_processes, processes_of
from strata.launch.output import OutputReader, Position
from strata.launch.protocol import (
    Capacity,
    Exited,
    LaunchFailed,
    LaunchPlan,
    Listener,
    Lost,
    Output,
    Started,
)
from strata.launch.supervisor import write_atomically
from strata.launch.torchrun import TorchrunSpec
from strata.processes import Process
from strata.shared_memory import forget_jobs

POLL_S = 0.2
READ_BYTES = 256 << 10
"""Output read from one run at a time: a flood waits on disk, where it is bounded."""
BREATH_S = 0.01
"""Between two pieces of what a flood has left: others have the event loop too."""
POSITION_S = 1.0
SAFE_S = 5.0
"""After so long, what was reported is on the listener's disk too."""
APPEAR_S, START_S = 30.0, 300.0
"""How long a supervisor may take to say who it is: one of an earlier coordinator, which may be no more, and one that was started now."""
WRITE_S = 10.0
"""How long it may take to write down how its run has ended, after it was ended by force."""
LEAVE_S = 10.0
"""What is left of a run whose supervisor was killed has this long to save and leave."""


@dataclass(slots=True, eq=False)
class _Run:
    plan: LaunchPlan
    reader: OutputReader
    gpus: tuple[int, ...]
    child: subprocess.Popen[bytes] | None = None
    """Where this coordinator has started the supervisor: it must be waited for."""
    supervisor: Process | None = None
    watching: asyncio.Task[None] | None = None
    stopping: asyncio.Task[None] | None = None
    positions: deque[tuple[float, Position]] = field(default_factory=deque)
    """Where the reader was, and when; from the last one written on."""


class LocalLauncher:
    name = "local"

    def __init__(self, listener: Listener, *, tasks_dir: Path, capacity: Capacity) -> None:
        self._tell = listener
        self._tasks_dir = tasks_dir
        self._capacity = capacity
        self._runs: dict[str, _Run] = {}

    def capacity(self) -> Capacity:
        return self._capacity

    async def adopt(self, plans: Sequence[LaunchPlan]) -> None:
        wanted = {plan.run_id: plan for plan in plans}
        await asyncio.to_thread(self._end_unwanted, frozenset(wanted))
        for plan in plans:
            facts = _read(plan.run_dir / "run.json") or {}
            run = self._remember(plan, tuple(facts.get("gpus", ())))
            run.watching = asyncio.create_task(self._watch(run), name=f"watch {plan.run_id}")

    async def start(self, plan: LaunchPlan) -> None:
        gpus = self._free_gpus(plan.worker_count * plan.gpus_per_worker)
        try:
            await asyncio.to_thread(_make_empty, plan.run_dir)
            write_atomically(plan.run_dir / "run.json", {"run_id": plan.run_id, "gpus": gpus})
            child = await asyncio.to_thread(self._spawn, plan, gpus)
        except OSError as error:
            raise LaunchFailed(
                f"Task '{plan.task_id}' cannot be started: {error}.",
                hint=f"Check {plan.run_dir}: is the disk full, may this user write there?",
            ) from error
        run = self._remember(plan, gpus)
        run.child = child
        run.watching = asyncio.create_task(self._watch(run), name=f"watch {plan.run_id}")

    async def stop(self, run_id: str, *, patience_s: float) -> None:
        run = self._runs.get(run_id)
        if run is not None and run.stopping is None:
            run.stopping = asyncio.create_task(self._end(run, patience_s), name=f"stop {run_id}")

    async def forget(self, task_id: TaskId) -> None:
        runs = [f"{task_id}-{path.name[4:]}" for path in (self._tasks_dir / task_id).glob("run-*")]
        await asyncio.to_thread(forget_jobs, task_id, *runs)

    async def close(self) -> None:
        tasks = [t for run in self._runs.values() for t in (run.watching, run.stopping) if t is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for run in self._runs.values():
            self._write_position(run, run.reader.position)
        self._runs.clear()

    # --- starting -------------------------------------------------------------------------------------------

    def _spawn(self, plan: LaunchPlan, gpus: Sequence[int]) -> subprocess.Popen[bytes]:
        spec = TorchrunSpec(
            run_id=plan.run_id,
            arguments=["-m", "strata.launch.entry", *plan.arguments],
            nproc=plan.worker_count,
            # The agent has no others to meet: training continues, and starts its workers again, without a coordinator.
            rdzv_backend="strata",
            rdzv_endpoint="",
            max_restarts=plan.max_restarts,
            spares=plan.spares,
            warm=plan.warm,
            inherited=plan.inherited,
            environment={
                **plan.environment,
                RUN_VARIABLE: plan.run_id,
                # Of a machine with GPUs a task sees its own, and none where it asked for none.
                **({"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))} if self._capacity.gpus else {}),
            },
        )
        with open(plan.run_dir / "supervisor.log", "ab") as log:
            supervisor = [sys.executable, "-m", "strata.launch.supervisor", str(plan.run_dir)]
            return subprocess.Popen(
                [*supervisor, *spec.command(log_dir=plan.run_dir / "torchrun")],
                env=spec.variables(),
                cwd=plan.working_dir or plan.task_dir,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _remember(self, plan: LaunchPlan, gpus: tuple[int, ...]) -> _Run:
        facts = _read(plan.run_dir / "reported.json", plan.run_dir / "told.json")
        position = Position(**facts) if facts is not None else Position()
        run = _Run(plan=plan, reader=OutputReader(plan.run_dir, position), gpus=gpus)
        self._runs[plan.run_id] = run
        return run

    def _free_gpus(self, count: int) -> tuple[int, ...]:
        taken = {gpu for run in self._runs.values() for gpu in run.gpus}
        free = [gpu for gpu in range(self._capacity.gpus) if gpu not in taken]
        if len(free) < count:
            raise LaunchFailed(
                f"{count} GPUs are needed and {len(free)} are free.",
                hint="Wait until another task has ended.",
            )
        return tuple(free[:count])

    def _end_unwanted(self, wanted: frozenset[str]) -> None:
        """Runs of tasks that have ended, or that the coordinator no longer knows."""
        for record in self._tasks_dir.glob("*/run-*/run.json"):
            facts = _read(record) or {}
            run_id = str(facts.get("run_id", ""))
            if run_id and run_id not in wanted and not (record.parent / "ended.json").exists():
                end_processes(run_id)
                write_atomically(record.parent / "ended.json", {"cause": None})

    # --- watching -------------------------------------------------------------------------------------------

    async def _watch(self, run: _Run) -> None:
        plan = run.plan
        appear_by_s = time.monotonic() + (APPEAR_S if run.child is None else START_S)
        while True:
            ended = _read(plan.run_dir / "ended.json")
            if ended is not None:
                break
            if run.supervisor is None:
                run.supervisor = self._find_supervisor(run)
            elif run.supervisor.has_ended() and not (plan.run_dir / "ended.json").exists():
                break
            if run.supervisor is None and (self._has_died(run) or time.monotonic() > appear_by_s):
                break
            self._pass_on(run)
            await asyncio.sleep(POLL_S)
        if ended is None:
            await self._wait_for_leaving(run)
        await asyncio.to_thread(end_processes, plan.run_id)
        await self._pass_all_on(run)
        if run.child is not None:
            await asyncio.to_thread(run.child.wait)
        del self._runs[plan.run_id]
        if ended is None:
            reason = "its supervisor was lost" if run.supervisor is not None else _last_words(plan.run_dir)
            self._tell(Lost(run_id=plan.run_id, task_id=plan.task_id, reason=reason))
        else:
            cause = ExitCause(**ended["cause"]) if ended["cause"] is not None else None
            self._tell(Exited(run_id=plan.run_id, task_id=plan.task_id, cause=cause))

    def _find_supervisor(self, run: _Run) -> Process | None:
        facts = _read(run.plan.run_dir / "supervisor.json", run.plan.run_dir / "keeper.json")
        if facts is None:
            return None
        if run.child is not None:
            where = f"this machine, process {facts['pid']}"
            self._tell(Started(run_id=run.plan.run_id, task_id=run.plan.task_id, where=where))
        return Process.parse(facts["process"])

    def _has_died(self, run: _Run) -> bool:
        """Before it said who it is. An adopted run that has no supervisor and no process never started."""
        if run.child is not None:
            return run.child.poll() is not None
        return not processes_of(run.plan.run_id)

    def _pass_on(self, run: _Run) -> bool:
        """Tell what is new in the output; whether there was anything."""
        piece = run.reader.read(READ_BYTES)
        if piece.lines or piece.missed:
            self._tell(
                Output(
                    run_id=run.plan.run_id,
                    task_id=run.plan.task_id,
                    lines=piece.lines,
                    dropped=piece.missed,
                )
            )
            self._note_position(run)
        return bool(piece.lines)

    def _note_position(self, run: _Run) -> None:
        """What was reported long enough ago is safe with the listener: the next reader starts after it."""
        now_s = time.monotonic()
        if not run.positions or now_s - run.positions[-1][0] > POSITION_S:
            run.positions.append((now_s, replace(run.reader.position)))
        if now_s - run.positions[0][0] > SAFE_S:
            self._write_position(run, run.positions.popleft()[1])

    async def _pass_all_on(self, run: _Run) -> None:
        while True:
            if not self._pass_on(run):
                return
            await asyncio.sleep(BREATH_S)

    def _write_position(self, run: _Run, position: Position) -> None:
        with suppress(OSError):  # At worst some lines are reported twice.
            write_file(run.plan.run_dir / "reported.json", json.dumps(asdict(position)), durable=False)

    async def _wait_for_leaving(self, run: _Run) -> None:
        deadline_s = time.monotonic() + LEAVE_S
        while await asyncio.to_thread(processes_of, run.plan.run_id) and time.monotonic() < deadline_s:
            self._pass_on(run)
            await asyncio.sleep(POLL_S)

    # --- ending ---------------------------------------------------------------------------------------------

    async def _end(self, run: _Run, patience_s: float) -> None:
        """`_watch` sees the end; this only brings it about."""
        deadline_s = time.monotonic() + patience_s
        signalled = False
        while run.plan.run_id in self._runs and time.monotonic() < deadline_s:
            if run.supervisor is not None and not signalled:
                signalled = True
                with suppress(ProcessLookupError):
                    os.kill(run.supervisor.pid, signal.SIGTERM)
            await asyncio.sleep(POLL_S / 4)
        if run.plan.run_id not in self._runs:
            return
        # The supervisor stays, to write down how it ended.
        spare = (run.supervisor.pid,) if run.supervisor is not None else ()
        await asyncio.to_thread(end_processes, run.plan.run_id, spare=spare, patience_s=2.0)
        if run.watching is not None:
            await asyncio.wait({run.watching}, timeout=WRITE_S)
        if run.plan.run_id in self._runs:
            await asyncio.to_thread(end_processes, run.plan.run_id)


def _read(*paths: Path) -> dict[str, Any] | None:
    """What the first of these files holds. A second path is the one that version 0.1 gave it, whose runs may still be there."""
    for path in paths:
        with suppress(OSError, ValueError):
            found = json.loads(path.read_text())
            if isinstance(found, dict):
                return found
    return None


def _make_empty(folder: Path) -> None:
    """An attempt of the same number can only be one that was never acknowledged."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, mode=0o700)


def _last_words(run_dir: Path) -> str:
    with suppress(OSError):
        text = (run_dir / "supervisor.log").read_text(errors="replace").strip()
        if text:
            return f"its supervisor did not start: {text.splitlines()[-1][:500]}"
    return "it was never started, or left no trace on this machine"
