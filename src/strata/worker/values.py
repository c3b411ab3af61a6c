"""What the coordinator answers, as plain values, and how a caller's values become messages."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from strata.core.refusals import InvalidArgument
from strata.core.types import SampleRange
from strata.rpc import coordinator_pb2 as pb

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """What the coordinator answered to a registration."""

    worker_id: str
    rank: int
    world_size: int
    incarnation: int
    generation: int
    heartbeat_interval_s: float
    config: Mapping[str, str] = field(default_factory=dict)

    @property
    def heartbeat_interval_ms(self) -> int:
        """As the coordinator's messages have it."""
        return round(self.heartbeat_interval_s * 1000)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardAssignment(SampleRange):
    """Samples `start` up to `stop` of a dataset; the first `done` of them are committed already."""

    dataset_id: str
    epoch: int
    shard_id: int
    start: int
    stop: int
    done: int
    file_paths: tuple[str, ...]
    total_shards: int = 0
    """Of the dataset; 0 where the coordinator does not say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BarrierResult:
    participants: int
    arrival_order: int
    """0 for the first to arrive."""
    generation: int

    @property
    def released(self) -> bool:
        """Always: one that breaks or times out raises `BarrierBroken`."""
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRecord:
    """A completed checkpoint as the coordinator knows it, and where training continues from it."""

    checkpoint_id: str
    step: int
    epoch: int
    path: str
    size_bytes: int
    created_at: float
    worker_id: str
    tiers: tuple[str, ...]
    digest: str
    metadata: Mapping[str, str]
    data: Mapping[str, Any] | None
    shards: tuple[ShardAssignment, ...]


def shard_assignment(m: pb.ShardAssignment) -> ShardAssignment:
    return ShardAssignment(
        dataset_id=m.dataset_id,
        epoch=m.epoch,
        shard_id=m.shard_id,
        start=m.start_index,
        stop=m.end_index,
        done=m.samples_done,
        file_paths=tuple(m.file_paths),
        total_shards=m.total_shards,
    )


def checkpoint_record(m: pb.RecoveryResponse) -> CheckpointRecord:
    found = m.latest_checkpoint
    return CheckpointRecord(
        checkpoint_id=found.checkpoint_id,
        step=found.step,
        epoch=found.epoch,
        path=found.path,
        size_bytes=found.size_bytes,
        created_at=found.created_at,
        worker_id=found.worker_id,
        tiers=tuple(found.tiers),
        digest=found.digest,
        metadata=dict(found.metadata),
        data=json.loads(found.data_json) if found.data_json else None,
        shards=tuple(shard_assignment(shard) for shard in m.shard_assignments),
    )


def dataset_request(
    dataset_id: str,
    path: str,
    format: str,
    total_samples: int | None,
    shard_size: int,
    shuffle: bool,
    seed: int,
    metadata: Mapping[str, str],
) -> pb.RegisterDatasetRequest:
    """`total_samples` is None where the coordinator is to count them: as on the wire, where it is then 0."""
    for name, value in (("total_samples", total_samples), ("shard_size", shard_size)):
        if value is not None and value < 1:
            raise InvalidArgument(name, f"is {value}; it must be at least 1.")
    return message(
        pb.RegisterDatasetRequest,
        dataset_id=dataset_id,
        path=path,
        format=format,
        total_samples=total_samples or 0,
        shard_size=shard_size,
        shuffle=shuffle,
        seed=seed,
        metadata=dict(metadata),
    )


def message(kind: Callable[..., T], **values: Any) -> T:
    """A protobuf message, with its complaints about values as `ValueError`s that name the argument."""
    for name, value in values.items():
        if isinstance(value, int) and not isinstance(value, bool) and value < 0:
            raise ValueError(f"{name} must not be negative, got {value}")
    try:
        return kind(**values)
    except (TypeError, ValueError, UnicodeError) as error:
        raise ValueError(f"{kind.__name__.removesuffix('Request')}: {error}") from None


def one_of(name: str, value: str, known: Iterable[str]) -> str:
    if value not in (known := tuple(known)):
        raise InvalidArgument(name, f"is '{value}'; it must be one of {', '.join(known)}.")
    return value


def non_negative(name: str, value: int) -> int:
    if not 0 <= value < 2**63:
        raise ValueError(f"{name} must be a whole number from 0 on, got {value}")
    return value
