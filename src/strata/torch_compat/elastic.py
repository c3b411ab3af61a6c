"""Torch's elastic agent and the processes it runs, with hooks that have public names.

`Agent` and `WorkerProcesses` do what torch's own do, less what would repeat a hopeless attempt, end the agent, or keep it
waiting. What they decide beyond that is their subclasses' business; `use_agent` and `use_worker_processes` put those in place
of torch's, in this process.
"""

from __future__ import annotations

import inspect
import logging
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from strata.processes import add_output_to
from strata.torch_compat import require
from strata.torch_compat.stores import HashStore

require("elastic")

from torch import multiprocessing as torch_multiprocessing  # noqa: E402
from torch.distributed import launcher  # noqa: E402
from torch.distributed.elastic import multiprocessing as workers  # noqa: E402
from torch.distributed.elastic.agent.server import local_elastic_agent  # noqa: E402
from torch.distributed.elastic.agent.server.api import (  # noqa: E402
    DEFAULT_ROLE,
    RunResult,
    SimpleElasticAgent,
    Worker,
    WorkerGroup,
    WorkerState,
)
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent  # noqa: E402

START_ATTEMPTS = 10
RELEASE_S = 1.0
"""More than enough to tell workers that their results were read."""


class Agent(LocalElasticAgent):
    """Torch's agent of one machine, with hooks for subclasses."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        # With it, torch 2.7 closes the rendezvous for everybody when one agent is asked to leave. Who launches the agent
        # closes it where the run has ended.
        self._rdzv_handler = None  # type: ignore[assignment]

    def starting(self) -> None:
        """Called before each attempt."""

    def failed(self, result: RunResult, error_files: Mapping[int, str]) -> None:
        """Called after an attempt that failed, before torch decides whether to restart. Files are those of each slot."""

    @property
    def has_restarts(self) -> bool:
        return bool(self._remaining_restarts > 0)

    def give_up(self) -> None:
        """End as after the last restart."""
        self._remaining_restarts = 0

    def _initialize_workers(self, worker_group: WorkerGroup) -> None:
        self.starting()
        super()._initialize_workers(worker_group)

    def run(self, role: str = DEFAULT_ROLE) -> RunResult:
        """Torch has no result, and fails over that, where the run ends while this machine stands by."""
        result: RunResult | None = super().run(role)
        return result if result is not None else RunResult(state=WorkerState.SUCCEEDED)

    def let_in(self) -> dict[int, int] | None:
        """Called when this machine has met the others, before its workers are started: the processes of those that were started
        before (`start_early`), if they are to be used."""
        return None

    def start_early(self, variables: Mapping[str, str], *, first_rank: int) -> None:
        """Start the workers before this machine has met the others, with these variables as well."""
        group: Any = self.get_worker_group()
        count = group.spec.local_world_size
        group.workers = [
            Worker(local_rank=n, global_rank=first_rank + n, world_size=first_rank) for n in range(count)
        ]
        group.group_rank = group.group_world_size = 0
        group.master_addr, group.master_port = "", 0
        group.store = group.store or HashStore()
        before = dict(os.environ)
        os.environ.update(variables)  # What workers get beside torch's.
        try:
            super()._start_workers(group)
        finally:
            for name in variables:
                del os.environ[name]
            os.environ.update(before)

    def leaving(self) -> float | None:
        """Called when this machine was asked to leave, before its workers are: how long they have; None for torch's time."""
        return None

    def has_left(self) -> None:
        """Called after that, when they have ended."""

    def _shutdown(self, *arguments: Any, **options: Any) -> None:
        asked = sys.exc_info()[1]
        if not isinstance(asked, workers.api.SignalException) or asked.sigval != signal.SIGTERM:
            super()._shutdown(*arguments, **options)
            return
        patience_s = self.leaving()
        if patience_s is not None and self.processes is not None:
            self.processes.patience_s = patience_s
        super()._shutdown(*arguments, **options)
        self.has_left()

    def look(self) -> WorkerState | None:
        """Called whenever torch looks after the workers, and may wait a little: their state, if torch is to leave them alone."""
        return None

    def keep(self) -> bool:
        """Called when other machines wait to meet: whether the workers stay as they are."""
        return False

    @property
    def processes(self) -> WorkerProcesses | None:
        """The workers, where they are run as functions."""
        return self._pcontext if isinstance(self._pcontext, WorkerProcesses) else None

    def forget_processes(self) -> None:
        """They have ended."""
        self._pcontext = None

    def count_restart(self) -> None:
        self._remaining_restarts -= 1

    def rank_of(self, slot: int) -> int:
        """The rank of one worker of this machine, in the newest round that it took part in."""
        return int(self.get_worker_group().workers[slot].global_rank)

    def meet(self, slots: Sequence[int]) -> dict[int, dict[str, str]]:
        """Meet the other machines with these workers only: torch's variables for each of them. Blocks."""
        group, context = self.get_worker_group(), self._pcontext
        assert isinstance(context, WorkerProcesses)
        everyone = dict(enumerate(group.workers))
        group.spec.local_world_size = len(slots)
        try:
            self._rendezvous(group)
            for slot, worker in zip(slots, group.workers, strict=True):
                worker.local_rank = slot
                worker.id = context.pids()[slot]
                everyone[slot] = worker
            return self._variables(group)
        finally:
            # Torch looks for every process of this machine among the workers, also for those that wait to join.
            group.spec.local_world_size = len(everyone)
            group.workers = list(everyone.values())

    def variables(self) -> dict[int, dict[str, str]]:
        """What torch would start the workers with, in the round that was met last."""
        return self._variables(self.get_worker_group())

    def _variables(self, group: WorkerGroup) -> dict[int, dict[str, str]]:
        context = self._pcontext
        seen: dict[int, dict[str, str]] = {}

        def note(*, envs: dict[int, dict[str, str]], **_: Any) -> Any:
            seen.update(envs)
            return _NoProcesses

        module: Any = local_elastic_agent
        torch_start, module.start_processes = module.start_processes, note
        try:
            super()._start_workers(group)
        finally:
            module.start_processes = torch_start
            self._pcontext = context
        return seen

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        pids = self.let_in()
        return pids if pids is not None else super()._start_workers(worker_group)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        state = self.look()
        if state is not None:
            return RunResult(state=state)
        result: RunResult = super()._monitor_workers(worker_group)
        if result.state is WorkerState.FAILED:
            self.failed(result, self._pcontext.error_files if self._pcontext else {})
        return result

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        if worker_group.state is not WorkerState.HEALTHY or not self.keep():
            super()._restart_workers(worker_group)


