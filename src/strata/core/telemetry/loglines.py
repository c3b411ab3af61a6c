"""From what a process prints to log entries: lines that belong together become one entry.

A traceback, with the ones it was raised from, is one entry; so are indented lines and the line they belong to, and
the block of a key. Of a line that a progress bar has written over, the last state is kept. Levels are read from the
text where it names one; a time and a level that the entry has as well are taken off its first line. Pure: time is
passed in, and the caller says when waiting for more has lasted long enough.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import NamedTuple

from strata.core.telemetry.logtext import level_of

HOLD_S = 0.3
"""How long an entry waits for lines that may belong to it."""
LINES_PER_ENTRY = 1_000
CHARACTERS_PER_ENTRY = 32_768
LINE_LIMIT_BYTES = 64 * 1024

_TRACEBACK = "Traceback (most recent call last):"
_CHAINED = (
    "During handling of the above exception, another exception occurred:",
    "The above exception was the direct cause of the following exception:",
)
_RANK = re.compile(r"^\[[A-Za-z]{1,16}\d{1,6}\]:? ?")
_LEVEL = re.compile(r"\b(DEBUG|INFO|WARNING|WARN|ERROR|CRITICAL|FATAL)\b")
_GLOG = re.compile(r"^([IWEF])\d{4} \d\d:\d\d")
_WARNING = re.compile(r"^(?:\S+:\d+: )?\w*Warning: ")
_EXCEPTION = re.compile(r"^[A-Za-z_][\w.]{0,200}(?:Error|Exception|Interrupt|Exit)(?:: |$)")
_GLOG_LEVELS = {"I": "info", "W": "warn", "E": "error", "F": "error"}
_STAMP = re.compile(
    r"(?:[IWEF]\d{4} |\[?(?P<date>\d{4}-\d\d-\d\d)[ T]|\[?)"
    r"(?P<clock>\d\d:\d\d:\d\d)(?:[.,]\d{1,9})?(?:Z|[+-]\d\d:?\d\d)?\]?[ \t]*"
)
_NAME = "(?:DEBUG|INFO|WARN|WARNING|ERROR)"
_NAMED_AFTER_STAMP = re.compile(rf"(?:\[{_NAME} *\]|{_NAME}\b):?\s*")
_NAMED = re.compile(rf"(?:\[{_NAME} *\]:?|{_NAME}:|{_NAME} (?=[\w.]{{1,100}}: ))\s*")
"""Without a time before it, a word is a level only where it is set off from the sentence, or before a logger's name."""
SAME_TIME_S = 5.0
"""A line is read at most so long after it was written; a time further off is part of its message."""
_ZONE_S = 900
"""Local times differ from each other by whole quarters of an hour."""
LEVEL_WITHIN = 100
"""A level's name further on in a line is part of the sentence."""


class LogLine(NamedTuple):
    """One entry on its way into the log."""

    at_s: float
    level: str
    message: str
    source: str
    task_id: str = ""


