"""The live state of a rank that survives others: what is known of it, and putting back what the step under way has changed.

Only a job in a recoverable run looks at it: `set_live_run` says that there is one. Then, at every boundary (the loop asks for the
next batch after a step), `LiveState` notes what `strata.core.jobs.live` decides by: how often the optimizer has stepped, how often each
tensor was changed, the settings of optimizer, scheduler and extras, the position in the data, and on CUDA an event behind the
step. It keeps what the next forward pass may change: the generators, and copies of small buffers (running statistics, which some
kernels change without a trace) and of larger ones once they were seen to change.

When the job is left with an error, a state that is known to be complete is saved by one rank of each machine, alone: a
**rescue**, which the next start finds in memory like any other snapshot. Where ranks have running statistics of their own, it has
those of the rank that saved it, as any snapshot of that machine has.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Protocol

import torch
from torch import distributed

from strata.agent.trace import GeneratorTrace
from strata.core.jobs.live import Boundary, Device, Facts, Frozen
from strata.core.jobs.roster import Roster
from strata.data.loading.loader import ElasticLoader
from strata.torch_compat.images import copy_all
from strata.torch_compat.modules import OwnedTensor, plain_tensors, state_tensors, version_of
from strata.training import rng
from strata.training.exchange import is_distributed, rank_and_world
from strata.training.metrics.account import TimeAccount
from strata.training.state import TrainingState, unwrap

if TYPE_CHECKING:
    from strata.training.job import ElasticJob
    from strata.training.link import CoordinatorLink

SMALL_BUFFER = 16_384
"""Buffers of at most so many elements are copied at every boundary, changed or not."""
OUTLINE_DEPTH = 6

_cuda: Any = torch.cuda  # Its module is not typed.


@dataclass(frozen=True, slots=True, kw_only=True)
class Reentry:
    """A process enters its job again, by the monotonic clock."""

    noticed_s: float
    """It noticed that the ranks were about to change."""
    left_s: float
    """It had left its job."""
    reason: str = ""
    """Why the ranks changed."""


@dataclass(slots=True, kw_only=True)
class Presence:
    """What a process is in its run, from one entry of its job to the next."""

    job: str
    run: str
    name: str
    """As a worker, whatever its rank."""
    roster: Roster
    """Of the ranks that it was last one of."""
    account: TimeAccount
    link: CoordinatorLink | None

    def continues(self, job: str, run: str) -> bool:
        """Whether this job is the same worker's; not where the coordinator has refused it."""
        is_silent = self.link is not None and (self.link.superseded or self.link.refused) is not None
        return (job, run) == (self.job, self.run) and not is_silent

    def close(self) -> None:
        """The process does not enter its job again."""
        if self.link is not None:
            self.link.close(leave=False)
            self.link = None


class LiveRun(Protocol):
    """A run whose processes enter their job again when others are lost."""

    presence: Presence | None
    """Of this process; None until its job has started once."""

    @property
    def reentry(self) -> Reentry | None:
        """None when a process enters for the first time."""
        ...

    def check(self) -> None:
        """Raises where this process must leave its job: the ranks change."""
        ...

    def others_leave(self, reason: str) -> NoReturn:
        """Raises what this process leaves its job by, to enter it again without ranks that were asked to end."""
        ...

    def stepped(self, step: int) -> None:
        """The first step since the job was entered."""
        ...

    def attach(self, job: ElasticJob) -> None:
        """A job has started: code that aborts its process groups calls `job.freeze()` right before."""
        ...

    def detach(self, job: ElasticJob) -> None:
        """It has closed."""
        ...

    def may_rescue(self, step: int) -> bool:
        """Whether this rank is to save its state, which is complete at this step."""
        ...

    def rescued(self, step: int) -> None:
        """It has."""
        ...


current_live_run: LiveRun | None = None


def set_live_run(run: LiveRun | None) -> None:
    """From now on the jobs of this process belong to a recoverable run, or to none."""
    global current_live_run
    current_live_run = run


def current() -> LiveRun | None:
    return current_live_run


class _Noted(NamedTuple):
    """A boundary, and what was true at it."""

    boundary: Boundary
    events: tuple[Any, ...]
    """On each device, behind the step."""
    versions: list[int]
    """Of the tensors that only the optimizer changes."""
    loose_versions: list[int]
    outline: object
    position: tuple[int, int]
    generators: rng.Taken


