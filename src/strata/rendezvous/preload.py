"""What Python's fork server is to import before it forks the first worker. Needs no torch itself."""

from __future__ import annotations

import multiprocessing
import os

from strata.rendezvous import PRELOAD_VARIABLE

EVERY_WORKER_NEEDS = (
    "torch.distributed.run",
    "torch.nn.parallel",
    "strata.rendezvous.warm",
    "strata.training.job",
)


def preload() -> None:
    """In the agent, before its fork server runs."""
    own = [name.strip() for name in os.environ.get(PRELOAD_VARIABLE, "").split(",")]
    multiprocessing.set_forkserver_preload([*EVERY_WORKER_NEEDS, *filter(None, own)])
