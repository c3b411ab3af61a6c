"""What all commands share: talking to the coordinator's API, and printing tables or JSON."""

from __future__ import annotations

import http.client
import json
import os
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from strata.config import environment
from strata.errors import StrataError

TIMEOUT_S = 10.0
STREAM_TIMEOUT_S = 45.0
"""A stream of events is never silent for longer than a third of this."""

Api = Annotated[
    str,
    typer.Option(
        "--api", envvar="STRATA_API_URL", help="Address of the coordinator's HTTP API.", show_default=True
    ),
]
DEFAULT_API = "http://127.0.0.1:3000"
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]

console = Console(highlight=False)
errors = Console(stderr=True, highlight=False)


def adopt_dotenv() -> None:
    """What a `.env` in the working directory says about Strata counts, below the environment."""
    for name, value in environment().items():
        if name.startswith(("STRATA_", "COORDINATOR_")):
            os.environ.setdefault(name, value)


class Unreachable(StrataError):
    """The coordinator does not answer."""

    code = "unreachable"


class Answered(StrataError):
    """The coordinator answered with a refusal."""

    def __init__(self, code: str, message: str, hint: str) -> None:
        super().__init__(message, hint=hint)
        self.answer_code = code


def get(api: str, path: str) -> Any:
    return _call(api, path)


def get_rows(api: str, path: str) -> list[dict[str, Any]]:
    """A listing: whatever answers otherwise is not a coordinator."""
    found = get(api, path)
    if not isinstance(found, list) or not all(isinstance(row, dict) for row in found):
        raise _not_a_coordinator(api)
    return found


def get_facts(api: str, path: str, *, having: str) -> dict[str, Any]:
    """One record, known by a key it must have."""
    found = get(api, path)
    if not isinstance(found, dict) or having not in found:
        raise _not_a_coordinator(api)
    return found


def post(api: str, path: str, body: object | None = None) -> Any:
    return _call(api, path, data=json.dumps(body if body is not None else {}).encode())


def events(api: str, path: str, *, last_id: str = "") -> Iterator[tuple[str, Any]]:
    """Server-sent events, as (kind, data), until the coordinator ends the stream."""
    with _open(
        api, path, headers={"Last-Event-ID": last_id} if last_id else {}, timeout_s=STREAM_TIMEOUT_S
    ) as lines:
        try:
            kind = ""
            for line in lines:
                field, _, value = line.decode(errors="replace").rstrip("\n").partition(": ")
                if field == "event":
                    kind = value
                elif field == "data":
                    yield kind, json.loads(value)
        except (http.client.HTTPException, OSError, ValueError) as error:
            raise _silent(api, error) from None


def _call(api: str, path: str, data: bytes | None = None) -> Any:
    with _open(api, path, data) as answer:
        try:
            return json.load(answer)
        except (http.client.HTTPException, OSError, ValueError) as error:
            raise _silent(api, error) from None


def _open(
    api: str,
    path: str,
    data: bytes | None = None,
    *,
    headers: Mapping[str, str] | None = None,
    timeout_s: float = TIMEOUT_S,
) -> Any:
    try:
        request = urllib.request.Request(api.rstrip("/") + path, data=data, headers=dict(headers or {}))
        if data is not None:
            request.add_header("Content-Type", "application/json")
        token = os.environ.get("STRATA_TOKEN")
        if token:
            request.add_header("Authorization", f"Bearer {token}")
        context = None
        if api.lower().startswith("https:"):
            from strata.rpc.tls import ssl_context

            context = ssl_context()
        return urllib.request.urlopen(request, timeout=timeout_s, context=context)
    except urllib.error.HTTPError as error:
        with error:
            raise _refusal(error) from None
    except (urllib.error.URLError, http.client.HTTPException, OSError, ValueError) as error:
        raise _silent(api, error) from None


def _silent(api: str, error: Exception) -> Unreachable:
    reason = getattr(error, "reason", None) or str(error) or type(error).__name__
    return Unreachable(
        f"No coordinator answers at {api or 'an empty address'}: {printable(str(reason))}.",
        hint="Start one with `strata serve`, or pass its address with --api (or STRATA_API_URL).",
    )


def _refusal(error: urllib.error.HTTPError) -> Answered:
    try:
        body = json.load(error)
        return Answered(body["code"], body["message"], body["hint"])
    except (ValueError, KeyError, TypeError, OSError):
        return Answered("http_error", f"The coordinator answered {error.code}.", "")


def _not_a_coordinator(api: str) -> Unreachable:
    return Unreachable(
        f"What answers at {api} is not a coordinator.",
        hint="Pass the address that `strata serve` printed with --api (or STRATA_API_URL).",
    )


def printable(text: str, limit: int = 200) -> str:
    """Text from elsewhere, safe and short enough for a line of a message."""
    return "".join(c if c.isprintable() else "�" for c in text[:limit])


def print_json(value: object, *, in_one_line: bool = False) -> None:
    sys.stdout.write(json.dumps(value, indent=None if in_one_line else 2, ensure_ascii=False) + "\n")


def print_table(columns: Sequence[str], rows: Sequence[Sequence[object]], *, empty: str) -> None:
    """Cells are data, not markup: names from elsewhere are printed as they are."""
    if not rows:
        console.print(Text(empty, style="dim"))
        return
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in columns:
        right = column.startswith(">")
        table.add_column(column.lstrip(">"), justify="right" if right else "left", overflow="fold")
    for row in rows:
        table.add_row(*(cell if isinstance(cell, Text) else Text(str(cell)) for cell in row))
    console.print(table)


def say_error(error: StrataError) -> None:
    errors.print(Text.assemble(("error: ", "bold red"), error.message), soft_wrap=True)
    if error.hint:
        errors.print(Text.assemble(("what to do: ", "bold"), error.hint), soft_wrap=True)


def ago(at_s: float, now_s: float | None = None) -> str:
    return duration(max(0.0, (time.time() if now_s is None else now_s) - at_s)) + " ago"


def duration(seconds: float) -> str:
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 172_800 else f"{seconds / 86_400:.1f} d"


def size(count: float) -> str:
    for unit in ("B", "KB", "MB", "GB", "TB"):
        if count < 1000 or unit == "TB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError("unreachable")


STATUS_STYLES = {
    "active": "green",
    "training": "green",
    "completed": "green",
    "complete": "green",
    "running": "green",
    "failed": "bold red",
    "broken": "bold red",
    "waiting": "yellow",
    "in_progress": "yellow",
    "recovering": "yellow",
    "pending": "yellow",
}


def styled(status: str) -> Text:
    return Text(status, style=STATUS_STYLES.get(status, ""))
