"""Training order: every sequence exactly once, in one order, whatever the fleet does."""

from __future__ import annotations

import multiprocessing
import pickle
import random
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.core.data.audit import Commit, audit
from strata.core.data.ledger import DataCommit
from strata.core.data.order import EpochOrder
from strata.data.errors import StateMismatch
from strata.data.loading.commits import DataLedger
from strata.data.loading.steps import StepPlan
from strata.data.tokens.dataset import TokenDataset, TokenLoader
from strata.data.tokens.format import IndexHeader
from strata.data.tokens.index import TokenIndex
from strata.data.tokens.sequences import BLANK, IGNORED_LABEL, DatasetState, SequenceReader, sequence_numbers
from tests.data.tokens.corpora import build, texts, write_jsonl


class Numbers:
    def encode(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]


@pytest.fixture(scope="module")
def numbered(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TokenIndex]:
    """Token i of this index is i: a sequence tells where it stands."""
    folder = tmp_path_factory.mktemp("numbered")
    lines = [" ".join(map(str, range(at, min(at + 9, 1003)))) for at in range(0, 1003, 9)]
    path = build(folder / "n.index", [write_jsonl(folder / "n.jsonl", lines)], tokenizer=Numbers()).path
    with TokenIndex(path) as index:
        yield index


@pytest.fixture
def index(tmp_path: Path) -> Iterator[TokenIndex]:
    with TokenIndex(
        build(tmp_path / "x.index", [write_jsonl(tmp_path / "a.jsonl", texts(40))]).path
    ) as index:
        yield index


def firsts(batches: Iterable[Mapping[str, Any]]) -> list[int]:
    """The first input token of each sequence, over all batches."""
    return [int(row[0]) for batch in batches for row in torch.atleast_2d(batch["input_ids"])]


def undisturbed(index: TokenIndex, seq_length: int, *, seed: int = 0, epoch: int = 0) -> list[int]:
    count = SequenceReader(index, seq_length).count
    order = EpochOrder(total=count, seed=seed, epoch=epoch)
    return [int(number) * seq_length for number in order[0:count]]


# One sequence --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seq_length", [1, 7, 10, 1001, 1002, 5000])
def test_every_token_but_the_first_is_a_label_once(numbered: TokenIndex, seq_length: int) -> None:
    reader = SequenceReader(numbered, seq_length)
    inputs, labels = reader.read(np.arange(reader.count))
    assert inputs.shape == labels.shape == (reader.count, seq_length)
    assert inputs.dtype == labels.dtype == np.int64
    real = labels != IGNORED_LABEL
    assert labels[real].tolist() == list(range(1, 1003))
    assert (inputs[real] + 1 == labels[real]).all()
    assert reader.full == int(real.all(axis=1).sum())


def test_index_of_one_token_has_no_sequence(tmp_path: Path) -> None:
    path = build(tmp_path / "x.index", [write_jsonl(tmp_path / "a.jsonl", ["a"])]).path
    with TokenIndex(path) as index:
        assert list(TokenDataset(index, seq_length=4)) == []
        assert list(TokenLoader(TokenDataset(index, seq_length=4), 2)) == []


# Exactly once, in one order -------------------------------------------------------------------------------


