"""Looking at a dataset's files on behalf of the API: how many samples there are, and what some look like.

Files are read on threads, a few at a time, never on the event loop, and nobody waits for them for ever: not the
caller, and not a coordinator that stops. Which samples a worker is at is a question to the state; reading and
shortening them is `strata.data`'s work.
"""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np

from strata.coordinator.inspection.threads import begin
from strata.core.cluster import Cluster
from strata.core.messages import DatasetSpec, FileSpan, InvalidArgument, WorkerId
from strata.core.order import EpochOrder

READERS_KEPT = 8
AT_ONCE = 2
POSITION = "data_position"
"""The figure by which a worker that reads in global order says where it is."""
TOKEN_FORMATS = ("tokens", "token-index")
TOKENS_SHOWN = 128

PATIENCE_S = 20.0
COUNT_HINT = "Give total_samples when only the workers can see the files, or when counting takes long."
PREVIEW_HINT = "A preview needs a path that the coordinator can see."

_gate = asyncio.Semaphore(AT_ONCE)
T = TypeVar("T")


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


class Reader(Protocol):
    def __len__(self) -> int: ...

    def read(self, samples: Sequence[int]) -> list[dict[str, Any]]: ...


async def count_samples(
    path: str, format: str, total_samples: int | None
) -> tuple[int, tuple[FileSpan, ...]]:
    """The number of samples, and the files they are in where this process can see them."""
    if total_samples is not None:
        return total_samples, ()
    return await _on_thread(_count, path, format)


async def _on_thread(work: Callable[..., T], *arguments: object) -> T:
    """Run `work` on a thread that can be left behind; its place is free again when it has really ended."""
    try:
        async with asyncio.timeout(PATIENCE_S):
            await _gate.acquire()
            ended = begin(work, *arguments, name="sampling")
            ended.add_done_callback(_leave)
            return await asyncio.shield(ended)
    except TimeoutError:
        raise InvalidArgument(
            "path", f"could not be read within {PATIENCE_S:.0f} s.", hint=COUNT_HINT
        ) from None


def _leave(ended: asyncio.Future[Any]) -> None:
    _gate.release()
    ended.exception()  # Nobody may be waiting any more; then nobody needs to know.


def _count(path: str, format: str) -> tuple[int, tuple[FileSpan, ...]]:
    from strata.data.errors import DataError
    from strata.data.reader import discover

    if format in TOKEN_FORMATS:
        raise InvalidArgument("total_samples", "is missing.", hint="Say how many sequences the index has.")
    try:
        found = discover(path, format)
    except DataError as error:
        raise InvalidArgument("path", error.message, hint=error.hint or COUNT_HINT) from error
    except (OSError, ValueError) as error:
        raise InvalidArgument("path", f"cannot be read: {error}.", hint=COUNT_HINT) from error
    spans = tuple(FileSpan(path=file.path, samples=file.samples) for file in found.files)
    return found.total, spans


class Previews:
    """Samples of registered datasets. Keeps the readers of the datasets asked for last."""

    def __init__(self) -> None:
        self._readers: OrderedDict[str, Reader] = OrderedDict()

    async def show(
        self, cluster: Cluster, spec: DatasetSpec, worker_id: WorkerId | None, limit: int
    ) -> PreviewView:
        epoch, shard_id, indices = current_position(cluster, spec, worker_id, limit)
        samples = await _on_thread(self._read, spec, indices)
        return PreviewView(
            dataset_id=spec.dataset_id,
            worker_id=worker_id,
            epoch=epoch,
            shard_id=shard_id,
            indices=indices,
            samples=samples,
        )

    def _read(self, spec: DatasetSpec, indices: list[int]) -> list[dict[str, Any]]:
        from strata.data.errors import DataError
        from strata.data.preview import preview
        from strata.data.tokens.errors import TokenDataError

        try:
            reader = self._reader(spec)
            return preview(reader.read([i for i in indices if i < len(reader)]))
        except (DataError, TokenDataError) as error:
            raise InvalidArgument("dataset", error.message, hint=error.hint or PREVIEW_HINT) from error
        except (OSError, ValueError) as error:
            raise InvalidArgument("dataset", f"cannot be read: {error}.", hint=PREVIEW_HINT) from error

    def _reader(self, spec: DatasetSpec) -> Reader:
        from strata.data.reader import DatasetReader

        known = self._readers.pop(spec.dataset_id, None)
        if known is None:
            tokens = spec.format in TOKEN_FORMATS
            known = _TokenReader(spec) if tokens else DatasetReader(spec.path, spec.format)
        self._readers[spec.dataset_id] = known
        while len(self._readers) > READERS_KEPT:
            self._readers.popitem(last=False)
        return known


class _TokenReader:
    """Sequences of a token index: their ids, and their text where bytes are the tokens."""

    def __init__(self, spec: DatasetSpec) -> None:
        from strata.data.tokens.index import TokenIndex
        from strata.data.tokens.sequences import SequenceReader

        length = int(spec.metadata.get("seq_length", "128"))
        self._sequences = SequenceReader(TokenIndex(spec.path), max(1, length))

    def __len__(self) -> int:
        return self._sequences.count

    def read(self, samples: Sequence[int]) -> list[dict[str, Any]]:
        inputs, _ = self._sequences.read(np.asarray(samples, np.int64))
        shown = []
        for row in inputs:
            tokens = row[:TOKENS_SHOWN]
            fields: dict[str, Any] = {"tokens": tokens.tolist()}
            if self._sequences.index.meta.tokenizer == "bytes":
                fields["text"] = bytes(int(t) for t in row if t < 256).decode(errors="replace")
            shown.append(fields)
        return shown


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
            from strata.data.shard_stream import shard_order

            order = shard_order(shard.shard_id, size, seed=spec.seed, epoch=epochs[-1], shuffle=spec.shuffle)
            ids = order[done : min(size, done + limit)] + shard.start
            return epochs[-1], shard.shard_id, [int(i) for i in ids]
    return epochs[-1], None, []


def _in_order(spec: DatasetSpec, epoch: int, position: int, limit: int) -> list[int]:
    order = EpochOrder(total=spec.total_samples, seed=spec.seed, epoch=epoch, shuffle=spec.shuffle)
    start = min(max(0, position), spec.total_samples)
    return [int(i) for i in order[start : min(spec.total_samples, start + limit)]]
