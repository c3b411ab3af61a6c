"""A DDP model can be dropped, and a script end, while a group's threads still have tensors of Python to free."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

# Torch's compiler, where it is imported afterwards, keeps the group and hides what is tested. Python's lock stays with the main
# thread, as it may for the moment in which a script ends after its last collective.
SCRIPT = """
import gc, os, sys, time
import torch, torch._dynamo
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from strata.torch_compat.groups import outlive_all_reducers, outlive_reducers

way = sys.argv[1]
if way == "all":
    outlive_all_reducers()
distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
torch.set_num_threads(1)  # No others than those of gloo come and go.
model = DistributedDataParallel(nn.Linear(2, 2))
if way == "one":
    outlive_reducers(nn.Sequential(model))
if way == "cycle":
    outlive_reducers(model)
    model.itself = [model]
threads = len(os.listdir("/proc/self/task"))
values = torch.zeros(1_000_000)
sys.setswitchinterval(600)
for _ in range(50):
    distributed.all_gather([torch.empty(1_000_000)], values, async_op=True)
distributed.destroy_process_group()
del model
gc.collect()
deadline_s = time.monotonic() + 30
while len(os.listdir("/proc/self/task")) >= threads:  # One that was joined is listed a moment longer.
    assert time.monotonic() < deadline_s
print("dropped", flush=True)
os._exit(0)
"""


@pytest.mark.parametrize("way", ["one", "all", "cycle"])
def test_model_is_dropped_while_threads_of_its_group_need_python(way: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, way], capture_output=True, text=True, timeout=170, check=False
    )
    assert done.stdout == "dropped\n", done.stderr


# The main thread has Python's lock from the last collective to the end, as it has by chance in one script of ten. A busy machine may
# take longer than a second over what these threads have left to do.
END = """
import os, sys
import torch
from torch import distributed
from strata.torch_compat import groups
from strata.trainer.distributed import setup_distributed_environment

groups.SETTLING_S = 60.0
if sys.argv[1] == "the trainer's":
    os.environ |= dict.fromkeys(("RANK", "LOCAL_RANK"), "0") | dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), "1")
    setup_distributed_environment("gloo", f"file://{sys.argv[2]}/meeting")
else:
    groups.settle_at_exit()
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
values = torch.zeros(100_000)
sys.setswitchinterval(600)
for _ in range(300):
    distributed.all_gather([torch.empty(100_000)], values, async_op=True)
print("ended", flush=True)
"""


@pytest.mark.parametrize("group", ["its own", "the trainer's"])
def test_script_ends_while_threads_of_its_group_need_python(group: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", END, group, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "ended\n"), done.stderr
