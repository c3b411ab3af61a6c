"""A map-style PyTorch dataset over files of any known format.

    dataset = ElasticDataset("data/*.parquet", transform=decode)
    loader = ElasticLoader(dataset, ElasticSampler(len(dataset), global_batch_size=256), num_workers=4)

Whole batches are read at once, so that each file, row group or block is visited once per batch. Needs no torch
by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Unpack

from strata.data.media import How, checked, with_media
from strata.data.reader import DatasetFiles, DatasetReader, DiscoverOptions, PathOrPaths
from strata.data.streaming.prefetch import Ahead, FetchesAhead


class ElasticDataset(FetchesAhead):
    """Samples by number, each through `transform`."""

    def __init__(
        self,
        path: PathOrPaths | DatasetFiles,
        format: str | None = None,
        *,
        transform: Callable[[dict[str, Any]], Any] | None = None,
        media: Mapping[str, How] | None = None,
        **options: Unpack[DiscoverOptions],
    ) -> None:
        """`path`, `format` and `options` as for `strata.data.discover`. `media` says which fields are images or other files, and
        whether they are wanted as "pixels", "bytes" or "path": see `strata.data.media`."""
        self.reader = DatasetReader(path, format, **options)
        self._transform = transform
        self._media = checked(media or {})

    @property
    def is_remote(self) -> bool:
        return self.reader.is_remote

    def ahead(self) -> Ahead | None:
        """What fetches samples before they are read, where they are remote: by a reader of its own."""
        return DatasetReader(self.reader.found) if self.is_remote else None

    def __len__(self) -> int:
        return len(self.reader)

    def __getitem__(self, sample: int) -> Any:
        return self.__getitems__([sample])[0]

    def __getitems__(self, samples: Sequence[int]) -> list[Any]:
        return self.read(samples)

    def read(self, samples: Sequence[int], *, begin: Callable[[int], None] | None = None) -> list[Any]:
        """Read several samples at once; `begin` is called with each before its transform runs."""
        rows = self.reader.read(samples)
        if self._media:
            rows = [
                with_media(row, self._media, file=self.reader.file_of(sample))
                for sample, row in zip(samples, rows, strict=True)
            ]
        if self._transform is None:
            return rows
        found = []
        for sample, row in zip(samples, rows, strict=True):
            if begin is not None:
                begin(sample)
            found.append(self._transform(row))
        return found
