"""Looking at a dataset's files on behalf of the API: how many samples there are, and what some look like.

What is read, and for whom, `auth.paths` decides for each call; the reading happens in a process of its own, one at a time
for each client. Which samples a worker is at is a question to the state; reading and shortening them is `strata.data`'s
work.
"""

from __future__ import annotations

import asyncio
import math
from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from strata.coordinator.auth.paths import PathRefused, ReadRules, ReadScope
from strata.coordinator.auth.principals import Principal
from strata.coordinator.inspection.child import TOKEN_FORMATS
from strata.coordinator.inspection.processes import ChildLimits, InspectionProcesses
from strata.core.cluster import Cluster
from strata.core.data.order import EpochOrder
from strata.core.messages import DatasetSpec, FileSpan, InvalidArgument, WorkerId

POSITION = "data_position"
"""The metric by which a worker that reads in global order says where it is."""
LIMITS = ChildLimits()
COUNT_HINT = "Pass total_samples if only the workers can see the files, or if counting takes long."
PREVIEW_HINT = "A preview needs a path that the coordinator can see."

Counted = tuple[int, tuple[FileSpan, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PreviewView:
    dataset_id: str
    worker_id: str | None
    epoch: int
    shard_id: int | None
    indices: list[int]
    """Numbers of the samples, in the order they are read."""
    samples: list[dict[str, Any]]
    """Field by field what can be shown of each."""


class DatasetInspection:
    def __init__(
        self,
        processes: InspectionProcesses,
        rules: ReadRules | None = None,
        *,
        limits: ChildLimits = LIMITS,
    ) -> None:
        self._processes = processes
        self._rules = rules or ReadRules()
        self._limits = limits
        self._counting: dict[tuple[str, str, ReadScope], asyncio.Task[Counted]] = {}

    async def count(self, path: str, format: str, total_samples: int | None, caller: Principal) -> Counted:
        """The number of samples, and the files they are in where this machine can see them. With a number given,
        nothing is read. Many workers that register the same dataset at once are one count."""
        if total_samples is not None:
            return total_samples, ()
        if format in TOKEN_FORMATS:
            raise InvalidArgument(
                "total_samples", "is missing.", hint="Pass the number of sequences in the index."
            )
        scope = self._rules.scope_of(caller)
        key = (path, format, scope)
        counting = self._counting.get(key)
        if counting is None:
            counting = asyncio.create_task(self._count(path, format, scope, caller.name), name="counting")
            self._counting[key] = counting
            counting.add_done_callback(lambda ended: self._counted(key, ended))
        return await asyncio.shield(counting)

    async def _count(self, path: str, format: str, scope: ReadScope, client: str) -> Counted:
        request = {"kind": "count", "path": path, "format": format}
        found = await self._processes.run(
            request, field="path", scope=scope, client=client, limits=self._limits, hint=COUNT_HINT
        )
        files = tuple(FileSpan(path=name, samples=samples) for name, samples in found["files"])
        return found["total"], files

    def _counted(self, key: tuple[str, str, ReadScope], ended: asyncio.Task[Counted]) -> None:
        del self._counting[key]
        if not ended.cancelled():
            ended.exception()  # The callers may have left; then none needs to know.

    async def preview(
        self,
        cluster: Cluster,
        spec: DatasetSpec,
        worker_id: WorkerId | None,
        limit: int,
        caller: Principal,
    ) -> PreviewView:
        if not self._rules.previews:
            raise PathRefused(
                "Previews are switched off here.",
                hint="An operator sets previews = true under [coordinator].",
            )
        epoch, shard_id, indices = current_position(cluster, spec, worker_id, limit)
        samples = await self._processes.run(
            {
                "kind": "preview",
                "path": spec.path,
                "format": spec.format,
                "metadata": dict(spec.metadata),
                "indices": indices,
                "files": _files_of(spec, indices),
            },
            field="dataset",
            scope=self._rules.scope_of(caller),
            client=caller.name,
            limits=self._limits,
            hint=PREVIEW_HINT,
        )
        return PreviewView(
            dataset_id=spec.dataset_id,
            worker_id=worker_id,
            epoch=epoch,
            shard_id=shard_id,
            indices=indices,
            samples=samples,
        )


def _files_of(spec: DatasetSpec, indices: list[int]) -> list[tuple[str, int | None, list[tuple[int, int]]]]:
    """The files that hold some samples: path, samples in it, and of each sample wanted its number and row there."""
    if not spec.files:
        return [(spec.path, None, [(index, index) for index in indices])]
    ends = list(accumulate(file.samples for file in spec.files))
    wanted: dict[int, list[tuple[int, int]]] = {}
    for index in indices:
        number = bisect_right(ends, index)
        first = ends[number] - spec.files[number].samples
        wanted.setdefault(number, []).append((index, index - first))
    return [(spec.files[number].path, spec.files[number].samples, rows) for number, rows in wanted.items()]


def current_position(
    cluster: Cluster, spec: DatasetSpec, worker_id: WorkerId | None, limit: int
) -> tuple[int, int | None, list[int]]:
    """The epoch, the shard, and the numbers of the samples that a worker reads next; without a worker, the first."""
    if worker_id is None:
        return 0, None, _in_order(spec, 0, 0, limit)
    cluster.membership.admit(worker_id, incarnation=0)
    report = cluster.membership.reports.get(worker_id)
    at = report.metrics.get(POSITION, math.nan) if report is not None else math.nan
    if report is not None and math.isfinite(at):
        return report.epoch, None, _in_order(spec, report.epoch, int(at), limit)
    job = cluster.membership.members[worker_id].spec.job_id
    epochs = cluster.datasets.epochs(job, spec.dataset_id)
    if not epochs:
        return 0, None, []
    key = (job, spec.dataset_id, epochs[-1])
    reported = cluster.datasets.reported.get(key, {})
    for shard in cluster.datasets.shards_of(worker_id, key):
        size, done = shard.stop - shard.start, max(shard.done, reported.get(shard.shard_id, 0))
        if done < size:
            from strata.data.shards.stream import shard_order

            order = shard_order(shard.shard_id, size, seed=spec.seed, epoch=epochs[-1], shuffle=spec.shuffle)
            ids = order[done : min(size, done + limit)] + shard.start
            return epochs[-1], shard.shard_id, [int(i) for i in ids]
    return epochs[-1], None, []


def _in_order(spec: DatasetSpec, epoch: int, position: int, limit: int) -> list[int]:
    order = EpochOrder(total=spec.total_samples, seed=spec.seed, epoch=epoch, shuffle=spec.shuffle)
    start = min(max(0, position), spec.total_samples)
    return [int(i) for i in order[start : min(spec.total_samples, start + limit)]]
