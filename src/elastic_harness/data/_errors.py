"""What the token engine raises, in the words the harness promises: `DataLoadingError`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from elastic_harness.errors import DataLoadingError
from strata.data.errors import StateMismatch
from strata.data.tokens.errors import BadRecord, MissingTextKey, SourceUnreadable, StaleIndex, TokenDataError
from strata.data.tokens.freshness import COMMAND
from strata.errors import StrataError

HARNESS_COMMAND = "python -m elastic_harness.data.index_builder --data-files"


@contextmanager
def as_data_loading_error() -> Iterator[None]:
    try:
        yield
    except (TokenDataError, StateMismatch) as error:
        raise translated(error) from error


def translated(error: StrataError) -> DataLoadingError:
    match error:
        case MissingTextKey():
            keys = ", ".join(repr(name) for name in error.found) or "no keys"
            return DataLoadingError(
                f"KeyError: {error.key!r}",
                suggestions=(
                    f"{error.path}, {error.unit} {error.line} has the available keys {keys}",
                    f'Name the right one: data.text_key: "{error.found[0] if error.found else "content"}" '
                    "(--text-key on the command line)",
                    f'Or rewrite the data as {{"{error.key}": "..."}} on each line',
                ),
            )
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
                suggestions=(f"Build it again: {harness_command(error.rebuild)}",),
            )
        case _:
            return DataLoadingError(error.message, suggestions=(error.hint,) if error.hint else ())


def harness_command(command: str) -> str:
    """The harness's spelling of a `strata index` command line."""
    if not command.startswith(f"{COMMAND} "):
        return command
    return f"{HARNESS_COMMAND} {command.removeprefix(COMMAND).lstrip()}"