def leave(reason: str) -> NoReturn:
    """End this machine's part in the run as a signal would: others continue, and the rendezvous stays open."""
    raise workers.api.SignalException(reason, signal.SIGTERM)


class _NoProcesses:
    @staticmethod
    def pids() -> dict[int, int]:
        return {}


def use_agent(kind: type[Agent]) -> None:
    """In the agent's process, before torch creates its agent."""
    launcher.api.LocalElasticAgent = kind  # type: ignore[attr-defined]


def wrap_rendezvous(wrapper: Callable[[Callable[[], None], Any], None]) -> None:
    """Agents of this process meet by `wrapper(meet, handler)` instead of by `meet()`, which is torch's."""

    def rendezvous(agent: SimpleElasticAgent, group: WorkerGroup) -> None:
        wrapper(lambda: _torch_rendezvous(agent, group), group.spec.rdzv_handler)

    SimpleElasticAgent._rendezvous = rendezvous  # type: ignore[method-assign]


_torch_rendezvous = SimpleElasticAgent._rendezvous


ERROR_FILE = "TORCHELASTIC_ERROR_FILE"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Started:
    """A process by itself."""

    process: Any
    error_file: str
    """Torch's, for what it raised."""
    report: str
    """Where it says why it failed (`strata.agent.frames`)."""
    returned: Any


