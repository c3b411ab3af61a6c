"""One tokenizing process: configured once, then chunk after chunk until its caller closes the pipe.

Started by `pool`, never by hand. While it works it now and then sends a sign of life; when no process is there to
receive it, this one ends, so a killed build leaves no busy process behind.
"""

from __future__ import annotations

import pickle
import sys
import time
from multiprocessing.connection import Connection

from strata.data.tokens.building.pool import attempt

ALIVE_INTERVAL_S = 0.5


def main(fd: int) -> None:
    connection = Connection(fd)
    pickled, options, folder = connection.recv()
    try:
        encoder = pickle.loads(pickled)  # noqa: S301  # from the process that started this one
    except Exception as error:  # foreign code: the caller decides what now
        connection.send(f"{type(error).__name__}: {error}")
        return
    connection.send(None)
    last_sign_s = time.monotonic()

    def alive() -> None:
        nonlocal last_sign_s
        if time.monotonic() - last_sign_s > ALIVE_INTERVAL_S:
            last_sign_s = time.monotonic()
            connection.send(None)

    while True:
        chunk = connection.recv()
        connection.send(attempt(chunk, encoder, options, folder, alive))


if __name__ == "__main__":
    try:
        main(int(sys.argv[1]))
    except (EOFError, ConnectionError, KeyboardInterrupt):
        sys.exit(0)
