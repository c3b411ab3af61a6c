"""Process groups that DDP lets go of.

A gloo group that is destroyed waits for its threads, and these need Python's lock to free the tensors of their last
collective. Torch gives the lock up when a Python reference to the group is the last one, and not when DDP's reducer has it: then
both wait for ever, at the end of a script whose last collective has only just ended. A script that imports torch's compiler
after it has joined its group is spared: the compiler keeps the group. In a warm worker it is imported before.

Here the group outlives the reducer by a Python reference. Torch 2.7 does not give the lock up for that one either: there the
group stays as long as the process.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

from strata.torch_compat import require, torch_version

require("groups")

import torch  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

GIVES_UP_LOCK = torch_version() >= (2, 13)
"""Verified with 2.13 and 2.15; those before keep the group, which is safe with each."""
_kept: list[object] = []


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
    for holder in (wrapper.reducer, wrapper.logger):  # The logger holds the reducer.
        if holder is not None:
            weakref.finalize(holder, _let_go, wrapper.process_group).atexit = False


def _let_go(group: object) -> None:
    if not GIVES_UP_LOCK:
        _kept.append(group)
