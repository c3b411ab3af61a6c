"""Another user of this machine, who relays connections: what comes through is theirs, as the kernel sees it.

The relay is a process of its own under another user id, so that clients in the test's process (gRPC's too) can speak through it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

UID = 61_234
"""Nobody's here: a number is all the kernel needs."""

_RELAY = """
import os, socket, sys, threading
port, uid = int(sys.argv[1]), int(sys.argv[2])
os.setgroups([])
os.setgid(uid)
os.setuid(uid)
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
    server = socket.socket()  # Whatever imports more would need files that the user may not read.
    server.connect(("127.0.0.1", port))
    for pair in ((client, server), (server, client)):
        threading.Thread(target=pump, args=pair, daemon=True).start()
"""

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to act as another user")


@contextmanager
def relayed(port: int, *, uid: int = UID) -> Iterator[int]:
    """A port whose connections reach `port` as the user `uid`."""
    relay = subprocess.Popen(
        [sys.executable, "-I", "-c", _RELAY, str(port), str(uid)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert relay.stdout is not None
        yield int(relay.stdout.readline())
    finally:
        relay.kill()
        relay.wait()
        assert relay.stdout is not None
        relay.stdout.close()
