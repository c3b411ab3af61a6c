"""Restarted workers under plain torchrun: they meet anew where they can, and say so where they cannot."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from strata.agent import torchrun_trap
from tests.rendezvous.etcd_server import free_port
from tests.support import eventually

TRAPPED = {
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "LOCAL_WORLD_SIZE": "2",
    "WORLD_SIZE": "4",
}


def warning(monkeypatch: pytest.MonkeyPatch, **changes: str) -> str | None:
    monkeypatch.delenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", raising=False)
    for name, value in {**TRAPPED, **changes}.items():
        monkeypatch.setenv(name, value)
    return torchrun_trap.warning()


def test_a_restarted_worker_that_shares_its_agents_store_is_warned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    line = warning(monkeypatch)
    assert line is not None
    assert "\n" not in line
    assert "attempt 3" in line
    assert "strata torchrun" in line


@pytest.mark.parametrize(
    "changes",
    [
        {"TORCHELASTIC_RESTART_COUNT": "0"},
        {"TORCHELASTIC_USE_AGENT_STORE": "False"},
        {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
        {"TORCHELASTIC_RESTART_COUNT": "many"},
    ],
)
def test_others_are_not_warned(monkeypatch: pytest.MonkeyPatch, changes: dict[str, str]) -> None:
    assert warning(monkeypatch, **changes) is None


SEPARATE = """
import torch.distributed.rendezvous, sys
before = sys.modules["torch.distributed.rendezvous"]._create_c10d_store
import strata
from strata.agent import torchrun_trap
print(sys.modules["torch.distributed.rendezvous"]._create_c10d_store is not before, torchrun_trap.warning() is None)
"""


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"WORLD_SIZE": "2"}, "True True"),  # One machine: all of its workers count the same attempts.
        ({}, "False False"),
        (
            {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
            "True True",
        ),  # Only a static rendezvous shares all the same.
        ({"WORLD_SIZE": "2", "TORCHELASTIC_RESTART_COUNT": "0"}, "False True"),
    ],
)
def test_importing_strata_separates_attempts_where_all_know_their_number(
    changes: dict[str, str], expected: str
) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"}
    ran = subprocess.run(
        [sys.executable, "-c", SEPARATE],
        env={**environment, **TRAPPED, **changes},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.stdout.split() == expected.split(), ran.stderr


SCRIPT = """
import os, sys, time
import torch
from torch import distributed
import strata
distributed.init_process_group("gloo")
total = torch.ones(1)
distributed.all_reduce(total)
print(f"attempt {os.environ['TORCHELASTIC_RESTART_COUNT']} rank {distributed.get_rank()} pid {os.getpid()} of {total.item():g}", flush=True)
while os.environ["TORCHELASTIC_RESTART_COUNT"] != "2":
    distributed.all_reduce(total)
    time.sleep(0.01)
distributed.destroy_process_group()
"""


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "command",
    [
        ["-m", "torch.distributed.run"],
        ["-m", "torch.distributed.run", "--master-port=PORT"],
        ["-m", "strata.cli.main", "torchrun"],
        ["-m", "strata.cli.main", "torchrun", "--master-port=PORT"],
        ["-m", "strata.cli.main", "torchrun", "--start-method=spawn"],
    ],
    ids=lambda words: " ".join(words[1:]),
)
def test_two_kills_cost_two_restarts(tmp_path: Path, command: list[str]) -> None:
    """Torch's own store would give the new workers the addresses of the dead ones."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    port = free_port()
    words = [word.replace("PORT", str(port)) for word in command]
    environment = {k: v for k, v in os.environ.items() if k != "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"}
    run = subprocess.Popen(
        [sys.executable, *words, "--nproc-per-node=2", "--max-restarts=2", str(script)],
        env={**environment, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    lines: list[str] = []
    assert run.stdout is not None
    reading = threading.Thread(target=lambda: lines.extend(iter(run.stdout.readline, "")))  # type: ignore[union-attr]
    reading.start()
    try:
        for attempt in (0, 1, 2):
            pattern = re.compile(rf"attempt {attempt} rank (\d) pid (\d+) of 2")

            def found(pattern: re.Pattern[str] = pattern) -> list[re.Match[str]]:
                return list(pattern.finditer("".join(lines)))  # Two may share a line.

            eventually(
                lambda: len(found()) == 2 or run.poll() is not None,
                within_s=120,
                what=lambda: f"attempt {attempt}; printed so far:\n{''.join(lines)}",  # noqa: B023
            )
            assert len(found()) == 2, "".join(lines)
            if attempt < 2:
                victim = next(int(match[2]) for match in found() if int(match[1]) == attempt)
                os.kill(victim, signal.SIGKILL)
        assert run.wait(120) == 0, "".join(lines)
    finally:
        if run.poll() is None:
            os.killpg(run.pid, signal.SIGTERM)
            run.wait(60)
        reading.join(60)
