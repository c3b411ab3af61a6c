"""The process that speaks with a Ray cluster on the coordinator's behalf.

Requests arrive on a pipe, news leave on it; when the pipe closes the process ends and leaves the runs as they are. Each run
has a thread (`run`). Ray is imported here and in the agents, never in the coordinator.
"""

from __future__ import annotations

import contextlib
import itertools
import signal
import threading
from collections.abc import Iterable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

from strata.launch.protocol import Capacity, Exited, LaunchPlan, Lost, Observation
from strata.launch.ray.messages import (
    Adopt,
    Adopted,
    CapacitySeen,
    DriverFailed,
    Forget,
    News,
    RayOptions,
    Request,
    Start,
    Stop,
    Superseded,
)

CAPACITY_EVERY_S = 2.0
SWEEP_EVERY = 5
"""So many looks at the capacity."""


def main(connection: Connection[Observation | News, Request | None], options: RayOptions) -> None:
    """What the driver's process runs."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the coordinator, which closes the pipe.
    driver = Driver(connection, options)
    try:
        driver.connect()
    except Exception as error:
        driver.say(
            DriverFailed(
                reason=f"The Ray cluster at '{options.address}' cannot be reached: {str(error).strip()[:300]}",
                hint="Start one with `ray start --head`, or give its address with --ray-address.",
            )
        )
        return
    driver.serve()


class Driver:
    def __init__(
        self, connection: Connection[Observation | News, Request | None], options: RayOptions
    ) -> None:
        self.options = options
        self._connection = connection
        self._sending = threading.Lock()
        self._runs: dict[str, Any] = {}
        self._has_adopted = False
        self._closed = threading.Event()

    def connect(self) -> None:
        import ray

        ray.init(
            address=self.options.address,
            namespace=self.options.namespace,
            log_to_driver=False,
            configure_logging=False,
        )
        self._see_capacity()

    def serve(self) -> None:
        """Until the coordinator lets go, or is lost."""
        threading.Thread(target=self._watch_capacity, name="capacity", daemon=True).start()
        while True:
            try:
                request = self._connection.recv()
            except (EOFError, OSError):
                break
            match request:
                case None:
                    break
                case Adopt():
                    try:
                        self._adopt(request.plans)
                    except Superseded as error:
                        hint = "If etcd was set up again, give the journal another prefix, or restart the Ray cluster."
                        self.say(
                            DriverFailed(
                                reason=f"The Ray cluster is not this coordinator's: {error}.", hint=hint
                            )
                        )
                        break
                case Start():
                    self._begin(request.plan)
                case Stop():
                    run = self._runs.get(request.run_id)
                    if run is not None:
                        run.stop(patience_s=request.patience_s)
                case Forget():
                    self._forget(request.jobs)
        self._closed.set()

    def say(self, news: Observation | News) -> None:
        """From any thread. Waits while the coordinator is busy; what is no longer read is dropped."""
        with self._sending, contextlib.suppress(OSError):
            self._connection.send(news)

    # --- runs -----------------------------------------------------------------------------------------------

    def _begin(self, plan: LaunchPlan) -> None:
        from strata.launch.ray.run import RayRun

        run = self._runs[plan.run_id] = RayRun(plan.run_id, self.options, self.say)
        run.begin(plan)

    def _adopt(self, plans: Iterable[LaunchPlan]) -> None:
        from strata.launch.ray.memory import ClusterMemory
        from strata.launch.ray.run import RayRun, find_runs

        memory = ClusterMemory(self.options)
        memory.claim()
        found, ends = find_runs(self.options.namespace), memory.ends()
        for plan in plans:
            agents = found.get(plan.run_id)
            if plan.run_id in ends:
                # What is left of it is ended below.
                self.say(Exited(run_id=plan.run_id, task_id=plan.task_id, cause=ends.pop(plan.run_id)))
            elif agents:
                del found[plan.run_id]
                run = self._runs[plan.run_id] = RayRun(plan.run_id, self.options, self.say)
                run.take_up(plan, agents)
            else:
                reason = "it left no trace in the Ray cluster"
                self.say(Lost(run_id=plan.run_id, task_id=plan.task_id, reason=reason))
        for run_id, agents in found.items():
            self._end(run_id, agents)
        for run_id in ends:  # The coordinator knows of these.
            memory.forget_end(run_id)
        self._has_adopted = True
        self.say(Adopted())

    def _end(self, run_id: str, agents: Mapping[int, Any]) -> None:
        from strata.launch.ray.run import RayRun

        run = self._runs[run_id] = RayRun(run_id, self.options, self.say)
        run.end(agents)

    def _sweep(self) -> None:
        """End what an earlier leader still had under way when this one looked for runs."""
        from strata.launch.ray.memory import ClusterMemory
        from strata.launch.ray.run import find_runs

        found = find_runs(self.options.namespace)
        ClusterMemory(self.options).check()  # Afterwards: what a later leader has started is not among them.
        for run_id in found.keys() - self._runs.keys():
            self._end(run_id, found[run_id])

    def _forget(self, jobs: Sequence[str]) -> None:
        from strata.launch.ray.run import forget_everywhere

        threading.Thread(target=forget_everywhere, args=(jobs,), name="forget", daemon=True).start()

    # --- capacity -------------------------------------------------------------------------------------------

    def _watch_capacity(self) -> None:
        for number in itertools.count(1):
            if self._closed.wait(CAPACITY_EVERY_S):
                return
            with contextlib.suppress(Exception):  # The cluster is away: its loss is noticed elsewhere.
                self._see_capacity()
                if self.options.term and self._has_adopted and number % SWEEP_EVERY == 0:
                    self._sweep()

    def _see_capacity(self) -> None:
        import ray

        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        workers = sum(int(node.get("CPU", 0) / self.options.cpus_per_worker) for node in nodes)
        gpus = sum(int(node.get("GPU", 0)) for node in nodes)
        self.say(CapacitySeen(capacity=Capacity(workers=workers, gpus=gpus)))
