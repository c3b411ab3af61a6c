"""One rank whose memory fails: `python -m tests.training.replica_script RANK WORLD FOLDER [RANK:STEP:WHAT...]`.

Each of the last arguments flips one bit of that rank, while it makes that step. Ends with a line of JSON about its state.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import xxhash
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from strata.torch_compat.groups import settle_at_exit
from tests.training.loops import Loop

BIT = 1 << 20


def flip(tensor: torch.Tensor) -> None:
    tensor.detach().view(-1).view(torch.int32)[0] ^= BIT


def main() -> None:
    rank, world, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    faults = {(int(who), int(step)): what for who, step, what in (text.split(":") for text in sys.argv[4:])}
    settle_at_exit()
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=world
    )
    loop = Loop(
        folder / "checkpoints",
        compare_every=2,
        snapshot_every=0,
        save_every=5,
        memory_root=folder / str(rank),
    )
    loop.model = DistributedDataParallel(loop.model)  # type: ignore[assignment]
    error = ""
    try:
        with loop.job as job:
            for batch in job:
                if job._manager is not None:
                    assert job._manager.wait_pending(60)  # What was saved is known.
                loop.backward(batch)
                fault = faults.get((rank, job.step + 1))
                parameter = next(loop.model.parameters())
                if fault == "gradient":
                    flip(parameter.grad)  # type: ignore[arg-type]
                loop.optimizer.step()
                loop.optimizer.zero_grad()
                if fault == "parameter":
                    flip(parameter)
                elif fault == "moment":
                    flip(loop.optimizer.state[parameter]["exp_avg_sq"])
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    moments = [value for each in loop.optimizer.state.values() for value in each.values()]
    digest = xxhash.xxh3_64()
    for tensor in (*loop.model.parameters(), *moments):
        digest.update(tensor.detach().numpy().tobytes())
    print(
        json.dumps({"rank": rank, "step": loop.job.step, "state": digest.hexdigest(), "error": error}),
        flush=True,
    )


if __name__ == "__main__":
    main()
