"""What each rank holds of a sharded state, and which of it who writes.

A state is flattened by the rules of PyTorch's distributed checkpoints: text keys of mappings and places in lists, joined by
dots; what is no tensor is an object. Each rank lists what it holds, as chunks of the full tensors, and all ranks know all lists
(`ShardPlan`). From those everything else follows on every rank alike: equal chunks on several ranks are replicas, of which
one rank writes one, so that each writes about as much; and the names of parts tell which ranks hold the same.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
import xxhash

from strata.checkpoint.catalog.manifest import Json, TensorEntry
from strata.checkpoint.errors import UnsupportedState
from strata.checkpoint.image.nested import leaves, leaves_by
from strata.checkpoint.sharded.parts import ALIGNMENT_BYTES, Span
from strata.torch_compat.dtensors import is_distributed_tensor

Path: TypeAlias = tuple[str | int, ...]
SCHEMA = 1

DTYPES: Mapping[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64, torch.float32, torch.float16, torch.bfloat16,
        torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz,
        torch.complex128, torch.complex64, torch.complex32,
        torch.int64, torch.int32, torch.int16, torch.int8,
        torch.uint64, torch.uint32, torch.uint16, torch.uint8, torch.bool,
    )
}  # fmt: skip


class Chunk(NamedTuple):
    """What one rank holds of one tensor, or an object, which has neither type nor size."""

    path: Path
    dtype: str = ""
    size: tuple[int, ...] = ()
    """Of the full tensor."""
    offsets: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        return ".".join(map(str, self.path))

    @property
    def nbytes(self) -> int:
        return math.prod(self.sizes) * DTYPES[self.dtype].itemsize if self.dtype else 0


def flattened(state: Mapping[str, Any]) -> Iterator[tuple[Path, Any]]:
    """The tensors and objects of a nested state. Mappings with keys that are no text, tuples, lists without tensors, and whatever
    is empty are objects: what was saved comes back as it was. `formats.lazy.flatten` keeps less, for formats that are names and
    tensors."""

    def inner(path: Path, value: Any) -> Iterable[tuple[str | int, Any]] | None:
        if isinstance(value, Mapping) and (value or not path) and all(isinstance(key, str) for key in value):
            return value.items()
        return enumerate(value) if isinstance(value, list) and not _is_terminal(value) else None

    return leaves_by(state, inner)


def outer_paths(path: Path) -> Iterator[Path]:
    """Of the containers that something is in."""
    return (path[:length] for length in range(1, len(path)))


def _is_terminal(value: list[Any]) -> bool:
    return not any(
        isinstance(entry, Mapping | torch.Tensor) or (isinstance(entry, list) and not _is_terminal(entry))
        for entry in value
    )


def chunks_of(state: Mapping[str, Any]) -> tuple[Chunk, ...]:
    """What this rank holds of a state. Raises `UnsupportedState` for what cannot be written down as chunks."""
    from torch.distributed.checkpoint.default_planner import create_default_local_save_plan

    found: list[Chunk] = []
    for path, value in flattened(state):
        name = ".".join(map(str, path))
        if not isinstance(value, torch.Tensor):
            if any(is_distributed_tensor(leaf) for _, leaf in leaves(value, leaf=torch.Tensor)):
                raise UnsupportedState(
                    name=name,
                    kind="distributed tensor in a tuple or under a key that is not a string",
                    hint="Use lists, and strings as keys.",
                )
            found.append(Chunk(path))
            continue
        dtype = str(value.dtype).removeprefix("torch.")
        if dtype not in DTYPES or value.layout != torch.strided or value.is_quantized:
            kind = f"{value.layout} tensor of {dtype}".replace("torch.", "")
            raise UnsupportedState(name=name, kind=kind, hint="Save it as ordinary dense tensors.")
        if not is_distributed_tensor(value):
            size = tuple(value.shape)
            found.append(Chunk(path, dtype, size, (0,) * len(size), size))
            continue
        if any(placement.is_partial() for placement in getattr(value, "placements", ())):
            raise UnsupportedState(
                name=name,
                kind="tensor of partial sums",
                hint="Reduce it (redistribute to Replicate or Shard) before it is saved.",
            )
        for item in create_default_local_save_plan({name: value}, True).items:
            assert item.tensor_data is not None
            found.append(
                Chunk(
                    path,
                    dtype,
                    tuple(item.tensor_data.size),
                    tuple(item.tensor_data.chunk.offsets),
                    tuple(item.tensor_data.chunk.sizes),
                )
            )
    return tuple(found)


@dataclass(frozen=True)
class ShardPlan:
    """What every rank holds, by rank."""

    tables: tuple[tuple[Chunk, ...], ...]
    rank: int

    @functools.cached_property
    def part_names(self) -> tuple[str, ...]:
        """Of each rank's tensors: ranks with the same name hold the same bytes. Objects do not count."""
        return tuple(map(_part_name, self.tables))

    @functools.cached_property
    def _writers(self) -> dict[tuple[str, tuple[int, ...]], int]:
        """Who writes each chunk and object: of those that hold it the one with the least to write so far."""
        holders: dict[tuple[str, tuple[int, ...]], list[int]] = {}
        chunks: dict[tuple[str, tuple[int, ...]], Chunk] = {}
        for rank, table in enumerate(self.tables):
            for chunk in table:
                holders.setdefault((chunk.name, chunk.offsets), []).append(rank)
                chunks[chunk.name, chunk.offsets] = chunk
        load = [0] * len(self.tables)
        writers: dict[tuple[str, tuple[int, ...]], int] = {}
        for index, ranks in sorted(holders.items(), key=lambda held: (len(held[1]), -chunks[held[0]].nbytes)):
            writer = min(ranks, key=load.__getitem__) if chunks[index].dtype else ranks[0]
            writers[index] = writer
            load[writer] += chunks[index].nbytes
        return writers

    def written_by(self, rank: int) -> list[Chunk]:
        """What a rank writes, in the order in which it does: tensors, then objects."""
        mine = [c for c in self.tables[rank] if self._writers[c.name, c.offsets] == rank]
        return [c for c in mine if c.dtype] + [c for c in mine if not c.dtype and c.path not in self._entered]

    @functools.cached_property
    def _entered(self) -> frozenset[Path]:
        """What is a container on some rank is nothing where it is empty on another."""
        return frozenset(
            outer for table in self.tables for chunk in table for outer in outer_paths(chunk.path)
        )

    def layout(self, parts: Mapping[int, int], objects: Mapping[str, Span]) -> Json:
        """The layout of a manifest (`strata.checkpoint.sharded.layout`). `parts` numbers the parts of the ranks that have written
        one."""
        tensors: dict[str, tuple[Chunk, list[Json]]] = {}
        paths: dict[str, Path] = {}
        entries: list[Json] = []
        for table in self.tables:  # In the order of the state.
            paths.update((chunk.name, chunk.path) for chunk in table if chunk.path not in self._entered)
        for rank in parts:
            offset = 0
            for chunk in self.written_by(rank):
                if not chunk.dtype:
                    span = objects[chunk.name]
                    entries.append(["object", chunk.name, [span.part, span.offset_bytes, span.size_bytes]])
                    continue
                offset = aligned(offset)
                place: Json = [parts[rank], offset, chunk.nbytes]
                tensors.setdefault(chunk.name, (chunk, []))[1].append(
                    [list(chunk.offsets), list(chunk.sizes), place]
                )
                offset += chunk.nbytes
        for name, (chunk, placed) in tensors.items():
            entries.append(["tensor", name, chunk.dtype, list(chunk.size), False, placed])
        return {
            "schema": SCHEMA,
            "entries": entries,
            "paths": [[name, list(path)] for name, path in paths.items()],
        }

    @functools.cached_property
    def mark(self) -> Json:
        """What an image says about itself: what it holds, and what else there is. With the tensors of its manifest it tells where
        everything is."""
        return {
            "schema": SCHEMA,
            "rank": self.rank,
            "part": self.part_names[self.rank],
            "parts": sorted(set(self.part_names)),
            "chunks": [
                [list(c.path), c.dtype, list(c.size), list(c.offsets), list(c.sizes)]
                for c in self.tables[self.rank]
            ],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Marked:
    """What an image in memory holds of a sharded checkpoint."""

    rank: int
    part: str
    parts: tuple[str, ...]
    chunks: tuple[Chunk, ...]

    @classmethod
    def of(cls, layout: Any) -> Marked | None:
        """None for the image of a complete state. The mark is this user's own, and its digest was checked."""
        if not isinstance(layout, Mapping) or "part" not in layout:
            return None
        return cls(
            rank=int(layout["rank"]),
            part=str(layout["part"]),
            parts=tuple(layout["parts"]),
            chunks=tuple(
                Chunk(tuple(path), dtype, tuple(size), tuple(offsets), tuple(sizes))
                for path, dtype, size, offsets, sizes in layout["chunks"]
            ),
        )

    def spans(self, tensors: Sequence[TensorEntry], *, part: int) -> Iterator[tuple[Chunk, Span]]:
        """Where in the image each tensor is."""
        by_name = {entry.name: entry for entry in tensors}
        for chunk in self.chunks:
            if chunk.dtype:
                entry = by_name[chunk.name]
                yield chunk, Span(part=part, offset_bytes=entry.offset_bytes, size_bytes=entry.size_bytes)


def aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _part_name(table: Sequence[Chunk]) -> str:
    held = sorted((c.name, c.offsets, c.sizes, c.dtype) for c in table if c.dtype)
    return str(xxhash.xxh3_64_hexdigest(repr(held).encode()))
