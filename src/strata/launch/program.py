"""Running a user's program inside a process that has started already, as Python would have run it. Needs no torch."""

from __future__ import annotations

import os
import runpy
import sys


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
