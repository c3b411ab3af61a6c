"""Loader workers that end with the process they load for, whichever `DataLoader` started them.

A forked loader worker holds the trainer's sockets, and looks only every five seconds whether the trainer is alive: so long
the other ranks see no broken connection. Here the kernel ends it at once. Only for workers that the main thread starts: the
kernel goes by the thread, and one that has ended is not a trainer that has.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from typing import Any

from strata.fork_server import let_server_end
from strata.processes import end_with_parent
from strata.torch_compat.loaders import current_loop, torch_loop, use_loop


class _WorkerLoop:
    """In place of torch's function, in the worker. `is_forked` is lost on the way to one that is started otherwise: it holds
    no sockets, and its parent may be a fork server, which must end then. Torch's own would live for ever."""

    def __init__(self, *, is_forked: bool = True) -> None:
        self._is_forked = is_forked

    def __reduce__(self) -> tuple[Any, ...]:
        return _started_otherwise, ()

    def __call__(self, *arguments: Any, **options: Any) -> None:
        if not self._is_forked or isinstance(threading.current_thread(), _MAIN_THREAD):
            end_with_parent(signal.SIGKILL)
            parent = multiprocessing.parent_process()
            if self._is_forked and parent is not None and os.getppid() != parent.pid:
                os._exit(1)  # It had ended before.
            if not self._is_forked:
                let_server_end()
        torch_loop(*arguments, **options)


_MAIN_THREAD = type(threading.main_thread())


def _started_otherwise() -> _WorkerLoop:
    return _WorkerLoop(is_forked=False)


def end_with_trainer() -> None:
    """For every `DataLoader` of this process from now on."""
    if not isinstance(current_loop(), _WorkerLoop):
        use_loop(_WorkerLoop())
