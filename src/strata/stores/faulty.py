"""A store that misbehaves on purpose, and always in the same way for the same seed.

Wrap any store to see what a full disk, a failing device, a lost reply, a flipped bit or a crash half-way does to
the code above it. `seeded` draws faults at given rates, `scripted` places them at chosen operations; `log` tells
afterwards what was done, so that a failing run can be read and replayed. With no faults it is the store inside.
"""

from __future__ import annotations

import enum
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType

from strata.stores.protocol import (
    Blob,
    BlobWriter,
    Buffer,
    DeviceError,
    NoSpace,
    Store,
    StoreError,
    TakePart,
    Unavailable,
)


class Fault(enum.Enum):
    REFUSED = "refused: nothing was done"
    LOST_REPLY = "done, but the reply was lost"
    NO_SPACE = "the device was full after some bytes"
    DEVICE_ERROR = "the device failed after some bytes"
    SHORT_WRITE = "only the first bytes were kept, and success was reported"
    BIT_FLIP = "one bit was flipped on the way"
    CRASH_BEFORE = "the process died before"
    CRASH_MIDWAY = "the process died after some bytes"
    CRASH_AFTER = "the process died after"


_ANYTIME = frozenset({Fault.REFUSED, Fault.LOST_REPLY, Fault.CRASH_BEFORE, Fault.CRASH_AFTER})
_BY_OPERATION: Mapping[str, frozenset[Fault]] = {
    "write": frozenset(Fault) - {Fault.LOST_REPLY},
    "commit": _ANYTIME,
    "read": frozenset({Fault.REFUSED, Fault.DEVICE_ERROR, Fault.BIT_FLIP, Fault.CRASH_BEFORE}),
    "stat": frozenset({Fault.REFUSED, Fault.CRASH_BEFORE}),
    "list": frozenset({Fault.REFUSED, Fault.CRASH_BEFORE}),
    "delete": _ANYTIME,
}
"""Which faults make sense where; others are not drawn."""


