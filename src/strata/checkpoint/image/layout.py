"""A checkpoint as one byte image that is a valid `.pt` file.

`plan` looks at the geometry of a state's tensors, never at their bytes, and decides where everything goes;
`Plan.lay_out` writes such a file with holes where tensor bytes belong; `Plan.fill` copies those bytes to their
places. A plan serves every later state of the same structure: what may differ are the tensors' values and all
numbers, strings and the like between them, as long as their pickle fits the space reserved for it.

The file opens with `torch.load(path, weights_only=True, mmap=True)`: tensors that shared memory share it again,
views are views, strides are kept. Of a larger storage only the span in use is stored. All tensors are tagged `cpu`,
so that the file opens on any machine. Records start at multiples of 4 KiB, for direct I/O and page locking.

The zip's CRC fields are zero, as torch leaves them with `set_crc32_options(False)`: torch never reads them, and
computing them would cost more than writing the file. The manifest's digests protect every byte instead; an export
writes true ones for other zip tools.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from strata.checkpoint.catalog.manifest import TensorEntry, no_collection
from strata.checkpoint.copying.cuda import any_on_cuda
from strata.checkpoint.errors import UnsupportedState
from strata.checkpoint.image.pickling import Prefix, TensorRecipe, body_for, prefix_for
from strata.checkpoint.image.state import Scan, leaf_kind, named_leaves, scan
from strata.torch_compat.images import file_reader, file_writer, guard

ALIGNMENT_BYTES = 4096
FILE_NAME = "archive.pt"  # Torch puts the file's name into the file: a constant one keeps images comparable.
_SPARE_PICKLE_BYTES = 64 << 10
_RECORD_OVERHEAD_BYTES = 512

Facts: TypeAlias = tuple[list[Any], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """One record of the file: a span of one storage, used by one tensor or shared by several."""

    size_bytes: int
    start_bytes: int
    """Where the span starts in its storage."""
    tensors: tuple[int, ...]
    is_full: bool
    """The one tensor in it covers every byte, so tensors can be copied as they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Where everything goes, for all states of one structure."""

    outline: Facts
    geometry: Facts
    guard: Callable[..., bool]
    """Torch's own check that tensors have this geometry; it is quicker, but says no more often than it must."""
    slots: tuple[Slot, ...]
    first_tensors: tuple[int, ...]
    """Of each slot."""
    recipes: tuple[TensorRecipe, ...]
    names: tuple[str, ...]
    kinds: tuple[str, ...]
    prefix: Prefix
    pickle_capacity_bytes: int
    bound_bytes: int
    """No image of this plan is larger."""
    lazy_slots: tuple[int, ...]
    """Those whose tensor has other values than its memory: a conjugated or negated view."""
    shared_slots: tuple[int, ...]
    """Those that are a span of a storage rather than one tensor."""
    strided: tuple[int, ...]
    """The tensors that are not contiguous."""

    @property
    def tensor_bytes(self) -> int:
        """Of all tensors, tied ones once."""
        return sum(slot.size_bytes for slot in self.slots)

    def lay_out(self, path: str) -> Placement:
        """Write the file at `path` with everything but tensor bytes and pickle body."""
        assert os.path.basename(path) == FILE_NAME
        writer = file_writer(path, alignment_bytes=ALIGNMENT_BYTES)
        pickle = self.prefix.program.ljust(self.pickle_capacity_bytes, b"\0")
        writer.write_record("data.pkl", pickle, len(pickle))
        for name, value in (
            (".format_version", "1"),
            (".storage_alignment", str(ALIGNMENT_BYTES)),
            ("byteorder", "little"),
        ):
            writer.write_record(name, value, len(value))
        for number, slot in enumerate(self.slots):
            writer.write_record_metadata(f"data/{number}", slot.size_bytes)
        writer.write_end_of_file()
        reader = file_reader(path)
        return Placement(
            size_bytes=os.path.getsize(path),
            body_offset_bytes=reader.get_record_offset("data.pkl") + len(self.prefix.program),
            body_capacity_bytes=self.pickle_capacity_bytes - len(self.prefix.program),
            slot_offsets_bytes=tuple(reader.get_record_offset(f"data/{n}") for n in range(len(self.slots))),
        )

    def frame(self, placement: Placement) -> Iterator[tuple[int, int]]:
        """The spans of the file that are the same in every image of this plan: all but pickle body and tensor bytes."""
        yield 0, placement.body_offset_bytes
        start = placement.body_offset_bytes + placement.body_capacity_bytes
        for offset_bytes, slot in zip(placement.slot_offsets_bytes, self.slots, strict=True):
            yield start, offset_bytes
            start = offset_bytes + slot.size_bytes
        yield start, placement.size_bytes

    def entries(self, placement: Placement) -> tuple[TensorEntry, ...]:
        """The tensor table of the manifest."""
        found = []
        for name, kind, recipe in zip(self.names, self.kinds, self.recipes, strict=True):
            first, end = _extent(recipe.shape, recipe.stride, recipe.dtype.itemsize)
            found.append(
                TensorEntry(
                    name=name,
                    dtype=str(recipe.dtype).removeprefix("torch."),
                    shape=recipe.shape,
                    offset_bytes=placement.slot_offsets_bytes[recipe.record]
                    + recipe.offset * recipe.dtype.itemsize
                    + first,
                    size_bytes=end - first,
                    kind=kind,
                )
            )
        return tuple(found)

    def targets(self, image: torch.Tensor, placement: Placement) -> list[torch.Tensor]:
        """Views of the image, one per slot, into which `sources` are copied."""
        views = []
        for slot, offset_bytes in zip(self.slots, placement.slot_offsets_bytes, strict=True):
            span = image[offset_bytes : offset_bytes + slot.size_bytes]
            if slot.is_full:
                recipe = self.recipes[slot.tensors[0]]
                span = span.view(recipe.dtype).as_strided(recipe.shape, recipe.stride)
            views.append(span)
        return views

    def sources(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The tensors to be copied to `targets`; nothing is copied yet."""
        return [
            tensors[n] if slot.is_full else _span(tensors[n], slot)
            for n, slot in zip(self.first_tensors, self.slots, strict=True)
        ]

    def slot_addresses(self, prepared: Prepared) -> tuple[list[int], list[torch.Tensor]]:
        """Where in memory the bytes of each slot are, on the CPU, and what must be held while they are copied."""
        found = [prepared.addresses[n] for n in self.first_tensors]
        held = []
        for number in self.lazy_slots:
            lazy = prepared.tensors[self.slots[number].tensors[0]]
            held.append(lazy.detach().resolve_conj().resolve_neg().contiguous())
            found[number] = held[-1].data_ptr()
        for number in self.shared_slots:
            slot = self.slots[number]
            storage = prepared.tensors[slot.tensors[0]].untyped_storage()
            found[number] = storage.data_ptr() + slot.start_bytes
        return found, held

    def serves(self, found: Scan, addresses: list[int]) -> bool:
        """Whether this is the plan of another state as well."""
        if self.outline != _outline(found, addresses):
            return False
        with torch.enable_grad():  # Without it, the guard would not look at `requires_grad`.
            is_same = self.guard(*found.tensors) or self.geometry == _geometry(found.tensors)
        return is_same and self._has_views_as_before(found.tensors)

    def _has_views_as_before(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether odd strides are the same, and tensors that are views of one storage are the same views of one."""
        if any(tensors[number].stride() != self.recipes[number].stride for number in self.strided):
            return False
        for number in self.shared_slots:
            slot = self.slots[number]
            views = [tensors[n] for n in slot.tensors]
            if len({view.untyped_storage().data_ptr() for view in views}) > 1:
                return False
            for n, view in zip(slot.tensors, views, strict=True):
                start_bytes = int(view.storage_offset()) * view.itemsize - slot.start_bytes
                if start_bytes != self.recipes[n].offset * view.itemsize:
                    return False
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """A plan's offsets in its file."""

    size_bytes: int
    body_offset_bytes: int
    body_capacity_bytes: int
    slot_offsets_bytes: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """One state, ready to be copied into an image of `plan`. It holds the state's tensors until that is done."""

    plan: Plan
    body: bytes
    found: Scan
    addresses: list[int]
    """Of each tensor's first element."""
    is_on_cuda: bool
    """At least one tensor is."""

    @property
    def tensors(self) -> list[torch.Tensor]:
        return self.found.tensors


def prepare(state: object, known: Plan | None) -> Prepared:
    """Match a state with the plan of the save before, or make a new one."""
    try:
        with no_collection():
            return _prepare(state, known)  # Has freed what it made on the way when collections are due again.
    except RecursionError as error:
        raise UnsupportedState(
            name="…", kind="structure nested too deeply", hint="Flatten it before saving."
        ) from error


def _prepare(state: object, known: Plan | None) -> Prepared:
    found = scan(state)
    try:
        addresses = list(map(torch.Tensor.data_ptr, found.tensors))
    except (RuntimeError, NotImplementedError):
        addresses = []  # Something without plain memory; `make_plan` will name it.
    plan, body = _match(state, found, addresses, known) or make_plan(state, found, addresses)
    is_on_cuda = any_on_cuda(found.tensors)
    return Prepared(plan=plan, body=body, found=found, addresses=addresses, is_on_cuda=is_on_cuda)


def _match(state: object, found: Scan, addresses: list[int], known: Plan | None) -> tuple[Plan, bytes] | None:
    """The known plan and the state's body for it, where it serves this state as well."""
    if known is None or not known.serves(found, addresses):
        return None
    body = body_for(state, found.leaves, known.prefix)
    return (known, body) if len(known.prefix.program) + len(body) <= known.pickle_capacity_bytes else None


def _outline(found: Scan, addresses: list[int]) -> Facts:
    """What a plan depends on, but for the tensors' geometry. Fewer addresses than tensors tell that some have come to share
    memory."""
    return found.trace, list(map(type, found.leaves)), [len(found.tensors), len(set(addresses))]


def _geometry(tensors: Sequence[torch.Tensor]) -> Facts:
    """What a plan depends on in its tensors, but for the details of sharing and of odd strides."""
    return (
        [tensor.dtype for tensor in tensors],
        [tensor.shape for tensor in tensors],
        list(map(torch.Tensor.is_contiguous, tensors)),
        [tensor.requires_grad for tensor in tensors],
        list(map(torch.Tensor.is_neg, tensors)),
        list(map(torch.Tensor.is_conj, tensors)),
    )


def make_plan(state: object, found: Scan, addresses: list[int]) -> tuple[Plan, bytes]:
    names = [name for name, _ in named_leaves(state)]
    for name, tensor in zip(names, found.tensors, strict=True):
        _check(name, tensor)
    slots = _slots(found.tensors)
    recipes: list[TensorRecipe | None] = [None] * len(found.tensors)
    for record, slot in enumerate(slots):
        for number in slot.tensors:
            tensor = found.tensors[number]
            by_value = slot.is_full and _is_lazy(tensor)
            shape = tuple(tensor.shape)
            recipes[number] = TensorRecipe(
                record=record,
                record_bytes=slot.size_bytes,
                dtype=tensor.dtype,
                offset=(tensor.storage_offset() * tensor.itemsize - slot.start_bytes) // tensor.itemsize,
                shape=shape,
                stride=_contiguous(shape) if by_value else tensor.stride(),
                requires_grad=tensor.requires_grad,
                is_parameter=type(found.leaves[number]) is torch.nn.Parameter,
            )
    made = [recipe for recipe in recipes if recipe is not None]
    prefix = prefix_for(made)
    body = body_for(state, found.leaves, prefix)
    pickle_bytes = len(prefix.program) + len(body)
    capacity_bytes = _round_up(pickle_bytes + len(body) // 4 + _SPARE_PICKLE_BYTES)
    records_bytes = sum(slot.size_bytes + ALIGNMENT_BYTES + _RECORD_OVERHEAD_BYTES for slot in slots)
    plan = Plan(
        outline=_outline(found, addresses),
        geometry=_geometry(found.tensors),
        guard=guard(found.tensors),
        slots=tuple(slots),
        first_tensors=tuple(slot.tensors[0] for slot in slots),
        recipes=tuple(made),
        names=tuple(names),
        kinds=tuple(str(leaf_kind(leaf)) for leaf in found.leaves),
        prefix=prefix,
        pickle_capacity_bytes=capacity_bytes,
        bound_bytes=records_bytes + capacity_bytes + 8 * ALIGNMENT_BYTES,
        lazy_slots=tuple(n for n, slot in enumerate(slots) if _is_lazy(found.tensors[slot.tensors[0]])),
        shared_slots=tuple(n for n, slot in enumerate(slots) if not slot.is_full),
        strided=tuple(
            n for n, t in enumerate(found.tensors) if not t.is_contiguous() and made[n].stride == t.stride()
        ),
    )
    return plan, body


def _slots(tensors: Sequence[torch.Tensor]) -> list[Slot]:
    """One slot per storage in use, in order of first use."""
    groups: dict[int, list[int]] = {}
    for number, tensor in enumerate(tensors):
        storage = tensor.untyped_storage().data_ptr()
        # A conjugated or negated view has other values than its bytes: it is saved by value, on its own.
        key = -1 - number if _is_lazy(tensor) or not storage else storage
        groups.setdefault(key, []).append(number)
    slots = []
    for numbers in groups.values():
        only = tensors[numbers[0]]
        if len(numbers) == 1 and (_is_lazy(only) or _is_dense(only)):
            start = int(only.storage_offset()) * only.itemsize
            slots.append(
                Slot(
                    size_bytes=only.numel() * only.itemsize,
                    start_bytes=start,
                    tensors=(numbers[0],),
                    is_full=True,
                )
            )
            continue
        spans = []
        for number in numbers:
            tensor = tensors[number]
            first, end = _extent(tuple(tensor.shape), tensor.stride(), tensor.itemsize)
            base = int(tensor.storage_offset()) * tensor.itemsize
            spans.append((base + first, base + end))
        start = min(span[0] for span in spans) // 16 * 16  # Views of any number type stay aligned.
        end = max(span[1] for span in spans)
        slots.append(Slot(size_bytes=end - start, start_bytes=start, tensors=tuple(numbers), is_full=False))
    return slots


def _span(tensor: torch.Tensor, slot: Slot) -> torch.Tensor:
    """The slot's bytes of the tensor's storage, as a flat tensor over the same memory."""
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return flat.set_(tensor.untyped_storage(), slot.start_bytes, (slot.size_bytes,), (1,))


def _check(name: str, tensor: torch.Tensor) -> None:
    if (
        tensor.layout != torch.strided
        or tensor.is_quantized
        or tensor.is_nested
        or tensor.device.type == "meta"
    ):
        kind = f"{tensor.layout} {tensor.device.type} tensor of {tensor.dtype}".replace("torch.", "")
        raise UnsupportedState(name=name, kind=kind, hint="Save it as ordinary dense tensors.")


def _is_lazy(tensor: torch.Tensor) -> bool:
    return tensor.is_conj() or tensor.is_neg()


def _is_dense(tensor: torch.Tensor) -> bool:
    """Every byte between the first and the last element belongs to exactly one element."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def _extent(shape: Sequence[int], stride: Sequence[int], item_bytes: int) -> tuple[int, int]:
    """First and last byte (exclusive) an array of this geometry touches, relative to its start."""
    if 0 in shape:
        return (0, 0)
    last = sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    return (0, (last + 1) * item_bytes)


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    strides = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def _round_up(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
