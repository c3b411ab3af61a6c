"""What torch knows of the last collectives of a process, and what of it a hang shows."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from strata.torch_compat import torch_version
from strata.torch_compat.flight_recorder import last_collectives

PROGRAM = """
import logging, sys, threading
import torch
from torch import distributed
from strata.torch_compat.groups import settle_at_exit
from strata.training.watchdog import Watchdog

class Notice(logging.Handler):
    def emit(self, record):
        print(record.getMessage(), flush=True)
        said.set()

settle_at_exit()
said = threading.Event()
logging.getLogger("strata.training").addHandler(Notice())
distributed.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
for size in (3, 5):
    distributed.all_reduce(torch.ones(size))
watchdog = Watchdog(timeout_s=0.2, policy="warn", name="rank 0")
assert said.wait(100)
watchdog.close()
distributed.destroy_process_group()
"""


@pytest.mark.skipif(torch_version() < (2, 13), reason="gloo of this torch records no collectives")
def test_a_rank_that_hangs_shows_its_last_collectives(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "meeting")],
        capture_output=True,
        text=True,
        timeout=170,
        cwd=Path(__file__).parents[2],
    )
    assert ended.returncode == 0, ended.stderr
    _, _, found = ended.stdout.partition("Its last collectives, newest first:\n")
    newest, older = found.splitlines()[:2]
    assert newest.startswith("#2 gloo:all_reduce [[5]] Float, started ")
    assert older.startswith("#1 gloo:all_reduce [[3]] Float, started ")


def test_a_torch_that_records_nothing_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("strata.torch_compat.flight_recorder.DUMPS", ("_no_such_name",))
    assert last_collectives() == []
