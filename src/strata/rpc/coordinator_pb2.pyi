from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class CheckpointStatus(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CHECKPOINT_STATUS_UNSPECIFIED: _ClassVar[CheckpointStatus]
    CHECKPOINT_STATUS_IN_PROGRESS: _ClassVar[CheckpointStatus]
    CHECKPOINT_STATUS_COMPLETED: _ClassVar[CheckpointStatus]
    CHECKPOINT_STATUS_FAILED: _ClassVar[CheckpointStatus]
    CHECKPOINT_STATUS_REMOVED: _ClassVar[CheckpointStatus]
CHECKPOINT_STATUS_UNSPECIFIED: CheckpointStatus
CHECKPOINT_STATUS_IN_PROGRESS: CheckpointStatus
CHECKPOINT_STATUS_COMPLETED: CheckpointStatus
CHECKPOINT_STATUS_FAILED: CheckpointStatus
CHECKPOINT_STATUS_REMOVED: CheckpointStatus

class RegisterWorkerRequest(_message.Message):
    __slots__ = ("worker_id", "hostname", "port", "gpu_count", "memory_bytes", "metadata", "job_id", "registration_id", "run_id", "run_generation")
    class MetadataEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    HOSTNAME_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    GPU_COUNT_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    REGISTRATION_ID_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    RUN_GENERATION_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    hostname: str
    port: int
    gpu_count: int
    memory_bytes: int
    metadata: _containers.ScalarMap[str, str]
    job_id: str
    registration_id: bytes
    run_id: str
    run_generation: int
    def __init__(self, worker_id: _Optional[str] = ..., hostname: _Optional[str] = ..., port: _Optional[int] = ..., gpu_count: _Optional[int] = ..., memory_bytes: _Optional[int] = ..., metadata: _Optional[_Mapping[str, str]] = ..., job_id: _Optional[str] = ..., registration_id: _Optional[bytes] = ..., run_id: _Optional[str] = ..., run_generation: _Optional[int] = ...) -> None: ...

class RegisterWorkerResponse(_message.Message):
    __slots__ = ("assigned_id", "rank", "world_size", "heartbeat_interval_ms", "config", "incarnation", "generation")
    class ConfigEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    ASSIGNED_ID_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_INTERVAL_MS_FIELD_NUMBER: _ClassVar[int]
    CONFIG_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    assigned_id: str
    rank: int
    world_size: int
    heartbeat_interval_ms: int
    config: _containers.ScalarMap[str, str]
    incarnation: int
    generation: int
    def __init__(self, assigned_id: _Optional[str] = ..., rank: _Optional[int] = ..., world_size: _Optional[int] = ..., heartbeat_interval_ms: _Optional[int] = ..., config: _Optional[_Mapping[str, str]] = ..., incarnation: _Optional[int] = ..., generation: _Optional[int] = ...) -> None: ...

class DeregisterWorkerRequest(_message.Message):
    __slots__ = ("worker_id", "incarnation", "reason")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    incarnation: int
    reason: str
    def __init__(self, worker_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class DeregisterWorkerResponse(_message.Message):
    __slots__ = ("acknowledged",)
    ACKNOWLEDGED_FIELD_NUMBER: _ClassVar[int]
    acknowledged: bool
    def __init__(self, acknowledged: _Optional[bool] = ...) -> None: ...

class WorkerStatus(_message.Message):
    __slots__ = ("state", "current_step", "current_epoch", "current_task", "metrics")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    STATE_FIELD_NUMBER: _ClassVar[int]
    CURRENT_STEP_FIELD_NUMBER: _ClassVar[int]
    CURRENT_EPOCH_FIELD_NUMBER: _ClassVar[int]
    CURRENT_TASK_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    state: str
    current_step: int
    current_epoch: int
    current_task: str
    metrics: _containers.ScalarMap[str, float]
    def __init__(self, state: _Optional[str] = ..., current_step: _Optional[int] = ..., current_epoch: _Optional[int] = ..., current_task: _Optional[str] = ..., metrics: _Optional[_Mapping[str, float]] = ...) -> None: ...

class GpuUsage(_message.Message):
    __slots__ = ("index", "utilization_percent", "memory_used_bytes", "memory_total_bytes", "power_watts", "temperature_celsius")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    UTILIZATION_PERCENT_FIELD_NUMBER: _ClassVar[int]
    MEMORY_USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    MEMORY_TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    POWER_WATTS_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_CELSIUS_FIELD_NUMBER: _ClassVar[int]
    index: int
    utilization_percent: float
    memory_used_bytes: int
    memory_total_bytes: int
    power_watts: float
    temperature_celsius: float
    def __init__(self, index: _Optional[int] = ..., utilization_percent: _Optional[float] = ..., memory_used_bytes: _Optional[int] = ..., memory_total_bytes: _Optional[int] = ..., power_watts: _Optional[float] = ..., temperature_celsius: _Optional[float] = ...) -> None: ...

class ResourceUsage(_message.Message):
    __slots__ = ("cpu_percent", "memory_used_bytes", "gpu_usage", "disk_read_bytes", "disk_write_bytes", "network_rx_bytes", "network_tx_bytes")
    CPU_PERCENT_FIELD_NUMBER: _ClassVar[int]
    MEMORY_USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    GPU_USAGE_FIELD_NUMBER: _ClassVar[int]
    DISK_READ_BYTES_FIELD_NUMBER: _ClassVar[int]
    DISK_WRITE_BYTES_FIELD_NUMBER: _ClassVar[int]
    NETWORK_RX_BYTES_FIELD_NUMBER: _ClassVar[int]
    NETWORK_TX_BYTES_FIELD_NUMBER: _ClassVar[int]
    cpu_percent: float
    memory_used_bytes: int
    gpu_usage: _containers.RepeatedCompositeFieldContainer[GpuUsage]
    disk_read_bytes: int
    disk_write_bytes: int
    network_rx_bytes: int
    network_tx_bytes: int
    def __init__(self, cpu_percent: _Optional[float] = ..., memory_used_bytes: _Optional[int] = ..., gpu_usage: _Optional[_Iterable[_Union[GpuUsage, _Mapping]]] = ..., disk_read_bytes: _Optional[int] = ..., disk_write_bytes: _Optional[int] = ..., network_rx_bytes: _Optional[int] = ..., network_tx_bytes: _Optional[int] = ...) -> None: ...

class HeartbeatRequest(_message.Message):
    __slots__ = ("worker_id", "timestamp_ms", "status", "resources", "incarnation", "generation")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    TIMESTAMP_MS_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    RESOURCES_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    timestamp_ms: int
    status: WorkerStatus
    resources: ResourceUsage
    incarnation: int
    generation: int
    def __init__(self, worker_id: _Optional[str] = ..., timestamp_ms: _Optional[int] = ..., status: _Optional[_Union[WorkerStatus, _Mapping]] = ..., resources: _Optional[_Union[ResourceUsage, _Mapping]] = ..., incarnation: _Optional[int] = ..., generation: _Optional[int] = ...) -> None: ...

class PendingCommand(_message.Message):
    __slots__ = ("command_id", "kind", "arguments")
    class ArgumentsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    COMMAND_ID_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    command_id: str
    kind: str
    arguments: _containers.ScalarMap[str, str]
    def __init__(self, command_id: _Optional[str] = ..., kind: _Optional[str] = ..., arguments: _Optional[_Mapping[str, str]] = ...) -> None: ...

class HeartbeatResponse(_message.Message):
    __slots__ = ("acknowledged", "server_timestamp_ms", "pending_commands", "generation")
    ACKNOWLEDGED_FIELD_NUMBER: _ClassVar[int]
    SERVER_TIMESTAMP_MS_FIELD_NUMBER: _ClassVar[int]
    PENDING_COMMANDS_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    acknowledged: bool
    server_timestamp_ms: int
    pending_commands: _containers.RepeatedCompositeFieldContainer[PendingCommand]
    generation: int
    def __init__(self, acknowledged: _Optional[bool] = ..., server_timestamp_ms: _Optional[int] = ..., pending_commands: _Optional[_Iterable[_Union[PendingCommand, _Mapping]]] = ..., generation: _Optional[int] = ...) -> None: ...

class RegisterDatasetRequest(_message.Message):
    __slots__ = ("dataset_id", "path", "format", "total_samples", "shard_size", "shuffle", "seed", "metadata")
    class MetadataEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    DATASET_ID_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    TOTAL_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    SHARD_SIZE_FIELD_NUMBER: _ClassVar[int]
    SHUFFLE_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    dataset_id: str
    path: str
    format: str
    total_samples: int
    shard_size: int
    shuffle: bool
    seed: int
    metadata: _containers.ScalarMap[str, str]
    def __init__(self, dataset_id: _Optional[str] = ..., path: _Optional[str] = ..., format: _Optional[str] = ..., total_samples: _Optional[int] = ..., shard_size: _Optional[int] = ..., shuffle: _Optional[bool] = ..., seed: _Optional[int] = ..., metadata: _Optional[_Mapping[str, str]] = ...) -> None: ...

class RegisterDatasetResponse(_message.Message):
    __slots__ = ("dataset_id", "total_shards", "created", "total_samples")
    DATASET_ID_FIELD_NUMBER: _ClassVar[int]
    TOTAL_SHARDS_FIELD_NUMBER: _ClassVar[int]
    CREATED_FIELD_NUMBER: _ClassVar[int]
    TOTAL_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    dataset_id: str
    total_shards: int
    created: bool
    total_samples: int
    def __init__(self, dataset_id: _Optional[str] = ..., total_shards: _Optional[int] = ..., created: _Optional[bool] = ..., total_samples: _Optional[int] = ...) -> None: ...

class Dataset(_message.Message):
    __slots__ = ("dataset_id", "path", "format", "total_samples", "shard_size", "total_shards", "shuffle", "seed", "metadata", "registered_at")
    class MetadataEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    DATASET_ID_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    TOTAL_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    SHARD_SIZE_FIELD_NUMBER: _ClassVar[int]
    TOTAL_SHARDS_FIELD_NUMBER: _ClassVar[int]
    SHUFFLE_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    REGISTERED_AT_FIELD_NUMBER: _ClassVar[int]
    dataset_id: str
    path: str
    format: str
    total_samples: int
    shard_size: int
    total_shards: int
    shuffle: bool
    seed: int
    metadata: _containers.ScalarMap[str, str]
    registered_at: float
    def __init__(self, dataset_id: _Optional[str] = ..., path: _Optional[str] = ..., format: _Optional[str] = ..., total_samples: _Optional[int] = ..., shard_size: _Optional[int] = ..., total_shards: _Optional[int] = ..., shuffle: _Optional[bool] = ..., seed: _Optional[int] = ..., metadata: _Optional[_Mapping[str, str]] = ..., registered_at: _Optional[float] = ...) -> None: ...

class ListDatasetsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListDatasetsResponse(_message.Message):
    __slots__ = ("datasets",)
    DATASETS_FIELD_NUMBER: _ClassVar[int]
    datasets: _containers.RepeatedCompositeFieldContainer[Dataset]
    def __init__(self, datasets: _Optional[_Iterable[_Union[Dataset, _Mapping]]] = ...) -> None: ...

class GetDataShardRequest(_message.Message):
    __slots__ = ("worker_id", "dataset_id", "epoch", "incarnation", "generation", "worker_rank", "of_worker_id", "job_id")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    DATASET_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    WORKER_RANK_FIELD_NUMBER: _ClassVar[int]
    OF_WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    dataset_id: str
    epoch: int
    incarnation: int
    generation: int
    worker_rank: int
    of_worker_id: str
    job_id: str
    def __init__(self, worker_id: _Optional[str] = ..., dataset_id: _Optional[str] = ..., epoch: _Optional[int] = ..., incarnation: _Optional[int] = ..., generation: _Optional[int] = ..., worker_rank: _Optional[int] = ..., of_worker_id: _Optional[str] = ..., job_id: _Optional[str] = ...) -> None: ...

class ShardAssignment(_message.Message):
    __slots__ = ("shard_id", "start_index", "end_index", "file_paths", "samples_done", "dataset_id", "epoch", "total_shards")
    SHARD_ID_FIELD_NUMBER: _ClassVar[int]
    START_INDEX_FIELD_NUMBER: _ClassVar[int]
    END_INDEX_FIELD_NUMBER: _ClassVar[int]
    FILE_PATHS_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_DONE_FIELD_NUMBER: _ClassVar[int]
    DATASET_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    TOTAL_SHARDS_FIELD_NUMBER: _ClassVar[int]
    shard_id: int
    start_index: int
    end_index: int
    file_paths: _containers.RepeatedScalarFieldContainer[str]
    samples_done: int
    dataset_id: str
    epoch: int
    total_shards: int
    def __init__(self, shard_id: _Optional[int] = ..., start_index: _Optional[int] = ..., end_index: _Optional[int] = ..., file_paths: _Optional[_Iterable[str]] = ..., samples_done: _Optional[int] = ..., dataset_id: _Optional[str] = ..., epoch: _Optional[int] = ..., total_shards: _Optional[int] = ...) -> None: ...

class GetDataShardResponse(_message.Message):
    __slots__ = ("shards", "plan_version", "generation", "reason", "worker_id")
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    PLAN_VERSION_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    shards: _containers.RepeatedCompositeFieldContainer[ShardAssignment]
    plan_version: int
    generation: int
    reason: str
    worker_id: str
    def __init__(self, shards: _Optional[_Iterable[_Union[ShardAssignment, _Mapping]]] = ..., plan_version: _Optional[int] = ..., generation: _Optional[int] = ..., reason: _Optional[str] = ..., worker_id: _Optional[str] = ...) -> None: ...

class WaitBarrierRequest(_message.Message):
    __slots__ = ("worker_id", "barrier_id", "step", "expected_participants", "incarnation", "generation", "call_id", "timeout_ms")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    BARRIER_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_PARTICIPANTS_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    CALL_ID_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    barrier_id: str
    step: int
    expected_participants: int
    incarnation: int
    generation: int
    call_id: bytes
    timeout_ms: int
    def __init__(self, worker_id: _Optional[str] = ..., barrier_id: _Optional[str] = ..., step: _Optional[int] = ..., expected_participants: _Optional[int] = ..., incarnation: _Optional[int] = ..., generation: _Optional[int] = ..., call_id: _Optional[bytes] = ..., timeout_ms: _Optional[int] = ...) -> None: ...

class WaitBarrierResponse(_message.Message):
    __slots__ = ("released", "participants", "arrival_order", "missing", "reason", "generation")
    RELEASED_FIELD_NUMBER: _ClassVar[int]
    PARTICIPANTS_FIELD_NUMBER: _ClassVar[int]
    ARRIVAL_ORDER_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    released: bool
    participants: int
    arrival_order: int
    missing: _containers.RepeatedScalarFieldContainer[str]
    reason: str
    generation: int
    def __init__(self, released: _Optional[bool] = ..., participants: _Optional[int] = ..., arrival_order: _Optional[int] = ..., missing: _Optional[_Iterable[str]] = ..., reason: _Optional[str] = ..., generation: _Optional[int] = ...) -> None: ...

class NotifyCheckpointRequest(_message.Message):
    __slots__ = ("worker_id", "checkpoint_id", "step", "epoch", "path", "size_bytes", "status", "metadata", "tiers", "digest", "duration_s", "parent_id", "data_json", "reason", "incarnation", "generation", "job_id", "run_id", "run_generation", "saved_generation", "succeeded_by")
    class MetadataEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    DURATION_S_FIELD_NUMBER: _ClassVar[int]
    PARENT_ID_FIELD_NUMBER: _ClassVar[int]
    DATA_JSON_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    RUN_GENERATION_FIELD_NUMBER: _ClassVar[int]
    SAVED_GENERATION_FIELD_NUMBER: _ClassVar[int]
    SUCCEEDED_BY_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    checkpoint_id: str
    step: int
    epoch: int
    path: str
    size_bytes: int
    status: CheckpointStatus
    metadata: _containers.ScalarMap[str, str]
    tiers: _containers.RepeatedScalarFieldContainer[str]
    digest: str
    duration_s: float
    parent_id: str
    data_json: str
    reason: str
    incarnation: int
    generation: int
    job_id: str
    run_id: str
    run_generation: int
    saved_generation: int
    succeeded_by: str
    def __init__(self, worker_id: _Optional[str] = ..., checkpoint_id: _Optional[str] = ..., step: _Optional[int] = ..., epoch: _Optional[int] = ..., path: _Optional[str] = ..., size_bytes: _Optional[int] = ..., status: _Optional[_Union[CheckpointStatus, str]] = ..., metadata: _Optional[_Mapping[str, str]] = ..., tiers: _Optional[_Iterable[str]] = ..., digest: _Optional[str] = ..., duration_s: _Optional[float] = ..., parent_id: _Optional[str] = ..., data_json: _Optional[str] = ..., reason: _Optional[str] = ..., incarnation: _Optional[int] = ..., generation: _Optional[int] = ..., job_id: _Optional[str] = ..., run_id: _Optional[str] = ..., run_generation: _Optional[int] = ..., saved_generation: _Optional[int] = ..., succeeded_by: _Optional[str] = ...) -> None: ...

class CheckpointAck(_message.Message):
    __slots__ = ("acknowledged", "checkpoint_id", "status")
    ACKNOWLEDGED_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_ID_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    acknowledged: bool
    checkpoint_id: str
    status: CheckpointStatus
    def __init__(self, acknowledged: _Optional[bool] = ..., checkpoint_id: _Optional[str] = ..., status: _Optional[_Union[CheckpointStatus, str]] = ...) -> None: ...

class Checkpoint(_message.Message):
    __slots__ = ("checkpoint_id", "step", "epoch", "path", "size_bytes", "status", "worker_id", "created_at", "tiers", "digest", "metadata", "data_json", "job_id", "run_id", "generation")
    class MetadataEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    CHECKPOINT_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    CREATED_AT_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    DATA_JSON_FIELD_NUMBER: _ClassVar[int]
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    checkpoint_id: str
    step: int
    epoch: int
    path: str
    size_bytes: int
    status: CheckpointStatus
    worker_id: str
    created_at: float
    tiers: _containers.RepeatedScalarFieldContainer[str]
    digest: str
    metadata: _containers.ScalarMap[str, str]
    data_json: str
    job_id: str
    run_id: str
    generation: int
    def __init__(self, checkpoint_id: _Optional[str] = ..., step: _Optional[int] = ..., epoch: _Optional[int] = ..., path: _Optional[str] = ..., size_bytes: _Optional[int] = ..., status: _Optional[_Union[CheckpointStatus, str]] = ..., worker_id: _Optional[str] = ..., created_at: _Optional[float] = ..., tiers: _Optional[_Iterable[str]] = ..., digest: _Optional[str] = ..., metadata: _Optional[_Mapping[str, str]] = ..., data_json: _Optional[str] = ..., job_id: _Optional[str] = ..., run_id: _Optional[str] = ..., generation: _Optional[int] = ...) -> None: ...

class ReconcileCheckpointsRequest(_message.Message):
    __slots__ = ("worker_id", "incarnation", "job_id", "run_id", "run_generation", "present", "revision")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    RUN_GENERATION_FIELD_NUMBER: _ClassVar[int]
    PRESENT_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    incarnation: int
    job_id: str
    run_id: str
    run_generation: int
    present: _containers.RepeatedScalarFieldContainer[str]
    revision: int
    def __init__(self, worker_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., job_id: _Optional[str] = ..., run_id: _Optional[str] = ..., run_generation: _Optional[int] = ..., present: _Optional[_Iterable[str]] = ..., revision: _Optional[int] = ...) -> None: ...

class ReconcileCheckpointsResponse(_message.Message):
    __slots__ = ("removed", "unknown", "made", "revision")
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    UNKNOWN_FIELD_NUMBER: _ClassVar[int]
    MADE_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    removed: int
    unknown: _containers.RepeatedScalarFieldContainer[str]
    made: bool
    revision: int
    def __init__(self, removed: _Optional[int] = ..., unknown: _Optional[_Iterable[str]] = ..., made: _Optional[bool] = ..., revision: _Optional[int] = ...) -> None: ...

class GetLatestCheckpointRequest(_message.Message):
    __slots__ = ("worker_id", "job_id")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    job_id: str
    def __init__(self, worker_id: _Optional[str] = ..., job_id: _Optional[str] = ...) -> None: ...

class RecoveryResponse(_message.Message):
    __slots__ = ("has_checkpoint", "latest_checkpoint", "resume_step", "resume_epoch", "shard_assignments")
    HAS_CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    LATEST_CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    RESUME_STEP_FIELD_NUMBER: _ClassVar[int]
    RESUME_EPOCH_FIELD_NUMBER: _ClassVar[int]
    SHARD_ASSIGNMENTS_FIELD_NUMBER: _ClassVar[int]
    has_checkpoint: bool
    latest_checkpoint: Checkpoint
    resume_step: int
    resume_epoch: int
    shard_assignments: _containers.RepeatedCompositeFieldContainer[ShardAssignment]
    def __init__(self, has_checkpoint: _Optional[bool] = ..., latest_checkpoint: _Optional[_Union[Checkpoint, _Mapping]] = ..., resume_step: _Optional[int] = ..., resume_epoch: _Optional[int] = ..., shard_assignments: _Optional[_Iterable[_Union[ShardAssignment, _Mapping]]] = ...) -> None: ...

class ReportRecoveryRequest(_message.Message):
    __slots__ = ("worker_id", "incarnation", "phases_s", "resumed_step", "lost_steps", "tier", "world_before", "world_after", "reason", "survived", "lost", "joined", "cause", "hosts")
    class PhasesSEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    PHASES_S_FIELD_NUMBER: _ClassVar[int]
    RESUMED_STEP_FIELD_NUMBER: _ClassVar[int]
    LOST_STEPS_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    WORLD_BEFORE_FIELD_NUMBER: _ClassVar[int]
    WORLD_AFTER_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    SURVIVED_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    JOINED_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    HOSTS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    incarnation: int
    phases_s: _containers.ScalarMap[str, float]
    resumed_step: int
    lost_steps: int
    tier: str
    world_before: int
    world_after: int
    reason: str
    survived: int
    lost: _containers.RepeatedScalarFieldContainer[str]
    joined: _containers.RepeatedScalarFieldContainer[str]
    cause: str
    hosts: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, worker_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., phases_s: _Optional[_Mapping[str, float]] = ..., resumed_step: _Optional[int] = ..., lost_steps: _Optional[int] = ..., tier: _Optional[str] = ..., world_before: _Optional[int] = ..., world_after: _Optional[int] = ..., reason: _Optional[str] = ..., survived: _Optional[int] = ..., lost: _Optional[_Iterable[str]] = ..., joined: _Optional[_Iterable[str]] = ..., cause: _Optional[str] = ..., hosts: _Optional[_Iterable[str]] = ...) -> None: ...

class ReportRecoveryResponse(_message.Message):
    __slots__ = ("acknowledged",)
    ACKNOWLEDGED_FIELD_NUMBER: _ClassVar[int]
    acknowledged: bool
    def __init__(self, acknowledged: _Optional[bool] = ...) -> None: ...

class WorkerError(_message.Message):
    __slots__ = ("type", "message", "where", "step", "traceback")
    TYPE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    WHERE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    TRACEBACK_FIELD_NUMBER: _ClassVar[int]
    type: str
    message: str
    where: _containers.RepeatedScalarFieldContainer[str]
    step: int
    traceback: str
    def __init__(self, type: _Optional[str] = ..., message: _Optional[str] = ..., where: _Optional[_Iterable[str]] = ..., step: _Optional[int] = ..., traceback: _Optional[str] = ...) -> None: ...

class WorkerFailure(_message.Message):
    __slots__ = ("rank", "host", "pid", "gpu", "at", "exit_code", "error", "oom_killed", "device_faults", "last_lines", "replaced")
    RANK_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    GPU_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    EXIT_CODE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    OOM_KILLED_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FAULTS_FIELD_NUMBER: _ClassVar[int]
    LAST_LINES_FIELD_NUMBER: _ClassVar[int]
    REPLACED_FIELD_NUMBER: _ClassVar[int]
    rank: int
    host: str
    pid: int
    gpu: str
    at: float
    exit_code: int
    error: WorkerError
    oom_killed: bool
    device_faults: _containers.RepeatedScalarFieldContainer[str]
    last_lines: _containers.RepeatedScalarFieldContainer[str]
    replaced: str
    def __init__(self, rank: _Optional[int] = ..., host: _Optional[str] = ..., pid: _Optional[int] = ..., gpu: _Optional[str] = ..., at: _Optional[float] = ..., exit_code: _Optional[int] = ..., error: _Optional[_Union[WorkerError, _Mapping]] = ..., oom_killed: _Optional[bool] = ..., device_faults: _Optional[_Iterable[str]] = ..., last_lines: _Optional[_Iterable[str]] = ..., replaced: _Optional[str] = ...) -> None: ...

class ReportFailureRequest(_message.Message):
    __slots__ = ("failures", "launch", "job_id", "stops", "reason", "quarantine")
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    LAUNCH_FIELD_NUMBER: _ClassVar[int]
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    STOPS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    QUARANTINE_FIELD_NUMBER: _ClassVar[int]
    failures: _containers.RepeatedCompositeFieldContainer[WorkerFailure]
    launch: str
    job_id: str
    stops: bool
    reason: str
    quarantine: bool
    def __init__(self, failures: _Optional[_Iterable[_Union[WorkerFailure, _Mapping]]] = ..., launch: _Optional[str] = ..., job_id: _Optional[str] = ..., stops: _Optional[bool] = ..., reason: _Optional[str] = ..., quarantine: _Optional[bool] = ...) -> None: ...

class ReportFailureResponse(_message.Message):
    __slots__ = ("acknowledged",)
    ACKNOWLEDGED_FIELD_NUMBER: _ClassVar[int]
    acknowledged: bool
    def __init__(self, acknowledged: _Optional[bool] = ...) -> None: ...

class AdmitHostRequest(_message.Message):
    __slots__ = ("host",)
    HOST_FIELD_NUMBER: _ClassVar[int]
    host: str
    def __init__(self, host: _Optional[str] = ...) -> None: ...

class AdmitHostResponse(_message.Message):
    __slots__ = ("admitted",)
    ADMITTED_FIELD_NUMBER: _ClassVar[int]
    admitted: bool
    def __init__(self, admitted: _Optional[bool] = ...) -> None: ...

class AnnounceDrainRequest(_message.Message):
    __slots__ = ("host", "within_s", "reason", "source")
    HOST_FIELD_NUMBER: _ClassVar[int]
    WITHIN_S_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    host: str
    within_s: float
    reason: str
    source: str
    def __init__(self, host: _Optional[str] = ..., within_s: _Optional[float] = ..., reason: _Optional[str] = ..., source: _Optional[str] = ...) -> None: ...

class AnnounceDrainResponse(_message.Message):
    __slots__ = ("within_s",)
    WITHIN_S_FIELD_NUMBER: _ClassVar[int]
    within_s: float
    def __init__(self, within_s: _Optional[float] = ...) -> None: ...

class ReportHandoverRequest(_message.Message):
    __slots__ = ("host", "node", "launch", "job_id", "saved_step", "lost_steps", "where", "reason")
    HOST_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    LAUNCH_FIELD_NUMBER: _ClassVar[int]
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    SAVED_STEP_FIELD_NUMBER: _ClassVar[int]
    LOST_STEPS_FIELD_NUMBER: _ClassVar[int]
    WHERE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    host: str
    node: str
    launch: str
    job_id: str
    saved_step: int
    lost_steps: int
    where: str
    reason: str
    def __init__(self, host: _Optional[str] = ..., node: _Optional[str] = ..., launch: _Optional[str] = ..., job_id: _Optional[str] = ..., saved_step: _Optional[int] = ..., lost_steps: _Optional[int] = ..., where: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class ReportHandoverResponse(_message.Message):
    __slots__ = ("acknowledged",)
    ACKNOWLEDGED_FIELD_NUMBER: _ClassVar[int]
    acknowledged: bool
    def __init__(self, acknowledged: _Optional[bool] = ...) -> None: ...

class ReportHealthRequest(_message.Message):
    __slots__ = ("host", "kind", "measured", "failed", "clock", "seconds", "reason")
    class MeasuredEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class FailedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    HOST_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    MEASURED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    host: str
    kind: str
    measured: _containers.ScalarMap[str, float]
    failed: _containers.ScalarMap[str, str]
    clock: float
    seconds: float
    reason: str
    def __init__(self, host: _Optional[str] = ..., kind: _Optional[str] = ..., measured: _Optional[_Mapping[str, float]] = ..., failed: _Optional[_Mapping[str, str]] = ..., clock: _Optional[float] = ..., seconds: _Optional[float] = ..., reason: _Optional[str] = ...) -> None: ...

class ReportHealthResponse(_message.Message):
    __slots__ = ("unfit",)
    UNFIT_FIELD_NUMBER: _ClassVar[int]
    unfit: str
    def __init__(self, unfit: _Optional[str] = ...) -> None: ...

class ReadValueRequest(_message.Message):
    __slots__ = ("key",)
    KEY_FIELD_NUMBER: _ClassVar[int]
    key: str
    def __init__(self, key: _Optional[str] = ...) -> None: ...

class SwapValueRequest(_message.Message):
    __slots__ = ("key", "value", "expected_version", "soft")
    KEY_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_VERSION_FIELD_NUMBER: _ClassVar[int]
    SOFT_FIELD_NUMBER: _ClassVar[int]
    key: str
    value: bytes
    expected_version: int
    soft: bool
    def __init__(self, key: _Optional[str] = ..., value: _Optional[bytes] = ..., expected_version: _Optional[int] = ..., soft: _Optional[bool] = ...) -> None: ...

class ValueResponse(_message.Message):
    __slots__ = ("swapped", "value", "version")
    SWAPPED_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    swapped: bool
    value: bytes
    version: int
    def __init__(self, swapped: _Optional[bool] = ..., value: _Optional[bytes] = ..., version: _Optional[int] = ...) -> None: ...

class AgentHello(_message.Message):
    __slots__ = ("key", "node", "host")
    KEY_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    key: str
    node: str
    host: str
    def __init__(self, key: _Optional[str] = ..., node: _Optional[str] = ..., host: _Optional[str] = ...) -> None: ...

class AgentMessage(_message.Message):
    __slots__ = ("hello", "goodbye")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    GOODBYE_FIELD_NUMBER: _ClassVar[int]
    hello: AgentHello
    goodbye: Goodbye
    def __init__(self, hello: _Optional[_Union[AgentHello, _Mapping]] = ..., goodbye: _Optional[_Union[Goodbye, _Mapping]] = ...) -> None: ...

class PresenceNotice(_message.Message):
    __slots__ = ("version", "lost", "leave", "within_s")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    LEAVE_FIELD_NUMBER: _ClassVar[int]
    WITHIN_S_FIELD_NUMBER: _ClassVar[int]
    version: int
    lost: _containers.RepeatedScalarFieldContainer[str]
    leave: str
    within_s: float
    def __init__(self, version: _Optional[int] = ..., lost: _Optional[_Iterable[str]] = ..., leave: _Optional[str] = ..., within_s: _Optional[float] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("worker_id", "incarnation")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    incarnation: int
    def __init__(self, worker_id: _Optional[str] = ..., incarnation: _Optional[int] = ...) -> None: ...

class LogEntry(_message.Message):
    __slots__ = ("timestamp", "level", "message", "source", "task_id")
    TIMESTAMP_FIELD_NUMBER: _ClassVar[int]
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    TASK_ID_FIELD_NUMBER: _ClassVar[int]
    timestamp: float
    level: str
    message: str
    source: str
    task_id: str
    def __init__(self, timestamp: _Optional[float] = ..., level: _Optional[str] = ..., message: _Optional[str] = ..., source: _Optional[str] = ..., task_id: _Optional[str] = ...) -> None: ...

class LogBatch(_message.Message):
    __slots__ = ("entries", "dropped")
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    entries: _containers.RepeatedCompositeFieldContainer[LogEntry]
    dropped: int
    def __init__(self, entries: _Optional[_Iterable[_Union[LogEntry, _Mapping]]] = ..., dropped: _Optional[int] = ...) -> None: ...

class MetricRows(_message.Message):
    __slots__ = ("names", "steps", "times", "values")
    NAMES_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    TIMES_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    names: _containers.RepeatedScalarFieldContainer[str]
    steps: _containers.RepeatedScalarFieldContainer[int]
    times: _containers.RepeatedScalarFieldContainer[float]
    values: bytes
    def __init__(self, names: _Optional[_Iterable[str]] = ..., steps: _Optional[_Iterable[int]] = ..., times: _Optional[_Iterable[float]] = ..., values: _Optional[bytes] = ...) -> None: ...

class MetricBatch(_message.Message):
    __slots__ = ("number", "generation", "started_ms", "resumed_step", "rows", "dropped", "details")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    STARTED_MS_FIELD_NUMBER: _ClassVar[int]
    RESUMED_STEP_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    DETAILS_FIELD_NUMBER: _ClassVar[int]
    number: int
    generation: int
    started_ms: int
    resumed_step: int
    rows: _containers.RepeatedCompositeFieldContainer[MetricRows]
    dropped: int
    details: bytes
    def __init__(self, number: _Optional[int] = ..., generation: _Optional[int] = ..., started_ms: _Optional[int] = ..., resumed_step: _Optional[int] = ..., rows: _Optional[_Iterable[_Union[MetricRows, _Mapping]]] = ..., dropped: _Optional[int] = ..., details: _Optional[bytes] = ...) -> None: ...

class MetricsKept(_message.Message):
    __slots__ = ("number", "started_ms", "refused")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    STARTED_MS_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    number: int
    started_ms: int
    refused: str
    def __init__(self, number: _Optional[int] = ..., started_ms: _Optional[int] = ..., refused: _Optional[str] = ...) -> None: ...

class ShardProgress(_message.Message):
    __slots__ = ("dataset_id", "epoch", "shard_id", "samples_done")
    DATASET_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SHARD_ID_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_DONE_FIELD_NUMBER: _ClassVar[int]
    dataset_id: str
    epoch: int
    shard_id: int
    samples_done: int
    def __init__(self, dataset_id: _Optional[str] = ..., epoch: _Optional[int] = ..., shard_id: _Optional[int] = ..., samples_done: _Optional[int] = ...) -> None: ...

class Progress(_message.Message):
    __slots__ = ("generation", "step", "shards")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    generation: int
    step: int
    shards: _containers.RepeatedCompositeFieldContainer[ShardProgress]
    def __init__(self, generation: _Optional[int] = ..., step: _Optional[int] = ..., shards: _Optional[_Iterable[_Union[ShardProgress, _Mapping]]] = ...) -> None: ...

class Goodbye(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class MachineHello(_message.Message):
    __slots__ = ("host",)
    HOST_FIELD_NUMBER: _ClassVar[int]
    host: str
    def __init__(self, host: _Optional[str] = ...) -> None: ...

class Attach(_message.Message):
    __slots__ = ("worker_id", "incarnation")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    incarnation: int
    def __init__(self, worker_id: _Optional[str] = ..., incarnation: _Optional[int] = ...) -> None: ...

class Detach(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Report(_message.Message):
    __slots__ = ("member", "status", "resources")
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    RESOURCES_FIELD_NUMBER: _ClassVar[int]
    member: int
    status: WorkerStatus
    resources: ResourceUsage
    def __init__(self, member: _Optional[int] = ..., status: _Optional[_Union[WorkerStatus, _Mapping]] = ..., resources: _Optional[_Union[ResourceUsage, _Mapping]] = ...) -> None: ...

class Beats(_message.Message):
    __slots__ = ("members", "reports")
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    REPORTS_FIELD_NUMBER: _ClassVar[int]
    members: _containers.RepeatedScalarFieldContainer[int]
    reports: _containers.RepeatedCompositeFieldContainer[Report]
    def __init__(self, members: _Optional[_Iterable[int]] = ..., reports: _Optional[_Iterable[_Union[Report, _Mapping]]] = ...) -> None: ...

class Arrivals(_message.Message):
    __slots__ = ("barrier", "members", "call_ids")
    BARRIER_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    CALL_IDS_FIELD_NUMBER: _ClassVar[int]
    barrier: WaitBarrierRequest
    members: _containers.RepeatedScalarFieldContainer[int]
    call_ids: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, barrier: _Optional[_Union[WaitBarrierRequest, _Mapping]] = ..., members: _Optional[_Iterable[int]] = ..., call_ids: _Optional[_Iterable[bytes]] = ...) -> None: ...

class Topologies(_message.Message):
    __slots__ = ("topology", "members", "ranks")
    TOPOLOGY_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    topology: Topology
    members: _containers.RepeatedScalarFieldContainer[int]
    ranks: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, topology: _Optional[_Union[Topology, _Mapping]] = ..., members: _Optional[_Iterable[int]] = ..., ranks: _Optional[_Iterable[int]] = ...) -> None: ...

class Outcomes(_message.Message):
    __slots__ = ("outcome", "members", "call_ids", "orders")
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    CALL_IDS_FIELD_NUMBER: _ClassVar[int]
    ORDERS_FIELD_NUMBER: _ClassVar[int]
    outcome: BarrierOutcome
    members: _containers.RepeatedScalarFieldContainer[int]
    call_ids: _containers.RepeatedScalarFieldContainer[bytes]
    orders: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, outcome: _Optional[_Union[BarrierOutcome, _Mapping]] = ..., members: _Optional[_Iterable[int]] = ..., call_ids: _Optional[_Iterable[bytes]] = ..., orders: _Optional[_Iterable[int]] = ...) -> None: ...

class WorkerMessage(_message.Message):
    __slots__ = ("member", "hello", "heartbeat", "barrier", "progress", "logs", "goodbye", "metrics", "machine", "attach", "detach", "beats", "arrivals")
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    HELLO_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    BARRIER_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    LOGS_FIELD_NUMBER: _ClassVar[int]
    GOODBYE_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    MACHINE_FIELD_NUMBER: _ClassVar[int]
    ATTACH_FIELD_NUMBER: _ClassVar[int]
    DETACH_FIELD_NUMBER: _ClassVar[int]
    BEATS_FIELD_NUMBER: _ClassVar[int]
    ARRIVALS_FIELD_NUMBER: _ClassVar[int]
    member: int
    hello: Hello
    heartbeat: HeartbeatRequest
    barrier: WaitBarrierRequest
    progress: Progress
    logs: LogBatch
    goodbye: Goodbye
    metrics: MetricBatch
    machine: MachineHello
    attach: Attach
    detach: Detach
    beats: Beats
    arrivals: Arrivals
    def __init__(self, member: _Optional[int] = ..., hello: _Optional[_Union[Hello, _Mapping]] = ..., heartbeat: _Optional[_Union[HeartbeatRequest, _Mapping]] = ..., barrier: _Optional[_Union[WaitBarrierRequest, _Mapping]] = ..., progress: _Optional[_Union[Progress, _Mapping]] = ..., logs: _Optional[_Union[LogBatch, _Mapping]] = ..., goodbye: _Optional[_Union[Goodbye, _Mapping]] = ..., metrics: _Optional[_Union[MetricBatch, _Mapping]] = ..., machine: _Optional[_Union[MachineHello, _Mapping]] = ..., attach: _Optional[_Union[Attach, _Mapping]] = ..., detach: _Optional[_Union[Detach, _Mapping]] = ..., beats: _Optional[_Union[Beats, _Mapping]] = ..., arrivals: _Optional[_Union[Arrivals, _Mapping]] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("server_timestamp_ms", "heartbeat_interval_ms")
    SERVER_TIMESTAMP_MS_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_INTERVAL_MS_FIELD_NUMBER: _ClassVar[int]
    server_timestamp_ms: int
    heartbeat_interval_ms: int
    def __init__(self, server_timestamp_ms: _Optional[int] = ..., heartbeat_interval_ms: _Optional[int] = ...) -> None: ...

class Topology(_message.Message):
    __slots__ = ("generation", "rank", "world_size", "reason")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    generation: int
    rank: int
    world_size: int
    reason: str
    def __init__(self, generation: _Optional[int] = ..., rank: _Optional[int] = ..., world_size: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class PlanChanged(_message.Message):
    __slots__ = ("dataset_id", "plan_version", "reason")
    DATASET_ID_FIELD_NUMBER: _ClassVar[int]
    PLAN_VERSION_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    dataset_id: str
    plan_version: int
    reason: str
    def __init__(self, dataset_id: _Optional[str] = ..., plan_version: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class BarrierOutcome(_message.Message):
    __slots__ = ("call_id", "outcome", "error_code", "error_cause")
    CALL_ID_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    ERROR_CODE_FIELD_NUMBER: _ClassVar[int]
    ERROR_CAUSE_FIELD_NUMBER: _ClassVar[int]
    call_id: bytes
    outcome: WaitBarrierResponse
    error_code: str
    error_cause: str
    def __init__(self, call_id: _Optional[bytes] = ..., outcome: _Optional[_Union[WaitBarrierResponse, _Mapping]] = ..., error_code: _Optional[str] = ..., error_cause: _Optional[str] = ...) -> None: ...

class Stale(_message.Message):
    __slots__ = ("reason", "cause")
    REASON_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    reason: str
    cause: str
    def __init__(self, reason: _Optional[str] = ..., cause: _Optional[str] = ...) -> None: ...

class CoordinatorMessage(_message.Message):
    __slots__ = ("member", "welcome", "topology", "plan", "barrier", "command", "stale", "goodbye", "metrics_kept", "topologies", "outcomes", "detach")
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    TOPOLOGY_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    BARRIER_FIELD_NUMBER: _ClassVar[int]
    COMMAND_FIELD_NUMBER: _ClassVar[int]
    STALE_FIELD_NUMBER: _ClassVar[int]
    GOODBYE_FIELD_NUMBER: _ClassVar[int]
    METRICS_KEPT_FIELD_NUMBER: _ClassVar[int]
    TOPOLOGIES_FIELD_NUMBER: _ClassVar[int]
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    DETACH_FIELD_NUMBER: _ClassVar[int]
    member: int
    welcome: Welcome
    topology: Topology
    plan: PlanChanged
    barrier: BarrierOutcome
    command: PendingCommand
    stale: Stale
    goodbye: Goodbye
    metrics_kept: MetricsKept
    topologies: Topologies
    outcomes: Outcomes
    detach: Detach
    def __init__(self, member: _Optional[int] = ..., welcome: _Optional[_Union[Welcome, _Mapping]] = ..., topology: _Optional[_Union[Topology, _Mapping]] = ..., plan: _Optional[_Union[PlanChanged, _Mapping]] = ..., barrier: _Optional[_Union[BarrierOutcome, _Mapping]] = ..., command: _Optional[_Union[PendingCommand, _Mapping]] = ..., stale: _Optional[_Union[Stale, _Mapping]] = ..., goodbye: _Optional[_Union[Goodbye, _Mapping]] = ..., metrics_kept: _Optional[_Union[MetricsKept, _Mapping]] = ..., topologies: _Optional[_Union[Topologies, _Mapping]] = ..., outcomes: _Optional[_Union[Outcomes, _Mapping]] = ..., detach: _Optional[_Union[Detach, _Mapping]] = ...) -> None: ...
