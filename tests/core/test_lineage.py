"""What training falls back to, and that retention keeps what a recovery could need, whatever the history looks like."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from strata.checkpoint.catalog.manifest import BYTES, CheckpointId, Manifest
from strata.core.jobs.lineage import CompletionOrder, fallback_order, removable


def checkpoint(
    sequence: int,
    *,
    step: int | None = None,
    parent: int | None = None,
    generation: int = 0,
    created_at: float = 0.0,
) -> Manifest:
    return Manifest(
        checkpoint_id=CheckpointId(f"c{sequence}"),
        step=sequence * 10 if step is None else step,
        epoch=0,
        created_at=created_at,
        format=BYTES,
        parts=(),
        generation=generation,
        sequence=sequence,
        parent=CheckpointId(f"c{parent}") if parent is not None else None,
    )


def straight(count: int) -> list[Manifest]:
    return [checkpoint(n, parent=n - 1 if n > 1 else None) for n in range(1, count + 1)]


def names(manifests: list[Manifest]) -> list[str]:
    return [manifest.checkpoint_id for manifest in manifests]


def removed(manifests: list[Manifest], **options: object) -> list[str]:
    return [manifest.checkpoint_id for manifest in removable(manifests, **options)]  # type: ignore[arg-type]


def test_the_newest_few_of_a_straight_history_stay() -> None:
    assert removed(straight(5), keep_count=2) == ["c1", "c2", "c3"]
    assert removed(straight(2), keep_count=2) == []


def test_after_going_back_the_line_counts_and_not_the_step() -> None:
    # Steps 10 to 50, back to 20, then 30, 40 and 50 again.
    history = [*straight(5), checkpoint(6, step=30, parent=2), checkpoint(7, step=40, parent=6)]
    assert names(fallback_order(history)) == ["c7", "c6", "c2", "c1", "c5", "c4", "c3"]
    assert removed(history, keep_count=3) == ["c1"]  # c2 is what a recovery would fall back to, not c5.
    history += [checkpoint(8, step=50, parent=7)]
    assert removed(history, keep_count=3) == [
        "c1",
        "c2",
        "c3",
        "c4",
        "c5",
    ]  # The line has grown past what was left.


def test_two_writers_at_once_do_not_remove_what_the_other_has_just_saved() -> None:
    ours = [checkpoint(n, parent=n - 2) for n in range(1, 20, 2)]
    theirs = [checkpoint(n, parent=n - 2) for n in range(2, 20, 2)]
    left = {*names(ours), *names(theirs)} - set(removed([*ours, *theirs], keep_count=4))
    assert left >= {"c19", "c17", "c15", "c13", "c18", "c16", "c14"}


def test_what_is_read_or_written_stays() -> None:
    assert removed(straight(5), keep_count=1, in_use={CheckpointId("c2")}) == ["c1", "c3", "c4"]
    assert removed(straight(5), keep_count=1, in_use={CheckpointId("c5")}) == ["c1", "c2", "c3", "c4"]


def test_damaged_ones_do_not_count_as_kept() -> None:
    damaged = {CheckpointId("c5"), CheckpointId("c4")}
    assert removed(straight(5), keep_count=2, damaged=damaged) == ["c1"]


def test_when_all_are_damaged_none_is_given_up() -> None:
    history = straight(3)
    assert removed(history, keep_count=1, damaged={manifest.checkpoint_id for manifest in history}) == []


def test_a_parent_that_is_not_there_is_passed_over() -> None:
    history = [checkpoint(1), checkpoint(2, parent=1), checkpoint(5, parent=4)]
    assert names(fallback_order(history)) == ["c5", "c2", "c1"]


def test_a_parent_in_memory_leads_on_to_its_durable_one() -> None:
    # Back from c3 to c1; then c4 in memory only, which a store does not have, and c5.
    history = [*straight(3), replace(checkpoint(5, parent=4), durable_parent=CheckpointId("c1"))]
    assert names(fallback_order(history)) == ["c5", "c1", "c3", "c2"]
    assert removed([*history, checkpoint(6, parent=5)], keep_count=2) == ["c1", "c2", "c3"]


def test_neither_clock_nor_step_decides_what_is_newer() -> None:
    early = checkpoint(1, step=900, created_at=2_000_000.0)
    late = checkpoint(2, step=100, parent=1, created_at=1_000_000.0)
    assert names(fallback_order([early, late])) == ["c2", "c1"]


def test_a_writer_of_an_older_generation_is_not_newest_however_long_it_continues() -> None:
    zombie = [checkpoint(n, parent=n - 1, generation=3) for n in range(5, 9)]
    successor = checkpoint(4, generation=4)
    assert fallback_order([*zombie, successor])[0] is successor


@st.composite
def histories(draw: st.DrawFn) -> list[Manifest]:
    """Any history: parents may be any earlier one, missing, or nonsense."""
    count = draw(st.integers(1, 12))
    made = []
    for sequence in range(1, count + 1):
        parent = draw(st.one_of(st.none(), st.integers(0, count + 2)))
        generation = draw(st.integers(0, 2))
        made.append(checkpoint(sequence, parent=parent, generation=generation))
    kept = draw(st.sets(st.sampled_from(range(count)), min_size=1))
    return [made[n] for n in sorted(kept)]


@given(
    history=histories(),
    keep_count=st.integers(1, 5),
    in_use=st.sets(st.integers(1, 12)),
    damaged=st.sets(st.integers(1, 12)),
)
def test_what_a_recovery_could_need_is_never_removed(
    history: list[Manifest], keep_count: int, in_use: set[int], damaged: set[int]
) -> None:
    used = {CheckpointId(f"c{n}") for n in in_use}
    broken = {CheckpointId(f"c{n}") for n in damaged}
    gone = set(removed(history, keep_count=keep_count, in_use=used, damaged=broken))
    assert not gone & used
    good = [manifest for manifest in history if manifest.checkpoint_id not in broken]
    if not good:
        assert not gone
        return
    newest = max(good, key=lambda manifest: manifest.order)
    assert newest.checkpoint_id not in gone
    # The first `keep_count` a recovery would try are all there.
    assert not gone & {manifest.checkpoint_id for manifest in fallback_order(good)[:keep_count]}
    # Once removed, nothing more has to go.
    assert (
        removed(
            [m for m in history if m.checkpoint_id not in gone],
            keep_count=keep_count,
            in_use=used,
            damaged=broken,
        )
        == []
    )


@given(count=st.integers(1, 30), keep_count=st.integers(1, 30))
def test_a_straight_history_keeps_exactly_the_newest(count: int, keep_count: int) -> None:
    assert (
        removed(straight(count), keep_count=keep_count)
        == names(straight(count))[: max(0, count - keep_count)]
    )


@given(history=histories())
def test_every_checkpoint_is_in_the_order_exactly_once_and_newest_first_on_its_fallback_order(
    history: list[Manifest],
) -> None:
    ordered = fallback_order(history)
    assert sorted(names(ordered)) == sorted(names(history))
    assert ordered[0] == max(history, key=lambda manifest: manifest.order)


@given(steps=st.lists(st.integers(1, 40), unique=True, max_size=20))
def test_whatever_ends_last_has_its_place_among_the_saves_of_its_generation(steps: list[int]) -> None:
    order, timeline = CompletionOrder(), list[int]()
    for step in steps:
        newer = order.completed(CheckpointId(f"c{step}"), step)
        at = len(timeline) if newer is None else timeline.index(int(newer[1:]))
        timeline.insert(at, step)
    assert timeline == sorted(steps)


def test_what_is_removed_succeeds_nothing() -> None:
    order = CompletionOrder()
    order.completed(CheckpointId("c2"), 2)
    order.removed(CheckpointId("c2"))
    assert order.completed(CheckpointId("c1"), 1) is None