class LiveState:
    """Watches the state of one job."""

    def __init__(
        self, state: TrainingState, data: ElasticLoader, *, step: int, trace: GeneratorTrace
    ) -> None:
        self._state = state
        self._sampler = data.sampler
        self._trace = trace
        self._watch = rng.Watch()
        self._began = self._ended = 0
        self._step = step
        self._noted: _Noted | None = None
        self._frozen: Frozen | None = None
        self._lock = threading.Lock()
        self._unwatched: list[str] = []
        """What cannot be watched for changes."""
        self._kept: list[OwnedTensor] = []
        """Buffers that there are copies of."""
        self._copies: list[torch.Tensor] = []
        self._loose: list[OwnedTensor] = []
        """Buffers that have not been seen to change."""
        self._tensors: list[OwnedTensor] = []
        """What only the optimizer changes: parameters, and its state."""
        self._states = -1
        self._with_settings = list(self._optimizers().values())
        others = [state.scheduler, *(state.extra or {}).values()]
        self._with_attributes = [
            item
            for item in others
            if item is not None and not isinstance(item, torch.nn.Module | torch.optim.Optimizer)
        ]
        self._look_at_modules()
        self._look_at_optimizers()
        self._loose_versions = _versions(self._loose)
        self._hooks: list[Any] = []
        # Nccl's own watchdog aborts what hangs, and it is not known when.
        self._is_alone = rank_and_world()[1] == 1
        self._aborts_itself = is_distributed() and "nccl" in str(distributed.get_backend())
        if isinstance(state.optimizer, torch.optim.Optimizer):
            self._hooks = [
                state.optimizer.register_step_pre_hook(self._begin),
                state.optimizer.register_step_post_hook(self._end),
            ]

    # --- while training -------------------------------------------------------------------------------------

    def _begin(self, *_: object) -> None:
        self._began += 1
        # If this rank is lost between here and the boundary, others may have made the step: what it draws from then on, it draws
        # from these, unless other code draws meanwhile.
        self._trace.leave(self._step + 1, self._watch.take())

    def _end(self, *_: object) -> None:
        self._ended += 1

    def reach(self, step: int) -> None:
        """The loop has asked for the next batch after this step."""
        if len(self._optimizer_states()) != self._states:
            self._look_at_optimizers()
        loose_versions = _versions(self._loose)
        if loose_versions != self._loose_versions:
            self._keep_changed(loose_versions)
            loose_versions = _versions(self._loose)
        self._loose_versions = loose_versions
        if self._kept:
            with torch.no_grad():
                copy_all(self._copies, [each.owner[each.key] for each in self._kept])
        generators = self._watch.take()
        self._step = step
        self._noted = _Noted(
            boundary=Boundary(step=step, made=self._ended),
            events=tuple(map(_record, self._devices)),
            versions=list(map(version_of, self._watched)),
            loose_versions=loose_versions,
            outline=self._outline(),
            position=(self._sampler.epoch, self._sampler.position),
            generators=generators,
        )
        self._trace.leave(step, generators)

    def freeze(self) -> None:
        """Process groups are about to be aborted: remember what is known now. From any thread; never waits. A rank by itself has no
        contributions of others to miss; what its device has still to do may be torn all the same."""
        if self._is_alone and not self._devices:
            return
        with self._lock:
            if self._frozen is None:
                began, noted = self._began, self._noted
                step = noted.boundary.step if noted is not None else self._step
                self._frozen = Frozen(step=step, began=began, device=_device(noted))

    # --- afterwards -----------------------------------------------------------------------------------------

    def facts(self, *, is_sharded: bool, sees_steps: bool) -> Facts:
        noted, frozen = self._noted, self._frozen
        if noted is None:
            return Facts(boundary=None, is_sharded=is_sharded, sees_steps=sees_steps)
        device = _device(noted)
        if device != "none" and frozen is None and self._aborts_itself:
            device = "unknown"
        return Facts(
            boundary=noted.boundary,
            began=self._began,
            ended=self._ended,
            sees_steps=sees_steps and bool(self._hooks),
            is_sharded=is_sharded,
            frozen=frozen,
            device=device,
            has_read_on=(self._sampler.epoch, self._sampler.position) != noted.position,
            changed=tuple(self._changed(noted)),
        )

    def put_back(self) -> None:
        """What the step under way has changed is as it was at the boundary."""
        if self._kept:
            with torch.no_grad():
                copy_all([each.owner[each.key] for each in self._kept], self._copies)

    def generators(self) -> rng.Taken:
        """As they were at the boundary."""
        assert self._noted is not None
        return self._noted.generators

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._trace.close()

    # --- what is watched ------------------------------------------------------------------------------------

    def _modules(self) -> dict[str, torch.nn.Module]:
        extra = self._state.extra or {}
        found = {f"extra '{name}'": item for name, item in extra.items() if isinstance(item, torch.nn.Module)}
        return {"model": unwrap(self._state.model), **found}

    def _optimizers(self) -> dict[str, torch.optim.Optimizer]:
        items = {"optimizer": self._state.optimizer}
        items |= {f"extra '{name}'": item for name, item in (self._state.extra or {}).items()}
        return {name: item for name, item in items.items() if isinstance(item, torch.optim.Optimizer)}

    def _look_at_modules(self) -> None:
        self._of_modules: list[OwnedTensor] = []
        for name, module in self._modules().items():
            tensors = plain_tensors(module)
            if tensors is None:
                self._unwatched.append(f"{name}, which creates its state in a custom way")
                continue
            parameters = set(map(id, module.parameters()))
            for each in tensors:
                if id(each.tensor) in parameters:
                    self._of_modules.append(each)
                elif each.tensor.numel() <= SMALL_BUFFER:
                    self._keep(each)
                else:
                    self._loose.append(each)

    def _optimizer_states(self) -> Mapping[Any, Any]:
        optimizer = self._state.optimizer
        return optimizer.state if isinstance(optimizer, torch.optim.Optimizer) else {}

    def _look_at_optimizers(self) -> None:
        """An optimizer makes its state when it first steps."""
        self._states = len(self._optimizer_states())
        self._unwatched = [text for text in self._unwatched if "state for its parameters" not in text]
        self._tensors = list(self._of_modules)
        for name, optimizer in self._optimizers().items():
            tensors = state_tensors(optimizer)
            if tensors is None:
                self._unwatched.append(f"{name}, whose state for its parameters is more than tensors")
            self._tensors += tensors or []
        self._watched = [each.tensor for each in self._tensors]
        self._devices = _devices_of((*self._tensors, *self._kept, *self._loose))

    def _keep(self, buffer: OwnedTensor) -> None:
        self._kept.append(buffer)
        self._copies.append(buffer.tensor.detach().clone())

    def _keep_changed(self, versions: list[int]) -> None:
        still_loose = []
        for each, now, before in zip(self._loose, versions, self._loose_versions, strict=True):
            if now == before:
                still_loose.append(each)
            else:
                self._keep(each)
        self._loose = still_loose

    def _outline(self) -> object:
        """Whatever is not in tensors: the settings of optimizers, schedulers, and extras."""
        try:
            return [
                *(_outline(_settings(optimizer)) for optimizer in self._with_settings),
                *(_outline(vars(item)) for item in self._with_attributes),
            ]
        except (_Unwatchable, TypeError):
            return None

    def _changed(self, noted: _Noted) -> Iterable[str]:
        yield from self._unwatched
        # A buffer that was first seen to change in this very step is among neither.
        for watched, versions in ((self._tensors, noted.versions), (self._loose, noted.loose_versions)):
            for each, version in zip(watched, versions, strict=True):
                if not each.is_current() or version_of(each.tensor) != version:
                    yield f"'{each.name}'"
        for buffer in self._kept:
            live = buffer.owner.get(buffer.key)
            if live is None or live.shape != buffer.tensor.shape or live.dtype != buffer.tensor.dtype:
                yield f"'{buffer.name}'"
        if len(self._optimizer_states()) != self._states:
            yield "the optimizer's state"
        now = self._outline()
        if now is None or noted.outline is None:
            yield "a scheduler or an extra, which cannot be watched"
        elif now != noted.outline:
            yield "the settings of the optimizer, the scheduler or an extra"


