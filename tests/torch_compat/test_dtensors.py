"""What torch remembers of distributed tensors, in a process that becomes another rank."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from strata.torch_compat.dtensors import forget_meshes

def coordinate(rank):
    distributed.init_process_group("fake", rank=rank, world_size=3, store=FakeStore())
    mesh = init_device_mesh("cpu", (3,))
    tensor = distribute_tensor(torch.arange(16.0), mesh, [Shard(0)], src_data_rank=None)
    found = tensor.detach().device_mesh.get_coordinate()
    distributed.destroy_process_group()
    return found

print(coordinate(2))
if sys.argv[1] == "forget":
    forget_meshes()
print(coordinate(1))
"""


def coordinates(word: str) -> list[str]:
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, word], capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.returncode == 0, ended.stderr
    return [line.strip("[](),") for line in ended.stdout.splitlines()]


def test_process_that_becomes_another_rank_holds_that_ranks_part() -> None:
    assert coordinates("forget") == ["2", "1"]
