"""The places of a machine's ranks, and the images that each leaves there: what is in a place stays when its rank changes."""

from __future__ import annotations

import os
from pathlib import Path

from strata.checkpoint.catalog.manifest import Manifest
from strata.checkpoint.copying.staging import find_snapshots
from strata.shared_memory import folder_name, images_folder, job_folder, memory_roots, remove_job
from strata.training.exchange import rank_and_world


def own_slot() -> int:
    """This rank's place on its machine."""
    return int(os.environ.get("LOCAL_RANK", rank_and_world()[0]))


def slot_name(run: str, slot: int) -> str:
    """What a rank's images are called in its machine's memory: the next process in the same place finds them, whatever its rank."""
    return folder_name(f"s{slot}-{run}")


def left_over_images(run: str, *, root: Path | None, local_world_size: int) -> list[tuple[str, Manifest]]:
    """Images of this run that no process of this machine will take over, because there are fewer now: path and manifest."""
    found: list[tuple[str, Manifest]] = []
    for name in _left_over_slots(run, root=root, local_world_size=local_world_size):
        found += [(str(s.path), s.manifest) for s in find_snapshots(name, root=root)]
    return found


def drop_left_over(run: str, *, root: Path | None, local_world_size: int) -> None:
    """Give their memory back: there is a newer snapshot."""
    for name in _left_over_slots(run, root=root, local_world_size=local_world_size):
        for each in memory_roots(root):
            remove_job(job_folder(name, root=each))


def _left_over_slots(run: str, *, root: Path | None, local_world_size: int) -> set[str]:
    found = set()
    for each in memory_roots(root):
        folder = images_folder(each)
        for name in os.listdir(folder) if folder.is_dir() else ():
            number = name.removeprefix("job-s").partition("-")[0]
            if number.isdecimal() and int(number) >= local_world_size and name == slot_name(run, int(number)):
                found.add(name)
    return found


def local_world_size() -> int:
    """How many ranks this machine has; where that is not set, as many as there are."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", rank_and_world()[1]))
