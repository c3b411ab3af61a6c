"""A coordinator, clients and a training job under load and faults for as long as is asked, watched for leaks.

In rounds: clients write down all they see for a while, a fault is injected, and what they saw is checked (`linearizability`)
and forgotten, so that this process itself does not grow. Beside them workers stay for the whole time, others come and go,
pages are read, and a small real job trains. The coordinator is killed in the first third alone: after that one process lives
to the end, and shows what it leaks.

Everything it starts it ends, and it says what was left. Only its own processes are ever touched.
"""

from __future__ import annotations

import os
import platform
import random
import shutil
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Literal

import psutil

from strata import api
from strata.chaos.clients import Clients
from strata.chaos.leaks import FEWEST, Growth, Watch, judge, shown, size_bytes
from strata.chaos.report import Verdict
from strata.chaos.run import ChaosError, ChaosRun, Fault
from strata.errors import StrataError
from strata.launch.coordinator import CoordinatorProcess
from strata.worker.orchestrator import TrainingOrchestrator

RESIDENTS = 8
PAUSE_S = 0.01
"""Of each client between two operations: load, and still a machine that others can use."""
PAUSED_S = 2.0
"""How long a coordinator is stopped."""
RECOVERY_S = 60.0
JOB_RECOVERY_S = 180.0
"""How long clients, and a job, may take to get over a fault on a machine that is busy with all of this."""
FEWEST_ANSWERS = 20
SETTLE_S = 1.0

SoakFault = Literal["none", "coordinator killed", "coordinator paused", "worker killed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    fault: SoakFault
    at_s: float
    operations: int
    unanswered: int
    recovery_s: float | None
    """From the fault to the next answer of a client, or of the job's next new step; None where none came in time."""
    violations: tuple[str, ...]
    errors: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SoakReport:
    minutes: float
    seed: int
    started_at_s: float
    machine: str
    rounds: tuple[Round, ...]
    latencies_ms: dict[str, tuple[float, float]]
    """By operation: median and 99th percentile."""
    growths: tuple[Growth, ...]
    steps: int
    came_and_went: int
    pages: int
    verdicts: tuple[Verdict, ...]

    @property
    def passed(self) -> bool:
        return all(verdict.passed for verdict in self.verdicts)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "passed": self.passed}

    def to_markdown(self) -> str:
        """For people, and for the documentation."""
        when = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(self.started_at_s))
        lines = [
            f"# Soak: {self.minutes:g} minutes, {'passed' if self.passed else 'FAILED'}",
            "",
            f"{when} · {self.machine} · seed {self.seed}",
            "",
            *_table(
                ("", "check", "found"),
                [("pass" if each.passed else "**FAIL**", each.name, each.found) for each in self.verdicts],
            ),
            "",
            "## Faults",
            "",
            *_table(("fault", "times", "recovery, median", "worst"), self._fault_rows()),
            "",
            "## Load",
            "",
            *_table(
                ("operation", "median", "p99"),
                [
                    (name, f"{low:.1f} ms", f"{high:.1f} ms")
                    for name, (low, high) in self.latencies_ms.items()
                ],
            ),
            "",
            f"{sum(each.operations for each in self.rounds):,} operations of clients were checked, {self.came_and_went:,} workers joined and left, {self.pages:,} pages were read"
            + (f", {self.steps:,} steps were trained." if self.steps else "."),
            "",
            "## Growth",
            "",
            *_table(
                ("of", "what", "early", "late", "most", "over", ""),
                [
                    (
                        each.what,
                        each.kind,
                        shown(each.kind, each.early),
                        shown(each.kind, each.late),
                        shown(each.kind, each.most),
                        f"{each.over_s / 60:.1f} min",
                        "**grows**" if each.is_leak else "",
                    )
                    for each in self.growths
                ],
            ),
        ]
        return "\n".join(lines) + "\n"

    def _fault_rows(self) -> list[tuple[str, ...]]:
        rows: list[tuple[str, ...]] = []
        for fault, times in Counter(each.fault for each in self.rounds).most_common():
            recoveries_s = [
                each.recovery_s for each in self.rounds if each.fault == fault and each.recovery_s is not None
            ]
            shown_s = (
                (f"{median(recoveries_s):.2f} s", f"{max(recoveries_s):.2f} s")
                if recoveries_s and fault != "none"
                else ("", "")
            )
            rows.append((fault, str(times), *shown_s))
        return rows


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    if not rows:
        return ["Nothing was measured."]
    return [
        f"| {' | '.join(columns)} |",
        f"|{'---|' * len(columns)}",
        *(f"| {' | '.join(row)} |" for row in rows),
    ]


