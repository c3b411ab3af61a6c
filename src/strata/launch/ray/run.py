"""One run in a Ray cluster: its placement group, its agents, and the thread that watches them.

Ray moves what a lost node held: the bundle to a node with capacity, and with it the agent, which then joins the rendezvous anew.
Until there is capacity the others continue without it. The run is over when one agent ended well (then all did), when one failed
for good, or when it was asked to stop; only after everything has exited is its end reported.

Everything is named by the run, and the run by its task and attempt, which are on record before anything is started: what is there is
found by the coordinator that leads next, and nothing is started twice. A coordinator that another one has superseded changes
nothing any more.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayActorError
from ray.util import (
    get_node_ip_address,
    get_placement_group,
    list_named_actors,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from strata.core.messages import ExitCause
from strata.core.text import counted
from strata.launch.context import SECRETS_FILE
from strata.launch.protocol import (
    Exited,
    LaunchFailed,
    LaunchPlan,
    Lost,
    Output,
    OutputLine,
    Started,
)
from strata.launch.ray.agent import RayAgent
from strata.launch.ray.memory import ClusterMemory
from strata.launch.ray.messages import AgentPlan, AgentReport, RayOptions, Superseded
from strata.launch.ray.placement import capacity_of, workers_by_agent
from strata.launch.torchrun import LEAVE_S
from strata.shared_memory import forget_jobs

Say = Callable[[Any], None]
CAPACITY_S = 300.0
"""How long a run waits for capacity, where others use the cluster too: the coordinator's queue knows only its own."""
ANSWER_S = 0.5
"""An agent without news answers after this time."""
AGAIN_S = 1.0
"""Between questions to an agent that is away."""
TOGETHER_S = 20.0
"""Agents of a run that ended well end within seconds of each other."""
EXIT_TIMEOUT_S = 15.0
GROUP = "strata:"
FILE_LIMIT_BYTES = 1 << 20


def find_runs(namespace: str) -> dict[str, dict[int, Any]]:
    """Agents by run and index, as earlier drivers left them."""
    found: dict[str, dict[int, Any]] = {}
    for entry in list_named_actors(all_namespaces=True):
        run_id, separator, index = entry["name"].rpartition("#")
        if entry["namespace"] == namespace and separator:
            with contextlib.suppress(ValueError):  # It went while we looked.
                found.setdefault(run_id, {})[int(index)] = ray.get_actor(entry["name"], namespace)
    for group in placement_group_table().values():
        run_id = str(group["name"]).removeprefix(f"{GROUP}{namespace}:")
        if run_id != group["name"] and group["state"] != "REMOVED":
            found.setdefault(run_id, {})
    return found


@dataclass(slots=True, kw_only=True)
class _Watched:
    """What is known of one agent."""

    index: int
    actor: Any
    incarnation: str = ""
    received: str = ""
    node: str = ""
    away_since_s: float | None = None
    ask_at_s: float = 0.0
    ended: bool = False


