"""Looking at a dataset's files on behalf of the API: how many samples there are, and what some look like."""

from __future__ import annotations

from strata.core.messages import FileSpan, InvalidArgument


async def count_samples(
    path: str, format: str, total_samples: int | None
) -> tuple[int, tuple[FileSpan, ...]]:
    """The number of samples, and the files they are in where this process can see them."""
    if total_samples is not None:
        return total_samples, ()
    raise InvalidArgument("total_samples", "is missing.", hint="Say how many samples there are.")
