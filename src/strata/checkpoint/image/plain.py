"""Checkpoint files that have no manifest: made by plain `torch.save`, by older programs, or copied from elsewhere.

Nothing says what such a file must hash to. What torch.save writes carries a checksum per record, which torch itself
never reads; here it is compared before anything is opened. Opening is `torch.load(weights_only=True)`, so no code in
the file runs unless its source is trusted. Old files that are bare pickles or tar archives get the same care.
"""

from __future__ import annotations

import contextlib
import logging
import zipfile
from collections.abc import Iterator
from typing import IO, Any

from strata.checkpoint.catalog import signing
from strata.checkpoint.catalog.listing import where
from strata.checkpoint.catalog.naming import claim_key, manifest_key
from strata.checkpoint.errors import Damaged, LoadFailed, Untrusted
from strata.checkpoint.image.reading import Held, open_image
from strata.stores.protocol import Blob, NotFound, Store

log = logging.getLogger("strata.checkpoint")

SUFFIX = ".pt"
_PIECE_BYTES = 1 << 20


def plain_files(store: Store) -> list[Blob]:
    """The `.pt` files of a store that belong to no checkpoint of ours, complete or unfinished."""
    blobs = {blob.key: blob for blob in store.list()}
    return [
        blob
        for key, blob in blobs.items()
        if key.endswith(SUFFIX)
        and manifest_key(key.removesuffix(SUFFIX)) not in blobs
        and claim_key(key.removesuffix(SUFFIX)) not in blobs
    ]


def load_plain(
    store: Store, key: str, *, trusted_source: bool = False, warn: bool = True, refuse_images: bool = False
) -> Any:
    """The state in such a file. Raises `Damaged`, `LoadFailed` or the store's error. With `refuse_images`, a file of the
    engine's own is refused: its manifest is missing, and with it all that could verify it."""
    path = where(store, key)
    check_unsigned(path, trusted_source=trusted_source)
    with _held(store, key) as held:
        is_checked = check_records(held.path, path=path)
        if refuse_images and _is_image(held.path):
            raise Damaged(path=path, reason="its manifest is missing, so it cannot be verified")
        if not is_checked:
            log.warning("%s has no manifest and no checksums: it cannot be verified", path)
        return open_image(held.path, trusted_source=trusted_source, warn=warn, name=path)


def check_unsigned(path: str, *, trusted_source: bool = False) -> None:
    """Raise `Untrusted` where only signed checkpoints are loaded, which such a file is not."""
    keys = signing.configured()
    if keys is not None and not (keys.accepts_unsigned or trusted_source):
        raise Untrusted(
            path=path, reason=f"it has no manifest that could be signed, and {signing.KEY_VARIABLE} is set"
        )


def verify_plain(store: Store, key: str) -> bool:
    """Compare every record with its checksum; False where there are none to compare with. Raises `Damaged`."""
    with _held(store, key) as held:
        return check_records(held.path, path=where(store, key))


def _is_image(file: str) -> bool:
    """Whether the engine laid the file out: its records are aligned to pages, and have no checksums."""
    from strata.checkpoint.image.layout import ALIGNMENT_BYTES

    if not zipfile.is_zipfile(file):
        return False
    with zipfile.ZipFile(file) as archive:
        return any(
            info.filename.endswith("/.storage_alignment")
            and info.CRC == 0
            and info.file_size == len(str(ALIGNMENT_BYTES))
            for info in archive.infolist()
        )


def check_records(file: str | IO[bytes], *, path: str) -> bool:
    """Whether the records' checksums were there and right. Raises `Damaged` where one is wrong."""
    checked = False
    try:
        if not zipfile.is_zipfile(file):  # Which raises for some that claim to be one.
            return False
        with zipfile.ZipFile(file) as archive:
            for info in archive.infolist():
                if info.compress_type != zipfile.ZIP_STORED:
                    raise LoadFailed(f"{path}: '{info.filename}' is compressed, which torch.save never does.")
                if info.CRC == 0:
                    continue  # Written without checksums, or empty.
                checked = True
                with archive.open(info) as record:
                    while record.read(_PIECE_BYTES):
                        pass
    except (zipfile.BadZipFile, EOFError, NotImplementedError, ValueError, RuntimeError, OSError) as error:
        raise Damaged(path=path, reason=f"the file is not intact ({error})") from error
    return checked


@contextlib.contextmanager
def _held(store: Store, key: str) -> Iterator[Held]:
    blob = store.stat(key)
    if blob is None:
        raise NotFound(f"'{key}' is not in {store.url}.", tier=store.tier, key=key, reason="not found")
    with contextlib.closing(Held(blob.size_bytes)) as held:
        with held.view as view:
            store.read_into(key, view)
        yield held