class Fleet:
    """Ranks stepping together over real loaders, as training does; a checkpoint is rank 0's state."""

    def __init__(self, index: TokenIndex, seq_length: int, *, drop_last: bool = False) -> None:
        self.index = index
        self.settings: dict[str, Any] = {"seq_length": seq_length, "seed": 5, "drop_last": drop_last}
        self.history: list[int] = []
        """What each step trained, rank after rank; cut back when training goes back."""
        self.commits: list[Commit] = []
        self.committed = 0
        self.start(1, None)

    def start(self, world: int, state: Mapping[str, Any] | None) -> None:
        self.ranks = [
            TokenDataset(self.index, rank=rank, world_size=world, **self.settings) for rank in range(world)
        ]
        if state is not None:
            for rank in self.ranks:
                rank.load_state_dict(state)

    def train(self, batch_size: int, steps: int, *, fill_last: bool = False) -> None:
        iterators = [
            iter(TokenLoader(rank, batch_size, fill_last=fill_last)) if rank.epoch == 0 else iter([])
            for rank in self.ranks
        ]
        for _ in range(steps):
            batches = [next(iterator, None) for iterator in iterators]
            if not any(batches):
                break
            for batch in batches:
                if batch is not None:
                    real = [
                        row for row in range(len(batch["labels"])) if batch["labels"][row, 0] != IGNORED_LABEL
                    ]
                    self.history += batch["input_ids"][real, 0].tolist()
            if fill_last:
                assert (
                    len({None if batch is None else tuple(batch["labels"].shape) for batch in batches}) == 1
                )

    def save(self) -> dict[str, Any]:
        records = [record for rank in self.ranks for record in rank.records()]
        last = self.commits[-1] if self.commits else None
        data = (last.data if last and last.data else DataCommit()).next(records, world_size=len(self.ranks))
        parent_id = last.checkpoint_id if last else None
        number = len(self.commits)
        self.commits.append(Commit(checkpoint_id=f"c{number}", parent_id=parent_id, step=number, data=data))
        self.committed = len(self.history)
        states = [rank.state_dict() for rank in self.ranks]
        assert all(state == states[0] for state in states)  # whoever writes the checkpoint writes the same
        return states[0]

    def roll_back(self) -> None:
        del self.history[self.committed :]

    @property
    def done(self) -> bool:
        return self.ranks[0].epoch == 1


phase = st.tuples(st.integers(1, 64), st.integers(1, 9), st.integers(0, 12), st.booleans(), st.booleans())


@settings(max_examples=40, deadline=None)
@given(st.lists(phase, max_size=8), st.sampled_from([3, 7, 10, 50]))
def test_resizes_and_rollbacks_lose_nothing_and_repeat_nothing(
    numbered: TokenIndex, phases: list[Any], seq_length: int
) -> None:
    fleet = Fleet(numbered, seq_length)
    state = fleet.save()
    for world, batch_size, steps, crash, fill_last in phases:
        fleet.start(world, state)
        fleet.train(batch_size, steps, fill_last=fill_last)
        if crash:
            fleet.roll_back()
        else:
            state = fleet.save()
    fleet.start(5, state)
    fleet.train(3, 10_000)
    fleet.save()
    assert fleet.done
    assert fleet.history == undisturbed(numbered, seq_length, seed=5)
    report = audit(fleet.commits, "n", 0)
    assert report.exact, report.reason


@settings(max_examples=30, deadline=None)
@given(st.lists(phase, max_size=5), st.integers(1, 7), st.integers(1, 5))
def test_drop_last_leaves_out_less_than_one_global_batch(
    numbered: TokenIndex, phases: list[Any], world: int, batch_size: int
) -> None:
    fleet = Fleet(numbered, 10, drop_last=True)
    state = fleet.save()
    for each_world, each_batch_size, steps, _, _ in phases:
        fleet.start(each_world, state)
        fleet.train(each_batch_size, min(steps, 3))
        state = fleet.save()
    fleet.start(world, state)
    fleet.train(batch_size, 10_000)
    full = numbered.total_tokens // 10
    order = (EpochOrder(total=full, seed=5, epoch=0)[0:full] * 10).tolist()
    assert fleet.history == order[: len(fleet.history)]
    largest = max([world * batch_size, *(phase[0] * phase[1] for phase in phases)])
    assert full - len(fleet.history) < largest


@settings(max_examples=60)
@given(
    st.integers(0, 300),
    st.integers(0, 300),
    st.integers(1, 70),
    st.integers(1, 9),
    st.booleans(),
    st.booleans(),
)
def test_ranks_share_each_global_batch_between_them(
    total: int, start: int, world: int, batch_size: int, drop_last: bool, fill_last: bool
) -> None:
    start = min(start, total)
    order = EpochOrder(total=total, shuffle=False)
    plans = [
        StepPlan(
            epoch=0,
            total=total,
            start=start,
            global_batch_size=batch_size * world,
            rank=rank,
            world_size=world,
            drop_last=drop_last,
        )
        for rank in range(world)
    ]
    batches = [dict(sequence_numbers(plan, order, fill_last=fill_last)) for plan in plans]
    shapes = [[len(numbers) for numbers in each.values()] for each in batches]
    seen = sorted((step.start, numbers.tolist()) for each in batches for step, numbers in each.items())
    real = [number for _, numbers in seen for number in numbers if number != BLANK]
    assert real == list(range(start, plans[0].end))
    if fill_last:
        assert all(shape == shapes[0] for shape in shapes)
        assert {size for shape in shapes for size in shape} <= {batch_size}
    else:
        assert all(size for shape in shapes for size in shape)  # nobody is given an empty batch


