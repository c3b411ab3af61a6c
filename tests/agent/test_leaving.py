"""An agent that is asked to leave leaves once, in good order, however often it is asked."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from strata.agent.leaving import Leaving


@contextmanager
def signals() -> Iterator[list[float]]:
    """When SIGTERM has come to this process."""
    came_s: list[float] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: came_s.append(time.monotonic()))
    try:
        yield came_s
    finally:
        signal.signal(signal.SIGTERM, before)


def test_one_that_is_asked_again_gets_one_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("strata.agent.leaving.SIGNAL_AGAIN_S", 600.0)  # However slow this is here.
    with signals() as came_s:
        leaving = Leaving()
        assert leaving.ask()
        assert not leaving.ask()
        leaving.notice(source="the coordinator", reason="drained", within_s=600)
        assert len(came_s) == 1
        monkeypatch.setattr("strata.agent.leaving.SIGNAL_AGAIN_S", 0.0)
        assert leaving.ask(), "it has not begun to leave: the signal was lost"
        assert len(came_s) == 2


@pytest.mark.parametrize("by", ["a signal", "a notice"])
def test_one_that_leaves_already_is_not_interrupted(by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as by word of its quarantine, while it finishes an upload."""
    monkeypatch.delenv("STRATA_GRACE_S", raising=False)
    with signals() as came_s:
        leaving = Leaving()
        if by == "a notice":
            leaving.notice(source="the coordinator", reason="drained", within_s=600)
        asked = threading.Thread(target=leaving.begin, args=(lambda: None,))  # As on a signal.
        asked.start()
        asked.join()
        leaving.end(workers=0, launch="none", coordinator="")
        if leaving._timer is not None:
            leaving._timer.cancel()
        assert not leaving.ask()
        assert len(came_s) == (1 if by == "a notice" else 0)


def test_a_signal_while_it_cleans_up_changes_nothing_about_its_end() -> None:
    program = """
import signal, sys
from torch.distributed.elastic.multiprocessing.api import SignalException
from strata.launch import agent

def interrupted(words):
    raise SignalException("asked again", signal.SIGTERM)

agent._run = interrupted
agent.main()
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False
    )
    assert (ended.returncode, ended.stderr) == (128 + signal.SIGTERM, "")
