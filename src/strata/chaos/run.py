"""A job of our own, with faults injected at intervals, watched step by step.

Steps are read from the timestamps that workers leave in shared memory (`strata.agent.trace`), so the recovery time
runs from the signal to the first step that had never been made before, whichever worker makes it.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from strata.agent.trace import footprints, last_footprint
from strata.errors import StrataError
from strata.launch.coordinator import CoordinatorProcess
from strata.launch.sample_job import SampleJob
from strata.launch.torchrun import Agent, TorchrunSpec

POLL_S = 0.01
FIRST_STEP_S = 180.0

Fault = Literal["kill", "stop", "agent", "coordinator"]
FAULTS: tuple[Fault, ...] = ("kill", "stop", "agent", "coordinator")


DEADLY = (
    signal.SIGKILL,
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGQUIT,
    signal.SIGABRT,
    signal.SIGSEGV,
    signal.SIGHUP,
)
"""Signals that end a worker, each in its way."""


class ChaosError(StrataError):
    """The job did something it must not, like ending."""

    code = "chaos"


@dataclass(frozen=True, slots=True, kw_only=True)
class Injury:
    """One fault, and how long the job took to get over it."""

    fault: Fault
    victim: str
    at_s: float
    """Seconds since the job's first step."""
    step_before: int
    recovery_s: float | None
    """From the fault to the next new step; None where none came in time."""


