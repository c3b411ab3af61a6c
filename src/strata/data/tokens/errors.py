"""What can go wrong between text on disk and tokens in training.

Each error names the file, and the line where there is one, and says what to do next. An index that is damaged
or not an index is also a `ValueError`, a missing one also a `FileNotFoundError`: callers that only know Python
catch what they expect.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from strata.data.errors import DataError


class TokenDataError(DataError):
    """Base of every error about token data."""

    code = "token_data"

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (
            type(self),
            self.__dict__,
        )  # errors travel from tokenizing processes with their fields


def _rebuild(kind: type[TokenDataError], fields: dict[str, Any]) -> TokenDataError:
    error = kind.__new__(kind, fields["message"])
    error.__dict__.update(fields)
    return error


class BadRecord(TokenDataError):
    """One record of a source file cannot be used. `unit` is what `line` counts: lines, or rows of parquet."""

    code = "bad_record"

    def __init__(
        self, path: Path | str, line: int, reason: str, *, unit: str = "line", hint: str = ""
    ) -> None:
        super().__init__(
            f"{path}, {unit} {line}: {reason}.",
            path=str(path),
            line=line,
            hint=hint or "Correct it, or skip and count such records with --on-bad skip.",
        )
        self.unit = unit
        self.reason = reason


class MissingTextKey(BadRecord):
    """A record, or a parquet file, has no field of the expected name."""

    code = "missing_text_key"

    def __init__(
        self, path: Path | str, line: int, key: str, found: Sequence[str], *, unit: str = "line"
    ) -> None:
        fields = ", ".join(repr(name) for name in found) or "none"
        super().__init__(
            path,
            line,
            f"KeyError: {key!r} (available keys: {fields})",
            unit=unit,
            hint=f"Pass the right one: --text-key {found[0] if found else 'content'} (data.text_key in YAML).",
        )
        self.key = key
        self.found = tuple(found)


class SourceUnreadable(TokenDataError):
    """A source file is missing, empty, damaged, or changed while it was read."""

    code = "source_unreadable"

    def __init__(self, path: Path | str, reason: str, *, hint: str = "") -> None:
        super().__init__(f"{path}: {reason}.", path=str(path), hint=hint)
        self.reason = reason


class NothingToIndex(TokenDataError):
    """The files hold no tokens at all."""

    code = "nothing_to_index"


class WouldOverwrite(TokenDataError):
    """Something that is not an index stands where the index would be written."""

    code = "would_overwrite"

    def __init__(self, path: Path | str, reason: str) -> None:
        super().__init__(f"{path} {reason}.", path=str(path), hint="Choose another --output.")


class TokenizerUnavailable(TokenDataError):
    """The named tokenizer cannot be loaded here, or does not do what a tokenizer must."""

    code = "tokenizer_unavailable"


class BuildFailed(TokenDataError):
    """A tokenizing process died, the tokenizer raised, or the disk did not take the result."""

    code = "index_build_failed"


class InvalidIndex(TokenDataError, ValueError):
    """The file is not a token index this release can read."""

    code = "invalid_index"


class IndexNotFound(TokenDataError, FileNotFoundError):
    """There is no index at this path."""

    code = "index_not_found"

    def __init__(self, path: Path | str, *, hint: str = "") -> None:
        super().__init__(f"Token index file not found: {path}.", hint=hint or "Build it with: strata index")
        self.path = str(path)

    def __str__(self) -> str:
        return TokenDataError.__str__(self)  # OSError would print its own arguments


class StaleIndex(TokenDataError):
    """The index was built from other data, or with another tokenizer, than it is used with."""

    code = "stale_index"

    def __init__(self, index: Path | str, source: Path | str, reason: str, *, rebuild: str) -> None:
        super().__init__(f"Token index {index} is stale: {reason}.", hint=f"Build it again: {rebuild}")
        self.index = str(index)
        self.source = str(source)
        self.reason = reason
        self.rebuild = rebuild