class WorkerProcesses(workers.MultiprocessContext):
    """Torch's way of running workers as functions, less what would end the agent, or keep it waiting, when one dies.

    Beside the workers there may be spares: started like them, without a place, until one takes that of a worker."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._spares: dict[int, _Started] = {}

    patience_s: float | None = None
    """How long they have to end when they are asked to; None for torch's time."""
    ended_first: Mapping[int, int] = {}
    """Exit codes of those that had ended when a failure was noticed, and were not ended for it."""

    def before_start(self) -> None:
        """Called before the processes of an attempt are started."""

    def before_poll(self) -> None:
        """Called whenever the agent is about to look after them."""

    def _start(self) -> None:
        self.before_start()
        for _ in range(START_ATTEMPTS - 1):
            try:
                super()._start()  # type: ignore[no-untyped-call]
                return
            except (EOFError, ConnectionError):  # One was killed before it could say who it is.
                for process in multiprocessing.active_children():
                    process.kill()
                    process.join()
        super()._start()  # type: ignore[no-untyped-call]

    def exit_codes(self) -> dict[int, int]:
        """Of the processes that have ended."""
        assert self._pc is not None
        codes = {slot: process.exitcode for slot, process in enumerate(self._pc.processes)}
        return {slot: code for slot, code in codes.items() if code is not None}

    def endings(self) -> dict[int, int]:
        """For each process, a descriptor that can be read from when it has ended."""
        assert self._pc is not None
        return {slot: process.sentinel for slot, process in enumerate(self._pc.processes)}

    def kill(self) -> None:
        """End all of them."""
        assert self._pc is not None
        for process in self._pc.processes:
            process.kill()
            process.join()

    def replace(self, slot: int, variables: Mapping[str, str]) -> int:
        """End the process of one worker, if it is there, and start another in its place, with these variables as well: its
        number."""
        self._end_worker(slot)
        self.envs[slot] = {**self.envs[slot], **variables}
        return self._put(slot, self._fork(slot, slot, self.envs[slot]))

    def start_spare(self, number: int, variables: Mapping[str, str]) -> int:
        """Start a process that is none of the workers, as the last of them with these variables: its process number."""
        last = self.nprocs - 1
        environment = {**self.envs[last], **variables}
        if environment.get(ERROR_FILE):
            environment[ERROR_FILE] += f".{number}"
        self._spares[number] = self._fork(number, last, environment)
        return int(self._spares[number].process.pid)

    def take_spare(self, number: int, slot: int) -> int:
        """End the process of one worker, if it is there: the spare is in its place from now on. Its process number."""
        self._end_worker(slot)
        return self._put(slot, self._spares.pop(number))

    def spares(self) -> dict[int, Any]:
        """The processes that stand by, whether they live or not."""
        return {number: spare.process for number, spare in self._spares.items()}

    def end_spare(self, number: int) -> str:
        """Where it may have said why it failed."""
        spare = self._spares.pop(number)
        spare.process.kill()
        spare.process.join()
        Path(spare.error_file).unlink(missing_ok=True)
        return spare.report

    def outputs(self, slot: int) -> tuple[str, str]:
        """The files that a worker's output goes to; empty where it goes to none."""
        return self.stdouts[slot] or "", self.stderrs[slot] or ""

    def _end_worker(self, slot: int) -> None:
        assert self._pc is not None
        old = self._pc.processes[slot]
        if old.is_alive():
            old.kill()
        old.join()
        self._pc.sentinels.pop(old.sentinel, None)
        Path(self._pc.error_files[slot]).unlink(missing_ok=True)

    def _put(self, slot: int, started: _Started) -> int:
        assert self._pc is not None
        self._ret_vals[slot] = started.returned
        self.error_files[slot] = started.report
        self._pc.processes[slot] = started.process
        self._pc.error_files[slot] = started.error_file
        self._pc.sentinels[started.process.sentinel] = slot
        return int(started.process.pid)

    def _fork(self, number: int, slot: int, environment: dict[str, str]) -> _Started:
        """A process with the arguments of this worker."""
        queue = multiprocessing.get_context(self.start_method).SimpleQueue()
        is_spare = number != slot
        stdout, stderr = ("", "") if is_spare else self.outputs(slot)
        # Only its own: those of others may be replaced before this one has opened them.
        arguments = (
            *(self.entrypoint, {number: self.args[slot]}, {number: environment}),
            *({number: stdout}, {number: stderr}, {number: queue}, self._worker_finished_event),
            # Which device a spare will have is not known.
            None if is_spare else getattr(self, "_numa_options", None),
        )
        wanted = len(inspect.signature(workers.api._wrap).parameters) - 1
        started: Any = torch_multiprocessing.start_processes(  # type: ignore[no-untyped-call]
            _in_place_of,
            args=(number, *arguments[:wanted]),
            nprocs=1,
            join=False,
            start_method=self.start_method,
        )
        return _Started(
            process=started.processes[0],
            error_file=started.error_files[0],
            report=environment.get(ERROR_FILE) or self.error_files[slot],
            returned=queue,
        )

    def _poll(self) -> workers.RunProcsResult | None:
        assert self._pc is not None
        self.before_poll()
        codes = [process.exitcode for process in self._pc.processes]
        if any(codes):
            self.ended_first = {slot: code for slot, code in enumerate(codes) if code is not None}
            self._release_finished()
            # Torch names the first it finds; one that was killed is why others have failed, and never the reverse.
            self._pc.sentinels = dict(
                sorted(self._pc.sentinels.items(), key=lambda one: (codes[one[1]] or 0) >= 0)
            )
        for rank, code in enumerate(codes):
            # Torch waits for a result of each: one that left by sys.exit() or os._exit(0) has sent none.
            if code == 0 and rank not in self._return_values and self._ret_vals[rank].empty():
                self._ret_vals[rank].put(None)
        return super()._poll()

    def _close(self, death_sig: signal.Signals, timeout: int = 30) -> None:
        for number in list(self._spares):
            self.end_spare(number)
        self._release_finished()
        super()._close(death_sig, timeout if self.patience_s is None else self.patience_s)  # type: ignore[arg-type]
        for path in self._pc.error_files if self._pc else ():
            Path(path).unlink(missing_ok=True)

    def _release_finished(self) -> None:
        """A worker that has finished waits for the notice that its result was read, and would until it is killed.

        Python waits for each of them to wake up, so in vain for one that was killed meanwhile.
        """
        releasing = threading.Thread(target=self._worker_finished_event.set, daemon=True)
        releasing.start()
        releasing.join(RELEASE_S)


