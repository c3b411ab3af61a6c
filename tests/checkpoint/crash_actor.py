"""A process to be killed: it imports everything once, then forks a trainer for every order it reads on stdin.

A trainer restores, tells what it found, and saves step after step until it is killed. It tells of every save that
was reported complete, on the pipe it was given: unbuffered, so nothing it knew dies with it.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from strata.checkpoint import CheckpointInfo, CheckpointManager, CheckpointNotFound, Memory, Policy, Started
from strata.checkpoint.catalog.naming import step_stem, unique_stem
from strata.stores import Store, open_store
from strata.stores.faulty import Fault, FaultyStore, Operation, crash_by_signal
from tests.checkpoint.states import assert_is_step, small_state

KEPT = 3
CRASHES = (Fault.CRASH_BEFORE, Fault.CRASH_MIDWAY, Fault.CRASH_AFTER)


class Teller:
    """Reports to the test on a pipe."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def tell(self, **facts: Any) -> None:
        os.write(self._fd, json.dumps(facts).encode() + b"\n")

    def on_started(self, save: Started) -> None: ...

    def on_tier(self, save: Started, *, tier: str, size_bytes: int, seconds: float) -> None: ...

    def on_skipped(self, save: Started, *, tier: str, reason: str) -> None:
        self.tell(what="skipped", step=save.step, reason=reason)

    def on_completed(self, save: Started, info: CheckpointInfo, *, seconds: float) -> None:
        self.tell(what="completed", step=info.step, id=info.checkpoint_id, digest=info.digest)

    def on_failed(self, save: Started, error: BaseException, *, seconds: float) -> None:
        self.tell(what="failed", step=save.step, error=str(error))

    def on_removed(self, checkpoint_id: str, *, step: int, epoch: int, path: str, reason: str) -> None: ...


def crash_at(number: int, fault: Fault) -> Any:
    """Die at the given operation, or at the next one that can be interrupted that way."""

    def choose(operation: Operation, chance: random.Random) -> Fault | None:
        if operation.number < number or (fault is Fault.CRASH_MIDWAY and operation.name != "write"):
            return None
        return fault if operation.name in ("write", "commit", "delete") else Fault.CRASH_BEFORE

    return choose


def train(order: dict[str, Any], fd: int) -> None:
    chance = random.Random(order["seed"])
    teller = Teller(fd)
    store: Store = open_store(Path(order["folder"]))
    if order["mode"] == "fault":
        store = FaultyStore(
            store,
            seed=order["seed"],
            choose=crash_at(chance.randrange(40), chance.choice(CRASHES)),
            crash=crash_by_signal,
        )
    manager = CheckpointManager(
        store,
        keep_count=KEPT,
        memory=Memory(job=order["job"]),
        policy=Policy(on_error="fail"),
        stem=step_stem if order["stem"] == "step" else unique_stem,
        observer=teller,
    )
    step = 0
    try:
        restored = manager.restore()
    except CheckpointNotFound:
        teller.tell(what="started empty")
    else:
        step = restored.info.step
        assert_is_step(restored.state, step)
        teller.tell(what="restored", step=step, tier=restored.tier, reasons=restored.reasons)
    for number in itertools.count(step + 1):
        manager.save(small_state(number, tensors=chance.randrange(1, 5)), step=number)


def warm_up() -> None:
    """Load every module once, here, and not in every trainer."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        with CheckpointManager(folder, memory=Memory(job=f"warm-{os.getpid()}")) as manager:
            manager.save(small_state(1), step=1).result(60)
            manager.restore()


def main() -> None:
    torch.set_num_threads(1)  # A thread pool would not survive the fork.
    warm_up()
    print("ready", flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reading)
            try:
                train(order, writing)
            except BaseException as error:
                os.write(writing, json.dumps({"what": "died", "error": repr(error)}).encode() + b"\n")
            os._exit(1)
        os.close(writing)
        print(json.dumps({"pid": child}), flush=True)
        with os.fdopen(reading) as told:
            facts = [json.loads(fact) for fact in told if fact.endswith("\n")]
        _, status = os.waitpid(child, 0)
        print(
            json.dumps({"signal": os.WTERMSIG(status) if os.WIFSIGNALED(status) else None, "facts": facts}),
            flush=True,
        )


if __name__ == "__main__":
    main()