def _versions(watched: Iterable[OwnedTensor]) -> list[int]:
    return [version_of(each.tensor) for each in watched]


def _devices_of(watched: Iterable[OwnedTensor]) -> list[torch.device]:
    """Those whose work is not done when a call returns."""
    return list(dict.fromkeys(each.tensor.device for each in watched if each.tensor.is_cuda))


def _record(device: torch.device) -> Any:
    event = _cuda.Event()
    event.record(_cuda.current_stream(device))
    return event


def _device(noted: _Noted | None) -> Device:
    if noted is None or not noted.events:
        return "none"
    return "done" if all(event.query() for event in noted.events) else "pending"


class _Unwatchable(Exception):
    """A change of it could not be seen."""


_PLAIN = frozenset({int, float, bool, str, bytes, type(None), complex})
_BY_IDENTITY = (
    FunctionType,
    BuiltinFunctionType,
    MethodType,
    ModuleType,
    type,
    partial,
    torch.device,
    torch.dtype,
    torch.nn.Module,
    torch.optim.Optimizer,
)


def _settings(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups
    ]


def _outline(value: Any, depth: int = 0) -> object:
    """Something that equals what will be made of the same value later, unless it has changed."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if depth > OUTLINE_DEPTH:
        raise _Unwatchable
    if isinstance(value, torch.Tensor):
        return id(value), version_of(value)
    if isinstance(value, dict):
        return [
            (key, each if type(each) in _PLAIN else _outline(each, depth + 1)) for key, each in value.items()
        ]
    if isinstance(value, list | tuple):
        return [each if type(each) in _PLAIN else _outline(each, depth + 1) for each in value]
    if isinstance(value, _BY_IDENTITY):
        return id(value)
    return [kind, _outline(vars(value), depth + 1)]  # TypeError where it has no attributes.
