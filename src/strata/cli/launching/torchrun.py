"""`strata torchrun`: torchrun's flags, our defaults. Becomes the agent's process: signals and exit status are its own."""

from __future__ import annotations

import os
import sys

import typer

from strata.cli.extras import need


def torchrun(context: typer.Context) -> None:
    """Run a script as torchrun does, with every flag of torchrun; on one machine nothing else has to run."""
    need("torch", feature="torchrun")
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", "strata.launch.agent", *context.args])
