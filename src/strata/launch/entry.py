"""The first thing a worker runs that is a program of its own: it ends with its agent, and a failure is reported in full.

    python -m strata.launch.entry (-m MODULE | SCRIPT) [ARGUMENTS]

An error is reported to the agent (`strata.rendezvous.frames`) before it ends the process as it always would. In a task
`STRATA_KEEPER` names the socket of the process that keeps the run: standard output and error become connections to it, so
that every line is known by its rank and survives this process, and the error is reported there too. Needs no torch.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import socket
import sys
import traceback
from contextlib import suppress
from types import TracebackType

from strata.core.faults.failures import WorkerError
from strata.processes import end_with_parent, write_line_by_line
from strata.rendezvous.frames import describe, report, script_frames
from strata.sockets import connect_to_path

SUPERVISOR_VARIABLE = "STRATA_KEEPER"  # As supervisors of earlier versions, whose runs may be live, have it.
"""Path of the supervisor's Unix socket. A name without a folder, from a supervisor of an earlier version, is an abstract one."""


def main() -> None:
    program = sys.argv[1:]
    if not program or program == ["-m"]:
        sys.exit("usage: python -m strata.launch.entry (-m MODULE | SCRIPT) [ARGUMENTS]")
    end_with_parent(signal.SIGKILL)
    write_line_by_line()
    supervisor = os.environ.get(SUPERVISOR_VARIABLE)
    send_output()
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = _print_error
    try:
        if program[0] == "-m":
            run_module(*program[1:])
        else:
            run_file(*program)
    except BaseException as error:
        described = describe(error)
        if described is not None:
            report(described)
            if supervisor:
                _report_failure(supervisor, described, exit_code=_status(error))
        raise


def run_file(script: str, *arguments: str) -> None:
    """`python SCRIPT ARGUMENTS`: what lies beside the script can be imported."""
    sys.argv = [script, *arguments]
    _replace_working_folder(os.path.dirname(os.path.realpath(script)))
    runpy.run_path(script, run_name="__main__")


def run_module(name: str, *arguments: str) -> None:
    """`python -m NAME ARGUMENTS`."""
    sys.argv = [name, *arguments]
    sys.modules.pop(name, None)  # One that was imported beforehand; runpy would warn of two.
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def _replace_working_folder(folder: str) -> None:
    """`python -m`, with which agents and entries start, puts the working folder first; with a script that is its own."""
    if sys.path and sys.path[0] in ("", os.getcwd()):
        sys.path[0] = folder
    else:
        sys.path.insert(0, folder)


def _print_error(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Without the frames that brought the program to run."""
    traceback.print_exception(kind, error, script_frames(error))


def _status(error: BaseException) -> int:
    return error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 1


def _connect(supervisor: str, header: dict[str, object]) -> socket.socket:
    connection = connect_to_path(supervisor) if "/" in supervisor else _connect_abstract(supervisor)
    try:
        connection.sendall(json.dumps({"rank": int(os.environ.get("RANK", "0")), **header}).encode() + b"\n")
    except BaseException:
        connection.close()
        raise
    return connection


def _connect_abstract(name: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect("\0" + name)
    except BaseException:
        connection.close()
        raise
    return connection


def send_output() -> None:
    """To the process that keeps the run, where one does, as this rank's from now on."""
    supervisor = os.environ.get(SUPERVISOR_VARIABLE)
    for name, number in (("stdout", 1), ("stderr", 2)) if supervisor else ():
        with suppress(OSError), _connect(supervisor or "", {"stream": name}) as connection:
            getattr(sys, name).flush()
            os.dup2(connection.fileno(), number)
            with suppress(AttributeError):
                getattr(sys, name).reconfigure(line_buffering=True, errors="backslashreplace")


def _report_failure(supervisor: str, error: WorkerError, *, exit_code: int) -> None:
    with suppress(OSError):
        _connect(supervisor, {"failure": {**error.to_dict(), "exit_code": exit_code}}).close()


if __name__ == "__main__":
    main()
