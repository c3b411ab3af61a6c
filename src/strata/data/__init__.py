"""Data: every sample exactly once, whatever happens to the fleet.

    files → DatasetReader → ElasticDataset → ElasticLoader(ElasticSampler) → batches with positions
                                                        │ commit
    strata.audit ◄── manifests ◄── DataLedger ◄─────────┘

Names load on first use: torch and pyarrow are needed only by what uses them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_HOMES = {
    "Batch": "strata.data.steps",
    "DataError": "strata.data.errors",
    "DataLedger": "strata.data.commits",
    "DatasetFiles": "strata.data.reader",
    "DatasetReader": "strata.data.reader",
    "DatasetRegistry": "strata.data.registry",
    "ElasticDataset": "strata.data.dataset",
    "ElasticIterableDataset": "strata.data.iterable",
    "ElasticLoader": "strata.data.loader",
    "ElasticSampler": "strata.data.sampler",
    "Mixture": "strata.data.mixture",
    "MixtureError": "strata.core.data.mixture",
    "PackedDocuments": "strata.data.packing",
    "Several": "strata.data.mapping",
    "Shard": "strata.data.shards",
    "ShardInfo": "strata.data.shards",
    "ShardManager": "strata.data.shards",
    "ShardStream": "strata.data.shard_stream",
    "StateMismatch": "strata.data.errors",
    "StreamLoader": "strata.data.stream",
    "Step": "strata.data.steps",
    "audit": "strata.data.history",
    "audit_by_source": "strata.data.history",
    "audit_epochs": "strata.data.history",
    "cu_seqlens": "strata.data.packing",
    "discover": "strata.data.reader",
    "document_mask": "strata.data.packing",
    "filtered": "strata.data.mapping",
    "mapped": "strata.data.mapping",
    "pack": "strata.data.packing",
}

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'strata.data' has no attribute '{name}'")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(_HOMES))


if TYPE_CHECKING:
    from strata.core.data.mixture import MixtureError as MixtureError
    from strata.data.commits import DataLedger as DataLedger
    from strata.data.dataset import ElasticDataset as ElasticDataset
    from strata.data.errors import DataError as DataError
    from strata.data.errors import StateMismatch as StateMismatch
    from strata.data.history import audit as audit
    from strata.data.history import audit_by_source as audit_by_source
    from strata.data.history import audit_epochs as audit_epochs
    from strata.data.iterable import ElasticIterableDataset as ElasticIterableDataset
    from strata.data.loader import ElasticLoader as ElasticLoader
    from strata.data.mapping import Several as Several
    from strata.data.mapping import filtered as filtered
    from strata.data.mapping import mapped as mapped
    from strata.data.mixture import Mixture as Mixture
    from strata.data.packing import PackedDocuments as PackedDocuments
    from strata.data.packing import cu_seqlens as cu_seqlens
    from strata.data.packing import document_mask as document_mask
    from strata.data.packing import pack as pack
    from strata.data.reader import DatasetFiles as DatasetFiles
    from strata.data.reader import DatasetReader as DatasetReader
    from strata.data.reader import discover as discover
    from strata.data.registry import DatasetRegistry as DatasetRegistry
    from strata.data.sampler import ElasticSampler as ElasticSampler
    from strata.data.shard_stream import ShardStream as ShardStream
    from strata.data.shards import Shard as Shard
    from strata.data.shards import ShardInfo as ShardInfo
    from strata.data.shards import ShardManager as ShardManager
    from strata.data.steps import Batch as Batch
    from strata.data.steps import Step as Step
    from strata.data.stream import StreamLoader as StreamLoader
