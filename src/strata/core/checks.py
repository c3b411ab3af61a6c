"""What a name, a count or a text may be, said once.

Every check raises `InvalidArgument` with the field, what was wrong and what to write instead. Callers run
these before they look at any state, so a bad value never changes anything.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping

from strata.core.messages import DatasetSpec, InvalidArgument, Report, Resources, WorkerSpec, shorten

NAME_LIMIT = 256
_IDENTIFIER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._:-]*")
TEXT_LIMIT = 4096
PAIRS_LIMIT = 64
SAMPLES_LIMIT = 2**53  # beyond this JSON numbers lose digits
METRICS_LIMIT = 32
USUAL_METRICS = frozenset(
    {
        "account_began_s",
        "checkpoint_total_s",
        "data_position",
        "loss",
        "lr",
        "peer_step",
        "recovery_total_s",
        "samples_per_second",
        "snapshot_step",
        "step_time_s",
        "sync_wait_s",
        "tokens_per_second",
        "total_steps",
        "training_total_s",
        "waiting_total_s",
    }
)
"""Names of metrics that every heartbeat may carry: known to be fine, so their letters are not looked at."""
PERCENT_LIMIT = 1e6  # of one core, so that thousands of cores fit
SHARDS_LIMIT = 1_000_000  # a plan of so many is still made in well under a second
FILES_LIMIT = 100_000
DEPTH_LIMIT = 32


def name(field: str, value: str, *, limit: int = NAME_LIMIT) -> None:
    """A label people read and type: not empty, not huge, no control characters."""
    if not value or not value.strip():
        raise InvalidArgument(field, "must not be empty.", hint="Give it a name, for example 'worker-01'.")
    text(field, value, limit=limit)
    usual = value.isprintable()  # One look at most names; only the others are read letter by letter.
    if not usual and any(c < " " or "\x7f" <= c <= "\x9f" or c in "\u2028\u2029" for c in value):
        raise InvalidArgument(
            field,
            f"contains control characters ('{shorten(value, 40)}').",
            hint="Use letters, digits, '-', '_', '.', ':' or '/'.",
        )


def identifier(field: str, value: str) -> None:
    """A name that is part of addresses and of file names: it can be neither a path nor anything but itself there."""
    name(field, value)
    if not _IDENTIFIER.fullmatch(value):
        raise InvalidArgument(
            field,
            f"is '{shorten(value, 40)}'; it may contain only letters, digits and '-', '_', '.', ':', and must "
            "begin with a letter, a digit or '_'.",
            hint="Choose such an id; put a display name in metadata={'name': …}.",
        )


def text(field: str, value: str, *, limit: int = TEXT_LIMIT) -> None:
    """Text for people: of bounded length, and such that they can be written down."""
    if len(value) > limit:
        raise InvalidArgument(
            field, f"is {len(value):,} characters long; at most {limit:,} are allowed.", hint="Shorten it."
        )
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InvalidArgument(field, "is not valid Unicode.", hint="Send well-formed UTF-8.") from None
    if "\0" in value:
        raise InvalidArgument(field, "contains a NUL character.", hint="Remove it.")


def between(field: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:  # also refuses NaN
        raise InvalidArgument(
            field,
            f"is {number(value)}, which is outside {low:,} to {high:,}.",
            hint="Choose a value in that range.",
        )


def number(value: float) -> str:
    """A number in a message: a caller may have sent one of thousands of digits."""
    if isinstance(value, int) and value.bit_length() > 128:
        return f"a number of {value.bit_length():,} bits"
    return f"{value:,}"


def pairs(field: str, value: Mapping[str, str]) -> None:
    if len(value) > PAIRS_LIMIT:
        raise InvalidArgument(
            field, f"has {len(value):,} entries; at most {PAIRS_LIMIT} are allowed.", hint="Send fewer."
        )
    for key, item in value.items():
        name(f"{field} key", key)
        text(f"{field}[{shorten(key)}]", item)


def json_object(field: str, value: str, *, limit: int) -> None:
    """A JSON object that every reader of JSON understands alike."""
    text(field, value, limit=limit)
    try:
        parsed = json.loads(value)
    except (ValueError, RecursionError):
        parsed = None
    if not isinstance(parsed, dict):
        raise InvalidArgument(field, "is not a JSON object.", hint='Send for example {"batch_size": 32}.')
    if not _is_portable(parsed, DEPTH_LIMIT):
        raise InvalidArgument(
            field,
            f"is nested more than {DEPTH_LIMIT} deep, or holds a number beyond 64 bits or broken Unicode.",
            hint="Use plain, flat values.",
        )


def _is_portable(value: object, depth: int) -> bool:
    match value:
        case dict():
            items = (_is_portable(k, 0) and _is_portable(v, depth - 1) for k, v in value.items())
            return depth > 0 and all(items)
        case list():
            return depth > 0 and all(_is_portable(item, depth - 1) for item in value)
        case str():
            return value.isascii() or not any("\ud800" <= c <= "\udfff" for c in value)
        case int():
            return -(2**63) <= value < 2**64
        case float():
            return math.isfinite(value)
    return value is None


def worker(spec: WorkerSpec) -> None:
    name("worker_id", spec.worker_id)
    name("job_id", spec.job_id)
    text("hostname", spec.hostname, limit=NAME_LIMIT)
    between("port", spec.port, 0, 65535)
    between("gpu_count", spec.gpu_count, 0, 1024)
    between("memory_bytes", spec.memory_bytes, 0, SAMPLES_LIMIT)
    pairs("metadata", spec.metadata)
    run(spec.run_id, spec.run_generation)


def run(run_id: str, generation: int) -> None:
    text("run_id", run_id, limit=NAME_LIMIT)
    between("run_generation", generation, 0, SAMPLES_LIMIT)


def dataset(spec: DatasetSpec) -> None:
    identifier("dataset_id", spec.dataset_id)
    name("path", spec.path, limit=TEXT_LIMIT)
    name("format", spec.format, limit=64)
    between("total_samples", spec.total_samples, 1, SAMPLES_LIMIT)
    between("shard_size", spec.shard_size, 1, SAMPLES_LIMIT)
    between("seed", spec.seed, 0, 2**64 - 1)
    pairs("metadata", spec.metadata)
    if spec.shard_count > SHARDS_LIMIT:
        raise InvalidArgument(
            "shard_size",
            f"of {spec.shard_size:,} would make {spec.shard_count:,} shards; at most {SHARDS_LIMIT:,} are kept.",
            hint=f"Use a shard_size of at least {-(-spec.total_samples // SHARDS_LIMIT):,}.",
        )
    if spec.files:
        files(spec)


def files(spec: DatasetSpec) -> None:
    between("number of files", len(spec.files), 0, FILES_LIMIT)
    for file in spec.files:
        text("files path", file.path)
        between("files samples", file.samples, 0, SAMPLES_LIMIT)
    counted = sum(file.samples for file in spec.files)
    if counted != spec.total_samples:
        raise InvalidArgument(
            "total_samples",
            f"is {spec.total_samples:,}, but the files hold {counted:,}.",
            hint="Leave it out, or correct it.",
        )


def report(value: Report) -> None:
    """What a heartbeat says. There are many of them: numbers are compared here, and explained where one is odd."""
    if len(value.state) > 64 or len(value.task) > NAME_LIMIT:
        text("state", value.state, limit=64)
        text("current_task", value.task, limit=NAME_LIMIT)
    if value.step > SAMPLES_LIMIT or value.epoch > SAMPLES_LIMIT:
        between("current_step", value.step, 0, SAMPLES_LIMIT)
        between("current_epoch", value.epoch, 0, SAMPLES_LIMIT)
    if value.metrics:
        between("number of metrics", len(value.metrics), 0, METRICS_LIMIT)
        for key in value.metrics.keys() - USUAL_METRICS:
            name("metrics key", key)
    if value.resources is not None:
        _resources(value.resources)


def _resources(used: Resources) -> None:
    between("cpu_percent", used.cpu_percent, 0, PERCENT_LIMIT)
    largest = max(
        used.memory_used_bytes,
        used.disk_read_bytes,
        used.disk_write_bytes,
        used.network_rx_bytes,
        used.network_tx_bytes,
    )
    between("bytes of memory, disk and network", largest, 0, SAMPLES_LIMIT)
    for gpu in used.gpus:
        between("utilization_percent", gpu.utilization_percent, 0, PERCENT_LIMIT)
        between("bytes of GPU memory", max(gpu.memory_used_bytes, gpu.memory_total_bytes), 0, SAMPLES_LIMIT)
