"""The CUDA side of copies into an image: page-locked memory, spare memory, and hundreds of copies queued with one call.

Queueing one copy takes Torch some ten microseconds, and a training loop would wait for each of them. To the host, the CUDA
runtime takes a whole list at once (`cudaMemcpyBatchAsync`, from CUDA 13 on). Within a device that would still be a launch for
each, so there a kernel of our own works through the list. Nothing here waits, and nothing here keeps memory from being
freed: that is the caller's part. Where Torch was built for another runtime, or cannot compile a kernel, `queue_copies` and
`queue_copies_within` say so and do nothing.
"""

from __future__ import annotations

import ctypes
import functools
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch

from strata.torch_compat.images import compile_kernel

_cuda: Any = torch.cuda  # Its module is not typed.
_IN_STREAM_ORDER = 1
Result = TypeVar("Result")


_BLOCKS_FOR_EACH, _THREADS, _MOST_COPIES = 64, 256, 65535
_COPY_KERNEL = """
typedef unsigned long long number;

extern "C" __global__ void copy_each(const number* table) {
    const number count = gridDim.y, which = blockIdx.y;
    const number to = table[which], from = table[count + which], bytes = table[2 * count + which];
    const number first = blockIdx.x * blockDim.x + threadIdx.x, step = gridDim.x * blockDim.x;
    const number vectors = (to | from) % sizeof(uint4) ? 0 : bytes / sizeof(uint4);
    for (number n = first; n < vectors; n += step)
        ((uint4*)to)[n] = ((const uint4*)from)[n];
    for (number n = vectors * sizeof(uint4) + first; n < bytes; n += step)
        ((char*)to)[n] = ((const char*)from)[n];
}
"""


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
    failed = int(_cuda.cudart().cudaHostRegister(image.data_ptr(), image.numel(), 0))
    if failed:
        _forget_error()
    return not failed


def page_unlock(image: torch.Tensor) -> None:
    _cuda.cudart().cudaHostUnregister(image.data_ptr())


def on_this_device(work: Callable[[], Result]) -> Callable[[], Result]:
    """For another thread, whose current device would be the first one: CUDA would set that up only to find it idle."""
    device = _cuda.current_device()

    def run() -> Result:
        with _cuda.device(device):
            return work()

    return run


class SpareMemory:
    """Memory of one device that nothing else needs for the moment.

    What was taken and let go of stays in the cache of Torch's allocator for the stream that it was taken for. When other
    memory runs out, it goes back to the device.
    """

    def __init__(self) -> None:
        self._had_bytes = 0

    def take(self, size_bytes: int, stream: Any) -> torch.Tensor | None:
        """Memory for the work of a stream of the current device; None where half of what is free would not be enough."""
        if size_bytes > self._had_bytes and size_bytes > _cuda.mem_get_info()[0] // 2:
            return None
        try:
            with _cuda.stream(stream):
                taken = torch.empty(size_bytes, dtype=torch.uint8, device="cuda")
        except torch.OutOfMemoryError:  # It has been given back, and others have taken it.
            self._had_bytes = 0
            return None
        self._had_bytes = size_bytes
        return taken


def can_queue_copies() -> bool:
    """Whether the runtime is one whose batches are known here: before CUDA 13 they had other parameters, or did not exist."""
    return _runtime() is not None and str(torch.version.cuda).startswith("13.")


def queue_copies(to: Sequence[int], sources: Sequence[int], sizes: Sequence[int], stream: Any) -> bool:
    """Queue copies between device and page-locked memory, given by their addresses and bytes, in any order among each
    other. False where they have to be queued by other means. None may be empty."""
    runtime = _runtime()
    if runtime is None or not can_queue_copies():
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
        _forget_error()
    return not failed


def can_queue_copies_within() -> bool:
    return _copy_kernel(_cuda.current_device()) is not None


def queue_copies_within(
    to: Sequence[int], sources: Sequence[int], sizes: Sequence[int], stream: Any
) -> list[torch.Tensor]:
    """Queue copies within the current device, with one launch. What is returned must not be freed before they are done."""
    kernel, held = _copy_kernel(_cuda.current_device()), []
    assert kernel is not None
    for start in range(0, len(sizes), _MOST_COPIES):
        some = slice(start, start + _MOST_COPIES)
        table = torch.tensor([to[some], sources[some], sizes[some]], dtype=torch.int64).pin_memory()
        kernel((_BLOCKS_FOR_EACH, table.shape[1], 1), (_THREADS, 1, 1), [table], 0, stream)
        held.append(table)
    return held


@functools.cache
def _copy_kernel(device: int) -> Any | None:
    """For one device; None where this Torch cannot make it."""
    try:
        with _cuda.device(device):
            return compile_kernel(_COPY_KERNEL, "copy_each")
    except (AttributeError, ImportError, OSError, RuntimeError):
        return None


def _forget_error() -> None:
    """Or Torch would find it, and blame whatever runs next."""
    runtime = _runtime()
    if runtime is not None:
        runtime.cudaGetLastError()


@functools.cache
def _runtime() -> ctypes.CDLL | None:
    """The CUDA runtime that Torch has loaded."""
    try:
        return ctypes.CDLL(f"libcudart.so.{(torch.version.cuda or '').partition('.')[0]}")
    except OSError:
        return None
