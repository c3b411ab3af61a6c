"""Copying tensors into an image: at once on the CPU, beside the computation on CUDA.

On the CPU a few threads sweep over the state, and `Copying` tells how far they have come, so that the first bytes can be
on their way to disk while the last ones are copied.

On CUDA the copy runs on a stream of its own into page-locked memory, and the computation continues. Where the device has
space for it, the state is first copied within the device, forty times as fast as to the host, and leaves from there; where it
has none, it leaves from where it is. What may change next decides who waits until it is copied, on the device:

* Parameters and optimizer state of a guarded optimizer change in its `step` and nowhere else, so the stream of that
  step waits (a hook before it) and the forward and backward passes in between overlap with the copy. Another thread
  queues it, and copies what such an optimizer keeps on the CPU; the hook waits for that thread.
* Everything else (running statistics, averages, the state of unguarded optimizers) may change at any time, so it
  is copied first and the current stream waits for that part right away.

A CUDA graph that is replayed runs no hooks, and may change anything: once an optimizer is guarded, every replay of any
graph in this process waits in the same way, and every capture begins when the copies under way are complete (what they
need is not allowed during one). Code of one's own that changes guarded tensors outside of `step` calls `settle` first.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from strata.checkpoint.copying.cuda import (
    SpareMemory,
    can_queue_copies,
    can_queue_copies_within,
    queue_copies,
    queue_copies_within,
)
from strata.checkpoint.copying.digest import Digest
from strata.checkpoint.copying.filling import Filling, Windows
from strata.checkpoint.copying.sweeping import THREADS, Pieces, Sweep
from strata.checkpoint.errors import CheckpointError
from strata.checkpoint.image.layout import Placement, Plan, Prepared
from strata.torch_compat.dtensors import local_of
from strata.torch_compat.images import copy_all

_cuda: Any = torch.cuda  # Its module is not typed.
Events: TypeAlias = dict[int, Any]
"""One CUDA event for each device, by its number."""
COPY_ALIGNMENT_BYTES = 512
"""What copies within a device are quickest at."""
STAGES = 8
"""In so many the bytes of a device come to an image."""
_CPU = -1  # The number that Torch gives to no device.


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Everything before an offset of the image is in place when these events have happened."""

    end_bytes: int
    events: Events


class Destination:
    """The slots of a plan in the memory of one image."""

    def __init__(self, plan: Plan, placement: Placement, image: torch.Tensor) -> None:
        self.plan = plan
        self.placement = placement
        self.image = image
        self.is_page_locked = False
        base = image.data_ptr()
        self.addresses = [base + offset_bytes for offset_bytes in placement.slot_offsets_bytes]
        self.sizes = [slot.size_bytes for slot in plan.slots]

    @functools.cached_property
    def windows(self) -> Windows:
        """The image in parts, for copies on the CPU."""
        return Windows(self.image, self.placement.slot_offsets_bytes, self.sizes)

    @functools.cached_property
    def targets(self) -> list[torch.Tensor]:
        """The slots as tensors, for copies by Torch."""
        return self.plan.targets(self.image, self.placement)


class Copying:
    """One copy into an image, from the moment the image is chosen for it."""

    def __init__(self, size_bytes: int) -> None:
        self._size_bytes = size_bytes
        self._ready_bytes = 0
        self._wanted_bytes = 0
        """The least that a thread waits for; none is woken for less."""
        self._error: BaseException | None = None
        self._released: Events | None = None
        self._stages: list[Stage] | None = None
        self._held: object = None
        self._changed = threading.Condition()
        self.digest: Callable[[], Digest] | None = None
        """Of the whole image, when it is complete; None where it is not hashed on the way."""

    def advance(self, ready_bytes: int) -> None:
        """Everything before this offset is in place."""
        with self._changed:
            if ready_bytes > self._ready_bytes:
                self._ready_bytes = ready_bytes
                if ready_bytes >= self._wanted_bytes:
                    self._changed.notify_all()

    def release(self, events: Events) -> None:
        """The state may change when these events have happened."""
        with self._changed:
            self._released = events
            self._changed.notify_all()

    def hand_over(self, stages: list[Stage], held: object) -> None:
        """What devices do from here on, front to back, up to the last byte; `held` must not be freed before."""
        with self._changed:
            self._stages, self._held = stages, held
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def is_complete(self) -> bool:
        """Whether there is nothing left to wait for."""
        with self._changed:
            return self._error is not None or self._ready_bytes == self._size_bytes

    def wait(self, upto_bytes: int | None = None) -> None:
        """Return when the bytes before `upto_bytes`, or all, are in place. Raises what stopped the copy."""
        wanted_bytes = self._size_bytes if upto_bytes is None else upto_bytes
        with self._changed:
            while not (self._error or self._stages is not None or self._ready_bytes >= wanted_bytes):
                waited_for = self._wanted_bytes
                if waited_for <= self._ready_bytes or wanted_bytes < waited_for:
                    self._wanted_bytes = wanted_bytes
                self._changed.wait()
            if self._error is not None:
                raise self._error
            if self._ready_bytes >= wanted_bytes:
                return
            stage = next(stage for stage in self._stages or () if stage.end_bytes >= wanted_bytes)
        for device, event in stage.events.items():
            with _cuda.device(device):
                event.synchronize()
        with self._changed:
            self._ready_bytes = max(self._ready_bytes, stage.end_bytes)
            if self._ready_bytes == self._size_bytes:
                self._held = None

    def hold_back_current_streams(self) -> None:
        """What is queued on the current streams from now on may change the state: it runs when that has been copied."""
        with self._changed:
            self._changed.wait_for(lambda: self._error or self._released is not None or self.is_complete())
            events = self._released or {}
        _hold_back(events)


