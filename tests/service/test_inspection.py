"""Files that nobody has vetted are read in processes of their own: whatever they do, the coordinator carries on."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from strata.coordinator.auth.paths import ReadRules
from strata.coordinator.auth.principals import Principal
from strata.coordinator.inspection.datasets import DatasetInspection
from strata.coordinator.inspection.processes import (
    WAITING_LIMIT,
    ChildLimits,
    InspectionProcesses,
    child_environment,
)
from strata.core.messages import InvalidArgument, Overloaded
from strata.data.errors import DataError
from strata.data.reader import discover
from tests.support import Coordinator, eventually

ADMIN = Principal(name="an admin", role="admin")
PATIENT = ChildLimits(wall_s=120, cpu_s=120)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    (tmp_path / "small.jsonl").write_text('{"a": 1}\n{"a": 2}\n')
    return tmp_path / "small.jsonl"


@pytest.fixture
def endless(tmp_path: Path) -> Path:
    """Takes minutes to look through, and no space."""
    with open(tmp_path / "endless.jsonl", "wb") as file:
        file.truncate(1 << 40)
    return tmp_path / "endless.jsonl"


def bomb(path: Path) -> Path:
    """Some kilobytes that decode to two gigabytes: one string, repeated."""
    rows = 1_000_000
    column = pa.DictionaryArray.from_arrays(pa.array(np.zeros(rows, np.int8)), ["x" * 2_000])
    pq.write_table(
        pa.table({"text": column}), path, row_group_size=rows, store_schema=False, write_statistics=False
    )
    assert path.stat().st_size < 64_000
    return path


class Watched:
    """The most memory that a process has had while this was open."""

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)
        self._end = threading.Event()
        self.before = self.most = self._process.memory_info().rss

    def __enter__(self) -> Watched:
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *args: object) -> None:
        self._end.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._end.wait(0.01):
            self.most = max(self.most, self._process.memory_info().rss)

    @property
    def growth_mib(self) -> float:
        return (self.most - self.before) / 2**20


# --- a coordinator --------------------------------------------------------------------------------------------


def preview(server: Coordinator, dataset: str, path: object, format: str) -> tuple[int, Any]:
    body = {"dataset_id": dataset, "path": str(path), "format": format, "total_samples": 2}
    assert server.post("/api/datasets", body)[0] in (200, 201)
    return server.call("GET", f"/api/datasets/{dataset}/preview")


def test_a_small_file_that_decodes_to_gigabytes_costs_the_coordinator_nothing(
    coordinator: Coordinator, small: Path, tmp_path: Path
) -> None:
    path = bomb(tmp_path / "bomb.parquet")
    assert preview(coordinator, "small", small, "jsonl")[0] == 200
    with Watched(coordinator.pid) as watched:
        status, answer = preview(coordinator, "bomb", path, "parquet")
    assert status == 422, answer
    assert "memory" in answer["message"]
    assert watched.growth_mib < 50
    assert preview(coordinator, "small", small, "jsonl")[0] == 200


def test_previews_continue_after_any_number_of_files_that_cannot_be_read(
    coordinator: Coordinator, small: Path, tmp_path: Path
) -> None:
    (tmp_path / "broken.csv").write_bytes(b"\xff\xfe,\n\x00")
    (tmp_path / "broken.parquet").write_bytes(b"PAR1" + b"\0" * 100 + b"PAR1")
    for number, (path, format) in enumerate(
        [("/proc/version", "csv"), ("/proc/loadavg", "csv")]  # Longer than they say they are.
        + [(str(tmp_path / name), name.partition(".")[2]) for name in ("broken.csv", "broken.parquet")]
    ):
        status, answer = preview(coordinator, f"broken-{number}", path, format)
        assert status in (403, 422), answer
        assert answer["message"]
    status, answer = preview(coordinator, "small", small, "jsonl")
    assert (status, len(answer["samples"])) == (200, 2)
    assert "Traceback" not in "".join(coordinator.output)


def test_a_coordinator_that_stops_leaves_no_reader_behind(coordinator: Coordinator, endless: Path) -> None:
    body = {"dataset_id": "endless", "path": str(endless), "format": "jsonl"}
    asking = threading.Thread(target=lambda: _try(coordinator, body))
    asking.start()
    process = psutil.Process(coordinator.pid)
    readers = eventually(lambda: process.children(), within_s=60)
    coordinator.stop()
    asking.join(60)
    assert not psutil.wait_procs(readers, timeout=60)[1]


def test_a_killed_coordinator_takes_its_readers_along(coordinator: Coordinator, endless: Path) -> None:
    body = {"dataset_id": "endless", "path": str(endless), "format": "jsonl"}
    asking = threading.Thread(target=lambda: _try_until_it_is_gone(coordinator, body))
    asking.start()
    process = psutil.Process(coordinator.pid)

    def reading() -> list[psutil.Process]:
        with suppress(psutil.NoSuchProcess):  # One ends, and the next begins.
            return [c for c in process.children() if str(endless) in [file.path for file in c.open_files()]]
        return []

    readers = eventually(reading, within_s=60, what="it reads")
    coordinator.kill()
    asking.join(60)
    eventually(lambda: all(_has_ended(reader) for reader in readers), within_s=60)


def _has_ended(process: psutil.Process) -> bool:
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)  # Whoever inherits it may leave it at that.
    except psutil.NoSuchProcess:
        return True


def _try(server: Coordinator, body: dict[str, Any]) -> None:
    with suppress(OSError):  # It is cut.
        server.post("/api/datasets", body)


def _try_until_it_is_gone(server: Coordinator, body: dict[str, Any]) -> None:
    """Again and again: a busy machine may not even start a reader within its time."""
    with suppress(OSError):  # It is cut.
        while True:
            with suppress(TimeoutError):
                server.post("/api/datasets", body)


# --- the processes --------------------------------------------------------------------------------------------


async def count(inspection: DatasetInspection, path: Path, name: str = "an admin") -> int:
    total, _ = await inspection.count(str(path), "jsonl", None, Principal(name=name, role="admin"))
    return total


async def test_what_takes_too_long_is_given_up_and_its_place_is_free_again(
    small: Path, endless: Path
) -> None:
    processes = InspectionProcesses(at_once=1)
    hasty = DatasetInspection(processes, limits=ChildLimits(wall_s=3))
    for _ in range(2):
        with pytest.raises(InvalidArgument, match=r"could not be read within 3 s"):
            await count(hasty, endless)
        assert processes.running == 0
    assert await count(DatasetInspection(processes, limits=PATIENT), small) == 2


async def test_processor_time_is_limited(endless: Path) -> None:
    lazy = DatasetInspection(InspectionProcesses(), limits=ChildLimits(wall_s=120, cpu_s=1))
    with pytest.raises(InvalidArgument, match="more than 1 s of processor time"):
        await count(lazy, endless)


async def test_one_client_waits_for_itself_and_no_other_does(small: Path, endless: Path) -> None:
    processes = InspectionProcesses(at_once=2)
    inspection = DatasetInspection(processes, limits=PATIENT)
    slow = asyncio.create_task(count(inspection, endless, "a client"))
    mine = asyncio.create_task(count(inspection, small, "a client"))
    assert await count(inspection, small, "another") == 2
    assert not mine.done()
    assert processes.running == 1
    processes.close()
    with pytest.raises(InvalidArgument, match="was killed"):
        await slow
    assert await mine == 2


async def test_calls_of_one_client_do_not_pile_up(endless: Path) -> None:
    processes = InspectionProcesses()
    inspection = DatasetInspection(processes, limits=PATIENT)
    request: dict[str, Any] = {"kind": "count", "path": str(endless), "format": "jsonl"}
    scope = ReadRules().scope_of(ADMIN)

    async def ask() -> None:
        await processes.run(request, field="path", scope=scope, client="one", limits=PATIENT, hint="")

    asked = [asyncio.create_task(ask()) for _ in range(WAITING_LIMIT + 1)]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded):
        await count(inspection, endless, "one")
    for task in asked:
        task.cancel()
    await asyncio.gather(*asked, return_exceptions=True)
    assert processes.running == 0


async def test_many_who_register_the_same_files_are_one_count(small: Path) -> None:
    inspection = DatasetInspection(InspectionProcesses(at_once=1), limits=PATIENT)
    started_s = time.monotonic()
    assert await asyncio.gather(*(count(inspection, small) for _ in range(200))) == [2] * 200
    assert time.monotonic() - started_s < 60


async def test_only_the_files_with_the_samples_are_opened(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_text("".join(f'{{"of": "{name}{n}"}}\n' for n in range(3)))
    inspection = DatasetInspection(InspectionProcesses(), limits=PATIENT)
    total, files = await inspection.count(str(tmp_path), "jsonl", None, ADMIN)
    assert (total, [file.samples for file in files]) == (6, [3, 3])
    os.unlink(tmp_path / "a.jsonl")
    found = await inspection._processes.run(
        {
            "kind": "preview",
            "path": str(tmp_path),
            "format": "jsonl",
            "metadata": {},
            "indices": [4, 3],
            "files": [(files[1].path, 3, [(4, 1), (3, 0)])],
        },
        field="dataset",
        scope=ReadRules().scope_of(ADMIN),
        client="x",
        limits=PATIENT,
        hint="",
    )
    assert [row["of"]["value"] for row in found] == ["b1", "b0"]


def test_a_reader_gets_credentials_of_stores_and_none_of_the_coordinator() -> None:
    given = {
        "PATH": "/bin",
        "STRATA_TOKEN": "secret",
        "STRATA_SIGNING_KEY": "secret",
        "DATABASE_URL": "secret",
        "AWS_ACCESS_KEY_ID": "id",
        "GOOGLE_APPLICATION_CREDENTIALS": "/key.json",
        "AZURE_STORAGE_ACCOUNT_NAME": "name",
    }
    found = child_environment(given)
    assert "secret" not in found.values()
    assert {name for name in given if name in found} == {
        "PATH",
        "AWS_ACCESS_KEY_ID",
        "GOOGLE_APPLICATION_CREDENTIALS",
        "AZURE_STORAGE_ACCOUNT_NAME",
    }


def test_a_csv_that_is_longer_than_it_says_is_a_data_error() -> None:
    with pytest.raises(DataError, match="changes while it is read"):
        discover("/proc/version", "csv")
