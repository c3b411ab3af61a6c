"""Several datasets as one, in given proportions.

    mix = strata.Mixture(
        {"web": strata.tokens("web.index"), "code": strata.tokens("code.index"), "chat": chat},
        weights={"web": 0.7, "code": 0.2, "chat": 0.1},
        schedule=[(50_000, {"code": 0.4})],
        seed=7,
    )
    loader = strata.ElasticLoader(mix, strata.ElasticSampler(mix, global_batch_size=256), num_workers=4)

What comes at which position is decided by `strata.core.data.mixture`; this module reads it. The sampler turns positions into
sample ids in the training process, so loader processes know nothing of weights: an id says which epoch of which source
a sample belongs to. A sample's random numbers follow from its id, like everything else. Needs no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from strata.core.data.mixture import (
    Change,
    Definition,
    MixtureError,
    MixturePlan,
    Source,
    WhenExhausted,
)
from strata.core.data.order import Samples
from strata.data.composing.packing import Documents, PackedDocuments, pack
from strata.data.dataset import ElasticDataset
from strata.data.errors import StateMismatch
from strata.data.loading.steps import MapDataset, SizedDataset
from strata.data.streaming.prefetch import Ahead, FetchesAhead, ahead_of

Schedule = Sequence[tuple[int, Mapping[str, float]]]
Begin = Callable[[int], None]

_COUNTED_AT_ONCE = 65_536
_REMEMBERED = 16


@runtime_checkable
class Measured(Protocol):
    """A dataset that knows how long its samples are, without reading them."""

    def tokens_of(self, samples: Samples) -> NDArray[np.int64]:
        """Tokens of each sample."""
        ...

    def documents_of(self, samples: Samples) -> NDArray[np.int64]:
        """Documents that end in each sample."""
        ...


class Mixture(FetchesAhead):
    """A dataset composed of others. See `strata.core.data.mixture` for the order, docs/concepts/data.md for the rest."""

    def __init__(
        self,
        sources: Mapping[str, SizedDataset | Documents | Mixture],
        *,
        weights: Mapping[str, float],
        schedule: Schedule = (),
        seed: int = 0,
        epochs: int | Mapping[str, int | None] | None = None,
        when_exhausted: WhenExhausted = "stop",
        shuffle: bool = True,
        sequence_length: int | None = None,
        pack: bool = False,
    ) -> None:
        """`sources`: map-style datasets with a length, token indexes (`strata.tokens`), or other mixtures.
        `weights`: how much of each; they need not add up to 1.
        `schedule`: pairs of a step and the shares of some sources from that step on; the others divide the rest.
        `epochs`: how often sources may be read, of all or by name; by default they repeat. When one has run out, the
        mixture ends (`when_exhausted="stop"`) or continues without it.
        `sequence_length`: token indexes are read in sequences of this many tokens; with `pack`, the documents of every
        source are packed into such sequences.
        """
        if pack and sequence_length is None:
            raise MixtureError("pack=True needs a sequence_length")
        self._sources = {
            name: _prepared(name, source, sequence_length, pack=pack) for name, source in sources.items()
        }
        limits = epochs if isinstance(epochs, Mapping) else dict.fromkeys(sources, epochs)
        if unknown := sorted(set(limits) - set(sources)):
            raise MixtureError(f"epochs are given for {unknown[0]!r}, which is not a source")
        self.definition = Definition(
            sources=tuple(
                _source(name, source, limits.get(name), shuffle=shuffle)
                for name, source in self._sources.items()
            ),
            weights=dict(weights),
            schedule=tuple(Change(step=step, weights=dict(given)) for step, given in schedule),
            seed=seed,
            when_exhausted=when_exhausted,
        )
        self._leaves: list[Any] = []
        for source in self._sources.values():
            self._leaves += source._leaves if isinstance(source, Mixture) else [source]
        self._plan = MixturePlan(definition=self.definition)
        sizes = [leaf.size for leaf in self._plan.leaves]
        self._offsets = np.cumsum([0, *sizes[:-1]]).astype(np.int64)
        self._size = sum(sizes)

    @property
    def names(self) -> tuple[str, ...]:
        """Of all datasets; those of nested mixtures as `outer/inner`."""
        return tuple(leaf.name for leaf in self._plan.leaves)

    @property
    def samples_in_sources(self) -> int:
        """In one epoch of each, together."""
        return self._size

    @property
    def is_remote(self) -> bool:
        return any(getattr(leaf, "is_remote", False) for leaf in self._leaves)

    def ahead(self) -> Ahead | None:
        """What fetches samples of remote sources before they are read."""
        found = {
            leaf: ahead for leaf, each in enumerate(self._leaves) if (ahead := ahead_of(each)) is not None
        }
        return _MixtureAhead(self, found) if found else None

    # Reading ------------------------------------------------------------------------------------------------

    def id_of(
        self, leaf: ArrayLike, epoch: ArrayLike, sample: ArrayLike
    ) -> NDArray[np.int64] | NDArray[np.object_]:
        """One number for a sample of an epoch of a source: all that a loader process needs to know."""
        epochs = np.asarray(epoch, np.int64)
        if epochs.size and int(epochs.max()) > 2**62 // self._size:
            epochs = epochs.astype(object)
        return np.asarray(
            epochs * self._size + (self._offsets[np.asarray(leaf)] + np.asarray(sample, np.int64))
        )

    def found(self, id: int) -> tuple[str, int, int]:
        """Source, epoch of the source and sample that an id stands for."""
        epoch, place = divmod(int(id), self._size)
        leaf = int(np.searchsorted(self._offsets, place, side="right")) - 1
        return self.names[leaf], epoch, place - int(self._offsets[leaf])

    def __getitem__(self, id: int) -> Any:
        return self.read([id])[0]

    def __getitems__(self, ids: Sequence[int]) -> list[Any]:
        return self.read(ids)

    def read(self, ids: Sequence[int], *, begin: Begin | None = None) -> list[Any]:
        """The samples of these ids; `begin` is called with each before it is read."""
        found: list[Any] = [None] * len(ids)
        for leaf, chosen, samples in self.by_leaf(ids):
            rows = _read_source(self._leaves[leaf], samples, [ids[i] for i in chosen], begin)
            for i, row in zip(chosen, rows, strict=True):
                found[i] = row
        return found

    def by_leaf(self, ids: Sequence[int]) -> Iterator[tuple[int, list[int], list[int]]]:
        """For each dataset that ids are of: its number, which of the ids, and the samples they stand for."""
        places = np.asarray([id % self._size for id in ids], np.int64)
        which = np.searchsorted(self._offsets, places, side="right") - 1
        for leaf in np.unique(which).tolist():
            chosen = np.flatnonzero(which == leaf).tolist()
            yield leaf, chosen, (places[chosen] - self._offsets[leaf]).tolist()

    # What the sampler needs ---------------------------------------------------------------------------------

    @property
    def is_measured(self) -> bool:
        return any(isinstance(leaf, Measured) for leaf in self._leaves)

    def measure(self, plan: MixturePlan, start: int, stop: int) -> NDArray[np.int64]:
        """Documents and tokens of each leaf in positions [start, stop): one row each; 0 where a source cannot say."""
        sums = np.zeros((len(self._leaves), 2), np.int64)
        for first in range(start, stop, _COUNTED_AT_ONCE):
            leaf, _, sample = plan.choose(np.arange(first, min(first + _COUNTED_AT_ONCE, stop)))
            for index, dataset in enumerate(self._leaves):
                if isinstance(dataset, Measured) and len(chosen := sample[leaf == index]):
                    sums[index] += (dataset.documents_of(chosen).sum(), dataset.tokens_of(chosen).sum())
        return sums


class _MixtureAhead:
    def __init__(self, mixture: Mixture, aheads: dict[int, Ahead]) -> None:
        self._mixture = mixture
        self._aheads = aheads
        self.sample_bytes = max(each.sample_bytes for each in aheads.values())

    def fetch(self, samples: Sequence[int], *, in_memory: bool) -> None:
        for leaf, _, own in self._mixture.by_leaf(samples):
            if leaf in self._aheads:
                self._aheads[leaf].fetch(own, in_memory=in_memory)

    def close(self) -> None:
        for each in self._aheads.values():
            each.close()


class MixtureOrder:
    """The ids at the positions of a mixture, as its weights are now: what a sampler reads by."""

    def __init__(self, mixture: Mixture, *, global_batch_size: int) -> None:
        self.mixture = mixture
        self.plan = MixturePlan(definition=mixture.definition, global_batch_size=global_batch_size)
        self._counted: list[tuple[int, NDArray[np.int64]]] = []
        """How much there was of each leaf up to some positions, newest last."""

    def take(self, positions: ArrayLike) -> NDArray[Any]:
        leaf, epoch, sample = self.plan.choose(positions)
        return self.mixture.id_of(leaf, epoch, sample)

    def change(self, change: Change) -> None:
        self.plan = self.plan.changed(change)

    def state(self, position: int) -> dict[str, Any]:
        """What makes it possible to replay everything up to a position, and to continue from it."""
        measured = {}
        if self.mixture.is_measured:
            rows = zip(self.mixture.names, self._measured(position).tolist(), strict=True)
            sources = {name: row for name, row in rows if any(row)}
            measured = {"measured": {"up_to": position, "sources": sources}}
        return {
            "definition": self.plan.definition.to_json(),
            "changes": [change.to_json() for change in self.plan.changes],
            "global_batch_size": self.plan.global_batch_size,
            **measured,
        }

    def check(self, state: Mapping[str, Any]) -> MixturePlan:
        """The plan that a saved state was made with; `StateMismatch` where it is not one of this mixture."""
        saved = plan_of(state)
        if saved.definition != self.plan.definition:
            raise StateMismatch(
                f"The saved position belongs to another mixture: {_difference(saved.definition, self.plan.definition)}.",
                hint="Use the same sources, weights, schedule and seed to continue. To change the weights of a run: "
                "strata mixture set RUN NAME=SHARE --from-step STEP.",
            )
        if saved.global_batch_size != self.plan.global_batch_size and (
            saved.changes or saved.definition.schedule
        ):
            raise StateMismatch(
                f"The saved position was reached with a global batch of {saved.global_batch_size:,}, and the mixture has a "
                f"schedule by step; here a step is {self.plan.global_batch_size:,} positions.",
                hint="Continue with the same global_batch_size.",
            )
        return MixturePlan(
            definition=self.plan.definition,
            changes=saved.changes,
            global_batch_size=self.plan.global_batch_size,
        )

    def adopt(self, plan: MixturePlan, state: Mapping[str, Any]) -> None:
        self.plan = plan
        self._counted = []
        if measured := state.get("measured"):
            sums = [measured["sources"].get(name, (0, 0)) for name in self.mixture.names]
            self._counted = [(int(measured["up_to"]), np.asarray(sums, np.int64))]

    def _measured(self, position: int) -> NDArray[np.int64]:
        at, sums = 0, np.zeros((len(self.mixture.names), 2), np.int64)
        for known, then in self._counted:
            if at <= known <= position:
                at, sums = known, then
        sums = sums + self.mixture.measure(self.plan, at, position)
        self._counted = [*self._counted[1 - _REMEMBERED :], (position, sums)]
        return sums


def plan_of(state: Mapping[str, Any]) -> MixturePlan:
    """The plan that the `mixture` part of a saved position describes."""
    try:
        definition = Definition.from_json(state["definition"])
        changes = tuple(Change.from_json(change) for change in state["changes"])
        return MixturePlan(
            definition=definition, changes=changes, global_batch_size=int(state["global_batch_size"])
        )
    except (KeyError, TypeError, ValueError) as error:
        raise StateMismatch(f"This is not the record of a mixture: {error}.") from error


def _difference(saved: Definition, ours: Definition) -> str:
    theirs, mine = saved.to_json(), ours.to_json()
    sources = {s["name"]: s for s in theirs["sources"]}, {s["name"]: s for s in mine["sources"]}
    if list(sources[0]) != list(sources[1]):
        return f"its sources were {', '.join(sources[0])}, here they are {', '.join(sources[1])}"
    for name, was in sources[0].items():
        for key, value in was.items():
            if sources[1][name].get(key) != value:
                return f"{key} of source {name!r} was {value!r}, is {sources[1][name].get(key)!r}"
    return "; ".join(
        f"{key} was {theirs[key]!r}, is {mine[key]!r}" for key in theirs if theirs[key] != mine[key]
    )


def _prepared(name: str, source: Any, sequence_length: int | None, *, pack: bool) -> Any:
    if isinstance(source, Mixture):
        return source
    if not hasattr(source, "__getitem__") or not hasattr(source, "__len__"):
        raise MixtureError(
            f"source {name!r} is a {type(source).__name__}, which has no length or no samples by number: a mixture "
            "reads map-style datasets, token indexes (strata.tokens) and other mixtures"
        )
    if pack and sequence_length is not None and not isinstance(source, PackedDocuments):
        return _packed(source, sequence_length)
    if sequence_length is not None and hasattr(source, "sequences"):
        return source.sequences(sequence_length)
    return source


_packed = pack


def _source(name: str, source: Any, epochs: int | None, *, shuffle: bool) -> Source:
    if isinstance(source, Mixture):
        if epochs is not None:
            raise MixtureError(f"{name!r} is a mixture: give epochs to its sources")
        return Source(name=name, mixture=source.definition)
    return Source(name=name, size=len(source), epochs=epochs, shuffle=shuffle)


def _read_source(dataset: Any, samples: list[int], ids: list[int], begin: Begin | None) -> list[Any]:
    if isinstance(dataset, ElasticDataset):
        if begin is None:
            return dataset.read(samples)
        each = iter(ids)
        return dataset.read(samples, begin=lambda _: begin(next(each)))
    many = getattr(dataset, "__getitems__", None)
    if many is not None:
        if begin is not None:
            begin(ids[0])
        return list(many(samples))
    rows: list[Any] = []
    single: MapDataset = dataset
    for sample, id in zip(samples, ids, strict=True):
        if begin is not None:
            begin(id)
        rows.append(single[sample])
    return rows
