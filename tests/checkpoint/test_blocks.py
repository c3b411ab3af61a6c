"""Blocks of stored tensors: any slice reaches any target, read in no more chunks than it has bytes in."""

from __future__ import annotations

import math
import random
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

from strata.checkpoint.catalog.listing import Catalog
from strata.checkpoint.catalog.manifest import Part
from strata.checkpoint.copying.digest import digest_of
from strata.checkpoint.dcp import StrataStorageReader, StrataStorageWriter
from strata.checkpoint.errors import Damaged
from strata.checkpoint.sharded.blocks import Block, copy_blocks
from strata.checkpoint.sharded.parts import PartWriter, chunk_bytes_for
from strata.stores import open_store
from strata.stores.faulty import FaultyStore

CHUNK_BYTES = 64


def stored(folder: Path, data: bytes, *, chunk_bytes: int = CHUNK_BYTES) -> Part:
    open_store(folder).put("parts/x.part", data)
    return Part(
        key="parts/x.part",
        size_bytes=len(data),
        digest=digest_of(memoryview(data), chunk_bytes=chunk_bytes),
    )


class Reads(FaultyStore):
    """A store that tells what was read of it."""

    def __init__(self, folder: Path) -> None:
        super().__init__(open_store(folder))
        self.ranges: list[tuple[int, int]] = []

    def read_into(self, key: str, buffer: memoryview, *, offset: int = 0) -> None:
        self.ranges.append((offset, offset + len(buffer)))
        super().read_into(key, buffer, offset=offset)


