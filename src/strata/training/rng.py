"""Random number generators as state: torch, CUDA, NumPy and Python, per rank.

A checkpoint holds every rank's generators. A rank that did not exist when it was made starts from rank 0's,
moved by its own number, so that no two ranks ever draw the same values.

`Watch` takes them after every step, as bytes: what has not changed is not taken again.
"""

from __future__ import annotations

import ctypes
import logging
import random
import struct
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

log = logging.getLogger("strata.training")

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
        if states.get("0") is not None:
            restore(states, 0)
            seed = int(torch.randint(2**62, (1,)).item()) + rank
            torch.manual_seed(seed)
            random.seed(seed)
            if "numpy" in sys.modules:
                sys.modules["numpy"].random.seed(seed % 2**32)
        return
    missing = [name for name in ("torch", "python") if name not in state]
    if missing:
        log.warning(
            "the saved generators of rank %d are without %s: that continues as it is",
            rank,
            ", ".join(missing),
        )
    if "torch" in state:
        torch.set_rng_state(state["torch"])
    if "python" in state:
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
        self._python_memory = _python_memory()
        self._seen: tuple[object, ...] = ()
        self._numpy = b""
        self._numpy_generator: Any = None
        self._last = Taken()

    def take(self) -> Taken:
        """What has not changed is the same object as before."""
        last, cuda = self._last, b""
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            cuda = _bytes_of(torch.cuda.get_rng_state(), last.cuda)
        self._last = Taken(
            _bytes_of(torch.default_generator.get_state(), last.torch),
            cuda,
            self._take_python(),
            self._take_numpy(),
        )
        return self._last

    def _take_python(self) -> bytes:
        """Python makes 625 numbers of what its generator holds, so it is asked only where the memory of it has changed."""
        if self._python_memory is not None:
            held = ctypes.string_at(self._python_memory, _PYTHON_MEMORY.size)
            seen: tuple[object, ...] = (held, _python.gauss_next)
            if seen == self._seen:
                return self._last.python
            self._seen = seen
        version, internal, gauss = random.getstate()
        return _PYTHON.pack(version, *internal, gauss is not None, gauss or 0.0)

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


_python: Any = random.random.__self__  # type: ignore[attr-defined]
"""The generator behind Python's functions."""
_PYTHON_MEMORY = struct.Struct("<i624I")
"""As CPython keeps it: the position, and the state."""


def _python_memory() -> int | None:
    """The address at which Python keeps its generator; None where it does not look as it does in the versions we know."""
    address = id(_python) + object.__basicsize__
    if sys.implementation.name != "cpython" or type(_python).__basicsize__ < _PYTHON_MEMORY.size:
        return None
    position, *state = _PYTHON_MEMORY.unpack(ctypes.string_at(address, _PYTHON_MEMORY.size))
    return address if (*state, position) == random.getstate()[1] else None


def _bytes_of(state: torch.Tensor, before: bytes) -> bytes:
    """Of a generator's state on the CPU; those before if they are the same."""
    found = ctypes.string_at(state.data_ptr(), state.numel())
    return before if found == before else found


def _tensor(state: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)
