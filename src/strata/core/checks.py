"""What a name, a count or a text may be, said once.

Every check raises `InvalidArgument` with the field, what was wrong and what to write instead. Callers run
these before they look at any state, so a bad value never changes anything.
"""

from __future__ import annotations

from collections.abc import Mapping

from strata.core.messages import DatasetSpec, InvalidArgument, WorkerSpec, shorten

NAME_LIMIT = 256
TEXT_LIMIT = 4096
PAIRS_LIMIT = 64
SAMPLES_LIMIT = 2**53  # beyond this JSON numbers lose digits
SHARDS_LIMIT = 5_000_000
COUNT_LIMIT = 2**31 - 1


def name(field: str, value: str, *, limit: int = NAME_LIMIT) -> None:
    """A label people read and type: not empty, not huge, no control characters."""
    if not value or not value.strip():
        raise InvalidArgument(field, "must not be empty.", hint="Give it a name, for example 'worker-01'.")
    text(field, value, limit=limit)
    if any(ord(c) < 32 or ord(c) == 127 for c in value):
        raise InvalidArgument(
            field,
            f"contains control characters ({shorten(value, 40)!a}).",
            hint="Use letters, digits, '-', '_', '.', ':' or '/'.",
        )


def text(field: str, value: str, *, limit: int = TEXT_LIMIT) -> None:
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
            f"is {value:,}, which is outside {low:,} to {high:,}.",
            hint="Choose a value in that range.",
        )


def pairs(field: str, value: Mapping[str, str]) -> None:
    if len(value) > PAIRS_LIMIT:
        raise InvalidArgument(
            field, f"has {len(value):,} entries; at most {PAIRS_LIMIT} are allowed.", hint="Send fewer."
        )
    for key, item in value.items():
        name(f"{field} key", key)
        text(f"{field}[{shorten(key)}]", item)


def worker(spec: WorkerSpec) -> None:
    name("worker_id", spec.worker_id)
    name("job_id", spec.job_id)
    text("hostname", spec.hostname, limit=NAME_LIMIT)
    between("port", spec.port, 0, 65535)
    between("gpu_count", spec.gpu_count, 0, 1024)
    between("memory_bytes", spec.memory_bytes, 0, SAMPLES_LIMIT)
    pairs("metadata", spec.metadata)


def dataset(spec: DatasetSpec) -> None:
    name("dataset_id", spec.dataset_id)
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
