"""What runs on each machine beside its workers: torchrun's agent, and what it does for them.

    careful          says why a worker ended, and repeats nothing that cannot succeed
    regrouping       recovery without a restart: who leaves, who is replaced, who meets; over a `channel` to each worker
    warm, preload, seen   workers that are forked with torch in place
    session_relay    one stream to the coordinator, on which the sessions of all workers ride
    evidence, frames, incidents   what is known of a worker that ended, and to whom it is reported
    leaving, notices, health_gate   a machine that goes, or is not fit to train
    supervised       what a worker prints and how it fails, on its way to the run's supervisor
    finishing        uploads the newest snapshot of workers that have all died
    trace            where the time of a recovery goes, noted by agents and workers
    torchrun_trap    restarted workers that would meet where the dead ones have met

Importing this package itself needs no torch.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from strata.core.faults.restarts import Policy

PRELOAD_VARIABLE = "STRATA_PRELOAD"
"""Further modules that warm workers are to find imported, comma separated: the script's own heavy ones."""
POLICY_VARIABLE = "STRATA_POLICY"
"""What the run does after a failure (`strata.core.faults.restarts.Policy`)."""


def run_policy() -> Policy:
    """Raises `PolicyError` with what may be written."""
    from strata.core.faults.restarts import Policy

    return Policy.parse(os.environ.get(POLICY_VARIABLE, ""))
