"""States to save: every kind of thing a state may hold, and how two of them are compared bit for bit."""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import Any

import numpy as np
import torch

DTYPES = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.complex64, torch.complex128, torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.uint16, torch.uint32, torch.uint64,
)  # fmt: skip


def random_tensor(dtype: torch.dtype, *shape: int, seed: int = 0) -> torch.Tensor:
    """Random bits, so that every pattern of the type occurs, NaNs included."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator, dtype=torch.uint8).bool()
    size = torch.Size(shape).numel() * dtype.itemsize
    return torch.randint(0, 256, (size,), generator=generator, dtype=torch.uint8).view(dtype).reshape(shape)


def every_kind() -> dict[Any, Any]:
    base = torch.randn(100)
    weight = torch.randn(10, 20)
    return {
        "model": OrderedDict(
            weight=weight,
            transposed=weight.t(),
            tied=weight,
            slice_of_base=base[3:10],
            every_second=base[::2],
            empty=torch.empty(0, 3),
            scalar=torch.tensor(3.5),
            conjugate=torch.randn(3, dtype=torch.complex64).conj(),
            negated=torch.randn(3, dtype=torch.complex64).conj().imag,
            expanded=torch.ones(3, 1).expand(3, 4),
            channels_last=torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
            parameter=torch.nn.Parameter(torch.randn(3)),
            frozen=torch.nn.Parameter(torch.randn(3), requires_grad=False),
            wants_grad=torch.randn(2, requires_grad=True),
        ),
        "dtypes": {str(dtype): random_tensor(dtype, 7, 3) for dtype in DTYPES},
        "numpy": np.arange(6.0).reshape(2, 3),
        "numpy_reversed": np.arange(6)[::-1],
        "numpy_big_endian": np.arange(3, dtype=">i4"),
        "numpy_read_only": np.broadcast_to(np.float32(1.5), (4,)),
        "numpy_scalar": np.float64(3.25),
        "step": 12,
        "negative": -5,
        "huge": 2**80,
        "rate": 1e-4,
        "not_a_number": float("inf"),
        "complex": 1 + 2j,
        "name": "gr\u00fc\u00df dich \U0001f600",
        "no_bytes": b"",
        "raw": b"abc\x00\xff",
        "mutable": bytearray(b"xy"),
        "nothing": None,
        "flags": [True, False],
        "tuple": (1, 2.5, "x", [weight, {"deep": base}]),
        "set": {1, 2, 3},
        "counter": Counter("abca"),
        "size": torch.Size([1, 2]),
        "dtype": torch.bfloat16,
        "device": torch.device("cpu"),
        3: "integer key",
        (1, "a"): "tuple key",
    }


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Equal type, shape and bit pattern; NaNs with the same bits are the same."""
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    flat = [
        tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
        for tensor in (left, right)
    ]
    return torch.equal(*flat)


def assert_same(left: Any, right: Any, at: str = "state") -> None:
    if isinstance(left, torch.Tensor):
        assert isinstance(right, torch.Tensor), at
        assert same_bits(left, right), at
        assert left.requires_grad == right.requires_grad, at
        assert type(left) is type(right), at
    elif isinstance(left, np.ndarray | np.generic):
        assert type(left) is type(right), at
        np.testing.assert_array_equal(left, right, at)
    elif isinstance(left, dict):
        assert list(left) == list(right), at
        assert type(left) is type(right), at
        for key in left:
            assert_same(left[key], right[key], f"{at}[{key!r}]")
    elif type(left) in (list, tuple):
        assert type(left) is type(right), at
        assert len(left) == len(right), at
        for number, (a, b) in enumerate(zip(left, right, strict=True)):
            assert_same(a, b, f"{at}[{number}]")
    else:
        assert type(left) is type(right), at
        assert left == right, at


def small_state(step: int, *, tensors: int = 4, elements: int = 5000) -> dict[str, Any]:
    """A state whose every value tells its step."""
    return {
        "model": {f"layer{n}.weight": torch.full((elements,), float(step * 100 + n)) for n in range(tensors)},
        "step": step,
    }


def assert_is_step(state: dict[str, Any], step: int) -> None:
    assert state["step"] == step
    for n, tensor in enumerate(state["model"].values()):
        assert bool((tensor == step * 100 + n).all()), f"step {step}, layer {n}"
