"""Several ranks, one of which is killed; the survivors save what they have, and all are started again."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

import strata
from tests.support_ranks import ranks
from tests.training.live_script import SAMPLES

pytestmark = pytest.mark.timeout(600)

STEPS = 2 * SAMPLES // 8
LEFT = 3


def train(folder: Path, *, world: int = 2, plan: dict[str, Any] | None = None) -> list[Any]:
    """All ranks, to the end, or until one is killed."""
    memory = folder / "memory"
    memory.mkdir(parents=True, exist_ok=True)
    statuses = None
    if plan is not None:
        statuses = [LEFT if rank != plan["rank"] else -signal.SIGKILL for rank in range(world)]
    return ranks(
        "tests.training.live_script",
        folder=folder,
        world=world,
        environment={"STRATA_MEMORY_ROOT": str(memory), "PLAN": json.dumps(plan or {})},
        statuses=statuses,
    )


def said(folder: Path, rank: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / f"left{rank}.json").read_text())
    return found


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What each rank ends with that nobody disturbs."""
    return train(tmp_path_factory.mktemp("undisturbed"))


@pytest.mark.parametrize(
    ("rank", "step", "where", "expected"),
    [
        (1, 6, "forward", 6),
        # All have its gradients: they make the step, and it has not. It was the process that kept the images; in the next epoch.
        (0, 13, "in optimizer", 14),
    ],
)
def test_no_step_is_lost_and_every_bit_is_the_same(
    tmp_path: Path, undisturbed: list[Any], rank: int, step: int, where: str, expected: int
) -> None:
    train(tmp_path, plan={"rank": rank, "step": step, "where": where})
    left = said(tmp_path, 1 - rank)
    assert left["reason"] == f"the live state is complete at step {expected}", left
    assert left["saved"] == [expected]
    again = train(tmp_path)
    assert [each["resumed"] for each in again] == [expected, expected]
    assert [each["weights"] for each in again] == [each["weights"] for each in undisturbed]
    if rank:  # Of running statistics each rank has its own, and the first rank's count.
        assert [each["statistics"] for each in again] == [each["statistics"] for each in undisturbed]
    assert all(strata.audit(tmp_path / "checkpoints", "numbers", epoch).exact for epoch in range(2))
