"""Whatever becomes of the saves of a run, its records say exactly what the weights have seen.

The oracle counts how often each sample was trained, in a counter that travels with the weights and knows nothing of
ledgers. Two machines keep a chain each and hear of different outcomes at different times, as in a real job.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from strata.core.data.audit import Commit, audit, audit_all
from strata.core.data.ledger import DataCommit, LedgerChain, RankRecord
from strata.core.data.order import slice_for
from strata.core.data.spans import Spans

TOTAL = 12
Sample = tuple[int, int]
"""Epoch and position."""


@dataclass(frozen=True, kw_only=True)
class Weights:
    """What a checkpoint brings back: where training was, and what it had learned from."""

    epoch: int = 0
    position: int = 0
    seen: Counter[Sample] = field(default_factory=Counter)
    passed: tuple[str, ...] = ()
    """The checkpoints training went through."""


@dataclass(kw_only=True)
class Saved:
    name: str
    weights: Weights
    records: list[DataCommit]
    """Per machine, as its image in memory has it; the first machine's is the one that is published."""
    durable: bool
    parent: str | None
    durable_parent: str | None
    published: bool = False
    failed: bool = False


class Run:
    def __init__(self, *, dropped: int, with_parents: bool) -> None:
        self.end = TOTAL - dropped
        self.with_parents = with_parents
        self.saves: list[Saved] = []
        self.start(Weights(), world_size=2)

    def start(self, weights: Weights, *, world_size: int) -> None:
        self.world_size = world_size
        self.epoch, self.position = weights.epoch, weights.position
        self.seen, self.passed = Counter(weights.seen), weights.passed
        self.chains = [LedgerChain(), LedgerChain()]
        self.records: list[RankRecord] = []

    # --- training ---------------------------------------------------------------------------------------------

    def train(self, count: int) -> None:
        """One step of `count` samples at most, shared by all ranks."""
        if not count:
            return
        stop = min(self.position + count, self.end)
        self.note(self.position, stop)
        self.position = stop
        if stop == self.end:
            self.records.append(
                RankRecord(
                    dataset="d",
                    epoch=self.epoch,
                    total=TOTAL,
                    rank=0,
                    dropped=Spans([(self.end, TOTAL)]),
                    closed=True,
                )
            )
            self.epoch, self.position = self.epoch + 1, 0

    def note(self, start: int, stop: int) -> None:
        for rank in range(self.world_size):
            mine = slice_for(rank, self.world_size, start, stop - start)
            record = RankRecord(dataset="d", epoch=self.epoch, total=TOTAL, rank=rank)
            self.records.append(record.with_span(mine.start, mine.stop))
        self.seen.update((self.epoch, position) for position in range(start, stop))

    def repeat(self, count: int) -> None:
        """A bug: the newest samples of the epoch once more."""
        self.note(max(0, self.position - count), self.position)

    def lose(self, count: int) -> None:
        """A bug: samples that nobody trains."""
        self.position = min(self.position + count, self.end - 1)

    # --- saving -----------------------------------------------------------------------------------------------

    def save(self, *, durable: bool) -> Saved:
        name = f"c{len(self.saves)}"
        made = [
            chain.commit(self.records, name, durable=durable, world_size=self.world_size)
            for chain in self.chains
        ]
        self.records = []
        known = {save.name: save for save in self.saves}
        saved = Saved(
            name=name,
            weights=Weights(
                epoch=self.epoch,
                position=self.position,
                seen=Counter(self.seen),
                passed=(*self.passed, name),
            ),
            records=[DataCommit.from_json(json.loads(json.dumps(record.to_json()))) for record in made],
            durable=durable,
            parent=self.passed[-1] if self.passed else None,
            durable_parent=next((p for p in reversed(self.passed) if known[p].durable), None),
        )
        self.passed = saved.weights.passed
        self.saves.append(saved)
        return saved

    def pick(self, which: int, *, published: bool) -> Saved | None:
        found = [s for s in self.saves if s.durable and not s.failed and s.published == published]
        return found[-1 - which % len(found)] if found else None

    def publish(self, which: int) -> None:
        """Its upload has ended; who knows of it is another question. It may be that of a process that has died."""
        if saved := self.pick(which, published=False):
            saved.published = True

    def fail(self, which: int) -> None:
        if saved := self.pick(which, published=False):
            saved.failed = True
            for chain in self.chains:
                chain.fail(saved.name)

    def confirm(self, which: int, machines: int) -> None:
        if saved := self.pick(which, published=True):
            for machine, chain in enumerate(self.chains):
                if machines >> machine & 1:
                    chain.confirm(saved.name)

    def restart(self, which: int, world_size: int) -> None:
        """From a checkpoint in the store, the newest or one before it."""
        saved = self.pick(which, published=True)
        self.start(saved.weights if saved else Weights(), world_size=world_size)
        if saved:
            for chain in self.chains:
                chain.restore(saved.records[0], checkpoint_id=saved.name)

    def restart_from_memory(self, which: int, machine: int, world_size: int) -> None:
        """From an image of one machine: of a snapshot, or of a save of which nobody knows whether it got through."""
        if not self.saves:
            return
        saved = self.saves[-1 - which % min(3, len(self.saves))]
        self.start(saved.weights, world_size=world_size)
        for chain in self.chains:
            chain.restore(saved.records[machine], checkpoint_id=saved.name, durable=False)

    # --- the end ----------------------------------------------------------------------------------------------

    def history(self) -> list[Commit]:
        return [
            Commit(
                checkpoint_id=save.name,
                parent_id=save.durable_parent if self.with_parents else None,
                trained_from=save.parent if self.with_parents else None,
                step=0,
                data=save.records[0],
            )
            for save in self.saves
            if save.published
        ]


