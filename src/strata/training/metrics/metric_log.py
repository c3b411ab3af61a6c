"""What a training loop logs, on its way to the coordinator and to sinks, without the loop waiting for any of it.

`log` costs a few microseconds: the values of a call are put down in a row, the names only once. A thread of its own gathers
rows, four times a second, for the coordinator (`worker.outbox`) and for sinks. Tensors on a GPU are copied as part of its
stream (`scalars`) and read when they have arrived: no thread waits for the device. What cannot be kept is dropped, counted and said.

Values of rank 0 are kept; calls on other ranks return at once.
"""

from __future__ import annotations

import logging
import shutil
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from strata.core.messages import InvalidArgument
from strata.core.telemetry.histograms import PARTS, column
from strata.core.telemetry.run_metrics import DISK_FREE, DISK_TOTAL, STEP_LIMIT, check_name
from strata.errors import StrataError
from strata.rpc import coordinator_pb2 as pb
from strata.sinks import Sink, SinkRows, SinkRun
from strata.training.metrics.histogram import Histogram
from strata.training.metrics.scalars import Copied, ScalarCopies
from strata.worker.outbox import MetricOutbox
from strata.worker.resources import ResourceSampler

log = logging.getLogger("strata.training")

FLUSH_S = 0.25
SYSTEM_EVERY_S = 10.0
VALUES_LIMIT = 2_000_000
"""What may wait to be gathered, or for a save that covers it: 16 MB."""
SCHEMAS_LIMIT = 10_000
CLOSE_S, CRASH_S = 30.0, 1.0
"""How long sinks may take to finish: when a job ends, and when its process fails and should end at once."""
PLAIN = frozenset({float, int, bool})
KNOWN = PLAIN | {torch.Tensor}
NO_DEVICE = -1
"""What torch calls the CPU where it numbers devices."""
SEPARATOR = "/"

Metrics = Mapping[str, Any]
"""Names to numbers, 0-dimensional tensors, histograms, or further such mappings."""


@dataclass(slots=True)
class _Row:
    step: int
    at_s: float
    names: tuple[str, ...]
    values: array[float]
    pending: list[_Pending] | None


@dataclass(slots=True)
class _Pending:
    """Values that are still on a device, or on their way from it."""

    where: Sequence[int]
    values: Copied | torch.Tensor

    @property
    def is_there(self) -> bool:
        return isinstance(self.values, torch.Tensor) or self.values.is_there

    def read(self) -> list[float]:
        found: list[float] = (
            self.values.tolist() if isinstance(self.values, torch.Tensor) else self.values.read()
        )
        return found


_Resolved = tuple[tuple[str, ...], list[Any], list[_Pending] | None]
"""Names, plain numbers, and what takes the place of some of them once it has arrived."""


@dataclass(slots=True)
class _Held:
    """Rows for a sink that takes only what a save covers."""

    sink: Sink
    rows: deque[SinkRows] = field(default_factory=deque)
    values: int = 0
    has_failed: bool = False


class _Disk(NamedTuple):
    free: int
    total: int


