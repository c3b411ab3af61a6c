"""Training data: a token index built once, and a dataset over it that resumes exactly at any world size."""

from __future__ import annotations

from typing import TYPE_CHECKING

from strata.lazy_names import lazy_names

# Loaded on first use: building an index needs no torch, and `python -m …index_builder` must come first.
_HOMES = {
    "IndexBuilder": ".index_builder",
    "IndexEntry": ".index_builder",
    "IndexHeader": ".index_builder",
    "TokenIndexFile": ".index_builder",
    "DatasetState": ".resumable_dataset",
    "ResumableDataset": ".resumable_dataset",
    "create_dataloader": ".resumable_dataset",
}

__all__ = [
    "DatasetState",
    "IndexBuilder",
    "IndexEntry",
    "IndexHeader",
    "ResumableDataset",
    "TokenIndexFile",
    "create_dataloader",
]
__getattr__, __dir__ = lazy_names(__name__, _HOMES)

if TYPE_CHECKING:
    from elastic_harness.data.index_builder import IndexBuilder as IndexBuilder
    from elastic_harness.data.index_builder import IndexEntry as IndexEntry
    from elastic_harness.data.index_builder import IndexHeader as IndexHeader
    from elastic_harness.data.index_builder import TokenIndexFile as TokenIndexFile
    from elastic_harness.data.resumable_dataset import DatasetState as DatasetState
    from elastic_harness.data.resumable_dataset import ResumableDataset as ResumableDataset
    from elastic_harness.data.resumable_dataset import create_dataloader as create_dataloader