@dataclass
class Soak:
    """`folder` is where everything lies meanwhile; `training`: whether a job trains beside the rest."""

    folder: Path
    minutes: float
    round_s: float = 20.0
    training: bool = True
    seed: int = 0
    tell: Callable[[str], None] = lambda text: None
    _rounds: list[Round] = field(default_factory=list)
    _latencies_s: dict[str, list[float]] = field(default_factory=dict)
    _came_and_went: int = 0
    _pages: int = 0
    _errors: list[str] = field(default_factory=list)

    def run(self) -> SoakReport:
        self._chance = random.Random(self.seed)
        self._over = threading.Event()
        self._is_serving = threading.Event()
        """A coordinator that is starting is not measured."""
        started_at_s, self._began_s = time.time(), time.monotonic()
        self._until_s = self._began_s + self.minutes * 60
        before = _ours()
        with ExitStack() as stack:
            memory = stack.enter_context(_memory_of_our_own(self.folder.name))
            self._coordinator = CoordinatorProcess(self.folder / "coordinator").start()
            stack.callback(self._coordinator.stop)
            self._is_serving.set()
            self._job = self._start_job(stack) if self.training else None
            watch = Watch(
                processes=self._processes,
                folders=lambda: {
                    "journal, logs and metrics": ("disk", [self._coordinator.data_dir]),
                    "checkpoints": ("disk", sorted(self.folder.glob("*-checkpoints"))),
                    "snapshots": ("shared memory", [memory]),
                },
                every_s=max(0.2, min(5.0, self.minutes * 60 / 200)),
            )
            stack.callback(watch.close)
            for work in (self._reside, self._come_and_go, self._read_pages):
                thread = threading.Thread(target=self._guarded, args=(work,), name=work.__name__, daemon=True)
                thread.start()
                stack.callback(thread.join, 60)
            stack.callback(self._over.set)
            while not self._is_over(watch):
                self._rounds.append(self._round(len(self._rounds)))
            steps = self._job.step if self._job is not None else 0
            self._over.set()
            if self._job is not None:
                for agent in self._job.agents:
                    agent.stop()
        left = {**_left(before), "shared memory": size_bytes(memory)}
        shutil.rmtree(memory, ignore_errors=True)
        growths = judge(watch.samples)
        return SoakReport(
            minutes=self.minutes,
            seed=self.seed,
            started_at_s=started_at_s,
            machine=f"{os.cpu_count()} cores, {platform.system()} {platform.release()}, Python {platform.python_version()}",
            rounds=tuple(self._rounds),
            latencies_ms={
                name: (median(taken) * 1e3, sorted(taken)[int(0.99 * (len(taken) - 1))] * 1e3)
                for name, taken in sorted(self._latencies_s.items())
            },
            growths=tuple(growths),
            steps=steps,
            came_and_went=self._came_and_went,
            pages=self._pages,
            verdicts=tuple(self._verdicts(growths, left, steps)),
        )

    def _is_over(self, watch: Watch) -> bool:
        """However short it is: two rounds, and a coordinator that was watched long enough to say something about it."""
        pid = self._processes().get("coordinator", 0)
        watched = sum(1 for each in watch.samples if (each.life, each.kind) == (pid, "memory"))
        return time.monotonic() >= self._until_s and len(self._rounds) > 1 and watched >= FEWEST

    # --- rounds ---------------------------------------------------------------------------------------------

    def _round(self, number: int) -> Round:
        fault = self._choose()
        self.tell(f"round {number + 1}: {fault}")
        address = self._coordinator.address
        with Clients(address, name=f"soak-{number}", pause_s=PAUSE_S, seed=self.seed + number) as clients:
            recovery_s: float | None = None
            at_s = time.monotonic()
            with suppress(TimeoutError):
                clients.wait_answered(FEWEST_ANSWERS, within_s=RECOVERY_S)
                at_s = time.monotonic()
                recovery_s = self._inflict(fault, clients)
            time.sleep(max(0.0, self.round_s - (time.monotonic() - at_s)))
        for each in clients.operations:
            if each.answered_s is not None:
                name = {"read": "value read", "swap": "value swapped", "save": "checkpoint reported"}.get(
                    str(each.action[0]), "latest checkpoint read"
                )
                self._take_latency(name, each.answered_s - each.called_s)
        for violation in (violations := clients.violations()):
            self.tell(f"  {violation}")
        return Round(
            fault=fault,
            at_s=at_s - self._began_s,
            operations=clients.answered,
            unanswered=len(clients.operations) + len(clients.arrivals) - clients.answered,
            recovery_s=recovery_s,
            violations=tuple(violations),
            errors=tuple(clients.errors),
        )

    def _choose(self) -> SoakFault:
        """One of those that are possible now; the first kills the coordinator."""
        choices: list[SoakFault] = ["none", "coordinator paused"]
        if time.monotonic() - self._began_s < self.minutes * 60 / 3:
            choices.append("coordinator killed")
        if self._job is not None:
            choices.append("worker killed")
        if not self._rounds:
            return "coordinator killed"
        return self._chance.choice(choices)

    def _inflict(self, fault: SoakFault, clients: Clients) -> float | None:
        began_s = time.monotonic()
        match fault:
            case "none":
                return 0.0
            case "coordinator killed":
                self._is_serving.clear()
                self._coordinator.kill()
                self._coordinator.start()
                self._is_serving.set()
            case "coordinator paused":
                assert self._coordinator.process is not None
                os.kill(self._coordinator.process.pid, signal.SIGSTOP)
                time.sleep(PAUSED_S)
                os.kill(self._coordinator.process.pid, signal.SIGCONT)
            case "worker killed":
                return self._hurt_job("kill")
        clients.wait_answered(FEWEST_ANSWERS, within_s=RECOVERY_S)
        return time.monotonic() - began_s

    def _hurt_job(self, fault: Fault) -> float | None:
        assert self._job is not None
        deadline_s = time.monotonic() + JOB_RECOVERY_S
        while self._job.worker_count < self._job.job.workers:  # One fault at a time.
            if time.monotonic() > deadline_s or not self._job.is_running:
                return None
            time.sleep(0.1)
        try:
            return self._job.inject([fault], patience_s=JOB_RECOVERY_S).recovery_s
        except ChaosError:
            return None

    def _take_latency(self, name: str, taken_s: float) -> None:
        kept = self._latencies_s.setdefault(name, [])
        if len(kept) < 100_000:
            kept.append(taken_s)
        else:  # A sample of all of them, so that this list is no leak either.
            kept[self._chance.randrange(len(kept))] = taken_s

    # --- beside them ----------------------------------------------------------------------------------------

    def _start_job(self, stack: ExitStack) -> ChaosRun:
        from strata.launch.sample_job import SampleJob

        job = SampleJob(
            folder=self.folder, name=f"soak-{os.getpid()}", steps=100_000_000, keep=3, workers=2, agents=1
        )
        run = ChaosRun(job, self._coordinator, seed=self.seed)
        stack.callback(run.close)
        run.start()
        return run

    def _processes(self) -> dict[str, int]:
        found = {"this process (clients)": os.getpid()}
        coordinator = self._coordinator.process
        if self._is_serving.is_set() and coordinator is not None and coordinator.poll() is None:
            found["coordinator"] = coordinator.pid
        if self._job is not None:
            found |= {f"agent {n}": a.process.pid for n, a in enumerate(self._job.agents) if a.is_running}
        return found

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            self._errors.append(f"{work.__name__.strip('_')}: {type(error).__name__}: {error}")

    def _reside(self) -> None:
        """Workers that are there for the whole time, and never get another incarnation."""
        workers = [
            TrainingOrchestrator(self._coordinator.address, job_id="residents") for _ in range(RESIDENTS)
        ]
        try:
            incarnations = [
                worker.register_worker(f"resident-{number}").incarnation
                for number, worker in enumerate(workers)
            ]
            step = 0
            while not self._over.wait(0.2):
                step += 1
                for worker in workers:
                    worker.heartbeat(step, state="training", metrics={"loss": 1.0 / step})
            rows = api.get_rows(self._coordinator.api, "/api/workers")
            now = {row["id"]: row["incarnation"] for row in rows if row["status"] != "failed"}
            lost = [
                f"resident-{number}"
                for number, incarnation in enumerate(incarnations)
                if now.get(f"resident-{number}") != incarnation
            ]
            if lost:
                self._errors.append(f"failed by mistake: {', '.join(lost)}")
        finally:
            for worker in workers:
                with suppress(StrataError):
                    worker.deregister("the soak is over")
                worker.close()

    def _come_and_go(self) -> None:
        while not self._over.wait(0.2):
            with (
                suppress(StrataError),
                TrainingOrchestrator(
                    self._coordinator.address, job_id="passers-by", ship_logs=False
                ) as worker,
            ):
                worker.register_worker(f"passer-by-{self._came_and_went % 50}")
                worker.wait_connected(5.0)
                worker.heartbeat(1, state="training")
                self._came_and_went += 1

    def _read_pages(self) -> None:
        pages = ("/api/dashboard", "/api/workers", "/api/checkpoints", "/api/barriers", "/api/status")
        while not self._over.wait(0.25):
            with suppress(api.Unreachable):
                api.get(self._coordinator.api, pages[self._pages % len(pages)])
                self._pages += 1

    # --- the end --------------------------------------------------------------------------------------------

    def _verdicts(self, growths: list[Growth], left: dict[str, int], steps: int) -> Iterator[Verdict]:
        violations = [text for each in self._rounds for text in each.violations]
        checked = sum(each.operations for each in self._rounds)
        yield Verdict(
            name="client histories are linearizable",
            passed=not violations and checked > 0,
            found=violations[0] if violations else f"{checked:,} operations in {len(self._rounds)} rounds",
        )
        errors = [*self._errors, *(text for each in self._rounds for text in each.errors)]
        yield Verdict(
            name="no worker failed or refused by mistake",
            passed=not errors,
            found="; ".join(errors[:3]) or f"{RESIDENTS} workers throughout",
        )
        stuck = [each.fault for each in self._rounds if each.recovery_s is None]
        yield Verdict(
            name="every fault was recovered from",
            passed=not stuck,
            found=f"not within {JOB_RECOVERY_S:g} s: {', '.join(stuck)}"
            if stuck
            else f"{sum(each.fault != 'none' for each in self._rounds)} faults",
        )
        if self.training:
            yield Verdict(name="training continued", passed=steps > 0, found=f"step {steps:,}")
        leaks = [each for each in growths if each.is_leak]
        enough = any(each.what == "coordinator" for each in growths)
        yield Verdict(
            name="no resource leaks",
            passed=not leaks and enough,
            found="; ".join(f"{each.kind} of {each.what}: {each.text}" for each in leaks)
            or (f"{len(growths)} series" if enough else "too short to tell: raise --minutes"),
        )
        remains = {what: count for what, count in left.items() if count}
        yield Verdict(
            name="nothing is left behind",
            passed=not remains,
            found=", ".join(f"{what}: {count:,}" for what, count in remains.items())
            or "no process, thread, descriptor or shared memory",
        )


