"""What people copy from a table is in one piece, however narrow the terminal."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from strata.cli import common

ID = "task-3f9c0a1b2c4d-with-a-rather-long-name"
PATH = "/nvme/checkpoints/run-7/checkpoint_step_00001240.pt"
REASON = "rank 3 was killed by SIGKILL and the workers are started again from step 1,240 in a moment or two"
COLUMNS = ("=TASK", ">STEP", "REASON", "=PATH")


def printed(monkeypatch: pytest.MonkeyPatch, *, width: int, terminal: bool) -> list[str]:
    out = io.StringIO()
    monkeypatch.setattr(
        common,
        "console",
        Console(file=out, width=width, force_terminal=terminal, color_system=None, highlight=False),
    )
    common.print_table(COLUMNS, [(ID, 12, REASON, PATH), ("a", 3, "fine", "/b")], empty="")
    return out.getvalue().splitlines()


@pytest.mark.parametrize("width", [20, 80, 132])
def test_ids_and_paths_are_never_broken_on_a_terminal(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    text = "\n".join(printed(monkeypatch, width=width, terminal=True))
    assert ID in text
    assert PATH in text
    assert "…" not in text


def test_prose_is_broken_where_a_terminal_is_narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = printed(monkeypatch, width=132, terminal=True)
    assert REASON not in "\n".join(lines)
    assert max(map(len, lines)) <= 132


def test_without_a_terminal_every_row_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = printed(monkeypatch, width=80, terminal=False)
    assert len(lines) == 3
    assert all(piece in lines[1] for piece in (ID, "12", REASON, PATH))


@pytest.mark.parametrize("length", [10, 60, 100, 400])
def test_no_column_is_lost_where_no_terminal_is(monkeypatch: pytest.MonkeyPatch, length: int) -> None:
    out = io.StringIO()
    monkeypatch.setattr(common, "console", Console(file=out, width=80, color_system=None, highlight=False))
    common.print_table(("WHEN", "RULE", "TEXT"), [("37 s ago", "loss", "t" * length)], empty="")
    assert [line.split() for line in out.getvalue().splitlines()] == [
        ["WHEN", "RULE", "TEXT"],
        ["37", "s", "ago", "loss", "t" * length],
    ]
