"""A worker whose run is held by a supervisor (`strata.launch.supervisor`): what it prints and how it fails goes there, by its rank.

Needs no torch.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from contextlib import suppress

from strata.core.faults.failures import WorkerError
from strata.sockets import connect_to_path

SUPERVISOR_VARIABLE = "STRATA_KEEPER"  # As supervisors of earlier versions, whose runs may be live, have it.
"""Path of the supervisor's Unix socket. A name without a folder, from a supervisor of an earlier version, is an abstract one."""
REPORT_S = 5.0


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


def report_failure(supervisor: str, error: WorkerError, *, exit_code: int) -> None:
    """Returns when it is known there: it must not arrive after what the agent says of this process's end."""
    failure = {**error.to_dict(), "exit_code": exit_code}
    with suppress(OSError), _connect(supervisor, {"failure": failure}) as connection:
        connection.settimeout(REPORT_S)
        connection.recv(1)
