"""Another user of this machine, with nothing but what every user has."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

T = TypeVar("T")

STRANGER = 65534
PATIENCE_S = 60.0
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="acting as another user needs root")


def as_stranger(act: Callable[..., T], *arguments: Any) -> T:
    """Call a function as another user, in a process of its own; its result, or the `OSError` that it met."""
    forking = multiprocessing.get_context(
        "fork"
    )  # The interpreter itself may be in a folder that only root may enter.
    ours, theirs = forking.Pipe()
    process = forking.Process(target=_act, args=(theirs, act, arguments))
    process.start()
    theirs.close()
    try:
        assert ours.poll(PATIENCE_S), "the stranger did not answer"
        result = ours.recv()
    finally:
        process.join(PATIENCE_S)
        ours.close()
    if isinstance(result, Exception):
        raise result
    return result  # type: ignore[no-any-return]


def _act(connection: Any, act: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    os.setgroups([])
    os.setresgid(STRANGER, STRANGER, STRANGER)
    os.setresuid(STRANGER, STRANGER, STRANGER)
    os.umask(0o022)
    os.chdir("/")
    try:
        result = act(*arguments)
    except Exception as error:
        result = error
    connection.send(result)
    connection.close()
    os._exit(0)


def open_folder() -> Iterator[Path]:
    """A folder that everybody may enter and read, unlike those of pytest."""
    with tempfile.TemporaryDirectory(prefix="strata-test-") as name:
        os.chmod(name, 0o755)
        yield Path(name)
