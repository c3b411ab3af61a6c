"""How Strata's own logging is set up: one line format, levels per component.

`STRATA_LOG=debug` sets one level for all; `STRATA_LOG=coordinator=debug,checkpoint=info` sets components.
`LOG_FORMAT=json` makes every line a JSON object with the keys of `GET /api/logs`.
"""

from __future__ import annotations

import json
import logging
import os

from strata.config import ConfigError

_LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warn": logging.WARNING,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}


_ALIASES = {"storage": "stores"}  # As users know it.


def parse_levels(text: str) -> dict[str, int]:
    """Level by component; the empty name is everything else."""
    levels: dict[str, int] = {}
    problems = []
    for item in filter(None, (part.strip() for part in text.split(","))):
        component, equals, level = (part.strip() for part in item.rpartition("="))
        if level.lower() in _LEVELS and bool(component) == bool(equals):
            levels[component] = _LEVELS[level.lower()]
        else:
            problems.append(
                f"STRATA_LOG: '{item}' is not understood; write a level ({', '.join(_LEVELS)}) "
                f"or component=level, separated by commas"
            )
    if problems:
        raise ConfigError(problems)
    return levels


class JsonFormatter(logging.Formatter):
    """One JSON object per record."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "timestamp": record.created,
            "level": record.levelname.lower().replace("warning", "warn"),
            "message": record.getMessage(),
            "source": record.name,
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def formatter(text: logging.Formatter) -> logging.Formatter:
    """What `LOG_FORMAT` asks for; `text` where it says nothing."""
    match os.environ.get("LOG_FORMAT", "").strip().lower():
        case "" | "text":
            return text
        case "json":
            return JsonFormatter()
        case other:
            raise ConfigError([f"the environment variable LOG_FORMAT must be text or json, not {other!r}"])


_hidden = ""
"""`LOGLEVEL`, where torch must not see it."""


def hide_level_from_torch() -> None:
    """Torch reads `LOGLEVEL` while it is imported, knows no small letters, and fails at what it does not know. `level` still
    says what is wrong."""
    global _hidden
    name = os.environ.get("LOGLEVEL", "")
    if name.strip().upper() in logging.getLevelNamesMapping():
        os.environ["LOGLEVEL"] = name.strip().upper()
    elif name:
        _hidden = os.environ.pop("LOGLEVEL")


def level(default: int) -> int:
    """What `LOGLEVEL` asks for."""
    name = _hidden or os.environ.get("LOGLEVEL", "")
    known = logging.getLevelNamesMapping()
    if name and name.strip().upper() not in known:
        raise ConfigError(
            [f"the environment variable LOGLEVEL must be one of {', '.join(known)}, not {name!r}"]
        )
    return known[name.strip().upper()] if name else default


def configure(text: str | None = None) -> None:
    """Log to stderr at the levels that `STRATA_LOG` (or `text`) asks for; info by default."""
    levels = parse_levels(os.environ.get("STRATA_LOG", "") if text is None else text)
    root = logging.getLogger("strata")
    if not root.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(
            formatter(
                logging.Formatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s", datefmt="%H:%M:%S")
            )
        )
        root.addHandler(handler)
        root.propagate = False
    root.setLevel(levels.pop("", logging.INFO))
    for component, level in levels.items():
        logging.getLogger(f"strata.{_ALIASES.get(component, component)}").setLevel(level)


class OutageLog:
    """Logs an outage when it starts, when its cause changes and when it is over, and not every time it is met."""

    def __init__(self, log: logging.Logger, *, over: str) -> None:
        self._log = log
        self._over = over
        self._logged = ""

    def start(self, text: str) -> None:
        """Logged unless something is known to be wrong already."""
        if not self._logged:
            self.met(text)

    def met(self, text: str, *, level: int = logging.WARNING, traceback: bool = False) -> None:
        """Logged when it is not what was logged last."""
        if text != self._logged:
            self._logged = text
            self._log.log(level, "%s", text, exc_info=traceback)

    def ended(self) -> None:
        if self._logged:
            self._logged = ""
            self._log.warning("%s", self._over)
