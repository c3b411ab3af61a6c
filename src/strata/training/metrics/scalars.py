"""Single values on a GPU, as they are now, without waiting for the GPU.

One kernel gathers all of a call and one copy takes them to the host, both part of the stream that the caller works in: whatever
is done to the tensors afterwards comes after it. Memory that a device may write to is allocated for many calls at once and used
again: allocating it waits for the device.

`copied` may be called by several threads; the values of what it returns are read once, by any thread.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass, field

import torch

from strata.torch_compat.images import copy_all

LANES_LIMIT = 100
"""Streams times lengths that are prepared for; a loop has a few."""
LANDINGS, LANDING_VALUES = 256, 100_000
"""Calls whose values may be on their way before memory for as many more is allocated, and how many values that is at most."""


@dataclass(slots=True)
class _Landing:
    """Memory of the host that a device writes to, and when it has."""

    values: torch.Tensor
    arrived: torch.Event


@dataclass(slots=True)
class _Lane:
    """For so many values of one stream and thread. Its calls follow each other on the device, so they may share `gathered`."""

    stream: torch.Stream
    gathered: torch.Tensor
    parts: list[torch.Tensor]
    mode: torch.inference_mode
    free: deque[_Landing] = field(default_factory=deque)

    def landing(self) -> _Landing:
        if not self.free:
            with torch.inference_mode(False):
                calls = max(1, min(LANDINGS, LANDING_VALUES // len(self.parts)))
                host = torch.empty((calls, len(self.parts)), dtype=torch.float64, pin_memory=True)
                self.free += [_Landing(values, torch.Event("cuda")) for values in host.unbind()]
        return self.free.popleft()


@dataclass(slots=True)
class Copied:
    """Values that are on their way to the host."""

    _landing: _Landing
    _lane: _Lane

    @property
    def is_there(self) -> bool:
        return self._landing.arrived.query()

    def read(self) -> list[float]:
        """Waits for them. Raises `RuntimeError` where the device has failed."""
        self._landing.arrived.synchronize()
        found: list[float] = self._landing.values.tolist()
        self._lane.free.append(self._landing)
        return found


class ScalarCopies:
    def __init__(self) -> None:
        self._lanes: dict[tuple[int, int, int, int], _Lane] = {}

    def copied(self, tensors: list[torch.Tensor], device_index: int) -> Copied:
        """Of 0-dimensional tensors of one CUDA device. Raises `RuntimeError` for others."""
        stream = torch.accelerator.current_stream(device_index)
        key = (threading.get_ident(), device_index, stream.stream_id, len(tensors))
        lane = self._lanes.get(key)
        if lane is None:
            lane = self._opened(key, stream)
        landing = lane.landing()
        with lane.mode:  # Cheaper than `no_grad` for many tensors: their versions are not counted.
            copy_all(lane.parts, tensors)
            landing.values.copy_(lane.gathered, non_blocking=True)
        landing.arrived.record(lane.stream)
        return Copied(landing, lane)

    def _opened(self, key: tuple[int, int, int, int], stream: torch.Stream) -> _Lane:
        if len(self._lanes) >= LANES_LIMIT:
            self._lanes.clear()  # What is on its way keeps its own.
        # Every kind of number fits: one lane for all of them.
        with torch.inference_mode(False), torch.no_grad():
            gathered = torch.empty(key[-1], dtype=torch.float64, device=stream.device)
            lane = self._lanes[key] = _Lane(stream, gathered, list(gathered.unbind()), torch.inference_mode())
        return lane
