"""A state that one rank has reaches the live tensors of the others."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import sys
import torch
from torch import distributed
from strata.torch_compat.groups import settle_at_exit
from strata.training.exchange import broadcast_state
from tests.checkpoint.states import assert_same
from tests.training.test_state import OPTIMIZERS, Trained

settle_at_exit()
rank, meeting = int(sys.argv[1]), sys.argv[2]
distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
trained = Trained(OPTIMIZERS["Adam"], seed=rank)
wanted = Trained(OPTIMIZERS["Adam"], seed=0)
for number in range(3):
    wanted.step(number)
    if rank == 0:
        trained.step(number)
live = {key: tensor.data_ptr() for key, tensor in trained.model.state_dict().items()}
mine = {**trained.captured(), "odd": torch.ones(3, dtype=torch.uint8)} if rank == 0 else None
state = broadcast_state(mine, source=0, into=trained.state.targets())
assert state["odd"].tolist() == [1, 1, 1]
trained.state.adopt(state, rank=rank)
assert {key: tensor.data_ptr() for key, tensor in trained.model.state_dict().items()} == live
assert_same(trained.captured(), wanted.captured())
trained.step(3)
wanted.step(3)
assert_same(trained.captured(), wanted.captured())
distributed.destroy_process_group()
"""


def test_a_state_arrives_in_the_live_tensors_of_other_ranks(tmp_path: Path) -> None:
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(rank), str(tmp_path / "meeting")],
            stderr=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
        )
        for rank in range(2)
    ]
    for rank in ranks:
        _, said = rank.communicate(timeout=170)
        assert rank.returncode == 0, said
