"""Not on Linux: one sentence, whatever is called."""

from __future__ import annotations

import subprocess
import sys


def elsewhere(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", f"import sys; sys.platform = 'darwin'\n{code}"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_the_command_line_ends_with_a_sentence() -> None:
    ran = elsewhere("sys.argv = ['strata', 'status']\nfrom strata.cli.main import main\nmain()")
    assert (ran.returncode, ran.stdout) == (1, "")
    assert ran.stderr.startswith("error: Strata needs Linux, and this is darwin.\n")
    assert "Traceback" not in ran.stderr


def test_a_job_says_so_before_it_looks_at_anything() -> None:
    ran = elsewhere("import strata\nstrata.elastic(model=None, optimizer=None, data=None, epochs=1)")
    assert ran.returncode == 1
    assert ran.stderr.splitlines()[-1].startswith("strata.errors.UnsupportedPlatform: Strata needs Linux,")
    assert "FileNotFoundError" not in ran.stderr
