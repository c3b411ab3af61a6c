"""Unix sockets between processes of one user, at paths of any length.

A socket is a file that only its user may open, in a folder that only its user may enter, and a process that accepts a connection
asks the kernel whose process is at the other end. The kernel takes 107 bytes of a path; longer ones are named by a
descriptor of their folder. Needs nothing but Python.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid
BACKLOG = 128


def listen_privately(path: Path) -> socket.socket:
    """A listening socket at a path that is not taken. Raises `OSError`."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with _reachable(path) as short:
            listener.bind(short)
            os.chmod(short, 0o600)
        listener.listen(BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


def connect_to_path(path: str | os.PathLike[str]) -> socket.socket:
    """Raises `OSError` where no process listens, or one that this user may not speak with."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with _reachable(Path(path)) as short:
            connection.connect(short)
    except BaseException:
        connection.close()
        raise
    return connection


def is_own_peer(connection: socket.socket) -> bool:
    """Whether the other end was opened by this user, or by root."""
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return _CREDENTIALS.unpack(found)[1] in (os.getuid(), 0)


@contextlib.contextmanager
def _reachable(path: Path) -> Iterator[str]:
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)
