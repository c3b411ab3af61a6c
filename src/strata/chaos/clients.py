"""Clients that write down all they asked of a coordinator and what they were answered, for `linearizability`.

Each has a thread, and asks one thing after the other as fast as it is answered. An answer that did not come is an outcome that is unknown,
not an error; anything else that goes wrong is kept in `errors`.
"""

from __future__ import annotations

import random
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from strata.chaos.linearizability import UNKNOWN, Latest, Operation, Register, Violation, check
from strata.errors import StrataError
from strata.rpc.cas import CoordinatorCasClient
from strata.worker.errors import CoordinatorUnavailable
from strata.worker.orchestrator import TrainingOrchestrator

ANSWER_S = 5.0
AWAY_PAUSE_S = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """One worker at one barrier."""

    worker: str
    step: int
    called_s: float
    answered_s: float
    order: int


class Clients:
    """Of values, of a job's checkpoints, and at its barriers. `addresses` as `COORDINATOR_ADDR` has them."""

    def __init__(
        self,
        addresses: str,
        *,
        name: str,
        registers: int = 3,
        keys: int = 2,
        savers: int = 1,
        members: int = 2,
        pause_s: float = 0.0,
        seed: int = 0,
    ) -> None:
        self._addresses = addresses
        self._name = name
        self._keys = [f"chaos/{name}/{number}" for number in range(keys)]
        self._members = members
        self._pause_s = pause_s
        self._seed = seed
        self._over = threading.Event()
        self._news = threading.Condition()
        self.answered = 0
        """How many operations were answered so far."""
        self.operations: list[Operation] = []
        self.arrivals: list[Arrival] = []
        self.errors: list[str] = []
        work: list[tuple[Callable[[str], None], str]] = [
            *((self._use_registers, f"register-{number}") for number in range(registers)),
            *((self._save, f"saver-{number}") for number in range(savers)),
            *((self._meet, f"member-{number}") for number in range(members)),
        ]
        self._threads = [
            threading.Thread(target=self._guarded, args=(function, client), name=client, daemon=True)
            for function, client in work
        ]

    def __enter__(self) -> Clients:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(120)
            if thread.is_alive():
                self.errors.append(f"{thread.name} did not end")

    def wait_answered(self, more: int, *, within_s: float) -> None:
        """Until so many operations more were answered. Raises `TimeoutError`."""
        with self._news:
            wanted = self.answered + more
            if not self._news.wait_for(lambda: self.answered >= wanted, within_s):
                raise TimeoutError(
                    f"{wanted - self.answered} of {more} operations were not answered in {within_s:g} s"
                )

    def violations(self) -> list[str]:
        """What cannot be explained; empty if everything can."""
        values = [each for each in self.operations if each.key in self._keys]
        saves = [each for each in self.operations if each.key not in self._keys]
        found: list[Violation] = [*check(values, Register()), *check(saves, Latest())]
        return [*map(str, found), *barrier_violations(self.arrivals, members=self._members)]

    # --- on threads -----------------------------------------------------------------------------------------

    def _guarded(self, work: Callable[[str], None], client: str) -> None:
        try:
            work(client)
        except Exception as error:
            self.errors.append(f"{client}: {type(error).__name__}: {error}")

    def _note(
        self, client: str, key: str, action: tuple[Hashable, ...], result: Hashable, called_s: float
    ) -> None:
        answered_s = None if result == UNKNOWN else time.monotonic()
        operation = Operation(
            client=client, key=key, action=action, result=result, called_s=called_s, answered_s=answered_s
        )
        with self._news:
            self.operations.append(operation)
            self._count(answered=answered_s is not None)

    def _count(self, *, answered: bool) -> None:
        self.answered += answered
        self._news.notify_all()

    def _use_registers(self, client: str) -> None:
        chance = random.Random(f"{self._seed} {client}")
        asked = CoordinatorCasClient(self._addresses, timeout_s=ANSWER_S)
        known: dict[str, tuple[str, str] | None] = dict.fromkeys(self._keys)
        number = 0
        try:
            while not self._over.wait(self._pause_s):
                key = chance.choice(self._keys)
                called_s = time.monotonic()
                if chance.random() < 0.5:
                    try:
                        found = asked.get(key)
                    except ConnectionError:
                        self._over.wait(AWAY_PAUSE_S)
                        continue  # A read without an answer needs no explanation.
                    known[key] = (found[0].decode(), found[1]) if found is not None else None
                    self._note(client, key, ("read",), found[0].decode() if found else None, called_s)
                    continue
                number += 1
                new = f"{client}-{number}"
                before = known[key]
                expected, token = before if before is not None else (None, None)
                action = ("swap", new, expected)
                try:
                    made, body, now = asked.cas(key, new.encode(), token)
                except ConnectionError:
                    self._note(client, key, action, UNKNOWN, called_s)
                    self._over.wait(AWAY_PAUSE_S)
                    continue
                value = body.decode() if body is not None else None
                known[key] = (value, now) if value is not None and now is not None else None
                self._note(client, key, action, (made, value), called_s)
        finally:
            asked.close()

    def _save(self, client: str) -> None:
        """Of a job of its own: what is saved is the latest from then on."""
        job = f"{self._name}-{client}"
        worker = TrainingOrchestrator(self._addresses, job_id=job, timeout_s=ANSWER_S)
        try:
            self._until_answered(lambda: worker.register_worker(job))
            step = 0
            while not self._over.wait(self._pause_s):
                step += 1
                saved, called_s = step, time.monotonic()
                try:
                    worker.notify_checkpoint(f"{job}-{saved}", saved, path=f"/chaos/{saved}", size_bytes=1)
                    self._note(client, job, ("save", saved), True, called_s)
                except CoordinatorUnavailable:
                    self._note(client, job, ("save", saved), UNKNOWN, called_s)
                called_s = time.monotonic()
                try:
                    latest = worker.latest_checkpoint()
                    self._note(client, job, ("latest",), latest.step if latest else None, called_s)
                except CoordinatorUnavailable:
                    pass
        finally:
            worker.close()

    def _meet(self, client: str) -> None:
        worker = TrainingOrchestrator(self._addresses, job_id=f"{self._name}-barriers", timeout_s=ANSWER_S)
        try:
            self._until_answered(lambda: worker.register_worker(f"{self._name}-{client}"))
            step = 0
            while not self._over.wait(self._pause_s):
                step += 1
                called_s = time.monotonic()
                try:
                    result = worker.barrier("chaos", step, participants=self._members, timeout_s=60)
                except Exception:
                    if self._over.is_set():
                        return  # The others have left.
                    raise
                arrival = Arrival(
                    worker=client,
                    step=step,
                    called_s=called_s,
                    answered_s=time.monotonic(),
                    order=result.arrival_order,
                )
                with self._news:
                    self.arrivals.append(arrival)
                    self._count(answered=True)
        finally:
            with suppress(StrataError):
                worker.deregister(
                    "the run is over"
                )  # Workers that wait for it at a barrier need not wait any more.
            worker.close()

    def _until_answered(self, call: Callable[[], object]) -> None:
        while not self._over.is_set():
            try:
                call()
                return
            except CoordinatorUnavailable:
                self._over.wait(AWAY_PAUSE_S)


def barrier_violations(arrivals: Sequence[Arrival], *, members: int) -> list[str]:
    """A barrier lets no worker go before all have come, and each of them once."""
    by_step: dict[int, list[Arrival]] = defaultdict(list)
    for arrival in arrivals:
        by_step[arrival.step].append(arrival)
    found = []
    for step, those in sorted(by_step.items()):
        if len({each.order for each in those}) != len(those) or any(each.order >= members for each in those):
            found.append(
                f"the barrier of step {step} released {those}: arrival positions were assigned twice"
            )
        if len(those) == members:
            last_s = max(each.called_s for each in those)
            early = [each.worker for each in those if each.answered_s < last_s]
            if early:
                found.append(f"the barrier of step {step} released {early} before all had arrived")
    return found