def test_fewer_sequences_than_workers_still_come_once(numbered: TokenIndex) -> None:
    ranks = [TokenDataset(numbered, seq_length=500, rank=rank, world_size=8) for rank in range(8)]
    seen = [firsts(TokenLoader(rank, 4)) for rank in ranks]
    assert sorted(first for each in seen for first in each) == [0, 500, 1000]
    assert all((rank.epoch, rank.position, rank.num_sequences) == (1, 0, 3) for rank in ranks)


# Epochs ---------------------------------------------------------------------------------------------------


def test_epochs_differ_and_follow_each_other(numbered: TokenIndex) -> None:
    dataset = TokenDataset(numbered, seq_length=10)
    loader = TokenLoader(dataset, 4)
    for epoch in range(3):
        assert len(loader) == 26
        assert firsts(loader) == undisturbed(numbered, 10, epoch=epoch)
        assert (dataset.state_dict()["epoch"], dataset.state_dict()["total_tokens_processed"]) == (
            epoch + 1,
            0,
        )
    assert undisturbed(numbered, 10, epoch=0) != undisturbed(numbered, 10, epoch=1)


def test_set_epoch_starts_it_but_keeps_a_position_loaded_in_it(numbered: TokenIndex) -> None:
    dataset = TokenDataset(numbered, seq_length=10)
    dataset.set_epoch(3)
    iterator = iter(dataset)
    for _ in range(4):
        next(iterator)
    saved = dataset.state_dict()
    again = TokenDataset(numbered, seq_length=10)
    again.load_state_dict(saved)
    again.set_epoch(3)
    assert firsts(again) == undisturbed(numbered, 10, epoch=3)[4:]
    again.set_epoch(3)  # once more, on purpose
    assert firsts(again) == undisturbed(numbered, 10, epoch=3)


def test_last_batch_of_an_epoch_leads_to_the_next(numbered: TokenIndex) -> None:
    dataset = TokenDataset(numbered, seq_length=10)
    iterator = iter(TokenLoader(dataset, 4))
    for _ in range(len(TokenLoader(dataset, 4))):
        next(iterator)
    resumed = TokenDataset(numbered, seq_length=10)
    resumed.load_state_dict(dataset.state_dict())  # saved before the loop noticed that the epoch is over
    assert resumed.epoch == 1
    assert firsts(TokenLoader(resumed, 4)) == undisturbed(numbered, 10, epoch=1)


def test_unshuffled_order_is_the_order_of_the_files(numbered: TokenIndex) -> None:
    assert firsts(TokenDataset(numbered, seq_length=100, shuffle=False)) == list(range(0, 1003, 100))


# State ----------------------------------------------------------------------------------------------------


def test_state_is_plain_and_tells_where_the_next_sequence_comes_from(index: TokenIndex) -> None:
    dataset = TokenDataset(index, seq_length=16, rank=1, world_size=3)
    next(iter(TokenLoader(dataset, 2)))
    state = dataset.state_dict()
    assert torch.load(_saved(index.path.parent / "s.pt", state), weights_only=True) == state
    assert (state["total_tokens_processed"], state["world_size"], state["epoch"]) == (6 * 16, 3, 0)
    (number,) = EpochOrder(total=dataset.num_sequences).take(6).tolist()
    expected = index.find_position(number * 16)
    assert (state["current_file_index"], state["current_byte_offset"]) == expected[:2]


def _saved(path: Path, state: object) -> Path:
    torch.save(state, path)
    return path


@pytest.mark.parametrize("change", [{"seq_length": 8}, {"seed": 1}, {"shuffle": False}])
def test_position_in_another_order_is_refused(index: TokenIndex, change: dict[str, Any]) -> None:
    state = TokenDataset(index, seq_length=16).state_dict()
    other = TokenDataset(index, **{"seq_length": 16, **change})
    before = other.state_dict()
    with pytest.raises(StateMismatch, match=next(iter(change))):
        other.load_state_dict(state)
    assert other.state_dict() == before


