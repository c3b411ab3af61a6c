"""What a process does at its end."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import sys
from concurrent.futures import ThreadPoolExecutor
from strata.processes import at_exit, run_exit_functions

@at_exit
def finish():
    with ThreadPoolExecutor(2) as pool:
        print(pool.submit(lambda: "finished").result(), flush=True)

if sys.argv[1] == "forked":
    import os
    run_exit_functions()
    os._exit(0)
if sys.argv[1] == "fails":
    raise RuntimeError("of its own")
"""


@pytest.mark.parametrize("how", ["returns", "forked", "fails"])
def test_what_is_finished_at_the_end_of_a_process_may_use_executors(how: str) -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT, how], capture_output=True, text=True, check=False)
    assert done.stdout == "finished\n", done.stderr
    assert "cannot schedule" not in done.stderr
    assert done.returncode == (1 if how == "fails" else 0)
