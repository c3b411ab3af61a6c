"""The learning rate and accumulation follow from base and world alone."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_harness.errors import CheckpointValidationError, ConfigurationError
from elastic_harness.scaling import (
    ElasticScalingManager,
    GradAccumulationConfig,
    GradientAccumulationManager,
    LRScalingManager,
    RoundingMode,
    ScalingConfig,
    ScalingRule,
    WarmupScheduler,
    accumulation_steps,
    cosine_factor,
    create_lr_scheduler_with_warmup,
    get_scaled_lr,
    scaled_lr,
)

worlds = st.integers(min_value=1, max_value=512)


def optimizer(*lrs: float) -> torch.optim.SGD:
    return torch.optim.SGD(
        [{"params": [torch.zeros(1, requires_grad=True)], "lr": lr} for lr in lrs or (1e-3,)]
    )


def lr_config(**changes: Any) -> ScalingConfig:
    settings: dict[str, Any] = {
        "base_lr": 1e-3,
        "base_batch_size": 32,
        "base_world_size": 4,
        "warmup_steps": 0,
    }
    return ScalingConfig(**{**settings, **changes})


def accum_config(**changes: Any) -> GradAccumulationConfig:
    settings: dict[str, Any] = {
        "target_global_batch_size": 1024,
        "local_batch_size": 32,
        "base_world_size": 4,
    }
    return GradAccumulationConfig(**{**settings, **changes})


def settle(manager: LRScalingManager) -> float:
    while manager.is_warming_up:
        manager.step()
    return float(manager.optimizer.param_groups[0]["lr"])


@pytest.mark.parametrize(
    ("rule", "expected"),
    [(ScalingRule.LINEAR, 2e-3), (ScalingRule.SQRT, 2**0.5 * 1e-3), (ScalingRule.NONE, 1e-3)],
)
def test_each_rule_scales_as_its_name_says(rule: ScalingRule, expected: float) -> None:
    assert scaled_lr(lr_config(scaling_rule=rule), 8) == pytest.approx(expected, rel=1e-15)


def test_batch_size_per_worker_counts_as_much_as_workers() -> None:
    assert scaled_lr(lr_config(), 2, batch_size=64) == 1e-3


def test_rate_stays_within_its_bounds() -> None:
    assert scaled_lr(lr_config(max_lr=1.5e-3), 400) == 1.5e-3
    assert scaled_lr(lr_config(min_lr=5e-4), 1) == 5e-4


@settings(deadline=None)
@given(st.lists(worlds, max_size=1000), st.sampled_from(ScalingRule), st.integers(min_value=0, max_value=3))
def test_no_sequence_of_changes_leaves_a_trace_in_the_rate(
    path: list[int], rule: ScalingRule, warmup: int
) -> None:
    manager = LRScalingManager(lr_config(scaling_rule=rule, warmup_steps=warmup), optimizer())
    start = settle(manager)
    for world in path:
        manager.on_topology_change(world)
        manager.step()
    manager.on_topology_change(4)
    assert settle(manager) == start


def test_a_thousand_changes_do_not_drift() -> None:
    manager = LRScalingManager(lr_config(base_lr=0.0007), optimizer(0.0007))
    for index in range(1000):
        manager.on_topology_change(1 + index * 7 % 13)
    assert manager.on_topology_change(4) == 0.0007
    assert manager.optimizer.param_groups[0]["lr"] == 0.0007


def test_four_to_two_to_four_returns_exactly() -> None:
    manager = LRScalingManager(lr_config(base_lr=3e-4, warmup_steps=7), optimizer(3e-4))
    assert manager.on_topology_change(2) == 1.5e-4
    assert settle(manager) == 1.5e-4
    manager.on_topology_change(4)
    assert settle(manager) == 3e-4


def test_a_change_ramps_over_the_warm_up_and_lands_on_the_target() -> None:
    manager = LRScalingManager(lr_config(warmup_steps=4), optimizer())
    assert manager.on_topology_change(8) == 2e-3
    assert manager.is_warming_up
    rates = [manager.step() for _ in range(4)]
    assert rates == pytest.approx([1.25e-3, 1.5e-3, 1.75e-3, 2e-3])
    assert rates[-1] == 2e-3
    assert not manager.is_warming_up


def test_no_ramp_when_the_rate_does_not_change() -> None:
    manager = LRScalingManager(lr_config(warmup_steps=100), optimizer())
    manager.on_topology_change(4)
    assert not manager.is_warming_up


def test_parameter_groups_keep_their_ratio() -> None:
    manager = LRScalingManager(lr_config(), optimizer(1e-3, 1e-4))
    manager.on_topology_change(8)
    assert [group["lr"] for group in manager.optimizer.param_groups] == [2e-3, 2e-4]


def test_bad_world_is_refused_and_changes_nothing() -> None:
    manager = LRScalingManager(lr_config(), optimizer())
    with pytest.raises(ValueError, match="at least 1"):
        manager.on_topology_change(0)
    assert (manager.world_size, manager.current_lr) == (4, 1e-3)


def test_state_survives_a_restart_in_the_middle_of_a_ramp() -> None:
    one = LRScalingManager(lr_config(warmup_steps=10), optimizer())
    one.on_topology_change(8)
    for _ in range(3):
        one.step(schedule_factor=0.5)
    two = LRScalingManager(lr_config(warmup_steps=10), optimizer())
    two.load_state_dict(one.state_dict())
    assert two.optimizer.param_groups[0]["lr"] == one.optimizer.param_groups[0]["lr"]
    assert [two.step() for _ in range(8)] == [one.step() for _ in range(8)]
    assert two.state_dict() == one.state_dict()


def test_warmup_scheduler_ends_exactly_on_its_target() -> None:
    ramp = WarmupScheduler(0.0, 0.3, 3)
    assert ramp.get_lr() == 0.0
    assert [ramp.step() for _ in range(5)][2:] == [0.3, 0.3, 0.3]
    assert WarmupScheduler(0.1, 0.3, 0).get_lr() == 0.3


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        ({"base_lr": 0.0}, r"base_lr \(0\) must be positive"),
        ({"base_lr": float("nan")}, "must be positive"),
        ({"base_world_size": 0}, r"base_world_size \(0\) must be at least 1"),
        ({"warmup_steps": -1}, "cannot be negative"),
        ({"min_lr": 1.0}, "between 0 and max_lr"),
    ],
)
def test_bad_scaling_settings_are_refused(bad: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        lr_config(**bad)


@pytest.mark.parametrize(
    ("world", "mode", "steps"),
    [
        (4, "ceil", 8),
        (3, "ceil", 11),
        (3, "floor", 10),
        (3, "nearest", 11),
        (2, "ceil", 16),
        (1, "ceil", 32),
        (64, "floor", 1),
        (5, "nearest", 6),
    ],
)
def test_accumulation_holds_the_global_batch(world: int, mode: Any, steps: int) -> None:
    assert accumulation_steps(accum_config(rounding_mode=mode), world) == steps


@settings(deadline=None)
@given(st.integers(1, 100_000), st.integers(1, 512), worlds)
def test_rounding_modes_bracket_the_target(target: int, local: int, world: int) -> None:
    floor, nearest, ceil = (
        accumulation_steps(
            accum_config(target_global_batch_size=target, local_batch_size=local, rounding_mode=mode), world
        )
        for mode in ("floor", "nearest", "ceil")
    )
    assert 1 <= floor <= nearest <= ceil <= floor + 1
    assert ceil * local * world >= target
    if target >= local * world:
        assert floor * local * world <= target
        assert abs(nearest * local * world - target) * 2 <= local * world


def test_should_step_is_true_once_per_window() -> None:
    manager = GradientAccumulationManager(accum_config())
    assert [manager.should_step() for _ in range(16)] == ([False] * 7 + [True]) * 2
    assert manager.loss_scale_factor == 8
    assert manager.effective_batch_size == 1024


def test_a_half_accumulated_step_is_dropped_when_the_world_changes() -> None:
    manager = GradientAccumulationManager(accum_config())
    for _ in range(7):
        manager.should_step()
    assert manager.on_topology_change(3) == 11
    assert [manager.should_step() for _ in range(11)] == [False] * 10 + [True]
    assert manager.effective_batch_size == 1056


def test_unknown_strategy_and_rounding_name_the_valid_ones() -> None:
    with pytest.raises(ConfigurationError) as caught:
        ElasticScalingManager(lr_config(), accum_config(), optimizer(), strategy="invalid")  # type: ignore[arg-type]
    assert caught.value.message == (
        "Configuration error in 'scaling': Unknown scaling strategy 'invalid'. "
        "Valid options: ['variable_batch', 'constant_batch']"
    )
    with pytest.raises(ConfigurationError, match="Unknown rounding mode 'up'"):
        accum_config(rounding_mode="up")


def test_constant_batch_needs_its_target() -> None:
    with pytest.raises(
        ConfigurationError, match="target_global_batch_size is required for constant_batch strategy"
    ):
        ElasticScalingManager(lr_config(), None, optimizer())


@settings(deadline=None)
@given(st.lists(worlds, max_size=50))
def test_constant_batch_never_touches_the_rate(path: list[int]) -> None:
    manager = ElasticScalingManager(lr_config(), accum_config(), optimizer())
    for world in path:
        decision = manager.on_topology_change(world)
        assert decision.lr == 1e-3
        assert decision.effective_batch_size >= 1024
    assert manager.on_topology_change(4).accumulation_steps == 8
    assert manager.lr.optimizer.param_groups[0]["lr"] == 1e-3


def test_variable_batch_scales_the_rate_and_not_the_accumulation() -> None:
    manager = ElasticScalingManager(lr_config(), accum_config(), optimizer(), strategy="variable_batch")
    decision = manager.on_topology_change(2)
    assert (decision.lr, decision.accumulation_steps, decision.effective_batch_size) == (5e-4, 8, 512)
    assert "4 -> 2 workers" in decision.reason
    without = ElasticScalingManager(lr_config(), None, optimizer(), strategy="variable_batch")
    assert without.on_topology_change(8).effective_batch_size == 256
    assert without.should_step()


def test_elastic_state_survives_a_restart() -> None:
    one = ElasticScalingManager(lr_config(), accum_config(), optimizer())
    one.on_topology_change(3)
    two = ElasticScalingManager(lr_config(), accum_config(), optimizer())
    two.load_state_dict(one.state_dict())
    assert (two.world_size, two.accumulation_steps, two.current_lr) == (3, 11, 1e-3)


def test_cosine_rises_falls_and_stays_at_its_floor() -> None:
    factors = [cosine_factor(step, warmup_steps=10, total_steps=100) for step in range(120)]
    assert factors[9] == factors[10] == 1.0
    assert factors[:10] == sorted(factors[:10])
    assert factors[10:100] == sorted(factors[10:100], reverse=True)
    assert set(factors[100:]) == {0.1}


def test_scheduler_follows_the_same_curve_as_the_pure_function() -> None:
    optim = optimizer(1.0)
    scheduler = create_lr_scheduler_with_warmup(optim, 3, 10, 0.0)
    for step in range(12):
        assert optim.param_groups[0]["lr"] == cosine_factor(
            step, warmup_steps=3, total_steps=10, min_ratio=0.0
        )
        optim.step()
        scheduler.step()


def test_dividing_by_the_loss_scale_factor_gives_the_gradient_of_the_whole_batch() -> None:
    """The documented loop: `loss / manager.loss_scale_factor` for each micro-batch."""
    manager = GradientAccumulationManager(
        accum_config(target_global_batch_size=8, local_batch_size=2, base_world_size=1)
    )
    samples = torch.arange(8.0)
    weight = torch.ones(1, requires_grad=True)
    (whole,) = torch.autograd.grad(((weight * samples) ** 2).mean(), weight)
    parts = [
        torch.autograd.grad(((weight * micro_batch) ** 2).mean() / manager.loss_scale_factor, weight)[0]
        for micro_batch in samples.split(2)
    ]
    assert manager.loss_scale_factor == manager.accumulation_steps == len(parts) == 4
    assert torch.equal(torch.stack(parts).sum(0), whole)


def test_min_lr_is_a_rate_and_every_group_ends_at_it() -> None:
    optim = optimizer(1e-3, 1e-4, 1e-6)
    scheduler = create_lr_scheduler_with_warmup(optim, 2, 10, min_lr=1e-5)
    for _ in range(12):
        optim.step()
        scheduler.step()
    assert [group["lr"] for group in optim.param_groups] == pytest.approx([1e-5, 1e-5, 1e-6])
    with pytest.raises(ConfigurationError, match=r"min_lr \(0.1\) must lie between 0 and the learning rate"):
        create_lr_scheduler_with_warmup(optimizer(1e-3), 2, 10, 0.1)


def test_without_min_lr_the_ratio_decides() -> None:
    optim = optimizer(1e-3)
    scheduler = create_lr_scheduler_with_warmup(optim, 0, 2, min_lr_ratio=0.5)
    for _ in range(3):
        optim.step()
        scheduler.step()
    assert optim.param_groups[0]["lr"] == pytest.approx(5e-4)


def test_with_neither_the_rate_ends_at_zero() -> None:
    optim = optimizer(1e-3)
    scheduler = create_lr_scheduler_with_warmup(optim, 1, 2)
    for _ in range(3):
        optim.step()
        scheduler.step()
    assert optim.param_groups[0]["lr"] == 0.0


def test_a_ramp_can_be_asked_for_any_step_and_does_not_move() -> None:
    ramp = WarmupScheduler(0.0, 1.0, 10)
    assert [ramp.get_lr(step) for step in (0, 5, 10, 99)] == [0.0, 0.5, 1.0, 1.0]
    assert ramp.get_lr() == 0.0


def test_scaled_rates_have_both_names() -> None:
    manager = LRScalingManager(lr_config(), optimizer())
    assert get_scaled_lr(lr_config(), 8) == manager.get_scaled_lr(8) == scaled_lr(lr_config(), 8) == 2e-3
    assert manager.get_scaled_lr() == 1e-3
    assert manager.world_size == 4


@pytest.mark.parametrize("mode", RoundingMode)
def test_rounding_modes_are_named_by_text_or_by_member(mode: RoundingMode) -> None:
    one, other = accum_config(rounding_mode=mode), accum_config(rounding_mode=mode.value)
    assert one == other
    assert accumulation_steps(one, 3) == accumulation_steps(other, 3)


def test_states_of_earlier_versions_load() -> None:
    manager = ElasticScalingManager(lr_config(), accum_config(), optimizer())
    manager.load_state_dict({"current_world_size": 3})
    assert (manager.world_size, manager.accumulation_steps) == (3, 11)
    manager.lr.load_state_dict({"world_size": 2})
    assert manager.lr.current_lr == 5e-4


def test_a_state_without_a_world_says_so_and_changes_nothing() -> None:
    manager = ElasticScalingManager(lr_config(), accum_config(), optimizer())
    for load in (manager.load_state_dict, manager.lr.load_state_dict):
        with pytest.raises(CheckpointValidationError, match="has no 'world_size'; it has step"):
            load({"step": 3})
    assert manager.world_size == manager.lr.world_size == 4


def test_a_rate_is_scaled_between_two_batches_as_in_earlier_versions() -> None:
    manager = LRScalingManager(lr_config(), optimizer())
    assert manager.get_scaled_lr(base_lr=1e-4, old_effective_batch=32, new_effective_batch=64) == 2e-4
    assert (
        manager.get_scaled_lr(1e-4, 32, 64) == manager.get_scaled_lr(1e-4, 32, new_effective_batch=64) == 2e-4
    )
    assert manager.get_scaled_lr(1.0, 1, 4) == 4.0, "as it was: not held within min_lr and max_lr"
    root = LRScalingManager(lr_config(scaling_rule="sqrt"), optimizer())
    assert root.get_scaled_lr(1e-4, 16, 64) == 2e-4
    assert get_scaled_lr(1e-4, 32, 64) == 2e-4
    assert (
        get_scaled_lr(base_lr=1e-4, old_effective_batch=16, new_effective_batch=64, scaling_rule="sqrt")
        == 2e-4
    )
    assert (manager.world_size, manager.current_lr) == (4, 1e-3)
    for wrong in ((1e-4, 0, 64), (1e-4, 32, 0)):
        with pytest.raises(ValueError, match="at least 1"):
            manager.get_scaled_lr(*wrong)
    with pytest.raises(TypeError, match="old_effective_batch"):
        manager.get_scaled_lr(base_lr=1e-4, new_effective_batch=64)  # type: ignore[call-overload]


def test_a_rule_is_named_by_text_or_by_member() -> None:
    assert lr_config(scaling_rule="linear") == lr_config(scaling_rule=ScalingRule.LINEAR)
    assert lr_config(scaling_rule="sqrt").scaling_rule is ScalingRule.SQRT
    with pytest.raises(
        ConfigurationError, match=r"Unknown scaling rule 'cubic'. Valid options: \['linear', 'sqrt', 'none'\]"
    ):
        lr_config(scaling_rule="cubic")


def test_batches_have_the_names_of_earlier_versions() -> None:
    manager = LRScalingManager(lr_config(), optimizer())
    manager.on_topology_change(2, batch_size=16)
    assert (manager.config.base_effective_batch_size, manager.current_effective_batch_size) == (128, 32)
    assert manager.on_topology_change(8) == 1e-3, "the batch of a worker stays until another is given"
    assert accum_config().base_accumulation_steps == 8


def test_what_a_change_led_to_is_read_like_a_dictionary_too() -> None:
    manager = ElasticScalingManager(lr_config(), accum_config(), optimizer())
    result = manager.on_topology_change(new_world_size=3)
    assert (result["lr"], result["accumulation_steps"], result.get("lr")) == (1e-3, 11, 1e-3)
    assert (result.get("nothing"), result.get("nothing", 5), "lr" in result) == (None, 5, True)
    assert dict(result)["world_size"] == 3
    with pytest.raises(KeyError, match="nothing"):
        result["nothing"]


def test_parts_of_the_manager_have_the_names_of_earlier_versions() -> None:
    manager = ElasticScalingManager(lr_config(warmup_steps=2), accum_config(), optimizer(), "variable_batch")
    assert manager.lr_manager is manager.lr
    assert manager.accum_manager is manager.accumulation
    manager.on_topology_change(8)
    assert [manager.step_lr(), manager.step_lr()] == [1.5e-3, 2e-3]


def test_accumulation_survives_a_restart_and_can_be_reset() -> None:
    one = GradientAccumulationManager(accum_config())
    one.on_topology_change(2)
    for _ in range(3):
        one.should_step()
    two = GradientAccumulationManager(accum_config())
    two.load_state_dict(one.state_dict())
    assert (two.current_world_size, two.accumulation_steps, two.current_accumulation_count) == (2, 16, 3)
    two.load_state_dict({"current_world_size": 1, "accumulation_steps": 32, "accumulated_count": 1})
    assert (two.current_world_size, two.accumulation_steps, two.current_accumulation_count) == (1, 32, 1)
    two.reset()
    assert two.current_accumulation_count == 0
    with pytest.raises(CheckpointValidationError, match="has no 'world_size'"):
        two.load_state_dict({})
    assert two.current_world_size == 1


def earlier(**changes: Any) -> dict[str, Any]:
    """What the learning rate's manager of an earlier version saved."""
    state = {"current_lr": 5e-4, "current_world_size": 2, "current_batch_size": 32}
    return {**state, "warmup_step": 0, "warmup_active": False, **changes}


