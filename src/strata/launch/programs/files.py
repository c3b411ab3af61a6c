"""The files of a task's dataset, as this machine sees them."""

from __future__ import annotations

from strata.data.errors import DataError
from strata.data.sources import find, is_remote
from strata.launch.context import TaskDataset

TEXT_SUFFIXES = (".jsonl", ".ndjson", ".json", ".txt", ".text", ".md", ".parquet", ".pq", ".gz")


def dataset_files(dataset: TaskDataset) -> list[str]:
    """Raises `DataError` where there is none, or where they are not on this machine."""
    if is_remote(dataset.path):
        raise DataError.at(
            dataset.path,
            "text is read from local disks, and this path is remote",
            hint="Copy it here, or register a recipe that reads it where it is.",
        )
    return list(dataset.files) or [ref.path for ref in find(dataset.path, TEXT_SUFFIXES)]
