"""Copies between addresses, with and without the lines of C: every byte arrives, no other is touched, and what is hashed
is what was written."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch

from strata.checkpoint.copying import sweeping
from strata.checkpoint.copying.digest import CHUNK_BYTES, digest_of
from strata.checkpoint.copying.filling import WINDOW_BYTES, Filling, Windows
from strata.checkpoint.copying.sweeping import PIECE_BYTES, copy_bytes, load_library

EDGES = (0, 1, 15, 63, 64, 65, 4095, 4096, 4097, 4 * 4096 - 1, 4 * 4096, 4 * 4096 + 64, 100_001)


@pytest.fixture(params=["in C", "memmove"], autouse=True)
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "memmove":
        monkeypatch.setattr(sweeping, "library", None)
    elif sweeping.library is None:
        pytest.skip("the package was installed without a compiler")


def test_where_there_is_a_compiler_the_lines_of_c_are_there(program: Callable[[str], str]) -> None:
    program("cc")
    assert load_library() is not None


def test_pieces_of_any_size_and_alignment_arrive_and_nothing_else_changes() -> None:
    chance = random.Random(5)
    sizes = [*EDGES, PIECE_BYTES - 1, PIECE_BYTES + 1, 3 * PIECE_BYTES + 77] * 2
    room = sum(sizes) + 200 * len(sizes)
    source = np.random.default_rng(5).integers(0, 256, room, dtype=np.uint8)
    target = np.zeros(room, dtype=np.uint8)
    wanted = target.copy()
    to, sources = [], []
    to_offset = from_offset = 0
    for size in sizes:
        to_offset, from_offset = to_offset + chance.randrange(100), from_offset + chance.randrange(100)
        to.append(target.ctypes.data + to_offset)
        sources.append(source.ctypes.data + from_offset)
        wanted[to_offset : to_offset + size] = source[from_offset : from_offset + size]
        to_offset, from_offset = to_offset + size, from_offset + size
    copy_bytes(to, sources, sizes)
    assert np.array_equal(target, wanted)


def test_nothing_to_copy_is_nothing_done() -> None:
    copy_bytes([], [], [])
    copy_bytes([1], [1], [0])


@pytest.mark.parametrize("tail", [0, 1, 4096, WINDOW_BYTES])
def test_an_image_gets_its_slots_keeps_the_rest_and_is_hashed_on_the_way(tail: int) -> None:
    chance = random.Random(tail)
    sizes = [*EDGES, WINDOW_BYTES, 2 * WINDOW_BYTES + 3, CHUNK_BYTES + 5]
    slots = [torch.randint(0, 256, (size,), dtype=torch.uint8) for size in sizes]
    offsets, end = [], 0
    for size in sizes:
        offsets.append(end + chance.choice((0, 1, 64, 5000)))
        end = offsets[-1] + size
    image = torch.randint(0, 256, (end + tail,), dtype=torch.uint8)
    wanted = image.clone()
    for offset, slot in zip(offsets, slots, strict=True):
        wanted[offset : offset + len(slot)] = slot
    filling = Filling(Windows(image, offsets, sizes), [slot.data_ptr() for slot in slots])
    for chunk in reversed(range(filling.chunks)):
        filling.copy(chunk)
    assert torch.equal(image, wanted)
    assert filling.end_of(filling.chunks) == len(image)
    assert filling.digest() == digest_of(memoryview(wanted.numpy().data))


def test_what_is_hashed_is_what_was_written_while_the_state_changes() -> None:
    state = torch.zeros(4 * WINDOW_BYTES, dtype=torch.uint8)
    image = torch.zeros_like(state)
    windows, is_over = Windows(image, [0], [len(state)]), threading.Event()

    def change() -> None:
        while not is_over.is_set():
            state.add_(1)

    changing = threading.Thread(target=change)
    changing.start()
    try:
        for _ in range(50):
            filling = Filling(windows, [state.data_ptr()])
            for chunk in range(filling.chunks):
                filling.copy(chunk)
            assert filling.digest() == digest_of(memoryview(image.numpy().data))
    finally:
        is_over.set()
        changing.join()


def test_processes_forked_from_one_hash_what_each_of_them_has_written() -> None:
    """Ranks are forked by a server that has imported this: two that save at the same time must not share what they hash in."""
    state = torch.randint(0, 256, (WINDOW_BYTES,), dtype=torch.uint8)
    theirs = torch.full_like(state, 7)
    image, their_image = torch.zeros_like(state), torch.zeros_like(state)
    windows = Windows(image, [0], [len(state)])
    others = Filling(Windows(their_image, [0], [len(theirs)]), [theirs.data_ptr()])
    expected = digest_of(memoryview(state.numpy().data))
    begun, beginning = os.pipe()
    child = os.fork()  # Which must not call torch: its threads were not forked.
    if not child:
        with contextlib.suppress(BaseException):
            while True:
                others.copy(0)
                os.write(beginning, b".")
        os._exit(1)
    try:
        os.read(begun, 1)
        for _ in range(300):
            filling = Filling(windows, [state.data_ptr()])
            filling.copy(0)
            assert filling.digest() == expected
            os.read(begun, 1 << 16)  # The other has copied meanwhile.
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(begun)
        os.close(beginning)
