"""The folder an index is built in belongs to one build, until nothing of it is left."""

from __future__ import annotations

import threading
from pathlib import Path

from strata.data.tokens.building import workfolder

PLAN = b"the same plan"


def test_who_gets_a_folder_that_is_being_removed_finds_nothing_of_the_build_before(tmp_path: Path) -> None:
    output = tmp_path / "x.index"
    lock = tmp_path / "x.index.partial" / "lock"
    found: list[list[str]] = []

    def next_build() -> None:
        while lock.exists():
            pass  # It comes while the folder is going.
        with workfolder.locked(output) as folder:
            found.append([path.name for path in workfolder.for_plan(folder, PLAN).iterdir()])

    with workfolder.locked(output) as folder:
        place = workfolder.for_plan(folder, PLAN)
        for number in range(3_000):
            (place / str(number)).touch()
        thread = threading.Thread(target=next_build)
        thread.start()
        workfolder.remove(folder)
    thread.join()
    assert found == [[]]
