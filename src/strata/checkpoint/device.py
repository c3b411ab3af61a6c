"""The CUDA side of copies into an image: page-locked memory, and hundreds of copies queued with one call.

Queueing one copy takes Torch some ten microseconds, and a training loop would wait for each of them. The CUDA runtime takes
a whole list at once (`cudaMemcpyBatchAsync`, from CUDA 13 on). Nothing here waits, and nothing here keeps memory from being
freed: that is the caller's part. Where Torch was built for another runtime, `queue_copies` says so and does nothing.
"""

from __future__ import annotations

import ctypes
import functools
from array import array
from collections.abc import Iterable, Sequence
from typing import Any

import torch

_cuda: Any = torch.cuda  # Its module is not typed.
_IN_STREAM_ORDER = 1


class _Attributes(ctypes.Structure):
    """What the runtime wants to know about the copies of a batch (`cudaMemcpyAttributes`)."""

    _fields_ = (
        ("source_order", ctypes.c_int),
        ("hints", ctypes.c_int * 4),  # Where managed memory should be; page-locked memory is where it is.
        ("flags", ctypes.c_uint),
    )


def any_on_cuda(tensors: Iterable[torch.Tensor]) -> bool:
    return bool(_cuda.is_initialized()) and any(tensor.is_cuda for tensor in tensors)


def page_lock(image: torch.Tensor) -> bool:
    """Page-lock the memory of an image for CUDA; False where the driver refuses."""
    return int(_cuda.cudart().cudaHostRegister(image.data_ptr(), image.numel(), 0)) == 0


def page_unlock(image: torch.Tensor) -> None:
    _cuda.cudart().cudaHostUnregister(image.data_ptr())


def queue_copies(to: Sequence[int], sources: Sequence[int], sizes: Sequence[int], stream: Any) -> bool:
    """Queue copies between device and page-locked memory, given by their addresses and bytes, in any order among each
    other. False where they have to be queued by other means. None may be empty."""
    runtime = _runtime()
    if runtime is None:
        return False
    addresses = [array("Q", numbers) for numbers in (to, sources, sizes)]
    attributes, first = _Attributes(source_order=_IN_STREAM_ORDER), ctypes.c_size_t(0)
    failed = runtime.cudaMemcpyBatchAsync(
        *(ctypes.c_void_p(numbers.buffer_info()[0]) for numbers in addresses),
        ctypes.c_size_t(len(sizes)),
        ctypes.byref(attributes),
        ctypes.byref(first),
        ctypes.c_size_t(1),
        ctypes.c_void_p(stream.cuda_stream),
    )
    if failed:
        runtime.cudaGetLastError()  # Or Torch would find it, and blame whatever runs next.
    return not failed


@functools.cache
def _runtime() -> ctypes.CDLL | None:
    """The CUDA runtime that Torch has loaded, if it is one whose batches are known here."""
    if not (torch.version.cuda or "").startswith("13."):
        return None
    try:
        runtime = ctypes.CDLL("libcudart.so.13")
        runtime.cudaMemcpyBatchAsync.restype = ctypes.c_int
    except (OSError, AttributeError):
        return None
    return runtime
