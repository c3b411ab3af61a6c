"""Loading in place: the bytes of an image go straight into tensors that are there already.

A load begins with the outline of the state, which is in the first bytes of an image: what it holds, and of which shapes. From
that the targets are known, also those that are made only now (`Binding`), and whether they fit: where they do not, nothing
has been changed. What the targets have no tensor for (numbers, the state of an optimizer that has not stepped yet) is returned
as loaded, in memory of its own.

Targets on the CPU take an image of our own in chunks, in any order, from wherever they come: a mapping of shared memory, or a
part that has just arrived from a store. Each chunk is hashed as it is copied, so the bytes are read from memory once, and a
load that fails may leave targets torn. Callers who cannot have that verify everything before.

All other targets are filled from an image that is in memory as a whole. CUDA gets the bytes from page-locked memory at the speed
of the bus. That bus is idle while an image is verified, so its first bytes are sent ahead to spare memory of the device; no
target is touched before all bytes are known to be right, unless the caller verifies `meanwhile`.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch

from strata.checkpoint.catalog.manifest import Manifest, Part, TensorEntry, no_collection
from strata.checkpoint.copying.cuda import SpareMemory, any_on_cuda, on_this_device
from strata.checkpoint.copying.sweeping import THREADS, Sweep, copy_bytes, copy_each
from strata.checkpoint.errors import CheckpointError, Damaged, StateMismatch
from strata.checkpoint.image import nested
from strata.checkpoint.image.nested import Missing
from strata.checkpoint.image.pickling import TensorRecipe
from strata.checkpoint.image.reading import damage, open_tensors, verify
from strata.checkpoint.image.state import NUMPY, TENSOR, rebuild, restore_kind, scan
from strata.checkpoint.image.unpickling import (
    Outline,
    check_recipe,
    head_bytes,
    is_dense,
    made_of,
    put_in_place,
    read_outline,
)
from strata.stores.protocol import NotFound, PartReader, Truncated
from strata.torch_compat.images import copy_all

WINDOW_BYTES = 1 << 20
"""Stays in a core's caches between being hashed and being copied."""


class PartStore(PartReader, Protocol):
    """What hands out an image in parts: a store, or another machine's memory."""

    def read(self, key: str, *, offset: int = 0, length: int | None = None) -> bytes: ...


class NotOwn(Exception):
    """An image that only torch can open."""


@runtime_checkable
class Binding(Protocol):
    """Targets that are known only when it is known what was saved."""

    @property
    def is_on_cpu(self) -> bool:
        """Whether all of them will be."""
        ...

    def bind(self, saved: Any) -> Any:
        """The targets for a state in which a `TensorRecipe` stands for each tensor: a nesting of mappings and sequences
        like it, as far as it has tensors to be filled. Raises `StateMismatch` where they do not fit, with nothing changed."""
        ...


def targets_for(into: Any, state: Any) -> Any:
    """The tensors to be filled from a loaded state."""
    return into.bind(outline_of(state)) if isinstance(into, Binding) else into


