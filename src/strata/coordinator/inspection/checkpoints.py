"""Re-hashing a registered checkpoint on behalf of the API: is every byte what was saved?

Files are read on threads, a few checkpoints at a time, and only through their manifests; nothing is changed, opened
or unpickled. A caller waits a moment for the answer; where the bytes are many it learns that the work continues, and
asks again for the outcome.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Literal

from strata.coordinator.inspection.threads import begin
from strata.core.checkpoints import CheckpointRecord
from strata.core.cluster import Cluster
from strata.core.messages import CheckpointId, InvalidArgument, Overloaded, Unknown

AT_ONCE = 2
PATIENCE_S = 15.0
"""How long a caller is kept waiting; the work continues."""
DAMAGES_SHOWN = 20
LIST_HINT = "GET /api/checkpoints (or: strata checkpoints) lists the known ones."
SEE_HINT = (
    "The coordinator can verify what it can read itself: a path on its machine, or a bucket it may read."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DamageView:
    path: str
    reason: str
    start_bytes: int
    end_bytes: int
    tensors: list[str]
    """Those with bytes in the range."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerificationView:
    checkpoint_id: str
    status: Literal["verifying", "whole", "damaged"]
    size_bytes: int
    damages: list[DamageView]
    """The first of them."""
    reason: str


class Verifications:
    """What is being verified now, and outcomes that nobody has asked for yet."""

    def __init__(self) -> None:
        self._begun: dict[CheckpointId, asyncio.Future[VerificationView]] = {}

    async def verify(self, cluster: Cluster, checkpoint_id: CheckpointId) -> VerificationView:
        """The outcome, or that it is under way. Asking twice is one verification."""
        record = cluster.checkpoints.records.get(checkpoint_id)
        if record is None or record.removed:
            raise Unknown("checkpoint", checkpoint_id, hint=LIST_HINT)
        if record.status != "completed":
            raise InvalidArgument(
                "checkpoint_id",
                f"names a checkpoint that is {record.status}.",
                hint="Only completed ones have a manifest.",
            )
        work = self._begun.get(checkpoint_id) or self._begin(record)
        await asyncio.wait({work}, timeout=PATIENCE_S)
        if not work.done():
            return VerificationView(
                checkpoint_id=checkpoint_id,
                status="verifying",
                size_bytes=record.size_bytes,
                damages=[],
                reason="verification in progress; ask again for the outcome",
            )
        self._begun.pop(checkpoint_id, None)
        return work.result()

    def _begin(self, record: CheckpointRecord) -> asyncio.Future[VerificationView]:
        self._begun = {key: work for key, work in self._begun.items() if not work.done()}
        if len(self._begun) >= AT_ONCE:
            raise Overloaded(
                f"{AT_ONCE} checkpoints are being verified, which is the limit.",
                hint="Try again when one is done.",
            )
        work = begin(_verify, record, name="verifying")
        work.add_done_callback(lambda ended: ended.exception())  # Whoever asked may have left.
        self._begun[record.checkpoint_id] = work
        return work


def _verify(record: CheckpointRecord) -> VerificationView:
    from strata.checkpoint.catalog.listing import Catalog, Entry
    from strata.checkpoint.catalog.manifest import SUFFIX
    from strata.checkpoint.catalog.naming import manifest_key
    from strata.checkpoint.errors import Damaged
    from strata.checkpoint.verify import verify_entry
    from strata.errors import StrataError
    from strata.stores import open_store
    from strata.stores.protocol import NotFound

    folder, _, name = record.path.rpartition("/")
    if not (record.path.startswith("/") or "://" in record.path) or not folder or not name:
        raise InvalidArgument(
            "path", f"'{record.path}' is not a path or URL that the coordinator can read.", hint=SEE_HINT
        )
    key = name if name.endswith(SUFFIX) else manifest_key(name.rpartition(".")[0])
    try:
        store = open_store(folder)
        manifest = Catalog(store).read(key)
        if manifest.checkpoint_id != record.checkpoint_id:
            return _outcome(
                record, [_whole_file(record, f"another checkpoint is there: {manifest.checkpoint_id}")]
            )
        verified = verify_entry(store, Entry(key=key, manifest=manifest))
    except Damaged as error:
        return _outcome(record, [_whole_file(record, error.reason)])
    except NotFound:
        return _outcome(record, [_whole_file(record, "its manifest is missing")])
    except (StrataError, OSError, ValueError) as error:
        raise InvalidArgument("path", f"'{record.path}' cannot be read: {error}", hint=SEE_HINT) from error
    damages = [
        DamageView(
            path=damage.path,
            reason=damage.reason,
            start_bytes=damage.start_bytes,
            end_bytes=damage.end_bytes,
            tensors=[tensor.name for tensor in damage.tensors[:DAMAGES_SHOWN]],
        )
        for damage in verified.damages
    ]
    return _outcome(record, damages)


def _whole_file(record: CheckpointRecord, reason: str) -> DamageView:
    return DamageView(path=record.path, reason=reason, start_bytes=0, end_bytes=record.size_bytes, tensors=[])


def _outcome(record: CheckpointRecord, damages: list[DamageView]) -> VerificationView:
    many = f"{len(damages):,} corrupted ranges" if len(damages) > 1 else "1 corrupted range"
    return VerificationView(
        checkpoint_id=record.checkpoint_id,
        status="damaged" if damages else "whole",
        size_bytes=record.size_bytes,
        damages=damages[:DAMAGES_SHOWN],
        reason=many if damages else "checksums match",
    )