def _in_place_of(_: int, number: int, *arguments: Any) -> None:
    """In a replacement: what it prints is added to what the one before has printed, where that goes to files."""
    entrypoint, args, envs, stdouts, stderrs, *more = arguments
    add_output_to(stdouts[number], stderrs[number])
    stdouts[number] = stderrs[number] = ""
    workers.api._wrap(number, entrypoint, args, envs, stdouts, stderrs, *more)


def use_worker_processes(kind: type[WorkerProcesses]) -> None:
    """In the agent's process, before it starts its first worker."""
    logging.Handler.handleError = let_signals_through  # type: ignore[assignment]
    workers.MultiprocessContext = kind  # type: ignore[misc]
    logging.getLogger(workers.api.__name__).addFilter(_brief)


def _brief(record: logging.LogRecord) -> bool:
    """Of a lost worker, log who it was and how it ended: what went wrong it has said itself. For a whole stack of the
    agent, torch would import its compiler."""
    record.exc_info = None
    return True


def let_signals_through(handler: logging.Handler, record: logging.LogRecord) -> None:
    """Torch makes an exception of SIGTERM. One that is raised while a line is logged would be taken for a fault of the
    log, and the agent would continue as if it had not been asked to leave."""
    error = sys.exc_info()[1]
    if isinstance(error, workers.api.SignalException):
        raise error
    _handle_error(handler, record)


_handle_error = logging.Handler.handleError
