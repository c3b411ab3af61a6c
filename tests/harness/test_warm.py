"""Workers from the fork server, when one of them dies at the worst moment."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing import api as torch_api

from strata.rendezvous.warm import WarmWorkers


def who_am_i(wait_s: float) -> int:
    time.sleep(wait_s)
    return os.getpid()


def make(tmp_path: Path, *, wait_s: float) -> WarmWorkers:
    return WarmWorkers(
        name="test",
        entrypoint=who_am_i,
        args={0: (wait_s,), 1: (wait_s,)},
        envs={0: {}, 1: {}},
        start_method="forkserver",
        logs_specs=DefaultLogsSpecs(log_dir=str(tmp_path)),
    )


def test_one_that_is_killed_before_it_can_say_who_it_is_does_not_end_the_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, lost = torch_api.mp.start_processes, []

    def interrupted(*args: Any, **options: Any) -> Any:
        context = real(*args, **options)
        if not lost:
            lost.extend(context.pids())
            raise EOFError("unexpected EOF")
        return context

    monkeypatch.setattr(torch_api.mp, "start_processes", interrupted)
    context = make(tmp_path, wait_s=0.0)
    context.start()
    result = context.wait(timeout=60)
    context.close()
    assert result is not None
    assert set(result.return_values) == {0, 1}
    assert not any(psutil.pid_exists(pid) for pid in lost), "the first ones must not train beside the second"


def test_one_that_has_finished_is_not_waited_for_when_all_are_ended(tmp_path: Path) -> None:
    context = make(tmp_path, wait_s=0.0)
    context.start()
    while not all(not queue.empty() for queue in context._ret_vals.values()):
        time.sleep(0.02)  # Both have finished, and wait for the agent to take their results.
    began_s = time.monotonic()
    context.close()
    assert time.monotonic() - began_s < 15, "torch would wait 30 s and then kill them"
