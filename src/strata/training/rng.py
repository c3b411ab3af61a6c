"""Random number generators as state: torch, CUDA, NumPy and Python, per rank.

A checkpoint holds every rank's generators. A rank that did not exist when it was made starts from rank 0's,
moved by its own number, so that no two ranks ever draw the same values.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from typing import Any

import torch


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
