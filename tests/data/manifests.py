"""Real manifests in a real store, as a training run leaves them."""

from __future__ import annotations

from pathlib import Path

from strata.checkpoint.catalog.manifest import BYTES, SUFFIX, CheckpointId, Manifest, Part
from strata.checkpoint.copying.digest import digest_of
from strata.core.data.ledger import DataCommit
from strata.stores import open_store


def publish(
    directory: Path, name: str, *, parent: str | None, sequence: int, data: DataCommit | None, step: int = 0
) -> None:
    manifest = Manifest(
        checkpoint_id=CheckpointId(name),
        step=step or sequence,
        epoch=0,
        created_at=float(sequence),
        format=BYTES,
        parts=(Part(key=f"{name}.bin", size_bytes=0, digest=digest_of(memoryview(b""))),),
        data=data.to_json() if data else None,
        sequence=sequence,
        parent=CheckpointId(parent) if parent else None,
        durable_parent=CheckpointId(parent) if parent else None,
    )
    open_store(directory).put(f"{name}{SUFFIX}", manifest.encode(), if_absent=True)
