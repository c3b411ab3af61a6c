"""Any iterable dataset as exact, elastic data, where it can say where it is.

    loader = StreamLoader(dataset, global_batch_size=256)        # dataset has state_dict and load_state_dict

Every rank iterates the whole stream and keeps its own slice of each global batch, so a position means the same in any world:
the samples before it, counted from the beginning of the epoch. What the dataset says of itself (`state_dict`) is taken at the
end of each global batch and travels with the position in the checkpoint. Samples that belong to other ranks are read and
dropped: that is the price of a source that cannot be asked for a sample by its number. So the dataset must give the same
samples on every rank, and not divide itself among them.

With `replay=True` a dataset without state is accepted: after a restart it is read again from the beginning of the epoch and
what was trained is dropped. That is exact if, and only if, it gives the same samples in the same order each time.

With `num_workers` the stream is read in one process beside training, whatever the number: a stream has one position.
"""

from __future__ import annotations

import base64
import copy
import io
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, Unpack

import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate

from strata.core.data.order import slice_for
from strata.core.data.spans import Spans
from strata.data.errors import DataError, StateMismatch
from strata.data.loading.draws import seed_at
from strata.data.loading.loader import ElasticLoader, LoaderOptions
from strata.data.loading.sampler import ElasticSampler
from strata.data.loading.steps import Batch, StepPlan
from strata.data.loading.workers import end_with_trainer

UNKNOWN_LENGTH = 2**53
"""What the ledger counts against where it is not known how long a stream is. When its end is seen, the rest counts as left out."""
STATE_LIMIT_BYTES = 1 << 20
"""A state travels in the manifest of each checkpoint."""


def is_stateful(dataset: object) -> bool:
    return callable(getattr(dataset, "state_dict", None)) and callable(
        getattr(dataset, "load_state_dict", None)
    )


class StreamLoader(ElasticLoader):
    """Batches of one rank from an iterable dataset, which may be of unknown length."""

    def __init__(
        self,
        dataset: Iterable[object],
        *,
        global_batch_size: int | None = None,
        batch_size: int | None = None,
        length: int | None = None,
        drop_last: bool = False,
        replay: bool = False,
        name: str = "data",
        commit: Literal["taken", "explicit"] = "taken",
        **dataloader_options: Unpack[LoaderOptions],
    ) -> None:
        """`dataset` is any iterable with `state_dict` and `load_state_dict`, or, with `replay`, without. `length` is how many
        samples an epoch has, where that is known and the dataset does not say so itself."""
        if commit not in ("taken", "explicit"):
            raise ValueError(f"commit must be 'taken' or 'explicit', not {commit!r}")
        if not replay and not is_stateful(dataset):
            raise _without_state(dataset)
        if getattr(dataset, "_distributed", None) is not None:
            raise DataError(
                "The dataset is already divided among ranks (split_dataset_by_node), so the rest could not be read "
                "with another world size.",
                hint="Pass the undivided dataset: each rank takes its part of every global batch.",
            )
        if not replay and _has_unsaved_buffer(dataset):
            raise DataError(
                f"{type(dataset).__name__} shuffles in a buffer that its state_dict leaves out: samples in the buffer "
                "at a checkpoint would never be trained after a restart.",
                hint="Shuffle without a buffer (a map-style dataset: Dataset.shuffle, or its files with data=), or, with a seed "
                "given to shuffle(), strata.data.StreamLoader(dataset, global_batch_size=..., replay=True), which reads the epoch "
                "again up to the position.",
            )
        self._stream: Any = dataset
        self._is_replayed = replay
        self._explicit = commit == "explicit"
        self._iterations = 0
        self._collate = dataloader_options.pop("collate_fn", None) or default_collate
        self._options = dataloader_options
        if self._options.get("num_workers"):
            self._options["num_workers"] = 1
        end_with_trainer()
        self.sampler: StreamSampler = StreamSampler(
            _length_of(dataset, length),
            global_batch_size=global_batch_size,
            batch_size=batch_size,
            drop_last=drop_last,
            dataset=name,
        )
        self._states: dict[tuple[int, int], Any] = {}
        """What the dataset said of itself, by epoch and position: where training is, and what was read after it."""

    def _read(self, start: tuple[int, int]) -> Iterator[Batch]:
        sampler = self.sampler
        here = (sampler.epoch, sampler.position)
        self._states = {at: state for at, state in self._states.items() if here <= at <= start}
        if start == (0, 0) and not (self._states or self._is_replayed or self._options.get("num_workers")):
            self._states[start] = copy.deepcopy(self._stream.state_dict())  # Reading it will change it.
        pieces = _Pieces(
            self._stream,
            plan=sampler.plan(start),
            state=self._states.get(start),
            is_replayed=self._is_replayed,
            collate=self._collate,
        )
        options: dict[str, Any] = {**self._options}
        options.setdefault("generator", torch.Generator().manual_seed(seed_at(sampler, *start)))
        number = 0
        reading: DataLoader[_Piece] = DataLoader(pieces, batch_size=None, collate_fn=_as_it_is, **options)
        for piece in reading:
            if piece.end is not None:
                sampler.end_at(start[0], piece.end)
            plan = sampler.plan(start)
            if number >= len(plan):
                raise StateMismatch(
                    f"The stream '{self.dataset}' has more than the declared {sampler.total:,} samples.",
                    hint="Correct length=, or leave it out.",
                )
            step = plan.micro_batch(number)
            number += 1
            after = (start[0] + 1, 0) if number == len(plan) else (start[0], step.batch_stop)
            self._states[after] = piece.state
            yield Batch(piece.data, step)
        if number < len(sampler.plan(start)):
            raise DataError(
                f"The stream '{self.dataset}' ended after {start[1] + number * sampler.global_batch_size:,} samples of "
                f"{sampler.total:,}.",
                hint="Correct length=, or check why it ended early.",
            )

    def state_dict(self) -> dict[str, Any]:
        here = (self.epoch, self.position)
        for old in [known for known in self._states if known < here]:
            del self._states[old]
        state = {**self.sampler.state_dict()}
        if not self._is_replayed:
            state["stream"] = _encoded(self._states.get(here), name=self.dataset)
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if not self._is_replayed and "stream" not in state:
            raise StateMismatch(
                f"The saved position of '{self.dataset}' holds no state of a stream.",
                hint="It was saved with replay=True, or with a map-style dataset: use the same here.",
            )
        self.sampler.load_state_dict(state)
        if not self._is_replayed:
            self._states = {(self.epoch, self.position): _decoded(state["stream"])}


