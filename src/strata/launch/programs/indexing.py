"""The recipe `indexing`: the token index of a text dataset, made once. A stopped one continues where it was."""

from __future__ import annotations

import sys
from contextlib import ExitStack

from strata.core.text import as_identifier
from strata.data.errors import DataError
from strata.data.streaming.sources import find, is_remote
from strata.data.tokens.building.builder import BuildOptions, build_index
from strata.errors import StrataError
from strata.launch.context import TaskDataset, current_task
from strata.launch.programs.presence import Presence

KIB = 1024
TEXT_SUFFIXES = (".jsonl", ".ndjson", ".json", ".txt", ".text", ".md", ".parquet", ".pq", ".gz")


class _Progress:
    """Steps are KiB of the sources."""

    def __init__(self, presence: Presence) -> None:
        self._presence = presence
        self._done = self._total = 0

    def begin(self, *, total_bytes: int, done_bytes: int) -> None:
        self._total, self._done = total_bytes, done_bytes
        self._report()

    def advance(self, *, source_bytes: int, tokens: int) -> None:
        self._done += source_bytes
        self._report()

    def _report(self) -> None:
        self._presence.report(self._done // KIB, max(1, self._total // KIB))


def dataset_files(dataset: TaskDataset) -> list[str]:
    """Raises `DataError` where there is none, or where they are not on this machine."""
    if is_remote(dataset.path):
        raise DataError.at(
            dataset.path,
            "text is read from local disks, but this path is remote",
            hint="Copy it to this machine, or register a recipe that reads it remotely.",
        )
    return list(dataset.files) or [ref.path for ref in find(dataset.path, TEXT_SUFFIXES)]


def main() -> None:
    try:
        task = current_task()
        assert task.dataset is not None, "the recipe needs one"
        with ExitStack() as stack:
            presence = stack.enter_context(Presence(task))
            options = BuildOptions(
                text_key=task.config["text_key"], on_bad=task.config["on_bad"], workers=task.worker_count
            )
            report = build_index(
                dataset_files(task.dataset),
                task.task_dir / f"{as_identifier(task.dataset.id)}.index",
                tokenizer=task.config["tokenizer"],
                options=options,
                progress=_Progress(presence),
            )
    except StrataError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        sys.exit(2)
    print("\n".join(report.lines()), flush=True)


if __name__ == "__main__":
    main()
