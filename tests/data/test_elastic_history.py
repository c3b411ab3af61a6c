"""Whatever happens to the fleet, the committed history has every sample once, in the order of a calm run."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from strata.core.data.audit import Commit, audit_all
from strata.core.data.ledger import DataCommit, RankRecord
from strata.core.data.order import EpochOrder
from strata.data.loading.commits import DataLedger
from strata.data.loading.sampler import ElasticSampler
from strata.data.loading.steps import Step

EPOCHS = 2


class Fleet:
    """All ranks of a job in one process: their samplers, and the samples the weights have learned from."""

    dataset = "d"

    def __init__(self, world_size: int, *, total: int, options: Mapping[str, Any]) -> None:
        self.total = total
        self._options = options
        self.learned: list[int] = []
        self.start(world_size)

    def start(self, world_size: int) -> None:
        """New processes, as after a restart."""
        self.ranks = [
            ElasticSampler(
                self.total, rank=rank, world_size=world_size, dataset=self.dataset, seed=7, **self._options
            )
            for rank in range(world_size)
        ]

    def resize_alive(self, world_size: int) -> None:
        """The same processes in another world: survivors go on, newcomers load the position of a survivor."""
        state = self.ranks[0].state_dict()
        leavers = self.ranks[world_size:]
        assert not any(leaver._records for leaver in leavers), "a graceful leaver commits first"
        survivors = self.ranks[:world_size]
        self.start(world_size)
        self.ranks[: len(survivors)] = survivors
        for rank, sampler in enumerate(self.ranks):
            sampler.set_world(rank, world_size)
            if rank >= len(survivors):
                sampler.load_state_dict(state)

    def train(self, steps: int) -> None:
        while steps and not self.finished:
            if not len(self.ranks[0]):
                for sampler in self.ranks:
                    sampler.close_if_done()
            readers = [sampler.batches() for sampler in self.ranks]
            for _ in range(min(steps, self.ranks[0].plan().steps)):
                self._step(readers)
                steps -= 1

    def _step(self, readers: list[Iterator[tuple[Step, list[int]]]]) -> None:
        per_rank: list[list[int]] = [[] for _ in self.ranks]
        ends = False
        while not ends:  # All ranks take part in every micro-batch.
            for rank, (sampler, reader) in enumerate(zip(self.ranks, readers, strict=True)):
                step, ids = next(reader)
                assert len(ids) == max(len(step), 1)
                per_rank[rank] += ids if len(step) else []
                ends = step.ends_step
                sampler.commit(step)
        self.learned += [sample for ids in per_rank for sample in ids]

    @property
    def finished(self) -> bool:
        return self.ranks[0].epoch >= EPOCHS

    @property
    def world_size(self) -> int:
        return len(self.ranks)

    def records(self) -> list[RankRecord]:
        return [record for sampler in self.ranks for record in sampler.records()]

    def state_dict(self) -> dict[str, Any]:
        states = [sampler.state_dict() for sampler in self.ranks]
        assert all(state == states[0] for state in states)
        return states[0]

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for sampler in self.ranks:
            sampler.load_state_dict(state)


class Run:
    """A job with its checkpoints: each holds the weights (what was learned) and the data record. Durable ones make
    the history; a snapshot in memory is newer but comes and goes."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.commits: list[Commit] = []
        self.weights: dict[str, list[int]] = {}
        self.parent: str | None = None
        self.snapshot: tuple[DataCommit, list[int], str | None] | None = None
        self.ledger = DataLedger(fleet, gather=lambda mine: [mine])

    def _record(self, name: str | None = None, *, durable: bool) -> DataCommit:
        return DataCommit.from_json(json.loads(json.dumps(self.ledger.commit(name, durable=durable))))

    def save(self, *, confirmed: bool = True) -> None:
        """A durable checkpoint, of which the ledger may not hear before the next one is made."""
        name = f"c{len(self.commits)}"
        data = self._record(name, durable=True)
        self.commits.append(
            Commit(checkpoint_id=name, parent_id=self.parent, step=len(self.fleet.learned), data=data)
        )
        self.weights[name] = list(self.fleet.learned)
        self.parent, self.snapshot = name, None
        if confirmed:
            self.ledger.confirm(name)

    def save_in_vain(self) -> None:
        """The disk is full, the upload fails: no checkpoint comes of it."""
        self._record("in vain", durable=True)
        self.ledger.fail("in vain")

    def save_in_memory(self) -> None:
        self.snapshot = (self._record(durable=False), list(self.fleet.learned), self.parent)

    def crash(self, world_size: int, *, back: int = 0, memory: bool = False) -> None:
        """Every process dies. A new world starts from the snapshot in memory where that survived, else from the
        newest durable checkpoint, or an older one where that is damaged."""
        self.fleet.start(world_size)
        self.ledger = DataLedger(self.fleet, gather=lambda mine: [mine])
        if memory and self.snapshot is not None:
            data, self.fleet.learned, self.parent = self.snapshot[0], list(self.snapshot[1]), self.snapshot[2]
            self.ledger.restore(data.to_json(), durable=False)
            return
        self.snapshot = None
        at = self.parent
        for _ in range(back):
            at = next((c.parent_id for c in self.commits if c.checkpoint_id == at), None)
        self.parent = at
        self.fleet.learned = list(self.weights[at]) if at else []
        restored = next((c.data for c in self.commits if c.checkpoint_id == at), None)
        if restored is not None:
            self.ledger.restore(restored.to_json(), checkpoint_id=at)