class MetricLog:
    def __init__(
        self,
        *,
        run: SinkRun,
        outbox: MetricOutbox | None,
        sinks: Sequence[Sink] = (),
        step: Callable[[], int],
        folders: Sequence[Path] = (),
        on_latest: Callable[[str, float], None] = lambda name, value: None,
    ) -> None:
        self.dropped = 0
        """Values that were not kept."""
        self._run = run
        self._outbox = outbox
        self._sinks = [_Held(sink) for sink in sinks]
        self._step = step
        self._folders = folders
        """Where local checkpoints are: how full their disks are is sampled too."""
        self._on_latest = on_latest
        self._rows: deque[_Row] = deque()
        self._put = self._got = 0
        """How many values were logged, and how many of them gathered."""
        self._checked: dict[tuple[str, ...], None] = {}
        self._copies = ScalarCopies()
        self._committed = -1
        self._dropped_said = False
        self._sampler = ResourceSampler()
        self._next_sample_mono_s = 0.0
        self._ends = threading.Event()
        self._keeps_all = False
        self._thread = threading.Thread(target=self._work, name="strata-metrics", daemon=True)
        self._thread.start()

    # --- called by the training loop, never blocking ----------------------------------------------------------

    def log(self, metrics: Metrics, step: int) -> None:
        names = tuple(metrics)
        values = list(metrics.values())
        pending: list[_Pending] | None = None
        if not PLAIN.issuperset(map(type, values)):
            names, values, pending = self._resolved(names, values, metrics)
        if names not in self._checked:
            self._check(names)
        try:
            row = array("d", values)
        except (TypeError, OverflowError, ValueError):
            raise _not_a_number(names, values) from None
        if not 0 <= step <= STEP_LIMIT:
            raise InvalidArgument("step", f"is {step}.", hint="Log an optimizer step, such as job.step.")
        if self._put - self._got + len(row) > VALUES_LIMIT:
            self.dropped += len(row)
            return
        self._put += len(row)
        self._rows.append(_Row(step, time.time(), names, row, pending))

    def committed(self, step: int) -> None:
        """A save covers everything up to this step: a restart continues from it."""
        self._committed = max(self._committed, step)

    def close(self, *, failed: bool) -> None:
        """Hand over what there is. After a failure, sinks that take only what a save covers do not get the rest: it will be
        trained again."""
        self._keeps_all = not failed
        self._ends.set()
        self._thread.join(CRASH_S if failed else CLOSE_S)
        if self._thread.is_alive() and not failed:
            log.warning("the sinks of metrics have not finished after %.0f s", CLOSE_S)

    def _resolved(self, names: tuple[str, ...], values: list[Any], metrics: Metrics) -> _Resolved:
        kinds = set(map(type, values))
        if not kinds <= KNOWN and any(issubclass(kind, (Mapping, Histogram)) for kind in kinds):
            metrics = flattened(metrics)
            names, values = tuple(metrics), list(metrics.values())
            kinds = set(map(type, values))
        if torch.Tensor not in kinds:
            return names, values, None
        return self._at_once(names, values) or self._one_by_one(names, values)

    def _at_once(self, names: tuple[str, ...], values: list[Any]) -> _Resolved | None:
        """Where something was logged under these names before, and tensors are as they usually are, all of one device, none of
        them is looked at by itself. None where they are not."""
        if names not in self._checked:
            return None
        where = [index for index, value in enumerate(values) if type(value) is torch.Tensor]
        tensors = values if len(where) == len(values) else [values[index] for index in where]
        devices = set(map(torch.Tensor.get_device, tensors))
        with suppress(RuntimeError):  # One of them has another shape, or several values.
            if devices == {NO_DEVICE}:
                numbers, pending = list(map(torch.Tensor.item, tensors)), None
            elif len(devices) == 1 and tensors[0].is_cuda:
                pending = [_Pending(where, self._copies.copied(tensors, devices.pop()))]
                numbers = [0.0] * len(tensors)
            else:
                return None
            if tensors is values:
                return names, numbers, pending
            for index, number in zip(where, numbers, strict=True):
                values[index] = number
            return names, values, pending
        return None

    def _one_by_one(self, names: tuple[str, ...], values: list[Any]) -> _Resolved:
        on_devices: dict[tuple[torch.device, torch.dtype | None], list[int]] = {}
        for index, value in enumerate(values):
            if type(value) is not torch.Tensor or value.numel() != 1:
                continue
            if value.is_cpu:
                # It is there, and reading it costs less than a copy to be read later.
                values[index] = value.item()
            elif value.is_complex():
                raise _not_a_number(names[index : index + 1], [1j])
            else:
                kind = None if value.is_cuda else value.dtype
                on_devices.setdefault((value.device, kind), []).append(index)
        pending = [self._taken(values, device, where) for (device, _), where in on_devices.items()]
        for each in pending:
            for index in each.where:
                values[index] = 0.0
        return names, values, pending or None

    def _taken(self, values: list[Any], device: torch.device, where: list[int]) -> _Pending:
        """As they are now: whatever the loop does to its tensors afterwards."""
        with torch.no_grad():
            found = [values[index] for index in where]
            found = [each if each.dim() == 0 else each.reshape(()) for each in found]
            if device.type == "cuda":
                return _Pending(where, self._copies.copied(found, device.index))
            return _Pending(where, torch.stack(found))

    def _check(self, names: tuple[str, ...]) -> None:
        for name in names:
            if not isinstance(name, str):
                raise InvalidArgument("name of a metric", f"is {name!r}.", hint="Names are text.")
            check_name(name)
        if len(self._checked) >= SCHEMAS_LIMIT:
            self._checked.clear()
        self._checked[names] = None

    # --- on its own thread ------------------------------------------------------------------------------------

    def _work(self) -> None:
        for held in self._sinks:
            self._to_sink(held, lambda held=held: held.sink.open(self._run))  # type: ignore[misc]
        while not self._ends.wait(FLUSH_S):
            self._gather(wait=False)
        try:
            # After a failure, what a device has not sent may never arrive.
            self._gather(wait=self._keeps_all)
        finally:
            for held in self._sinks:
                self._to_sink(held, held.sink.close)

    def _gather(self, *, wait: bool) -> None:
        try:
            for rows in [*self._sampled(), *self._grouped(wait)]:
                if self._outbox is not None:
                    self._outbox.put(_message(rows))
                for held in self._sinks:
                    held.rows.append(rows)
                    held.values += rows.values.size
            for held in self._sinks:
                self._release(held, all_of_it=self._ends.is_set() and self._keeps_all)
            self._say_drops()
        except Exception:  # What only watches must not end what is watched.
            log.exception("metrics were lost")

    def _grouped(self, wait: bool) -> list[SinkRows]:
        """Rows that are there, in order, those with the same names together."""
        groups: dict[tuple[str, ...], list[_Row]] = {}
        while self._rows:
            row = self._rows[0]
            if row.pending and not wait and not all(each.is_there for each in row.pending):
                break  # And what comes after it waits with it.
            self._rows.popleft()
            self._got += len(row.values)
            if row.pending and not _read(row):
                self.dropped += len(row.values)
                continue
            groups.setdefault(row.names, []).append(row)
        found = []
        for names, rows in groups.items():
            values = np.frombuffer(b"".join(row.values for row in rows), np.float64)
            found.append(
                SinkRows(
                    names=names,
                    steps=np.array([row.step for row in rows], np.int64),
                    times=np.array([row.at_s for row in rows]),
                    values=values.reshape(len(rows), len(names)),
                )
            )
            for name in ("loss", "tokens_per_second"):
                if name in names:
                    self._on_latest(name, float(found[-1].values[-1, names.index(name)]))
        return found

    def _sampled(self) -> list[SinkRows]:
        """What this process and its machine's GPUs use, now and then."""
        now_mono_s, step = time.monotonic(), self._step()
        if now_mono_s < self._next_sample_mono_s or step <= 0:
            return []
        self._next_sample_mono_s = now_mono_s + SYSTEM_EVERY_S
        found = system_metrics(self._sampler.sample())
        disk = fullest(self._folders)
        if disk is not None:
            self._on_latest(DISK_FREE, float(disk.free))
            self._on_latest(DISK_TOTAL, float(disk.total))
            found[f"system/{DISK_FREE}"] = float(disk.free)
        return [
            SinkRows(
                names=tuple(found),
                steps=np.array([step], np.int64),
                times=np.array([time.time()]),
                values=np.array([list(found.values())]),
            )
        ]

    def _release(self, held: _Held, *, all_of_it: bool) -> None:
        waiting, held.rows = held.rows, deque()
        for rows in waiting:
            covered = rows.steps <= self._committed
            # When the buffer is full: better too early than never.
            if held.sink.takes_uncommitted or all_of_it or held.values > VALUES_LIMIT:
                covered[:] = True
            ready = rows.where(covered)
            if len(ready.steps) < len(rows.steps):
                held.rows.append(rows.where(~covered))
            if len(ready.steps):
                held.values -= ready.values.size
                self._to_sink(held, lambda ready=ready: held.sink.write(ready))  # type: ignore[misc]

    def _to_sink(self, held: _Held, call: Callable[[], None]) -> None:
        """A sink that fails is left alone from then on, and training is not."""
        if held.has_failed:
            return
        try:
            call()
        except Exception as error:
            held.has_failed = True
            log.warning("%s accepts no more metrics: %s", type(held.sink).__name__, error, exc_info=True)

    def _say_drops(self) -> None:
        lost = self.dropped + (self._outbox.dropped_total if self._outbox is not None else 0)
        if lost and not self._dropped_said:
            self._dropped_said = True
            why = (
                self._outbox.refused
                if self._outbox is not None and self._outbox.refused
                else "the buffer is full"
            )
            log.warning("%d logged values were dropped: %s", lost, why)


