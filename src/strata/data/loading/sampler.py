"""Which samples this rank reads next, for any world size, from any position.

`ElasticSampler` is a batch sampler for map-style datasets: give it to `DataLoader(batch_sampler=...)`, to
torchdata's `StatefulDataLoader`, or to `ElasticLoader`. The order is a pure function of (seed, epoch) and the
position is global, so `set_world` may be called with any rank and size between two iterations, divisor or
not, as often as one likes.

Its position is what the trainer **committed**, never what a loader read ahead. `commit` moves it, one step at
a time; `records` says what was committed since `DataLedger` last asked. An iteration begins at the position, so
what was taken and not committed is read again; but after one that was read to the epoch's end the next continues in
the next epoch, and the commits may follow later. Needs no torch.

A mixture (`ElasticSampler(mixture, global_batch_size=...)`) is one long epoch: its sources have epochs, it has positions. How
long it is may change with its weights, so the ledger takes it for endless, and what lies behind its end for dropped.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sized
from contextlib import suppress
from dataclasses import replace
from typing import Any, SupportsIndex

import numpy as np
from numpy.typing import ArrayLike

from strata.core.data.ledger import RankRecord
from strata.core.data.mixture import ENDLESS, Change, MixtureError
from strata.core.data.order import EpochOrder
from strata.core.data.spans import Spans
from strata.data.composing.mixture import Mixture, MixtureOrder
from strata.data.errors import DataError, StateMismatch
from strata.data.loading.steps import Step, StepPlan
from strata.data.loading.token_batches import TokenPlan, TokenSteps, checked_lengths

STATE_VERSION = 1
_CHUNK = 32  # Micro-batches whose ids are computed together: NumPy's overhead is per call.


class ElasticSampler:
    """Batches of sample ids for one rank, in an order that does not depend on the number of ranks.

    Pass `global_batch_size` to keep the global batch constant at any world size (slices then differ by at most
    one sample: weigh each loss by `Step.weight`), or `batch_size` for a constant batch per rank; or `max_tokens`, and
    the `lengths` of all samples, for steps of as many samples as fit a global budget of tokens: then `Step.weight` weighs
    means over tokens.
    """

    is_bounded = True
    """Whether `total` is how many samples an epoch has; of a stream that may be unknown."""

    def __init__(
        self,
        total: SupportsIndex | Sized | Mixture,
        *,
        global_batch_size: int | None = None,
        batch_size: int | None = None,
        micro_batch_size: int | None = None,
        max_tokens: int | None = None,
        lengths: ArrayLike | None = None,
        rank: int = 0,
        world_size: int = 1,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        dataset: str = "data",
    ) -> None:
        """`total`: the number of samples, the dataset, or a mixture, which has its own seed."""
        if [global_batch_size, batch_size, max_tokens].count(None) != 2:
            raise ValueError("pass exactly one of global_batch_size, batch_size (per rank) and max_tokens")
        if (max_tokens is None) != (lengths is None):
            raise ValueError("max_tokens needs lengths (tokens per sample), and lengths need max_tokens")
        if max_tokens is not None and (micro_batch_size is not None or drop_last):
            raise ValueError("max_tokens cannot be combined with micro_batch_size or drop_last")
        if max_tokens is not None and isinstance(total, Mixture):
            raise ValueError("max_tokens cannot be used with a mixture: pack its sources (pack=True) instead")
        for name, value in (
            ("global_batch_size", global_batch_size),
            ("batch_size", batch_size),
            ("micro_batch_size", micro_batch_size),
        ):
            if value is not None and value < 1:
                raise ValueError(f"{name} must be positive, got {value}")
        self.dataset = dataset
        self.mixture = self._mixed(total, global_batch_size) if isinstance(total, Mixture) else None
        """Which samples of its sources stand where, if this reads a mixture."""
        self._total = _samples_in(total) if not isinstance(total, Mixture) else 0
        self.shuffle = shuffle
        self.seed = seed if self.mixture is None else self.mixture.plan.definition.seed
        self.drop_last = drop_last
        self._global_batch_size = global_batch_size
        self._batch_size = batch_size
        self._micro_batch_size = micro_batch_size
        self.max_tokens = max_tokens
        self._lengths = (
            checked_lengths(lengths, total=self._total, max_tokens=max_tokens)
            if lengths is not None and max_tokens is not None
            else None
        )
        self._token_steps: dict[int, TokenSteps] = {}
        self.epoch = 0
        self.position = 0
        """The next position to train: everything before it is committed."""
        self._part = 0  # Micro-batches of the current step that were committed.
        self._ahead: tuple[int, int] | None = (
            None  # Where to read on, while the batches before it wait for a commit.
        )
        self._records: dict[tuple[int, int], RankRecord] = {}
        self._order: EpochOrder | MixtureOrder = self._order_of(0)
        self.set_world(rank, world_size)

    @staticmethod
    def _mixed(mixture: Mixture, global_batch_size: int | None) -> MixtureOrder:
        if global_batch_size is None and mixture.definition.schedule:
            raise ValueError(
                "a schedule by step needs a global_batch_size: with batch_size (per rank), the size of a step "
                "depends on the number of ranks"
            )
        return MixtureOrder(mixture, global_batch_size=global_batch_size or 1)

    @property
    def total(self) -> int:
        """Positions in an epoch. For a mixture, as far as known now; `ENDLESS` if it never ends."""
        return self._total if self.mixture is None else self.mixture.plan.total

    @property
    def ledger_total(self) -> int:
        """What the ledger takes for the number of positions: a mixture's may change while it is read."""
        return self._total if self.mixture is None else ENDLESS

    @property
    def is_endless(self) -> bool:
        return self.mixture is not None and self.mixture.plan.is_endless

    def change_weights(self, change: Change) -> None:
        """From a step that has not started, other weights. What an iteration has read ahead is read again with them: begin
        another one. Every rank must change the same before the same step."""
        if self.mixture is None or self._global_batch_size is None:
            raise MixtureError(
                "only the weights of a mixture that is read with a global_batch_size can be changed"
            )
        if change.step < (first := self.next_step):
            raise MixtureError(
                f"step {change.step:,} has already started; the first that can be changed is {first:,}"
            )
        self.mixture.plan.definition.check_change(change)
        self.mixture.change(change)

    @property
    def next_step(self) -> int:
        """The first step that is not committed, in global batches from the beginning of the epoch."""
        return -(-self.position // self.global_batch_size)

    # The world and the epoch --------------------------------------------------------------------------------

    def set_world(self, rank: int, world_size: int) -> None:
        """Take part as `rank` of `world_size` from the next iteration on."""
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} is not in a world of {world_size}")
        self.rank, self.world_size = rank, world_size
        self.rewind()

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of `epoch`. If that epoch is already the next to be read, the position (such as a resumed one) is kept."""
        if epoch == self.reading[0]:
            return
        self._check_not_ended(epoch)
        if epoch == self.epoch:
            self.rewind()
        else:
            self.move(epoch, 0)

    def check_trainable(self) -> None:
        """Raise `ValueError` if an epoch would have no step."""
        if not self.total:
            raise ValueError(
                f"dataset '{self.dataset}' has no samples: there is nothing to train on. Check its path and filters"
            )
        if self.drop_last and self.total < self.global_batch_size:
            raise ValueError(
                f"dataset '{self.dataset}' has {self.total:,} samples, less than one global batch of "
                f"{self.global_batch_size:,}, and drop_last drops incomplete batches: there would be no step. Use a "
                "smaller batch, or drop_last=False"
            )

    @property
    def global_batch_size(self) -> int:
        """Samples of one step; with `max_tokens` they differ, and this is 1."""
        return self._global_batch_size or (self._batch_size or 0) * self.world_size or 1

    # Reading ------------------------------------------------------------------------------------------------

    @property
    def reading(self) -> tuple[int, int]:
        """Epoch and position where the next iteration begins."""
        here = (self.epoch, self.position)
        return here if self._ahead is None else max(here, self._ahead)

    def begin(self) -> tuple[int, int]:
        """Begin an iteration, and say where."""
        start = self.reading
        self._check_not_ended(start[0])
        if self._ahead is None:
            self.rewind()
        self._ahead = (
            None  # If this iteration is left before its end, the next begins at the committed position.
        )
        return start

    def read_to_end(self, epoch: int) -> None:
        """Everything of this epoch was handed to the trainer: the next iteration reads the next epoch, though some
        of this one may still wait for a commit."""
        self._ahead = (epoch + 1, 0)

    def plan(self, at: tuple[int, int] | None = None) -> StepPlan:
        """What lies ahead of this rank in an epoch, from the committed position or another one."""
        epoch, position = at or (self.epoch, self.position)
        if self._lengths is not None:
            return TokenPlan(
                epoch=epoch,
                total=self.total,
                start=position,
                global_batch_size=self.global_batch_size,
                rank=self.rank,
                world_size=self.world_size,
                token_steps=self._steps_of(epoch),
            )
        return StepPlan(
            epoch=epoch,
            total=self.total if self.mixture is None or epoch == 0 else 0,
            start=position,
            global_batch_size=self.global_batch_size,
            rank=self.rank,
            world_size=self.world_size,
            micro_batch_size=self._micro_batch_size,
            drop_last=self.drop_last,
        )

    def batches(
        self, *, first: int = 0, every: int = 1, at: tuple[int, int] | None = None
    ) -> Iterator[tuple[Step, list[int]]]:
        """Micro-batches with their sample ids; of several readers each may take `every` so-many-th.

        A rank with nothing to do in a step gets one sample of the step's batch with weight 0: it takes part in
        the step's collectives and adds nothing to the gradient.
        """
        plan = self.plan(at)
        self._check_not_ended(plan.epoch)
        order = self._order if plan.epoch == self.epoch else self._order_of(plan.epoch)
        numbers = range(first, len(plan), every)
        for chunk in range(0, len(numbers), _CHUNK):
            steps = [plan.micro_batch(number) for number in numbers[chunk : chunk + _CHUNK]]
            ranges = [(s.start, s.stop) if len(s) else (s.batch_start, s.batch_start + 1) for s in steps]
            ids = order.take(np.concatenate([np.arange(start, stop) for start, stop in ranges])).tolist()
            taken = 0
            for step, (start, stop) in zip(steps, ranges, strict=True):
                yield step, ids[taken : taken + stop - start]
                taken += stop - start

    def __iter__(self) -> Iterator[list[int]]:
        return _Ids(self)

    def __len__(self) -> int:
        """Micro-batches left in this epoch."""
        return len(self.plan(self.reading))

    # Committing ---------------------------------------------------------------------------------------------

    def commit(self, step: Step | None = None) -> None:
        """The trainer has used its next micro-batch; naming it checks that it is the next. The position moves
        when a step is complete. Several that were taken may be committed later, in order, across an epoch's end."""
        expected = self._expected()
        if expected is None or (step is not None and step != expected):
            place = f"epoch {self.epoch}, position {self.position:,}, part {self._part}"
            raise StateMismatch(
                "A batch was committed out of order.",
                hint=f"The next one is at {place}. Commit each batch once, in order, and iterate again after set_world.",
            )
        if not expected.ends_step:
            self._part += 1
            return
        self._update_record(lambda known: known.with_span(expected.slice_start, expected.slice_stop))
        self.position, self._part = expected.batch_stop, 0
        self.close_if_done()

    def rewind(self) -> None:
        """Read on from the committed position: the current step begins again with the first of its micro-batches."""
        self._part, self._ahead = 0, None

    def close_if_done(self) -> None:
        """Close the epoch when no step is left in it, and stand at the beginning of the next."""
        plan = self.plan()
        if not plan.steps:
            self._update_record(lambda known: replace(known, dropped=self.left_out(plan), closed=True))
            self._stand(self.epoch + 1, 0)

    def left_out(self, plan: StepPlan) -> Spans:
        """What an epoch that is closed leaves out on purpose; of a mixture, all that would come after its end."""
        return plan.dropped if self.mixture is None else Spans([(plan.end, ENDLESS)])

    def records(self) -> list[RankRecord]:
        """What was committed since the last call. Each call hands over: nothing is reported twice."""
        records, self._records = list(self._records.values()), {}
        return records

    def records_of(self, rank: int, since: tuple[int, int]) -> list[RankRecord]:
        """What `rank` of this world has committed on the way here from an epoch and position: every rank commits the same steps,
        so this needs no word from it. Of this rank it is what `records` hands over, unless a caller has moved the position."""
        found = []
        for epoch in range(since[0], self.epoch + 1):
            plan = replace(self.plan((epoch, since[1] if epoch == since[0] else 0)), rank=rank)
            is_closed = epoch < self.epoch
            end = plan.end if is_closed else self.position
            if end > plan.start or is_closed:
                found.append(
                    RankRecord(
                        dataset=self.dataset,
                        epoch=epoch,
                        total=self.ledger_total,
                        rank=rank,
                        runs=plan.trained_to(end),
                        dropped=self.left_out(plan) if is_closed else Spans(),
                        closed=is_closed,
                    )
                )
        return found

    # Saving and restoring -----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Where training is: the same on every rank, and good for any world."""
        state = self._place()
        if self.mixture is not None:
            state["mixture"] = self.mixture.state(self.position if self.epoch == 0 else self.total)
        return state

    def _place(self) -> dict[str, Any]:
        return {
            "version": STATE_VERSION,
            "dataset": self.dataset,
            "epoch": self.epoch,
            "position": self.position,
            "total": self.ledger_total,
            "seed": self.seed,
            "shuffle": self.shuffle,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a saved position. What was committed after the last `records` is forgotten: it was rolled back.

        Raises `StateMismatch` where the state belongs to other data or another order, and changes nothing.
        """
        epoch, position = check_state(state, self._place())
        saved = state.get("mixture")
        if (saved is None) != (self.mixture is None) and (epoch or position):
            was, now = ("a mixture", "no mixture") if saved is not None else ("no mixture", "a mixture")
            raise StateMismatch(f"The saved position belongs to {was}, and this is {now}.")
        if self.mixture is not None and saved is not None:
            try:
                self.mixture.adopt(self.mixture.check(saved), saved)
            except StateMismatch:
                if (
                    epoch or position
                ):  # At the very beginning there is nothing that another mixture could contradict.
                    raise
        self._records = {}
        self.move(epoch, position)

    def move(self, epoch: int, position: int) -> None:
        """Stand at a position, without any record of how it was reached."""
        self._stand(epoch, position)
        self.rewind()

    # ---------------------------------------------------------------------------------------------------------

    def _stand(self, epoch: int, position: int) -> None:
        if epoch != self.epoch:
            self._order = self._order_of(epoch)
        self.epoch, self.position, self._part = epoch, position, 0

    def _check_not_ended(self, epoch: int) -> None:
        if self.mixture is not None and epoch:
            plan = self.mixture.plan
            raise DataError(
                f"The mixture has ended after {plan.total:,} positions: source '{plan.ended_by}' has run out.",
                hint="Train no further (epochs=1), let its sources repeat (epochs=None), or continue without those that "
                "have run out (when_exhausted='continue').",
            )

    def _steps_of(self, epoch: int) -> TokenSteps:
        assert self._lengths is not None
        assert self.max_tokens is not None
        if epoch not in self._token_steps:
            if len(self._token_steps) > 1:
                del self._token_steps[min(self._token_steps)]
            order = EpochOrder(total=self._total, seed=self.seed, epoch=epoch, shuffle=self.shuffle)
            self._token_steps[epoch] = TokenSteps(self._lengths, order, self.max_tokens)
        return self._token_steps[epoch]

    def _order_of(self, epoch: int) -> EpochOrder | MixtureOrder:
        if self.mixture is not None:
            return self.mixture
        return EpochOrder(total=self._total, seed=self.seed, epoch=epoch, shuffle=self.shuffle)

    def _expected(self) -> Step | None:
        plan = self.plan()
        return plan.micro_batch(self._part) if self._part < len(plan) else None

    def _update_record(self, change: Callable[[RankRecord], RankRecord]) -> None:
        key = (self.epoch, self.rank)
        known = self._records.get(key)
        if known is None:
            known = RankRecord(
                dataset=self.dataset, epoch=self.epoch, total=self.ledger_total, rank=self.rank
            )
        self._records[key] = change(known)


class WithSampler:
    """What everything that reads through a sampler tells of it: all that `DataLedger` asks for."""

    sampler: ElasticSampler

    @property
    def dataset(self) -> str:
        return self.sampler.dataset

    @property
    def epoch(self) -> int:
        return self.sampler.epoch

    @property
    def position(self) -> int:
        return self.sampler.position

    @property
    def world_size(self) -> int:
        return self.sampler.world_size

    def set_epoch(self, epoch: int) -> None:
        self.sampler.set_epoch(epoch)

    def set_world(self, rank: int, world_size: int) -> None:
        """Take part as another rank, or in another world, from the next iteration on."""
        self.sampler.set_world(rank, world_size)

    def check_trainable(self) -> None:
        """Raise `ValueError` if an epoch would have no step."""
        self.sampler.check_trainable()

    def records(self) -> list[RankRecord]:
        return self.sampler.records()

    def state_dict(self) -> dict[str, Any]:
        return self.sampler.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.sampler.load_state_dict(state)


class _Ids:
    """Lists of ids, and where the next one begins: what `StatefulDataLoader` keeps while it reads ahead."""

    def __init__(self, sampler: ElasticSampler) -> None:
        sampler.rewind()
        self._sampler = sampler
        self._batches = sampler.batches()
        self._state = sampler.state_dict()

    def __iter__(self) -> _Ids:
        return self

    def __next__(self) -> list[int]:
        step, ids = next(self._batches)
        if step.ends_step:
            self._state = {**self._state, "position": step.batch_stop}
        return ids

    def state_dict(self) -> dict[str, Any]:
        return self._state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._sampler.load_state_dict(state)
        self._batches = self._sampler.batches()
        self._state = self._sampler.state_dict()


def check_state(state: Mapping[str, Any], ours: Mapping[str, Any]) -> tuple[int, int]:
    """The epoch and position of a state that fits `ours`; `StateMismatch` otherwise."""
    missing = sorted(set(ours) - set(state))
    if missing:
        raise StateMismatch(f"This is not the state of an elastic loader: {', '.join(missing)} missing.")
    epoch, position = int(state["epoch"]), int(state["position"])
    # Between epochs only the name must fit: the data may have grown, the seed may be new.
    names = ("version", "dataset", "total", "seed", "shuffle") if position else ("version", "dataset")
    differing = [
        f"{name} {state[name]!r} (here {ours[name]!r})" for name in names if state[name] != ours[name]
    ]
    if differing:
        raise StateMismatch(
            f"The saved position belongs to other data or another order: {', '.join(differing)}.",
            hint="Use the same values to finish the epoch, or begin a new one with set_epoch.",
        )
    if epoch < 0 or not 0 <= position <= ours["total"]:
        raise StateMismatch(
            f"Position {position:,} does not exist in epoch {epoch} of {ours['total']:,} samples."
        )
    return epoch, position


def _samples_in(total: SupportsIndex | Sized) -> int:
    """Never 0 for what is not understood: that would be an epoch in which nothing is trained."""
    counts: tuple[Callable[[Any], int], ...] = (operator.index, len)
    for count in counts if not isinstance(total, bool) else ():
        with suppress(TypeError):  # An array has both, and is no number.
            return count(total)
    raise TypeError(
        f"{type(total).__name__} has no length: pass the number of samples, a dataset with a length, or a strata.Mixture"
    )
