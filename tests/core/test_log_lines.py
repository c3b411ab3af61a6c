"""Lines that belong together are one entry, however they arrive."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from datetime import UTC, datetime

from hypothesis import given
from hypothesis import strategies as st

from strata.core.telemetry.loglines import HOLD_S, LINES_PER_ENTRY, LineAssembler, LogLine

AT_S = 1_700_000_000.0
FAILING = f"""
import logging, sys, time
logging.Formatter.converter = lambda self, at_s: time.gmtime({AT_S})  # However long it takes.
logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", level="INFO")
log = logging.getLogger("job")
log.info("one line")
def read():
    raise KeyError("text")
try:
    try:
        read()
    except KeyError as error:
        raise RuntimeError("two\\n  lines") from error
except RuntimeError:
    log.exception("the step failed")
log.warning("after it\\n  with detail")
print("loading:  10%\\rloading: 100%", file=sys.stderr)
try:
    read()
except KeyError:
    raise ValueError("last words")
"""


def entries_from_lines(
    lines: Iterable[str], *, at_s: float, source: str = "stdout", task_id: str = ""
) -> list[LogLine]:
    """The entries of a text that is there as a whole."""
    assembler = LineAssembler(source=source, task_id=task_id)
    entries = [entry for line in lines for entry in assembler.feed(f"{line}\n".encode(), at_s)]
    return entries + assembler.close(at_s)


def failed_run() -> bytes:
    return subprocess.run([sys.executable, "-c", FAILING], stderr=subprocess.PIPE, check=False).stderr


def briefly(entries: list[LogLine]) -> list[tuple[str, str, str, int]]:
    """Level, first words, last line and number of lines."""
    return [
        (e.level, e.message.split("\n")[0], e.message.split("\n")[-1], e.message.count("\n") + 1)
        for e in entries
    ]


def test_tracebacks_of_a_real_process_stay_together() -> None:
    entries = entries_from_lines(failed_run().decode().split("\n"), at_s=AT_S, source="stderr", task_id="t")
    found = briefly(entries)
    assert [(level, first, last) for level, first, last, _ in found] == [
        ("info", "job: one line", "job: one line"),
        ("error", "job: the step failed", "  lines"),
        ("warn", "job: after it", "  with detail"),
        ("info", "loading: 100%", "loading: 100%"),
        ("error", "Traceback (most recent call last):", "ValueError: last words"),
    ]
    assert "KeyError: 'text'\n\nThe above exception was the direct cause" in entries[1].message
    assert "During handling of the above exception" in entries[4].message
    assert {(e.at_s, e.source, e.task_id) for e in entries} == {(AT_S, "stderr", "t")}


@given(st.lists(st.integers(1, 40), max_size=60))
def test_entries_do_not_depend_on_how_the_bytes_were_cut(sizes: list[int]) -> None:
    output, assembler, entries = SAMPLE, LineAssembler(source="stderr"), []
    for size in sizes:
        entries += assembler.feed(output[:size], 1.0)
        output = output[size:]
    entries += assembler.feed(output, 1.0) + assembler.close(1.0)
    assert entries == entries_from_lines(SAMPLE.decode().split("\n"), at_s=1.0, source="stderr")


SAMPLE = (
    b"plain\n  indented\n[rank0]: Traceback (most recent call last):\n[rank0]:   File x\n[rank0]: ValueError: \xc3\xa4\n"
    b"next\n\n\n-----BEGIN PRIVATE KEY-----\nabc\nW not a level\n-----END PRIVATE KEY-----\ntail without end"
)


def test_prefixed_tracebacks_and_keys_are_blocks() -> None:
    found = briefly(entries_from_lines(SAMPLE.decode().split("\n"), at_s=0.0))
    assert [(level, lines) for level, _, _, lines in found] == [
        ("info", 2),
        ("error", 3),
        ("info", 1),
        ("info", 4),
        ("info", 1),
    ]


def test_two_tracebacks_that_have_nothing_to_do_with_each_other_are_two() -> None:
    one = "Traceback (most recent call last):\n  File x\nValueError: a\n\n"
    assert len(entries_from_lines((one + one).splitlines(), at_s=0.0)) == 2


def test_an_entry_waits_for_more_and_not_for_ever() -> None:
    assembler = LineAssembler()
    assert assembler.feed(b"first\nsecond", 10.0) == []
    assert assembler.idle(10.0 + HOLD_S / 2) == []
    assert [e.message for e in assembler.idle(10.0 + HOLD_S)] == ["first"]
    assert assembler.idle(99.0) == [], "half a line is not an entry"
    assert [(e.message, e.at_s) for e in assembler.close(99.0)] == [("second", 99.0)]
    assert assembler.close(99.0) == []


def test_what_never_ends_is_cut() -> None:
    assembler = LineAssembler()
    endless = assembler.feed(
        b"Traceback (most recent call last):\n" + b"  frame\n" * (3 * LINES_PER_ENTRY), 0.0
    )
    assert len(endless) == 3
    assert len(assembler.feed(b"x" * 1_000_000, 0.0)) >= 1
    assert sum(len(e.message) for e in assembler.close(0.0)) < 100_000


def test_levels_are_read_from_the_text() -> None:
    text = {
        "2026-01-01 10:00:00 WARNING job: x": "warn",
        "ERROR: x": "error",
        "CRITICAL x": "error",
        "DEBUG:root:x": "debug",
        "host:1:1 [0] NCCL INFO x": "info",
        "W1115 06:00:00.1 1 file.py:1] x": "warn",
        "E1115 06:00:00.1 x": "error",
        "/a/b.py:3: UserWarning: x": "warn",
        "torch.OutOfMemoryError: x": "error",
        "plain words": "info",
        "no error here": "info",
        "x" * 200 + " ERROR": "info",
    }
    assert {line: entries_from_lines([line], at_s=0.0)[0].level for line in text} == text


def test_what_the_entry_says_already_is_not_said_again() -> None:
    at_s = datetime(2026, 11, 15, 9, 40, 58, tzinfo=UTC).timestamp() + 0.3
    text = {
        "2026-11-15 09:40:58,123 INFO job: x": "job: x",
        "2026-11-15 01:40:57,900 WARNING job: x": "job: x",  # Written in California.
        "2026-11-15T15:25:58.1+05:45 DEBUG x": "x",
        "2026-11-15T09:40:58Z ERROR x": "x",
        "[2026-11-15 09:40:58,123] [INFO] x": "x",
        "[2026-11-15 09:40:58,123][job][INFO] - x": "[job][INFO] - x",
        "09:40:58 INFO    strata.worker: x": "strata.worker: x",
        "09:40:58 step 3": "step 3",
        "W1115 09:40:58.12 77 torch/run.py:5] x": "77 torch/run.py:5] x",
        "[rank3]: 2026-11-15 09:40:58,123 INFO x": "[rank3]: x",
        "INFO:root:x": "root:x",
        "ERROR: x": "x",
        "[WARNING] x": "x",
        "WARNING job.part: x": "job.part: x",
        "CRITICAL: x": "CRITICAL: x",  # An entry is an error at most.
        "2026-11-15 09:40:58,123 CRITICAL x": "CRITICAL x",
        "ERROR rate 0.3": "ERROR rate 0.3",
        "INFORMATION: x": "INFORMATION: x",
        "2026-11-15 09:38:58,123 INFO x": "2026-11-15 09:38:58,123 INFO x",  # It came late, or is told of.
        "2025-11-15 09:40:58,123 INFO x": "2025-11-15 09:40:58,123 INFO x",
        "2026-13-45 09:40:58,123 INFO x": "2026-13-45 09:40:58,123 INFO x",
        "25:61:61 x": "25:61:61 x",
        "2026-11-15 09:40:58,123 INFO": "2026-11-15 09:40:58,123 INFO",
    }
    assert {line: entries_from_lines([line], at_s=at_s)[0].message for line in text} == text
    level = {line: entries_from_lines([line], at_s=at_s)[0].level for line in text if "x" in line}
    assert level["[2026-11-15 09:40:58,123] [INFO] x"] == "info"
    assert level["2026-11-15 01:40:57,900 WARNING job: x"] == "warn"
    assert level["2026-11-15T09:40:58Z ERROR x"] == "error"
    assert level["2026-11-15 09:40:58,123 CRITICAL x"] == "error"
