"""`strata logs`: the log of the whole fleet, searched or followed."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
from typing import Annotated, Any, cast
from urllib.parse import urlencode

import typer
from rich.text import Text

from strata.api_types import LogView
from strata.cli.common import (
    DEFAULT_API,
    Api,
    AsJson,
    Unreachable,
    console,
    errors,
    events,
    get_rows,
    print_json,
)
from strata.errors import StrataError

LEVEL_STYLES = {"error": "bold red", "warn": "yellow", "info": "", "debug": "dim"}
BACK_AFTER_S = 1.0
_AGO = re.compile(r"(\d+(?:\.\d+)?)([smhd])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
BEFORE_ALL = "log_0"


class NotATime(StrataError):
    code = "invalid_argument"

    def __init__(self, option: str, text: str) -> None:
        super().__init__(
            f"--{option} '{text}' is not a time.",
            hint="Write how long ago (90s, 10m, 2h, 3d), or Unix seconds.",
        )


def logs(
    api: Api = DEFAULT_API,
    json: AsJson = False,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, max=10_000, help="Number of lines.")] = 100,
    level: Annotated[str | None, typer.Option(help="Minimum level: debug, info, warn, error.")] = None,
    task: Annotated[str | None, typer.Option(help="Only this task.")] = None,
    worker: Annotated[str | None, typer.Option(help="Only this worker.")] = None,
    grep: Annotated[
        str | None, typer.Option(help="Only lines that contain this text, ignoring case.")
    ] = None,
    since: Annotated[
        str | None, typer.Option(help="Only lines since then: 90s, 10m, 2h or 3d ago, or Unix seconds.")
    ] = None,
    until: Annotated[
        str | None, typer.Option(help="Only lines until then: 90s, 10m, 2h or 3d ago, or Unix seconds.")
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Follow new lines until Ctrl-C.")] = False,
) -> None:
    """Show the log of the whole fleet, oldest line first."""
    wanted = {
        "level": level,
        "task_id": task,
        "worker_id": worker,
        "q": grep,
        "since": _timestamp("since", since),
        "until": _timestamp("until", until),
    }
    query = {key: value for key, value in wanted.items() if value is not None}
    found = cast(list[LogView], get_rows(api, "/api/logs?" + urlencode({**query, "limit": limit})))
    if json and not follow:
        print_json(found)
        return
    for entry in reversed(found):
        show_entry(entry, as_json=json)
    if follow:
        _follow(api, query, found[0]["id"] if found else BEFORE_ALL, as_json=json)


def _follow(api: str, query: dict[str, Any], last_id: str, *, as_json: bool) -> None:
    """Over as many connections as it takes: it was there, so whoever follows waits for it to come back."""
    _end_at_ctrl_c()
    while True:
        sys.stdout.flush()
        try:
            for kind, data in events(api, "/api/logs/live?" + urlencode(query), last_id=last_id):
                if kind == "log":
                    last_id = data["id"]
                    show_entry(data, as_json=as_json)
                    sys.stdout.flush()
                elif kind == "missed":
                    errors.print(
                        f"({data['count']:,} lines were dropped: they arrived too fast)", style="dim"
                    )
        except Unreachable:
            pass
        time.sleep(BACK_AFTER_S)


def _end_at_ctrl_c() -> None:
    """From a thread that waits for nothing else. Python would notice the signal between two instructions of the main thread:
    one that comes just before a wait for the next line is noticed only with that line, and so is one that the kernel hands to
    another thread (NumPy's BLAS has some). The byte is written by whichever thread is handed the signal."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)

    def end() -> None:
        os.read(reading, 1)
        os._exit(128 + signal.SIGINT)

    threading.Thread(target=end, daemon=True).start()


def show_entry(entry: LogView, *, as_json: bool) -> None:
    if as_json:
        print_json(entry, in_one_line=True)
        return
    timestamp = time.strftime("%H:%M:%S", time.localtime(entry["timestamp"]))
    console.print(
        Text.assemble(
            (timestamp, "dim"),
            " ",
            (f"{entry['level']:5}", LEVEL_STYLES.get(entry["level"], "")),
            " ",
            (entry["worker_id"] or entry["task_id"] or entry["source"], "cyan"),
            " ",
            entry["message"],
        ),
        soft_wrap=True,
    )


def _timestamp(option: str, text: str | None) -> float | None:
    if text is None:
        return None
    ago = _AGO.fullmatch(text.strip())
    if ago:
        return time.time() - float(ago[1]) * _SECONDS[ago[2]]
    try:
        return float(text)
    except ValueError:
        raise NotATime(option, text[:40]) from None
