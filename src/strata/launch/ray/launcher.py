"""Tasks over a Ray cluster: a placement group of torchrun agents, spread over its nodes.

The coordinator speaks with Ray through a process of its own (`driver`), because a Ray client ends its process when the
cluster goes away. When that process ends it is started again and takes the runs up where they are: agents and placement
groups are detached, so they outlive driver and coordinator. This module imports no Ray.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import importlib.util
import logging
import multiprocessing
import socket
import threading
from collections.abc import Sequence
from pathlib import Path

from strata.core.messages import TaskId
from strata.errors import MissingDependency
from strata.launch.protocol import (
    Capacity,
    Exited,
    LaunchFailed,
    LaunchPlan,
    Listener,
    Lost,
    Observation,
    Output,
    Started,
)
from strata.launch.ray.driver import main as drive
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
)
from strata.logs import OutageLog

log = logging.getLogger("strata.launch.ray")

CONNECT_S = 90.0
AGAIN_S = 5.0
CLOSE_S = 10.0


class RayLauncher:
    """See `strata.launch.protocol.Launcher`. Made on the event loop that it reports its observations on."""

    name = "ray"

    def __init__(self, listener: Listener, *, tasks_dir: Path, options: RayOptions) -> None:
        if importlib.util.find_spec("ray") is None:
            raise MissingDependency("ray", extra="ray", feature="The Ray launcher")
        self._listener = listener
        self._tasks_dir = tasks_dir
        self._options = options
        self._loop = asyncio.get_running_loop()
        self._plans: dict[str, LaunchPlan] = {}
        self._adopted: asyncio.Future[None] | None = None
        self._stops: dict[str, Stop] = {}
        """What has been asked for and not happened yet: a new driver is asked again."""
        self._cleared: set[TaskId] = set()
        self._capacity = Capacity(workers=0, gpus=0)
        self._driver: _Driver | None = None
        self._again: asyncio.TimerHandle | None = None
        self._retry_at_s = 0.0
        self._outage = OutageLog(log, over=f"the Ray cluster at '{options.address}' is back")
        self._closed = False

    def capacity(self) -> Capacity:
        return self._capacity

    async def adopt(self, plans: Sequence[LaunchPlan]) -> None:
        await asyncio.sleep(self._retry_at_s - self._loop.time())  # It may be called until it succeeds.
        self._plans = {plan.run_id: plan for plan in plans}
        self._adopted = self._loop.create_future()
        self._connect()
        try:
            async with asyncio.timeout(CONNECT_S):
                await self._adopted
        except (LaunchFailed, TimeoutError) as error:
            await self._let_go()
            self._retry_at_s = self._loop.time() + AGAIN_S
            if isinstance(error, LaunchFailed):
                raise
            raise LaunchFailed(
                f"The Ray cluster at '{self._options.address}' did not answer within {CONNECT_S:g} s.",
                hint="Check it with: ray status",
            ) from None
        finally:
            self._adopted = None

    async def start(self, plan: LaunchPlan) -> None:
        """Hands the plan to the cluster, which may first have to make capacity for it."""
        try:
            # The trace of an attempt, for `forget`.
            plan.run_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise LaunchFailed(
                f"Task '{plan.task_id}' cannot be started: {error}.", hint=f"Check {plan.task_dir}."
            ) from error
        if not self._ask(Start(plan=plan)):
            raise LaunchFailed(
                f"The Ray cluster at '{self._options.address}' is unreachable.",
                hint="Check it with: ray status",
            )
        self._plans[plan.run_id] = plan

    async def stop(self, run_id: str, *, patience_s: float) -> None:
        if run_id in self._plans:
            stop = self._stops[run_id] = Stop(run_id=run_id, patience_s=patience_s)
            self._ask(stop)

    async def forget(self, task_id: TaskId) -> None:
        runs = [f"{task_id}-{path.name[4:]}" for path in (self._tasks_dir / task_id).glob("run-*")]
        # Else its only run has done so, on every node it had.
        if len(runs) > 1 or task_id not in self._cleared:
            self._ask(Forget(jobs=(task_id, *runs)))
        self._cleared.discard(task_id)

    async def close(self) -> None:
        self._closed = True
        if self._again is not None:
            self._again.cancel()
        await self._let_go()

    # --- the driver -----------------------------------------------------------------------------------------

    def _connect(self) -> None:
        self._again = None
        self._driver = _Driver(self)
        self._ask(Adopt(plans=tuple(self._plans.values())))
        for stop in self._stops.values():
            self._ask(stop)

    async def _let_go(self) -> None:
        if self._driver is not None:
            driver, self._driver = self._driver, None
            await asyncio.to_thread(driver.close)

    def _ask(self, request: Request) -> bool:
        return self._driver is not None and self._driver.ask(request)

    def _driver_lost(self, driver: _Driver) -> None:
        """The driver's process has ended, and not because we closed it."""
        if self._closed or driver is not self._driver:
            return
        self._driver = None
        self._capacity = Capacity(workers=0, gpus=0)
        if self._adopted is not None:  # The caller that waits for it will try again.
            if not self._adopted.done():
                self._adopted.set_exception(LaunchFailed("The Ray driver ended before it was connected."))
            return
        self._outage.start(f"lost the Ray cluster at '{self._options.address}'; retrying every {AGAIN_S:g} s")
        self._again = self._loop.call_later(AGAIN_S, self._connect)

    def _received(self, message: Observation | News) -> None:
        match message:
            case CapacitySeen():
                self._capacity = message.capacity
            case Adopted():
                self._outage.ended()
                if self._adopted is not None and not self._adopted.done():
                    self._adopted.set_result(None)
            case DriverFailed():
                if self._adopted is None:
                    self._outage.met(message.reason)
                elif not self._adopted.done():
                    self._adopted.set_exception(LaunchFailed(message.reason, hint=message.hint))
            case Started() | Output():
                if message.run_id in self._plans:
                    self._listener(message)
            case Exited() | Lost():
                self._stops.pop(message.run_id, None)
                if self._plans.pop(message.run_id, None) is not None:
                    if isinstance(message, Exited) and message.cause is None:
                        self._cleared.add(message.task_id)
                    self._listener(message)


