"""Data: every sample exactly once, whatever happens to the fleet.

    files → DatasetReader → ElasticDataset → ElasticLoader(ElasticSampler) → batches with positions
                                                        │ commit
    strata.audit ◄── manifests ◄── DataLedger ◄─────────┘

Names load on first use: torch and pyarrow are needed only by what uses them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from strata.lazy_names import lazy_names

_HOMES = {
    "Batch": "strata.data.loading.steps",
    "DataError": "strata.data.errors",
    "DataLedger": "strata.data.loading.commits",
    "DatasetFiles": "strata.data.reader",
    "DatasetReader": "strata.data.reader",
    "DatasetRegistry": "strata.data.shards.registry",
    "ElasticDataset": "strata.data.dataset",
    "ElasticIterableDataset": "strata.data.iterable",
    "ElasticLoader": "strata.data.loading.loader",
    "ElasticSampler": "strata.data.loading.sampler",
    "Mixture": "strata.data.composing.mixture",
    "MixtureError": "strata.core.data.mixture",
    "PackedDocuments": "strata.data.composing.packing",
    "Several": "strata.data.composing.mapping",
    "Shard": "strata.data.shards.manager",
    "ShardInfo": "strata.data.shards.manager",
    "ShardManager": "strata.data.shards.manager",
    "ShardStream": "strata.data.shards.stream",
    "StateMismatch": "strata.data.errors",
    "StreamLoader": "strata.data.loading.stream",
    "Step": "strata.data.loading.steps",
    "audit": "strata.data.history",
    "audit_by_source": "strata.data.history",
    "audit_epochs": "strata.data.history",
    "cu_seqlens": "strata.data.composing.packing",
    "discover": "strata.data.reader",
    "document_mask": "strata.data.composing.packing",
    "filtered": "strata.data.composing.mapping",
    "mapped": "strata.data.composing.mapping",
    "pack": "strata.data.composing.packing",
}

__all__ = list(_HOMES)
__getattr__, __dir__ = lazy_names(__name__, _HOMES)

if TYPE_CHECKING:
    from strata.core.data.mixture import MixtureError as MixtureError
    from strata.data.composing.mapping import Several as Several
    from strata.data.composing.mapping import filtered as filtered
    from strata.data.composing.mapping import mapped as mapped
    from strata.data.composing.mixture import Mixture as Mixture
    from strata.data.composing.packing import PackedDocuments as PackedDocuments
    from strata.data.composing.packing import cu_seqlens as cu_seqlens
    from strata.data.composing.packing import document_mask as document_mask
    from strata.data.composing.packing import pack as pack
    from strata.data.dataset import ElasticDataset as ElasticDataset
    from strata.data.errors import DataError as DataError
    from strata.data.errors import StateMismatch as StateMismatch
    from strata.data.history import audit as audit
    from strata.data.history import audit_by_source as audit_by_source
    from strata.data.history import audit_epochs as audit_epochs
    from strata.data.iterable import ElasticIterableDataset as ElasticIterableDataset
    from strata.data.loading.commits import DataLedger as DataLedger
    from strata.data.loading.loader import ElasticLoader as ElasticLoader
    from strata.data.loading.sampler import ElasticSampler as ElasticSampler
    from strata.data.loading.steps import Batch as Batch
    from strata.data.loading.steps import Step as Step
    from strata.data.loading.stream import StreamLoader as StreamLoader
    from strata.data.reader import DatasetFiles as DatasetFiles
    from strata.data.reader import DatasetReader as DatasetReader
    from strata.data.reader import discover as discover
    from strata.data.shards.manager import Shard as Shard
    from strata.data.shards.manager import ShardInfo as ShardInfo
    from strata.data.shards.manager import ShardManager as ShardManager
    from strata.data.shards.registry import DatasetRegistry as DatasetRegistry
    from strata.data.shards.stream import ShardStream as ShardStream