_ERRORS: Mapping[Fault, tuple[type[StoreError], str]] = {
    Fault.NO_SPACE: (NoSpace, "No space left on device"),
    Fault.DEVICE_ERROR: (DeviceError, "Input/output error"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One step of the store inside. A `put` is a write and a commit."""

    number: int
    name: str
    key: str
    size_bytes: int


Choose = Callable[[Operation, random.Random], Fault | None]


class SimulatedCrash(BaseException):
    """The process is supposed to be dead now. Not an `Exception`: nothing may catch it and continue."""


def crash_by_exception(what: str) -> None:
    raise SimulatedCrash(what)


def crash_by_signal(what: str) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def seeded(rates: Mapping[Fault, float]) -> Choose:
    """Draw each fault with its own probability per operation it fits."""

    def choose(operation: Operation, chance: random.Random) -> Fault | None:
        drawn = None
        for (
            fault
        ) in Fault:  # One draw per fault always, so that changing one rate leaves the others' draws alone.
            hit = chance.random() < rates.get(fault, 0.0)
            if hit and drawn is None and fault in _BY_OPERATION[operation.name]:
                drawn = fault
        return drawn

    return choose


def scripted(script: Mapping[int, Fault]) -> Choose:
    """Place faults at operations by their number, counted from 0."""
    return lambda operation, chance: script.get(operation.number)


class FaultyStore:
    """`inner`, disturbed."""

    def __init__(
        self,
        inner: Store,
        *,
        seed: int = 0,
        choose: Choose | None = None,
        crash: Callable[[str], None] = crash_by_exception,
    ) -> None:
        self._inner = inner
        self._choose = choose or scripted({})
        self._crash = crash
        self._chance = random.Random(seed)
        self._lock = threading.Lock()
        self._operations = 0
        self.log: list[str] = []

    def __repr__(self) -> str:
        return f"FaultyStore({self._inner!r})"

    @property
    def tier(self) -> str:
        return self._inner.tier

    @property
    def url(self) -> str:
        return self._inner.url

    @property
    def operations(self) -> int:
        """How many there have been."""
        return self._operations

    def put(self, key: str, data: Buffer, *, if_absent: bool = False) -> None:
        view = memoryview(data).cast("B")
        with self.open_write(key, size_hint_bytes=len(view), if_absent=if_absent) as writer:
            writer.write(view)
            writer.commit()

    def open_write(
        self, key: str, *, size_hint_bytes: int | None = None, if_absent: bool = False
    ) -> BlobWriter:
        return _FaultyWriter(
            self, key, self._inner.open_write(key, size_hint_bytes=size_hint_bytes, if_absent=if_absent)
        )

    def read(self, key: str, *, offset: int = 0, length: int | None = None) -> bytes:
        fault = self.begin("read", key)
        data = self._inner.read(key, offset=offset, length=length)
        if fault is not Fault.BIT_FLIP or not data:
            return data
        flipped = bytearray(data)
        self.flip(memoryview(flipped))
        return bytes(flipped)

    def read_into(self, key: str, buffer: memoryview, *, offset: int = 0) -> None:
        fault = self.begin("read", key, buffer.nbytes)
        self._inner.read_into(key, buffer, offset=offset)
        if fault is Fault.BIT_FLIP and buffer.nbytes:
            self.flip(buffer.cast("B"))

    def read_parts(self, key: str, take: TakePart, *, size_bytes: int, part_bytes: int) -> None:
        """One operation; a bit is flipped in one of the parts."""
        fault = self.begin("read", key, size_bytes)
        data = bytearray(self._inner.read(key, length=size_bytes))
        if fault is Fault.BIT_FLIP and data:
            self.flip(memoryview(data))
        for start in range(0, size_bytes, part_bytes):
            take(start, memoryview(data)[start : start + part_bytes])

    def stat(self, key: str) -> Blob | None:
        self.begin("stat", key)
        return self._inner.stat(key)

    def list(self, prefix: str = "") -> Iterator[Blob]:
        self.begin("list", prefix)
        return self._inner.list(prefix)

    def delete(self, key: str) -> None:
        fault = self.begin("delete", key)
        self._inner.delete(key)
        self.end(fault, "delete", key)

    def free_bytes(self) -> int | None:
        return self._inner.free_bytes()

    # --- faults, also for the writer ---

    def begin(self, name: str, key: str, size_bytes: int = 0) -> Fault | None:
        """Decide what happens to the next operation, and do what comes before it."""
        with self._lock:
            operation = Operation(number=self._operations, name=name, key=key, size_bytes=size_bytes)
            self._operations += 1
            fault = self._choose(operation, self._chance)
            if fault is not None:
                self.log.append(f"{operation.number} {name} '{key}': {fault.value}")
        if fault is Fault.CRASH_BEFORE:
            self._crash(f"before {name} '{key}'")
        if fault is Fault.REFUSED or (fault is Fault.DEVICE_ERROR and name == "read"):
            raise self.error(fault, name, key)
        return fault

    def end(self, fault: Fault | None, name: str, key: str) -> None:
        """What comes after the operation."""
        if fault is Fault.LOST_REPLY:
            raise self.error(fault, name, key)
        if fault is Fault.CRASH_AFTER:
            self._crash(f"after {name} '{key}'")

    def interrupt(self, fault: Fault, name: str, key: str) -> None:
        """What comes in the middle of it."""
        if fault is Fault.CRASH_MIDWAY:
            self._crash(f"amid {name} '{key}'")
        raise self.error(fault, name, key)

    def error(self, fault: Fault, name: str, key: str) -> StoreError:
        kind, reason = _ERRORS.get(fault, (Unavailable, fault.value))
        return kind(
            f"Could not {name} '{key}' in {self.url}: {reason}.", tier=self.tier, key=key, reason=reason
        )

    def part_of(self, size_bytes: int) -> int:
        """Some number of bytes, fewer than all."""
        with self._lock:
            return self._chance.randrange(size_bytes) if size_bytes else 0

    def flip(self, view: memoryview) -> None:
        with self._lock:
            bit = self._chance.randrange(len(view) * 8)
        view[bit // 8] ^= 1 << (bit % 8)


class _FaultyWriter:
    def __init__(self, store: FaultyStore, key: str, inner: BlobWriter) -> None:
        self._store = store
        self._key = key
        self._inner = inner
        self._cut_short = False

    def write(self, chunk: Buffer) -> None:
        view = memoryview(chunk).cast("B")
        fault = self._begin("write", len(view))
        if self._cut_short:
            return
        match fault:
            case Fault.NO_SPACE | Fault.DEVICE_ERROR | Fault.CRASH_MIDWAY:
                self._inner.write(view[: self._store.part_of(len(view))])
                try:
                    self._store.interrupt(fault, "write", self._key)
                except StoreError:
                    self._inner.abort()
                    raise
            case Fault.SHORT_WRITE:
                self._inner.write(view[: self._store.part_of(len(view))])
                self._cut_short = True
            case Fault.BIT_FLIP if len(view):
                damaged = bytearray(view)
                self._store.flip(memoryview(damaged))
                self._inner.write(damaged)
            case _:
                self._inner.write(view)
                self._store.end(fault, "write", self._key)

    def commit(self) -> None:
        fault = self._begin("commit", 0)
        self._inner.commit()
        self._store.end(fault, "commit", self._key)

    def abort(self) -> None:
        self._inner.abort()

    def __enter__(self) -> _FaultyWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not SimulatedCrash:  # The dead tidy nothing up.
            self.abort()

    def _begin(self, name: str, size_bytes: int) -> Fault | None:
        try:
            return self._store.begin(name, self._key, size_bytes)
        except StoreError:
            self._inner.abort()
            raise
