"""How this process was started, for the page of its run: the command, the commit that lies there, the versions.

Reads a few small files; runs nothing and waits for nothing. What it cannot find out is left empty.
"""

from __future__ import annotations

import platform
import shlex
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import strata
from strata.core.telemetry.logtext import REDACTED
from strata.core.telemetry.run_details import RunDetails, tidy

SMALL_BYTES = 4 << 20


def gathered(*, world_size: int, config: Mapping[str, Any], options: Mapping[str, Any]) -> RunDetails:
    found = RunDetails(
        command=shlex.join(without_secrets(sys.argv)),
        host=socket.gethostname(),
        versions={
            "python": platform.python_version(),
            "torch": str(torch.__version__),
            "strata": strata.__version__,
        },
        world_size=world_size,
        config=dict(config),
        options=dict(options),
    )
    try:
        folder = Path.cwd()
        commit, branch = checked_out(_program_folder(folder))
    except (OSError, ValueError):
        return found
    return replace(found, folder=str(folder), commit=commit, branch=branch)


def without_secrets(arguments: Sequence[str]) -> list[str]:
    """A value that follows its option is as secret as one that stands behind a '='."""
    shown = list(arguments)
    for at in range(1, len(shown)):
        option = shown[at - 1]
        if option.startswith("--") and REDACTED in tidy(f"{option.lstrip('-')}={shown[at]}"):
            shown[at] = REDACTED
    return [tidy(each) for each in shown]


def checked_out(folder: Path) -> tuple[str, str]:
    """The commit and the branch of the checkout around a folder, as its files say; empty where there is none."""
    for place in (folder, *folder.parents):
        git = place / ".git"
        if git.is_file():  # A worktree, or a submodule: it says where its files are.
            git = place / git.read_text().partition("gitdir:")[2].strip()
        if (git / "HEAD").is_file():
            return _head(git)
    return "", ""


def _head(git: Path) -> tuple[str, str]:
    head = (git / "HEAD").read_text().strip()
    if not head.startswith("ref:"):
        return head, ""
    ref = head.partition("ref:")[2].strip()
    branch = ref.removeprefix("refs/heads/")
    shared = git / "commondir"
    common = git / shared.read_text().strip() if shared.is_file() else git
    for place in (git, common):
        if (place / ref).is_file():
            return (place / ref).read_text().strip(), branch
    listed = common / "packed-refs"
    if listed.is_file() and listed.stat().st_size <= SMALL_BYTES:
        for line in listed.read_text().splitlines():
            commit, _, name = line.partition(" ")
            if name == ref:
                return commit, branch
    return "", branch


def _program_folder(working: Path) -> Path:
    program = Path(sys.argv[0]) if sys.argv and sys.argv[0] not in ("", "-c", "-m") else working
    return program.resolve().parent if program.is_file() else working
