"""The first thing a worker runs that is a program of its own: it ends with its agent, and a failure is reported in full.

    python -m strata.launch.entry (-m MODULE | SCRIPT) [ARGUMENTS]

An error is reported to the agent (`strata.agent.frames`) before it ends the process as it always would. In a task
`STRATA_KEEPER` names the socket of the process that keeps the run: standard output and error become connections to it, so
that every line is known by its rank and survives this process, and the error is reported there too. Needs no torch.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import traceback
from types import TracebackType

from strata.agent.frames import describe, report, script_frames
from strata.agent.supervised import SUPERVISOR_VARIABLE, report_failure, send_output
from strata.processes import end_with_parent, write_line_by_line


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
                report_failure(supervisor, described, exit_code=_status(error))
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


if __name__ == "__main__":
    main()
