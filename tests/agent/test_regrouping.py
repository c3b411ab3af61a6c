"""What an agent knows of a process that it has started, however soon that one says something."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from strata.agent.regrouping import RegroupingAgent
from strata.core.jobs.regroup import Limits, Phase, Regroup, Replace, StartSpare

ARRIVED = {"kind": "arrived", "waits": True, "max_in_process": 100, "timeout_s": 30.0}


class Prompt(RegroupingAgent):
    """One whose new processes arrive at their function before it has heard that they were started."""

    processes: Any = None

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._regroup = Regroup(2, spares=1)
        self._numbers = [0, 1]
        self._slots = 2
        self._noted = {101}
        self._channel: Any = object()
        self.processes = SimpleNamespace(
            pids=lambda: {0: 100, 1: 101}, replace=self._started, start_spare=self._started
        )

    def get_worker_group(self, role: str = "default") -> Any:
        return SimpleNamespace(workers=[SimpleNamespace(id=100, world_size=2), SimpleNamespace(id=101)])

    def _started(self, number: int, variables: Mapping[str, str]) -> int:
        assert self._on_message(number, ARRIVED) is None
        return 102


@pytest.fixture
def agent() -> Prompt:
    found = Prompt()
    for slot in range(2):
        found._regroup.arrived(slot, now_s=0.0, waits=False, limits=Limits())
    return found


def test_a_replacement_that_arrives_at_once_is_let_in(agent: Prompt) -> None:
    agent._regroup.ended(1, "it was killed", now_s=1.0)
    agent._carry_out(Replace(worker=1, reason="it was killed"))
    assert agent._regroup.workers[1].phase is Phase.READY


def test_a_spare_that_arrives_at_once_is_ready(agent: Prompt) -> None:
    agent._carry_out(StartSpare(spare=2))
    assert agent._regroup.spares[2].phase is Phase.READY