class LineAssembler:
    """Takes the bytes of one stream as they come, and gives entries back."""

    def __init__(self, *, source: str = "stdout", task_id: str = "") -> None:
        self._source = source
        self._task_id = task_id
        self._rest = b""
        self._held: list[str] = []
        self._held_characters = 0
        self._held_at_s = 0.0
        self._touched_s = 0.0
        self._level = "info"
        self._inside = ""
        """What the held lines are part of: '', 'traceback', 'raised' (its last line is there), 'chained' or 'key'."""

    def feed(self, data: bytes, now_s: float) -> list[LogLine]:
        """More of the stream; returns the entries that are complete."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        done: list[LogLine] = []
        for line in lines:
            self._take(_text(line), now_s, done)
        if len(self._rest) > LINE_LIMIT_BYTES:
            self._take(_text(self._rest), now_s, done)
            self._rest = b""
        return done

    def idle(self, now_s: float) -> list[LogLine]:
        """Nothing has come for a while: an entry that has waited long enough is complete."""
        done: list[LogLine] = []
        if self._held and now_s - self._touched_s >= HOLD_S:
            self._release(done)
        return done

    def close(self, now_s: float) -> list[LogLine]:
        """The stream has ended: everything is complete, also a line without an end."""
        done: list[LogLine] = []
        if self._rest:
            self._take(_text(self._rest), now_s, done)
            self._rest = b""
        self._release(done)
        return done

    # --- inside ---------------------------------------------------------------------------------------------

    def _take(self, text: str, now_s: float, done: list[LogLine]) -> None:
        text = text.rstrip("\r\n")
        if "\r" in text:
            text = text.rpartition("\r")[2]  # What a progress bar wrote over was not meant to stay.
        plain = _RANK.sub("", text)
        if self._held and not self._continues(plain):
            self._release(done)
        if not self._held:
            if not plain.strip():
                return
            self._held_at_s = now_s
            self._level = _level(plain)
        if plain.startswith(_TRACEBACK) or plain.lstrip().startswith("+ Exception Group Traceback"):
            self._inside, self._level = "traceback", "error"
        elif plain.startswith("-----BEGIN "):
            self._inside = "key"
        elif self._inside == "key" and plain.startswith("-----END "):
            self._inside = ""
        elif self._inside == "traceback" and plain and not plain[0].isspace():
            self._inside = "raised"
        elif self._inside == "raised" and plain in _CHAINED:
            self._inside = "chained"
        self._held.append(text if self._held else _without_head(text, now_s))
        self._held_characters += len(text)
        self._touched_s = now_s
        if len(self._held) >= LINES_PER_ENTRY or self._held_characters >= CHARACTERS_PER_ENTRY:
            self._release(done)

    def _continues(self, plain: str) -> bool:
        if self._inside in ("traceback", "key"):
            return True
        if self._inside == "raised":
            return not plain or plain[0].isspace() or plain in _CHAINED
        if self._inside == "chained":
            return not plain or plain.startswith(_TRACEBACK)
        if plain.startswith(_TRACEBACK):
            return self._level == "error"  # Of the record that it belongs to.
        return bool(plain.strip()) and plain[0].isspace()

    def _release(self, done: list[LogLine]) -> None:
        while self._held and not _RANK.sub("", self._held[-1]).strip():
            self._held.pop()
        if self._held:
            done.append(
                LogLine(self._held_at_s, self._level, "\n".join(self._held), self._source, self._task_id)
            )
        self._held, self._held_characters, self._inside = [], 0, ""


def _text(raw: bytes) -> str:
    return raw[:LINE_LIMIT_BYTES].decode(errors="replace")


def _without_head(text: str, at_s: float) -> str:
    """The first line of an entry without the time and the level that the entry has anyway."""
    rank = _RANK.match(text)
    begin = end = rank.end() if rank else 0
    stamp = _STAMP.match(text, end)
    if stamp:
        if not _is_at(stamp["date"], stamp["clock"], at_s):
            return text
        end = stamp.end()
    level = (_NAMED_AFTER_STAMP if stamp else _NAMED).match(text, end)
    if level:
        end = level.end()
    rest = text[end:]
    return text[:begin] + rest if rest.strip() else text


def _is_at(date: str | None, clock: str, at_s: float) -> bool:
    """Whether a clock somewhere on earth shows this at that time."""
    now = datetime.fromtimestamp(at_s, UTC)
    try:
        shown = datetime.fromisoformat(f"{date or now.date()}T{clock}+00:00")
    except ValueError:
        return False
    ahead_s = (shown - now).total_seconds()
    if date is not None and abs(ahead_s) > 86_400:
        return False
    return abs(ahead_s - _ZONE_S * round(ahead_s / _ZONE_S)) <= SAME_TIME_S


def _level(plain: str) -> str:
    named = _LEVEL.search(plain, 0, LEVEL_WITHIN)
    if named:
        return level_of(named[1])
    glog = _GLOG.match(plain)
    if glog:
        return _GLOG_LEVELS[glog[1]]
    if _WARNING.match(plain):
        return "warn"
    return "error" if _EXCEPTION.match(plain) else "info"
