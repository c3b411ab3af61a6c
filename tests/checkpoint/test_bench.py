"""The benchmark runs, and what it counts is right."""

from __future__ import annotations

from pathlib import Path

import pytest

from strata.bench.checkpoint import sharded
from strata.bench.checkpoint.damage import count
from strata.bench.checkpoint.suite import QUICK, _save_rows


def test_every_figure_of_a_save_is_there(tmp_path: Path) -> None:
    rows = {row.name: row for row in _save_rows(QUICK, 16, tmp_path)}
    assert {
        "stall, 16 tensors",
        "durable, 16 tensors",
        "strata, 16 tensors",
        "dcp.async_save, 16 tensors",
    } <= set(rows)
    assert all(row.measured > 0 for row in rows.values())
    assert list(tmp_path.glob("*/*")) == []


def test_a_flipped_bit_is_noticed_here_and_not_by_plain_files(tmp_path: Path) -> None:
    verdicts = {verdict.name: verdict for verdict in count(tmp_path, flips=12, size_bytes=64 << 10)}
    assert verdicts["strata"].silently_wrong == 0
    assert verdicts["strata"].noticed == 12
    assert verdicts["torch.save"].silently_wrong > 0
    assert all(v.noticed + v.harmless + v.silently_wrong == 12 for v in verdicts.values())


@pytest.mark.timeout(900)  # A dozen worlds, whose ranks each import torch.
def test_every_figure_of_sharded_state_is_there_and_nothing_is_left(tmp_path: Path) -> None:
    rows = list(sharded.run(sharded.QUICK, folder=tmp_path))
    names = [row.name for row in rows]
    for figure in ("durable save beside dcp.save", "2 → 3 ranks, cold", "2 → 3 ranks, as saved"):
        assert any(figure in name for name in names), figure
    assert all(row.measured > 0 for row in rows)
    assert list(tmp_path.iterdir()) == []
