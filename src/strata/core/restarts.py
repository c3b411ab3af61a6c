"""Whether starting a run's workers again can help: not after an error that comes back although no step was completed.

A typo, a missing file or a wrong shape fails the same way each time. The second time in a row, without a new step in
between, the run is given up with that error. A step is new if no attempt before had made it: what a restart repeats does
not count. Where others continue while one is replaced, steps are theirs too, so there the third time counts, whatever was made.
What says nothing about the program itself neither counts nor is forgotten: workers that were killed, and those that lost a
peer. Pure: the caller says how long an attempt lasted.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

QUICK_S = 60.0
"""A program that reports no steps may still have made progress if an attempt lasted longer."""

MOST_ALIKE = 3
"""So often one worker may fail by the same error, soon after it was replaced, while others continue."""

_NUMBERS = re.compile(r"0x[0-9a-f]+|\d+")
_PEERS = re.compile(
    r"connection (closed|reset|refused|was broken)|broken pipe|gloo|nccl|socket ?timeout|timed out"
    r"|connect(ed)? to|process group|peer",
    re.IGNORECASE,
)
_PEER_TYPES = frozenset(
    {"DistError", "DistBackendError", "DistNetworkError", "DistStoreError", "ConnectionError"}
    | {"ConnectionResetError", "ConnectionRefusedError", "ConnectionAbortedError", "BrokenPipeError"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerError:
    """What ended a worker, in its own words."""

    type: str
    message: str
    where: tuple[str, ...] = ()
    """`file:line` of each of the program's frames; the last is where it was raised."""
    step: int | None = None
    """The newest step this process had made or restored; None where there is no job, or none was made."""
    traceback: str = ""
    at_s: float = 0.0

    @property
    def place(self) -> str:
        return self.where[-1] if self.where else ""

    @property
    def is_about_peers(self) -> bool:
        """Whether it may be only the consequence of another worker's end."""
        if self.type in _PEER_TYPES:
            return True
        return self.type in ("RuntimeError", "TimeoutError", "OSError") and bool(_PEERS.search(self.message))

    def is_like(self, other: WorkerError) -> bool:
        """The same error at the same place; numbers in its message (addresses, pids) differ from time to time."""
        return (self.type, self.where, _text(self.message)) == (other.type, other.where, _text(other.message))

    def __str__(self) -> str:
        said = f"{self.type}: {self.message}" if self.message else self.type
        return f"{said} ({self.place})" if self.place else said

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> WorkerError:
        """Raises `KeyError`, `TypeError` or `ValueError` for what is none."""
        step = raw["step"]
        return cls(
            type=str(raw["type"]),
            message=str(raw["message"]),
            where=tuple(map(str, raw["where"])),
            step=None if step is None else int(step),
            traceback=str(raw["traceback"]),
            at_s=float(raw["at_s"]),
        )


def root_cause(errors: list[WorkerError]) -> WorkerError | None:
    """Of the errors of one attempt, the one to blame: the first that is not about another worker."""
    own = [error for error in errors if not error.is_about_peers]
    return min(own or errors, key=lambda error: error.at_s, default=None)


@dataclass(slots=True)
class RepeatedErrors:
    """The errors of a run's attempts, one after the other."""

    _last: WorkerError | None = None
    _last_was_quick: bool = False
    _alike: int = 0

    def failed(
        self, error: WorkerError | None, *, lasted_s: float, others_continue: bool = False
    ) -> str | None:
        """An attempt has failed; None where no worker could say why. Returns the reason to give up, if there is one."""
        if error is None or error.is_about_peers:
            return None
        before, before_was_quick = self._last, self._last_was_quick
        self._last, self._last_was_quick = error, lasted_s < QUICK_S
        is_repeated = before is not None and error.is_like(before) and lasted_s < QUICK_S
        self._alike = self._alike + 1 if is_repeated else 1
        if others_continue and self._alike >= MOST_ALIKE:
            return f"the same error came back {self._alike - 1} times in a row: {error}"
        if before is None or not error.is_like(before):
            return None
        if error.step is None and before.step is None:
            if not (before_was_quick and self._last_was_quick):
                return None
        elif (error.step or 0) > (before.step or 0):
            return None
        progress = (
            "no step was completed" if not error.step else f"no step was completed after step {error.step:,}"
        )
        return f"the same error came back and {progress} in between: {error}"


def _text(message: str) -> str:
    return _NUMBERS.sub("#", message)
