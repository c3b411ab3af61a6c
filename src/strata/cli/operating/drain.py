"""`strata drain`: a machine will be shut down; its runs save and continue without it before that."""

from __future__ import annotations

import re
import time
from typing import Annotated, Any
from urllib.parse import quote

import typer

from strata.cli.common import (
    DEFAULT_API,
    Api,
    AsJson,
    ago,
    console,
    delete,
    duration,
    get_rows,
    post_facts,
    print_json,
    print_table,
)
from strata.core.text import counted
from strata.errors import StrataError

UNITS_S = {"": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
POLL_S = 0.2
SETTLE_S = 60.0
"""How long after a machine has left the remaining ranks may take to report what was lost."""


class NoDuration(StrataError):
    code = "invalid_argument"


def seconds(text: str) -> float:
    """`90`, `90s`, `2m` or `1h`."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip())
    if found is None or found[2] not in UNITS_S:
        raise NoDuration(f"'{text}' is not a duration.", hint="Write 90s, 2m or 1h.")
    return float(found[1]) * UNITS_S[found[2]]


def drain(
    node: Annotated[
        str | None,
        typer.Argument(
            metavar="NODE", help="Host name, as `strata workers` shows it; without it, all drains are listed."
        ),
    ] = None,
    within: Annotated[
        str, typer.Option(help="Time until the machine may be shut down: 90s, 2m, 1h.")
    ] = "120s",
    reason: Annotated[str, typer.Option(help="Reason, shown to other users.")] = "",
    cancel: Annotated[
        bool,
        typer.Option("--cancel", help="Allow the machine to be used again; restart its agents."),
    ] = False,
    wait: Annotated[
        bool, typer.Option(help="Wait until the machine may be shut down, and report what was lost.")
    ] = True,
    api: Api = DEFAULT_API,
    json: AsJson = False,
) -> None:
    """Drain a machine: its runs save and continue on a spare machine or with fewer workers. Its agents are refused until
    --cancel."""
    if node is None:
        _list(api, json=json)
        return
    if cancel:
        delete(api, f"/api/drains/{quote(node, safe='')}")
        console.print(f"{node} may be used again.", markup=False, soft_wrap=True)
        return
    within_s = seconds(within)
    body = {"host": node, "within_s": within_s, "reason": reason}
    known = post_facts(api, "/api/drains", body, having="host")
    if wait:
        known = _wait(api, known)
    if json:
        print_json(known)
        return
    _print(known)


def _wait(api: str, known: dict[str, Any]) -> dict[str, Any]:
    until_s = time.monotonic() + max(0.0, known["deadline"] - time.time()) + SETTLE_S
    while not _is_settled(known) and time.monotonic() < until_s:
        time.sleep(POLL_S)
        known = next((one for one in get_rows(api, "/api/drains") if one["host"] == known["host"]), known)
    return known


def _is_settled(known: dict[str, Any]) -> bool:
    """It has left, and what its runs have lost is known."""
    if known["state"] != "drained":
        return False
    lost = [one["lost_steps"] for one in known["handovers"]]
    return None not in lost and bool(lost or not known["agents"])


def _print(known: dict[str, Any]) -> None:
    left_s = max(0.0, known["deadline"] - time.time())
    what = (
        known["outcome"]
        if known["state"] == "drained"
        else f"it may be shut down in {duration(left_s)} at the latest"
    )
    lines = [f"{known['host']} is {known['state']}: {what}"]
    lines += [f"  {one['run']}: {one['reason']}" for one in known["handovers"]]
    if known["state"] == "drained" and not _is_settled(known):
        lines.append(
            "  What its runs have lost is not known yet. Check again with: strata drain; strata recoveries"
        )
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)


def _list(api: str, *, json: bool) -> None:
    found = get_rows(api, "/api/drains")
    if json:
        print_json(found)
        return
    rows = [
        (one["host"], one["state"], ago(one["since"]), one["by"], one["reason"], _lost(one)) for one in found
    ]
    print_table(("=NODE", "STATE", "SINCE", "BY", "REASON", "LOST"), rows, empty="No machine is drained.")


def _lost(known: dict[str, Any]) -> str:
    lost = [one["lost_steps"] for one in known["handovers"]]
    if not lost:
        return "-"
    return "not known yet" if None in lost else counted(sum(lost), "step")
