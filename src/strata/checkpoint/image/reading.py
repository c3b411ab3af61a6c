"""From stored bytes to a state: fetched, verified, then opened, in this order.

What is verified is what is used: a payload is read into memory of this process, hashed there, and opened from there, so
nothing that changes in a store afterwards can reach the state (`in_place` does the same chunk by chunk). Opening is
`torch.load(weights_only=True)`: no code from the file runs, unless the caller says that the source is trusted.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import os
import re
import zipfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

from strata.checkpoint.catalog.listing import check_part, where
from strata.checkpoint.catalog.manifest import Manifest, Part
from strata.checkpoint.copying.digest import damaged_chunks
from strata.checkpoint.errors import Damaged, LoadFailed
from strata.stores.protocol import Store

log = logging.getLogger("strata.checkpoint")

SECURITY_WARNING = (
    "SECURITY: Loading checkpoint with weights_only=False enables arbitrary code execution. "
    "Only do this with checkpoints from a source you trust: %s"
)


class Held:
    """A payload in memory of this process, readable as a view and as a file."""

    def __init__(self, size_bytes: int) -> None:
        self._fd = os.memfd_create("strata-payload", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self._fd, size_bytes)
            self._map = mmap.mmap(self._fd, size_bytes) if size_bytes else None
        except BaseException:
            os.close(self._fd)
            raise

    @property
    def view(self) -> memoryview:
        return memoryview(self._map) if self._map is not None else memoryview(bytearray())

    @property
    def path(self) -> str:
        return f"/proc/self/fd/{self._fd}"

    def close(self) -> None:
        """Tensors opened from it keep their memory."""
        if self._map is not None:
            self._map.close()
        os.close(self._fd)


@contextlib.contextmanager
def fetched(store: Store, part: Part, manifest: Manifest, *, pool: Executor | None = None) -> Iterator[Held]:
    """One payload of a checkpoint, verified. Raises `Damaged` or the store's error."""
    check_part(store, part, called="payload")
    held = Held(part.size_bytes)
    try:
        with held.view as view:
            _fetch(store, part, manifest, view, pool)
        yield held
    finally:
        held.close()


def fetch_bytes(store: Store, part: Part, manifest: Manifest, *, pool: Executor | None = None) -> bytes:
    """`fetched`, as bytes, without a copy."""
    check_part(store, part, called="payload")
    data = _new_bytes(None, part.size_bytes)
    # No other code has these bytes yet, so they may still be written to, as any C code does that makes some.
    place = (ctypes.c_char * part.size_bytes).from_address(_address_of(data))
    with memoryview(place).cast("B") as view:
        _fetch(store, part, manifest, view, pool)
    return data


_new_bytes: Callable[[None, int], bytes] = ctypes.PYFUNCTYPE(
    ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t
)(("PyBytes_FromStringAndSize", ctypes.pythonapi))
_address_of: Callable[[bytes], int] = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object)(
    ("PyBytes_AsString", ctypes.pythonapi)
)


def _fetch(store: Store, part: Part, manifest: Manifest, view: memoryview, pool: Executor | None) -> None:
    store.read_into(part.key, view)
    verify(view, part, manifest, path=where(store, part.key), pool=pool)


def verify(
    view: memoryview, part: Part, manifest: Manifest, *, path: str, pool: Executor | None = None
) -> None:
    """Raise `Damaged`, naming the tensors, unless the bytes are those that were saved."""
    bad = damaged_chunks(view, part.digest, pool=pool)
    if bad:
        raise damage(part, manifest, bad, path=path)


def damage(part: Part, manifest: Manifest, chunks: Sequence[int], *, path: str) -> Damaged:
    """What to say about chunks of a payload whose bytes are not those that were saved."""
    span = f"chunk {chunks[0]}" if len(chunks) == 1 else f"{len(chunks)} chunks from {chunks[0]}"
    return Damaged(
        path=path,
        reason=f"bytes changed since they were saved, {span} of {len(part.digest.chunks)}",
        tensors=manifest.tensors_in(chunks) if len(manifest.parts) == 1 else (),
    )


def open_image(
    path: str | Path,
    manifest: Manifest | None = None,
    *,
    trusted_source: bool = False,
    warn: bool = True,
    name: str | None = None,
) -> Any:
    """The state in a `.pt` file; arrays come back as the kind they were saved as, where a manifest tells. `name` is what
    the file is called in messages; without `warn`, a trusted source is not warned about."""
    from strata.checkpoint.image.state import TENSOR, rebuild, restore_kind

    state = open_tensors(path, manifest, trusted_source=trusted_source, warn=warn, name=name)
    if manifest is None or all(entry.kind == TENSOR for entry in manifest.tensors):
        return state
    return rebuild(state, lambda number, tensor: restore_kind(tensor, manifest.tensors[number].kind))


def open_tensors(
    path: str | Path,
    manifest: Manifest | None = None,
    *,
    trusted_source: bool = False,
    warn: bool = True,
    name: str | None = None,
) -> Any:
    """`open_image`, with arrays of every kind as tensors."""
    import torch

    from strata.checkpoint.image.unpickling import open_own

    name = name or str(path)
    if trusted_source and warn:
        log.warning(SECURITY_WARNING, name)
    if manifest is not None:
        with contextlib.suppress(Exception):  # Torch knows more, and says what is wrong.
            return open_own(path, manifest.tensors)
    try:
        is_mappable = zipfile.is_zipfile(path)  # Files of old versions of torch are not.
        return torch.load(path, map_location="cpu", weights_only=not trusted_source, mmap=is_mappable)
    except Exception as error:  # A file made to do harm can make the unpickler fail in any way.
        # Of torch's advice the one sentence about this file; names in it have full stops too.
        refused = re.search(r"(Unsupported|Trying to|Can only).*", str(error))
        why = refused[0].partition(". ")[0] if refused else str(error).partition("\n")[0]
        raise LoadFailed(
            f"'{name}' could not be opened safely: {why.rstrip('.')}.",
            hint="If it is your own and holds more than tensors, load it with trusted_source=True.",
        ) from error
