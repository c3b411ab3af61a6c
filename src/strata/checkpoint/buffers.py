"""Memory that reading goes through, used again and again: the first touch of fresh pages is slow."""

from __future__ import annotations

import mmap

from strata.checkpoint.digest import CHUNK_BYTES


class WindowBuffer:
    def __init__(self, size_bytes: int = 4 * CHUNK_BYTES) -> None:
        self.view = memoryview(mmap.mmap(-1, size_bytes))

    def room(self, size_bytes: int) -> memoryview:
        """That many bytes of it; what was there before is gone."""
        if size_bytes > len(self.view):
            self.view = memoryview(mmap.mmap(-1, size_bytes))
        return self.view[:size_bytes]
