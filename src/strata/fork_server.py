"""Python's fork server: every private name of `multiprocessing.forkserver` that is used. Needs nothing but Python.

A process has at most one server, which `multiprocessing` starts when it needs it and forks children from. Another one can be
started beside it, and take its place once it is ready.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing import forkserver
from typing import Any

_FIELDS = (
    "_forkserver_address",
    "_forkserver_alive_fd",
    "_forkserver_pid",
    "_forkserver_authkey",  # From Python 3.14 on.
)


class ForkServer:
    """A server that this process has started."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self._fields = fields
        self.pid: int = fields["_forkserver_pid"]

    @classmethod
    def current(cls) -> ForkServer | None:
        """The one that `multiprocessing` forks from; None where none was started."""
        server: Any = forkserver._forkserver
        return cls(_fields_of(server)) if server._forkserver_pid is not None else None

    @classmethod
    def start(cls, modules: Sequence[str]) -> ForkServer:
        """Another one, which imports these in the background."""
        server: Any = forkserver.ForkServer()
        server.set_forkserver_preload(list(modules))
        server.ensure_running()
        return cls(_fields_of(server))

    def take_over(self) -> ForkServer | None:
        """From now on `multiprocessing` forks from this one; the one before, whose children may still live."""
        before = self.current()
        for field, value in self._fields.items():
            setattr(forkserver._forkserver, field, value)
        return before

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def end(self) -> None:
        """For one that is not needed, and nothing forks from. By itself it would take its time to end, and a caller may be waiting."""
        self.kill()
        with suppress(ChildProcessError):
            os.waitpid(self.pid, 0)
        os.close(self._fields["_forkserver_alive_fd"])
        with suppress(OSError):
            os.unlink(self._fields["_forkserver_address"])


def _fields_of(server: Any) -> Mapping[str, Any]:
    return {field: getattr(server, field) for field in _FIELDS if hasattr(server, field)}


def let_server_end() -> None:
    """In a process that a server has forked: the server ends when no process holds a certain pipe any more, and gives it to each
    of its children too. Without it the server ends with the process that started it."""
    server: Any = forkserver._forkserver
    if server._forkserver_alive_fd is not None:
        os.close(server._forkserver_alive_fd)
        server._forkserver_alive_fd = None