@dataclass
class ChaosRun:
    """Starts a job, hurts it, waits for its end. `close` leaves nothing behind."""

    job: SampleJob
    coordinator: CoordinatorProcess
    seed: int = 0
    kill_signal: signal.Signals = signal.SIGKILL
    """What the fault `kill` sends."""
    injuries: list[Injury] = field(default_factory=list)
    agents: list[Agent] = field(default_factory=list)
    tell: Callable[[str], None] = lambda text: None

    def start(self) -> None:
        self.job.prepare()
        for number in range(self.job.agents):
            self.start_agent(number)
        self._await_first_step()
        self._began_s = time.monotonic()
        self._random = random.Random(self.seed)

    def spec(self) -> TorchrunSpec:
        address = self.coordinator.address
        return self.job.torchrun(rdzv_backend="strata", rdzv_endpoint=address, coordinator=address)

    @property
    def step(self) -> int:
        found = last_footprint(self.job.name)
        return found.step if found is not None else 0

    @property
    def worker_count(self) -> int:
        """How many workers live now."""
        return sum(len(agent.workers()) for agent in self.agents if agent.is_running)

    @property
    def is_running(self) -> bool:
        return any(agent.is_running for agent in self.agents)

    def inject(self, kinds: Sequence[Fault], *, patience_s: float) -> Injury:
        """Do one of `kinds` to a random victim and wait for the next new step."""
        fault = self._random.choice(list(kinds))
        if (
            fault == "agent"
        ):  # An agent killed before it takes part is not missed by the others: no process starts again after it.
            self._await_all_workers(patience_s)
        step_before, at_s = self.step, time.monotonic()
        victim, heal = self._inflict(fault)
        self.tell(f"{fault}: {victim} at step {step_before}")
        restarts = fault != "coordinator"
        recovered = self._await_new_step(step_before, at_s if restarts else 0.0, patience_s)
        injury = Injury(
            fault=fault,
            victim=victim,
            at_s=at_s - self._began_s,
            step_before=step_before,
            recovery_s=recovered - at_s if recovered is not None else None,
        )
        heal()
        self.injuries.append(injury)
        outcome = (
            "no new step within the limit"
            if injury.recovery_s is None
            else f"new step after {injury.recovery_s:.2f} s"
        )
        self.tell(f"  {outcome}")
        return injury

    def train_for(self, seconds: float) -> None:
        """Let the job run undisturbed for a while, or until it ends."""
        deadline_s = time.monotonic() + seconds
        while time.monotonic() < deadline_s and self.is_running:
            time.sleep(0.05)

    def wait(self, timeout_s: float) -> None:
        """Until the job has ended by itself, well."""
        deadline_s = time.monotonic() + timeout_s
        while self.is_running:
            if time.monotonic() > deadline_s:
                raise ChaosError(f"The job did not end within {timeout_s:.0f} s:\n{self.agents[0].tail()}")
            time.sleep(0.05)
        bad = [agent for agent in self.agents if agent.process.returncode]
        if len(bad) == len(self.agents):
            raise ChaosError(f"The job failed:\n{bad[0].tail()}")

    def close(self) -> None:
        from strata.shared_memory import forget_jobs

        for agent in self.agents:
            agent.kill()
        forget_jobs(self.job.name)

    # --- faults ---------------------------------------------------------------------------------------------

    def _inflict(self, fault: Fault) -> tuple[str, Callable[[], None]]:
        """Returns the victim's name and what ends the fault."""
        match fault:
            case "kill":
                pid = self._signal_a_worker(self.kill_signal)
                return f"worker process {pid}", _nothing
            case "stop":
                pid = self._signal_a_worker(signal.SIGSTOP)
                return f"worker process {pid}", lambda: _continue(pid)
            case "agent":
                number = self._random.choice([n for n, a in enumerate(self.agents) if a.is_running])
                self.agents[number].kill()
                return f"agent {number} and its workers", lambda: self.start_agent(number)
            case "coordinator":
                self.coordinator.kill()
                self.coordinator.start()
                return "the coordinator", _nothing

    def _signal_a_worker(self, number: int) -> int:
        """The number of its process. One that has ended by itself since it was listed does not count."""
        while True:
            pid = self._random.choice(self._workers())
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
                return pid

    def _workers(self) -> list[int]:
        found = [pid for agent in self.agents if agent.is_running for pid in agent.workers()]
        if not found:
            raise ChaosError("There is no worker to inject a fault into.")
        return found

    def start_agent(self, number: int) -> None:
        """A machine comes, or comes back."""
        log = self.job.folder / f"{self.job.name}-agent{number}.log"
        agent = Agent(self.spec(), log=log)
        if number < len(self.agents):
            self.agents[number] = agent
        else:
            self.agents.append(agent)

    # --- watching -------------------------------------------------------------------------------------------

    def _await_new_step(self, step_before: int, born_after_s: float, patience_s: float) -> float | None:
        """When a process that began after the fault made a step that none had made before.

        Survivors may still finish the step they were in; it dies with them and does not count.
        """
        deadline_s = time.monotonic() + patience_s
        made = step_before
        while time.monotonic() < deadline_s and self.is_running:
            for footprint in footprints(self.job.name):
                if footprint.born_mono_s <= born_after_s:
                    made = max(made, footprint.step)
                elif footprint.step > made:
                    return footprint.mono_s
            time.sleep(POLL_S)
        return None

    def _await_all_workers(self, patience_s: float) -> None:
        """All workers take part; not longer than this, where some do not come back."""
        deadline_s = time.monotonic() + patience_s
        while time.monotonic() < deadline_s and self.is_running:
            found = last_footprint(self.job.name)
            if found is not None and found.world_size >= self.job.workers:
                return
            time.sleep(POLL_S)

    def _await_first_step(self) -> None:
        deadline_s = time.monotonic() + FIRST_STEP_S
        while not self.step:
            if time.monotonic() > deadline_s or not self.is_running:
                raise ChaosError(
                    f"The first step did not finish within {FIRST_STEP_S:.0f} s:\n{self.agents[0].tail()}"
                )
            time.sleep(POLL_S)


def _nothing() -> None:
    pass


def _continue(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


def final_parameters(checkpoints: Path) -> dict[str, object]:
    """The newest checkpoint's parameters, verified."""
    from strata.checkpoint.manager import CheckpointManager

    with CheckpointManager(checkpoints) as manager:
        state = manager.load()
    parameters: dict[str, object] = state["model_state_dict"]
    return parameters
