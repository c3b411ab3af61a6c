"""Whatever a script reads from, as a loader whose position is exact.

`as_elastic_loader` takes an `ElasticLoader`, a plain `DataLoader` or torchdata's `StatefulDataLoader`, any dataset, or paths.
Of a `DataLoader` everything is kept (dataset, batch size, collation, processes) but the sampling, which is replaced by
`ElasticSampler`: the same kind of order (shuffled or not, the sampler's seed), now a pure function of seed and epoch, and so
exact at any world size. A sampler whose order cannot be said by seed and epoch is refused with what to do instead.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, TypedDict

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from strata.data.dataset import ElasticDataset
from strata.data.errors import DataError
from strata.data.iterable import ElasticIterableDataset
from strata.data.loading.loader import ElasticLoader, LoaderOptions
from strata.data.loading.sampler import ElasticSampler
from strata.data.loading.stream import StreamLoader, is_stateful
from strata.data.tokens.dataset import TokenDataset, TokenLoader

Path: TypeAlias = str | os.PathLike[str]
AnyData: TypeAlias = ElasticLoader | DataLoader[Any] | Dataset[Any] | ElasticDataset | Path | Sequence[Path]
"""What `strata.elastic(data=...)` takes."""

_UNSEEDED = 67280421310721
"""What PyTorch gives a generator that was not seeded."""
_ACCEPTED = (
    "a strata.ElasticLoader, a DataLoader or StatefulDataLoader, a dataset, or paths, globs and URLs of files"
)


def as_elastic_loader(data: Any, *, global_batch_size: int | None = None) -> ElasticLoader:
    """`data` with a position that is exact. `global_batch_size` is needed where `data` has none of its own, and goes before
    that of a `DataLoader`, which is per rank. Raises `DataError` for what cannot be promised anything."""
    if isinstance(data, ElasticLoader):
        return data
    if isinstance(data, TokenDataset | TokenLoader):
        raise DataError(
            f"A {type(data).__name__} divides the index among ranks by itself, so a job cannot keep its position.",
            hint="Train on it in a loop of your own with a DataLedger, which takes it as a loader.",
        )
    if isinstance(data, DataLoader):
        return _from_dataloader(data, global_batch_size)
    if isinstance(data, ElasticIterableDataset):
        return ElasticLoader(data)
    if isinstance(data, str | os.PathLike) or _is_paths(data):
        data = ElasticDataset(data)
    if isinstance(data, list | tuple) and any(isinstance(each, ElasticLoader | DataLoader) for each in data):
        raise DataError(
            f"data must be one loader, not {len(data):,}: the job keeps one position.",
            hint="Pass the one that training steps on. Others may be read inside the loop; their samples are not in the ledger.",
        )
    if isinstance(data, IterableDataset) or (is_stateful(data) and hasattr(data, "__iter__")):
        return StreamLoader(data, global_batch_size=_needed(global_batch_size, data))
    if hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, Mapping):
        size = _needed(global_batch_size, data)
        return ElasticLoader(data, ElasticSampler(len(data), global_batch_size=size))
    if hasattr(data, "__iter__") and not isinstance(data, Mapping):
        return StreamLoader(data, global_batch_size=global_batch_size)  # Which says that it has no state.
    raise DataError(f"data must be {_ACCEPTED}, not {type(data).__name__}.")


def _from_dataloader(loader: DataLoader[Any], global_batch_size: int | None) -> ElasticLoader:
    dataset: Any = loader.dataset
    options = _options(loader)
    if isinstance(dataset, ElasticIterableDataset):
        options.pop("collate_fn", None)
        return ElasticLoader(dataset, **options)
    sizes: _Sizes = (
        {"global_batch_size": global_batch_size}
        if global_batch_size
        else {"batch_size": loader.batch_size or 1}
    )
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        if loader.batch_size is None:  # Its samples are taken as they come.
            options["collate_fn"] = _Only(loader.collate_fn)
            sizes = {"batch_size": 1}
        return StreamLoader(dataset, drop_last=bool(loader.drop_last), **sizes, **options)
    if isinstance(loader.batch_sampler, ElasticSampler):
        return ElasticLoader(dataset, loader.batch_sampler, **options)
    if (batches := loader.batch_sampler) is None:  # The samples are batches already.
        options["collate_fn"] = _Only(loader.collate_fn)
        sizes = {"batch_size": 1}
    elif isinstance(batches, BatchSampler) and _is_torchs(batches):
        if not global_batch_size:
            sizes = {"batch_size": batches.batch_size}
    else:
        raise _unknown_order(batches)
    dataset, shuffle, seed = _order(loader, dataset)
    sampler = ElasticSampler(
        len(dataset),
        **sizes,
        shuffle=shuffle,
        seed=seed,
        drop_last=bool(getattr(batches, "drop_last", False)),
    )
    return ElasticLoader(dataset, sampler, **options)


def _order(loader: DataLoader[Any], dataset: Any) -> tuple[Any, bool, int]:
    """What the loader's sampler says of the order: the samples, whether they are shuffled, and the seed."""
    sampler: Any = getattr(loader.batch_sampler, "sampler", loader.sampler)
    if type(sampler) is SequentialSampler:
        return dataset, False, 0
    if type(sampler) is DistributedSampler:
        return dataset, bool(sampler.shuffle), int(sampler.seed)
    if type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == len(dataset):
        return dataset, True, _seed(sampler.generator or loader.generator)
    if type(sampler) is SubsetRandomSampler:
        return Subset(dataset, list(sampler.indices)), True, _seed(sampler.generator or loader.generator)
    # StatefulDataLoader puts a sampler of its own, of the same kind, in place of torch's.
    if _is_torchs(sampler) and not getattr(sampler, "replacement", False):
        if type(sampler).__name__ == "RandomSampler":
            return (
                dataset,
                True,
                _seed(loader.generator),
            )  # The sampler's own may be one that it has drawn itself.
        if isinstance(sampler, DistributedSampler):
            return dataset, bool(sampler.shuffle), int(sampler.seed)
    raise _unknown_order(sampler)


