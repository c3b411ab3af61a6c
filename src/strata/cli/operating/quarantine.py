"""`strata quarantine`: machines that take no part in any run until they are cleared."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import quote

import typer

from strata.cli.common import (
    DEFAULT_API,
    Api,
    AsJson,
    LiteralGroup,
    ago,
    console,
    delete,
    get_rows,
    post_facts,
    print_json,
    print_table,
)

app = typer.Typer(
    name="quarantine", cls=LiteralGroup, help="Machines that no run may use, and why.", no_args_is_help=True
)

Host = Annotated[str, typer.Argument(metavar="NODE", help="Host name, as `strata workers` shows it.")]


@app.command("ls")
def list_machines(api: Api = DEFAULT_API, json: AsJson = False) -> None:
    """List the quarantined machines."""
    found = get_rows(api, "/api/quarantine")
    if json:
        print_json(found)
        return
    rows = [(one["host"], ago(one["since"]), one["by"], one["run"] or "-", one["reason"]) for one in found]
    print_table(("=NODE", "SINCE", "BY", "RUN", "REASON"), rows, empty="No machine is quarantined.")


@app.command()
def add(
    host: Host,
    reason: Annotated[str, typer.Option(help="Reason, shown to other users.")],
    api: Api = DEFAULT_API,
) -> None:
    """Quarantine a machine: its agents save, leave their runs, and are refused until it is cleared."""
    made = post_facts(api, "/api/quarantine", {"host": host, "reason": reason}, having="host")
    console.print(f"{made['host']} is quarantined: {made['reason']}", markup=False, soft_wrap=True)


@app.command()
def clear(host: Host, api: Api = DEFAULT_API) -> None:
    """Allow a machine to be used again; restart its agents."""
    delete(api, f"/api/quarantine/{quote(host, safe='')}")
    console.print(f"{host} may be used again.", markup=False, soft_wrap=True)