few = st.integers(0, 3)
events = st.one_of(
    st.tuples(st.sampled_from(["save", "save", "snapshot", "train"]), st.integers(0, 7)),
    st.tuples(st.sampled_from(["save", "save", "snapshot"]), st.integers(0, 7)),
    st.tuples(st.sampled_from(["publish", "fail", "restart"]), few),
    st.tuples(st.sampled_from(["confirm", "publish and confirm"]), few, few),
    st.tuples(st.just("memory"), few, st.integers(0, 1)),
    st.tuples(st.just("resize"), st.integers(1, 5)),
)
faults = st.tuples(st.sampled_from(["repeat", "lose"]), st.integers(1, 4))


def play(run: Run, schedule: Sequence[tuple[str, int] | tuple[str, int, int]]) -> None:
    for event, value, *more in schedule:
        match event:
            case "train":
                run.train(value)
            case "save" | "snapshot":
                run.train(value)
                run.save(durable=event == "save")
            case "publish":
                run.publish(value)
            case "fail":
                run.fail(value)
            case "confirm":
                run.confirm(value, more[0])
            case "publish and confirm":
                run.publish(value)
                run.confirm(0, more[0])
            case "restart":
                run.restart(value, run.world_size)
            case "memory":
                run.restart_from_memory(value, more[0], run.world_size)
            case "resize":
                run.world_size = value
            case "repeat":
                run.repeat(value)
            case "lose":
                run.lose(value)


def check(run: Run, commits: list[Commit]) -> None:
    """Every report says what the counter says, no less and no more."""
    seen = run.saves[-1].weights.seen
    assert {e for e, _ in seen} <= {r.epoch for r in audit_all(commits, "d")}
    for report in audit_all(commits, "d"):
        times = [seen[report.epoch, position] for position in range(TOTAL)]
        at = {
            what: Spans([(p, p + 1) for p, count in enumerate(times) if is_so(count)])
            for what, is_so in (
                ("trained", lambda count: count > 0),
                ("missing", lambda count: count == 0),
                ("repeated", lambda count: count > 1),
            )
        }
        closed = report.epoch < run.saves[-1].weights.epoch
        dropped = Spans([(run.end, TOTAL)]) if closed else Spans()
        assert report.problems == ()
        assert report.samples == at["trained"].size
        assert report.repeated == at["repeated"]
        assert report.dropped == dropped
        assert report.lost == (at["missing"] - dropped if closed else Spans())
        assert report.remaining == (Spans() if closed else at["missing"])
        assert report.exact == (closed and times[: run.end] == [1] * run.end)


@settings(max_examples=4 * settings().max_examples)
@given(
    schedule=st.lists(events, min_size=8, max_size=40),
    fault=st.one_of(st.none(), st.tuples(st.integers(0, 40), faults)),
    dropped=st.sampled_from([0, 0, 2]),
    with_parents=st.booleans(),
    last_step=st.integers(0, TOTAL),
    kept=st.integers(1, 10),
)
def test_the_audit_of_any_history_says_what_the_weights_have_seen(
    schedule: list[tuple[str, int]],
    fault: tuple[int, tuple[str, int]] | None,
    dropped: int,
    with_parents: bool,
    last_step: int,
    kept: int,
) -> None:
    run = Run(dropped=dropped, with_parents=with_parents)
    if fault is not None:
        schedule = [*schedule[: fault[0]], fault[1], *schedule[fault[0] :]]
    play(run, schedule)
    run.train(last_step)
    run.save(durable=True).published = True
    commits = run.history()
    if not run.seen:
        return
    check(run, commits)
    check(run, commits[-kept:])  # After retention as well.
    rolled_back = [c.checkpoint_id for c in commits if c.checkpoint_id not in run.passed]
    assert list(audit(commits, "d", 0).abandoned) == rolled_back


def test_a_failed_save_of_one_machine_does_not_touch_what_another_has_published() -> None:
    """A snapshot that fails on a machine says nothing of the durable save before it."""
    run = Run(dropped=0, with_parents=True)
    play(run, [("save", 5), ("publish", 0), ("confirm", 0, 1), ("snapshot", 3)])
    run.chains[1].fail("c1")
    play(run, [("save", 2), ("publish", 0), ("memory", 0, 1), ("train", 9)])
    run.save(durable=True).published = True
    check(run, run.history())
