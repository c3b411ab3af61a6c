"""The process groups of one generation: joined, aborted from any thread, and left without a trace.

A rank that waits in a collective for one that is lost must be freed by another thread. NCCL has `abort` for that. Gloo's does
nothing in the versions we know, but a gloo group whose connections are closed fails at once, as if its peers had ended:
so its sockets, and those of the store that ranks meet at, are noted when a group is made, and shut down when it is
aborted. Gloo may lose a send that is under way when its connection ends, by an abort or by the death of a peer, and whoever
waits for that one waits for ever: such a rank's process must be replaced. Shut down in both directions, and closed as soon as a
rank has left, that is rare. The descriptors stay gloo's own, to be closed by it.
"""

from __future__ import annotations

import importlib
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
from torch import distributed

from strata.torch_compat import require
from strata.torch_compat.stores import HashStore

require("aborting")

MAKING_S = 0.02
"""How often an abort looks for connections of a group that is still being made."""

_c10d: Any = importlib.import_module("torch.distributed.distributed_c10d")


class ProcessGroups:
    """All groups that this process makes between `join` and `leave`."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._sockets: dict[int, str] = {}
        """The descriptors of this generation's connections, each with what it stands for."""
        self._making: list[dict[int, str]] = []
        """For each group that is being made: what there was before."""
        self._aborted = threading.Event()

    def join(self, backend: str | None, *, timeout: timedelta | None = None) -> None:
        """Make the default group, by torchrun's variables. Raises what torch raises, also where the group was aborted before."""
        _c10d._new_process_group_helper = self._noting(_torch_helper)
        with self._noted():
            options: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
            distributed.init_process_group(backend or default_backend(), **options)

    def abort(self) -> None:
        """Free whoever waits in a collective, or for its peers to join; that fails, and so does every later one. From any
        thread."""
        with self._changed:
            self._aborted.set()
            _shut_down(self._sockets)
            while self._making:  # It may still open connections.
                _shut_down(_new_since(self._making[0]))
                self._changed.wait(MAKING_S)
        for group in list(_c10d._world.pg_map):
            with suppress(Exception):
                if (backend := _nccl(group)) is not None:
                    backend.abort()

    def leave(self) -> None:
        """Forget the groups of this generation."""
        _c10d._new_process_group_helper = _torch_helper
        if distributed.is_initialized():
            with suppress(Exception):  # Of a group that was aborted.
                distributed.destroy_process_group()
        # Ranks name their groups by it, and one that was not made in the end has counted.
        _c10d._world.group_count = 0
        self._sockets = {}

    def _noting(self, helper: Any) -> Any:
        def make(*arguments: Any, **options: Any) -> Any:
            with self._noted():
                return helper(*arguments, **options)

        return make

    @contextmanager
    def _noted(self) -> Iterator[None]:
        """Note the connections that are made meanwhile."""
        before = _sockets()
        with self._changed:
            if self._aborted.is_set():
                raise ConnectionAbortedError("the process group was aborted before it was made")
            self._making.append(before)
        try:
            yield
        finally:
            with self._changed:
                self._sockets |= _new_since(before)
                self._making.remove(before)
                self._changed.notify_all()
                if self._aborted.is_set():  # Before its last connections were made.
                    _shut_down(self._sockets)


def warm_up() -> None:
    """What a process does when it first makes a group, and first uses its device: before others wait for it."""
    distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    distributed.all_reduce(torch.zeros(1))
    distributed.destroy_process_group()
    if torch.cuda.is_available():
        torch.zeros(1, device=f"cuda:{int(os.environ.get('LOCAL_RANK', '0')) % torch.cuda.device_count()}")


_torch_helper = _c10d._new_process_group_helper


def default_backend() -> str:
    return "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and distributed.is_nccl_available() else "gloo"


def _nccl(group: Any) -> Any:
    backend = group._get_backend(torch.device("cuda")) if torch.cuda.is_available() else None
    return backend if backend is not None and "nccl" in str(backend.name()).lower() else None


def _sockets() -> dict[int, str]:
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{name}")
            if target.startswith("socket:"):
                found[int(name)] = target
    return found


def _new_since(before: dict[int, str]) -> dict[int, str]:
    return {number: target for number, target in _sockets().items() if before.get(number) != target}


def _shut_down(sockets: dict[int, str]) -> None:
    for number, target in sockets.items():
        with suppress(OSError):
            if os.readlink(f"/proc/self/fd/{number}") != target:
                continue  # Closed, and its number given to another.
            with socket.socket(fileno=os.dup(number)) as connection:
                is_internet = connection.family in (socket.AF_INET, socket.AF_INET6)
                is_listener = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                if is_internet and not is_listener:  # Gloo ends the process over a listener that fails.
                    connection.shutdown(socket.SHUT_RDWR)
