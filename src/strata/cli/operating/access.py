"""`strata token`, `strata dashboard-link`, `strata audit-log`: who may do what at a coordinator, and who did.

`token` asks a coordinator, as every command does; with `--data-dir` it changes that coordinator's file itself, which works
while none is running and needs no token: whoever may write the file is its owner. The link that signs a browser in goes to
standard output alone, so that it can be passed on; its code stands behind a `#`, which browsers do not send: it is in no server's log.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote, urlencode

import typer
from rich.text import Text

from strata.api import leader_url
from strata.cli.common import (
    DEFAULT_API,
    Api,
    AsJson,
    LiteralGroup,
    delete,
    duration,
    errors,
    get_rows,
    post,
    post_facts,
    print_json,
    print_table,
    timestamp,
)
from strata.coordinator.auth.principals import Role

app = typer.Typer(
    name="token", cls=LiteralGroup, help="Tokens for other users, machines and jobs.", no_args_is_help=True
)

DataDir = Annotated[
    Path | None, typer.Option(help="Use the tokens in this data directory directly, without a coordinator.")
]


@app.command()
def create(
    role: Annotated[str, typer.Option(help="viewer, worker, operator or admin.")],
    job: Annotated[str | None, typer.Option(help="Restrict it to this job. [all jobs]")] = None,
    name: Annotated[
        str, typer.Option(help="Name shown by `strata token ls` and in the audit log.")
    ] = "unnamed",
    expires: Annotated[str, typer.Option(help="Lifetime: 7d, 12h, 30m, or never.")] = "30d",
    api: Api = DEFAULT_API,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Create a token. It is printed once and cannot be shown again."""
    if data_dir is not None:
        made = _create_in(data_dir, role=role, job=job, name=name, expires=expires)
    else:
        body = {"name": name, "role": role, "job_id": job, "expires": expires}
        made = post(api, "/api/tokens", {key: value for key, value in body.items() if value is not None})
    if as_json:
        print_json(made)
        return
    print(made["token"])
    until = "never expires" if made["expires_at"] is None else f"expires {timestamp(made['expires_at'])}"
    about = f"{role} of job '{job}'" if job else role
    _note(f"Token {made['id']} ({about}, {until}). Use it: export STRATA_TOKEN=…; it is not shown again.")


@app.command("ls")
def list_tokens(api: Api = DEFAULT_API, data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """List the tokens, without their secrets."""
    found = _tokens_in(data_dir) if data_dir is not None else get_rows(api, "/api/tokens")
    if as_json:
        print_json(found)
        return
    rows = [
        (
            token["id"],
            token["name"],
            token["role"],
            token["job_id"] or "all",
            timestamp(token["created_at"]),
            "never" if token["expires_at"] is None else timestamp(token["expires_at"]),
            "expired" if token["expired"] else "",
        )
        for token in found
    ]
    print_table(("=ID", "NAME", "ROLE", "JOB", "CREATED", "EXPIRES", ""), rows, empty="No tokens.")


@app.command()
def revoke(
    token_id: Annotated[
        str, typer.Argument(metavar="ID", help="Id of the token, as `strata token ls` shows it.")
    ],
    api: Api = DEFAULT_API,
    data_dir: DataDir = None,
) -> None:
    """Revoke a token. It stops working immediately."""
    if data_dir is not None:
        from strata.coordinator.auth.tokens import TokenStore

        TokenStore(data_dir).revoke(token_id)
    else:
        delete(api, f"/api/tokens/{quote(token_id, safe='')}")
    _note(f"Token {token_id} is revoked.")


def dashboard_link(
    role: Annotated[Role, typer.Option(help="Role of the browser, at most your own.")] = "viewer",
    api: Api = DEFAULT_API,
    as_json: AsJson = False,
) -> None:
    """Create a link that signs one browser in to the dashboard: once, within ten minutes."""
    made = post_facts(api, "/api/session/links", {"role": role}, having="path")
    link = f"{leader_url(api)}{made['path']}"
    if as_json:
        print_json({"link": link, "role": role, "expires_in_s": made["expires_in"]})
        return
    typer.echo(link)
    within = duration(made["expires_in"])
    _note(f"Signs one browser in as {role}, once, within {within}. Treat it as a password.", soft_wrap=True)


def audit_log(
    limit: Annotated[
        int, typer.Option("--limit", "-n", min=1, max=10_000, help="Maximum number of entries.")
    ] = 50,
    text: Annotated[
        str, typer.Option("--grep", help="Only entries that contain this text, ignoring case.")
    ] = "",
    api: Api = DEFAULT_API,
    as_json: AsJson = False,
) -> None:
    """Show who did what, and whether it was allowed. Oldest first."""
    found = get_rows(api, "/api/audit-log?" + urlencode({"limit": limit, "q": text}))[::-1]
    if as_json:
        for entry in found:
            print_json(entry, in_one_line=True)
        return
    rows = [
        (
            timestamp(entry["at"]),
            Text(entry["outcome"], style="" if entry["outcome"] == "allowed" else "red"),
            entry["who"],
            entry["action"],
            entry["target"],
            entry["client"],
            entry["reason"] + (f" (×{entry['count']:,})" if entry["count"] > 1 else ""),
        )
        for entry in found
    ]
    columns = ("TIME", "OUTCOME", "WHO", "ACTION", "TARGET", "FROM", "REASON")
    print_table(columns, rows, empty="The audit log is empty.")


def _create_in(data_dir: Path, *, role: str, job: str | None, name: str, expires: str) -> dict[str, Any]:
    from strata.coordinator.auth.tokens import TokenStore, as_role, parse_expiry

    secret, token = TokenStore(data_dir).create(
        name=name, role=as_role(role), job=job, expires_s=parse_expiry(expires), created_by="command line"
    )
    return {**token.public(time.time()), "token": secret}


def _tokens_in(data_dir: Path) -> list[dict[str, Any]]:
    from strata.coordinator.auth.tokens import TokenStore

    return [token.public(time.time()) for token in TokenStore(data_dir).all()]


def _note(text: str, *, soft_wrap: bool = False) -> None:
    """For people, beside what a script reads."""
    errors.print(Text(text, style="dim"), soft_wrap=soft_wrap)
