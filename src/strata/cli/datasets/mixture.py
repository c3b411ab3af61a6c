"""`strata mixture`: what a run mixes, and other weights for it while it trains."""

from __future__ import annotations

import os
import time
from typing import Annotated, Any
from urllib.parse import quote

import typer

from strata.cli.common import (
    DEFAULT_API,
    Api,
    AsJson,
    LiteralGroup,
    console,
    get_facts,
    post_facts,
    print_json,
    print_table,
    styled,
)
from strata.errors import StrataError

app = typer.Typer(
    name="mixture",
    cls=LiteralGroup,
    help="Show a run's data mixture, or change its weights.",
    no_args_is_help=True,
)

POLL_S = 0.25

Run = Annotated[str, typer.Argument(metavar="RUN", help="The job's name at the coordinator.")]


@app.command("set")
def set_weights(
    run: Run,
    weights: Annotated[
        list[str],
        typer.Argument(
            metavar="NAME=SHARE", help="New shares, such as code=0.5; the other sources divide the rest."
        ),
    ],
    from_step: Annotated[int, typer.Option(min=0, help="The first step with these weights.")],
    wait_s: Annotated[
        float, typer.Option("--wait", min=0, help="Seconds to wait for the ranks' decision.")
    ] = 30.0,
    api: Api = DEFAULT_API,
    json: AsJson = False,
) -> None:
    """Change the mixture weights of a running job, from a given step on and on every rank.

    Exit status: 0 adopted, or recorded for a job that is not running; 1 refused, with the first possible step.
    """
    path = f"/api/jobs/{quote(run, safe='')}/mixture"
    asked = post_facts(api, path, {"weights": _shares(weights), "from_step": from_step}, having="number")
    deadline_s = time.monotonic() + wait_s
    while asked["status"] == "waiting" and time.monotonic() < deadline_s:
        time.sleep(POLL_S)
        changes = get_facts(api, path, having="changes")["changes"]
        asked = next((each for each in changes if each["number"] == asked["number"]), asked)
    if json:
        print_json(asked)
    elif asked["status"] == "adopted":
        console.print(f"adopted: from step {from_step:,} on, {_text(asked['weights'])}", soft_wrap=True)
    elif asked["status"] == "waiting":
        console.print(
            f"recorded, not decided yet: the ranks of '{run}' decide at their next check, or when the job starts. See: "
            f"strata mixture show {run}",
            soft_wrap=True,
        )
    else:
        raise StrataError(
            f"Refused: {asked['reason']}.",
            hint="Request a later step: strata mixture set … --from-step STEP",
        )
    if asked["status"] == "refused":
        raise typer.Exit(1)


@app.command("show")
def show(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN",
            help="The job's name at the coordinator, or where its checkpoints are (a folder, s3://…).",
        ),
    ],
    api: Api = DEFAULT_API,
    json: AsJson = False,
) -> None:
    """Show the sources of a run's mixture, their weights by step, and every change that was requested."""
    is_place = "/" in run or os.path.isdir(run)
    found = _from_checkpoints(run) if is_place else _from_coordinator(api, run)
    if json:
        print_json(found)
        return
    print_table(
        ("=SOURCE", ">SAMPLES"), [(each["name"], f"{each['size']:,}") for each in found["sources"]], empty=""
    )
    print_table(
        (">FROM STEP", "WEIGHTS"),
        [(f"{each['from_step']:,}", _text(each["weights"])) for each in found["weights"]],
        empty="",
    )
    print_table(
        (">CHANGE", ">FROM STEP", "WEIGHTS", "STATUS", "REASON"),
        [
            (
                each["number"],
                f"{each['from_step']:,}",
                _text(each["weights"]),
                styled(each["status"]),
                each["reason"],
            )
            for each in found["changes"]
        ],
        empty="No change was requested.",
    )


def _from_coordinator(api: str, run: str) -> dict[str, Any]:
    return get_facts(api, f"/api/jobs/{quote(run, safe='')}/mixture", having="weights")


def _from_checkpoints(place: str) -> dict[str, Any]:
    """As the newest checkpoint has it."""
    from dataclasses import asdict

    from strata.data.history import newest_board

    return asdict(newest_board(place))


def _shares(given: list[str]) -> dict[str, float]:
    shares = {}
    for each in given:
        name, _, share = each.rpartition("=")
        try:
            shares[name] = float(share)
        except ValueError:
            name = ""
        if not name:
            raise typer.BadParameter(f"'{each}' is not NAME=SHARE, such as code=0.5")
    return shares


def _text(weights: dict[str, float]) -> str:
    return ", ".join(f"{name} {share:.4g}" for name, share in weights.items())
