"""`strata cost`: what a run has cost, what of it was lost and to what, and what recoveries have saved."""

from __future__ import annotations

from typing import Annotated, Any
from urllib.parse import quote, urlencode

import typer
from rich.text import Text

from strata.cli.common import DEFAULT_API, Api, AsJson, console, get_facts, print_json, print_table


def cost(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run, job or task.")],
    price: Annotated[
        float | None,
        typer.Option(min=0.0, help="Price of a GPU-hour, or worker-hour. [as configured at the coordinator]"),
    ] = None,
    api: Api = DEFAULT_API,
    json: AsJson = False,
) -> None:
    """Show what a run has cost: spent, lost by cause, and saved compared with restarts from durable checkpoints."""
    query = "?" + urlencode({"price_per_gpu_hour": price}) if price is not None else ""
    found = get_facts(api, f"/api/runs/{quote(run, safe='')}/cost{query}", having="lost_by_cause")
    if json:
        print_json(found)
        return
    what = "GPU-hours" if found["counted"] == "gpu" else "worker-hours"
    rows = [
        (Text("spent", style="bold"), *_amount(found["spent"], found), ""),
        ("training", *_amount(found["training"], found), ""),
        ("lost", *_amount(found["lost"], found), _share(found)),
        *(
            (f"  {loss['cause']}", *_amount(loss, found), _meaning(loss))
            for loss in found["lost_by_cause"]
            if loss["hours"] or loss["incidents"]
        ),
        (Text("saved", style="green"), *_amount(found["saved"], found), _saved(found["saved"])),
    ]
    print_table((f"={run}", f">{what.upper()}", ">COST", ""), rows, empty="")
    if found["price_per_gpu_hour"] is None:
        hint = "No price is known: --price 2.50, or price_per_gpu_hour in the coordinator's configuration."
        console.print(Text(hint, style="dim"))


def _amount(amount: dict[str, Any], found: dict[str, Any]) -> tuple[str, str]:
    money = "-" if amount["cost"] is None else f"{amount['cost']:,.2f} {found['currency']}"
    return f"{amount['hours']:,.4f}" if amount["hours"] < 10 else f"{amount['hours']:,.1f}", money


def _share(found: dict[str, Any]) -> str:
    spent = found["spent"]["hours"]
    return f"{found['lost']['hours'] / spent:.0%} of what was spent" if spent else ""


def _meaning(loss: dict[str, Any]) -> str:
    number = loss["incidents"]
    return f"{number:,} incident{'' if number == 1 else 's'}" if number else str(loss["meaning"])


def _saved(saved: dict[str, Any]) -> str:
    if not saved["recoveries"]:
        return "no recovery resumed further than the newest durable checkpoint"
    number = saved["recoveries"]
    return (
        f"{saved['steps']:,} steps that {number:,} recover{'y' if number == 1 else 'ies'} did not train again"
    )
