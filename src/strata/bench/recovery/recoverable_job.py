"""A recoverable training, for `strata bench recovery`: as a user writes it.

    recoverable_job.py NAME FOLDER STATE_BYTES DEVICE BACKEND [fsdp] [peer]

Ranks with DDP, or with FSDP2, whose state only all of them together have; weights and two moments of AdamW together have
STATE_BYTES. Runs until it is killed. Every step is noted in FOLDER, a line each: when, by which process, which step. A file
FOLDER/leave makes its ranks leave as if another was lost, which is how a rank by itself can be measured.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

import torch
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import strata
from strata.bench.recovery.large_job import STEPS, build
from strata.training import live
from strata.training.job import ElasticOptions
from strata.training.recoverable import Run

NAME, FOLDER, STATE_BYTES, DEVICE, BACKEND = (
    sys.argv[1],
    Path(sys.argv[2]),
    int(sys.argv[3]),
    sys.argv[4],
    sys.argv[5],
)
IS_SHARDED = "fsdp" in sys.argv[6:]
PEERS = ["peer"] if "peer" in sys.argv[6:] else []
STEP_S = 0.005


def note(file: int, step: int, what: str) -> None:
    os.write(file, f"{time.monotonic()} {os.getpid()} {step} {what}\n".encode())


def memory_bytes() -> int:
    """What this process holds, on its device if it has one, else without what is shared."""
    if DEVICE == "cuda":
        return torch.cuda.memory_allocated()
    resident, shared = Path("/proc/self/statm").read_text().split()[1:3]
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")


def watch_for_leave() -> None:
    path = FOLDER / "leave"
    while True:
        if path.exists():
            path.unlink()
            run = live.current()
            assert run is not None
            run._observe({"kind": "leave", "reason": "measured"})  # type: ignore[attr-defined]
        time.sleep(0.002)


@strata.recoverable(backend=BACKEND)
def train(run: Run) -> None:
    file = os.open(FOLDER / "steps", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    inner, optimizer, inputs = build(STATE_BYTES, DEVICE, batch=256 if DEVICE == "cuda" else 8)
    model: torch.nn.Module
    if IS_SHARDED:
        fully_shard(inner)
        model = inner
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)  # Of the parts that this rank has.
    else:
        model = DistributedDataParallel(inner)
    sampler = strata.ElasticSampler(8 * STEPS, global_batch_size=8, dataset="bench")
    data = run.keep("data", lambda: torch.utils.data.TensorDataset(torch.zeros(8 * STEPS, 0)))
    with strata.elastic(
        model=model,
        optimizer=optimizer,
        data=strata.ElasticLoader(data, sampler),
        checkpoints=PEERS,
        max_steps=STEPS,
        options=ElasticOptions(save_every=STEPS, snapshot_every=50),
        job=NAME,
    ) as job:
        note(file, job.step, f"resumed:{job.recovery.tier if job.recovery is not None else 'nowhere'}")
        is_reported = False
        for batch in job:
            if job.recovery is not None and job.recovery.phases and not is_reported:
                is_reported = True
                note(
                    file,
                    job.step,
                    "phases:" + ",".join(f"{n}={s:.3f}" for n, s in job.recovery.phases.items()),
                )
            optimizer.zero_grad(set_to_none=True)
            (model(inputs).float().square().mean() * batch.weight).backward()
            optimizer.step()
            if DEVICE == "cuda":
                torch.cuda.synchronize()
            else:
                time.sleep(STEP_S)
            note(file, job.step + 1, f"step:{memory_bytes()}")
    os.close(file)


if __name__ == "__main__":
    threading.Thread(target=watch_for_leave, daemon=True).start()
    train()