def test_position_in_another_index_is_refused(index: TokenIndex, numbered: TokenIndex) -> None:
    with pytest.raises(StateMismatch, match="index"):
        TokenDataset(numbered, seq_length=16).load_state_dict(TokenDataset(index, seq_length=16).state_dict())


def test_bare_position_is_enough(numbered: TokenIndex) -> None:
    dataset = TokenDataset(numbered, seq_length=10)
    dataset.load_state_dict({"total_tokens_processed": 50, "world_size": 4})
    assert firsts(dataset) == undisturbed(numbered, 10)[5:]
    dataset.load_state_dict({"total_tokens_processed": 10**9, "world_size": 4, "epoch": 2})
    assert (firsts(dataset), dataset.epoch) == ([], 3)  # there was nothing left of epoch 2
    with pytest.raises(ValueError, match="negative"):
        dataset.load_state_dict({"total_tokens_processed": -1})


def test_dataset_state_survives_its_dict() -> None:
    state = DatasetState(
        total_tokens_processed=12,
        current_file_index=2,
        current_byte_offset=5,
        world_size_at_checkpoint=4,
        epoch=3,
    )
    assert DatasetState.from_dict(state.to_dict()) == state
    assert DatasetState.from_dict({"world_size": 7, "other": "x"}).world_size_at_checkpoint == 7


