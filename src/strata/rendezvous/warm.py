"""Warm restarts: workers are forked with torch in place, instead of importing it after every crash.

With `torchrun --start-method=forkserver --run-path SCRIPT` workers come from a server process that lives as long as the
agent. Strata's rendezvous, or `strata.launch.agent`, runs in the agent and prepares both: the server imports beforehand
what every worker needs, which was most of the time of a recovery. Importing starts no thread and opens no device or
connection, so what is forked is as good as new; the script in it behaves as it would in a process of its own, to the end.
Without that start method nothing here has an effect.
"""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.elastic import multiprocessing as workers

from strata.data.loader_workers import end_with_trainer
from strata.launch.torchrun_trap import separate_attempts
from strata.processes import end_with_parent, let_fork_server_end
from strata.rendezvous import agent
from strata.rendezvous.frames import describe, report, script_frames
from strata.rendezvous.preload import preload

TRIES = 10
TOLD_S = 1.0
"""More than enough to tell workers that their results were read."""


class WarmWorkers(workers.MultiprocessContext):
    """Torch's way of running such workers, less what would end the agent, or keep it waiting, when one dies."""

    def __init__(
        self,
        name: str,
        entrypoint: Callable[..., Any],
        args: dict[int, tuple[Any, ...]],
        envs: dict[int, dict[str, str]],
        **more: Any,
    ) -> None:
        called = {rank: (entrypoint, *own) for rank, own in args.items()}
        # The server's environment is the agent's of a moment before.
        envs = {rank: {**os.environ, **own} for rank, own in envs.items()}
        super().__init__(name=name, entrypoint=as_a_program, args=called, envs=envs, **more)

    def _start(self) -> None:
        for _ in range(TRIES - 1):
            try:
                super()._start()  # type: ignore[no-untyped-call]
                return
            except (EOFError, ConnectionError):  # One was killed before it could say who it is.
                for process in multiprocessing.active_children():
                    process.kill()
                    process.join()
        super()._start()  # type: ignore[no-untyped-call]

    def _poll(self) -> workers.RunProcsResult | None:
        assert self._pc is not None
        codes = [process.exitcode for process in self._pc.processes]
        if any(codes):
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
        self._release_finished()
        super()._close(death_sig, timeout)
        for path in self._pc.error_files if self._pc else ():
            Path(path).unlink(missing_ok=True)

    def _release_finished(self) -> None:
        """A worker that has finished waits to be told that its result was read, and would until it is killed.

        Python waits for each of them to wake up, so in vain for one that was killed meanwhile.
        """
        telling = threading.Thread(target=self._worker_finished_event.set, daemon=True)
        telling.start()
        telling.join(TOLD_S)


def as_a_program(entrypoint: Callable[..., Any], *arguments: Any) -> Any:
    """In the worker: what Python does for a program, and not for a function in a process that was forked."""
    _part_from_server()
    try:
        separate_attempts()
        end_with_trainer()
        return entrypoint(*arguments)
    except SystemExit as end:
        _report(end)
        raise
    except (Exception, KeyboardInterrupt) as error:
        _report(error)
        error.__traceback__ = script_frames(error)
        sys.excepthook(type(error), error, error.__traceback__)
        if isinstance(error, KeyboardInterrupt):
            sys.exit(128 + signal.SIGINT)
        raise
    finally:
        atexit._run_exitfuncs()


def _report(error: BaseException) -> None:
    described = describe(error)
    if described is not None:
        report(described)


def _part_from_server() -> None:
    """The server ends with the agent, and the worker with the server: so it must not hold what keeps the server alive.
    Processes of the script's own start in the usual way. A Ctrl-C in the terminal is for the agent, which passes it on:
    it must not arrive twice."""
    end_with_parent(signal.SIGKILL)
    os.setpgid(0, 0)
    let_fork_server_end()
    multiprocessing.set_start_method(None, force=True)
    threads = os.environ.get("OMP_NUM_THREADS", "")
    if threads.isdecimal() and int(threads):
        torch.set_num_threads(int(threads))  # Which torch reads when it is imported.


def _brief(record: logging.LogRecord) -> bool:
    """Of a lost worker, log who it was and how it ended: what went wrong it has said itself. For a whole stack of the
    agent, torch would import its compiler."""
    record.exc_info = None
    return True


def _let_signals_through(handler: logging.Handler, record: logging.LogRecord) -> None:
    """Torch makes an exception of SIGTERM. One that is raised while a line is logged would be taken for a fault of the
    log, and the agent would go on as if nobody had asked it to leave."""
    error = sys.exc_info()[1]
    if isinstance(error, workers.api.SignalException):
        raise error
    _handle_error(handler, record)


_handle_error = logging.Handler.handleError


def warm_up() -> None:
    """In the agent, before it starts its first worker."""
    preload()
    logging.Handler.handleError = _let_signals_through  # type: ignore[assignment]
    workers.MultiprocessContext = WarmWorkers  # type: ignore[assignment,misc]
    logging.getLogger(workers.api.__name__).addFilter(_brief)
    agent.install()
