"""Another user of this machine, who relays connections: what comes through is theirs, as the kernel sees it.

The relay is a process of its own under another user id, so that clients in the test's process (gRPC's too) can speak through it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

UID = 61_234
"""Nobody's here: a number is all the kernel needs."""

_RELAY = """
import socket, sys, threading
port = int(sys.argv[1])
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
def pump(source, target):
    try:
        while data := source.recv(65536):
            target.sendall(data)
    except OSError:
        pass
    for end in (source, target):
        try:
            end.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
while True:
    client, _ = listener.accept()
    server = socket.create_connection(("127.0.0.1", port))
    for pair in ((client, server), (server, client)):
        threading.Thread(target=pump, args=pair, daemon=True).start()
"""

PYTHON = shutil.which("python3", path="/usr/bin:/usr/local/bin") or sys.executable
"""The system's: a virtual environment may be where other users cannot read."""

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to act as another user")


@contextmanager
def relayed(port: int, *, uid: int = UID) -> Iterator[int]:
    """A port whose connections reach `port` as the user `uid`."""
    relay = subprocess.Popen(
        [PYTHON, "-I", "-S", "-c", _RELAY, str(port)],
        stdout=subprocess.PIPE,
        text=True,
        user=uid,
        group=uid,
        extra_groups=[],
        cwd="/",
    )
    try:
        assert relay.stdout is not None
        yield int(relay.stdout.readline())
    finally:
        relay.kill()
        relay.wait()
        assert relay.stdout is not None
        relay.stdout.close()