worlds = st.integers(1, 64)
events = st.one_of(
    st.tuples(st.just("train"), st.integers(1, 12)),
    st.tuples(
        st.sampled_from(["save", "overlapping save", "snapshot", "failed save", "late news"]), st.just(0)
    ),
    st.tuples(st.just("resize"), worlds),
    st.tuples(st.sampled_from(["crash", "lost machine", "damaged"]), worlds),
)


@settings(max_examples=120, suppress_health_check=[HealthCheck.too_slow])
@given(
    total=st.integers(0, 300),
    batch=st.integers(1, 70),
    constant=st.booleans(),
    micro=st.one_of(st.none(), st.integers(1, 9)),
    drop_last=st.booleans(),
    shuffle=st.booleans(),
    first_world=worlds,
    schedule=st.lists(events, max_size=25),
    last_kept=st.integers(1, 30),
)
def test_nothing_is_lost_or_repeated_and_the_order_is_that_of_a_calm_run(
    total: int,
    batch: int,
    constant: bool,
    micro: int | None,
    drop_last: bool,
    shuffle: bool,
    first_world: int,
    schedule: list[tuple[str, int]],
    last_kept: int,
) -> None:
    options = {
        "global_batch_size" if constant else "batch_size": batch,
        "micro_batch_size": micro,
        "drop_last": drop_last,
        "shuffle": shuffle,
    }
    run = Run(Fleet(first_world, total=total, options=options))
    for event, value in schedule:
        match event:
            case "train":
                run.fleet.train(value)
            case "save":
                run.save()
            case "overlapping save":
                run.save(confirmed=False)
            case "late news":
                for made in run.commits:
                    run.ledger.confirm(made.checkpoint_id)
            case "snapshot":
                run.save_in_memory()
            case "failed save":
                run.save_in_vain()
            case "resize":
                run.save()
                run.fleet.resize_alive(value)
            case "crash":
                run.crash(value, memory=True)
            case "lost machine":
                run.crash(value)
            case "damaged":
                run.crash(value, back=1)
    run.fleet.train(10_000)
    run.save()

    reports = audit_all(run.commits, "d")
    assert len(reports) == EPOCHS
    learned = run.fleet.learned
    for epoch, report in enumerate(reports):
        assert report.exact, report.reason
        calm = EpochOrder(total=total, seed=7, epoch=epoch, shuffle=shuffle)[:].tolist()
        assert report.samples + report.dropped.size == total
        assert bool(report.dropped) <= drop_last
        if drop_last and constant:
            assert report.samples == total - total % batch
        assert learned[: report.samples] == calm[: report.samples]
        learned = learned[report.samples :]
    assert not learned
    # Retention: the newest checkpoints alone prove the same.
    assert [r.exact for r in audit_all(run.commits[-last_kept:], "d")] == [True] * EPOCHS


@pytest.mark.parametrize("schedule", [[4, 3], [4, 3, 2], [2, 4, 2], [8, 6, 8], [4, 7]])
@pytest.mark.parametrize("total", [1_000, 1_003])
def test_the_known_resize_schedules_are_exact(schedule: list[int], total: int) -> None:
    run = Run(Fleet(schedule[0], total=total, options={"global_batch_size": 40}))
    for world in schedule[1:]:
        run.fleet.train(6)
        run.save()
        run.fleet.train(2)  # Lost with the crash.
        run.crash(world)
    run.fleet.train(10_000)
    run.save()
    assert [report.reason for report in audit_all(run.commits, "d")] == [
        f"{total:,} samples, each exactly once" for _ in range(EPOCHS)
    ]


def test_a_sampler_that_repeats_is_caught_by_the_audit() -> None:
    """The proof can fail: weights kept while the data position is put back."""
    run = Run(Fleet(3, total=100, options={"global_batch_size": 10}))
    run.fleet.train(4)
    run.save()
    for sampler in run.fleet.ranks:
        sampler.move(0, 20)
    run.fleet.train(10_000)
    run.save()
    report = audit_all(run.commits, "d")[0]
    assert not report.exact
    assert report.repeated.to_json() == [[20, 40]]
