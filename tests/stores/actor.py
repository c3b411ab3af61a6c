"""What the tests let other processes do to a store: `python -m tests.stores.actor '<json>'`.

Each action says one line per step on stdout, so that the test knows where the process is when it kills it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from strata.stores import AlreadyExists, Store, open_store


def value_of(number: int, size_bytes: int) -> bytes:
    """A value that shows whether it is intact: one byte repeated, its last two bytes the number."""
    return bytes([number % 251]) * (size_bytes - 2) + number.to_bytes(2, "big")


def is_intact(value: bytes, size_bytes: int) -> bool:
    return value == value_of(int.from_bytes(value[-2:], "big"), size_bytes)


def start(action: str, url: str, options: dict[str, Any], **arguments: Any) -> subprocess.Popen[str]:
    told = json.dumps({"action": action, "url": url, "options": options, **arguments})
    command = [sys.executable, "-m", "tests.stores.actor", told]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def say(line: str) -> None:
    print(line, flush=True)


def put_and_die(store: Store, *, key: str, size_bytes: int) -> None:
    store.put(key, value_of(7, size_bytes))
    os.kill(os.getpid(), signal.SIGKILL)


def keep_putting(store: Store, *, key: str, size_bytes: int) -> None:
    number = 0
    while True:
        number += 1
        value = value_of(number, size_bytes)
        say(f"writing {number}")
        store.put(key, value)
        say(f"wrote {number}")


def race(store: Store, *, name: str, rounds: int) -> None:
    """Try to be the first to write each of `rounds` keys; say which were won."""
    say("ready")
    sys.stdin.readline()
    won = []
    for number in range(rounds):
        try:
            store.put(f"prize-{number}", name.encode(), if_absent=True)
            won.append(number)
        except AlreadyExists:
            pass
    say(json.dumps(won))


def main() -> None:
    told = json.loads(sys.argv[1])
    actions: dict[str, Callable[..., None]] = {
        "put_and_die": put_and_die,
        "keep_putting": keep_putting,
        "race": race,
    }
    action, store = actions[told.pop("action")], open_store(told.pop("url"), **told.pop("options"))
    action(store, **told)


if __name__ == "__main__":
    main()
