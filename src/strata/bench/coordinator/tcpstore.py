"""The same work on torch's TCPStore: `set` for a heartbeat, `add` and `wait` for a barrier.

Server and clients each have a process of their own, as the coordinator and its load generator have. A TCPStore
client blocks, so there is one thread for each; their hand-overs are part of what a user of TCPStore pays.
Run as a module (it is started by the functions here) it prints one JSON list of seconds.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

HOST = "127.0.0.1"
TIMEOUT_S = 240.0


def installed() -> bool:
    return importlib.util.find_spec("torch") is not None


def sets_per_second(*, clients: int, sets: int) -> float:
    """Over all clients, each making `sets` calls."""
    (elapsed_s,) = _run("set", clients, sets)
    return clients * sets / elapsed_s


def barriers_s(*, clients: int, rounds: int) -> list[float]:
    """For each round, seconds from the first arrival to the last release."""
    return _run("barrier", clients, rounds)


def _run(work: str, clients: int, rounds: int) -> list[float]:
    server = subprocess.Popen(
        [sys.executable, "-m", __spec__.name, "serve"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stdout is not None
        port = server.stdout.readline().strip()
        command = [sys.executable, "-m", __spec__.name, work, port, str(clients), str(rounds)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=TIMEOUT_S)
        seconds: list[float] = json.loads(done.stdout)
        return seconds
    finally:
        server.communicate()  # Its standard input ends, and with it the server.


def _serve() -> None:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    print(store.port, flush=True)
    sys.stdin.read()


def _set(stores: Sequence[Any], sets: int) -> list[float]:
    def client(number: int, start: threading.Barrier, seconds: list[tuple[float, float]]) -> None:
        store, key = stores[number], f"worker-{number:04}"
        value = "x" * 100  # About what a heartbeat weighs.
        start.wait()
        began_s = time.perf_counter()
        for _ in range(sets):
            store.set(key, value)
        store.get(key)  # A set is not answered; a get behind it proves that all were taken.
        seconds.append((began_s, time.perf_counter()))

    return [_first_to_last(client, len(stores))]


def _barriers(stores: Sequence[Any], rounds: int) -> list[float]:
    def one_round(step: int) -> float:
        def client(number: int, start: threading.Barrier, seconds: list[tuple[float, float]]) -> None:
            store = stores[number]
            start.wait()
            began_s = time.perf_counter()
            if store.add(f"arrived-{step}", 1) == len(stores):
                store.set(f"released-{step}", "")
            store.wait([f"released-{step}"])
            seconds.append((began_s, time.perf_counter()))

        return _first_to_last(client, len(stores))

    return [one_round(step) for step in range(rounds)]


def _first_to_last(
    client: Callable[[int, threading.Barrier, list[tuple[float, float]]], None], count: int
) -> float:
    """All clients at once, each on a thread: seconds from the first one's start to the last one's end."""
    spans: list[tuple[float, float]] = []
    start = threading.Barrier(count)
    threads = [threading.Thread(target=client, args=(number, start, spans)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return max(end for _, end in spans) - min(begin for begin, _ in spans)


def _main(work: str, port: str, clients: str, rounds: str) -> None:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    stores = [TCPStore(HOST, int(port), is_master=False) for _ in range(int(clients))]
    measure = {"set": _set, "barrier": _barriers}[work]
    print(json.dumps(measure(stores, int(rounds))))


if __name__ == "__main__":
    _serve() if sys.argv[1] == "serve" else _main(*sys.argv[1:5])
