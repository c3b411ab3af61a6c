"""The process groups of one generation: joined, aborted from any thread, and left without a trace.

A rank that waits in a collective for one that is lost must be freed by another thread. NCCL has `abort` for that. Gloo's does
nothing in the versions we know, but a gloo group whose connections are closed fails at once, as if its peers had ended:
so its sockets, and those of the store that ranks meet at, are noted when a group is made, and shut down when it is
aborted. The descriptors stay gloo's own, to be closed by it.

Gloo loses a send that is under way when its own end of the connection is shut down, and a rank that waits for it waits for ever:
its process must be replaced. In a loop of nothing but collectives that happened to one rank in fifteen. It hardly
happens where a peer has ended, or has left between two collectives. So a rank shuts its connections down as soon as it has
left (`part`): a rank that waits for it fails, parts as well, and so on; one that can be expected to fail in this way
(`fails_by_itself`) is aborted only when it has not.
"""

from __future__ import annotations

import importlib
import os
import socket
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
from torch import distributed

from strata.torch_compat import require
from strata.torch_compat.groups import destroy_groups
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
        self._is_joined = False
        self._excepthook = sys.excepthook

    def join(self, backend: str | None, *, timeout: timedelta | None = None) -> None:
        """Make the default group, by torchrun's variables. Raises what torch raises, also where the group was aborted before."""
        _c10d._new_process_group_helper = self._noting(_torch_helper)
        with self._noted():
            options: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
            distributed.init_process_group(backend or default_backend(), **options)
        self._is_joined = True

    @property
    def fails_by_itself(self) -> bool:
        """Whether a collective of this rank fails when one of the ranks that it waits for has parted. From any thread."""
        with self._changed:
            return self._is_joined and not self._making and not any(map(_nccl, list(_c10d._world.pg_map)))

    def part(self) -> None:
        """This rank, which is in no collective, takes part in no other: a rank that waits for it fails now."""
        with self._changed:
            _shut_down(self._sockets)

    def abort(self) -> None:
        """Free a thread that waits in a collective, or for its peers to join; that fails, and so does every later one. From
        any thread."""
        with self._changed:
            self._aborted.set()
            _shut_down(self._sockets)
            while self._making:  # It may still open connections.
                _shut_down(_new_since(self._making[0]))
                self._changed.wait(MAKING_S)
        for backend in filter(None, map(_nccl, list(_c10d._world.pg_map))):
            with suppress(Exception):
                backend.abort()

    def leave(self) -> None:
        """Forget the groups of this generation."""
        _c10d._new_process_group_helper = _torch_helper
        if distributed.is_initialized():
            with suppress(Exception):  # Of a group that was aborted.
                destroy_groups()
        self.part()  # Something may hold the group, such as a wrapper of the model.
        # Ranks name their groups by it, and one that was not made in the end has counted.
        _c10d._world.group_count = 0
        # Torch puts one of its own around it with each default group, to say a rank in front of every line.
        if getattr(sys.excepthook, "__module__", "") == _c10d.__name__:
            sys.excepthook = self._excepthook
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
                raise ConnectionAbortedError("the process group was aborted before it was created")
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


def warm_up(local_ranks: Iterable[int]) -> None:
    """What a process does when it first makes a group, and first uses a device: before others wait for it. With the devices of
    these ranks of its machine."""
    excepthook = sys.excepthook
    distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    distributed.all_reduce(torch.zeros(1))
    destroy_groups()
    sys.excepthook = excepthook
    if torch.cuda.is_available():
        for device in {rank % torch.cuda.device_count() for rank in local_ranks}:
            torch.zeros(1, device=f"cuda:{device}")


def change_device(before: int, after: int) -> None:
    """This process has another local rank than it was started with: its current device, if it is that of the first, is the other's."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        count = torch.cuda.device_count()
        if torch.cuda.current_device() == before % count:
            torch.cuda.set_device(after % count)


_torch_helper = _c10d._new_process_group_helper


def default_backend() -> str:
    return "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and distributed.is_nccl_available() else "gloo"


def _nccl(group: Any) -> Any:
    """Its NCCL backend; None where it has none."""
    if torch.cuda.is_available():
        with suppress(Exception):
            backend = group._get_backend(torch.device("cuda"))
            return backend if "nccl" in str(backend.name()).lower() else None
    return None


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
