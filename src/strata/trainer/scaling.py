"""Learning rate and gradient accumulation for a world that changes size.

Both are pure functions of the base settings and the present world (`scaled_lr`, `accumulation_steps`): whatever
happened in between, the same world always gives the same values, bit for bit. The managers only remember which
world it is and, for a short while after a change, how far the ramp to the new rate has come. Torch is imported
only to build a scheduler; an optimizer here is anything with `param_groups`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from enum import Enum, StrEnum
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast, overload

from strata.trainer.errors import CheckpointValidationError, ConfigurationError

if TYPE_CHECKING:
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LambdaLR

logger = logging.getLogger(__name__)

STRATEGIES = ("variable_batch", "constant_batch")
Strategy = Literal["variable_batch", "constant_batch"]


class RoundingMode(StrEnum):
    """What happens to a global batch that the workers cannot share evenly. Each equals its own text."""

    CEIL = "ceil"
    FLOOR = "floor"
    NEAREST = "nearest"


ROUNDING_MODES = tuple(mode.value for mode in RoundingMode)


class HasParamGroups(Protocol):
    """The one thing asked of an optimizer."""

    @property
    def param_groups(self) -> list[dict[str, Any]]: ...


class ScalingRule(Enum):
    """How the learning rate follows the global batch."""

    LINEAR = "linear"
    SQRT = "sqrt"
    NONE = "none"


RuleName = Literal["linear", "sqrt", "none"]


@dataclass(frozen=True, slots=True)
class ScalingConfig:
    """The rate that was tuned, and for which world. `base_batch_size` counts samples per worker."""

    base_lr: float
    base_batch_size: int
    base_world_size: int
    scaling_rule: ScalingRule | RuleName = ScalingRule.LINEAR
    warmup_steps: int = 100
    min_lr: float = 1e-7
    max_lr: float = 1e-2

    def __post_init__(self) -> None:
        object.__setattr__(self, "scaling_rule", _rule(self.scaling_rule))
        _require_positive("scaling", base_lr=self.base_lr, max_lr=self.max_lr)
        _require_counts("scaling", base_batch_size=self.base_batch_size, base_world_size=self.base_world_size)
        if self.warmup_steps < 0:
            raise ConfigurationError(
                f"warmup_steps ({self.warmup_steps}) cannot be negative", section="scaling"
            )
        if not 0 <= self.min_lr <= self.max_lr:
            raise ConfigurationError(
                f"min_lr ({self.min_lr:g}) must lie between 0 and max_lr ({self.max_lr:g})", section="scaling"
            )

    @property
    def base_effective_batch_size(self) -> int:
        return self.base_batch_size * self.base_world_size


def scaled_lr(config: ScalingConfig, world_size: int, batch_size: int | None = None) -> float:
    """The learning rate for `world_size` workers with `batch_size` samples each."""
    _require_world(world_size)
    if batch_size is not None and batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, not {batch_size}")
    factor = _factor(
        config.scaling_rule,
        old=config.base_effective_batch_size,
        new=world_size * (batch_size or config.base_batch_size),
    )
    return min(max(config.base_lr * factor, config.min_lr), config.max_lr)


@overload
def get_scaled_lr(config: ScalingConfig, world_size: int, batch_size: int | None = None) -> float: ...
@overload
def get_scaled_lr(
    base_lr: float,
    old_effective_batch: int,
    new_effective_batch: int,
    /,
    *,
    scaling_rule: ScalingRule | RuleName = ...,
) -> float: ...
@overload
def get_scaled_lr(
    *,
    base_lr: float,
    old_effective_batch: int,
    new_effective_batch: int,
    scaling_rule: ScalingRule | RuleName = ...,
) -> float: ...
def get_scaled_lr(
    config: ScalingConfig | float | None = None,
    world_size: int | None = None,
    batch_size: int | None = None,
    *,
    base_lr: float | None = None,
    old_effective_batch: int | None = None,
    new_effective_batch: int | None = None,
    scaling_rule: ScalingRule | RuleName = ScalingRule.LINEAR,
) -> float:
    """`scaled_lr`, or, as in earlier versions, a rate between two global batches, without limits."""
    if isinstance(config, ScalingConfig):
        if world_size is None:
            raise TypeError("world_size is missing")
        return scaled_lr(config, world_size, batch_size)
    return _between_batches(
        scaling_rule,
        base_lr=config if base_lr is None else base_lr,
        old_effective_batch=world_size if old_effective_batch is None else old_effective_batch,
        new_effective_batch=batch_size if new_effective_batch is None else new_effective_batch,
    )


def _between_batches(rule: ScalingRule | RuleName, *, base_lr: float | None, **batches: int | None) -> float:
    missing = [name for name, value in {"base_lr": base_lr, **batches}.items() if value is None]
    if base_lr is None or missing:
        raise TypeError(f"missing: {', '.join(missing)}")
    old, new = (value or 0 for value in batches.values())
    if min(old, new) < 1:
        raise ValueError(f"batches must be at least 1, not {old} and {new}")
    return base_lr * _factor(rule, old=old, new=new)


def _factor(rule: ScalingRule | RuleName, *, old: int, new: int) -> float:
    match _rule(rule):
        case ScalingRule.LINEAR:
            return new / old
        case ScalingRule.SQRT:
            return math.sqrt(new / old)
        case ScalingRule.NONE:
            return 1.0


def _rule(rule: object) -> ScalingRule:
    try:
        return ScalingRule(rule)
    except ValueError:
        raise ConfigurationError(
            f"Unknown scaling rule '{rule}'. Valid options: {[each.value for each in ScalingRule]}",
            section="scaling",
        ) from None


class WarmupScheduler:
    """A straight ramp from one rate to another. Each value is computed from the step number, so nothing adds
    up, and the last one is exactly `target_lr`."""

    def __init__(self, start_lr: float, target_lr: float, warmup_steps: int) -> None:
        if warmup_steps < 0:
            raise ValueError(f"warmup_steps cannot be negative, not {warmup_steps}")
        self.start_lr = start_lr
        self.target_lr = target_lr
        self.warmup_steps = warmup_steps
        self.current_step = 0

    @property
    def is_complete(self) -> bool:
        return self.current_step >= self.warmup_steps

    def get_lr(self, step: int | None = None) -> float:
        """The rate at `step` of the ramp; without one, where the ramp is now."""
        step = self.current_step if step is None else max(0, step)
        if step >= self.warmup_steps:
            return self.target_lr
        return self.start_lr + (self.target_lr - self.start_lr) * (step / self.warmup_steps)

    def step(self) -> float:
        """Advance by one step; the rate from here on."""
        self.current_step = min(self.current_step + 1, self.warmup_steps)
        return self.get_lr()


class LRScalingManager:
    """Keeps an optimizer's learning rate right for the present world.

    Parameter groups keep the ratios they had to the first group when the manager was made.
    """

    def __init__(self, config: ScalingConfig, optimizer: HasParamGroups) -> None:
        self.config = config
        self.optimizer = optimizer
        self.world_size = config.base_world_size
        self.batch_size = config.base_batch_size
        self._warmup: WarmupScheduler | None = None
        self._schedule_factor = 1.0
        first = float(optimizer.param_groups[0]["lr"])
        self._group_ratios = [float(g["lr"]) / first if first else 1.0 for g in optimizer.param_groups]
        if self.target_lr != config.base_lr:
            logger.warning(
                "base_lr %g lies outside min_lr..max_lr (%g..%g); using %g",
                config.base_lr, config.min_lr, config.max_lr, self.target_lr,
            )  # fmt: skip
        self._apply()

    @property
    def target_lr(self) -> float:
        """The rate this world settles at."""
        return scaled_lr(self.config, self.world_size, self.batch_size)

    @property
    def current_lr(self) -> float:
        """The rate now, before any schedule's factor."""
        return self.target_lr if self._warmup is None else self._warmup.get_lr()

    @property
    def is_warming_up(self) -> bool:
        return self._warmup is not None

    @property
    def current_effective_batch_size(self) -> int:
        return self.batch_size * self.world_size

    @overload
    def get_scaled_lr(self, world_size: int | None = None, batch_size: int | None = None) -> float: ...
    @overload
    def get_scaled_lr(
        self, base_lr: float, old_effective_batch: int, /, new_effective_batch: int
    ) -> float: ...
    @overload
    def get_scaled_lr(
        self, *, base_lr: float, old_effective_batch: int, new_effective_batch: int
    ) -> float: ...
    def get_scaled_lr(
        self,
        world_size: float | None = None,
        batch_size: int | None = None,
        new_effective_batch: int | None = None,
        *,
        base_lr: float | None = None,
        old_effective_batch: int | None = None,
    ) -> float:
        """The rate a world would settle at; by default the present one. Or, as in earlier versions, a rate between two
        global batches, without limits. Changes nothing."""
        if (base_lr, old_effective_batch, new_effective_batch) != (None, None, None):
            return _between_batches(
                self.config.scaling_rule,
                base_lr=world_size if base_lr is None else base_lr,
                old_effective_batch=batch_size if old_effective_batch is None else old_effective_batch,
                new_effective_batch=new_effective_batch,
            )
        if world_size is None:
            return scaled_lr(self.config, self.world_size, batch_size or self.batch_size)
        return scaled_lr(self.config, cast("int", world_size), batch_size)

    def on_topology_change(self, new_world_size: int, batch_size: int | None = None) -> float:
        """Aim at the rate of the new world, and return it. The way there takes `warmup_steps` steps. Without a
        `batch_size` workers keep theirs."""
        before, batch_size = self.current_lr, self.batch_size if batch_size is None else batch_size
        # Refuses bad input before anything changes.
        target = scaled_lr(self.config, new_world_size, batch_size)
        self.world_size = new_world_size
        self.batch_size = batch_size
        steps = self.config.warmup_steps
        self._warmup = WarmupScheduler(before, target, steps) if steps and target != before else None
        self._apply()
        return target

    def step(self, schedule_factor: float = 1.0) -> float:
        """Call once per optimizer step. `schedule_factor` is the place for a decay such as `cosine_factor`."""
        if self._warmup is not None:
            self._warmup.step()
            if self._warmup.is_complete:
                self._warmup = None
        self._schedule_factor = schedule_factor
        return self._apply()

    def _apply(self) -> float:
        lr = self.current_lr * self._schedule_factor
        for group, ratio in zip(self.optimizer.param_groups, self._group_ratios, strict=True):
            group["lr"] = lr * ratio
        return lr

    def state_dict(self) -> dict[str, Any]:
        warmup = self._warmup
        return {
            "world_size": self.world_size,
            "batch_size": self.batch_size,
            "schedule_factor": self._schedule_factor,
            "group_ratios": list(self._group_ratios),
            "warmup": None if warmup is None else [warmup.start_lr, warmup.current_step],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises `CheckpointValidationError` for a state without a world; what else an older one lacks is at rest."""
        world_size = int(_saved(state, "world_size", "current_world_size", of="the learning rate"))
        batch_size = int(
            state.get("batch_size") or state.get("current_batch_size") or self.config.base_batch_size
        )
        ratios = [float(ratio) for ratio in state.get("group_ratios", self._group_ratios)]
        if len(ratios) != len(self.optimizer.param_groups):
            raise ValueError(
                f"saved for {len(ratios)} parameter groups, not {len(self.optimizer.param_groups)}"
            )
        ramp = self._saved_ramp(state, target=scaled_lr(self.config, world_size, batch_size))
        self.world_size = world_size
        self.batch_size = batch_size
        self._schedule_factor = float(state.get("schedule_factor", 1.0))
        self._group_ratios = ratios
        self._warmup = ramp
        self._apply()
        if ramp is None and not math.isclose(state.get("current_lr", self.target_lr), self.target_lr):
            logger.warning(
                "the saved learning rate %g is not that of %d workers with %d samples each; using %g",
                state["current_lr"], world_size, batch_size, self.target_lr,
            )  # fmt: skip

    def _saved_ramp(self, state: Mapping[str, Any], *, target: float) -> WarmupScheduler | None:
        steps = self.config.warmup_steps
        if state.get("warmup") is not None:
            start_lr, step = state["warmup"]
        elif state.get("warmup_active") and int(state.get("warmup_step", 0)) < steps:
            # Earlier versions saved how far the ramp had come, and not where it began.
            step = int(state.get("warmup_step", 0))
            start_lr = (float(state.get("current_lr", target)) * steps - target * step) / (steps - step)
        else:
            return None
        ramp = WarmupScheduler(float(start_lr), target, steps)
        ramp.current_step = int(step)
        return ramp


@dataclass(frozen=True, slots=True)
class GradAccumulationConfig:
    """The global batch to hold, in samples, and what one worker takes at a time."""

    target_global_batch_size: int
    local_batch_size: int
    base_world_size: int
    rounding_mode: RoundingMode | Literal["ceil", "floor", "nearest"] = RoundingMode.CEIL

    def __post_init__(self) -> None:
        _require_counts(
            "scaling",
            target_global_batch_size=self.target_global_batch_size,
            local_batch_size=self.local_batch_size,
            base_world_size=self.base_world_size,
        )
        if self.rounding_mode not in ROUNDING_MODES:
            raise ConfigurationError(
                f"Unknown rounding mode '{self.rounding_mode}'. Valid options: {list(ROUNDING_MODES)}",
                section="scaling",
            )
        object.__setattr__(self, "rounding_mode", RoundingMode(self.rounding_mode))

    @property
    def base_accumulation_steps(self) -> int:
        return accumulation_steps(self, self.base_world_size)


def accumulation_steps(config: GradAccumulationConfig, world_size: int) -> int:
    """How many micro-batches each of `world_size` workers takes per optimizer step: at least one."""
    _require_world(world_size)
    target, at_once = config.target_global_batch_size, config.local_batch_size * world_size
    match RoundingMode(config.rounding_mode):
        case RoundingMode.CEIL:
            steps = -(-target // at_once)
        case RoundingMode.FLOOR:
            steps = target // at_once
        case RoundingMode.NEAREST:
            steps = (2 * target + at_once) // (2 * at_once)  # Halves round up.
    return max(1, steps)


class GradientAccumulationManager:
    """Counts micro-batches towards the next optimizer step."""

    def __init__(self, config: GradAccumulationConfig, world_size: int | None = None) -> None:
        self.config = config
        self.world_size = config.base_world_size if world_size is None else world_size
        _require_world(self.world_size)
        self._micro_step = 0

    @property
    def accumulation_steps(self) -> int:
        return accumulation_steps(self.config, self.world_size)

    @property
    def loss_scale_factor(self) -> float:
        """Divide each micro-batch's mean loss by this, and the sum is the mean over the whole step."""
        return float(self.accumulation_steps)

    @property
    def effective_batch_size(self) -> int:
        return self.config.local_batch_size * self.world_size * self.accumulation_steps

    def should_step(self) -> bool:
        """Call once per micro-batch: True when it completes an optimizer step."""
        self._micro_step += 1
        if self._micro_step < self.accumulation_steps:
            return False
        self._micro_step = 0
        return True

    def on_topology_change(self, new_world_size: int) -> int:
        """The steps for the new world. A half-accumulated step is dropped: its gradients died with the old one."""
        _require_world(new_world_size)
        self.world_size = new_world_size
        self._micro_step = 0
        return self.accumulation_steps

    def reset(self) -> None:
        """Begin the step again."""
        self._micro_step = 0

    @property
    def current_world_size(self) -> int:
        return self.world_size

    @property
    def current_accumulation_count(self) -> int:
        """Micro-batches of the step being made."""
        return self._micro_step

    def state_dict(self) -> dict[str, Any]:
        return {"world_size": self.world_size, "accumulated_count": self._micro_step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises `CheckpointValidationError` for a state without a world. How many micro-batches a step has follows from it."""
        world_size = int(_saved(state, "world_size", "current_world_size", of="gradient accumulation"))
        self.on_topology_change(world_size)
        self._micro_step = int(state.get("accumulated_count", 0)) % self.accumulation_steps


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingDecision:
    """What a change of the world means for the optimizer, and why. Also read like a dictionary: `decision["lr"]`."""

    world_size: int
    lr: float
    accumulation_steps: int
    effective_batch_size: int
    reason: str

    def keys(self) -> list[str]:
        return [each.name for each in fields(self)]

    def __contains__(self, name: object) -> bool:
        return name in self.keys()

    def __getitem__(self, name: str) -> Any:
        if name not in self:
            raise KeyError(name)
        return getattr(self, name)

    def get(self, name: str, default: Any = None) -> Any:
        return getattr(self, name) if name in self else default


class ElasticScalingManager:
    """Both answers to a changed world in one class.

    `constant_batch` holds the global batch with accumulation and leaves the learning rate alone;
    `variable_batch` lets the global batch follow the world and scales the learning rate with it.
    """

    def __init__(
        self,
        lr_config: ScalingConfig,
        accum_config: GradAccumulationConfig | None,
        optimizer: HasParamGroups,
        strategy: Strategy = "constant_batch",
    ) -> None:
        if strategy not in STRATEGIES:
            raise unknown_strategy(strategy)
        if strategy == "constant_batch" and accum_config is None:
            raise ConfigurationError(
                "target_global_batch_size is required for constant_batch strategy", section="scaling"
            )
        self.strategy: Strategy = strategy
        self.lr = LRScalingManager(lr_config, optimizer)
        self.accumulation = None if accum_config is None else GradientAccumulationManager(accum_config)
        self.world_size = lr_config.base_world_size

    @property
    def lr_manager(self) -> LRScalingManager:
        return self.lr

    @property
    def accum_manager(self) -> GradientAccumulationManager | None:
        return self.accumulation

    @property
    def accumulation_steps(self) -> int:
        return 1 if self.accumulation is None else self.accumulation.accumulation_steps

    @property
    def loss_scale_factor(self) -> float:
        """What the loss of a micro-batch is divided by."""
        return float(self.accumulation_steps)

    @property
    def effective_batch_size(self) -> int:
        local = self.lr.batch_size if self.accumulation is None else self.accumulation.config.local_batch_size
        return local * self.world_size * self.accumulation_steps

    @property
    def current_lr(self) -> float:
        return self.lr.current_lr

    def should_step(self) -> bool:
        return True if self.accumulation is None else self.accumulation.should_step()

    def step(self, schedule_factor: float = 1.0) -> float:
        return self.lr.step(schedule_factor)

    def step_lr(self) -> float:
        """`step` for loops without a schedule."""
        return self.step()

    def on_topology_change(self, new_world_size: int, batch_size: int | None = None) -> ScalingDecision:
        """`batch_size` is what each worker takes from now on, where that changes too."""
        _require_world(new_world_size)
        before, self.world_size = self.world_size, new_world_size
        if self.strategy == "constant_batch":
            assert self.accumulation is not None
            self.accumulation.on_topology_change(new_world_size)
            lr = self.lr.target_lr
        else:
            lr = self.lr.on_topology_change(new_world_size, batch_size)
        decision = ScalingDecision(
            world_size=new_world_size,
            lr=lr,
            accumulation_steps=self.accumulation_steps,
            effective_batch_size=self.effective_batch_size,
            reason=f"{self.strategy}: {before} -> {new_world_size} workers, learning rate {lr:g}, "
            f"{self.accumulation_steps} micro-batches a step, {self.effective_batch_size} samples a step",
        )
        logger.info("%s", decision.reason)
        return decision

    def state_dict(self) -> dict[str, Any]:
        return {"strategy": self.strategy, "world_size": self.world_size, "lr": self.lr.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Also loads a state of the learning rate alone. Raises `CheckpointValidationError` for one without a world."""
        state = _mapping(state, of="scaling")
        rates = [state[name] for name in ("lr", "lr_state") if isinstance(state.get(name), Mapping)]
        rate = rates[0] if rates else state
        world_size = int(_saved({**rate, **state}, "world_size", "current_world_size", of="scaling"))
        if self.strategy == "constant_batch":  # The rate is that of the base, whatever the world.
            base = self.lr.config
            rate = {**rate, "world_size": base.base_world_size, "batch_size": base.base_batch_size}
        self.lr.load_state_dict({"world_size": world_size, **rate})
        self.world_size = world_size
        if self.accumulation is not None and self.strategy == "constant_batch":
            self.accumulation.load_state_dict({**(state.get("accum_state") or {}), "world_size": world_size})


def cosine_factor(step: int, *, warmup_steps: int, total_steps: int, min_ratio: float = 0.1) -> float:
    """A linear warm-up to 1, then half a cosine down to `min_ratio` at `total_steps`, and flat from there."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if step >= total_steps:
        return min_ratio
    progress = (step - warmup_steps) / (total_steps - warmup_steps)
    return min_ratio + (1.0 - min_ratio) * 0.5 * (1.0 + math.cos(math.pi * progress))


def create_lr_scheduler_with_warmup(
    optimizer: Optimizer,
    warmup_steps: int,
    total_steps: int,
    min_lr: float | None = None,
    *,
    min_lr_ratio: float = 0.0,
) -> LambdaLR:
    """`cosine_factor` as a PyTorch scheduler, for loops that use one.

    `min_lr` is the rate every parameter group ends at; a group that starts below it keeps its own. Without it each
    group ends at `min_lr_ratio` of its rate, by default at 0.
    """
    from torch.optim.lr_scheduler import LambdaLR

    rates = [float(group.get("initial_lr", group["lr"])) for group in optimizer.param_groups]
    if min_lr is not None and not 0 <= min_lr <= max(rates):
        raise ConfigurationError(
            f"min_lr ({min_lr:g}) must lie between 0 and the learning rate ({max(rates):g})",
            section="scaling",
            suggestions=("It is a rate; a share of the learning rate is min_lr_ratio.",),
        )

    def factor_of(rate: float) -> Callable[[int], float]:
        ratio = min_lr_ratio if min_lr is None else min(1.0, min_lr / rate) if rate else 1.0
        return lambda step: cosine_factor(
            step, warmup_steps=warmup_steps, total_steps=total_steps, min_ratio=ratio
        )

    return LambdaLR(optimizer, [factor_of(rate) for rate in rates])


def unknown_strategy(strategy: object) -> ConfigurationError:
    return ConfigurationError(
        f"Unknown scaling strategy '{strategy}'. Valid options: {list(STRATEGIES)}", section="scaling"
    )


def _mapping(state: object, *, of: str) -> Mapping[str, Any]:
    if not isinstance(state, Mapping):
        raise CheckpointValidationError(f"The saved state of {of} is a {type(state).__name__}")
    return state


def _saved(state: object, *names: str, of: str) -> Any:
    """What a saved state holds under one of its names, the present one first."""
    state = _mapping(state, of=of)
    for name in names:
        if name in state:
            return state[name]
    raise CheckpointValidationError.missing_state(of, names[0], found=state)


def _require_world(world_size: int) -> None:
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, not {world_size}")


def _require_positive(section: str, **values: float) -> None:
    for name, value in values.items():
        if not value > 0 or math.isinf(value):
            raise ConfigurationError(f"{name} ({value:g}) must be positive", section=section)


def _require_counts(section: str, **values: int) -> None:
    for name, value in values.items():
        if value < 1:
            raise ConfigurationError(f"{name} ({value}) must be at least 1", section=section)
