"""Resuming data measured: samples lost and repeated when the world changes mid-epoch, and what resuming costs.

Schedules of world sizes go through Strata, and through whatever the caller compares with. Strata's numbers are counted from
the samples its ranks were given, and must agree with its audit.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from strata.bench.table import Row
from strata.core.data.audit import Commit, audit
from strata.core.data.ledger import DataCommit
from strata.core.data.order import EpochOrder
from strata.data.loading.sampler import ElasticSampler
from strata.data.readers.base import ReadOptions
from strata.data.readers.lines import scan
from strata.data.streaming.sources import LocalSource

SCHEDULES = ([4, 3], [4, 3, 2], [2, 4, 2], [8, 6, 8], [4, 7])
TOTAL = 1_003
STEPS = 6
"""In each world but the last, which continues to the end of the epoch."""
UNDONE = 2
"""Steps that are trained after the checkpoint and lost in a crash, before the world changes."""
BATCH = 5
"""Of one rank."""


def run(*, compare: Callable[[list[int]], str] | None = None) -> Iterator[Row]:
    """`compare` says what others make of a schedule."""
    for schedule in SCHEDULES:
        yield _schedule(schedule, compare)
    yield _resume_cost()
    yield _order()
    yield _find_lines()


# Lost and repeated ----------------------------------------------------------------------------------------


def _schedule(schedule: list[int], compare: Callable[[list[int]], str] | None) -> Row:
    wrong = [strata_run(TOTAL, schedule, constant=constant) for constant in (True, False)]
    return Row(
        name=f"{'→'.join(map(str, schedule))} workers",
        measured=max(lost + repeated for lost, repeated in wrong),
        unit=f"of {TOTAL:,} lost or repeated",
        target=0,
        better="lower",
        peer=compare(schedule) if compare else "",
        note="the worse of a constant global batch and a constant batch per rank; the audit agrees",
    )


def phases(schedule: Sequence[int]) -> list[tuple[int, int | None]]:
    """Each world size with its steps."""
    return [*((world, STEPS) for world in schedule[:-1]), (schedule[-1], None)]


def strata_run(total: int, schedule: Sequence[int], *, constant: bool) -> tuple[int, int]:
    """Samples lost and repeated, counted from what the ranks were given; the audit must say the same."""
    batch: dict[str, int] = {"global_batch_size": BATCH * schedule[0]} if constant else {"batch_size": BATCH}
    seen: Counter[int] = Counter()
    commits: list[Commit] = []
    data = DataCommit()
    state: dict[str, Any] | None = None
    for number, (world, steps) in enumerate(phases(schedule)):
        ranks = [ElasticSampler(total, rank=rank, world_size=world, seed=1, **batch) for rank in range(world)]  # type: ignore[arg-type]
        records = []
        for sampler in ranks:
            if state is not None:
                sampler.load_state_dict(state)
            saved = None
            for done, (step, ids) in enumerate(sampler.batches(), start=1):
                if steps is None or done <= steps:
                    seen.update(ids if len(step) else [])
                sampler.commit(step)
                if done == steps:
                    saved = (sampler.state_dict(), list(sampler.records()))
                if steps is not None and done == steps + UNDONE:
                    break
            after, own = saved or (sampler.state_dict(), list(sampler.records()))
            records += own
        state = after
        data = data.next(records, world_size=world)
        commits.append(Commit(checkpoint_id=str(number), parent_id=str(number - 1), step=number, data=data))
    lost, repeated = total - len(seen), sum(seen.values()) - len(seen)
    report = audit(commits, "data", 0)
    assert (report.lost.size, bool(report.repeated)) == (lost, bool(repeated)), (
        "the audit disagrees with the count"
    )
    return lost, repeated


# Costs ----------------------------------------------------------------------------------------------------


def _resume_cost(total: int = 1_000_000) -> Row:
    """From a saved position to the first batch, at the beginning and near the end of an epoch."""

    def ours(position: int) -> None:
        sampler = ElasticSampler(total, global_batch_size=256, seed=1)
        sampler.load_state_dict({**sampler.state_dict(), "position": position})
        next(sampler.batches())

    early, late = _interleaved(lambda: ours(0), lambda: ours(total * 99 // 100))
    peer_early, peer_late = _torchdata_resume(total)
    return Row(
        name="resume at 99 % / at 0 %",
        measured=late / early,
        unit="times the cost",
        target=1.25,
        better="lower",
        peer=f"torchdata: {peer_late / peer_early:.1f} times ({peer_late * 1e3:.0f} ms at 99 %)",
        note=f"{late * 1e3:.2f} ms to the first batch of {total:,} samples; median of alternating runs",
    )


def _torchdata_resume(total: int) -> tuple[float, float]:
    """The same with StatefulDataLoader over DistributedSampler, which walks through what was read already."""
    import warnings

    from torch.utils.data import DistributedSampler
    from torchdata.stateful_dataloader import StatefulDataLoader

    def loader() -> Any:
        sampler: Any = DistributedSampler(range(total), num_replicas=1, rank=0, seed=1)  # type: ignore[arg-type]
        return StatefulDataLoader(range(total), batch_size=256, sampler=sampler)

    def resume(state: dict[str, Any]) -> None:
        again = loader()
        again.load_state_dict(state)
        next(iter(again))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        states = []
        for batches in (1, total // 256 * 99 // 100):
            reading = iter(first := loader())
            for _ in range(batches):
                next(reading)
            states.append(first.state_dict())
        early, late = _interleaved(lambda: resume(states[0]), lambda: resume(states[1]), rounds=3)
    return early, late


def _order(total: int = 10**10, count: int = 1_000_000) -> Row:
    order = EpochOrder(total=total, seed=1)
    (seconds,) = _interleaved(lambda: order[total - count : total], rounds=5)
    return Row(
        name="order of 10¹⁰ samples",
        measured=count / seconds / 1e6,
        unit="M samples/s",
        peer="torch.randperm would need 80 GB",
        note="computed at the very end of the epoch, with no table",
    )


def _find_lines(size_bytes: int = 200_000_000) -> Row:
    line = (
        json.dumps({"id": 12345, "text": "the quick brown fox jumps over the lazy dog " * 8}).encode() + b"\n"
    )
    with tempfile.TemporaryDirectory(prefix="strata-bench-") as folder:
        path = Path(folder) / "lines.jsonl"
        path.write_bytes(line * (size_bytes // len(line)))
        source = LocalSource(str(path))
        ours, counting = _interleaved(
            lambda: scan(source, ReadOptions()), lambda: _count_newlines(path), rounds=5
        )
        source.close()
    return Row(
        name="index JSON lines",
        measured=size_bytes / ours / 1e6,
        unit="MB/s",
        peer=f"only counting newlines: {size_bytes / counting / 1e6:,.0f} MB/s",
        note="one core, from the page cache",
    )


def _count_newlines(path: Path) -> int:
    with path.open("rb") as file:
        return sum(chunk.count(b"\n") for chunk in iter(lambda: file.read(4 * 2**20), b""))


def _interleaved(*works: Callable[[], object], rounds: int = 15) -> list[float]:
    """Median seconds of each; they take turns, so that a noisy moment does not hit one alone."""
    for work in works:
        work()
    times: list[list[float]] = [[] for _ in works]
    for _ in range(rounds):
        for work, seconds in zip(works, times, strict=True):
            began_s = time.perf_counter()
            work()
            seconds.append(time.perf_counter() - began_s)
    return [statistics.median(seconds) for seconds in times]