class _Driver:
    """The driver's process, and the thread that reads it."""

    def __init__(self, launcher: RayLauncher) -> None:
        self._launcher = launcher
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(
            target=drive, args=(theirs, launcher._options), name="strata-ray-driver", daemon=True
        )
        self._process.start()
        theirs.close()
        self._closing = threading.Event()
        threading.Thread(target=self._listen, name="ray-driver", daemon=True).start()

    def ask(self, request: Request) -> bool:
        try:
            self._connection.send(request)
        except OSError:
            return False
        return True

    def close(self) -> None:
        self._closing.set()
        with contextlib.suppress(OSError):
            self._connection.send(None)
        self._process.join(CLOSE_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._connection.close()

    def _listen(self) -> None:
        loop, launcher = self._launcher._loop, self._launcher
        received = threading.Event()

        def hand_over(message: Observation | News) -> None:
            received.set()
            launcher._received(message)

        with contextlib.suppress(RuntimeError):  # The loop is closed: nothing listens any more.
            while True:
                try:
                    message = self._connection.recv()
                except (EOFError, OSError):
                    break
                received.clear()
                loop.call_soon_threadsafe(hand_over, message)
                # One at a time: a busy coordinator slows the driver down, not the other way round.
                while not received.wait(1.0) and not self._closing.is_set():
                    pass
            loop.call_soon_threadsafe(launcher._driver_lost, self)


def namespace(data_dir: Path, *, shared: str = "") -> str:
    """A name for everything one coordinator has in a cluster, the same after a restart on the same data; where several share a journal, the
    same for all of them."""
    place = shared or f"{socket.gethostname()}:{data_dir.resolve()}"
    return f"strata-{hashlib.sha256(place.encode()).hexdigest()[:12]}"
