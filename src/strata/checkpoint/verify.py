"""Re-hashing everything that is stored, and saying what a damaged byte belongs to.

Each part is read front to back through one buffer and compared chunk by chunk with its manifest. A chunk that differs
is reported as the range of bytes it covers and the tensors with bytes in that range, each with its own range: the damage is
in at least one of them, or in the file's own structure between them. Nothing is changed, opened or unpickled.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from strata.checkpoint.catalog.listing import Catalog, Entry, where
from strata.checkpoint.catalog.manifest import SHARDED, Manifest, Part
from strata.checkpoint.copying.digest import CHUNK_BYTES, WindowBuffer
from strata.checkpoint.errors import Damaged
from strata.checkpoint.image.plain import plain_files, verify_plain
from strata.stores.protocol import Blob, Store

FILE = "file"


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRange:
    """A tensor and where its bytes are in the part."""

    name: str
    start_bytes: int
    end_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """A range of bytes of one part that is not what was saved."""

    path: str
    reason: str
    start_bytes: int
    end_bytes: int
    tensors: tuple[TensorRange, ...] = ()

    def __str__(self) -> str:
        named = ", ".join(f"{t.name} (bytes {t.start_bytes} to {t.end_bytes})" for t in self.tensors)
        return f"{self.path}: {self.reason}" + (f"; in {named}" if named else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """One checkpoint, or one file without a manifest, and what is wrong with it."""

    name: str
    """The checkpoint's id; the key of a file."""
    step: int | None
    format: str
    path: str
    size_bytes: int
    damages: tuple[Damage, ...] = ()
    note: str = ""

    @property
    def is_intact(self) -> bool:
        return not self.damages


def verify_store(store: Store, entries: Iterable[Entry] | None = None) -> Iterator[Verified]:
    """Verify these checkpoints, or everything in the store: checkpoints newest first, then files without a manifest,
    then manifests that cannot be read."""
    if entries is not None:
        for entry in entries:
            yield verify_entry(store, entry)
        return
    listing = Catalog(store).list()
    for entry in listing.entries:
        yield verify_entry(store, entry)
    for blob in plain_files(store):
        yield verify_file(store, blob)
    for problem in listing.problems:
        damage = Damage(path=store.url, reason=problem, start_bytes=0, end_bytes=0)
        yield Verified(name="?", step=None, format="?", path=store.url, size_bytes=0, damages=(damage,))


def verify_entry(store: Store, entry: Entry) -> Verified:
    manifest = entry.manifest
    damages: list[Damage] = []
    buffer = WindowBuffer()
    at = where(store, entry.key)
    try:
        ranges = _ranges(manifest, path=at)
        for number, part in enumerate(manifest.parts):
            damages += _verify_part(store, part, ranges.get(number, []), buffer)
    except Damaged as error:
        damages.append(Damage(path=at, reason=error.reason, start_bytes=0, end_bytes=0))
    return Verified(
        name=manifest.checkpoint_id,
        step=manifest.step,
        format=manifest.format,
        path=at,
        size_bytes=manifest.size_bytes,
        damages=tuple(damages),
    )


def verify_file(store: Store, blob: Blob) -> Verified:
    """A file without a manifest: as far as the checksums in it tell."""
    path, damages, note = where(store, blob.key), [], ""
    try:
        if not verify_plain(store, blob.key):
            note = "it has no manifest and no checksums: nothing to compare with"
    except Damaged as error:
        damages = [Damage(path=path, reason=error.reason, start_bytes=0, end_bytes=blob.size_bytes)]
    return Verified(
        name=blob.key,
        step=None,
        format=FILE,
        path=path,
        size_bytes=blob.size_bytes,
        damages=tuple(damages),
        note=note,
    )


def _verify_part(
    store: Store, part: Part, ranges: list[TensorRange], buffer: WindowBuffer
) -> Iterator[Damage]:
    path = where(store, part.key)
    blob = store.stat(part.key)
    if blob is None:
        yield _damage(path, "it is missing", 0, part.size_bytes, ranges)
        return
    if blob.size_bytes != part.size_bytes:
        reason = f"it has {blob.size_bytes} bytes, its manifest says {part.size_bytes}"
        yield _damage(path, reason, min(blob.size_bytes, part.size_bytes), part.size_bytes, ranges)
    chunk_bytes = part.digest.chunk_bytes
    window_bytes = max(1, CHUNK_BYTES // chunk_bytes) * chunk_bytes
    # What is left of a chunk that was cut short is reported above.
    readable_bytes = part.size_bytes
    if blob.size_bytes < part.size_bytes:
        readable_bytes = blob.size_bytes - blob.size_bytes % chunk_bytes
    for window_start in range(0, readable_bytes, window_bytes):
        window = buffer.window(min(window_bytes, readable_bytes - window_start))
        store.read_into(part.key, window, offset=window_start)
        for start_bytes in range(window_start, window_start + len(window), chunk_bytes):
            within = start_bytes - window_start
            chunk = window[within : within + chunk_bytes]
            if not part.digest.fits(start_bytes // chunk_bytes, chunk):
                end_bytes = start_bytes + len(chunk)
                reason = f"bytes {start_bytes} to {end_bytes} changed since they were saved"
                yield _damage(path, reason, start_bytes, end_bytes, ranges)


def _damage(path: str, reason: str, start_bytes: int, end_bytes: int, ranges: list[TensorRange]) -> Damage:
    hit = [r for r in ranges if r.start_bytes < end_bytes and start_bytes < r.end_bytes]
    return Damage(path=path, reason=reason, start_bytes=start_bytes, end_bytes=end_bytes, tensors=tuple(hit))


def _ranges(manifest: Manifest, *, path: str) -> dict[int, list[TensorRange]]:
    """Part number → the tensors in it."""
    if manifest.format != SHARDED:
        return {
            0: [
                TensorRange(
                    name=entry.name,
                    start_bytes=entry.offset_bytes,
                    end_bytes=entry.offset_bytes + entry.size_bytes,
                )
                for entry in manifest.tensors
            ]
        }
    if importlib.util.find_spec("torch") is None:
        return {}  # Damage is still found, but cannot be named.
    from strata.checkpoint.sharded.layout import named_spans

    found: dict[int, list[TensorRange]] = {}
    for name, span in named_spans(manifest, path=path):
        one = TensorRange(name=name, start_bytes=span.offset_bytes, end_bytes=span.end_bytes)
        found.setdefault(span.part, []).append(one)
    return found