class StreamSampler(ElasticSampler):
    """Positions of a stream, in its own order. Where an epoch ends may be known only when it does."""

    def __init__(self, length: int | None, **options: Any) -> None:
        self.is_bounded = length is not None
        self._ends: dict[int, int] = {}
        super().__init__(UNKNOWN_LENGTH if length is None else length, shuffle=False, **options)

    def end_at(self, epoch: int, count: int) -> None:
        """This epoch has so many samples."""
        if self.is_bounded and count != self.total:
            raise DataError(
                f"The stream '{self.dataset}' ended after {count:,} samples of {self.total:,}.",
                hint="Correct length=, or check why it ended early.",
            )
        self._ends[epoch] = count

    def plan(self, at: tuple[int, int] | None = None) -> StepPlan:
        plan = super().plan(at)
        return replace(plan, total=self._ends.get(plan.epoch, plan.total))

    def left_out(self, plan: StepPlan) -> Spans:
        return plan.dropped | Spans([(plan.total, self.total)])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    """One rank's part of a global batch."""

    data: Any
    state: Any
    """Of the dataset, after the whole global batch."""
    end: int | None
    """How many samples the epoch has, where that is known by now."""


class _Pieces(IterableDataset[_Piece]):
    """The stream, cut into global batches. Reads one ahead, to know which is the last."""

    def __init__(
        self,
        stream: Any,
        *,
        plan: StepPlan,
        state: Any,
        is_replayed: bool,
        collate: Callable[[list[Any]], Any],
    ) -> None:
        self._stream = stream
        self._plan = plan
        self._state = state
        self._is_replayed = is_replayed
        self._collate = collate

    def __iter__(self) -> Iterator[_Piece]:
        plan, size = self._plan, self._plan.global_batch_size
        samples = self._samples()
        at = plan.start
        waiting: tuple[Any, Any] | None = None  # A batch that may be the last one.
        while True:
            mine, count = self._take(samples, at, size)
            if count < size:
                break
            if waiting is not None:
                yield _Piece(data=waiting[0], state=waiting[1], end=None)
            at += count
            waiting = (mine(count), self._now())
        if at + count == 0:
            raise DataError("The dataset has no samples.", hint="Check its path, filters and splits.")
        is_last = not count or plan.drop_last
        if waiting is not None:
            # At its end, a dataset says that the next epoch comes next.
            state = self._now() if is_last else waiting[1]
            yield _Piece(data=waiting[0], state=state, end=at + count if is_last else None)
        if not is_last:
            yield _Piece(data=mine(count), state=self._now(), end=at + count)

    def _take(self, samples: Iterator[Any], at: int, size: int) -> tuple[Callable[[int], Any], int]:
        """Read a global batch; how to make this rank's part of it, once it is known how many samples it has, and how many."""
        plan = self._plan
        # How a batch is divided depends on its size, and the last one is smaller: no rank's part starts later then.
        mine = slice_for(plan.rank, plan.world_size, 0, size)
        kept: list[Any] = []
        first: Any = None
        count = 0
        for sample in samples:
            if count == 0:
                first = sample
            if count < mine.stop:
                kept.append(sample)
            count += 1
            if count == size:
                break

        def part(total: int) -> Any:
            own = slice_for(plan.rank, plan.world_size, 0, total)
            return self._collate(kept[own.start : own.stop] or [first])

        return part, count

    def _samples(self) -> Iterator[Any]:
        stream, epoch = self._stream, self._plan.epoch
        if callable(set_epoch := getattr(stream, "set_epoch", None)):
            set_epoch(epoch)
        if self._is_replayed:
            samples: Iterator[Any] = iter(stream)
            for number in range(self._plan.start):
                if next(samples, _END) is _END:
                    raise DataError(
                        f"The dataset ended after {number:,} samples, fewer than the {self._plan.start:,} already trained: it "
                        "does not repeat the same samples.",
                        hint="Without state_dict, a dataset can be resumed only if it always yields the same samples.",
                    )
            return samples
        if self._state is not None:
            stream.load_state_dict(copy.deepcopy(self._state))
        samples = iter(stream)
        if self._plan.start == 0 and epoch:
            # The state is that of the end of the epoch before: some datasets say so once more before they begin again.
            first = next(samples, _END)
            samples = iter(stream) if first is _END else _chained(first, samples)
        return samples

    def _now(self) -> Any:
        return None if self._is_replayed else copy.deepcopy(self._stream.state_dict())


