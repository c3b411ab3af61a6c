"""The first thing every worker of a task runs: it ends with its agent, its output arrives, and a failure is told whole.

    python -m strata.launch.entry (-m MODULE | SCRIPT) [ARGUMENTS]

`STRATA_KEEPER` names the socket of the process that keeps the run. Standard output and error become connections to it,
so that every line is known by its rank and survives this process; an exception is told there with its traceback before
it ends the process as it always would. Without `STRATA_KEEPER` the program simply runs. Needs no torch.
"""

from __future__ import annotations

import ctypes
import json
import os
import runpy
import signal
import socket
import sys
import traceback
from contextlib import suppress
from pathlib import Path

from strata.rendezvous.frames import script_frames

KEEPER_VARIABLE = "STRATA_KEEPER"
"""Name of a Unix socket in the abstract namespace: it goes with the process that listens."""
EXIT_AGAIN = 75
"""As `strata.training.preemption` has it: not a failure, but a wish to be started again."""
TOLD_CHARACTERS = 8_000
"""Of a message or traceback: the keeper takes one line of 64 KiB at most."""
_PR_SET_PDEATHSIG = 1


def main() -> None:
    program = sys.argv[1:]
    if not program or program == ["-m"]:
        sys.exit("usage: python -m strata.launch.entry (-m MODULE | SCRIPT) [ARGUMENTS]")
    end_with_parent(signal.SIGKILL)
    keeper = os.environ.get(KEEPER_VARIABLE)
    if keeper:
        for name, number in (("stdout", 1), ("stderr", 2)):
            _send_output(keeper, name, number)
    try:
        _run(program)
    except SystemExit as end:
        if keeper and end.code not in (None, 0, EXIT_AGAIN):
            code = end.code if isinstance(end.code, int) else 1
            said = "" if isinstance(end.code, int) else f": {end.code}"
            _tell_failure(keeper, message=f"ended with status {code}{said}", exit_code=code)
        raise
    except BaseException as error:
        if keeper:
            last = traceback.format_exception_only(error)[-1].strip()
            trace = "".join(traceback.format_exception(type(error), error, script_frames(error)))
            _tell_failure(keeper, message=last, trace=trace, exit_code=1)
        raise


def end_with_parent(number: int) -> None:
    """The kernel sends `number` to this process when the thread that started it is gone."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)


def _run(program: list[str]) -> None:
    if program[0] == "-m":
        sys.argv = program[1:]
        runpy.run_module(program[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = program
        sys.path.insert(0, str(Path(program[0]).resolve().parent))
        runpy.run_path(program[0], run_name="__main__")


def _connect(keeper: str, header: dict[str, object]) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect("\0" + keeper)
        connection.sendall(json.dumps({"rank": int(os.environ.get("RANK", "0")), **header}).encode() + b"\n")
    except BaseException:
        connection.close()
        raise
    return connection


def _send_output(keeper: str, name: str, number: int) -> None:
    with suppress(OSError), _connect(keeper, {"stream": name}) as connection:
        getattr(sys, name).flush()
        os.dup2(connection.fileno(), number)
        with suppress(AttributeError):
            getattr(sys, name).reconfigure(line_buffering=True, errors="backslashreplace")


def _tell_failure(keeper: str, *, message: str, exit_code: int, trace: str = "") -> None:
    failure = {
        "message": message[:TOLD_CHARACTERS],
        "traceback": trace[-TOLD_CHARACTERS:],
        "exit_code": exit_code,
    }
    with suppress(OSError):
        _connect(keeper, {"failure": failure}).close()


if __name__ == "__main__":
    main()