def test_an_earlier_state_of_the_rate_keeps_its_batch(caplog: pytest.LogCaptureFixture) -> None:
    manager = LRScalingManager(lr_config(), optimizer())
    manager.load_state_dict(earlier(current_batch_size=64, current_lr=1e-3))
    assert (manager.batch_size, manager.current_lr) == (64, 1e-3)
    assert not caplog.records
    manager.load_state_dict(earlier(current_lr=7e-4))
    assert manager.current_lr == 5e-4
    assert (
        "the saved learning rate 0.0007 is not that of 2 workers with 32 samples each; using 0.0005"
        in caplog.text
    )


def test_an_earlier_state_in_the_middle_of_a_ramp_continues_it() -> None:
    manager = LRScalingManager(lr_config(warmup_steps=100), optimizer())
    manager.load_state_dict(earlier(current_lr=7.5e-4, warmup_step=50, warmup_active=True))
    assert manager.is_warming_up
    assert manager.current_lr == pytest.approx(7.5e-4)
    assert manager.step() == pytest.approx(7.45e-4)
    assert settle(manager) == 5e-4
    manager.load_state_dict(earlier(warmup_step=100, warmup_active=True))
    assert not manager.is_warming_up


@pytest.mark.parametrize(("strategy", "rate"), [("constant_batch", 1e-3), ("variable_batch", 5e-4)])
def test_an_earlier_state_of_both_loads(strategy: Any, rate: float, caplog: pytest.LogCaptureFixture) -> None:
    manager = ElasticScalingManager(lr_config(), accum_config(), optimizer(), strategy)
    accumulated = {"current_world_size": 2, "accumulation_steps": 16, "accumulated_count": 3}
    with caplog.at_level(logging.WARNING):
        manager.load_state_dict(
            {"lr_state": earlier(current_lr=rate), "strategy": strategy, "accum_state": accumulated}
        )
    assert (manager.world_size, manager.current_lr) == (2, rate)
    assert manager.lr.optimizer.param_groups[0]["lr"] == rate
    if strategy == "constant_batch":
        assert manager.accum_manager is not None
        assert (manager.accumulation_steps, manager.accum_manager.current_accumulation_count) == (16, 3)
    assert not caplog.records


@pytest.mark.parametrize("state", [None, [1], {"lr_state": {}}, {"lr_state": None}])
def test_a_state_that_is_none_is_refused_with_a_sentence(state: Any) -> None:
    manager = ElasticScalingManager(lr_config(), accum_config(), optimizer())
    for load in (manager.load_state_dict, manager.lr.load_state_dict):
        with pytest.raises(CheckpointValidationError, match="The saved state of"):
            load(state)
