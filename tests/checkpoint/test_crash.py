"""Killing a trainer at any point of a save. What it had reported complete loads; what is found is complete.

`STRATA_CRASHES` sets how many kills there are, `STRATA_SEED` repeats a run.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from strata.checkpoint.catalog.listing import Catalog
from strata.checkpoint.copying.staging import find_snapshots
from strata.checkpoint.image.reading import fetched, open_image, verify
from strata.shared_memory import job_folder, remove_tree
from strata.stores import open_store
from tests.checkpoint.crash_actor import KEPT
from tests.checkpoint.states import assert_is_step

CRASHES = int(os.environ.get("STRATA_CRASHES", "240"))
SEED = int(os.environ.get("STRATA_SEED", "0")) or random.randrange(1 << 30)


class Actor:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._orders, self._answers = process.stdin, process.stdout
        assert self._answers.readline() == "ready\n"

    def begin(self, **order: Any) -> int:
        self._orders.write(json.dumps(order) + "\n")
        self._orders.flush()
        return int(json.loads(self._answers.readline())["pid"])

    def end(self) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self._answers.readline())
        return answer


@contextmanager
def acting() -> Iterator[Actor]:
    command = [sys.executable, "-m", "tests.checkpoint.crash_actor"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield Actor(process)
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(120) == 0


@pytest.fixture
def fast_folder() -> Iterator[Path]:
    """A kill loses nothing that was written to a file, flushed or not; on tmpfs there is time for more kills."""
    with tempfile.TemporaryDirectory(prefix="strata-test-", dir="/dev/shm") as folder:
        yield Path(folder) / "checkpoints"


@pytest.mark.timeout(600 if CRASHES <= 300 else 0)
@pytest.mark.parametrize("stem", ["unique", "step"])
def test_killed_at_any_point_what_was_reported_loads_and_what_is_found_is_intact(
    fast_folder: Path, job: str, stem: str
) -> None:
    folder = fast_folder
    chance = random.Random(SEED)
    seen: dict[str, int] = {}
    newest: dict[str, Any] | None = None
    try:
        with acting() as actor:
            for number in range(CRASHES // 2):
                note = f"STRATA_SEED={SEED}, crash {number} of {stem}"
                mode = chance.choice(["kill", "fault"])
                pid = actor.begin(
                    folder=str(folder), job=job, mode=mode, stem=stem, seed=chance.randrange(1 << 30)
                )
                if mode == "kill":
                    time.sleep(chance.uniform(0.005, 0.15))  # The random point in time is the test.
                    os.kill(pid, signal.SIGKILL)
                answer = actor.end()
                assert answer["signal"] == signal.SIGKILL, (note, answer)
                for fact in answer["facts"]:
                    assert fact["what"] not in ("failed", "died"), (note, fact)
                    if fact["what"] == "restored":
                        seen[fact["tier"]] = seen.get(fact["tier"], 0) + 1
                        assert newest is None or fact["step"] >= newest["step"], (note, fact, newest)
                        assert not fact["reasons"], (note, fact)
                    elif fact["what"] == "started empty":
                        assert newest is None, note
                    else:
                        newest = fact
                check_store(folder, newest, note)
                check_memory(job, note)
    finally:
        remove_tree(job_folder(job))
    assert seen.get("MEMORY", 0) > 5, seen  # Snapshots in memory did outlive their processes.
    assert newest is not None


def check_store(folder: Path, newest: dict[str, Any] | None, note: str) -> None:
    if not folder.exists():
        assert newest is None, note
        return
    store = open_store(folder)
    listing = Catalog(store).list()
    assert not listing.problems, note
    for entry in listing.entries:
        manifest = entry.manifest
        with fetched(store, manifest.parts[0], manifest) as held:
            assert_is_step(open_image(held.path, manifest), manifest.step)
    if newest is not None:
        found = {entry.manifest.checkpoint_id: entry.manifest.digest for entry in listing.entries}
        newer = [entry for entry in listing.entries if entry.manifest.step > newest["step"]]
        # It makes space for newer ones only: of those that were killed before they could report.
        made_room = newest["id"] not in found and len(newer) >= KEPT
        assert made_room or found.get(newest["id"]) == newest["digest"], (note, newest, found)
    files = [path for path in folder.rglob("*") if path.is_file()]
    # Those kept, one being removed, one being written: payload, manifest, claim and temporary files of each.
    assert len(files) <= (KEPT + 2) * 4, (note, sorted(map(str, files)))


def check_memory(job: str, note: str) -> None:
    # One that is killed while it takes over what the last one left has an empty folder besides.
    holders = [path for path in job_folder(job).glob("*") if path.is_dir() and any(path.iterdir())]
    assert len(holders) <= 1, (note, holders)
    for snapshot in find_snapshots(job):
        part = snapshot.manifest.parts[0]
        verify(memoryview(snapshot.path.read_bytes()), part, snapshot.manifest, path=str(snapshot.path))
        assert_is_step(open_image(snapshot.path, snapshot.manifest), snapshot.manifest.step)
