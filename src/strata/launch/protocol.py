"""One seam between what runs and where it runs: a launcher starts a plan and reports its outcome.

A launcher knows nothing of recipes, queues or retries: it is given a complete `LaunchPlan`, makes real processes of it
under torchrun, and notifies one listener of what it observes, on the event loop it was made on. It keeps enough on disk (or in
its cluster) to find its runs again: they outlive the coordinator, and a new one adopts or ends them.

Promises every launcher keeps:
- `Started` comes at most once per run and `Exited` or `Lost` exactly once, as the last word on it.
- No process or port of a run is left when its last word has been said. Snapshots in shared memory stay for the next
  attempt, until `forget`.
- Output is reported in order, by stream. Lines reported just before a crash of the coordinator may be reported again, with the same
  moment, by which they can be known; none is lost within the launcher's bounds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from strata.core.messages import ExitCause, TaskId
from strata.errors import StrataError

__all__ = [
    "Capacity",
    "ExitCause",
    "Exited",
    "LaunchFailed",
    "LaunchPlan",
    "Launcher",
    "Listener",
    "Lost",
    "Observation",
    "Output",
    "OutputLine",
    "Started",
]


class LaunchFailed(StrataError):
    """Something we started ended, or did not come up."""

    code = "launch_failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchPlan:
    """One attempt at one task: everything that a launcher needs to know."""

    task_id: TaskId
    attempt: int
    """From 1. Each attempt is a run of its own, with a rendezvous of its own."""
    arguments: tuple[str, ...]
    """What each worker runs: a script with its arguments, or `-m module` with its own. Never a shell line."""
    worker_count: int
    """Worker processes altogether, over all machines."""
    gpus_per_worker: int = 0
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Beside what is inherited; `COORDINATOR_ADDR`, `STRATA_JOB_ID`, the task's own `STRATA_TOKEN` and its secrets are in it."""
    inherited: tuple[str, ...] = ()
    """Of the launcher's own environment, what is passed on beside the usual (`strata.launch.inherited`)."""
    secrets: tuple[str, ...] = field(default=(), repr=False)
    """Values that must not be in anything the run says."""
    task_dir: Path
    """The task's own folder: its configuration, checkpoints, runs and their output. The same for all attempts."""
    working_dir: Path | None = None
    """Where workers start; `task_dir` when None."""
    coordinator: str
    """host:port of the coordinator's gRPC face, which is also a rendezvous (back end `strata`)."""
    warm: bool = True
    """Workers are forked with torch in place."""
    max_restarts: int = 100
    """How often torchrun may start the workers anew within this attempt."""
    spares: int = 0
    """Processes beyond the workers that stand by on each machine."""

    @property
    def run_id(self) -> str:
        """Names this attempt everywhere: the rendezvous, the folder, the processes' environment."""
        return f"{self.task_id}-{self.attempt}"

    @property
    def run_dir(self) -> Path:
        return self.task_dir / f"run-{self.attempt}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """What a launcher has altogether; the queue keeps the sum of what runs below it."""

    workers: int
    gpus: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    run_id: str
    task_id: TaskId
    where: str
    """For people: 'this machine, process 4711' or '3 nodes of the Ray cluster'."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """Lines that a run's processes wrote, as they came."""

    run_id: str
    task_id: TaskId
    lines: Sequence[OutputLine]
    dropped: int = 0
    """Lines that were lost before these, by the launcher's bounds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputLine:
    at_s: float
    stream: Literal["stdout", "stderr"]
    rank: int | None
    """None: the launcher's own processes, such as a torchrun agent."""
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Exited:
    """The run is over and nothing of it is left. `cause` is None when every worker ended well."""

    run_id: str
    task_id: TaskId
    cause: ExitCause | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """The run is over, nothing of it is left, and how it ended is not known: a machine or its supervisor was lost."""

    run_id: str
    task_id: TaskId
    reason: str


Observation = Started | Output | Exited | Lost
Listener = Callable[[Observation], None]
"""Called on the launcher's event loop. Must not block."""


class Launcher(Protocol):
    """`name` is what `--launcher` takes. All methods run on the event loop the launcher was made on."""

    name: str

    def capacity(self) -> Capacity: ...

    async def adopt(self, plans: Sequence[LaunchPlan]) -> None:
        """Once, before anything else: take the runs of an earlier coordinator up again.

        Afterwards each of `plans` is watched, or its `Exited` or `Lost` is reported. Runs that are not among them are ended.
        """
        ...

    async def start(self, plan: LaunchPlan) -> None:
        """Returns when the processes exist, or are about to. Raises `LaunchFailed`, leaving nothing behind; what goes
        wrong later is reported with `Exited`."""
        ...

    async def stop(self, run_id: str, *, patience_s: float) -> None:
        """SIGTERM, so that workers save and leave; SIGKILL for what is left after `patience_s`.

        Returns at once; `Exited` or `Lost` follows. Unknown and ended runs are no error.
        """
        ...

    async def forget(self, task_id: TaskId) -> None:
        """The task will not run again by itself: remove what its runs keep in shared memory for a quick restart."""
        ...

    async def close(self) -> None:
        """Let go of everything without ending it: the runs continue, and the next coordinator adopts them."""
        ...
