"""Copying tensors into an image: at once on the CPU, beside the computation on CUDA.

On the CPU a copy is complete when `copy` returns. On CUDA it runs on a stream of its own into page-locked memory, and
the computation goes on. What may change next decides who waits for it, always on the device and never on the host:

* Parameters and optimizer state of a guarded optimizer change in its `step` and nowhere else, so the stream of that
  step waits (a hook before it) and the forward and backward passes in between overlap with the copy.
* Everything else (running statistics, averages, the state of optimizers nobody guards) may change at any time, so it
  is copied first and the current stream waits for that part right away.

Code of one's own that changes guarded tensors outside of `step` calls `settle` first.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

_cuda: Any = torch.cuda  # Its module is not typed.


class Copying:
    """A copy under way. It holds the tensors it reads from until it is complete."""

    def __init__(self) -> None:
        self.events: list[tuple[torch.device, Any]] = []
        self.issued: Future[None] | None = None
        self.held: Any = None

    def wait(self) -> None:
        """Return when every byte is in its place."""
        if self.issued is not None:
            self.issued.result()
        for _, event in self.events:
            event.synchronize()
        self.held = None

    def is_complete(self) -> bool:
        return (self.issued is None or self.issued.done()) and all(event.query() for _, event in self.events)

    def hold_back_current_streams(self) -> None:
        """What is queued on the current streams from now on runs after this copy."""
        if self.issued is not None:
            self.issued.result()
        for device, event in self.events:
            _cuda.current_stream(device).wait_event(event)


class Copier:
    """Copies states into images, one after the other."""

    def __init__(self) -> None:
        self._guarded: list[weakref.ref[torch.optim.Optimizer]] = []
        self._hooks: list[Any] = []
        self._under_way: list[Copying] = []
        self._streams: dict[torch.device, Any] = {}
        self._lock = threading.Lock()
        self._issuing: ThreadPoolExecutor | None = None

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
        if self._issuing is not None:
            self._issuing.shutdown()

    def copy(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> Copying:
        copying = Copying()
        on_cuda = [n for n, source in enumerate(sources) if source.is_cuda]
        if len(on_cuda) < len(sources):
            chosen = set(on_cuda)
            others = [n for n in range(len(sources)) if n not in chosen] if on_cuda else range(len(sources))
            with torch.no_grad():
                torch._foreach_copy_([targets[n] for n in others], [sources[n] for n in others])
        if on_cuda:
            self._copy_from_cuda(copying, [(targets[n], sources[n]) for n in on_cuda])
        return copying

    def _copy_from_cuda(self, copying: Copying, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        guarded = self._guarded_storages()
        later = [pair for pair in pairs if pair[1].untyped_storage().data_ptr() in guarded]
        copying.held = pairs
        if len(later) < len(pairs):
            first = Copying()
            now = [pair for pair in pairs if pair[1].untyped_storage().data_ptr() not in guarded]
            self._issue(first, now, self._start_events(now))
            first.hold_back_current_streams()
            copying.events += first.events
        if later:
            # Thousands of launches take milliseconds; they need not happen on the training thread.
            starts = self._start_events(later)
            if self._issuing is None:
                self._issuing = ThreadPoolExecutor(1, thread_name_prefix="strata-copy")
            copying.issued = self._issuing.submit(self._issue, copying, later, starts)
            with self._lock:
                self._under_way.append(copying)

    def _start_events(self, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> dict[torch.device, Any]:
        """Marks on the current streams: the copy begins when what was queued up to here has run."""
        starts = {}
        for device in {source.device for _, source in pairs}:
            starts[device] = _cuda.Event()
            starts[device].record(_cuda.current_stream(device))
        return starts

    def _issue(
        self,
        copying: Copying,
        pairs: list[tuple[torch.Tensor, torch.Tensor]],
        starts: dict[torch.device, Any],
    ) -> None:
        for device, start in starts.items():
            stream = self._streams.get(device)
            if stream is None:
                stream = self._streams[device] = _cuda.Stream(device)
            mine = [pair for pair in pairs if pair[1].device == device]
            done = _cuda.Event(blocking=True)  # The thread that waits for it sleeps.
            with _cuda.stream(stream), torch.no_grad():
                stream.wait_event(start)
                torch._foreach_copy_([target for target, _ in mine], [source for _, source in mine], True)
                done.record(stream)
            copying.events.append((device, done))

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


def any_on_cuda(tensors: Iterable[torch.Tensor]) -> bool:
    return bool(_cuda.is_initialized()) and any(tensor.is_cuda for tensor in tensors)


def page_lock(image: torch.Tensor) -> bool:
    """Page-lock the memory of an image for CUDA; False where the driver refuses."""
    result = _cuda.cudart().cudaHostRegister(image.data_ptr(), image.numel(), 0)
    return int(result) == 0


def page_unlock(image: torch.Tensor) -> None:
    _cuda.cudart().cudaHostUnregister(image.data_ptr())
