"""What a run's processes wrote, on disk between two processes: the supervisor appends, the coordinator follows.

Segments of bounded size, numbered from 1; the oldest go when there are too many, so a run that floods costs a bounded
part of the disk. Every segment begins with the number of lines before it: a reader that comes too late knows how many it
has missed. A line is complete when it ends with a newline.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, cast

from strata.launch.protocol import OutputLine

SEGMENT_BYTES = 16 << 20
SEGMENTS_KEPT = 4
LINE_LIMIT_BYTES = 64 * 1024
TICK_S = 1e-6


def _segment(run_dir: Path, number: int) -> Path:
    return run_dir / f"output-{number:06d}.jsonl"


def _segments(run_dir: Path) -> list[int]:
    return sorted(int(path.stem.partition("-")[2]) for path in run_dir.glob("output-*.jsonl"))


class OutputFile:
    """The writer. A line has left this process when `write` returns."""

    def __init__(
        self, run_dir: Path, *, segment_bytes: int = SEGMENT_BYTES, segments_kept: int = SEGMENTS_KEPT
    ) -> None:
        self._run_dir = run_dir
        self._segment_bytes = segment_bytes
        self._segments_kept = segments_kept
        self._number = 0
        self._lines = 0
        self._size = 0
        self._file = -1
        self._at_s = 0.0

    def write(self, texts: Sequence[str], *, at_s: float, stream: str, rank: int | None) -> None:
        if not texts:
            return
        with suppress(OSError):  # A full disk must not end the training.
            if self._file < 0 or self._size >= self._segment_bytes:
                self._next_segment()
            body = b"".join(
                json.dumps([self._timestamp(at_s), stream, rank, text]).encode() + b"\n" for text in texts
            )
            self._size += os.write(self._file, body)
            self._lines += len(texts)

    def _timestamp(self, at_s: float) -> float:
        """No two lines have the same, so that a line can be known by it."""
        self._at_s = max(at_s, self._at_s + TICK_S)
        return self._at_s

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _next_segment(self) -> None:
        self.close()
        self._number += 1
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC
        self._file = os.open(_segment(self._run_dir, self._number), flags, 0o600)
        self._size = os.write(self._file, json.dumps({"before": self._lines}).encode() + b"\n")
        _segment(self._run_dir, self._number - self._segments_kept).unlink(missing_ok=True)


@dataclass(slots=True)
class Position:
    """How far a reader has come."""

    segment: int = 0
    offset: int = 0
    lines: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    lines: list[OutputLine] = field(default_factory=list)
    missed: int = 0


class OutputReader:
    """Follows the segments from `position` on."""

    def __init__(self, run_dir: Path, position: Position) -> None:
        self._run_dir = run_dir
        self.position = position

    def read(self, limit_bytes: int) -> Piece:
        """What is new, at most about `limit_bytes` of it."""
        lines: list[OutputLine] = []
        missed = 0
        for body in self._new(limit_bytes):
            for raw in body.splitlines():
                try:
                    value = json.loads(raw)
                except ValueError:
                    continue
                if isinstance(value, dict):
                    missed += max(0, value["before"] - self.position.lines)
                    self.position.lines = value["before"]
                    continue
                at_s, stream, rank, text = value
                self.position.lines += 1
                lines.append(
                    OutputLine(
                        at_s=at_s, stream=cast(Literal["stdout", "stderr"], stream), rank=rank, text=text
                    )
                )
        return Piece(lines=lines, missed=missed)

    def _new(self, limit_bytes: int) -> Iterator[bytes]:
        for number in _segments(self._run_dir):
            if number < self.position.segment or limit_bytes <= 0:
                continue
            if number > self.position.segment:
                self.position.segment, self.position.offset = number, 0
            try:
                with open(_segment(self._run_dir, number), "rb") as file:
                    file.seek(self.position.offset)
                    body = file.read(limit_bytes)
            except FileNotFoundError:
                continue
            whole = body[: body.rfind(b"\n") + 1]
            self.position.offset += len(whole)
            limit_bytes -= len(whole)
            yield whole
            if len(whole) < len(body):
                return