def test_resume_near_the_end_reads_no_more_than_at_the_start(tmp_path: Path) -> None:
    """Counted in pages touched, not in time: resuming seeks, it does not skip."""
    path = tmp_path / "large.index"
    header = IndexHeader(token_bytes=2, num_files=1, total_tokens=200_000_000)
    with path.open("wb") as file:
        file.write(header.to_bytes())
        file.truncate(header.file_bytes)
    dataset = TokenDataset(TokenIndex(path), seq_length=1024)
    dataset.load_state_dict({"total_tokens_processed": dataset.num_sequences * 99 // 100 * 1024})
    touched: list[int] = []
    read = dataset.reader.read

    def watched(numbers: Any) -> Any:
        touched.extend(numbers)
        return read(numbers)

    dataset.reader.read = watched  # type: ignore[method-assign]
    next(iter(dataset))
    assert len(touched) == 1
    dataset.index.close()


def test_ledger_commits_and_restores_it(numbered: TokenIndex) -> None:
    dataset = TokenDataset(numbered, seq_length=10)
    ledger = DataLedger(dataset)
    loader = TokenLoader(dataset, 8)
    iterator = iter(loader)
    seen = firsts([next(iterator) for _ in range(3)])
    saved = ledger.commit()
    next(iterator)  # trained, and lost with the process
    dataset = TokenDataset(numbered, seq_length=10)
    ledger = DataLedger(dataset)
    ledger.restore(saved)
    seen += firsts(TokenLoader(dataset, 5))
    final = DataCommit.from_json(ledger.commit())
    assert seen == undisturbed(numbered, 10)
    commits = [
        Commit(checkpoint_id="a", parent_id=None, step=3, data=DataCommit.from_json(saved)),
        Commit(checkpoint_id="b", parent_id="a", step=9, data=final),
    ]
    report = audit(commits, "n", 0)
    assert report.exact, report.reason


# Loader processes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_workers", [1, 2])
def test_loader_processes_change_nothing_but_who_reads(numbered: TokenIndex, num_workers: int) -> None:
    alone = [batch["input_ids"].tolist() for batch in TokenLoader(TokenDataset(numbered, seq_length=10), 8)]
    loader = TokenLoader(TokenDataset(numbered, seq_length=10), 8, num_workers=num_workers)
    assert [batch["input_ids"].tolist() for batch in loader] == alone


def test_position_is_what_was_taken_not_what_was_prefetched(numbered: TokenIndex) -> None:
    dataset = TokenDataset(numbered, seq_length=10)
    loader = TokenLoader(dataset, 8, num_workers=2, prefetch_factor=4)
    seen = []
    iterator = iter(loader)
    assert dataset.position == 0
    for taken in range(1, 4):
        seen += firsts([next(iterator)])
        assert dataset.position == 8 * taken
        assert dataset.state_dict()["total_tokens_processed"] == 80 * taken
    del iterator
    resumed = TokenDataset(numbered, seq_length=10, rank=0, world_size=1)
    resumed.load_state_dict(loader.state_dict())
    seen += firsts(TokenLoader(resumed, 5, num_workers=1))
    assert seen == undisturbed(numbered, 10)


def test_persistent_loader_processes_follow_the_position(numbered: TokenIndex) -> None:
    dataset = TokenDataset(numbered, seq_length=10)
    loader = TokenLoader(dataset, 8, num_workers=2, persistent_workers=True)
    saved = dataset.state_dict()
    seen = []
    for batch in loader:
        seen += firsts([batch])
        if len(seen) == 24:
            break
    assert seen + firsts(loader) == undisturbed(numbered, 10)
    assert firsts(loader) == undisturbed(numbered, 10, epoch=1)
    loader.load_state_dict(saved)
    assert firsts(loader) == undisturbed(numbered, 10)


def test_spawned_loader_processes_map_the_index_themselves(numbered: TokenIndex) -> None:
    context = multiprocessing.get_context("spawn")
    loader = TokenLoader(
        TokenDataset(numbered, seq_length=100), 4, num_workers=1, multiprocessing_context=context
    )
    assert firsts(loader) == undisturbed(numbered, 100)


def test_plain_data_loader_gets_every_sequence_once(numbered: TokenIndex) -> None:
    for num_workers in (0, 2):
        ranks = [TokenDataset(numbered, seq_length=10, rank=rank, world_size=2) for rank in range(2)]
        seen = [
            firsts(torch.utils.data.DataLoader(rank, batch_size=4, num_workers=num_workers)) for rank in ranks
        ]
        assert sorted(seen[0] + seen[1]) == sorted(undisturbed(numbered, 10))


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("num_workers", [0, 2])
def test_stateful_data_loader_resumes(numbered: TokenIndex, num_workers: int) -> None:
    from torchdata.stateful_dataloader import StatefulDataLoader

    def loader() -> StatefulDataLoader:
        return StatefulDataLoader(
            TokenDataset(numbered, seq_length=10, rank=1, world_size=3), batch_size=4, num_workers=num_workers
        )

    whole = firsts(loader())
    first = loader()
    iterator = iter(first)
    seen = firsts([next(iterator) for _ in range(3)])
    state = first.state_dict()
    del iterator
    second = loader()
    second.load_state_dict(state)
    assert seen + firsts(second) == whole


def test_rank_and_world_come_from_the_environment(
    numbered: TokenIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "4")
    dataset = TokenDataset(numbered, seq_length=10)
    assert dataset.world == (2, 4)
    seen = firsts(TokenLoader(dataset, 2, num_workers=1))
    monkeypatch.delenv("RANK")
    monkeypatch.delenv("WORLD_SIZE")
    assert seen == firsts(TokenLoader(TokenDataset(numbered, seq_length=10, rank=2, world_size=4), 2))
    assert pickle.loads(pickle.dumps(TokenDataset(numbered, seq_length=10, rank=2, world_size=4))).world == (
        2,
        4,
    )


def test_senseless_arguments_are_value_errors(numbered: TokenIndex) -> None:
    senseless: list[dict[str, Any]] = [
        {"seq_length": 0},
        {"rank": 0},
        {"rank": 2, "world_size": 2},
        {"rank": -1, "world_size": 2},
    ]
    for arguments in senseless:
        with pytest.raises(ValueError):
            TokenDataset(numbered, **{"seq_length": 4, **arguments})
    with pytest.raises(ValueError, match="batch_size"):
        TokenLoader(TokenDataset(numbered, seq_length=4), 0)
    with pytest.raises(ValueError, match="epoch"):
        TokenDataset(numbered, seq_length=4).set_epoch(-1)


def test_taking_samples_at_random_reads_the_right_tokens(index: TokenIndex) -> None:
    tokens = index.tokens.tolist()
    reader = SequenceReader(index, 12)
    numbers = np.array(random.Random(0).choices(range(reader.full), k=50))
    inputs, labels = reader.read(numbers)
    assert inputs.tolist() == [tokens[12 * n : 12 * n + 12] for n in numbers]
    assert labels.tolist() == [tokens[12 * n + 1 : 12 * n + 13] for n in numbers]
