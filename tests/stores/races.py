"""What every store promises to several threads and processes at once, and to those that are killed."""

from __future__ import annotations

import itertools
import json
import os
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from strata.stores import AlreadyExists, Store
from tests.stores import actor
from tests.stores.suite import SOAK, Place, StoreSuite


class RacesAndKills(StoreSuite):
    @pytest.mark.parametrize("size_bytes", [5, 200_000])
    def test_exactly_one_thread_wins(self, store: Store, size_bytes: int) -> None:
        racers = self.threads_in_race
        for number in range(4):
            gate = threading.Barrier(racers)

            def attempt(
                racer: int, key: str = f"prize-{number}", gate: threading.Barrier = gate
            ) -> int | None:
                gate.wait(30)
                try:
                    store.put(key, actor.value_of(racer, size_bytes), if_absent=True)
                except AlreadyExists:
                    return None
                return racer

            with ThreadPoolExecutor(racers) as pool:
                winners = [winner for winner in pool.map(attempt, range(racers)) if winner is not None]
            assert len(winners) == 1
            assert store.read(f"prize-{number}") == actor.value_of(winners[0], size_bytes)

    def test_exactly_one_process_wins(self, store: Store, place: Place) -> None:
        rounds = 30
        racers = [
            actor.start("race", place.url, place.options, name=f"racer-{number}", rounds=rounds)
            for number in range(self.processes_in_race)
        ]
        try:
            for racer in racers:
                assert racer.stdout is not None
                assert racer.stdout.readline() == "ready\n"
            for racer in racers:
                assert racer.stdin is not None
                racer.stdin.write("go\n")
                racer.stdin.flush()
            winner_of: dict[int, str] = {}
            for number, racer in enumerate(racers):
                out, _ = racer.communicate(timeout=120)
                for won in json.loads(out):
                    assert won not in winner_of, f"{winner_of[won]} and racer-{number} both won {won}"
                    winner_of[won] = f"racer-{number}"
        finally:
            _end(racers)
        assert sorted(winner_of) == list(range(rounds))
        for number, name in winner_of.items():
            assert store.read(f"prize-{number}") == name.encode()

    # --- atomicity and durability ---

    def test_a_reader_never_sees_half_a_write(self, store: Store) -> None:
        size_bytes = 300_000
        store.put("k", actor.value_of(0, size_bytes))
        seen_enough = threading.Event()

        def keep_writing() -> None:
            number = 0
            while not seen_enough.is_set():
                number += 1
                store.put("k", actor.value_of(number, size_bytes))

        with ThreadPoolExecutor(1) as pool:
            writing = pool.submit(keep_writing)
            try:
                seen: set[bytes] = set()
                while len(seen) < 10 and not writing.done():
                    value = store.read("k")
                    assert actor.is_intact(value, size_bytes)
                    seen.add(value[-2:])
            finally:
                seen_enough.set()
            writing.result()

    def test_what_was_put_survives_the_process(self, store: Store, place: Place) -> None:
        store.put("before", b"x")
        child = actor.start("put_and_die", place.url, place.options, key="k", size_bytes=self.large_bytes)
        try:
            assert child.wait(120) == -9
        finally:
            _end([child])
        assert store.read("k") == actor.value_of(7, self.large_bytes)

    def test_killed_at_any_point_a_put_happened_or_did_not(self, store: Store, place: Place) -> None:
        seed = int(os.environ.get("STRATA_SEED", "11"))
        print(f"STRATA_SEED={seed}")
        chance = random.Random(seed)
        size_bytes = self.large_bytes // 4
        caught_half_way = 0
        past: set[str] = set()
        for number in itertools.count():
            if number >= self.kill_rounds * SOAK and (caught_half_way or not self.shows_half_writes):
                break
            assert number < 5 * self.kill_rounds * SOAK, "no write was killed half-way: this test saw nothing"
            # A server may still finish what the dead had asked of it: each round has a key of its own.
            key = f"k{number}"
            child = actor.start("keep_putting", place.url, place.options, key=key, size_bytes=size_bytes)
            try:
                assert child.stdout is not None
                said = [child.stdout.readline()]
                for _ in range(chance.randrange(1, 3)):
                    began_s = time.monotonic()
                    said.append(child.stdout.readline())  # It wrote one,
                    elapsed_s = time.monotonic() - began_s
                    said.append(child.stdout.readline())  # and is writing the next.
                # Any point of that is as good as another.
                threading.Event().wait(chance.random() * elapsed_s * 1.2)
                child.kill()
                said += child.stdout.read().splitlines(keepends=True)
                child.wait(30)
            finally:
                _end([child])
            acknowledged = [
                int(line.split()[1]) for line in said if line.startswith("wrote") and line.endswith("\n")
            ]
            attempted = [
                int(line.split()[1]) for line in said if line.startswith("writing") and line.endswith("\n")
            ]
            caught_half_way += bool(self.unfinished(place))
            reopened = self.open(place)
            value = reopened.read(key)
            assert actor.is_intact(value, size_bytes)
            assert acknowledged[-1] <= int.from_bytes(value[-2:], "big") <= attempted[-1]
            assert [blob.key for blob in reopened.list() if blob.key not in past] == [key]
            assert self.unfinished(place) == []
            store.delete(key)
            past.add(key)


def _end(children: list[Any]) -> None:
    for child in children:
        child.kill()
        child.wait(60)
        for pipe in (child.stdin, child.stdout):
            if pipe is not None:
                pipe.close()
