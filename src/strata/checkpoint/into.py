"""Loading from an image that is in memory as a whole: into tensors on the CPU as `in_place` does it, and into all others.

CUDA gets the bytes from page-locked memory at the speed of the bus. That bus is idle while an image is verified, so its first
bytes are sent ahead to spare memory of the device; no target is touched before all bytes are known to be right, unless the
caller verifies `meanwhile`. What the target has no tensor for (numbers, the state of an optimizer that has not stepped yet) is
returned as loaded. Where the two do not fit, nothing has been copied.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from strata.checkpoint.collecting import no_collection
from strata.checkpoint.device import SpareMemory, on_this_device
from strata.checkpoint.errors import Damaged
from strata.checkpoint.in_place import (
    Intake,
    NotOwn,
    check_head,
    is_on_cpu,
    is_on_cuda,
    is_plain,
    paired,
    take_from_memory,
    targets_for,
)
from strata.checkpoint.loading import open_tensors, verify
from strata.checkpoint.manifest import Manifest, TensorEntry
from strata.checkpoint.state import rebuild, restore_kind, scan
from strata.checkpoint.sweeping import THREADS, copy_bytes

AHEAD_BYTES = 4 << 30
_cuda: Any = torch.cuda  # Its module is not typed.


class ImageInMemory:
    """A complete image in shared memory, as something to load from. It will be overwritten by a later save, so what is loaded
    has memory of its own."""

    def __init__(
        self,
        manifest: Manifest,
        image: torch.Tensor,
        *,
        path: str,
        lock_pages: Callable[[], bool] | None = None,
        is_page_locked: bool = False,
    ) -> None:
        """`image` are the bytes of the file at `path`. `lock_pages` locks them for the device, and may take a second; it is
        left out where nobody would need them locked again. Raises `Damaged` for an image of another size."""
        size_bytes = manifest.parts[0].size_bytes
        if len(image) != size_bytes:
            raise Damaged(path=path, reason=f"the image has {len(image)} bytes, its mark says {size_bytes}")
        self._manifest = manifest
        self._image = image
        self._view = memoryview(image.numpy().data)
        self._path = path
        self._lock_pages = lock_pages
        self._is_page_locked = is_page_locked

    def load(
        self, *, into: Any, trusted_source: bool, pool: Executor, tear_ok: bool, check: bool = True
    ) -> Any:
        """The state, in `into` or in new tensors. Raises `Damaged`, `LoadFailed` and `StateMismatch`."""
        if into is None:
            into, tear_ok = {}, True  # Nobody sees the new tensors of a load that fails.
        if not trusted_source and is_on_cpu(into) and Intake.suits(self._manifest.parts[0]):
            with contextlib.suppress(NotOwn):
                return take_from_memory(
                    self._view,
                    self._manifest,
                    into=into,
                    path=self._path,
                    pool=pool,
                    tear_ok=tear_ok,
                    check=check,
                )
        if tear_ok and check and self._is_page_locked and not trusted_source:
            # The bus and the cores work at the same time.
            check_head(lambda start, end: self._view[start:end], self._manifest, path=self._path)
            state = self._open(trusted_source)
            return self._fill(state, into, meanwhile=lambda: self._verify(pool))
        with sent_ahead(self._image, into, is_page_locked=self._is_page_locked) as ahead:
            self._verify_and_lock(pool, check=check, lock=is_on_cuda(into))
            return self._fill(self._open(trusted_source), into, ahead=ahead)

    def _verify(self, pool: Executor) -> None:
        verify(self._view, self._manifest.parts[0], self._manifest, path=self._path, pool=pool)

    def _verify_and_lock(self, pool: Executor, *, check: bool, lock: bool) -> None:
        """Locking the pages takes longer than verifying them, so both happen at once."""
        locking = pool.submit(on_this_device(self._lock_pages)) if lock and self._lock_pages else None
        try:
            if check:
                self._verify(pool)
        finally:
            if locking is not None:
                locking.result()

    def _open(self, trusted_source: bool) -> Any:
        return open_tensors(self._path, self._manifest, trusted_source=trusted_source)

    def _fill(self, state: Any, into: Any, **more: Any) -> Any:
        targets = targets_for(into, state)
        return load_into(state, targets, self._image, self._manifest.tensors, is_lent=True, **more)


def load_mapped(
    path: Path, manifest: Manifest, *, into: Any, verify: bool, trusted_source: bool = False
) -> Any:
    """Load an image that another process of this machine keeps in shared memory, into tensors of this process.

    The file is mapped, not read: all processes of a machine share its pages. Whoever keeps the image must not save over it
    meanwhile. Without `verify`, somebody has verified it: one process of a machine is enough. A load that fails may leave
    targets torn. Raises `Damaged`, `LoadFailed` and `StateMismatch`.
    """
    try:
        with open(path, "rb") as file:
            private = mmap.mmap(
                file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE
            )
    except (OSError, ValueError) as error:
        raise Damaged(path=str(path), reason=f"the image cannot be read ({error})") from error
    image = ImageInMemory(manifest, torch.frombuffer(private, dtype=torch.uint8), path=str(path))
    with ThreadPoolExecutor(THREADS, thread_name_prefix="strata-load") as pool:
        return image.load(into=into, trusted_source=trusted_source, pool=pool, tear_ok=True, check=verify)


@contextlib.contextmanager
def sent_ahead(image: torch.Tensor, into: Any, *, is_page_locked: bool) -> Iterator[torch.Tensor | None]:
    """The first bytes of an image, on the device that the targets are on; they arrive in the order of its current stream.
    Takes a small part of the memory that is free there. None where nothing would be gained."""
    devices = {tensor.device for tensor in scan(into).tensors if tensor.is_cuda}
    if not is_page_locked or len(devices) != 1:
        yield None
        return
    device = devices.pop()
    with _cuda.device(device):
        size_bytes = min(image.numel(), AHEAD_BYTES, _cuda.mem_get_info()[0] // 4)
        ahead = SpareMemory().take(size_bytes, _cuda.current_stream())
    if ahead is None:
        yield None
        return
    ahead.copy_(image[:size_bytes], non_blocking=True)
    try:
        yield ahead
    finally:
        _cuda.current_stream(device).synchronize()  # Nobody reads the image any more.


@no_collection()
def load_into(
    loaded: Any,
    into: Any,
    image: torch.Tensor,
    entries: Sequence[TensorEntry],
    *,
    is_lent: bool,
    ahead: torch.Tensor | None = None,
    meanwhile: Callable[[], None] | None = None,
) -> Any:
    """Fill the tensors of `into`, and return the loaded state with those tensors in their places.

    `image` are the bytes, `entries` where each leaf of `loaded` lies in them. `is_lent` says that the image will be
    overwritten, so what is not copied into a target must be copied away from it. `ahead` are the bytes of the image that are
    on the device already. `meanwhile` is called while the device copies; if it raises, targets may be torn.
    """
    pairs = list(paired(loaded, into))
    leaves = scan(loaded).tensors
    numbers = {id(leaf): number for number, leaf in enumerate(leaves)}
    plain: list[tuple[int, int, int]] = []
    others, to_device = [], []
    base, size_bytes = image.data_ptr(), image.numel()
    for target, leaf in pairs:
        entry = entries[numbers[id(leaf)]]
        end_bytes = entry.offset_bytes + entry.size_bytes
        if target.is_cuda:
            source = image if ahead is None or end_bytes > len(ahead) else ahead
            to_device.append((target, _view(source, entry, leaf)))
        elif (
            is_plain(target)
            and target.dtype == leaf.dtype
            and leaf.is_contiguous()
            and entry.size_bytes == leaf.nbytes
            and end_bytes <= size_bytes
        ):
            plain.append((target.data_ptr(), base + entry.offset_bytes, entry.size_bytes))
        else:
            others.append((target, _view(image, entry, leaf)))
    try:
        if to_device:
            with torch.no_grad():
                torch._foreach_copy_(
                    [target for target, _ in to_device], [source for _, source in to_device], True
                )
        if meanwhile is not None:
            meanwhile()
        if plain:
            copy_bytes(*zip(*plain, strict=True))
        with torch.no_grad():
            for target, source in others:
                target.copy_(source)
    finally:
        for device in {target.device for target, _ in to_device}:
            torch.cuda.synchronize(device)
    filled = {id(leaf): target for target, leaf in pairs}

    def replace(number: int, leaf: torch.Tensor) -> object:
        if id(leaf) in filled:
            return filled[id(leaf)]
        return restore_kind(_own(leaf) if is_lent else leaf, entries[number].kind)

    return rebuild(loaded, replace)


def _view(image: torch.Tensor, entry: TensorEntry, leaf: torch.Tensor) -> torch.Tensor:
    """The leaf as a view of the image, instead of the mapping it was opened with, which nobody has touched yet."""
    span = image[entry.offset_bytes : entry.offset_bytes + entry.size_bytes]
    return span.view(leaf.dtype).as_strided(leaf.shape, leaf.stride())


def _own(leaf: torch.Tensor) -> torch.Tensor:
    """The same with memory of its own, and no history: a parameter stays one."""
    copied = leaf.detach().clone()
    if isinstance(leaf, torch.nn.Parameter):
        return torch.nn.Parameter(copied, requires_grad=leaf.requires_grad)
    return copied.requires_grad_(leaf.requires_grad)
