"""The engine's errors, told in the harness's words."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from elastic_harness.errors import (
    CheckpointError,
    CheckpointLoadError,
    CheckpointSaveError,
    CheckpointValidationError,
    MemoryLimitExceeded,
)
from strata.checkpoint import errors as engine
from strata.errors import StrataError
from strata.stores.protocol import NoCredentials, StoreError

_MB = 1 << 20


def save_error(error: BaseException, *, tier: str, path: str) -> CheckpointError:
    """What a failed save is called here. `tier` and `path` are used where the error does not tell them itself."""
    cause = error.__cause__ if isinstance(error, engine.SaveFailed) else error
    if isinstance(cause, engine.MemoryLimitExceeded):
        told: CheckpointError = MemoryLimitExceeded.for_snapshot(
            required_mb=cause.required_bytes / _MB, available_mb=cause.available_bytes / _MB
        )
    elif isinstance(error, CheckpointError):
        return error
    elif isinstance(error, engine.InvalidSave):
        told = CheckpointValidationError(error.message)
    else:
        if isinstance(error, engine.SaveFailed):
            tier, path = error.tier, error.path
        told = CheckpointSaveError(
            _reason(error), tier=tier, path=None if isinstance(cause, NoCredentials) else path
        )
    told.__cause__ = error
    return told


def load_error(error: BaseException, *, path: str) -> CheckpointError:
    """What a failed load is called here."""
    if isinstance(error, CheckpointError):
        return error
    told = CheckpointLoadError(_reason(error), path=path)
    told.__cause__ = error
    return told


@contextmanager
def saving(*, tier: str, path: str) -> Iterator[None]:
    try:
        yield
    except (StrataError, OSError) as error:
        raise save_error(error, tier=tier, path=path) from error


@contextmanager
def loading(*, path: str) -> Iterator[None]:
    try:
        yield
    except (StrataError, OSError) as error:
        raise load_error(error, path=path) from error


def _reason(error: BaseException) -> str:
    if isinstance(error, engine.SaveFailed | StoreError | engine.Damaged):
        return error.reason
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return error.message if isinstance(error, StrataError) else str(error) or type(error).__name__
