"""The CUDA part of the benchmark of sharded state: an FSDP2 loop under `strata.elastic` on one device, with NCCL.

The model is a stack of linear layers in bfloat16 with AdamW, each sharded by itself. Saves go the way of a user's job; medians
count, and notes tell how far the rounds lie apart.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import TensorDataset

from strata.bench.recovery.large_job import build
from strata.bench.table import Row, report
from strata.core.jobs.job import LoadShards
from strata.data.loading.loader import ElasticLoader
from strata.data.loading.sampler import ElasticSampler
from strata.shared_memory import memory_root
from strata.training import ElasticJob, ElasticOptions, elastic

TITLE = "Sharded state on a device"
GB = 1e9
STATE_BYTES, QUICK_BYTES = 8 << 30, 64 << 20
ROUNDS = 8
_cuda: Any = torch.cuda


class _Crash(Exception):
    """Ends a loop without a final save."""


class Loop:
    """What a script makes."""

    def __init__(self, state_bytes: int) -> None:
        mesh = init_device_mesh("cuda", (distributed.get_world_size(),))
        self.model, _, self._inputs = build(state_bytes, "cuda", batch=4096)
        for layer in self.model.children():
            if list(layer.parameters()):
                fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)

    def step(self) -> None:
        self.model(self._inputs).float().square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def job(self, place: Path, memory: Path) -> ElasticJob:
        samples = 4096
        loader = ElasticLoader(
            TensorDataset(torch.zeros(samples, 1)), ElasticSampler(samples, global_batch_size=1)
        )
        return elastic(
            model=self.model,
            optimizer=self.optimizer,
            data=loader,
            checkpoints=place,
            max_steps=1_000_000,
            options=ElasticOptions(save_every=4 * (ROUNDS + 2), snapshot_every=4, memory_root=memory),
        )

    @property
    def state_bytes(self) -> int:
        return sum(parameter.nbytes * 3 for parameter in self.model.parameters())


def run(*, quick: bool = False) -> Iterator[Row]:
    state_bytes = QUICK_BYTES if quick else STATE_BYTES
    with tempfile.TemporaryDirectory(prefix="strata-bench-") as made:
        place = Path(made)
        memory = memory_root() / place.name
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        distributed.init_process_group(
            "nccl",
            init_method=f"file://{place}/store",
            rank=0,
            world_size=1,
            device_id=torch.device("cuda", 0),
        )
        try:
            yield from _saving_rows(state_bytes, place / "run", memory)
            _cuda.empty_cache()
            yield from _restoring_rows(state_bytes, place / "run", memory)
        finally:
            distributed.destroy_process_group()
            shutil.rmtree(memory, ignore_errors=True)


def _saving_rows(state_bytes: int, place: Path, memory: Path) -> Iterator[Row]:
    loop = Loop(state_bytes)
    gaps: dict[bool, list[float]] = {False: [], True: []}
    copied: list[float] = []
    with contextlib.suppress(_Crash), loop.job(place, memory) as job:
        assert job._manager is not None
        ended_s = 0.0
        for _ in job:
            now_s = time.perf_counter()
            if ended_s:
                is_saved = job.step % 4 == 0
                gaps[is_saved].append(now_s - ended_s)
                if is_saved:
                    handle = next(iter(job._manager._pending.values()))
                    handle.wait_copied()
                    copied.append(time.perf_counter() - ended_s)
            if job.step == 4 * (ROUNDS + 2):
                assert job._manager.wait_idle()
                raise _Crash
            loop.step()
            if job.step % 4 == 3:
                assert job._manager.wait_idle()
                _cuda.synchronize()  # What the copy takes is asked for, not what the step does.
            ended_s = time.perf_counter()
    usual_s = median(gaps[False])
    stalls = [gap_s - usual_s for gap_s in gaps[True][2:]]  # Two images are laid out and page-locked first.
    size_bytes = loop.state_bytes
    yield Row(
        name="stall of an FSDP2 loop, NCCL",
        measured=median(stalls) * 1e3,
        unit="ms per save",
        target=3,
        better="lower",
        note=f"{size_bytes / GB:.1f} GB of state; {min(stalls) * 1e3:.2f} to {max(stalls) * 1e3:.2f} ms in {len(stalls)} rounds",
    )
    speeds = [size_bytes / seconds / GB for seconds in copied[2:]]
    yield Row(
        name="copy, device to image",
        measured=median(speeds),
        unit="GB/s",
        target=50,
        note=f"from the end of the step to the last byte; {min(speeds):.1f} to {max(speeds):.1f} GB/s",
    )


def _restoring_rows(state_bytes: int, place: Path, memory: Path) -> Iterator[Row]:
    loop = Loop(state_bytes)
    speeds: list[float] = []
    started_s = time.perf_counter()
    with contextlib.suppress(_Crash), loop.job(place, memory) as job:
        _cuda.synchronize()
        first_s = time.perf_counter() - started_s
        load = job._protocol._load
        assert isinstance(load, LoadShards)
        for _ in range(ROUNDS):
            _cuda.synchronize()
            started_s = time.perf_counter()
            state, found = job._load(load)
            job._sharded.adopt(state)
            _cuda.synchronize()
            speeds.append(loop.state_bytes / (time.perf_counter() - started_s) / GB)
            assert found.fault == "none", found
        raise _Crash
    yield Row(
        name="restore in place, image page-locked",
        measured=median(speeds),
        unit="GB/s",
        target=20,
        note=f"every byte verified; {min(speeds):.1f} to {max(speeds):.1f} GB/s in {len(speeds)} rounds",
    )
    yield Row(
        name="entering strata.elastic after a crash, page-locking included",
        measured=first_s,
        unit="s",
        note="the optimizer's state is allocated",
    )


def main(*, json: bool = False, quick: bool = False) -> None:
    report(TITLE, run(quick=quick), as_json=json)


if __name__ == "__main__":
    main()
