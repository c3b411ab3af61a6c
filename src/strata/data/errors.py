"""What can go wrong with data, each as its own type with the place as fields.

All of them can be made from a message alone, which is how PyTorch re-raises what went wrong in a loader process.
"""

from __future__ import annotations

from strata.errors import StrataError


class DataError(StrataError):
    """A dataset, or one record of it, cannot be read."""

    code = "data_error"

    def __init__(
        self, message: str, *, path: str = "", line: int | None = None, hint: str = "", command_hint: str = ""
    ) -> None:
        super().__init__(message, hint=hint)
        self.command_hint = command_hint
        """The next step in words of the command line, where those of Python differ."""
        self.path = path
        self.line = line
        """Line, record or row of a bad record, counted from 1 as editors do."""

    @classmethod
    def at(
        cls,
        path: str,
        reason: str,
        *,
        line: int | None = None,
        unit: str = "line",
        hint: str = "",
        command_hint: str = "",
    ) -> DataError:
        where = f"'{path}'" if line is None else f"'{path}', {unit} {line:,}"
        sentence = f"Failed to load data from {where}: {reason.removesuffix('.')}."
        return cls(sentence, path=path, line=line, hint=hint, command_hint=command_hint)


class StateMismatch(StrataError):
    """A data position was used with other data, in another order or out of turn. Continuing would lose or repeat samples,
    so nothing was changed."""

    code = "data_state_mismatch"
