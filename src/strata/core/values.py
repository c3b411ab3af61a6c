"""Named values that change only by compare-and-swap: what agents of a run use to find each other.

A version number is given out once and never again, so a swap that expects an old value always fails. Values
nobody has touched for a day are dropped; a restart gives each another day, since how long it took is unknown to
the monotonic clock, and the other one may be set. Pure: time arrives as `now`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from strata.core import checks
from strata.core.messages import (
    Event,
    Instant,
    InvalidArgument,
    Overloaded,
    SwapValue,
    ValueDropped,
    ValueSwapped,
)

VALUE_LIMIT_BYTES = 256 * 1024
MAX_VALUES = 20_000
DROP_AFTER_S = 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    body: bytes
    version: int
    at_s: float


class Values:
    def __init__(self) -> None:
        self.values: dict[str, Value] = {}
        self.version = 0
        self._touched_mono_s: dict[str, float] = {}

    def decide_swap(self, command: SwapValue, now: Instant) -> ValueSwapped | None:
        """The swap, or None when somebody else was faster. Expecting version 0 means: expecting nothing."""
        checks.name("key", command.key, limit=1024)
        if len(command.body) > VALUE_LIMIT_BYTES:
            raise InvalidArgument(
                "value",
                f"is {len(command.body):,} bytes; at most {VALUE_LIMIT_BYTES:,} are kept.",
                hint="Store large things elsewhere and keep their address here.",
            )
        known = self.values.get(command.key)
        if (known.version if known is not None else 0) != command.expected_version:
            return None
        if known is None and len(self.values) >= MAX_VALUES:
            raise Overloaded(
                f"{MAX_VALUES:,} values are kept already, which is the limit.", hint="Use fewer."
            )
        return ValueSwapped(
            key=command.key, body=command.body, version=self.version + 1, reason="swapped", at_s=now.wall_s
        )

    def decide_tick(self, now: Instant) -> Iterator[ValueDropped]:
        for key, touched_mono_s in list(self._touched_mono_s.items()):
            if now.mono_s - touched_mono_s > DROP_AFTER_S:
                yield ValueDropped(key=key, reason="untouched for a day", at_s=now.wall_s)

    def apply(self, event: ValueSwapped | ValueDropped, now: Instant) -> None:
        if isinstance(event, ValueDropped):
            self.values.pop(event.key, None)
            self._touched_mono_s.pop(event.key, None)
            return
        self.values[event.key] = Value(body=event.body, version=event.version, at_s=event.at_s)
        self._touched_mono_s[event.key] = now.mono_s
        self.version = max(self.version, event.version)

    def resume_clock(self, now: Instant) -> None:
        """After a replay: everything was touched now."""
        self._touched_mono_s = dict.fromkeys(self.values, now.mono_s)

    def compact(self) -> list[Event]:
        by_age = sorted(self.values.items(), key=lambda item: item[1].version)
        return [
            ValueSwapped(key=key, body=v.body, version=v.version, reason="compacted history", at_s=v.at_s)
            for key, v in by_age
        ]