class Copier:
    """Copies states into images, one after the other."""

    def __init__(self) -> None:
        self._guarded: list[weakref.ref[torch.optim.Optimizer]] = []
        self._hooks: list[Any] = []
        self._under_way: list[Copying] = []
        """What guarded tensors are being copied by."""
        self._from_devices: list[Copying] = []
        self._streams: dict[int, Any] = {}
        self._spare: dict[int, SpareMemory] = defaultdict(SpareMemory)
        self._lock = threading.Lock()
        self._queueing = ThreadPoolExecutor(1, thread_name_prefix="strata-queue")
        self._helping = ThreadPoolExecutor(max(1, THREADS - 1), thread_name_prefix="strata-copy")

    def guard(self, optimizer: torch.optim.Optimizer) -> None:
        """Let copies of this optimizer's tensors overlap with the computation up to its next step."""
        self._guarded.append(weakref.ref(optimizer))
        self._hooks.append(optimizer.register_step_pre_hook(lambda *_: self._settle_before_step()))
        _guarding.add(self)
        _settle_before_graphs()

    def _settle_before_step(self) -> None:
        if _cuda.is_initialized() and _cuda.is_current_stream_capturing():
            return  # Nothing runs yet: the capture began after the copies, and every replay settles.
        self.settle()

    def finish(self) -> None:
        """Return when the copies from devices are complete."""
        with self._lock:
            from_devices, self._from_devices = self._from_devices, []
        for copying in from_devices:
            with contextlib.suppress(Exception):  # It has ended in the save's handle.
                copying.wait()

    def settle(self) -> None:
        """Call before changing guarded tensors: later work on the current streams waits for copies under way."""
        with self._lock:
            self._under_way = [copying for copying in self._under_way if not copying.is_complete()]
            for copying in self._under_way:
                copying.hold_back_current_streams()

    def close(self, *, wait: bool = True) -> None:
        _guarding.discard(self)
        for hook in self._hooks:
            hook.remove()
        self._queueing.shutdown(wait)
        self._helping.shutdown(wait)

    def copy(self, copying: Copying, prepared: Prepared, to: Destination) -> None:
        """Copy a state into an image of its plan."""
        addresses, held = prepared.plan.slot_addresses(prepared)
        if prepared.is_on_cuda:
            copies = _Copies(prepared=prepared, to=to, addresses=addresses, held=held)
            self._copy_from_cuda(copying, copies)
        else:
            filling = Filling(to.windows, addresses)
            copying.digest = filling.digest
            self._sweep(
                copying,
                Sweep(filling.chunks, filling.copy, lambda front: copying.advance(filling.end_of(front))),
            )

    def _sweep(self, copying: Copying, sweep: Sweep) -> None:
        """Copy on the CPU, in part on threads that help, until `copying` is complete."""
        with contextlib.suppress(RuntimeError):  # At the interpreter's exit no thread can be asked to help.
            for _ in range(min(THREADS, sweep.parts) - 1):
                self._helping.submit(_or_fail, copying, sweep.work)
        sweep.work()
        copying.wait()  # For pieces that others have started.

    def _copy_from_cuda(self, copying: Copying, copies: _Copies) -> None:
        by_step, at_once = copies.divided(self._guarded_tensors())
        starts = _start_events(copies.devices())
        first = self._take(copies, at_once, starts)
        _hold_back(_marks(first))
        with self._lock:
            self._from_devices = [each for each in self._from_devices if not each.is_complete()] + [copying]
            if by_step:
                self._under_way.append(copying)

        def do_rest() -> None:
            taken = first + self._take(copies, by_step, starts)
            copying.release(_marks(taken))
            copying.hand_over(_sent(taken, copies.to), (copies, [part.tables for part in taken]))

        # Thousands of copies take milliseconds to queue; that need not happen on the training thread.
        try:
            self._queueing.submit(_or_fail, copying, do_rest)
        except RuntimeError:  # At the interpreter's exit there is no other thread.
            do_rest()

    def _take(self, copies: _Copies, numbers: list[int], starts: Events) -> list[_Taken]:
        """Copy slots: those on the CPU now, those on a device on its stream, from `starts` on."""
        by_device, by_host = copies.by_device(numbers)
        taken = []
        for device, mine in by_device.items():
            stream = self._streams.get(device)
            if stream is None:
                stream = self._streams[device] = _cuda.Stream(device)
            with _cuda.device(device):
                stream.wait_event(starts[device])
                taken.append(copies.take(mine, stream, self._spare[device]))
        if by_host:
            pieces = Pieces(
                [copies.to.addresses[n] for n in by_host],
                [copies.addresses[n] for n in by_host],
                [copies.to.sizes[n] for n in by_host],
            )
            here = Copying(len(pieces))
            self._sweep(here, Sweep(len(pieces), pieces.copy, here.advance))
        return taken

    def _guarded_tensors(self) -> list[torch.Tensor]:
        found: list[torch.Tensor] = []
        for reference in self._guarded:
            optimizer = reference()
            if optimizer is None:
                continue
            for group in optimizer.param_groups:
                found += map(local_of, group["params"])
            for state in optimizer.state.values():
                found += [local_of(value) for value in state.values() if isinstance(value, torch.Tensor)]
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Copies:
    """The copies of a state, at least some of it on a device, into an image; each is known by the number of its slot."""

    prepared: Prepared
    to: Destination
    addresses: list[int]
    """Where each slot's bytes are now."""
    held: list[torch.Tensor]
    """What must not be freed before they are copied, besides the state itself."""

    def devices(self) -> set[int]:
        return set(map(torch.Tensor.get_device, self.prepared.tensors)) - {_CPU}

    def divided(self, guarded: list[torch.Tensor]) -> tuple[list[int], list[int]]:
        """The slots that change in guarded steps only, and those that may change at any time."""
        numbers = list(range(len(self.addresses)))
        if not guarded:
            return [], numbers
        loose = set(self.addresses).difference(map(torch.Tensor.data_ptr, guarded))
        if not loose:
            return numbers, []
        storages = set(map(_storage_address, guarded))  # Of which something else may be a view.
        by_step: list[int] = []
        at_once: list[int] = []
        for n in numbers:
            is_guarded = self.addresses[n] not in loose or _storage_address(self._tensor(n)) in storages
            (by_step if is_guarded else at_once).append(n)
        return by_step, at_once

    def by_device(self, numbers: list[int]) -> tuple[dict[int, list[int]], list[int]]:
        """Those on each device, and those on the CPU; what has no bytes is left out."""
        found: dict[int, list[int]] = defaultdict(list)
        tensors, firsts, sizes = self.prepared.tensors, self.prepared.plan.first_tensors, self.to.sizes
        for n in numbers:
            if sizes[n]:
                found[tensors[firsts[n]].get_device()].append(n)
        by_host = found.pop(_CPU, [])
        return found, by_host

    def take(self, numbers: list[int], stream: Any, spare: SpareMemory) -> _Taken:
        """Queue copies of slots on a stream of the current device: to spare memory of the device, or to the image at once."""
        if self.to.is_page_locked and can_queue_copies() and can_queue_copies_within():
            sizes = [self.to.sizes[n] for n in numbers]
            *offsets, needed_bytes = itertools.accumulate(map(_aligned, sizes), initial=0)
            between = spare.take(needed_bytes, stream)
            if between is not None:
                stops = [between.data_ptr() + offset_bytes for offset_bytes in offsets]
                tables = queue_copies_within(stops, [self.addresses[n] for n in numbers], sizes, stream)
                return _Taken(numbers=numbers, stream=stream, between=between, stops=stops, tables=tables)
        self._queue_to_image(numbers, stream)
        return _Taken(numbers=numbers, stream=stream)

    def _queue_to_image(self, numbers: list[int], stream: Any) -> None:
        to = self.to
        targets, sizes = [to.addresses[n] for n in numbers], [to.sizes[n] for n in numbers]
        if to.is_page_locked and queue_copies(targets, [self.addresses[n] for n in numbers], sizes, stream):
            return
        tensors = self.prepared.plan.sources(self.prepared.tensors)
        with _cuda.stream(stream), torch.no_grad():
            copy_all([to.targets[n] for n in numbers], [tensors[n] for n in numbers])

    def _tensor(self, number: int) -> torch.Tensor:
        return self.prepared.tensors[self.prepared.plan.first_tensors[number]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Taken:
    """Slots whose copy has been queued on a device."""

    numbers: list[int]
    stream: Any
    between: torch.Tensor | None = None
    """The spare memory they are copied to; None where they go to the image at once. Once `send` has been called it need
    not be held: the next user of it on this stream comes after it."""
    stops: Sequence[int] = ()
    """Where in it each of them is."""
    tables: Sequence[torch.Tensor] = ()
    """What the device reads, and must not be freed before that."""

    def send(self, to: Destination, some: slice = slice(None)) -> None:
        """Queue what is left to do, for some of the slots."""
        numbers = self.numbers[some]
        targets, sizes = [to.addresses[n] for n in numbers], [to.sizes[n] for n in numbers]
        with _cuda.device(self.stream.device):
            if not queue_copies(targets, self.stops[some], sizes, self.stream):
                raise CheckpointError("CUDA refused to copy the state to its image.")


def _sent(taken: list[_Taken], to: Destination) -> list[Stage]:
    """Queue what is left to do. Where one device does it, in stages, so that a reader of the image can follow."""
    stages: list[Stage] = []
    # Those without spare memory have left for the image already.
    for number, part in enumerate(parts := [part for part in taken if part.between is not None], 1):
        is_last = number == len(parts) and len({part.stream for part in taken}) == 1
        bounds = _stages_of([to.sizes[n] for n in part.numbers]) if is_last else [len(part.numbers)]
        for start, end in itertools.pairwise([0, *bounds]):
            part.send(to, slice(start, end))
            if is_last and end < len(part.numbers):
                end_bytes = to.placement.slot_offsets_bytes[part.numbers[end]]
                stages.append(Stage(end_bytes=end_bytes, events=_marks([part])))
    return [*stages, Stage(end_bytes=to.placement.size_bytes, events=_marks(taken))]


def _stages_of(sizes: Sequence[int]) -> list[int]:
    """Where each stage ends, by the number of its last slot and one more."""
    ends = itertools.accumulate(sizes)
    share_bytes = max(1, -(-sum(sizes) // STAGES))
    by_stage = {end_bytes // share_bytes: number for number, end_bytes in enumerate(ends, 1)}
    return [*(number for number in list(by_stage.values())[:-1]), len(sizes)]


def _start_events(devices: Iterable[int]) -> Events:
    """Marks on the current streams: the copy begins when what was queued up to here has run."""
    starts = {}
    for device in devices:
        starts[device] = _cuda.Event()
        starts[device].record(_cuda.current_stream(device))
    return starts


def _marks(taken: Iterable[_Taken]) -> Events:
    """Marks on the streams that copy: they come when all that was queued there up to here is done."""
    marks = {}
    for part in taken:
        mark = _cuda.Event(blocking=True)  # A thread that waits for it sleeps.
        mark.record(part.stream)
        marks[part.stream.device.index] = mark
    return marks


def _hold_back(events: Events) -> None:
    for device, event in events.items():
        _cuda.current_stream(device).wait_event(event)


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // COPY_ALIGNMENT_BYTES) * COPY_ALIGNMENT_BYTES


def _storage_address(tensor: torch.Tensor) -> int:
    """Where its storage begins; quicker than asking the storage, which would have to become an object first."""
    return tensor.data_ptr() - int(tensor.storage_offset()) * tensor.itemsize


def _or_fail(copying: Copying, work: Callable[[], None]) -> None:
    """What fails on a helping thread must not leave the others waiting."""
    try:
        work()
    except BaseException as error:
        copying.fail(error)


_guarding: weakref.WeakSet[Copier] = weakref.WeakSet()
"""Those that copy while the computation continues."""


@functools.cache
def _settle_before_graphs() -> None:
    """Let replays and captures of CUDA graphs wait for copies under way. Graphs that exist already are no exception."""
    graph: Any = _cuda.CUDAGraph
    replay, capture_begin = graph.replay, graph.capture_begin

    @functools.wraps(replay)
    def settle_and_replay(self: Any, *args: Any, **options: Any) -> Any:
        for copier in list(_guarding):
            copier.settle()
        return replay(self, *args, **options)

    @functools.wraps(capture_begin)
    def finish_and_capture(self: Any, *args: Any, **options: Any) -> Any:
        for copier in list(_guarding):
            copier.finish()
        return capture_begin(self, *args, **options)

    graph.replay, graph.capture_begin = settle_and_replay, finish_and_capture
