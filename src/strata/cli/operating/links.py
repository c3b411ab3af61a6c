"""`strata dashboard-link`: a link that signs one browser in to the dashboard, once.

The link goes to standard output alone, so that it can be passed on; what it is good for is said beside it. Its code stands
behind a `#`, which browsers do not send: it is in no server's log.
"""

from __future__ import annotations

from typing import Annotated

import typer
from rich.text import Text

from strata.api import leader_url
from strata.cli.common import DEFAULT_API, Api, AsJson, duration, errors, post_facts, print_json
from strata.coordinator.auth.principals import Role

AsRole = Annotated[Role, typer.Option(help="Role of the browser, at most your own.")]


def dashboard_link(role: AsRole = "viewer", api: Api = DEFAULT_API, as_json: AsJson = False) -> None:
    """Create a link that signs one browser in to the dashboard: once, within ten minutes."""
    made = post_facts(api, "/api/session/links", {"role": role}, having="path")
    link = f"{leader_url(api)}{made['path']}"
    if as_json:
        print_json({"link": link, "role": role, "expires_in_s": made["expires_in"]})
        return
    typer.echo(link)
    errors.print(
        Text(
            f"Signs one browser in as {role}, once, within {duration(made['expires_in'])}. Treat it as a password.",
            style="dim",
        ),
        soft_wrap=True,
    )
