"""Loops that are left, started again, or commit late: what was not committed is read again, and nothing else."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest

from strata.core.data.audit import Commit, audit_all
from strata.core.data.ledger import DataCommit
from strata.data.errors import StateMismatch
from strata.data.loading.commits import DataLedger
from strata.data.loading.loader import ElasticLoader
from strata.data.loading.sampler import ElasticSampler
from strata.data.loading.steps import Batch
from tests.data.test_loader import TOTAL, Numbers, calm, flat, kinds, make_loader, sampler

micro = pytest.mark.parametrize("micro_batch_size", [None, 4])
workers = pytest.mark.parametrize(
    "options",
    [{}, {"num_workers": 2, "prefetch_factor": 4}, {"num_workers": 2, "persistent_workers": True}],
    ids=["in-process", "prefetching", "persistent"],
)


def explicit(kind: str, micro_batch_size: int | None, options: dict[str, Any]) -> ElasticLoader:
    return make_loader(kind, sampler(micro_batch_size=micro_batch_size), commit="explicit", **options)


def steps(loader: ElasticLoader, count: int) -> list[Batch]:
    """The batches of the next `count` steps, of a loop that is then left."""
    taken: list[Batch] = []
    for batch in loader:
        taken.append(batch)
        count -= batch.step.ends_step
        if not count:
            break
    return taken


def train(loader: ElasticLoader, *, failing_at: int = -1) -> None:
    for count, batch in enumerate(loader):
        if count == failing_at:
            raise ZeroDivisionError
        loader.commit(batch)


@kinds
@workers
@micro
def test_what_was_not_committed_when_a_loop_was_left_is_read_again(
    kind: str, options: dict[str, Any], micro_batch_size: int | None
) -> None:
    loader = explicit(kind, micro_batch_size, options)
    loader.commit(*steps(loader, 2))
    assert loader.position == 20
    assert flat(steps(loader, 3)) == calm()[20:50]  # Evaluated, say, and not trained.
    assert loader.position == 20

    with pytest.raises(ZeroDivisionError):
        train(loader, failing_at=4)
    trained = (
        60 if micro_batch_size is None else 30
    )  # Three micro-batches make a step; a part of one does not count.
    assert loader.position == trained
    assert flat(list(loader)) == calm()[trained:]


@kinds
@workers
@micro
def test_gradients_accumulated_over_several_batches_are_committed_together(
    kind: str, options: dict[str, Any], micro_batch_size: int | None
) -> None:
    """Four steps' worth at a time, which do not divide an epoch of eleven: the group at its end crosses into the next."""
    loader = explicit(kind, micro_batch_size, options)
    ledger = DataLedger(loader, gather=lambda mine: [mine])
    trained: list[int] = []
    pending: list[Batch] = []
    ended = 0
    while loader.epoch < 3:
        for batch in loader:
            pending.append(batch)
            ended += batch.step.ends_step
            if ended == 4:
                loader.commit(*pending)
                trained += flat(pending)
                pending, ended = [], 0
    # After 33 steps, three epochs, one still waited for its commit: it came with the fourth epoch's first three.
    assert trained == calm(0) + calm(1) + calm(2) + calm(3)
    assert (loader.epoch, loader.position) == (4, 0)
    record = DataCommit.from_json(ledger.commit())
    reports = audit_all([Commit(checkpoint_id="c", parent_id=None, step=0, data=record)], "data")
    assert [r.exact for r in reports] == [True] * 4


@kinds
@workers
@micro
def test_a_loop_left_in_the_next_epoch_goes_back_to_what_was_committed_in_the_one_before(
    kind: str, options: dict[str, Any], micro_batch_size: int | None
) -> None:
    loader = explicit(kind, micro_batch_size, options)
    everything = list(loader)
    steps_of = [b for b in everything if b.step.batch_start < 80]
    loader.commit(*steps_of)
    assert (loader.epoch, loader.position) == (0, 80)
    assert (
        flat(steps(loader, 2)) == calm(1)[:20]
    )  # The epoch was read to its end: the loop continues with the next.
    assert flat(list(loader)) == calm(0)[80:]  # That loop was left: what waits for its commit is read again.


@kinds
@workers
def test_a_crash_resumes_at_the_committed_position_however_much_was_taken(
    kind: str, options: dict[str, Any]
) -> None:
    loader = explicit(kind, None, options)
    first = list(loader)
    loader.commit(*first[:9])
    list(islice(loader, 3))
    again = explicit(kind, None, options)
    again.load_state_dict(loader.state_dict())
    assert flat(list(again)) == calm(0)[90:]
    assert flat(list(islice(again, 1))) == calm(1)[:10]


