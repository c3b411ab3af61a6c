"""Groups that are left leave nothing behind, and nobody who waits."""

from __future__ import annotations

import socket
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch import distributed

from strata.torch_compat.aborting import ProcessGroups
from strata.torch_compat.stores import serve_on
from tests.rendezvous.etcd_server import free_port
from tests.support_ranks import ranks

ROUNDS = 24


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    port = str(free_port())
    variables = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def test_errors_are_reported_as_before_when_groups_were_left() -> None:
    """Torch says the rank in front of every line, and would once more for each group."""
    before = sys.excepthook
    for _ in range(3):
        groups = ProcessGroups()
        groups.join("gloo")
        distributed.all_reduce(torch.zeros(1))
        assert sys.excepthook is not before
        groups.leave()
        assert sys.excepthook is before


def test_hook_that_was_set_meanwhile_stays() -> None:
    before = sys.excepthook
    groups = ProcessGroups()
    groups.join("gloo")
    own = sys.excepthook = lambda *_: None
    try:
        groups.leave()
        assert sys.excepthook is own
    finally:
        sys.excepthook = before


# The main thread has Python's lock from the last collective on, as it has by chance when a generation ends with it.
LEAVING = """
import os, sys
import torch
from torch import distributed
from strata.torch_compat.aborting import ProcessGroups

groups = ProcessGroups()
groups.join("gloo")
values = torch.zeros(1_000_000)
sys.setswitchinterval(600)
for _ in range(50):
    distributed.all_gather([torch.empty(1_000_000)], values, async_op=True)
groups.leave()
print("left", flush=True)
os._exit(0)
"""


def test_group_is_left_while_its_threads_need_python() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LEAVING], capture_output=True, text=True, timeout=170, check=False
    )
    assert done.stdout == "left\n", done.stderr


@pytest.mark.timeout(300)
def test_whoever_waits_for_a_rank_that_has_left_fails(tmp_path: Path) -> None:
    """Without an abort, which gloo may lose a send by; and although something still holds the group."""
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(ROUNDS)]
    ports = [str(listener.getsockname()[1]) for listener in listeners]
    stores = [serve_on(each, "127.0.0.1", timeout=timedelta(seconds=60)) for each in listeners]
    ends = ranks("tests.torch_compat.parting_script", *ports, folder=tmp_path, world=3)
    assert len(stores) == ROUNDS
    for number in range(ROUNDS):
        found = [of_rank[number] for of_rank in ends]
        assert found.pop(number % 3) == "left"
        assert found == ["failed", "failed"]
