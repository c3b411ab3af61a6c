"""Copying tensors into an image: at once on the CPU, beside the computation on CUDA.

On the CPU a few threads copy pieces of some megabytes front to back, and `Copying` tells how far they have come, so that
the first bytes can be on their way to disk while the last ones are copied. Nobody waits for a thread that the machine
has no time for: the pieces it did not take are taken by the others. (Torch's own parallel copy waits for all its threads
at every tensor, which on a busy machine took fifty times as long.)

On CUDA the copy runs on a stream of its own into page-locked memory, and the computation goes on. What may change
next decides who waits for it, always on the device and never on the host:

* Parameters and optimizer state of a guarded optimizer change in its `step` and nowhere else, so the stream of that
  step waits (a hook before it) and the forward and backward passes in between overlap with the copy.
* Everything else (running statistics, averages, the state of optimizers nobody guards) may change at any time, so it
  is copied first and the current stream waits for that part right away.

Code of one's own that changes guarded tensors outside of `step` calls `settle` first.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeAlias

import torch

from strata.checkpoint.image import Placement, Plan, Prepared

_cuda: Any = torch.cuda  # Its module is not typed.
Pair: TypeAlias = tuple[torch.Tensor, torch.Tensor]
PIECE_BYTES = 4 << 20
THREADS = min(4, os.cpu_count() or 1)

_memmove = ctypes.CDLL(None).memmove  # Called without the interpreter's lock.
_memmove.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memmove.restype = None


Piece: TypeAlias = list[tuple[int, int, int, int]]
"""Copies of some megabytes together: (to address, number of the source, offset in it, bytes)."""


class Destination:
    """The slots of a plan in the memory of one image."""

    def __init__(self, plan: Plan, placement: Placement, image: torch.Tensor) -> None:
        self.plan = plan
        self.placement = placement
        self.image = image
        base = image.data_ptr()
        sizes = [slot.size_bytes for slot in plan.slots]
        self.pieces = _pieces([base + offset for offset in placement.slot_offsets_bytes], sizes)
        self.starts = [piece[0][0] - base for piece in self.pieces] + [placement.size_bytes]
        """The offset of each piece in the image, and its end."""

    @functools.cached_property
    def targets(self) -> list[torch.Tensor]:
        """The slots as tensors, for copies by a device."""
        return self.plan.targets(self.image, self.placement)


def _pieces(addresses: Sequence[int], sizes: Sequence[int]) -> list[Piece]:
    """Copies to these addresses, in pieces of about `PIECE_BYTES`, in the order given."""
    found: list[Piece] = []
    room_bytes = 0
    for number, (address, size_bytes) in enumerate(zip(addresses, sizes, strict=True)):
        for within in range(0, size_bytes, PIECE_BYTES):
            take_bytes = min(PIECE_BYTES, size_bytes - within)
            if room_bytes < take_bytes:
                found.append([])
                room_bytes = PIECE_BYTES
            found[-1].append((address + within, number, within, take_bytes))
            room_bytes -= take_bytes
    return found


def copy_on_cpu(pairs: Sequence[Pair]) -> None:
    """Copy each source, on the CPU, into its target, with a few threads."""
    plain = [pair for pair in pairs if _is_plain(*pair)]
    pieces = _pieces([target.data_ptr() for target, _ in plain], [target.nbytes for target, _ in plain])
    sweep = _Sweep(pieces, [source.data_ptr() for _, source in plain], lambda _: None)
    with ThreadPoolExecutor(THREADS, thread_name_prefix="strata-copy") as pool, torch.no_grad():
        for _ in range(min(THREADS, len(pieces))):
            pool.submit(sweep.work)
        for target, source in pairs:
            if not _is_plain(target, source):
                target.copy_(source)
        sweep.work()


def _is_plain(target: torch.Tensor, source: torch.Tensor) -> bool:
    """Whether copying the bytes is copying the tensor."""
    same_type = target.dtype == source.dtype and target.device == source.device
    return same_type and target.is_contiguous() and source.is_contiguous()


class Copying:
    """One copy into an image, from the moment the image is chosen for it."""

    def __init__(self, size_bytes: int) -> None:
        self._size_bytes = size_bytes
        self._ready_bytes = 0
        self._wanted_bytes = 0
        """The least anybody waits for; nobody is woken for less."""
        self._error: BaseException | None = None
        self._events: list[tuple[torch.device, Any]] | None = None
        self._held: object = None
        self._changed = threading.Condition()

    def advance(self, ready_bytes: int) -> None:
        """Everything before this offset is in place."""
        with self._changed:
            if ready_bytes > self._ready_bytes:
                self._ready_bytes = ready_bytes
                if ready_bytes >= self._wanted_bytes:
                    self._changed.notify_all()

    def hand_over(self, events: list[tuple[torch.device, Any]], held: object) -> None:
        """The rest is in place when these events have happened; `held` must not be freed before."""
        with self._changed:
            self._events, self._held = events, held
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def is_complete(self) -> bool:
        with self._changed:
            return self._error is not None or self._ready_bytes == self._size_bytes

    def wait(self, upto_bytes: int | None = None) -> None:
        """Return when the bytes before `upto_bytes`, or all, are in place. Raises what stopped the copy."""
        wanted_bytes = self._size_bytes if upto_bytes is None else upto_bytes
        with self._changed:
            while not (self._error or self._events is not None or self._ready_bytes >= wanted_bytes):
                waited_for = self._wanted_bytes
                if waited_for <= self._ready_bytes or wanted_bytes < waited_for:
                    self._wanted_bytes = wanted_bytes
                self._changed.wait()
            if self._error is not None:
                raise self._error
            if self._ready_bytes >= wanted_bytes:
                return
            events = self._events or []
        for _, event in events:
            event.synchronize()
        with self._changed:
            self._ready_bytes = self._size_bytes
            self._held = None

    def hold_back_current_streams(self) -> None:
        """What is queued on the current streams from now on runs after this copy."""
        with self._changed:
            self._changed.wait_for(lambda: self._error or self._events is not None or self.is_complete())
            events = self._events or []
        _hold_back(events)


class Copier:
    """Copies states into images, one after the other."""

    def __init__(self) -> None:
        self._guarded: list[weakref.ref[torch.optim.Optimizer]] = []
        self._hooks: list[Any] = []
        self._under_way: list[Copying] = []
        self._streams: dict[torch.device, Any] = {}
        self._lock = threading.Lock()
        self._issuing: ThreadPoolExecutor | None = None
        self._helping: ThreadPoolExecutor | None = None

    def guard(self, optimizer: torch.optim.Optimizer) -> None:
        """Let copies of this optimizer's tensors overlap with the computation up to its next step."""
        self._guarded.append(weakref.ref(optimizer))
        self._hooks.append(optimizer.register_step_pre_hook(lambda *_: self.settle()))

    def settle(self) -> None:
        """Call before changing guarded tensors: later work on the current streams waits for copies under way."""
        with self._lock:
            self._under_way = [copying for copying in self._under_way if not copying.is_complete()]
            for copying in self._under_way:
                copying.hold_back_current_streams()

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        for pool in (self._issuing, self._helping):
            if pool is not None:
                pool.shutdown()

    def copy(self, copying: Copying, prepared: Prepared, to: Destination) -> None:
        """Copy a state into an image of its plan."""
        if any_on_cuda(prepared.tensors):
            sources = prepared.plan.sources(prepared.tensors)
            self._copy_from_cuda(copying, list(zip(to.targets, sources, strict=True)))
            return
        addresses, held = prepared.plan.slot_addresses(prepared)
        sweep = _Sweep(to.pieces, addresses, lambda front: copying.advance(to.starts[front]))
        helpers = min(THREADS, len(to.pieces)) - 1
        if helpers > 0 and self._helping is None:
            self._helping = ThreadPoolExecutor(THREADS - 1, thread_name_prefix="strata-copy")
        for _ in range(helpers):
            assert self._helping is not None
            self._helping.submit(_or_fail, copying, sweep.work)
        sweep.work()
        copying.wait()  # For pieces that others have begun.
        del held

    def _copy_from_cuda(self, copying: Copying, pairs: list[Pair]) -> None:
        guarded = self._guarded_storages()
        by_host, at_once, by_step = [], [], []
        for pair in pairs:
            source = pair[1]
            if not source.is_cuda:
                by_host.append(pair)
            elif source.untyped_storage().data_ptr() in guarded:
                by_step.append(pair)
            else:
                at_once.append(pair)
        events = self._issue(at_once, _start_events(at_once))
        _hold_back(events)
        if by_host:
            with torch.no_grad():
                torch._foreach_copy_([target for target, _ in by_host], [source for _, source in by_host])
        if not by_step:
            copying.hand_over(events, pairs)
            return
        # Thousands of launches take milliseconds; they need not happen on the training thread.
        with self._lock:
            self._under_way.append(copying)
            if self._issuing is None:
                self._issuing = ThreadPoolExecutor(1, thread_name_prefix="strata-issue")
        starts = _start_events(by_step)

        def issued(future: Future[list[tuple[torch.device, Any]]]) -> None:
            if error := future.exception():
                copying.fail(error)
            else:
                copying.hand_over(events + future.result(), pairs)

        self._issuing.submit(self._issue, by_step, starts).add_done_callback(issued)

    def _issue(self, pairs: list[Pair], starts: dict[torch.device, Any]) -> list[tuple[torch.device, Any]]:
        """Queue the copies on each device's stream; they begin at `starts` and end with the events returned."""
        events = []
        for device, start in starts.items():
            stream = self._streams.get(device)
            if stream is None:
                stream = self._streams[device] = _cuda.Stream(device)
            mine = [pair for pair in pairs if pair[1].device == device]
            done = _cuda.Event(blocking=True)  # A thread that waits for it sleeps.
            with _cuda.stream(stream), torch.no_grad():
                stream.wait_event(start)
                torch._foreach_copy_([target for target, _ in mine], [source for _, source in mine], True)
                done.record(stream)
            events.append((device, done))
        return events

    def _guarded_storages(self) -> set[int]:
        storages: set[int] = set()
        for reference in self._guarded:
            optimizer = reference()
            if optimizer is None:
                continue
            for group in optimizer.param_groups:
                storages.update(parameter.untyped_storage().data_ptr() for parameter in group["params"])
            for state in optimizer.state.values():
                storages.update(
                    value.untyped_storage().data_ptr()
                    for value in state.values()
                    if isinstance(value, torch.Tensor)
                )
        return storages


