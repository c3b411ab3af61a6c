"""`strata serve`: the coordinator."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated

import typer

from strata import logs
from strata.environment import unread

log = logging.getLogger(__name__)


def serve(
    host: Annotated[str | None, typer.Option(help="Address to listen on. [127.0.0.1]")] = None,
    grpc_port: Annotated[int | None, typer.Option(help="gRPC port; 0 picks a free one. [50051]")] = None,
    http_port: Annotated[
        int | None, typer.Option(help="Port of API and dashboard; 0 picks a free one. [3000]")
    ] = None,
    metrics_port: Annotated[
        int | None, typer.Option(help="Additional port that serves only /api/health and /metrics. [none]")
    ] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Directory of the journal. [~/.strata]")] = None,
    journal: Annotated[
        str | None,
        typer.Option(
            help="Shared journal of several coordinators, one of which leads: etcd://HOST:PORT,HOST:PORT. [in --data-dir]"
        ),
    ] = None,
    archive: Annotated[
        str | None,
        typer.Option(
            help="Also archive logs, metrics of runs and output of tasks here: s3://bucket/prefix, or a shared folder. [none]"
        ),
    ] = None,
    advertise: Annotated[
        str | None, typer.Option(help="Host name or address at which others reach this coordinator. [--host]")
    ] = None,
    heartbeat_timeout: Annotated[
        float | None, typer.Option(help="Seconds without a heartbeat after which a worker is failed. [30]")
    ] = None,
    launcher: Annotated[str | None, typer.Option(help="What runs tasks: local, ray or none. [local]")] = None,
    ray_address: Annotated[
        str | None, typer.Option(help="Address of the Ray cluster, for --launcher ray. [auto]")
    ] = None,
    trust_loopback: Annotated[
        bool | None,
        typer.Option(
            "--trust-loopback", help="Trust every user of this machine, not only the coordinator's own."
        ),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="TOML file with a [coordinator] table, and [notify].")
    ] = None,
) -> None:
    """Run the coordinator, with API and dashboard, until Ctrl-C."""
    from strata.coordinator.server import run
    from strata.coordinator.settings import read_all

    flags = {
        "host": host,
        "grpc_port": grpc_port,
        "http_port": http_port,
        "metrics_port": metrics_port,
        "data_dir": data_dir,
        "journal": journal,
        "archive": archive,
        "advertise": advertise,
        "trust_loopback": trust_loopback,
        "heartbeat_timeout": heartbeat_timeout,
        "launcher": launcher,
        "ray_address": ray_address,
    }
    settings, notify = read_all(file=config, flags=flags)
    logs.configure()
    for sentence in unread():
        log.warning("%s", sentence)
    run(settings, notify=notify, private=[config] if config is not None else [])
