"""The trainer's model over several workers: the same steps as in one process, and worlds that do not fit are named."""

from __future__ import annotations

from pathlib import Path

import pytest

from strata.trainer.config import ParallelSection
from strata.trainer.errors import TopologyChangeError
from strata.trainer.parallel import sizes
from tests.support_ranks import ranks

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize(
    ("world", "tp", "fsdp", "checkpointed"),
    [
        pytest.param(4, 2, True, False, id="2x2"),
        pytest.param(2, 2, False, True, id="tensor-parallel-alone"),
        pytest.param(3, 1, True, True, id="fsdp-uneven"),
        pytest.param(1, 1, True, False, id="alone"),
    ],
)
def test_a_spread_model_makes_the_same_steps_as_a_plain_one(
    world: int, tp: int, fsdp: bool, checkpointed: bool, tmp_path: Path
) -> None:
    arguments = (str(tp), str(int(fsdp)), str(int(checkpointed)))
    for each in ranks("tests.harness.parallel_script", *arguments, folder=tmp_path, world=world):
        assert each["same_names"]
        assert each["tied"]
        assert each["apart"] < 1e-5
        for plain, spread in each["norms"]:
            assert plain > 0.5  # There was something to clip.
            assert spread == pytest.approx(plain, abs=1e-5)
        assert each["local"] < each["total"] or world == 1


@pytest.mark.parametrize(
    ("section", "world", "expected"),
    [
        (ParallelSection(), 3, (3, 1)),
        (ParallelSection(tp=2), 4, (2, 2)),
        (ParallelSection(dp=2, tp=2), 4, (2, 2)),
        (ParallelSection(tp=2, fsdp=False), 2, (1, 2)),
        (ParallelSection(fsdp=False), 3, (3, 1)),
    ],
)
def test_the_sizes_of_a_mesh_follow_the_world(
    section: ParallelSection, world: int, expected: tuple[int, int]
) -> None:
    assert sizes(section, world) == expected


@pytest.mark.parametrize(
    ("section", "world", "reason"),
    [
        (ParallelSection(tp=2), 3, "3 workers cannot be divided into tensor-parallel groups of 2"),
        (ParallelSection(dp=2, tp=2), 2, "is 4 workers, and there are 2"),
        (ParallelSection(dp=2), 3, "is 2 workers, and there are 3"),
        (ParallelSection(tp=2, fsdp=False), 4, "2 tensor-parallel groups must exchange their gradients"),
    ],
)
def test_a_world_that_the_sizes_do_not_fill_is_named(
    section: ParallelSection, world: int, reason: str
) -> None:
    with pytest.raises(TopologyChangeError, match=reason):
        sizes(section, world)
