"""Weights that are changed while a job trains change at the same step on every rank, and do so again after a crash."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import strata
from strata.core.data.mixture import Change, MixturePlan
from strata.data.history import audit_by_source
from tests.cli.running import strata as run_strata
from tests.support import Coordinator
from tests.support_ranks import ranks
from tests.training.mixture_script import BATCH, CHANGED, mixture

LAST = CHANGED + 10
SCRIPT = "tests.training.mixture_script"


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[Coordinator]:
    server = Coordinator(tmp_path / "coordinator").start()
    yield server
    server.stop()


def expected() -> list[list[float]]:
    """What an undisturbed run with these weights trains in each step."""
    plan = MixturePlan(
        definition=mixture().definition,
        changes=(Change(step=CHANGED, weights={"code": 0.5}, number=1),),
        global_batch_size=BATCH,
    )
    leaf, _, sample = plan.choose(np.arange(LAST * BATCH))
    return (leaf * 10_000.0 + sample).reshape(-1, BATCH).tolist()


@pytest.mark.timeout(1_200)
@pytest.mark.parametrize("world", [1, 3, pytest.param(8, marks=pytest.mark.slow)])
def test_weights_change_at_the_same_step_on_every_rank_and_in_every_replay(
    world: int, tmp_path: Path, coordinator: Coordinator
) -> None:
    def life(name: str, size: int, *, statuses: list[int] | None = None) -> list[Any]:
        return ranks(
            SCRIPT,
            coordinator.address,
            coordinator.url,
            name,
            str(LAST),
            folder=tmp_path / "job",
            world=size,
            statuses=statuses,
        )

    # The first process that has adopted the change dies in the same moment: no checkpoint has to know of it.
    life("crash at adoption", world, statuses=[9] * world)
    life("crash after the change", world, statuses=[9] * world)
    found = life("", world + 1)
    assert [each["started_with"] for each in found] == [[1]] * (world + 1)
    wanted = expected()
    first = found[0]["trained"][0][0]
    assert found[0]["trained"][-1][0] == LAST - 1
    for step in range(first, LAST):
        together = [
            value
            for each in found
            for number, values in each["trained"]
            if number == step
            for value in values
        ]
        assert together == wanted[step], f"step {step}"
    checkpoints = tmp_path / "job" / "checkpoints"
    assert strata.audit(checkpoints, "mix").clean
    reports = audit_by_source(checkpoints)
    assert all(report.exact for report in reports)
    assert sum(report.samples for report in reports) == LAST * BATCH

    shown = run_strata("mixture", "show", "mixed", "--api", coordinator.url, "--json")
    assert [(each["from_step"], each["status"]) for each in json.loads(shown.out)["changes"]] == [
        (CHANGED, "adopted")
    ]
    from_checkpoints = run_strata("mixture", "show", str(checkpoints), "--json")
    assert json.loads(from_checkpoints.out)["weights"] == json.loads(shown.out)["weights"]
    by_source = run_strata("audit", str(checkpoints), "--by-source")
    assert (by_source.code, "exact" in by_source.out) == (0, True)
