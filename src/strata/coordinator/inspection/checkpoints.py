"""Re-hashing a registered checkpoint on behalf of the API: is every byte what was saved?

Files are read in processes of their own, a few checkpoints at a time, only through their manifests, and only where the
caller may have files read (`auth.paths`); nothing is changed, opened or unpickled. A caller waits a moment for the answer;
where the bytes are many it learns that the work continues, and asks again for the outcome.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Literal

from strata.coordinator.auth.paths import ReadRules, ReadScope
from strata.coordinator.auth.principals import Principal
from strata.coordinator.inspection.processes import ChildLimits, InspectionProcesses
from strata.core.cluster import Cluster
from strata.core.fleet.checkpoints import CheckpointRecord
from strata.core.messages import CheckpointId, InvalidArgument, Overloaded, Unknown

AT_ONCE = 2
PATIENCE_S = 15.0
"""How long a caller is kept waiting; the work continues."""
LIMITS = ChildLimits(memory_bytes=4 << 30, cpu_s=6 * 3_600, wall_s=6 * 3_600.0)
DAMAGES_SHOWN = 20
LIST_HINT = "GET /api/checkpoints (or: strata checkpoints) lists the known ones."
SEE_HINT = (
    "The coordinator verifies only what it can read: a path on its machine, or a bucket it has access to."
)


KNOWN_KEPT = 1_000


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
    """What is being verified now, and outcomes that no caller has asked for yet."""

    def __init__(self, processes: InspectionProcesses, rules: ReadRules | None = None) -> None:
        self._processes = processes
        self._rules = rules or ReadRules()
        self._started: dict[tuple[CheckpointId, ReadScope], asyncio.Task[VerificationView]] = {}
        self.known: dict[str, bool] = {}
        """Of the checkpoints that were verified since the coordinator has started, the newest: whether they were intact."""

    async def verify(
        self, cluster: Cluster, checkpoint_id: CheckpointId, caller: Principal
    ) -> VerificationView:
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
        scope = self._rules.scope_of(caller, checkpoints=True)
        work = self._started.get((checkpoint_id, scope)) or self._start(record, scope)
        await asyncio.wait({work}, timeout=PATIENCE_S)
        if not work.done():
            return VerificationView(
                checkpoint_id=checkpoint_id,
                status="verifying",
                size_bytes=record.size_bytes,
                damages=[],
                reason="verification in progress; retry for the outcome",
            )
        self._started.pop((checkpoint_id, scope), None)
        found = work.result()
        self.known.pop(checkpoint_id, None)
        self.known[checkpoint_id] = found.status == "whole"
        if len(self.known) > KNOWN_KEPT:
            del self.known[next(iter(self.known))]
        return found

    def _start(self, record: CheckpointRecord, scope: ReadScope) -> asyncio.Task[VerificationView]:
        self._started = {key: work for key, work in self._started.items() if not work.done()}
        if len(self._started) >= AT_ONCE:
            raise Overloaded(
                f"{AT_ONCE} checkpoints are being verified, which is the limit.",
                hint="Retry when one is done.",
            )
        work = asyncio.create_task(self._verify(record, scope), name="verifying")
        work.add_done_callback(_retrieve_exception)
        self._started[record.checkpoint_id, scope] = work
        return work

    async def _verify(self, record: CheckpointRecord, scope: ReadScope) -> VerificationView:
        from strata.checkpoint.catalog.manifest import SUFFIX
        from strata.checkpoint.catalog.naming import manifest_key

        folder, _, name = record.path.rpartition("/")
        if not (record.path.startswith("/") or "://" in record.path) or not folder or not name:
            raise InvalidArgument(
                "path", f"'{record.path}' is not a path or URL that the coordinator can read.", hint=SEE_HINT
            )
        request = {
            "kind": "verify",
            "path": record.path,
            "folder": folder,
            "key": name if name.endswith(SUFFIX) else manifest_key(name.rpartition(".")[0]),
            "checkpoint_id": record.checkpoint_id,
            "shown": DAMAGES_SHOWN,
        }
        found = await self._processes.run(
            request,
            field="path",
            scope=scope,
            client=f"verification of {record.checkpoint_id}",
            limits=LIMITS,
            hint=SEE_HINT,
        )
        if "missing" in found:
            return _outcome(record, [_missing_file(record, found["missing"])], 1)
        return _outcome(record, [DamageView(**damage) for damage in found["damages"]], found["count"])


def _retrieve_exception(ended: asyncio.Task[VerificationView]) -> None:
    if not ended.cancelled():
        ended.exception()  # The caller may have left.


def _missing_file(record: CheckpointRecord, reason: str) -> DamageView:
    return DamageView(path=record.path, reason=reason, start_bytes=0, end_bytes=record.size_bytes, tensors=[])


def _outcome(record: CheckpointRecord, damages: list[DamageView], count: int) -> VerificationView:
    many = f"{count:,} corrupted ranges" if count > 1 else "1 corrupted range"
    return VerificationView(
        checkpoint_id=record.checkpoint_id,
        status="damaged" if damages else "whole",
        size_bytes=record.size_bytes,
        damages=damages,
        reason=many if damages else "checksums match",
    )
