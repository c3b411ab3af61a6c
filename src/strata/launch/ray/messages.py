"""What the coordinator and its Ray driver say to each other, and what the driver and its agents do.

Everything is frozen and picklable. `Observation`s of the launcher's protocol travel beside these as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from strata.core.messages import ExitCause
from strata.launch.protocol import Capacity, LaunchPlan, OutputLine


@dataclass(frozen=True, slots=True, kw_only=True)
class RayOptions:
    """How a cluster is reached and what is asked of it."""

    address: str = "auto"
    namespace: str
    """Where this coordinator's runs, and those of its predecessors on the same data, are found in the cluster."""
    cpus_per_worker: float = 1.0
    term: int = 0
    """Of the leader among several coordinators that share a namespace; 0: there is only one."""


class Superseded(Exception):
    """Another coordinator has led since: what this one had in the cluster is the other's now."""

    def __init__(self, term: int, latest: int) -> None:
        super().__init__(term, latest)
        self.term, self.latest = term, latest

    def __str__(self) -> str:
        return f"a coordinator of term {self.latest} has taken over the runs; this one has term {self.term}"


# --- coordinator to driver ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Adopt:
    plans: Sequence[LaunchPlan]


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    plan: LaunchPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    run_id: str
    patience_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Forget:
    """Remove what these jobs have in the nodes' shared memory."""

    jobs: Sequence[str]


Request = Adopt | Start | Stop | Forget


# --- driver to coordinator, beside observations -------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Adopted:
    """Every run that was wanted is watched, or its last word has been said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacitySeen:
    capacity: Capacity


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverFailed:
    """The driver cannot work at all: no Ray, no cluster."""

    reason: str
    hint: str


News = Adopted | CapacitySeen | DriverFailed


# --- driver and agents --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentPlan:
    """One torchrun agent of a run: what a node needs to know. The whole run can be rebuilt from any of them."""

    index: int
    agents: int
    nproc: int
    plan: LaunchPlan
    files: Mapping[str, bytes] = field(default_factory=dict)
    """The task's configuration, by path: a node need not share a file system with the coordinator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentReport:
    name: str = ""
    """What the driver says it has received; empty before the first news."""
    incarnation: str
    """Another one: the agent was started anew, on this node or another."""
    node: str
    lines: Sequence[OutputLine] = ()
    dropped: int = 0
    ended: bool = False
    cause: ExitCause | None = None
    """Once it ended: None when its workers ended well."""
