"""Strata: training jobs that outlive their machines.

Names load on first use, so that a coordinator needs no torch and a training process no web server.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from strata.agent.torchrun_trap import separate_attempts
from strata.lazy_names import lazy_names

__version__ = "0.2.0"
"""The one place that says it: the package, the API and the command line take it from here."""

_HOMES = {
    "StrataError": "strata.errors",
    "AsyncCheckpointWriter": "strata.checkpoint",
    "CheckpointManager": "strata.checkpoint",
    "Client": "strata.client",
    "DatasetRegistry": "strata.data.shards.registry",
    "ElasticLoader": "strata.data.loading.loader",
    "ElasticSampler": "strata.data.loading.sampler",
    "Histogram": "strata.training.metrics.histogram",
    "Mixture": "strata.data.composing.mixture",
    "ShardManager": "strata.data.shards.manager",
    "StorageBackend": "strata.stores",
    "TrainingOrchestrator": "strata.worker.orchestrator",
    "audit": "strata.data.history",
    "current_task": "strata.launch.context",
    "elastic": "strata.training",
    "recoverable": "strata.training.recoverable",
    "tokens": "strata.data.tokens.documents",
}

__all__ = [*_HOMES, "__version__"]
__getattr__, __dir__ = lazy_names(__name__, {**_HOMES, "sinks": ".sinks"})

separate_attempts()  # Where torchrun has restarted this process, before it meets the others.

if TYPE_CHECKING:
    from strata import sinks as sinks
    from strata.checkpoint import AsyncCheckpointWriter as AsyncCheckpointWriter
    from strata.checkpoint import CheckpointManager as CheckpointManager
    from strata.client import Client as Client
    from strata.data.composing.mixture import Mixture as Mixture
    from strata.data.history import audit as audit
    from strata.data.loading.loader import ElasticLoader as ElasticLoader
    from strata.data.loading.sampler import ElasticSampler as ElasticSampler
    from strata.data.shards.manager import ShardManager as ShardManager
    from strata.data.shards.registry import DatasetRegistry as DatasetRegistry
    from strata.data.tokens.documents import tokens as tokens
    from strata.errors import StrataError as StrataError
    from strata.launch.context import current_task as current_task
    from strata.stores import StorageBackend as StorageBackend
    from strata.training import elastic as elastic
    from strata.training.metrics.histogram import Histogram as Histogram
    from strata.training.recoverable import recoverable as recoverable
    from strata.worker.orchestrator import TrainingOrchestrator as TrainingOrchestrator
