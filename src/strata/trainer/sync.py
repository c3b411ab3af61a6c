"""How long this rank waits for the others when gradients are exchanged.

In lock step every rank takes as long as the slowest, so step times say nothing about who is slow. The one that
waits least is the one the others wait for.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import distributed
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel


class SyncTimer:
    """Averages gradients like DDP does, and times it."""

    def __init__(self, model: DistributedDataParallel) -> None:
        self.wait_s = 0.0
        """Of the newest step, over all its buckets."""
        self._since_s = 0.0
        model.register_comm_hook(self, _average)

    def began(self, *, first: bool) -> None:
        if first:
            self._since_s = time.perf_counter()

    def ended(self) -> None:
        self.wait_s = time.perf_counter() - self._since_s


def _average(timer, bucket):  # type: ignore[no-untyped-def] # DDP refuses annotations that are text.
    timer.began(first=bucket.index() == 0)
    gradients: torch.Tensor = bucket.buffer().div_(distributed.get_world_size())
    work = distributed.all_reduce(gradients, async_op=True)

    def finish(future: Future[Any]) -> torch.Tensor:
        future.value()  # Raises when they were not exchanged: continuing would be training alone.
        timer.ended()
        return gradients

    averaged: Future[torch.Tensor] = work.get_future().then(finish)
    return averaged