def _is_torchs(sampler: object) -> bool:
    """Whether it is torch's or torchdata's, and not a user's class derived from it."""
    return type(sampler).__module__.partition(".")[0] in ("torch", "torchdata")


def _seed(generator: torch.Generator | None) -> int:
    """The seed that was given to a generator. One that was not seeded differs from process to process, or says nothing."""
    if generator is None or (seed := generator.initial_seed()) == _UNSEEDED:
        return 0
    return seed


def _unknown_order(sampler: object) -> DataError:
    return DataError(
        f"The order of {type(sampler).__name__} is not a function of seed and epoch, so it can be neither continued after a "
        "restart nor divided among another number of ranks.",
        hint="Pass shuffle=True or False to the DataLoader, or batch_sampler=strata.ElasticSampler(...). For weights and "
        "mixtures, express them in the dataset (a list of indices in torch.utils.data.Subset), whose order is then "
        "kept exactly.",
    )


def _options(loader: DataLoader[Any]) -> LoaderOptions:
    if getattr(loader, "in_order", True) is False:
        raise DataError(
            "in_order=False hands out batches in another order than the epoch's, so no position would be exact.",
            hint="Leave in_order out.",
        )
    options: LoaderOptions = {
        "num_workers": loader.num_workers,
        "collate_fn": loader.collate_fn,
        "pin_memory": loader.pin_memory,
        "timeout": loader.timeout,
        "worker_init_fn": loader.worker_init_fn,
    }
    if loader.num_workers:
        options["prefetch_factor"] = loader.prefetch_factor
        options["persistent_workers"] = loader.persistent_workers
        if loader.multiprocessing_context is not None:
            options["multiprocessing_context"] = loader.multiprocessing_context
    return options


class _Sizes(TypedDict, total=False):
    global_batch_size: int
    batch_size: int


class _Only:
    """The one sample of a batch, converted as a `DataLoader` without a batch size does it."""

    def __init__(self, convert: Callable[[Any], Any] | None) -> None:
        self._convert = convert

    def __call__(self, samples: list[Any]) -> Any:
        return self._convert(samples[0]) if self._convert is not None else samples[0]


def _is_paths(data: object) -> bool:
    return (
        isinstance(data, list | tuple)
        and bool(data)
        and all(isinstance(each, str | os.PathLike) for each in data)
    )


def _needed(global_batch_size: int | None, data: object) -> int:
    if global_batch_size is None:
        what = "Paths have" if isinstance(data, ElasticDataset) else f"{type(data).__name__} has"
        raise DataError(
            f"{what} no batch size.",
            hint="Pass one: strata.elastic(..., global_batch_size=256), or pass a DataLoader.",
        )
    return global_batch_size
