"""Which values of a run's metrics its model really went through.

A run is started several times. Each start resumes at the step of some checkpoint, so what earlier starts logged for later
steps describes a model that no longer exists: an **abandoned** branch. What is left is the **committed** history: at every
step what the present model was trained by. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """One start of a run. A run that is in memory alone may begin again under a generation that it has had."""

    generation: int
    started_ms: int
    resumed_step: int
    """It continues the history up to this step; 0 where it begins anew."""

    @property
    def order(self) -> tuple[int, int]:
        return (self.generation, self.started_ms)


def committed_until(starts: Iterable[Start]) -> dict[tuple[int, int], int | None]:
    """For each start, by its order, the last step whose values are committed; None where all of them are."""
    limits: dict[tuple[int, int], int | None] = {}
    least: int | None = None
    for start in sorted(starts, key=lambda each: each.order, reverse=True):
        limits[start.order] = least
        least = start.resumed_step if least is None else min(least, start.resumed_step)
    return limits