def _ours() -> dict[str, int]:
    process = psutil.Process()
    return {
        "processes": len(process.children(recursive=True)),
        "threads": process.num_threads(),
        "descriptors": process.num_fds(),
    }


def _left(before: dict[str, int]) -> dict[str, int]:
    """What there is more than before. gRPC keeps a few threads and descriptors of its own for as long as a process lives."""
    deadline_s = time.monotonic() + 10 * SETTLE_S
    allowed = {"processes": 0, "threads": 16, "descriptors": 24}
    while True:
        now = _ours()
        left = {
            what: now[what] - before[what] if now[what] > before[what] + allowed[what] else 0 for what in now
        }
        if not any(left.values()) or time.monotonic() > deadline_s:
            return left
        time.sleep(0.1)


@contextmanager
def _memory_of_our_own(name: str) -> Iterator[Path]:
    """A folder of shared memory that no other run uses: what is left in it was left by this run."""
    folder = Path("/dev/shm") / name
    folder.mkdir(mode=0o700)
    before = os.environ.get("STRATA_MEMORY_ROOT")
    os.environ["STRATA_MEMORY_ROOT"] = str(folder)
    try:
        yield folder
    finally:
        if before is None:
            del os.environ["STRATA_MEMORY_ROOT"]
        else:
            os.environ["STRATA_MEMORY_ROOT"] = before