def outline_of(state: Any) -> Any:
    """A state with a description in the place of each tensor; the state stays as it is."""

    def described(_: nested.Path, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return TensorRecipe(
            record=-1,
            record_bytes=leaf.nbytes,
            dtype=leaf.dtype,
            offset=0,
            shape=tuple(leaf.shape),
            stride=tuple(leaf.stride()),
            requires_grad=leaf.requires_grad,
            is_parameter=isinstance(leaf, torch.nn.Parameter),
        )

    return nested.mapped(state, described, leaf=torch.Tensor)


class InPlace:
    """One image on its way into tensors on the CPU."""

    def __init__(
        self, outline: Outline, targets: Any, entries: Sequence[TensorEntry], size_bytes: int
    ) -> None:
        """`targets` are those for this outline. Raises `StateMismatch` where they do not fit, and any other exception for
        an outline that does not fit its manifest; nothing is changed here."""
        self.size_bytes = size_bytes
        self._uses = outline.uses
        self._records: dict[int, torch.Tensor] = {}
        self._rows: dict[tuple[int, int], int] = {}
        self._afterwards: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._by_value: dict[int, tuple[torch.Tensor, str]] = {}
        """What becomes something with a value of its own, when the bytes are there."""
        wanted: dict[int, list[torch.Tensor]] = {}
        for target, leaf in paired(outline.state, targets):
            wanted.setdefault(id(leaf), []).append(target)

        def place(number: int, recipe: TensorRecipe) -> object:
            entry = entries[number]
            check_recipe(entry, recipe)
            found = wanted.get(id(recipe))
            if found is None:
                made = self._new(entry, recipe)
                if entry.kind in (TENSOR, NUMPY):
                    return restore_kind(made, entry.kind)
                self._by_value[id(made)] = made, entry.kind
                return made
            for target in found:
                if is_plain(target) and target.dtype is recipe.dtype and is_dense(recipe, entry):
                    self._send(entry.offset_bytes, entry.size_bytes, target.data_ptr())
                else:
                    self._afterwards.append((target, self._new(entry, recipe)))
            return found[-1]

        with no_collection():
            self._state = put_in_place(outline, place)
        self._split()

    def _new(self, entry: TensorEntry, recipe: TensorRecipe) -> torch.Tensor:
        """The tensor as it was saved, in memory of its own, which it shares with those that it shared it with."""
        item_bytes = recipe.dtype.itemsize
        record = self._records.get(recipe.record)
        if record is None:
            start_bytes = entry.offset_bytes - recipe.offset * item_bytes
            self._check_span(start_bytes, recipe.record_bytes)
            record = torch.empty(recipe.record_bytes, dtype=torch.uint8)
            self._send(start_bytes, recipe.record_bytes, record.data_ptr())
            if self._uses[recipe.record] > 1:
                self._records[recipe.record] = record
        row = record[: recipe.record_bytes // item_bytes * item_bytes].view(recipe.dtype)
        return made_of(row, recipe)

    def _send(self, offset_bytes: int, size_bytes: int, address: int) -> None:
        self._check_span(offset_bytes, size_bytes)
        if size_bytes:
            self._rows[address, size_bytes] = offset_bytes  # Of two for one target, the last counts.

    def _check_span(self, offset_bytes: int, size_bytes: int) -> None:
        if offset_bytes < 0 or size_bytes < 0 or offset_bytes + size_bytes > self.size_bytes:
            raise ValueError("a tensor lies outside its file")

    def _split(self) -> None:
        """The rows in pieces, none of which is in more than one window."""
        keys = np.array(list(self._rows), dtype=np.int64).reshape(-1, 2)
        to, sizes = keys[:, 0], keys[:, 1]
        offsets = np.array(list(self._rows.values()), dtype=np.int64)
        first = offsets // WINDOW_BYTES
        counts = (offsets + sizes - 1) // WINDOW_BYTES - first + 1
        row = np.repeat(np.arange(len(counts)), counts)
        window = first[row] + np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
        in_order = np.argsort(window, kind="stable")
        row, window = row[in_order], window[in_order]
        start = np.maximum(offsets[row], window * WINDOW_BYTES)
        end = np.minimum(offsets[row] + sizes[row], (window + 1) * WINDOW_BYTES)
        self._to = (to[row] + start - offsets[row]).astype(np.uint64)
        self._from = start.astype(np.uint64)
        self._sizes = (end - start).astype(np.uint64)
        windows = -(-self.size_bytes // WINDOW_BYTES)
        self._bounds = np.searchsorted(window, np.arange(windows + 1)).tolist()

    def take(self, start_bytes: int, size_bytes: int, address: int) -> None:
        """Copy to the targets what is at `address`: so many bytes of the image, from a window's start to a window's end."""
        some = slice(
            self._bounds[start_bytes // WINDOW_BYTES],
            self._bounds[-(-(start_bytes + size_bytes) // WINDOW_BYTES)],
        )
        if some.start < some.stop:
            shift = np.array((address - start_bytes) % 2**64, dtype=np.uint64)
            copy_each(self._to[some], self._from[some] + shift, self._sizes[some])

    def finish(self) -> Any:
        """When all of the image has been taken: the state, with the targets in their places."""
        with torch.no_grad():
            for target, source in self._afterwards:
                target.copy_(source)
        if not self._by_value:
            return self._state
        return rebuild(
            self._state,
            lambda _, leaf: restore_kind(*self._by_value[id(leaf)]) if id(leaf) in self._by_value else leaf,
        )


def is_on_cuda(into: Any) -> bool:
    """Whether any tensor of the target is: then the image should be page-locked before it is copied."""
    return not into.is_on_cpu if isinstance(into, Binding) else any_on_cuda(scan(into).tensors)


def is_on_cpu(into: Any) -> bool:
    """Whether every tensor of the target is."""
    if isinstance(into, Binding):
        return into.is_on_cpu
    return all(tensor.device.type == "cpu" for tensor in scan(into).tensors)


class Intake:
    """A payload on its way into tensors on the CPU."""

    def __init__(self, part: Part, manifest: Manifest, *, path: str) -> None:
        self._part = part
        self._manifest = manifest
        self._path = path
        self._damaged: list[int] = []

    @staticmethod
    def suits(part: Part) -> bool:
        """Whether the chunks of a payload can be taken one by one."""
        return part.digest.chunk_bytes % WINDOW_BYTES == 0

    def open(self, head: memoryview | bytes, into: Any) -> None:
        """Find the targets, from the bytes before the first tensor. Raises `StateMismatch`, and `NotOwn`."""
        entries, size_bytes = self._manifest.tensors, self._part.size_bytes

        def checked(number: int, recipe: TensorRecipe) -> TensorRecipe:
            check_recipe(entries[number], recipe)
            return recipe

        try:
            outline = read_outline(head)
            if isinstance(into, Binding):
                put_in_place(outline, checked)  # Before anything is made to these measures.
                into = into.bind(outline.state)
            self._image = InPlace(outline, into, entries, size_bytes)
        except (CheckpointError, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # Of a file made to do harm, anything.
            raise NotOwn(str(error)) from error

    def take(self, number: int, chunk: memoryview, *, check: bool = True) -> None:
        """Copy one chunk to the targets, and hash it on the way."""
        hasher = self._part.digest.hasher()
        start_bytes = number * self._part.digest.chunk_bytes
        address = int(np.frombuffer(chunk, np.uint8).ctypes.data) if len(chunk) else 0
        for within in range(0, len(chunk), WINDOW_BYTES):
            window = chunk[within : within + WINDOW_BYTES]
            if check:
                hasher.update(window)
            self._image.take(start_bytes + within, len(window), address + within)
        if check and hasher.hexdigest() != self._part.digest.chunks[number]:
            self._damaged.append(number)

    def finish(self) -> Any:
        """When all chunks were taken: the state. Raises `Damaged`."""
        if self._damaged:
            raise damage(self._part, self._manifest, sorted(self._damaged), path=self._path)
        return self._image.finish()


def take_from_memory(
    view: memoryview,
    manifest: Manifest,
    *,
    into: Any,
    path: str,
    pool: Executor,
    tear_ok: bool,
    check: bool = True,
) -> Any:
    """Load an image that is in memory. Without `check` it has been verified. Raises like `Intake.open`."""
    part = manifest.parts[0]
    if check and not tear_ok:
        verify(view, part, manifest, path=path, pool=pool)
        check = False
    intake, chunk_bytes = Intake(part, manifest, path=path), part.digest.chunk_bytes
    head = view[: head_bytes(manifest.tensors, part.size_bytes)]
    if check:
        check_head(lambda start, end: view[start:end], manifest, path=path)
    intake.open(head, into)

    def take(number: int) -> None:
        intake.take(number, view[number * chunk_bytes : (number + 1) * chunk_bytes], check=check)

    sweep = Sweep(len(part.digest.chunks), take, lambda _: None)
    helping = [pool.submit(sweep.work) for _ in range(min(THREADS, sweep.parts) - 1)]
    sweep.work()
    for helper in helping:
        helper.result()
    return intake.finish()


def take_from_store(store: PartStore, manifest: Manifest, *, into: Any, path: str) -> Any:
    """Load an image from a store, part by part as it arrives: a failure may leave targets torn. Raises like `Intake.open`,
    and the store's errors."""
    part = manifest.parts[0]
    intake, chunk_bytes = Intake(part, manifest, path=path), part.digest.chunk_bytes
    try:
        head = store.read(part.key, length=head_bytes(manifest.tensors, part.size_bytes))
        try:
            intake.open(head, into)
        except (CheckpointError, NotOwn):  # Because of what was saved, or because of a damaged byte?
            check_head(
                lambda start, end: store.read(part.key, offset=start, length=end - start), manifest, path=path
            )
            raise

        def take(start_bytes: int, chunk: memoryview) -> None:
            if chunk[: max(0, len(head) - start_bytes)] != head[start_bytes : start_bytes + len(chunk)]:
                raise damage(part, manifest, [start_bytes // chunk_bytes], path=path)
            intake.take(start_bytes // chunk_bytes, chunk)

        store.read_parts(part.key, take, size_bytes=part.size_bytes, part_bytes=chunk_bytes)
    except NotFound:
        raise Damaged(path=path, reason="the payload is missing") from None
    except Truncated as error:
        raise Damaged(path=path, reason=error.reason) from None
    return intake.finish()


def check_head(read: Callable[[int, int], memoryview | bytes], manifest: Manifest, *, path: str) -> None:
    """Raise `Damaged` unless the bytes before the first tensor are those that were saved, by the chunks they are in."""
    part = manifest.parts[0]
    size_bytes = head_bytes(manifest.tensors, part.size_bytes)
    for number in range(-(-size_bytes // part.digest.chunk_bytes)):
        start = number * part.digest.chunk_bytes
        chunk = read(start, min(start + part.digest.chunk_bytes, part.size_bytes))
        if not part.digest.fits(number, chunk):
            raise damage(part, manifest, [number], path=path)


def paired(loaded: Any, into: Any) -> Iterator[tuple[torch.Tensor, Any]]:
    """Each tensor to be filled, and the leaf of the loaded state, or of its outline, that belongs there. Raises `StateMismatch`
    for a tensor that would stay as it is; only an entry of a mapping that was not saved may be missing with all that is in
    it, such as the state of an optimizer that had not stepped."""
    for path, target, leaf in nested.beside(into, loaded, leaf=_TENSORS):
        if isinstance(target, torch.Tensor):
            if not isinstance(leaf, _TENSORS) or leaf.shape != target.shape:
                raise _mismatch(path, target, leaf)
            yield target, leaf
        elif leaf is Missing.UNLIKE:
            for inner, tensor in nested.leaves(target, leaf=torch.Tensor):
                if isinstance(tensor, torch.Tensor):
                    raise _mismatch((*path, *inner), tensor, leaf)


_TENSORS = (torch.Tensor, TensorRecipe)


def _mismatch(path: nested.Path, target: torch.Tensor, leaf: Any) -> StateMismatch:
    name = nested.dotted(path)
    if isinstance(leaf, Missing):
        return StateMismatch(f"'{name}' is not in the checkpoint.")
    found = tuple(leaf.shape) if isinstance(leaf, _TENSORS) else type(leaf).__name__
    return StateMismatch(f"'{name}' is {found} in the checkpoint, but {tuple(target.shape)} in the target.")


def is_plain(target: torch.Tensor) -> bool:
    """Whether copying the bytes of rows to a target is copying the tensor."""
    return (
        type(target) in (torch.Tensor, torch.nn.Parameter)
        and target.is_contiguous()
        and target.device.type == "cpu"
        and not target.is_neg()
        and not target.is_conj()
    )


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
        left out where they would not be needed locked again. Raises `Damaged` for an image of another size."""
        size_bytes = manifest.parts[0].size_bytes
        if len(image) != size_bytes:
            raise Damaged(path=path, reason=f"the image has {len(image)} bytes, its mark says {size_bytes}")
        self._manifest = manifest
        self._image = image
        self._view: memoryview = image.numpy().data
        self._path = path
        self._lock_pages = lock_pages
        self._is_page_locked = is_page_locked

    def load(
        self, *, into: Any, trusted_source: bool, pool: Executor, tear_ok: bool, check: bool = True
    ) -> Any:
        """The state, in `into` or in new tensors. Raises `Damaged`, `LoadFailed` and `StateMismatch`."""
        if into is None:
            into, tear_ok = {}, True  # The caller never sees the new tensors of a load that fails.
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
        if self._is_page_locked and not check:
            return self._fill(self._open(trusted_source), into)
        if tear_ok and self._is_page_locked and not trusted_source:
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

    The file is mapped, not read: all processes of a machine share its pages. The process that keeps the image must not save
    over it meanwhile. Without `verify`, it must have been verified already; one process of a machine is enough. A load that
    fails may leave targets torn. Raises `Damaged`, `LoadFailed` and `StateMismatch`.
    """
    image = ImageInMemory(manifest, torch.frombuffer(_mapped(path), dtype=torch.uint8), path=str(path))
    with ThreadPoolExecutor(THREADS, thread_name_prefix="strata-load") as pool:
        return image.load(into=into, trusted_source=trusted_source, pool=pool, tear_ok=True, check=verify)


def verify_image(image: torch.Tensor | None, manifest: Manifest, *, path: Path) -> None:
    """Raise `Damaged` unless an image in shared memory is what was saved. `image` are its bytes, where they are mapped already."""
    part = manifest.parts[0]
    if image is None:
        image = torch.frombuffer(_mapped(path), dtype=torch.uint8)
    if len(image) != part.size_bytes:
        raise Damaged(
            path=str(path), reason=f"the image has {len(image)} bytes, its mark says {part.size_bytes}"
        )
    with ThreadPoolExecutor(THREADS, thread_name_prefix="strata-load") as pool:
        verify(image.numpy().data, part, manifest, path=str(path), pool=pool)


def _mapped(path: Path) -> mmap.mmap:
    try:
        with open(path, "rb") as file:
            return mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    except (OSError, ValueError) as error:
        raise Damaged(path=str(path), reason=f"the image cannot be read ({error})") from error


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
        _cuda.current_stream(device).synchronize()  # The device no longer reads the image.


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
                copy_all([target for target, _ in to_device], [source for _, source in to_device])
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
    """The leaf as a view of the image, instead of the mapping it was opened with, which is still untouched."""
    span = image[entry.offset_bytes : entry.offset_bytes + entry.size_bytes]
    return span.view(leaf.dtype).as_strided(leaf.shape, leaf.stride())


def _own(leaf: torch.Tensor) -> torch.Tensor:
    """The same with memory of its own, and no history: a parameter stays one."""
    copied = leaf.detach().clone()
    if isinstance(leaf, torch.nn.Parameter):
        return torch.nn.Parameter(copied, requires_grad=leaf.requires_grad)
    return copied.requires_grad_(leaf.requires_grad)
