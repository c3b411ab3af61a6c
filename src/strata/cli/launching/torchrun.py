"""`strata torchrun`: torchrun's flags, our defaults. Becomes the agent's process: signals and exit status are its own."""

from __future__ import annotations

import os
import sys

import typer

from strata.cli.extras import need


def torchrun(context: typer.Context) -> None:
    """Run a script like torchrun, with all of its flags; a single machine needs neither coordinator nor etcd."""
    need("torch", feature="torchrun")
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", "strata.launch.agent", *context.args])
