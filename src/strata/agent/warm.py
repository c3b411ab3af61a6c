"""Warm restarts: workers are forked with torch in place, instead of importing it after every crash.

With `torchrun --start-method=forkserver --run-path SCRIPT` workers come from a server process that lives as long as the
agent. Strata's rendezvous, or `strata.launch.agent`, runs in the agent and prepares both: the server imports beforehand
what every worker needs, which was most of the time of a recovery, and a second server what the script was seen to import
(`strata.agent.preload`). Importing starts no thread and opens no device or
connection, so what is forked is as good as new; the script in it behaves as it would in a process of its own, to the end.
Without that start method nothing here has an effect.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from strata.agent.channel import SLOT_VARIABLE
from strata.agent.frames import describe, report, script_frames, show
from strata.agent.preload import SecondServer, note_imports, preload
from strata.agent.regrouping import RegroupingAgent
from strata.agent.torchrun_trap import separate_attempts
from strata.data.loading.workers import end_with_trainer
from strata.fork_server import let_server_end
from strata.processes import end_with_parent, run_exit_functions, write_line_by_line
from strata.torch_compat.elastic import WorkerProcesses, use_agent, use_worker_processes
from strata.torch_compat.groups import outlive_all_reducers
from strata.torch_compat.stores import join_promptly


class WarmWorkers(WorkerProcesses):
    """Workers that behave as programs, from the server that has imported most of what they need."""

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
        envs = {rank: {**os.environ, **own, SLOT_VARIABLE: str(rank)} for rank, own in envs.items()}
        super().__init__(name=name, entrypoint=as_a_program, args=called, envs=envs, **more)
        self._run = _run_of(envs)

    def before_start(self) -> None:
        _second.replace_workers()

    def before_poll(self) -> None:
        if self._run:
            _second.look(self._run)


def as_a_program(entrypoint: Callable[..., Any], *arguments: Any) -> Any:
    """In the worker: what Python does for a program, and not for a function in a process that was forked."""
    _part_from_server()
    _note_imports_at_first_step()
    try:
        separate_attempts()
        join_promptly()
        outlive_all_reducers()
        end_with_trainer()
        return entrypoint(*arguments)
    except SystemExit as end:
        _report(end)
        raise
    except (Exception, KeyboardInterrupt) as error:
        _report(error)
        error.__traceback__ = script_frames(error)
        show(error, error.__traceback__)
        if isinstance(error, KeyboardInterrupt):
            sys.exit(128 + signal.SIGINT)
        raise
    finally:
        run_exit_functions()


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
    let_server_end()
    multiprocessing.set_start_method(None, force=True)
    write_line_by_line()
    threads = os.environ.get("OMP_NUM_THREADS", "")
    if threads.isdecimal() and int(threads):
        torch.set_num_threads(int(threads))  # Which torch reads when it is imported.


def _note_imports_at_first_step() -> None:
    """By then a script has imported what it trains with, and torch what its optimizers need."""
    run = os.environ.get("TORCHELASTIC_RUN_ID")
    if not run or os.environ.get("LOCAL_RANK", "0") != "0":
        return
    already, is_noted = frozenset(sys.modules), False

    def note(*_: Any) -> None:
        nonlocal is_noted
        if not is_noted:  # A hook cannot remove itself while hooks are called.
            is_noted = True
            note_imports(run, already)

    register_optimizer_step_post_hook(note)


def _run_of(envs: Mapping[int, Mapping[str, str]]) -> str:
    return next((env["TORCHELASTIC_RUN_ID"] for env in envs.values() if "TORCHELASTIC_RUN_ID" in env), "")


_second = SecondServer()


def warm_up(run: str) -> None:
    """In the agent of a run, before it starts its first worker."""
    preload(run)
    use_worker_processes(WarmWorkers)
    use_agent(RegroupingAgent)
