"""Functions over samples that drop some and split others, with positions that stay where they are.

    kept = strata.data.filtered(dataset, lambda row: row["quality"] > 0.5)
    parts = strata.data.mapped(dataset, lambda row: split_into_paragraphs(row["text"]))

A position belongs to the sample of the source, not to what a function makes of it: what was dropped counts as trained when
its batch does, and what was split is trained together. So nothing about exactness, resuming or worlds depends on what
functions do; only a batch has fewer or more samples than positions. Functions must give the same for the same sample.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from strata.data.errors import DataError
from strata.data.loading.steps import SizedDataset
from strata.data.streaming.prefetch import Ahead, FetchesAhead, ahead_of

LOOKED_AT = 1_000


class Several(tuple[Any, ...]):
    """The result of one sample: none, one or several. Any dataset may return it in place of a sample."""


class MappedDataset(FetchesAhead):
    """The samples of another dataset through a function that gives none, one or several for each."""

    def __init__(self, dataset: SizedDataset, function: Callable[[Any], Iterable[Any]]) -> None:
        self._dataset = dataset
        self._function = function

    @property
    def is_remote(self) -> bool:
        return bool(getattr(self._dataset, "is_remote", False))

    def ahead(self) -> Ahead | None:
        return ahead_of(self._dataset)

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, sample: int) -> Several:
        return self._apply(self._dataset[sample])

    def __getitems__(self, samples: Sequence[int]) -> list[Several]:
        many = getattr(self._dataset, "__getitems__", None)
        rows = many(samples) if many is not None else [self._dataset[sample] for sample in samples]
        return [self._apply(row) for row in rows]

    def _apply(self, row: Any) -> Several:
        rows = row if isinstance(row, Several) else (row,)
        return Several(result for each in rows for result in self._function(each))


def mapped(dataset: SizedDataset, function: Callable[[Any], Iterable[Any]]) -> MappedDataset:
    """`function` gives an iterable of samples for each sample: empty to drop it, several to split it."""
    return MappedDataset(dataset, function)


def filtered(dataset: SizedDataset, keep: Callable[[Any], bool]) -> MappedDataset:
    """Only the samples for which `keep` returns true."""
    return MappedDataset(dataset, _Filter(keep))


class _Filter:
    """Not a closure: loader processes may have to unpickle it."""

    def __init__(self, keep: Callable[[Any], bool]) -> None:
        self._keep = keep

    def __call__(self, row: Any) -> tuple[Any, ...]:
        return (row,) if self._keep(row) else ()


class Kept(list[Any]):
    """Samples of one batch, where that is not one for each position."""

    def __init__(self, rows: Iterable[Any], kept: int) -> None:
        super().__init__(rows)
        self.kept = kept
        """How many there are; 0 where all were dropped and another sample stands in for them."""


def flattened(rows: list[Any], read: Callable[[int], Any], ids: Sequence[int], total: int) -> list[Any]:
    """The samples of a batch as the trainer gets them. Where all were dropped, the next sample that is not stands in for
    them with weight 0: the rank takes part in the step's collectives and adds nothing to the gradient."""
    if not any(isinstance(row, Several) for row in rows):
        return rows
    flat = [each for row in rows for each in (row if isinstance(row, Several) else (row,))]
    if flat:
        return Kept(flat, len(flat))
    for ahead in range(1, min(total, LOOKED_AT) + 1):
        row = read((ids[-1] + ahead) % total)
        found = row if isinstance(row, Several) else (row,)
        if found:
            return Kept(found[:1], 0)
    raise DataError(
        f"All samples of a batch were dropped, and so were the next {min(total, LOOKED_AT):,}.",
        hint="Check the filter: it drops almost everything.",
    )
