"""Ranks of one tensor-parallel group read the same batches, which count once; meshes that cannot be meant are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import strata
from strata.errors import StrataError
from strata.training.data_world import _groups
from tests.support_ranks import ranks
from tests.training.loops import Loop
from tests.training.mesh_script import BATCH, SAMPLES

pytestmark = pytest.mark.timeout(300)


def run(case: str, folder: Path) -> list[dict[str, Any]]:
    return ranks("tests.training.mesh_script", case, folder=folder, world=4)


def test_ranks_of_a_group_read_the_same_batches_which_count_once(tmp_path: Path) -> None:
    found = run("train", tmp_path / "ranks")
    seen = [each["seen"] for each in found]
    assert seen[0] == seen[1]  # The mesh is (dp, tp): neighbours are a group.
    assert seen[2] == seen[3]
    assert seen[0] != seen[2]
    weights = {batch[-1] for batches in seen for batch in batches}
    assert weights == {4 * 2 / 7, 3 * 2 / 7, 1.0}  # Of two data ranks, not of four.
    for epoch in range(2):
        report = strata.audit(tmp_path / "ranks/checkpoints", "numbers", epoch)
        assert report.exact, report.reason
        assert report.samples == SAMPLES
    alone = Loop(tmp_path / "alone", samples=SAMPLES, sampler={"global_batch_size": BATCH}).run()
    for each in found:
        torch.testing.assert_close(torch.tensor(each["weights"]), alone.weights, rtol=0, atol=1e-5)


def test_a_mesh_of_several_dimensions_counts_row_by_row(tmp_path: Path) -> None:
    assert [each["data"] for each in run("two-dimensions", tmp_path)] == [[0, 2], [0, 2], [1, 2], [1, 2]]


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ("outside", "ranks 2, 3 are not in the mesh"),
        ("some-without", "rank 2 was given no mesh, and others one"),
        ("differing-seeds", "rank 0 reads 'numbers' (60 samples, seed 0, global batch 7), rank 1 'numbers'"),
        (
            "differing-records",
            "data rank 1 of 2: ranks 2, 3) have not trained the same batches: rank 3 differs",
        ),
    ],
)
def test_every_rank_says_what_is_wrong_with_a_mesh(case: str, reason: str, tmp_path: Path) -> None:
    for each in run(case, tmp_path):
        assert reason in each["refused"]


@pytest.mark.parametrize(
    ("meshes", "reason"),
    [
        ([(0, 1), (0, 1), (2,)], "different sizes"),
        ([(0, 1), (1, 2), (1, 2)], "rank 1 is in several"),
        ([(0, 2), (1, 3), (0, 2), (1, 2)], "rank 3 is not in the mesh"),
    ],
)
def test_groups_that_do_not_divide_the_world_are_refused(meshes: list[tuple[int, ...]], reason: str) -> None:
    with pytest.raises(StrataError, match=reason):
        _groups(meshes)


def test_groups_may_interleave() -> None:
    assert _groups([(0, 2), (1, 3), (0, 2), (1, 3)]) == [[0, 1], [2, 3]]
    assert _groups([(0, 1), (0, 1), (2, 3), (2, 3)]) == [[0, 2], [1, 3]]


def test_what_is_no_mesh_is_refused() -> None:
    with pytest.raises(TypeError, match="DeviceMesh, not str"):
        Loop([], mesh="dp")  # type: ignore[arg-type]