@pytest.mark.parametrize("seed", range(60))
def test_any_slice_of_an_array_reaches_any_target(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    shape = [chance.randint(1, 9) for _ in range(chance.randint(1, 4))]
    offsets = [chance.randrange(length) for length in shape]
    lengths = [chance.randint(1, length - start) for length, start in zip(shape, offsets, strict=True)]
    data = np.frombuffer(random.Random(seed).randbytes(math.prod(shape) * 4), np.int32).reshape(shape)
    lead_bytes = chance.randrange(0, 200, 4)
    part = stored(tmp_path, bytes(lead_bytes) + data.tobytes() + b"tail")
    wide = [length + chance.randint(0, 2) for length in lengths]
    target = np.zeros(wide, np.int32)[tuple(slice(length) for length in lengths)]
    block = Block(
        name="x",
        start_bytes=lead_bytes + sum(o * s for o, s in zip(offsets, data.strides, strict=True)),
        run_bytes=lengths[-1] * 4,
        address=target.ctypes.data,
        counts=tuple(lengths[:-1]),
        strides=tuple(data.strides[:-1]),
        to_strides=tuple(target.strides[:-1]),
    )
    store = Reads(tmp_path)
    copy_blocks(store, [(part, [block])])
    wanted = tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))
    assert np.array_equal(target, data[wanted])
    # No chunk is read twice, and none that is further from the block's bytes than a chunk.
    assert all(start % CHUNK_BYTES == 0 for start, _ in store.ranges)
    read = [
        chunk for start, end in store.ranges for chunk in range(start // CHUNK_BYTES, -(-end // CHUNK_BYTES))
    ]
    assert len(read) == len(set(read))
    places = np.arange(data.size, dtype=np.int64).reshape(shape)[wanted].ravel() * 4 + lead_bytes
    near = {int(place) // CHUNK_BYTES + step for place in places for step in (-1, 0, 1)}
    assert set(read) <= near


def test_rows_and_columns_far_apart_are_read_without_what_lies_between(tmp_path: Path) -> None:
    data = np.arange(100 * 4096, dtype=np.uint8).reshape(100, 4096)
    part = stored(tmp_path, data.tobytes())
    store = Reads(tmp_path)
    target = np.zeros((100, 16), np.uint8)
    block = Block(
        name="x",
        start_bytes=128,
        run_bytes=16,
        address=target.ctypes.data,
        counts=(100,),
        strides=(4096,),
        to_strides=(16,),
    )
    copy_blocks(store, [(part, [block])])
    assert np.array_equal(target, data[:, 128:144])
    assert sum(end - start for start, end in store.ranges) == 100 * CHUNK_BYTES


def test_a_damaged_chunk_names_the_tensors_in_it_and_none_of_its_bytes_are_used(tmp_path: Path) -> None:
    data = bytes(range(256))
    part = stored(tmp_path, data)
    (tmp_path / part.key).write_bytes(data[:100] + b"!" + data[101:])
    targets = [np.zeros(64, np.uint8) for _ in range(4)]
    blocks = [
        Block(name=f"t{n}", start_bytes=n * 60, run_bytes=60, address=target.ctypes.data)
        for n, target in enumerate(targets)
    ]
    with pytest.raises(Damaged, match=r"chunk 1 of 4") as caught:
        copy_blocks(open_store(tmp_path), [(part, blocks)])
    assert caught.value.tensors == ("t1", "t2")
    assert not targets[1].any()


def test_resharding_reads_only_the_rows_that_are_needed_through_little_memory(tmp_path: Path) -> None:
    """The middle third of 64 MB."""
    rows, columns = 1 << 12, 1 << 12
    state = {"weight": torch.arange(rows * columns, dtype=torch.int32).reshape(rows, columns)}
    with pytest.warns(UserWarning, match="single process"):
        dcp.save(state, storage_writer=StrataStorageWriter(tmp_path, step=1), no_dist=True)
    store = Reads(tmp_path)
    reader = StrataStorageReader(store)
    first, count = rows // 3, rows // 3
    target = torch.zeros(count, columns, dtype=torch.int32)
    index = MetadataIndex("weight", torch.Size([0, 0]), 0)
    item = ReadItem(
        type=LoadItemType.TENSOR,
        dest_index=MetadataIndex("weight"),
        dest_offsets=torch.Size([0, 0]),
        storage_index=index,
        storage_offsets=torch.Size([first, 0]),
        lengths=torch.Size([count, columns]),
    )

    class Given(dcp.DefaultLoadPlanner):
        def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
            return target

    store.ranges.clear()
    tracemalloc.start()
    try:
        reader.read_data(LoadPlan([item]), Given()).wait()
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert torch.equal(target, state["weight"][first : first + count])
    read_bytes = sum(end - start for start, end in store.ranges)
    chunk_bytes = Catalog(store).list().entries[0].manifest.parts[0].digest.chunk_bytes
    assert count * columns * 4 <= read_bytes <= count * columns * 4 + 2 * chunk_bytes
    assert max(end - start for start, end in store.ranges) <= 1 << 20  # For each thread, mapped.
    assert peak_bytes < 4 << 20


@pytest.mark.parametrize(
    ("size_bytes", "expected"),
    [
        (None, 16 << 20),
        (0, 256 << 10),
        (1, 256 << 10),
        (256 << 20, 256 << 10),
        ((256 << 20) + 1, 512 << 10),
        (16 << 30, 16 << 20),
        (1 << 40, 16 << 20),
    ],
)
def test_chunks_are_small_in_small_parts_and_never_too_many(size_bytes: int | None, expected: int) -> None:
    assert chunk_bytes_for(size_bytes) == expected


def test_large_and_small_pieces_of_a_part_have_the_digest_of_all_its_bytes(tmp_path: Path) -> None:
    pieces = [random.Random(n).randbytes(size) for n, size in enumerate((5, 3 << 20, 0, 70, 1 << 20, 1))]
    writer: Any = PartWriter(open_store(tmp_path), 1, size_hint_bytes=5 << 20)
    places = [writer.add(memoryview(piece)) for piece in pieces]
    part = writer.finish()
    raw = (tmp_path / part.key).read_bytes()
    assert [raw[offset : offset + size] for offset, size in places] == pieces
    assert all(offset % 64 == 0 for offset, _ in places)
    assert part.digest == digest_of(memoryview(raw), chunk_bytes=256 << 10)
