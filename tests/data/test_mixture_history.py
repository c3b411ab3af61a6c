"""Whatever happens to the fleet, a mixture is read as in a calm run by one worker, and each source exactly once per epoch.

A schedule is one random mixture (sources of any size, nested ones, finite ones, weights that are scheduled and changed live,
packed, filtered and split) and one random history (resizes, crashes, rollbacks, worlds 1–64). A few run always, the rest
with `-m slow`. One that fails is named by its number.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Mapping
from itertools import islice
from typing import Any

import numpy as np
import pytest

from strata.core.data.audit import audit
from strata.core.data.ledger import DataCommit
from strata.core.data.mixture import Change, MixturePlan
from strata.core.data.mixture_changes import Board, decide
from strata.data.composing.mapping import Several, filtered, mapped
from strata.data.composing.mixture import Mixture
from strata.data.composing.packing import PackedDocuments
from strata.data.history import audit_by_source
from strata.data.loading.sampler import ElasticSampler
from tests.data.test_elastic_history import Fleet, Run

QUICK, ALL, PARTS = 60, 5_000, 100
EVENTS = 8


class MixedFleet(Fleet):
    """A fleet whose ranks read a mixture."""

    def __init__(self, world_size: int, mixture: Mixture, *, last: int, options: Mapping[str, Any]) -> None:
        self.mixture = mixture
        self.last = last
        super().__init__(world_size, total=0, options=options)

    def start(self, world_size: int) -> None:
        self.ranks = [
            ElasticSampler(
                self.mixture, rank=rank, world_size=world_size, dataset=self.dataset, **self._options
            )
            for rank in range(world_size)
        ]

    def train(self, steps: int) -> None:
        left = -(-(self.last - self.ranks[0].position) // self.ranks[0].global_batch_size)
        if not self.finished:
            super().train(min(steps, left))

    @property
    def finished(self) -> bool:
        return self.ranks[0].epoch > 0


def documents(draw: random.Random, size: int) -> list[list[int]]:
    return [[draw.randrange(1_000)] * draw.choice([0, 1, 3, 7, 20, 45]) for _ in range(size)]


def a_source(draw: random.Random, *, pack: bool) -> Any:
    """None, some or several of each sample may be left of it."""
    size = draw.choice([1, 2, draw.randint(3, 40), draw.randint(40, 400)])
    rows: Any = [[1], *documents(draw, size)] if pack else list(range(size))
    kind = draw.random()
    if kind < 0.2:
        return filtered(rows, lambda row: pack or row % 3 > 0)
    if kind < 0.4:
        return mapped(rows, lambda row: [row[: len(row) // 2], row] if pack else [row] * (row % 3))
    return rows


def a_mixture(draw: random.Random, *, nested: bool = False) -> Mixture:
    pack = draw.random() < 0.3
    names = [f"s{i}" for i in range(draw.randint(1, 5))]
    sources = {name: a_source(draw, pack=pack) for name in names}
    if not nested and draw.random() < 0.3:
        names.append("inner")
        sources["inner"] = a_mixture(draw, nested=True)
    weights = {name: draw.choice([0.1, 0.5, 1.0, draw.random() + 0.01]) for name in names}
    finite = draw.random() < 0.4
    return Mixture(
        sources,
        weights=weights,
        schedule=[]
        if nested
        else [(step, shares(draw, names)) for step in draw.sample(range(30), draw.randint(0, 3))],
        epochs={name: draw.choice([None, 1, 2, 5]) for name in names if finite and name != "inner"},
        when_exhausted=draw.choice(["stop", "continue"]),
        seed=draw.randrange(1_000),
        sequence_length=32 if pack else None,
        pack=pack,
    )


def shares(draw: random.Random, names: list[str]) -> dict[str, float]:
    chosen = draw.sample(names, draw.randint(1, min(2, len(names))))
    return {name: draw.choice([0.1, 0.25, 0.5]) for name in chosen}


def played(seed: int) -> None:
    draw = random.Random(seed)
    mixture = a_mixture(draw)
    batch = draw.randint(1, 70)
    worlds = [1, draw.randint(2, 8), draw.randint(9, 64)]
    last = batch * draw.randint(1, 30)
    options = {"global_batch_size": batch, "micro_batch_size": draw.choice([None, None, draw.randint(1, 9)])}
    fleet = MixedFleet(draw.choice(worlds), mixture, last=last, options=options)
    run = Run(fleet)
    board = Board(run="r", definition=mixture.definition, global_batch_size=batch)

    def meet() -> None:
        """All ranks look at the board and decide, each for itself."""
        nonlocal board
        outcomes = []
        for sampler in fleet.ranks:
            assert sampler.mixture is not None
            decided = decide(board.requests, sampler.mixture.plan, next_step=sampler.next_step)
            for change in decided.changes:
                sampler.change_weights(change)
            outcomes.append(decided.requests)
        assert all(each == outcomes[0] for each in outcomes)
        board = board.decided(outcomes[0])

    for _ in range(draw.randint(1, EVENTS)):
        event = draw.choice(
            ["train", "train", "save", "save", "snapshot", "resize", "crash", "damaged", "memory", "ask"]
        )
        world = draw.choice(worlds)
        if event == "train":
            fleet.train(draw.randint(1, 12))
        elif event == "save":
            run.save(confirmed=draw.random() < 0.7)
        elif event == "snapshot":
            run.save_in_memory()
        elif event == "resize":
            run.save()
            fleet.resize_alive(world)
        elif event == "ask" and fleet.ranks[0].epoch == 0:
            names = [source.name for source in mixture.definition.sources]
            board, _ = board.asked(
                shares(draw, names), max(0, fleet.ranks[0].next_step + draw.randint(-1, 5))
            )
            meet()
        elif event in ("crash", "damaged", "memory"):
            run.crash(world, back=draw.randint(1, 2) if event == "damaged" else 0, memory=event == "memory")
            if fleet.ranks[0].epoch == 0:
                meet()
    fleet.train(1_000)
    run.save()

    plan = MixturePlan(definition=mixture.definition, changes=board.adopted, global_batch_size=batch)
    end = min(plan.total, -(-last // batch) * batch)
    calm = ElasticSampler(mixture, global_batch_size=batch)
    for change in board.adopted:
        calm.change_weights(change)
    steps = islice(calm.batches(), -(-end // batch))
    alone = [each for _, ids in steps for each in ids]
    assert fleet.learned == alone
    leaf, epoch, sample = plan.choose(np.arange(end))
    assert fleet.learned == mixture.id_of(leaf, epoch, sample).tolist()

    report = audit(run.commits, fleet.dataset, 0)
    assert report.clean, report.reason
    assert report.samples == end
    seen = Counter(mixture.found(each)[0] for each in fleet.learned)
    reports = audit_by_source(run.commits)
    for each in reports:
        assert each.exact
        assert each.samples == seen[each.source]
        assert each.samples == each.epochs * each.size + each.begun
    check_measures(mixture, fleet.learned, reports)
    check_epochs(mixture, fleet.learned)


def check_epochs(mixture: Mixture, learned: list[int]) -> None:
    """0 lost, 0 repeated: of each epoch of each source every sample once, but for the one that is being read."""
    sizes = dict(zip(mixture.names, (leaf.size for leaf in mixture._plan.leaves), strict=True))
    epochs: dict[tuple[str, int], list[int]] = {}
    for each in learned:
        name, epoch, sample = mixture.found(each)
        epochs.setdefault((name, epoch), []).append(sample)
    for (name, epoch), samples in epochs.items():
        assert len(set(samples)) == len(samples)
        if (name, epoch + 1) in epochs:
            assert sorted(samples) == list(range(sizes[name]))


def check_measures(mixture: Mixture, learned: list[int], reports: list[Any]) -> None:
    for each, dataset in zip(reports, mixture._leaves, strict=True):
        if isinstance(dataset, PackedDocuments) and each.samples:
            mine = np.asarray([s for n, _, s in map(mixture.found, learned) if n == each.source])
            assert each.tokens == int(dataset.tokens_of(mine).sum())
            assert each.documents == int(dataset.documents_of(mine).sum())


@pytest.mark.parametrize("part", range(4))
def test_a_mixture_is_read_as_by_one_undisturbed_worker(part: int) -> None:
    for seed in range(part * QUICK // 4, (part + 1) * QUICK // 4):
        _played(seed)


@pytest.mark.slow
@pytest.mark.timeout(1_800)
@pytest.mark.parametrize("part", range(PARTS))
def test_thousands_of_schedules_change_nothing(part: int) -> None:
    for seed in range(QUICK + part * ALL // PARTS, QUICK + (part + 1) * ALL // PARTS):
        _played(seed)


def _played(seed: int) -> None:
    try:
        played(seed)
    except BaseException as error:
        error.add_note(f"schedule {seed}")
        raise


def test_what_is_dropped_or_split_belongs_to_its_position() -> None:
    """Batches differ in how many samples they have, never in their positions."""
    kept = filtered(range(30), lambda row: row % 3 == 0)
    assert [list(row) for row in kept.__getitems__([0, 1, 2, 3])] == [[0], [], [], [3]]
    twice = mapped(kept, lambda row: (row, -row))
    assert twice[3] == Several((3, -3))
    assert twice[4] == Several()


def test_a_record_with_a_mixture_survives_json() -> None:
    mixture = Mixture({"a": range(10), "b": range(5)}, weights={"a": 1, "b": 2})
    sampler = ElasticSampler(mixture, global_batch_size=4)
    sampler.change_weights(Change(step=3, weights={"a": 0.5}, number=1))
    record = DataCommit(states={"data": sampler.state_dict()}).to_json()
    state = DataCommit.from_json(json.loads(json.dumps(record))).states["data"]
    again = ElasticSampler(mixture, global_batch_size=4)
    again.load_state_dict(state)
    assert again.mixture is not None
    assert [change.number for change in again.mixture.plan.changes] == [1]