class RayRun:
    """`begin` it, `take_up` what is there, or `end` it; `stop` at any time. Everything else happens in its thread."""

    def __init__(self, run_id: str, options: RayOptions, say: Say) -> None:
        self.run_id = run_id
        self._options = options
        self._say = say
        self._memory = ClusterMemory(options)
        self._term = (options.term,) if options.term else ()
        """A further argument of what agents are asked; left out where it means nothing, for agents of an earlier version."""
        self._plan: LaunchPlan | None = None
        self._agents: list[_Watched] = []
        self._patience_s: float | None = None
        self._asked_to_stop = threading.Event()
        self._cause: ExitCause | None = None

    def begin(self, plan: LaunchPlan) -> None:
        self._plan = plan
        self._in_thread(lambda: self._start_and_watch(plan))

    def take_up(self, plan: LaunchPlan, agents: Mapping[int, Any]) -> None:
        self._plan = plan
        self._agents = [_Watched(index=i, actor=actor) for i, actor in sorted(agents.items())]
        self._in_thread(self._complete_and_watch)

    def end(self, agents: Mapping[int, Any]) -> None:
        """It is not wanted: nothing is reported about it."""
        self._agents = [_Watched(index=i, actor=actor) for i, actor in sorted(agents.items())]
        self.stop(patience_s=LEAVE_S)
        self._in_thread(self._watch)

    def stop(self, *, patience_s: float) -> None:
        self._patience_s = patience_s
        self._asked_to_stop.set()

    def _in_thread(self, work: Callable[[], None]) -> None:
        threading.Thread(target=work, name=self.run_id, daemon=True).start()

    # --- beginning ------------------------------------------------------------------------------------------

    def _start_and_watch(self, plan: LaunchPlan) -> None:
        try:
            nodes = self._start(plan)
        except Superseded:
            return
        except Exception as error:
            self._clear()
            message = str(error) if isinstance(error, LaunchFailed) else f"Ray did not start it: {error}"
            cause = None if self._asked_to_stop.is_set() else ExitCause(kind="launch", message=message[:1000])
            self._say(Exited(run_id=plan.run_id, task_id=plan.task_id, cause=cause))
            return
        where = f"{counted(nodes, 'node')} of the Ray cluster"
        self._say(Started(run_id=plan.run_id, task_id=plan.task_id, where=where))
        self._watch()

    def _start(self, plan: LaunchPlan) -> int:
        check_reachable(plan.coordinator)
        deadline_s = time.monotonic() + CAPACITY_S
        counts = self._layout(plan, deadline_s)
        cpus = self._options.cpus_per_worker
        bundles = [
            {"CPU": cpus * n, **({"GPU": plan.gpus_per_worker * n} if plan.gpus_per_worker else {})}
            for n in counts
        ]
        self._memory.check()
        group = placement_group(bundles, strategy="SPREAD", name=self._group_name, lifetime="detached")
        while not group.wait(1):
            self._give_up_at(deadline_s, "its resources were taken by others in the meantime")
        files = task_files(plan.task_dir)
        for index, (count, bundle) in enumerate(zip(counts, bundles, strict=True)):
            agent = AgentPlan(index=index, agents=len(counts), nproc=count, plan=plan, files=files)
            self._start_agent(agent, group, bundle)
        pending = [watched.actor.where.remote() for watched in self._agents]
        while pending:
            ready, pending = ray.wait(pending, timeout=1.0)
            ray.get(ready)  # An agent that cannot start says why here.
            self._give_up_at(deadline_s, "its agents did not start")
        return len(set(placement_group_table(group)["bundles_to_node_id"].values()))

    @property
    def _group_name(self) -> str:
        return f"{GROUP}{self._options.namespace}:{self.run_id}"

    def _start_agent(self, agent: AgentPlan, group: Any, bundle: Mapping[str, float]) -> None:
        self._memory.check()
        actor = RayAgent.options(  # type: ignore[attr-defined]
            name=f"{self.run_id}#{agent.index}",
            namespace=self._options.namespace,
            get_if_exists=True,
            lifetime="detached",
            max_restarts=-1,
            max_concurrency=4,
            num_cpus=bundle["CPU"],
            num_gpus=bundle.get("GPU", 0),
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                placement_group=group, placement_group_bundle_index=agent.index
            ),
        ).remote(agent)
        self._agents.append(_Watched(index=agent.index, actor=actor))

    def _complete_and_watch(self) -> None:
        try:
            self._start_missing()
        except Superseded:
            return
        except Exception as error:  # What is there trains without them, and is watched all the same.
            self._remark(f"agents that were not started yet could not be started: {error}")
        self._watch()

    def _start_missing(self) -> None:
        """A coordinator that was lost while it started the run may have started some of its agents: the others are started now."""
        group = get_placement_group(self._group_name)
        bundles = placement_group_table(group)["bundles"]
        there = {agent.index for agent in self._agents}
        missing = sorted(set(range(len(bundles))) - there)
        if not missing:
            return
        known = self._agents[0]
        plan: AgentPlan = ray.get(known.actor.plan.remote(), timeout=EXIT_TIMEOUT_S)
        cpus = bundles[known.index]["CPU"] / plan.nproc
        for index in missing:
            nproc = round(bundles[index]["CPU"] / cpus)
            self._start_agent(replace(plan, index=index, nproc=nproc), group, bundles[index])

    def _layout(self, plan: LaunchPlan, deadline_s: float) -> list[int]:
        while True:
            free = ray._private.state.available_resources_per_node()
            capacities = [
                capacity_of(node, cpus=self._options.cpus_per_worker, gpus=plan.gpus_per_worker)
                for node in free.values()
            ]
            counts = workers_by_agent(plan.worker_count, capacities)
            if counts is not None:
                return counts
            gpus = f" with {plan.gpus_per_worker} GPUs each" if plan.gpus_per_worker else ""
            self._give_up_at(
                deadline_s,
                f"there is capacity for {sum(capacities)} of its {plan.worker_count} workers{gpus}",
            )
            self._asked_to_stop.wait(1.0)

    def _give_up_at(self, deadline_s: float, reason: str) -> None:
        if self._asked_to_stop.is_set():
            raise LaunchFailed("It was stopped before it started.")
        if time.monotonic() > deadline_s:
            raise LaunchFailed(
                f"The Ray cluster has no capacity for the task: {reason}.",
                hint="Add nodes, request fewer workers, or wait until other jobs have ended: ray status",
            )

    # --- watching -------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        try:
            lost = self._watch_agents()
        except Superseded:
            return
        except Exception as error:  # The cluster is lost, or answers nonsense.
            lost = f"the Ray cluster no longer answers for it: {type(error).__name__}: {error}"
        plan = self._plan
        try:
            self._memory.check()
            if plan is not None and not lost:  # Known to the cluster until it is known to the coordinator.
                self._memory.note_end(self.run_id, self._cause)
        except Superseded:
            return
        except Exception as error:  # Where the cluster is lost, no coordinator finds it there either.
            lost = lost or f"the Ray cluster no longer answers for it: {type(error).__name__}: {error}"
        self._clear()
        if plan is None:
            return
        if lost:
            self._say(Lost(run_id=plan.run_id, task_id=plan.task_id, reason=lost[:1000]))
        else:
            self._say(Exited(run_id=plan.run_id, task_id=plan.task_id, cause=self._cause))

    def _watch_agents(self) -> str:
        """Until every agent has ended. Returns why its end is not known, or nothing."""
        asked: dict[Any, _Watched] = {}
        deadline_s: float | None = None
        notified = False
        while any(not agent.ended for agent in self._agents):
            if self._asked_to_stop.is_set() and not notified:
                notified, patience_s = True, self._patience_s or 0.0
                deadline_s = time.monotonic() + patience_s + EXIT_TIMEOUT_S
                for agent in self._agents:
                    agent.actor.stop.remote(patience_s, *self._term)
            now_s = time.monotonic()
            if deadline_s is not None and now_s > deadline_s:
                return ""  # What is left is ended by force.
            waiting = set(map(id, asked.values()))
            for agent in self._agents:
                if not agent.ended and id(agent) not in waiting and now_s >= agent.ask_at_s:
                    asked[agent.actor.take.remote(ANSWER_S, agent.received, *self._term)] = agent
            if not asked:
                time.sleep(0.1)
                continue
            for ref in ray.wait(list(asked), timeout=ANSWER_S)[0]:
                agent = asked.pop(ref)
                try:
                    report = ray.get(ref)
                except RayActorError as error:
                    lost = self._away(agent, error, stopping=notified)
                    if lost:
                        return lost
                else:
                    self._received(agent, report)
                    if report.ended and deadline_s is None:
                        if report.cause is not None:
                            self.stop(patience_s=LEAVE_S)
                        else:
                            deadline_s = time.monotonic() + TOGETHER_S
        return ""

    def _received(self, agent: _Watched, report: AgentReport) -> None:
        if agent.incarnation not in ("", report.incarnation):
            self._remark(f"agent {agent.index} was started again on node {report.node} and joins the others")
        elif agent.away_since_s is not None:
            self._remark(f"agent {agent.index} on node {report.node} is back")
        agent.incarnation, agent.node, agent.away_since_s = report.incarnation, report.node, None
        agent.received = report.name
        agent.ended = report.ended
        if report.cause is not None and self._cause is None:
            where = f" (agent {agent.index} on node {report.node})" if len(self._agents) > 1 else ""
            self._cause = replace(report.cause, message=report.cause.message + where)
        plan = self._plan
        if plan is not None and (report.lines or report.dropped):
            self._say(
                Output(run_id=plan.run_id, task_id=plan.task_id, lines=report.lines, dropped=report.dropped)
            )

    def _away(self, agent: _Watched, error: RayActorError, *, stopping: bool) -> str:
        """An agent does not answer: its node is lost and Ray starts it elsewhere, or it is lost for good."""
        now_s = time.monotonic()
        agent.ask_at_s = now_s + AGAIN_S
        if stopping:
            agent.ended = True
            return ""
        if agent.away_since_s is None:
            agent.away_since_s = now_s
            place = f"node {agent.node}" if agent.node else "its node"
            self._remark(
                f"agent {agent.index} is lost with {place}; the others continue until there is capacity for it"
            )
        elif not isinstance(error, ActorUnavailableError) and now_s - agent.away_since_s > EXIT_TIMEOUT_S:
            # Ray restarts agents without limit: one that is dead was killed on purpose.
            agent.ended = True
            if all(other.ended for other in self._agents):
                return f"its agents were ended in the Ray cluster: {error}"
        return ""

    def _remark(self, text: str) -> None:
        if self._plan is not None:
            line = OutputLine(
                at_s=time.time(), stream="stderr", rank=None, text=f"WARNING ray launcher: {text}"
            )
            self._say(Output(run_id=self.run_id, task_id=self._plan.task_id, lines=[line]))

    # --- ending ---------------------------------------------------------------------------------------------

    def _clear(self) -> None:
        """Nothing of the run is left in the cluster afterwards; snapshots only where it failed and may continue."""
        over = self._cause is None
        with contextlib.suppress(Exception):  # Nodes that are lost have nothing left to clear.
            cleared, _ = ray.wait(
                [agent.actor.clear.remote(over, *self._term) for agent in self._agents],
                num_returns=max(1, len(self._agents)),
                timeout=EXIT_TIMEOUT_S,
            )
            for each in cleared:
                try:
                    ray.get(each)
                except Superseded:
                    return
                except Exception:
                    continue
        for agent in self._agents:
            with contextlib.suppress(Exception):
                ray.kill(agent.actor, no_restart=True)
        with contextlib.suppress(Exception):
            remove_placement_group(get_placement_group(self._group_name))


