"""Exports and imports of a state that is many times larger than the memory they may use."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

LIMIT_BYTES = 32 << 20
SLACK_BYTES = 48 << 20
"""For chunks of 16 MiB, which are verified as one, and for what Python and torch keep."""


@pytest.mark.timeout(600)  # Nine times through hundreds of megabytes.
def test_no_format_takes_more_memory_than_allowed_whatever_the_size(tmp_path: Path) -> None:
    torch.save(
        {
            "large": torch.zeros(48 << 20),  # One tensor of six times the limit.
            "turned": torch.zeros(4096, 6144).t(),  # In another order than its rows are written.
            **{f"layers.{n}": torch.zeros(1 << 20) for n in range(32)},
        },
        tmp_path / "model.pt",
    )
    size_bytes = (tmp_path / "model.pt").stat().st_size
    assert size_bytes > 12 * LIMIT_BYTES
    command = [sys.executable, "-m", "tests.checkpoint.memory_actor", str(tmp_path), str(LIMIT_BYTES)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert ended.returncode == 0, ended.stderr
    grown = json.loads(ended.stdout)
    assert len(grown) == 9
    too_much = {what: f"{each >> 20} MiB" for what, each in grown.items() if each > LIMIT_BYTES + SLACK_BYTES}
    assert not too_much, grown
