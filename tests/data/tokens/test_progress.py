"""Progress: on a terminal something moves, anywhere else nothing is said."""

from __future__ import annotations

import io
import os
import pty
import sys
from contextlib import suppress

import pytest

from strata.data.tokens.building.progress import TerminalProgress


def shown(*, rows: int = 3) -> str:
    """What a build draws on a terminal."""
    reader, writer = pty.openpty()
    with os.fdopen(writer, "w") as stream, TerminalProgress(stream) as progress:
        progress.begin(total_bytes=rows * 10, done_bytes=0)
        for _ in range(rows):
            progress.advance(source_bytes=10, tokens=7)
    seen = b""
    with suppress(OSError):  # the terminal's way to say that nobody writes any more
        while data := os.read(reader, 1 << 16):
            seen += data
    os.close(reader)
    return seen.decode()


def test_terminal_sees_a_bar_with_tokens() -> None:
    assert "21 tokens" in shown()


def test_terminal_without_rich_sees_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rich.progress", None)
    assert "tokenizing: 33%, 7 tokens" in shown()


def test_pipes_and_logs_see_nothing() -> None:
    stream = io.StringIO()
    with TerminalProgress(stream) as progress:
        progress.begin(total_bytes=10, done_bytes=0)
        progress.advance(source_bytes=10, tokens=7)
    assert stream.getvalue() == ""