def check_reachable(coordinator: str) -> None:
    """Nodes that are other machines cannot call a coordinator on this one's loopback."""
    host = coordinator.partition("//")[2] or coordinator
    elsewhere = sorted(
        {node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
        - {"127.0.0.1", get_node_ip_address()}
    )
    if host.startswith(("127.", "localhost:", "[::1]")) and elsewhere:
        raise LaunchFailed(
            f"The coordinator listens on {host}, which nodes such as {elsewhere[0]} cannot reach.",
            hint="Serve on an address of this machine: strata serve --host 0.0.0.0, with a token.",
        )


def task_files(folder: Path) -> dict[str, bytes]:
    """The small files directly in a task's folder: its configuration."""
    if not folder.is_dir():
        return {}
    return {
        str(path): path.read_bytes()
        for path in sorted(folder.iterdir())
        if path.name != SECRETS_FILE and path.is_file() and path.stat().st_size <= FILE_LIMIT_BYTES
    }


def forget_everywhere(jobs: Sequence[str]) -> None:
    """Remove what jobs have in the shared memory of every node."""
    forget = ray.remote(num_cpus=0, max_retries=0)(forget_jobs)
    pending = [
        forget.options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node["NodeID"], soft=False)
        ).remote(*jobs)
        for node in ray.nodes()
        if node["Alive"]
    ]
    ray.wait(pending, num_returns=len(pending), timeout=EXIT_TIMEOUT_S)
