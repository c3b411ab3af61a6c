"""How a nested state becomes tensors and objects with names, and again a nested state."""

from __future__ import annotations

from strata.checkpoint.sharded.images import nested_state
from strata.checkpoint.sharded.plan import flattened


def test_what_is_empty_comes_back() -> None:
    state = {"optimizer": {"state": {}, "groups": []}, "extra": {"metrics": {"phases": {}, "steps": 3}}}
    assert nested_state(dict(flattened(state))) == state