@kinds
def test_batches_are_committed_once_and_in_order(kind: str) -> None:
    loader = explicit(kind, None, {})
    first, second, third = islice(loader, 3)
    with pytest.raises(StateMismatch, match="out of order"):
        loader.commit(second)
    loader.commit(first, second)
    with pytest.raises(StateMismatch, match="out of order"):
        loader.commit(second)
    loader.set_world(0, 2)  # The third was another slice.
    with pytest.raises(StateMismatch, match="out of order"):
        loader.commit(third)


@kinds
@pytest.mark.parametrize("persistent", [False, True])
def test_an_iteration_ends_with_an_error_once_another_has_started(kind: str, persistent: bool) -> None:
    options = {"num_workers": 1, "persistent_workers": True} if persistent else {}
    loader = explicit(kind, None, options)
    older = iter(loader)
    loader.commit(next(older))
    newer = iter(loader)
    assert flat([next(newer)]) == calm()[10:20]
    with pytest.raises(StateMismatch, match="Another iteration"):
        next(older)
    assert flat(list(newer)) == calm()[20:]


@kinds
def test_set_epoch_keeps_an_epoch_that_is_read_next_and_goes_back_when_asked(kind: str) -> None:
    loader = explicit(kind, None, {})
    taken = list(loader)
    loader.commit(*taken[:-1])
    loader.set_epoch(1)  # As the loop over epochs does; the last batch still waits for its commit.
    following = list(islice(loader, 1))
    loader.commit(taken[-1], *following)
    assert (loader.epoch, loader.position) == (1, 10)
    loader.commit(*list(loader)[:-1])
    loader.set_epoch(1)  # Once more from where it is committed.
    assert flat(list(loader)) == calm(1)[100:]


class Breaking(Numbers):
    """Fails at one sample until it is repaired, in whichever process reads it."""

    def __getitem__(self, index: int) -> int:
        if index == calm()[37] and self.total == TOTAL:
            raise ValueError("cannot decode")
        return index


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_error_while_reading_leaves_what_was_committed(num_workers: int) -> None:
    loader = ElasticLoader(Breaking(), sampler(), commit="explicit", num_workers=num_workers)
    with pytest.raises(ValueError, match="cannot decode"):
        train(loader)
    assert loader.position == 30
    with pytest.raises(ValueError, match="cannot decode"):
        next(iter(loader))


# --- clear errors before the first step ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("total", "options", "reason"),
    [
        (7, {"global_batch_size": 8, "drop_last": True}, "7 samples, less than one global batch of 8"),
        (7, {"batch_size": 4, "world_size": 2, "drop_last": True}, "less than one global batch of 8"),
        (0, {"global_batch_size": 8}, "'data' has no samples"),
        (0, {"global_batch_size": 8, "drop_last": True}, "'data' has no samples"),
    ],
)
def test_data_that_never_gives_a_step_is_refused(total: int, options: dict[str, Any], reason: str) -> None:
    chosen = ElasticSampler(total, **options)
    with pytest.raises(ValueError, match=reason):
        chosen.check_trainable()
    with pytest.raises(ValueError, match=reason):
        ElasticLoader(Numbers(total), chosen).check_trainable()


def test_data_that_gives_a_step_is_not_refused() -> None:
    ElasticSampler(7, global_batch_size=8).check_trainable()
    nearly_done = ElasticSampler(12, global_batch_size=8, drop_last=True)
    nearly_done.move(0, 8)  # Nothing left of this epoch, but the next one has a step.
    nearly_done.check_trainable()


def ledger_for(*names: str) -> DataLedger:
    loaders = [ElasticLoader(Numbers(), sampler(dataset=name)) for name in names]
    return DataLedger(*loaders, gather=lambda mine: [mine])


def test_a_renamed_dataset_is_refused_with_both_names() -> None:
    old = ElasticLoader(Numbers(), sampler(dataset="images"))
    list(islice(old, 3))
    saved = DataLedger(old, gather=lambda mine: [mine]).commit()
    with pytest.raises(
        StateMismatch, match="trained on 'images'; it has no position in 'pictures'"
    ) as refused:
        ledger_for("pictures").restore(saved)
    assert "dataset='images'" in str(refused.value)


def test_a_dataset_that_is_new_beside_the_known_ones_begins_at_its_beginning() -> None:
    old = ElasticLoader(Numbers(), sampler(dataset="images"))
    list(islice(old, 3))
    saved = DataLedger(old, gather=lambda mine: [mine]).commit()
    images, texts = (ElasticLoader(Numbers(), sampler(dataset=name)) for name in ("images", "texts"))
    DataLedger(images, texts, gather=lambda mine: [mine]).restore(saved)
    assert (images.position, texts.position) == (30, 0)


def test_loaders_with_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="several loaders read a dataset named 'images'"):
        ledger_for("images", "texts", "images")