_END = object()


def _chained(first: Any, rest: Iterator[Any]) -> Iterator[Any]:
    yield first
    yield from rest


def _as_it_is(piece: Any) -> Any:
    return piece


def _has_unsaved_buffer(dataset: object) -> bool:
    """Whether a dataset of Hugging Face `datasets` holds back samples that its state knows nothing of."""
    steps, seen = [getattr(dataset, "_ex_iterable", None)], set[int]()
    while steps:
        step = steps.pop()
        if step is None or id(step) in seen:
            continue
        seen.add(id(step))
        if type(step).__name__.startswith("BufferShuffled") and getattr(step, "buffer_size", 2) > 1:
            return True
        steps.append(getattr(step, "ex_iterable", None))
        steps += getattr(step, "ex_iterables", None) or []
    return False


def _length_of(dataset: Any, given: int | None) -> int | None:
    if given is not None:
        if given < 1:
            raise ValueError(f"length must be positive, got {given}")
        return given
    try:
        return len(dataset)
    except (TypeError, NotImplementedError, AttributeError):
        return None


def _encoded(state: Any, *, name: str) -> dict[str, Any]:
    """A state as JSON: as it is where that loses nothing, else as what `torch.load` reads without running anything."""
    try:
        text = json.dumps(state)
        if json.loads(text) == state:
            return _within_limit({"json": state}, len(text), name)
    except (TypeError, ValueError):
        pass
    buffer = io.BytesIO()
    try:
        torch.save(state, buffer)
        torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
    except Exception as error:
        raise StateMismatch(
            f"The state of the stream '{name}' cannot be kept in a checkpoint: {str(error).splitlines()[0]}",
            hint="state_dict() may hold numbers, text, lists, dictionaries and tensors.",
        ) from error
    return _within_limit(
        {"torch": base64.b64encode(buffer.getvalue()).decode()}, buffer.tell() * 4 // 3, name
    )


def _within_limit(encoded: dict[str, Any], size_bytes: int, name: str) -> dict[str, Any]:
    if size_bytes > STATE_LIMIT_BYTES:
        raise StateMismatch(
            f"The state of the stream '{name}' has {size_bytes:,} bytes, more than {STATE_LIMIT_BYTES:,}.",
            hint="It is saved with every checkpoint: keep positions in it, not samples (a smaller shuffle buffer).",
        )
    return encoded


def _decoded(encoded: Mapping[str, Any]) -> Any:
    if "json" in encoded:
        return encoded["json"]
    return torch.load(io.BytesIO(base64.b64decode(encoded["torch"])), weights_only=True)


def _without_state(dataset: object) -> DataError:
    return DataError(
        f"{type(dataset).__name__} is an iterable dataset without state_dict and load_state_dict: after a "
        "restart it is unknown which of its samples were trained, so neither exactly-once nor the same order "
        "can be guaranteed.",
        hint="Implement both methods; or use a map-style dataset, which is exact at any world size; or, if it always "
        "yields the same samples in the same order, strata.data.StreamLoader(dataset, global_batch_size=..., "
        "replay=True), which reads it again from the start of the epoch after a restart and skips what was trained.",
    )