class _Sweep:
    """Pieces that any number of threads take front to back. `tell` hears how many are done from the front on."""

    def __init__(self, pieces: list[Piece], addresses: list[int], tell: Callable[[int], None]) -> None:
        self._pieces = pieces
        self._addresses = addresses
        self._tell = tell
        self._next = 0
        self._under_way: set[int] = set()
        self._lock = threading.Lock()

    def work(self) -> None:
        while self._copy_next():
            pass
        self._tell(self._front())

    def _copy_next(self) -> bool:
        with self._lock:
            number = self._next
            if number == len(self._pieces):
                return False
            self._next += 1
            self._under_way.add(number)
        for address, source, within, size_bytes in self._pieces[number]:
            _memmove(address, self._addresses[source] + within, size_bytes)
        with self._lock:
            self._under_way.remove(number)
        self._tell(self._front())
        return True

    def _front(self) -> int:
        with self._lock:
            return min(self._under_way, default=self._next)


def _start_events(pairs: list[Pair]) -> dict[torch.device, Any]:
    """Marks on the current streams: the copy begins when what was queued up to here has run."""
    starts = {}
    for device in {source.device for _, source in pairs}:
        starts[device] = _cuda.Event()
        starts[device].record(_cuda.current_stream(device))
    return starts


def _hold_back(events: list[tuple[torch.device, Any]]) -> None:
    for device, event in events:
        _cuda.current_stream(device).wait_event(event)


def _or_fail(copying: Copying, work: Callable[[], None]) -> None:
    """What fails on a helping thread must not leave the others waiting."""
    try:
        work()
    except BaseException as error:
        copying.fail(error)


def any_on_cuda(tensors: Iterable[torch.Tensor]) -> bool:
    return bool(_cuda.is_initialized()) and any(tensor.is_cuda for tensor in tensors)


def page_lock(image: torch.Tensor) -> bool:
    """Page-lock the memory of an image for CUDA; False where the driver refuses."""
    return int(_cuda.cudart().cudaHostRegister(image.data_ptr(), image.numel(), 0)) == 0


def page_unlock(image: torch.Tensor) -> None:
    _cuda.cudart().cudaHostUnregister(image.data_ptr())
