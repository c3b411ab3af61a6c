"""Running `strata` the way a shell does: arguments in; exit code, stdout and stderr out."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from unittest.mock import patch

from strata.cli.main import main


@dataclass(frozen=True, kw_only=True)
class Ran:
    code: int
    out: str
    err: str


def strata(*arguments: str) -> Ran:
    """In this process, which saves the time to start one."""
    out, err = io.StringIO(), io.StringIO()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    with (
        patch.object(sys, "argv", ["strata", *arguments]),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            main()
            code: object = 0
        except SystemExit as end:
            code = end.code
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)  # `serve` changes them: its process ends with it.
    assert code is None or isinstance(code, int)
    return Ran(code=code or 0, out=out.getvalue(), err=err.getvalue())


def strata_process(*arguments: str, **env: str) -> Ran:
    done = subprocess.run(
        [sys.executable, "-m", "strata.cli.main", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **env},
    )
    return Ran(code=done.returncode, out=done.stdout, err=done.stderr)
