"""Training without the compiler's import, and with the compiler when it is wanted after all."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import sys
import torch, torch.distributed as dist
from strata.torch_compat import lazy_dynamo
lazy_dynamo.install()
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = torch.nn.Linear(4, 4)
ddp = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(2):
    ddp(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
optimizer.load_state_dict(optimizer.state_dict())
print("loaded" if "torch._dynamo.convert_frame" in sys.modules else "postponed")
double = torch.compile(lambda x: x * 2, backend="eager")
print(double(torch.ones(1)).item())
print("loaded" if "torch._dynamo.convert_frame" in sys.modules else "postponed")
dist.destroy_process_group()
"""


def test_a_training_step_needs_no_compiler_and_compiling_still_works() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=170)
    assert done.stdout.split() == ["postponed", "2.0", "loaded"], done.stderr
