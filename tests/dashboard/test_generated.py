"""Types are written once, in Python: the generated files are current."""

from __future__ import annotations

import subprocess
import sys

from tests.support_programs import ROOT


def test_generated_types_are_current() -> None:
    command = [sys.executable, "scripts/generate_types.py", "--check"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, f"{ran.stdout}{ran.stderr}"
