"""The errors of the checkpoint engine and the token engine, as the trainer's users know them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from strata.checkpoint import errors as engine
from strata.data.errors import StateMismatch
from strata.data.tokens.errors import BadRecord, MissingTextKey, SourceUnreadable, StaleIndex, TokenDataError
from strata.data.tokens.freshness import COMMAND
from strata.errors import StrataError
from strata.stores.protocol import NoCredentials, StoreError
from strata.trainer.errors import (
    CheckpointError,
    CheckpointLoadError,
    CheckpointSaveError,
    CheckpointValidationError,
    DataLoadingError,
    MemoryLimitExceeded,
)

_MB = 1 << 20


def save_error(error: BaseException, *, tier: str, path: str) -> CheckpointError:
    """What a failed save is called here. `tier` and `path` are used where the error does not carry them itself."""
    cause = error.__cause__ if isinstance(error, engine.SaveFailed) else error
    if isinstance(cause, engine.MemoryLimitExceeded):
        translated: CheckpointError = MemoryLimitExceeded.for_snapshot(
            required_mb=cause.required_bytes / _MB, available_mb=cause.available_bytes / _MB
        )
    elif isinstance(error, CheckpointError):
        return error
    elif isinstance(error, engine.InvalidSave):
        translated = CheckpointValidationError(error.message)
    else:
        if isinstance(error, engine.SaveFailed):
            tier, path = error.tier, error.path
        translated = CheckpointSaveError(
            _reason(error), tier=tier, path=None if isinstance(cause, NoCredentials) else path
        )
    translated.__cause__ = error
    return translated


def load_error(error: BaseException, *, path: str) -> CheckpointError:
    """What a failed load is called here."""
    if isinstance(error, CheckpointError):
        return error
    translated = CheckpointLoadError(_reason(error), path=path)
    translated.__cause__ = error
    return translated


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
    if isinstance(error, engine.LoadFailed) and len(error.causes) == 1:
        return _reason(error.causes[0])
    if isinstance(error, engine.SaveFailed | StoreError | engine.Damaged):
        return error.reason
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return error.message if isinstance(error, StrataError) else str(error) or type(error).__name__


@contextmanager
def reading_data(*, index_command: str = COMMAND) -> Iterator[None]:
    """`index_command` is how the caller's users build an index."""
    try:
        yield
    except (TokenDataError, StateMismatch) as error:
        raise data_error(error, index_command=index_command) from error


def data_error(error: StrataError, *, index_command: str = COMMAND) -> DataLoadingError:
    """What a failed read is called here."""
    match error:
        case MissingTextKey():
            record = f"{error.path}, {error.unit} {error.line}"
            return DataLoadingError.missing_text_key(error.key, record=record, found=error.found)
        case BadRecord():
            return DataLoadingError(
                f"{error.unit} {error.line}: {error.reason}", source=error.path, suggestions=(error.hint,)
            )
        case SourceUnreadable():
            hints = (error.hint,) if error.hint else ()
            return DataLoadingError(error.reason, source=error.path, suggestions=hints)
        case StaleIndex():
            return DataLoadingError(
                f"Token index '{error.index}' is stale: {error.reason}",
                source=error.source,
                suggestions=(f"Build it again: {respelt(error.rebuild, index_command)}",),
            )
        case _:
            return DataLoadingError(error.message, suggestions=(error.hint,) if error.hint else ())


def respelt(command: str, index_command: str) -> str:
    """A `strata index` command line as the caller's users write it."""
    if not command.startswith(f"{COMMAND} "):
        return command
    return f"{index_command} {command.removeprefix(COMMAND).lstrip()}"
