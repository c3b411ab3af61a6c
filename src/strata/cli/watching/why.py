"""`strata why`: in one sentence why a run failed, what it cost, what was decided and what to do; then the evidence."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any
from urllib.parse import urlencode

import typer
from rich.text import Text

from strata.agent.incidents import read_local
from strata.cli.common import (
    DEFAULT_API,
    Api,
    AsJson,
    Unreachable,
    ago,
    console,
    duration,
    get_rows,
    print_json,
)
from strata.errors import StrataError

STATES = {
    "open": ("not recovered yet", "bold red"),
    "recovered": ("recovered", "green"),
    "stopped": ("the run has stopped", "bold red"),
    "failed_again": ("it failed again before it had recovered", "yellow"),
}
DECISIONS = {"restart": "started again", "stop": "stopped", "continue": "training continues"}
SUBJECTS = {"run": "failure", "save": "failed save", "slow_rank": "slow rank", "quarantine": "quarantine"}
LINES_SHOWN = 12


class NothingKnown(StrataError):
    code = "not_found"

    def __init__(self, run: str) -> None:
        super().__init__(
            f"No incident of '{run}' is known.",
            hint="`strata tasks` and `strata workers` list what is running; `strata logs --level error` shows errors.",
        )


def why(
    run: Annotated[
        str | None,
        typer.Argument(metavar="RUN", help="A job, task or launch id; without it, the newest failure."),
    ] = None,
    api: Api = DEFAULT_API,
    json: AsJson = False,
    every: Annotated[bool, typer.Option("--all", help="Every incident, not only the newest.")] = False,
) -> None:
    """Show why a run failed: what happened, what it cost, what was decided, what to do next."""
    query = {"limit": 1_000, **({"run": run} if run else {})}
    try:
        found = get_rows(api, "/api/incidents?" + urlencode(query))
    except Unreachable:
        found = read_local(run)  # Of launches that had no coordinator.
        if not found:
            raise
    found = found or read_local(run)
    if not found and run:
        raise NothingKnown(run)
    if not found:
        print_json([] if every else None) if json else console.print("Nothing has failed yet.")
        return
    shown = found if every else [_newest(found)]
    if json:
        print_json(found if every else shown[0])
        return
    for number, incident in enumerate(shown):
        if number:
            console.print()
        for line in _lines(incident):
            console.print(line, soft_wrap=True)
    if len(found) > len(shown):
        name = f" {run}" if run else ""
        console.print(Text(f"\n{len(found) - 1} more: strata why{name} --all", style="dim"))


def _newest(found: list[dict[str, Any]]) -> dict[str, Any]:
    """The newest failure of the run itself; what stops nothing only where there is no other."""
    return next((one for one in found if one["subject"] == "run"), found[0])


def _lines(incident: dict[str, Any]) -> Iterator[Text]:
    state, style = STATES[incident["state"]]
    yield Text.assemble(
        (f"{incident['run']}: ", "bold"), (f"{SUBJECTS[incident['subject']]}: ", style), incident["text"]
    )
    yield _fact("when", f"{ago(incident['opened_at'])}; {state}" + _ended(incident))
    yield _fact("class", f"{incident['failure_class']}: {incident['rule']} ({incident['fingerprint']})")
    yield _fact("cost", _cost(incident))
    if incident["decision"]:
        decided = DECISIONS.get(incident["decision"], incident["decision"])
        yield _fact("decided", f"{decided}: {incident['reason']}" if incident["reason"] else decided)
    yield _fact("next", incident["next_step"])
    for failure in incident["failures"]:
        yield from _evidence(failure)


def _fact(name: str, text: str) -> Text:
    return Text.assemble((f"  {name:<8} ", "dim"), text)


def _ended(incident: dict[str, Any]) -> str:
    if incident["closed_at"] is None or not incident["closed_reason"]:
        return ""
    return f" after {duration(incident['closed_at'] - incident['opened_at'])}"


def _cost(incident: dict[str, Any]) -> str:
    parts = []
    if incident["lost_steps"] is not None:
        steps = incident["lost_steps"]
        parts.append(f"{steps:,} step{'' if steps == 1 else 's'}")
    if incident["lost_s"] is not None:
        parts.append(
            f"{incident['lost_s']:.1f} s, {incident['lost_gpu_s']:.1f} GPU-seconds (or worker-seconds)"
        )
    if incident["phases_s"]:
        parts.append(", ".join(f"{name} {seconds:.2f} s" for name, seconds in incident["phases_s"].items()))
    return "; ".join(parts) or "not known yet"


def _evidence(failure: dict[str, Any]) -> Iterator[Text]:
    rank = f"rank {failure['rank']}" if failure["rank"] is not None else "worker"
    where = ", ".join(
        filter(
            None,
            (
                failure["host"],
                f"pid {failure['pid']}" if failure["pid"] else "",
                f"GPU {failure['gpu']}" if failure["gpu"] else "",
            ),
        )
    )
    yield Text.assemble(("  evidence ", "dim"), f"{rank} ({where})" if where else rank)
    said = [f"exit code {failure['exit_code']}"] if failure["exit_code"] is not None else []
    said += [failure[name] for name in ("replaced", "lost", "left") if failure[name]]
    said += ["the kernel's OOM killer was active"] if failure["oom_killed"] else []
    error = failure["error"]
    if error is not None:
        step = f" at step {error['step']:,}" if error["step"] else ""
        said.append(f"{error['type']}: {error['message']}{step}")
    for text in (*said, *failure["device_faults"]):
        yield Text(f"           {text}")
    shown = error["traceback"].splitlines() if error is not None else failure["last_lines"]
    for line in list(shown)[-LINES_SHOWN:]:
        yield Text(f"             {line}", style="dim")
