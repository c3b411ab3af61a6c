"""Random number generators as state: torch, CUDA, NumPy and Python, per rank.

A checkpoint holds every rank's generators. A rank that did not exist when it was made starts from rank 0's,
moved by its own number, so that no two ranks ever draw the same values.

`Watch` takes them after every step, as bytes: what has not changed is not taken again.
"""

from __future__ import annotations

import ctypes
import random
import struct
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

_PYTHON = struct.Struct("<q625IBd")
"""Version, state, whether a normally distributed value waits, and that value."""
_MT19937 = struct.Struct("<624Ii")
_GAUSS = struct.Struct("<Bd")


def capture() -> dict[str, Any]:
    """This process's generators, as plain values and tensors that load with `weights_only=True`."""
    version, internal, gauss = random.getstate()
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": [version, list(internal), gauss],
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state()
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kind, keys, position, has_gauss, cached = numpy.random.get_state()
        state["numpy"] = [kind, torch.from_numpy(keys.astype("int64")), position, has_gauss, cached]
    return state


def restore(states: Mapping[str, Any], rank: int) -> None:
    """Put the generators of `rank` back, from the states of all ranks (by rank number as text)."""
    state = states.get(str(rank))
    if state is None:
        if "0" in states:
            restore(states, 0)
            seed = int(torch.randint(2**62, (1,)).item()) + rank
            torch.manual_seed(seed)
            random.seed(seed)
            if "numpy" in sys.modules:
                sys.modules["numpy"].random.seed(seed % 2**32)
        return
    torch.set_rng_state(state["torch"])
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    if "numpy" in state:
        import numpy

        kind, keys, position, has_gauss, cached = state["numpy"]
        numpy.random.set_state((kind, keys.numpy().astype("uint32"), position, has_gauss, cached))


class Taken(NamedTuple):
    """The generators of a process at one moment. Empty for one that it does not use, or whose kind is not known here."""

    torch: bytes = b""
    cuda: bytes = b""
    python: bytes = b""
    numpy: bytes = b""

    def states(self) -> dict[str, Any]:
        """As `capture` would have said it then."""
        version, *internal, has_gauss, gauss = _PYTHON.unpack(self.python)
        found: dict[str, Any] = {
            "torch": _tensor(self.torch),
            "python": [version, internal, gauss if has_gauss else None],
        }
        if self.cuda:
            found["cuda"] = _tensor(self.cuda)
        if self.numpy:
            *keys, position = _MT19937.unpack_from(self.numpy)
            cached = _GAUSS.unpack_from(self.numpy, _MT19937.size)
            found["numpy"] = ["MT19937", torch.tensor(keys), position, *cached]
        return found


class Watch:
    """This process's generators, taken again and again."""

    def __init__(self) -> None:
        self._seen: tuple[Any, ...] = ()
        self._seen_before: tuple[Any, ...] = ()
        self._uses_python = True
        self._numpy = b""
        self._numpy_generator: Any = None
        self._last = Taken()

    def take(self) -> Taken:
        self._take_python()
        self._uses_python = self._seen is not self._seen_before
        self._seen_before = self._seen
        return self._take_others()

    def guess(self) -> Taken:
        """The same in less time, between two calls of `take`: Python's own generator is looked at only where it was in use before."""
        if self._uses_python:
            self._take_python()
        return self._take_others()

    def _take_python(self) -> None:
        python = random.getstate()
        version, internal, gauss = python
        # The position, and words of the state that differ after every seeding and renewal: to compare all 625 takes longer.
        seen = (internal[-1], internal[1:9], gauss)
        if seen != self._seen:
            self._seen = seen
            packed = _PYTHON.pack(version, *internal, gauss is not None, gauss or 0.0)
            self._last = self._last._replace(python=packed)

    def _take_others(self) -> Taken:
        cuda = b""
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            cuda = torch.cuda.get_rng_state().numpy().tobytes()
        self._last = Taken(
            torch.get_rng_state().numpy().tobytes(), cuda, self._last.python, self._take_numpy()
        )
        return self._last

    def _take_numpy(self) -> bytes:
        """NumPy takes long to say what its generator holds, so it is asked only where the memory of it has changed, or where a value
        waits beside it, which may be used up without a change."""
        numpy = sys.modules.get("numpy")
        if numpy is None:
            return b""
        generator = numpy.random.get_bit_generator()
        if generator is not self._numpy_generator:
            self._numpy_generator, self._numpy = generator, b""
        if type(generator).__name__ != "MT19937":
            return b""
        held = ctypes.string_at(generator.ctypes.state_address, _MT19937.size)
        if not self._numpy or self._numpy[: _MT19937.size] != held or self._numpy[_MT19937.size]:
            state = numpy.random.get_state(legacy=False)
            self._numpy = held + _GAUSS.pack(state["has_gauss"], state["gauss"])
        return self._numpy


def _tensor(state: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)