def system_metrics(usage: pb.ResourceUsage) -> dict[str, float]:
    found = {
        "system/cpu_percent": usage.cpu_percent,
        "system/memory_bytes": float(usage.memory_used_bytes),
    }
    for gpu in usage.gpu_usage:
        at = f"system/gpu{gpu.index}"
        found[f"{at}/utilization_percent"] = gpu.utilization_percent
        found[f"{at}/memory_bytes"] = float(gpu.memory_used_bytes)
        found[f"{at}/power_watts"] = gpu.power_watts
        found[f"{at}/temperature_celsius"] = gpu.temperature_celsius
    return found


def fullest(folders: Sequence[Path]) -> _Disk | None:
    """Of the disks of these folders the one with the smallest part free."""
    found = []
    for folder in folders:
        with suppress(OSError):  # It is created with the first save; until then its parent counts.
            there = next(path for path in (folder, *folder.parents) if path.exists())
            usage = shutil.disk_usage(there)
            found.append(_Disk(free=usage.free, total=max(usage.total, 1)))
    return min(found, key=lambda disk: disk.free / disk.total, default=None)


def _message(rows: SinkRows) -> pb.MetricRows:
    return pb.MetricRows(
        names=rows.names, steps=rows.steps, times=rows.times, values=rows.values.astype("<f8").tobytes()
    )


