"""Threads of gloo that still need Python: when their group is destroyed, and when the script ends.

A gloo group that is destroyed waits for its threads, and these need Python's lock to free the tensors of their last
collective. Torch gives the lock up when the last reference to gloo's part of the group is one of Python, and not when DDP's
reducer has it, nor, before 2.13, when the group itself has: then both wait for ever, at the end of a script or of a generation
whose last collective has only just ended. A script that imports torch's compiler after it has joined its group is spared:
the compiler keeps the group. In a warm worker it is imported before.

Here the group outlives the reducer, and gloo's part outlives the group, each by a Python reference.

Where the group lives to the end of a script, Python ends each thread that asks for its lock from then on, and a thread that is
ended in the midst of freeing takes the process with it ("terminate called without an active exception"): the abort of a
rank that had finished. So a script first waits until these threads have freed what they hold.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import sys
import threading
import time
import weakref
from datetime import timedelta
from pathlib import Path
from typing import Any

from strata.torch_compat import require, torch_version

require("groups")

import torch  # noqa: E402
from torch import distributed  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

from strata.torch_compat.stores import HashStore  # noqa: E402

_c10d: Any = importlib.import_module("torch.distributed.distributed_c10d")
THREAD = "pt_gloo_runloop"
NAMES_THREADS = torch_version() >= (2, 13)
"""Verified with 2.13 and 2.15; with 2.7 they are called as the program is."""
ACTIVITY = ("State:", "voluntary_ctxt_switches:", "nonvoluntary_ctxt_switches:")
SETTLING_S = 5.0
"""More than freeing takes, and no more than a script's end may be late for a collective that hangs."""
_SWITCH_INTERVAL_S, _LOOK_S = 0.001, 0.005
"""A thread that waits for Python's lock wakes several times between two looks."""


def outlive_reducers(model: torch.nn.Module) -> None:
    """The groups of all DDP wrappers in `model` are destroyed after their reducers."""
    for module in model.modules():
        if isinstance(module, DistributedDataParallel):
            _outlive_reducer(module)


def outlive_all_reducers() -> None:
    """From now on, the same holds for every DDP wrapper of this process."""
    create = DistributedDataParallel.__init__

    @functools.wraps(create)
    def create_outlived(self: DistributedDataParallel, *arguments: Any, **options: Any) -> None:
        create(self, *arguments, **options)
        _outlive_reducer(self)

    DistributedDataParallel.__init__ = create_outlived  # type: ignore[method-assign]


def _outlive_reducer(wrapper: DistributedDataParallel) -> None:
    group = wrapper.process_group
    outlive_group(group)
    for holder in (wrapper.reducer, wrapper.logger):  # The logger holds the reducer.
        if holder is not None:
            _keep_until_gone(holder, [group])


def outlive_group(group: Any) -> None:
    """Gloo's part of `group` is destroyed after it, and other threads can have Python's lock meanwhile."""
    _keep_until_gone(group, _gloo_parts(group))


def destroy_groups() -> None:
    """Destroy all groups of this process."""
    for group in list(_c10d._world.pg_map):
        outlive_group(group)
    distributed.destroy_process_group()


def _keep_until_gone(holder: object, kept: list[Any]) -> None:
    weakref.finalize(holder, kept.clear).atexit = False


def _gloo_parts(group: Any) -> list[Any]:
    """What a group does on the CPU and on devices, as far as gloo does it."""
    parts = []
    for device in ("cpu", "cuda"):
        with contextlib.suppress(RuntimeError):  # It has no part for this one.
            parts.append(group._get_backend(torch.device(device)))
    return [part for part in parts if "gloo" in str(part.name()).lower()]


def settle_at_exit() -> None:
    """Let the threads of gloo free what they hold before Python ends."""
    atexit.unregister(_settle)
    atexit.register(_settle)


def _settle() -> None:
    """Wait until none of them has moved for a few milliseconds, `SETTLING_S` at most.

    Who waits for Python's lock wakes once in every switch interval: a short one tells it from who has nothing to do.
    """
    threads = _threads()
    deadline_s = time.monotonic() + SETTLING_S
    switch_interval_s = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    while threads and time.monotonic() < deadline_s:
        before = [_activity(thread) for thread in threads]
        time.sleep(_LOOK_S)
        if not any(_has_moved(thread, since) for thread, since in zip(threads, before, strict=True)):
            break
    sys.setswitchinterval(switch_interval_s)


def _threads() -> list[Path]:
    """Those of gloo; where they have no name, all that Python has not started."""
    tasks = Path("/proc/self/task").glob("*")
    if NAMES_THREADS:
        return [task for task in tasks if _read(task / "comm").strip() == THREAD]
    known = {str(thread.native_id) for thread in threading.enumerate()}
    return [task for task in tasks if task.name not in known]


def _has_moved(thread: Path, since: list[str]) -> bool:
    """Whether it was running then, or has run or waited since."""
    return since[:1] == ["R"] or since != _activity(thread)


def _activity(thread: Path) -> list[str]:
    """Its state, and how often it was given a processor and gave it back."""
    return [line.split()[1] for line in _read(thread / "status").splitlines() if line.startswith(ACTIVITY)]


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # The thread has ended.
        return ""


def sum_over_loopback(ranks: int, count: int, *, timeout_s: float) -> list[float]:
    """What each of so many ranks, all in this process, gets when their numbers (1, 2, …) are added over loopback with gloo. Raises
    `TimeoutError` where they are not done in time."""
    gloo: Any = distributed.ProcessGroupGloo
    store = HashStore()
    sums = [0.0] * ranks
    errors: list[BaseException] = []

    def take_part(rank: int) -> None:
        try:
            options = gloo._Options()
            options._devices = [gloo.create_device(hostname="127.0.0.1")]
            options._timeout = timedelta(seconds=timeout_s)
            group = gloo(store, rank, ranks, options)
            tensor = torch.full((count,), float(rank + 1))
            group.allreduce([tensor]).wait()
            sums[rank] = float(tensor.min()) if bool((tensor == tensor[0]).all()) else float("nan")
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=take_part, args=(rank,), daemon=True) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    deadline_s = time.monotonic() + timeout_s
    for thread in threads:
        thread.join(max(0.0, deadline_s - time.monotonic()))
    if errors:
        raise errors[0]
    if any(thread.is_alive() for thread in threads):
        raise TimeoutError(f"ranks did not meet over loopback within {timeout_s:g} s")
    return sums
