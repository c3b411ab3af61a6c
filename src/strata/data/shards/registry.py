"""Registered datasets and their shards: alone in a process, or through the coordinator.

    registry = DatasetRegistry()                          # alone
    registry = DatasetRegistry(orchestrator)              # with a coordinator: same calls, shared by the fleet
    registry = DatasetRegistry("http://head:50051")       # the same, with a connection of its own

A dataset is registered by its files, which are found and counted, or by numbers alone. Shards come with the paths
of the files that hold them, as far as this process or the coordinator can see those.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

from strata.core.messages import DatasetSpec, InvalidArgument, Unknown
from strata.data.errors import DataError
from strata.data.reader import DatasetReader
from strata.data.shards.manager import Shard, ShardManager
from strata.data.streaming.sources import is_visible
from strata.errors import StrataError

if TYPE_CHECKING:
    from strata.worker.orchestrator import TrainingOrchestrator


class AssignedShard(Protocol):
    """A shard as the coordinator hands it out."""

    @property
    def shard_id(self) -> int: ...
    @property
    def start(self) -> int: ...
    @property
    def stop(self) -> int: ...
    @property
    def done(self) -> int: ...
    @property
    def file_paths(self) -> Sequence[str]: ...
    @property
    def total_shards(self) -> int: ...


class CoordinatorDatasets(Protocol):
    """What a registry asks of a coordinator; `TrainingOrchestrator` is one."""

    def register_dataset(
        self,
        dataset_id: str,
        path: str,
        format: str,
        total_samples: int | None = None,
        shard_size: int = 10_000,
        shuffle: bool = False,
        seed: int = 0,
        metadata: Mapping[str, str] | None = None,
    ) -> int: ...

    def get_shards(
        self, dataset_id: str, epoch: int = 0, *, worker_rank: int | None = None, worker_id: str = ""
    ) -> Sequence[AssignedShard]: ...


class Epoch(int):
    """The current epoch; reads the same with and without a call, which may ask for that of one dataset."""

    of_datasets: Mapping[str, int] = MappingProxyType({})
    """Those that have advanced by themselves."""

    def __call__(self, dataset_id: str = "") -> int:
        return self.of_datasets.get(dataset_id, int(self))


class DatasetRegistry:
    def __init__(
        self, coordinator: CoordinatorDatasets | str | None = None, *, coordinator_url: str | None = None
    ) -> None:
        """`coordinator` is a `TrainingOrchestrator`, or the address of a coordinator (also `coordinator_url`): then
        `register_worker` joins its fleet, and `close` ends the connection."""
        self._own: TrainingOrchestrator | None = None
        coordinator = coordinator_url if coordinator is None else coordinator
        if isinstance(coordinator, str):
            from strata.worker.orchestrator import TrainingOrchestrator

            coordinator = self._own = TrainingOrchestrator(coordinator)
        if coordinator is not None and not hasattr(coordinator, "register_dataset"):
            raise TypeError(
                "coordinator must be a TrainingOrchestrator, an address or None, not "
                + type(coordinator).__name__
            )
        self._coordinator = coordinator
        self._formats: dict[str, str] = {}
        self._shards = ShardManager()
        self._readers: dict[str, DatasetReader | None] = {}
        self._epoch = 0
        self._epochs: dict[str, int] = {}
        """Of the datasets that have advanced by themselves."""

    # Registering --------------------------------------------------------------------------------------------

    def register(
        self,
        dataset_id: str,
        path: str | os.PathLike[str],
        format: str = "auto",
        total_samples: int | None = None,
        shard_size: int = 10_000,
        shuffle: bool = False,
        seed: int = 0,
        metadata: Mapping[str, str] | None = None,
    ) -> int:
        """Register the files at `path` (a file, directory, glob or URL); returns the number of shards.

        Samples are counted when `total_samples` is not given. When it is, the files need not be here at all.
        """
        text = os.fspath(path)
        if self._coordinator is not None:
            self._formats[dataset_id] = format
            return self._coordinator.register_dataset(
                dataset_id, text, format, total_samples, shard_size, shuffle, seed, metadata
            )
        reader = None
        if total_samples is None:
            reader = DatasetReader(text, format)
            total_samples = len(reader)
            if not total_samples:
                raise DataError.at(text, "it holds no samples")
        shards = self._shards.register_dataset_params(
            dataset_id, total_samples, shard_size, shuffle, seed, path=text, format=format, metadata=metadata
        )
        if reader is not None:
            self._readers[dataset_id] = reader
        return shards

    def register_dataset(
        self, dataset_id: str, total_samples: int, shard_size: int, shuffle: bool = True, seed: int = 42
    ) -> int:
        """Register a dataset by its numbers alone; returns the number of shards."""
        if self._coordinator is not None:
            return self._coordinator.register_dataset(
                dataset_id, dataset_id, "samples", total_samples, shard_size, shuffle, seed
            )
        return self._shards.register_dataset_params(dataset_id, total_samples, shard_size, shuffle, seed)

    def datasets(self) -> list[str]:
        """The ids that were registered here."""
        self._alone("datasets()", "GET /api/datasets lists them.")
        return self._shards.datasets()

    @property
    def dataset_count(self) -> int:
        return len(self.datasets())

    def spec(self, dataset_id: str) -> DatasetSpec:
        return self._shards.spec(dataset_id)

    # Workers ------------------------------------------------------------------------------------------------

    def register_worker(self, worker_id: str) -> None:
        if self._own is not None:
            self._own.register_worker(worker_id)
            return
        self._alone("register_worker()", "Workers register with TrainingOrchestrator.register_worker().")
        self._shards.add_worker(worker_id)

    def remove_worker(self, worker_id: str) -> None:
        """Give its unfinished shards to the others. A registry with its own connection removes its own worker."""
        if self._own is not None and self._own.worker_id == worker_id:
            self._own.deregister()
            return
        self._alone("remove_worker()", "Workers leave with TrainingOrchestrator.deregister().")
        if worker_id not in self._shards.workers():
            raise Unknown("worker", worker_id, hint="It was removed already, or never registered.")
        self._shards.remove_worker(worker_id)

    def active_workers(self) -> list[str]:
        self._alone("active_workers()", "GET /api/workers lists them.")
        return self._shards.workers()

    @property
    def worker_count(self) -> int:
        return len(self.active_workers())

    # Epochs -------------------------------------------------------------------------------------------------

    @property
    def current_epoch(self) -> Epoch:
        epoch = Epoch(self._epoch)
        epoch.of_datasets = self._epochs
        return epoch

    def advance_epoch(self, dataset_id: str = "") -> int:
        """Of every dataset, or of one; the epoch from here on."""
        if dataset_id:
            if self._coordinator is None:
                self._shards.spec(dataset_id)  # Raises for one that is not registered.
            self._epochs[dataset_id] = self.current_epoch(dataset_id) + 1
            return self._epochs[dataset_id]
        self._epoch += 1
        self._epochs = {each: epoch + 1 for each, epoch in self._epochs.items()}
        return self._epoch

    # Shards -------------------------------------------------------------------------------------------------

    def get_shards(self, dataset_id: str, worker_id: str = "", epoch: int | None = None) -> list[Shard]:
        """The shards of a worker, in the order to read them. With a coordinator, by default those of this process's worker."""
        epoch = self.current_epoch(dataset_id) if epoch is None else epoch
        if self._coordinator is not None:
            return self._assigned(dataset_id, epoch, worker_id=worker_id)
        self._shards.spec(dataset_id)
        if worker_id not in self._shards.workers():
            raise Unknown("worker", worker_id, hint="Register it first: registry.register_worker(worker_id).")
        shards = self._shards.get_shard_for_worker(dataset_id, worker_id, epoch)
        reader = self._reader(dataset_id)
        if reader is None:
            return shards
        return [
            replace(shard, file_paths=tuple(reader.files_of(shard.start, shard.stop))) for shard in shards
        ]

    def get_shard(self, dataset_id: str, worker_rank: int, epoch: int | None = None) -> list[str]:
        """The files that the worker of this rank reads in an epoch, each once."""
        if self._coordinator is not None:
            epoch = self.current_epoch(dataset_id) if epoch is None else epoch
            shards = self._assigned(dataset_id, epoch, worker_rank=worker_rank)
            if dataset_id in self._readers and self._readers[dataset_id] is None:
                raise self._no_files(dataset_id)
        else:
            workers = self._shards.workers()
            if not 0 <= worker_rank < len(workers):
                raise InvalidArgument(
                    "worker_rank",
                    f"is {worker_rank}; there are {len(workers)} workers.",
                    hint="Ranks count from 0 in the order of active_workers().",
                )
            if self._reader(dataset_id) is None:
                raise self._no_files(dataset_id)
            shards = self.get_shards(dataset_id, workers[worker_rank], epoch)
        return list(dict.fromkeys(path for shard in shards for path in shard.file_paths))

    def reader(self, dataset_id: str) -> DatasetReader:
        """The samples themselves, by number."""
        found = self._reader(dataset_id)
        if found is None:
            raise self._no_files(dataset_id)
        return found

    # ---------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the connection of a registry that was given an address."""
        if self._own is not None:
            self._own.close()

    def _assigned(
        self, dataset_id: str, epoch: int, *, worker_rank: int | None = None, worker_id: str = ""
    ) -> list[Shard]:
        """What the coordinator hands out: to this worker, or to the one with this rank or id."""
        assert self._coordinator is not None
        found = self._coordinator.get_shards(dataset_id, epoch, worker_rank=worker_rank, worker_id=worker_id)
        return [
            Shard(
                id=shard.shard_id,
                start=shard.start,
                stop=shard.stop,
                done=shard.done,
                file_paths=self._files(dataset_id, shard),
                dataset_id=dataset_id,
                epoch=epoch,
                total_shards=shard.total_shards,
            )
            for shard in found
        ]

    def _files(self, dataset_id: str, shard: AssignedShard) -> tuple[str, ...]:
        """A coordinator that cannot see the files gives the dataset's path; a worker that sees them there knows which."""
        paths = tuple(shard.file_paths)
        if len(paths) != 1 or os.path.isfile(paths[0]):
            return paths
        if dataset_id not in self._readers:
            kind = self._formats.get(dataset_id, "auto")
            self._readers[dataset_id] = DatasetReader(paths[0], kind) if is_visible(paths[0]) else None
        reader = self._readers[dataset_id]
        return paths if reader is None else tuple(reader.files_of(shard.start, shard.stop))

    def _reader(self, dataset_id: str) -> DatasetReader | None:
        """The files of a dataset, looked for once; None where this process sees none."""
        if dataset_id in self._readers:
            return self._readers[dataset_id]
        spec = self._shards.spec(dataset_id)
        reader = None
        if spec.format != "samples" and is_visible(spec.path):
            reader = DatasetReader(spec.path, spec.format)
            if len(reader) < spec.total_samples:
                raise DataError.at(
                    spec.path,
                    f"it holds {len(reader):,} samples, but was registered with {spec.total_samples:,}",
                    hint="Register it without total_samples to have them counted.",
                )
        self._readers[dataset_id] = reader
        return reader

    @staticmethod
    def _no_files(dataset_id: str) -> DataError:
        return DataError(
            f"Dataset '{dataset_id}' has no files here.",
            hint="Register it with a path that this process can see: register(dataset_id, path, format).",
        )

    def _alone(self, call: str, instead: str) -> None:
        if self._coordinator is not None:
            raise StrataError(f"{call} is only for a registry without a coordinator.", hint=instead)
