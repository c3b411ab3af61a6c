"""A loader that knows what the trainer has taken, whatever its workers have read ahead.

    loader = ElasticLoader(dataset, sampler, num_workers=4, pin_memory=True, persistent_workers=True)
    for batch in loader:
        loss = criterion(model(batch.data)) * batch.step.weight
        ...

`ElasticLoader` puts PyTorch's `DataLoader` under an `ElasticSampler` (map-style datasets) or an `ElasticIterableDataset` and
tags every batch with its positions. `state_dict` counts the batches that were handed to the trainer; with
`commit="explicit"` only those it passed to `commit`, one by one or, where gradients are accumulated over several, all at
once when the optimizer has stepped. Prefetched batches that were never consumed are read again after a resume, and are
nowhere in the ledger. So are batches that were not committed when a loop is left and another started; a loop that read to
the epoch's end is not left, and the next one reads the next epoch. What loader processes draw at random for a sample does
not depend on them either: see `strata.data.loading.draws`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from multiprocessing.context import BaseContext
from typing import Any, Literal, NamedTuple, TypedDict, Unpack

from strata.data.composing.mapping import Kept, flattened
from strata.data.errors import StateMismatch
from strata.data.iterable import ElasticIterableDataset
from strata.data.loading.draws import read_samples, seed_at
from strata.data.loading.sampler import ElasticSampler, WithSampler
from strata.data.loading.steps import Batch, MapDataset, Step, ThinnedBatch
from strata.data.streaming.prefetch import Prefetcher, ahead_of
from strata.errors import MissingDependency

try:
    import torch
    from torch.utils.data import DataLoader, default_collate
except ImportError as error:
    raise MissingDependency("torch", extra="torch", feature="ElasticLoader") from error

from strata.data.loading.workers import end_with_trainer


class MoreLoaderOptions(TypedDict, total=False):
    """What loaders pass to PyTorch's `DataLoader` beside `num_workers`."""

    collate_fn: Callable[[list[Any]], Any] | None
    pin_memory: bool
    timeout: float
    worker_init_fn: Callable[[int], None] | None
    multiprocessing_context: str | BaseContext | None
    generator: torch.Generator | None
    prefetch_factor: int | None
    persistent_workers: bool
    pin_memory_device: str
    in_order: bool


class LoaderOptions(MoreLoaderOptions, total=False):
    """What `ElasticLoader` passes to PyTorch's `DataLoader`."""

    num_workers: int


class ElasticLoader(WithSampler):
    """Batches of one rank from the committed position to the end of the epoch; then the next epoch."""

    def __init__(
        self,
        dataset: MapDataset | ElasticIterableDataset,
        sampler: ElasticSampler | None = None,
        *,
        commit: Literal["taken", "explicit"] = "taken",
        **dataloader_options: Unpack[LoaderOptions],
    ) -> None:
        """`dataset` is any map-style dataset, or an `ElasticIterableDataset`, which has its own sampler.
        `dataloader_options` go to PyTorch's `DataLoader` as they are:
        `num_workers`, `collate_fn`, `pin_memory`, `persistent_workers`, `prefetch_factor` and the like."""
        if commit not in ("taken", "explicit"):
            raise ValueError(f"commit must be 'taken' or 'explicit', not {commit!r}")
        if dataloader_options.get("in_order") is False:
            raise ValueError("in_order=False would hand out batches in another order than the epoch's")
        # DataLoader draws a seed for its processes at every iteration; from the global generator, a resumed run would
        # see other random numbers than an undisturbed one.
        self._generator = None if "generator" in dataloader_options else torch.Generator()
        dataloader_options.setdefault("generator", self._generator)
        # A client of object storage does not survive a fork.
        if dataloader_options.get("num_workers") and getattr(dataset, "is_remote", False):
            dataloader_options.setdefault("multiprocessing_context", "spawn")
        end_with_trainer()
        self._explicit = commit == "explicit"
        self._iterations = 0
        self._iterable = dataset if isinstance(dataset, ElasticIterableDataset) else None
        self._loader: DataLoader[Any]
        if self._iterable is not None:
            if sampler is not None:
                raise ValueError("an ElasticIterableDataset has its own sampler")
            self.sampler = self._iterable.sampler
            self._loader = DataLoader(self._iterable, batch_size=None, **dataloader_options)
        else:
            if sampler is None:
                raise ValueError("a map-style dataset needs an ElasticSampler")
            self.sampler = sampler
            self._tagged = _Tagged(sampler, dataset, in_memory=not dataloader_options.get("num_workers"))
            samples = _Samples(dataset, sampler)
            dataloader_options["collate_fn"] = _Collate(
                dataloader_options.get("collate_fn") or default_collate
            )
            self._loader = DataLoader(samples, batch_sampler=self._tagged, **dataloader_options)  # type: ignore[arg-type]

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[Batch]:
        self._iterations += 1
        this = self._iterations
        start = self.sampler.begin()
        if not len(self.sampler.plan(start)):
            self.sampler.close_if_done()
            return
        for batch in self._read(start):
            if not self._explicit:
                self.sampler.commit(batch.step)
            yield batch
            if this != self._iterations:  # They would share the loader processes and what those read ahead.
                raise StateMismatch(
                    "Another iteration of this loader has started since.", hint="Use one iteration at a time."
                )
        if self._explicit:
            self.sampler.read_to_end(start[0])

    def _read(self, start: tuple[int, int]) -> Iterator[Batch]:
        if self._generator is not None:
            self._generator.manual_seed(seed_at(self.sampler, *start))
        if self._iterable is not None:
            self._iterable.publish(start)
            yield from self._loader
        else:
            read_ahead = self._tagged.read_ahead = deque()
            self._tagged.start = start
            for data in self._loader:
                step = read_ahead.popleft()
                if isinstance(data, _Thinned):
                    yield ThinnedBatch.of(data.data, step, data.kept)
                else:
                    yield Batch(data, step)

    def commit_explicitly(self) -> None:
        """From now on, only `commit` advances the position."""
        self._explicit = True

    def commit(self, *batches: Batch) -> None:
        """Mark these batches as trained; commit each once, in the order received. With `commit="explicit"`, nothing else
        advances the position."""
        if self._explicit:
            for batch in batches:
                self.sampler.commit(batch.step)


