"""`strata torchrun`: torchrun's flags, our defaults. Becomes the agent's process: signals and exit status are its own."""

from __future__ import annotations

import logging
import os
import sys

import typer

from strata.cli.extras import need
from strata.logs import hide_level_from_torch, level


def torchrun(context: typer.Context) -> None:
    """Run a script like torchrun, with all of its flags; a single machine needs neither coordinator nor etcd."""
    need("torch", feature="torchrun")
    level(logging.INFO)  # What is wrong with it is said here; torch would fail in its imports.
    hide_level_from_torch()
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", "strata.launch.agent", *context.args])