def flattened(metrics: Metrics, prefix: str = "") -> dict[str, Any]:
    """Nested names become one, with '/'; a histogram becomes its parts."""
    flat: dict[str, Any] = {}
    for name, value in metrics.items():
        if type(value) in KNOWN:
            flat[f"{prefix}{name}" if prefix else name] = value
        elif isinstance(value, Mapping):
            flat |= flattened(value, f"{prefix}{name}{SEPARATOR}")
        elif isinstance(value, Histogram):
            parts = zip(PARTS, value.parts(name), strict=True)
            flat |= {column(f"{prefix}{name}", part): number for part, number in parts}
        else:
            flat[f"{prefix}{name}" if prefix else name] = value
    return flat


def _read(row: _Row) -> bool:
    """Put values that have arrived into their row; False where the device has failed."""
    try:
        for pending in row.pending or ():
            found = pending.read()
            if len(found) == len(row.values):
                row.values = array("d", found)
                continue
            for index, value in zip(pending.where, found, strict=True):
                row.values[index] = value
    except (RuntimeError, TypeError):
        return False
    return True


def _not_a_number(names: Sequence[str], values: Sequence[object]) -> StrataError:
    for name, value in zip(names, values, strict=True):
        try:
            array("d", [value])  # type: ignore[type-var]
        except (TypeError, OverflowError, ValueError):
            return InvalidArgument(
                f"metric '{name}'",
                f"is not a number ({type(value).__name__}).",
                hint="Log numbers, 0-dimensional tensors, or mappings of names to them; many values as strata.Histogram(values).",
            )
    return InvalidArgument("metrics", "are not numbers.", hint="Log numbers.")
