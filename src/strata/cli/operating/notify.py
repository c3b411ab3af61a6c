"""`strata notify`: the channels that a coordinator notifies, its rules, recent notifications, and a test of the channels."""

from __future__ import annotations

from typing import Annotated, Any
from urllib.parse import urlencode

import typer
from rich.text import Text

from strata.cli.common import (
    DEFAULT_API,
    Api,
    AsJson,
    LiteralGroup,
    ago,
    console,
    get_facts,
    get_rows,
    post,
    print_json,
    print_table,
)
from strata.errors import StrataError

app = typer.Typer(
    name="notify",
    cls=LiteralGroup,
    help="Notification channels, their rules, and a test of them.",
    no_args_is_help=True,
)

STYLES = {"error": "bold red", "warning": "yellow", "success": "green"}
TEST_S = 60.0


class NoChannels(StrataError):
    code = "not_found"

    def __init__(self) -> None:
        super().__init__(
            "The coordinator has no channel to notify.",
            hint="Configure one: a table [notify.channels.NAME] in the file of `strata serve --config`, or STRATA_NOTIFY.",
        )


@app.command("ls")
def list_channels(api: Api = DEFAULT_API, json: AsJson = False) -> None:
    """List the channels and what was delivered to them, and the rules that send notifications."""
    found = get_facts(api, "/api/notifications/channels", having="channels")
    if json:
        print_json(found)
        return
    rows = [
        (
            channel["name"],
            channel["kind"],
            channel["address"],
            ", ".join(channel["rules"]) or "all",
            ", ".join(channel["runs"]) or "all",
            channel["sent"],
            Text(str(channel["failed"]), style="red" if channel["failed"] else ""),
            channel["waiting"],
            channel["last_error"]
            or ("" if channel["last_sent_at"] is None else f"sent {ago(channel['last_sent_at'])}"),
        )
        for channel in found["channels"]
    ]
    columns = ("=CHANNEL", "KIND", "ADDRESS", "RULES", "RUNS", ">SENT", ">FAILED", ">WAITING", "LAST")
    print_table(
        columns, rows, empty="No channels: configure one with [notify.channels.NAME] or STRATA_NOTIFY."
    )
    console.print()
    print_table(("=RULE", "THRESHOLD", "RAISED WHEN"), [_rule(rule) for rule in found["rules"]], empty="")


@app.command("test")
def send_test(
    channel: Annotated[
        str | None,
        typer.Argument(
            metavar="CHANNEL", help="Name of a channel, as `strata notify ls` shows it. [all channels]"
        ),
    ] = None,
    api: Api = DEFAULT_API,
    json: AsJson = False,
) -> None:
    """Send a test notification and report whether it arrived. Exit status 1 if one did not."""
    found: list[dict[str, Any]] = post(api, "/api/notifications/test", {"channel": channel}, timeout_s=TEST_S)
    if not found:
        raise NoChannels
    if json:
        print_json(found)
    for each in () if json else found:
        outcome = (
            Text("delivered", style="green") if each["delivered"] else Text(each["error"], style="bold red")
        )
        console.print(Text.assemble(f"{each['channel']} ({each['kind']}): ", outcome), soft_wrap=True)
    if not all(each["delivered"] for each in found):
        raise typer.Exit(1)


@app.command()
def history(
    run: Annotated[str | None, typer.Argument(metavar="RUN", help="Only of this run.")] = None,
    limit: Annotated[
        int, typer.Option("--limit", "-n", min=1, max=10_000, help="Maximum number of notifications.")
    ] = 20,
    api: Api = DEFAULT_API,
    json: AsJson = False,
) -> None:
    """List recent notifications, newest first, even if no channel is configured."""
    query = {"limit": limit, **({"run": run} if run else {})}
    found = get_rows(api, "/api/notifications?" + urlencode(query))
    if json:
        print_json(found)
        return
    rows = [
        (
            ago(each["at"]),
            Text(each["rule"], style=STYLES.get(each["severity"], "")),
            each["state"],
            each["title"],
            each["text"],
        )
        for each in found
    ]
    print_table(("WHEN", "RULE", "STATE", "WHAT", ""), rows, empty="No notifications yet.")


def _rule(rule: dict[str, Any]) -> tuple[object, ...]:
    if not rule["enabled"]:
        return rule["name"], Text("off", style="dim"), rule["meaning"]
    threshold = "on" if rule["threshold"] is None else f"{rule['threshold']:g} {rule['unit']}"
    return rule["name"], threshold, rule["meaning"]
