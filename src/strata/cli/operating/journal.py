"""`strata journal copy`: a coordinator's journal moved into etcd, or back."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from strata.cli.common import LiteralGroup, console
from strata.coordinator.journal.copying import Place, copy_journal
from strata.coordinator.journal.etcd import is_etcd, parse_location

app = typer.Typer(
    name="journal",
    cls=LiteralGroup,
    help="The coordinator's journal, in a folder or in etcd.",
    no_args_is_help=True,
)

SQLITE = "sqlite:"


@app.callback()
def journal() -> None:
    """The coordinator's journal, in a folder or in etcd."""


@app.command()
def copy(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE", help="Journal to copy: sqlite:DATA_DIR, or etcd://HOST:PORT/PREFIX."
        ),
    ],
    target: Annotated[
        str, typer.Argument(metavar="TARGET", help="Where to copy it, in the same form; it must be empty.")
    ],
    etcd_user: Annotated[
        str,
        typer.Option(
            envvar="STRATA_ETCD_USER", help="etcd user; the password comes from STRATA_ETCD_PASSWORD."
        ),
    ] = "",
    etcd_ca: Annotated[
        Path | None, typer.Option(envvar="STRATA_ETCD_CA", help="CA certificate (PEM) of etcd.")
    ] = None,
    etcd_cert: Annotated[
        Path | None, typer.Option(envvar="STRATA_ETCD_CERT", help="Client certificate (PEM) for etcd.")
    ] = None,
    etcd_key: Annotated[
        Path | None, typer.Option(envvar="STRATA_ETCD_KEY", help="Key of that certificate (PEM).")
    ] = None,
) -> None:
    """Copy a journal and verify the copy. No coordinator may use either one; the target must be empty, and appears only
    when the copy is complete."""

    def place(text: str, name: str) -> Place:
        if text.startswith(SQLITE) and len(text) > len(SQLITE):
            return Path(text.removeprefix(SQLITE)).expanduser()
        if not is_etcd(text):
            raise typer.BadParameter(
                f"'{text}' is not a journal; write sqlite:DATA_DIR or etcd://HOST:PORT", param_hint=name
            )
        try:
            return parse_location(
                text,
                user=etcd_user,
                password=os.environ.get("STRATA_ETCD_PASSWORD", ""),
                ca=etcd_ca,
                cert=etcd_cert,
                key=etcd_key,
            )
        except (ValueError, OSError) as error:
            raise typer.BadParameter(str(error), param_hint=name) from error

    places = place(source, "SOURCE"), place(target, "TARGET")
    with console.status("") as line:
        copied = copy_journal(*places, progress=lambda what, count: line.update(f"{count:,} events {what}"))
    serve = f"--journal {target}" if is_etcd(target) else f"--data-dir {target.removeprefix(SQLITE)}"
    console.print(
        f"{copied.events:,} events ({copied.size_bytes / 1e6:,.1f} MB) copied and verified. Start coordinators with: "
        f"strata serve {serve}. {source} is unchanged; do not start coordinators with it any more.",
        markup=False,
        soft_wrap=True,
    )