class _Samples:
    """The user's dataset, asked for the samples of one epoch. To a `worker_init_fn` it looks like the user's own."""

    __slots__ = ("_own", "_sampler")

    def __init__(self, own: Any, sampler: ElasticSampler) -> None:
        self._own = own
        self._sampler = sampler

    def __getitems__(self, batch: tuple[int, list[int]]) -> list[Any]:
        epoch, ids = batch
        rows = read_samples(self._own, ids, self._sampler, epoch)
        return flattened(rows, lambda id: self._own[id], ids, self._total)

    @property
    def _total(self) -> int:
        mixture = self._sampler.mixture
        return self._sampler.total if mixture is None else mixture.mixture.samples_in_sources

    def __len__(self) -> int:
        return len(self._own)

    def __getattr__(self, name: str) -> Any:
        if name in self.__slots__ or name.startswith("__"):  # Not there yet while it is unpickled.
            raise AttributeError(name)
        return getattr(self._own, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__slots__:
            object.__setattr__(self, name, value)
        else:
            setattr(self._own, name, value)


class _Thinned(NamedTuple):
    """A batch on its way from a loader process, of which some was dropped or split."""

    data: Any
    kept: int


class _Collate:
    """The user's way of making a batch of samples."""

    def __init__(self, own: Callable[[list[Any]], Any]) -> None:
        self._own = own

    def __call__(self, rows: list[Any]) -> Any:
        if isinstance(rows, Kept):
            return _Thinned(self._own(list(rows)), rows.kept)
        return self._own(rows)


class _Tagged:
    """The batch sampler that `DataLoader` sees: notes each step as its ids go to the workers. `DataLoader`
    hands batches back in the same order."""

    def __init__(self, sampler: ElasticSampler, dataset: MapDataset, *, in_memory: bool) -> None:
        self._sampler = sampler
        self._dataset = dataset
        self._in_memory = in_memory
        self.read_ahead: deque[Step] = deque()
        self.start: tuple[int, int] | None = None

    def __iter__(self) -> Iterator[tuple[int, list[int]]]:
        read_ahead = self.read_ahead
        batches = self._sampler.batches(at=self.start)
        if (ahead := ahead_of(self._dataset)) is not None:
            batches = _prefetched(batches, Prefetcher(ahead, in_memory=self._in_memory))
        for step, ids in batches:
            read_ahead.append(step)
            yield step.epoch, ids

    def __len__(self) -> int:
        return len(self._sampler)


def _prefetched(
    batches: Iterator[tuple[Step, list[int]]], prefetcher: Prefetcher
) -> Iterator[tuple[Step, list[int]]]:
    """The same batches, each announced to the prefetcher some batches before."""
    announced: deque[tuple[Step, list[int]]] = deque()
    try:
        for batch in batches:
            prefetcher.put(batch[1])
            announced.append(batch)
            if len(announced) > prefetcher.batches_ahead(len(batch[1])):
                yield announced.popleft()
        yield from announced
    finally:
        prefetcher.close()
