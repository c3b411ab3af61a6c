"""Killing a worker of a torchrun agent, and timing the way back to the next step that is new."""

from __future__ import annotations

import os
import signal
import time

from strata.agent.trace import footprints
from strata.launch.torchrun import Agent

POLL_S = 0.01


def kill_worker(agent: Agent, name: str, *, peace_s: float, patience_s: float) -> float | None:
    """Let the run called `name` train for a while, kill its last worker, and wait for the first step that had never been made,
    made by a process that began after the kill: seconds from the signal, None where none came in time."""
    deadline_s = time.monotonic() + patience_s
    while not footprints(name) and time.monotonic() < deadline_s and agent.is_running:
        time.sleep(POLL_S)
    time.sleep(peace_s)
    if not footprints(name) or not agent.is_running:
        return None
    step = max(f.step for f in footprints(name))
    at_s = time.monotonic()
    os.kill(agent.workers()[-1], signal.SIGKILL)
    while time.monotonic() < deadline_s and agent.is_running:
        for footprint in footprints(name):
            if footprint.born_mono_s <= at_s:
                step = max(step, footprint.step)
            elif footprint.step > step:
                return footprint.mono_s - at_s
        time.sleep(POLL_S)
    return None
