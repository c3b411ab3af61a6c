"""Named values that change only by compare-and-swap: what agents of a run use to find each other.

A version number is given out once and never again, so a swap that expects an old value always fails. Values that were not
touched for a day (`values_s` of the retention) are dropped, and one job keeps only so many, in number and in bytes; a
restart gives each another day, since how long it took is unknown to the monotonic clock, and the other one may be set.

A swap may be **soft**: it counts, fences and is read like any other, and is not journaled. A restart forgets it, and
the last value that was journaled is back, under a version of its own. Numbers for soft swaps are reserved
in the journal a million at a time, so that none is given out again afterwards. Pure: time arrives as `now`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import takewhile

from strata.core import checks
from strata.core.messages import (
    Event,
    Instant,
    InvalidArgument,
    Overloaded,
    SwapValue,
    ValueDropped,
    ValueRefreshed,
    ValueSwapped,
    VersionsReserved,
    shorten,
)

VALUE_LIMIT_BYTES = 256 * 1024
MAX_VALUES = 100_000
MAX_BYTES = 256 << 20
OWNER_VALUES = 20_000
OWNER_BYTES = 64 << 20
"""What one job may keep, and everybody together whose credential is bound to none."""
DROP_AFTER_S = 86_400.0
RESERVED_AT_ONCE = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    body: bytes
    version: int
    at_s: float


ALL = "/"
"""No owner has this name."""


def owner_of(key: str) -> str:
    """The job that a key belongs to: `job/NAME/…` is where callers bound to a job keep theirs. Empty: to no job."""
    kind, _, rest = key.partition("/")
    return rest.partition("/")[0] if kind == "job" else ""


ValueEvent = ValueSwapped | ValueRefreshed | VersionsReserved | ValueDropped


class Values:
    def __init__(self, *, drop_after_s: float = DROP_AFTER_S) -> None:
        self.drop_after_s = drop_after_s
        self.durable: dict[str, Value] = {}
        self.soft: dict[str, Value] = {}
        """Newer than the durable ones of the same keys, or the only ones."""
        self.version = 0
        """The newest that was given out."""
        self.reserved = 0
        """The journal knows that versions up to this one may have been given out."""
        self.soft_reserved = 0
        """Up to this one, to soft swaps too."""
        self._touched_mono_s: dict[str, float] = {}
        """Those touched longest ago come first."""
        self._counts: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()
        """By owner; everybody's under `ALL`. Keys count, too."""

    def get(self, key: str) -> Value | None:
        return self.soft.get(key) or self.durable.get(key)

    def decide_swap(self, command: SwapValue, now: Instant) -> list[Event]:
        """The swap, or nothing when another caller was faster. Expecting version 0 means: expecting nothing."""
        checks.name("key", command.key, limit=1024)
        if len(command.body) > VALUE_LIMIT_BYTES:
            raise InvalidArgument(
                "value",
                f"is {len(command.body):,} bytes; at most {VALUE_LIMIT_BYTES:,} are kept.",
                hint="Store large things elsewhere and keep their address here.",
            )
        self._check_share(command)
        known = self.get(command.key)
        if (known.version if known is not None else 0) != command.expected_version:
            return []
        version = self.version + 1
        if not command.soft:
            return [
                ValueSwapped(
                    key=command.key, body=command.body, version=version, reason="swapped", at_s=now.wall_s
                )
            ]
        refreshed = ValueRefreshed(
            key=command.key, body=command.body, version=version, reason="refreshed", at_s=now.wall_s
        )
        if version <= self.reserved:
            return [refreshed]
        last = self.version + RESERVED_AT_ONCE
        return [VersionsReserved(last=last, reason="for soft values", at_s=now.wall_s), refreshed]

    def decide_tick(self, now: Instant) -> Iterator[ValueDropped]:
        old = takewhile(lambda item: now.mono_s - item[1] > self.drop_after_s, self._touched_mono_s.items())
        for key, _ in list(old):
            yield ValueDropped(key=key, reason="untouched for too long", at_s=now.wall_s)

    def apply(self, event: ValueEvent, now: Instant) -> None:
        match event:
            case ValueDropped():
                self._count(event.key, -1)
                self.durable.pop(event.key, None)
                self.soft.pop(event.key, None)
                self._touched_mono_s.pop(event.key, None)
            case VersionsReserved():
                self.reserved = self.soft_reserved = event.last
            case ValueSwapped():
                self._count(event.key, -1)
                self.durable[event.key] = Value(body=event.body, version=event.version, at_s=event.at_s)
                self.soft.pop(event.key, None)
                self._touch(event.key, now)
                self.version = max(self.version, event.version)
                self.reserved = max(self.reserved, event.version)
            case ValueRefreshed():
                self._count(event.key, -1)
                self.soft[event.key] = Value(body=event.body, version=event.version, at_s=event.at_s)
                self._touch(event.key, now)
                self.version = event.version

    def _check_share(self, command: SwapValue) -> None:
        """What is there may always be replaced by what is no larger."""
        owner, known = owner_of(command.key), self.get(command.key)
        grows_bytes = len(command.body) - (len(known.body) if known is not None else 0)
        if known is not None and grows_bytes <= 0:
            return
        whose = f"by job '{shorten(owner)}'" if owner else "by callers that belong to no job"
        for who, most, most_bytes, by in (
            (owner, OWNER_VALUES, OWNER_BYTES, f" {whose}"),
            (ALL, MAX_VALUES, MAX_BYTES, ""),
        ):
            if known is None and self._counts[who] >= most:
                raise Overloaded(
                    f"{most:,} values are kept{by} already, which is the limit.", hint="Use fewer."
                )
            if self._bytes[who] + grows_bytes > most_bytes:
                raise Overloaded(
                    f"The values that are kept{by} would be larger than {most_bytes >> 20} MB, which is the limit.",
                    hint="Store large things elsewhere and keep their address here.",
                )

    def _touch(self, key: str, now: Instant) -> None:
        self._touched_mono_s.pop(key, None)
        self._touched_mono_s[key] = now.mono_s
        self._count(key, +1)

    def _count(self, key: str, sign: int) -> None:
        """Before a value changes it no longer counts; afterwards it does."""
        bodies = [kept[key].body for kept in (self.durable, self.soft) if key in kept]
        if not bodies:
            return
        size_bytes = len(key) + sum(map(len, bodies))
        for who in (owner_of(key), ALL):
            self._counts[who] += sign
            self._bytes[who] += sign * size_bytes
            if not self._counts[who]:
                del self._counts[who], self._bytes[who]

    def restore(self, reserved: int, soft_reserved: int) -> None:
        """Part of a compacted history, after the values. Version 0.1 kept no number for soft swaps."""
        self.soft_reserved = soft_reserved or (reserved if reserved > self.version else 0)
        self.reserved = max(self.reserved, reserved)

    def resume_clock(self, now: Instant) -> None:
        """After a replay: everything was touched now. Where soft swaps were possible, what was read before the restart
        may not be what is stored now: each such value gets a version of its own, from beyond those reserved."""
        self._touched_mono_s = dict.fromkeys(self.durable, now.mono_s)
        self.version = max(self.version, self.reserved)
        for key, value in self.durable.items():
            if value.version <= self.soft_reserved:
                self.version += 1
                self.durable[key] = replace(value, version=self.version)

    def compact(self) -> Iterator[Event]:
        by_age = sorted(self.durable.items(), key=lambda item: item[1].version)
        return (
            ValueSwapped(key=key, body=v.body, version=v.version, reason="compacted history", at_s=v.at_s)
            for key, v in by_age
        )
