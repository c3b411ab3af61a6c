"""The `strata` command. Each family of commands is a module of its own; this one only puts them together.

Exit codes: 0 done, 1 the answer is no (something is wrong that was asked about), 2 the call itself was wrong,
3 the coordinator cannot be reached, 130 interrupted.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

import strata
from strata.cli import bench, chaos, checkpoint, doctor, soak
from strata.cli.common import LiteralGroup, Unreachable, adopt_dotenv, say_error
from strata.cli.datasets import audit, data, index, mixture
from strata.cli.extras import missing_extra
from strata.cli.launching import demo, slurm, tasks, torchrun, validate
from strata.cli.operating import (
    access,
    backup,
    certs,
    drain,
    journal,
    notify,
    quarantine,
    replay,
    serve,
)
from strata.cli.watching import cost, listings, logs, metrics, why
from strata.errors import StrataError

app = typer.Typer(
    name="strata",
    cls=LiteralGroup,
    help="Training jobs that outlive their machines.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
COMMANDS: tuple[Callable[..., None], ...] = (
    serve.serve,
    demo.demo,
    listings.status,
    listings.workers,
    listings.checkpoints,
    listings.barriers,
    listings.recoveries,
    listings.tasks,
    why.why,
    cost.cost,
    logs.logs,
    metrics.metrics,
    tasks.recipes,
    tasks.submit,
    tasks.stop,
    tasks.restart,
    replay.replay,
    backup.backup,
    backup.restore,
    backup.rebuild,
    audit.audit,
    index.index,
    validate.validate,
    doctor.doctor,
    drain.drain,
    chaos.chaos,
    soak.soak,
    slurm.slurm,
    access.dashboard_link,
    access.audit_log,
)
for command in COMMANDS:
    app.command()(command)
# What stands after the script is the script's.
app.command(context_settings={"allow_interspersed_args": False})(tasks.run)
app.command(
    context_settings={
        "allow_interspersed_args": False,
        "allow_extra_args": True,
        "ignore_unknown_options": True,
        "help_option_names": [],  # torchrun's own help, with all its flags.
    }
)(torchrun.torchrun)
app.add_typer(listings.datasets_app)
app.add_typer(checkpoint.app)
app.add_typer(data.app)
app.add_typer(mixture.app)
app.add_typer(journal.app)
app.add_typer(notify.app)
app.add_typer(quarantine.app)
app.add_typer(access.app)
app.add_typer(certs.app)
app.add_typer(bench.app)


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"strata {strata.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit."),
    ] = False,
    env_file: Annotated[
        Path | None,
        typer.Option(
            help="File of environment variables to read, including tokens and addresses. A .env in the working directory "
            "is read too, except secrets, addresses and paths."
        ),
    ] = None,
) -> None:
    """What can be asked of `strata` itself."""
    adopt_dotenv(env_file)


def main() -> None:
    """Entry point: an expected failure is a sentence and an exit code, never a traceback."""
    # Asked to end by a supervisor, a command cleans up behind itself as after Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        app()
    except Unreachable as error:
        say_error(error)
        sys.exit(3)
    except StrataError as error:
        say_error(error)
        sys.exit(2 if error.code in ("config", "invalid_argument") else 1)
    except ModuleNotFoundError as error:
        missing = missing_extra(error)
        if missing is None:
            raise
        say_error(missing)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
