"""The processes of a `DataLoader`: what they run can be replaced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from strata.torch_compat import require

require("loaders")

from torch.utils.data._utils import worker  # noqa: E402

WorkerLoop = Callable[..., None]

torch_loop: WorkerLoop = worker._worker_loop
"""Torch's own."""


def current_loop() -> WorkerLoop:
    """What the next worker of any `DataLoader` of this process runs."""
    loop: WorkerLoop = worker._worker_loop
    return loop


def use_loop(loop: WorkerLoop) -> None:
    """Let every worker from now on run this."""
    changed: Any = worker
    changed._worker_loop = loop
