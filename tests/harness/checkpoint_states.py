"""States of training for the checkpoint tests: every value tells its step."""

from __future__ import annotations

from pathlib import Path

import torch

from elastic_harness.checkpoint import CheckpointState


def state_of(step: int, *, elements: int = 1000) -> CheckpointState:
    return CheckpointState(
        step=step,
        epoch=step // 100,
        model_state_dict={"weight": torch.full((elements,), float(step))},
        optimizer_state_dict={"state": {0: {"exp_avg": torch.full((4,), float(step))}}, "param_groups": []},
        metrics={"loss": 1.0 / (step + 1)},
        world_size=4,
    )


def assert_is(state: CheckpointState | None, step: int) -> None:
    assert state is not None
    assert state.step == step
    assert bool((state.model_state_dict["weight"] == step).all())
    assert bool((state.optimizer_state_dict["state"][0]["exp_avg"] == step).all())
    assert state.metrics == {"loss": 1.0 / (step + 1)}
    assert state.world_size == 4


def damage(path: Path) -> None:
    """Change one bit of the weights in a file made of `state_of`."""
    raw = bytearray(path.read_bytes())
    state = torch.load(path, weights_only=True)
    weights = state["model_state_dict"]["weight"].numpy().tobytes()
    raw[raw.index(weights) + 17] ^= 1
    path.write_bytes(raw)
