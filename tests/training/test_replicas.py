"""A rank whose copy of the state has changed by itself is found, named and put right; nothing that ranks disagree on is saved."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from strata import CheckpointManager
from strata.training import ElasticOptions
from strata.training.replicas import _Digest
from tests.support_ranks import RANKS
from tests.training.loops import BATCH, SAMPLES, steps_in

pytestmark = pytest.mark.timeout(300)

STEPS = 2 * SAMPLES // BATCH


@dataclass(frozen=True, slots=True)
class Ended:
    ranks: list[dict[str, Any]]
    output: str

    def found(self) -> list[str]:
        return [line for line in self.output.splitlines() if "differed from the other ranks" in line]


def train(folder: Path, *faults: str, world: int = 3) -> Ended:
    folder.mkdir(exist_ok=True)
    processes = [
        RANKS.start(
            *("tests.training.replica_script", str(rank), str(world), str(folder), *faults),
            output=folder / f"output-{rank}",
        )
        for rank in range(world)
    ]
    try:
        said = [process.communicate(200)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert all(text.strip() for text in said), said
    return Ended([json.loads(text.splitlines()[-1]) for text in said], "".join(said))


def test_one_flipped_bit_is_found_at_the_next_comparison_and_put_right(tmp_path: Path) -> None:
    """In a parameter, in a gradient and in a moment of the optimizer; the last one in the rank that writes checkpoints."""
    ended = train(tmp_path, "2:3:parameter", "1:7:gradient", "0:11:moment")
    assert {(each["step"], each["error"]) for each in ended.ranks} == {(STEPS, "")}, ended.output
    assert len({each["state"] for each in ended.ranks}) == 1, ended.output
    wanted = [
        (2, 4, "'0.weight'", 0),
        (1, 8, "'0.weight'", 0),
        (0, 12, "'0.weight, exp_avg_sq of the optimizer'", 1),
    ]
    for line, (rank, step, tensor, source) in zip(ended.found(), wanted, strict=True):
        assert f"rank {rank} (host " in line
        assert f"after step {step} in" in line
        assert tensor in line
        assert f"the copy of rank {source}" in line


def test_the_writer_saves_no_state_of_its_own_that_others_do_not_have(tmp_path: Path) -> None:
    """The bit flips in the very step that is saved."""
    ended = train(tmp_path / "hurt", "0:5:parameter")
    undisturbed = train(tmp_path / "undisturbed")
    assert undisturbed.found() == []
    assert steps_in(tmp_path / "undisturbed" / "checkpoints") == [STEPS, 15, 10]
    assert "after step 5 in" in ended.found()[0]
    states = [
        CheckpointManager(tmp_path / name / "checkpoints", keep_count=100).load(10)
        for name in ("hurt", "undisturbed")
    ]
    weights = [state["model_state_dict"]["0.weight"] for state in states]
    assert torch.equal(*weights)


def test_two_ranks_cannot_tell_who_is_wrong_and_continue_from_what_both_agreed_on(tmp_path: Path) -> None:
    ended = train(tmp_path, "1:7:parameter", world=2)
    assert all("without a majority" in each["error"] for each in ended.ranks), ended.output
    assert steps_in(tmp_path / "checkpoints") == [5]
    (tmp_path / "meeting").unlink(missing_ok=True)
    again = train(tmp_path, world=2)
    assert {(each["step"], each["error"]) for each in again.ranks} == {(STEPS, "")}, again.output


def test_a_rank_that_fails_again_and_again_ends(tmp_path: Path) -> None:
    ended = train(tmp_path, "2:1:parameter", "2:5:parameter", "2:9:parameter")
    assert "was corrupted 3 times" in ended.ranks[2]["error"], ended.output
    assert all(each["error"] for each in ended.ranks)  # In a run they are started again, without the third.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8])
def test_any_flipped_bit_changes_the_digest(dtype: torch.dtype) -> None:
    tensors = [
        torch.arange(12).to(dtype).view(3, 4)[:, ::2],
        torch.ones((), dtype=dtype),
        torch.empty(0, dtype=dtype),
    ]
    before = _Digest(1, tensors).of_each()
    for bit in range(8):
        changed = [tensor.clone() for tensor in tensors]
        changed[0].view(-1).view(torch.uint8)[0] ^= 1 << bit
        after = _Digest(1, changed).of_each()
        assert (after[0] != before[0], after[1:]) == (True, before[1:])


def test_intervals_are_checked() -> None:
    with pytest.raises(ValueError, match="compare_every"):
        ElasticOptions(compare_every=-1)
