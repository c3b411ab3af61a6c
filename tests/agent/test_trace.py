"""The moments that runs leave in shared memory, and the end of those that nobody will ask for."""

from __future__ import annotations

import os
import struct
import time
from pathlib import Path

import pytest

from strata.agent.trace import KEPT_S, Footprints, last_footprint, note_rendezvous
from strata.shared_memory import folder_name, folders_of, job_folder, run_folder

LONG_AGO_S = time.monotonic() - KEPT_S - 60.0


@pytest.fixture
def name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Of a run in a place of its own: any run that begins beside this test would remove what looks old here."""
    monkeypatch.setenv("STRATA_MEMORY_ROOT", str(tmp_path))
    return "trace"


def left_by_a_killed_run(name: str, *moments: float, mtime_s: float | None = None) -> Path:
    folder = run_folder(name)
    folder.mkdir(parents=True)
    for rank, moment in enumerate(moments):
        (folder / f"rank-{rank}").write_bytes(struct.pack("<ddqq", moment, moment - 10.0, 5, len(moments)))
    if mtime_s is not None:
        os.utime(folder, (mtime_s, mtime_s))
    return folder


@pytest.mark.parametrize("by", ["a worker", "an agent"])
def test_a_new_run_removes_what_runs_killed_more_than_a_day_ago_left(name: str, by: str) -> None:
    yesterday_s = time.time() - KEPT_S - 60.0
    gone = [
        left_by_a_killed_run(f"{name}-old", LONG_AGO_S, LONG_AGO_S + 1.0),
        left_by_a_killed_run(f"{name}-earlier-boot", time.monotonic() + 3_600.0),
        left_by_a_killed_run(f"{name}-never-stepped", 0.0, mtime_s=yesterday_s),
    ]
    kept = [
        # One rank of two still trains; its file's time says nothing, for it is written through a mapping.
        left_by_a_killed_run(f"{name}-alive", LONG_AGO_S, time.monotonic(), mtime_s=yesterday_s),
        left_by_a_killed_run(f"{name}-just-begun"),
    ]
    own = left_by_a_killed_run(name, LONG_AGO_S)  # Somebody may be about to go on from it.
    if by == "a worker":
        Footprints(name, rank=1).close()
    else:
        note_rendezvous(name, time.monotonic(), time.monotonic())
    assert [path for path in gone if path.exists()] == []
    assert [path for path in (*kept, own) if not path.exists()] == []
    found = last_footprint(name)
    assert found is not None
    assert found.step == 5


@pytest.mark.parametrize("job", ["task-0a1b2c3d4e5f", "a b/c", "../up", "..", "Größe", "x" * 300])
def test_a_job_of_any_name_has_its_place_below_the_folders_of_its_user(job: str) -> None:
    *values, images, on_disk, moments = folders_of(job)
    assert [folder.parent for folder in values] == ([job_folder(job)] if job.startswith("task-") else [])
    assert images == job_folder(folder_name(job))
    assert moments == run_folder(job)
    assert on_disk.name == images.name
    for folder in (images, on_disk, moments):
        assert str(os.getuid()) in folder.resolve().parent.name
