"""The same small loop as other projects make it fault tolerant, to be killed beside ours.

    python recovery_peers.py torchft NAME FOLDER     one replica group, under torchrun
    python recovery_peers.py ray NAME FOLDER         driver of an elastic Ray Train run
    python recovery_peers.py nvrx NAME FOLDER        one rank, wrapped by NVRx's in-process restart

Runs in an environment of the peer's own, so it imports of Strata only what leaves footprints. Each is written as its
project's documentation shows: torchft's DDP example with gloo, Ray Train's `TorchTrainer` with elastic scaling, NVRx's in-process
example with gloo. Each worker leaves its process id in FOLDER.
"""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

SAVE_EVERY = 10
PAUSE_S = 0.02


def leave_pid(folder: str, rank: int) -> None:
    (Path(folder) / f"pid-{rank}").write_text(str(os.getpid()))


def torchft(name: str, folder: str) -> None:
    """Runs until it is killed. The survivors of a lost group go on without it; it rejoins at their step."""
    import torch
    from torch import nn
    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

    from strata.agent.trace import Footprints

    group = int(os.environ["REPLICA_GROUP_ID"])
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(96, 384), nn.GELU(), nn.Linear(384, 96))
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=10)),
        min_replica_size=1,
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()},
        replica_id=f"group_{group}",
        timeout=timedelta(seconds=30),
    )
    wrapped = DistributedDataParallel(manager, model)
    optimizer = Optimizer(manager, inner)
    moments = Footprints(name, rank=group)
    leave_pid(folder, group)
    while True:
        x = torch.randn(64, 96)
        optimizer.zero_grad()
        nn.functional.mse_loss(wrapped(x), x).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        moments.leave(manager.current_step(), manager.num_participants())
        time.sleep(PAUSE_S)


def nvrx(name: str, folder: str) -> None:
    """Runs until it is killed. The survivors of a lost rank restart the function in their processes, with one rank less."""
    import torch
    from nvidia_resiliency_ext import inprocess
    from torch import distributed, nn

    from strata.agent.trace import Footprints

    c10d: Any = distributed  # Its stores are not typed.
    port, started_as = int(os.environ["MASTER_PORT"]), int(os.environ["RANK"])
    settings = {}
    if os.environ["NVRX_SETTINGS"] == "fast":  # Each is a second where nothing is said.
        often = timedelta(seconds=0.1)
        settings = {
            "monitor_thread_interval": often,
            "monitor_process_interval": often,
            "heartbeat_interval": often,
            "progress_watchdog_interval": often,
            "last_call_wait": timedelta(0),
        }

    def train(call: Any = None) -> None:
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        meeting = c10d.TCPStore(
            "127.0.0.1", port, is_master=rank == 0, multi_tenant=True, wait_for_workers=False
        )
        store = c10d.PrefixStore(str(call.iteration), meeting)
        distributed.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(96, 384), nn.GELU(), nn.Linear(384, 96))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        step, saved = 0, Path(folder) / "state.pt"
        if saved.exists():
            state = torch.load(saved, weights_only=True)
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            step = int(state["step"])
        wrapped = nn.parallel.DistributedDataParallel(model)
        moments = Footprints(name, rank=started_as)
        leave_pid(folder, started_as)
        while True:
            x = torch.randn(64, 96)
            optimizer.zero_grad()
            nn.functional.mse_loss(wrapped(x), x).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            step += 1
            moments.leave(step, world_size)
            if step % SAVE_EVERY == 0 and rank == 0:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                torch.save(state, saved.with_suffix(".new"))
                saved.with_suffix(".new").replace(saved)
            time.sleep(PAUSE_S)

    train.__annotations__["call"] = inprocess.CallWrapper  # The class itself: by it NVRx finds the parameter.
    inprocess.Wrapper(store_kwargs={"port": port + 1}, **settings)(train)()


def ray(name: str, folder: str) -> None:
    """Runs until it is killed: restarts from the last reported checkpoint, with as many workers as there are."""
    import ray as cluster
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    cluster.init(
        address="local",
        num_cpus=3,
        include_dashboard=False,
        log_to_driver=True,
    )
    trainer = TorchTrainer(
        ray_loop,
        train_loop_config={"name": name, "folder": folder, "path": os.environ["PYTHONPATH"]},
        scaling_config=ScalingConfig(num_workers=(1, 2), use_gpu=False),
        run_config=RunConfig(name=name, storage_path=folder, failure_config=FailureConfig(max_failures=-1)),
    )
    trainer.fit()


def ray_loop(config: dict[str, str]) -> None:
    import tempfile

    import torch
    from ray import train
    from ray.train import Checkpoint
    from torch import nn

    sys.path.insert(0, config["path"])
    from strata.agent.trace import Footprints

    context = train.get_context()
    rank, world_size = context.get_world_rank(), context.get_world_size()
    torch.manual_seed(0)
    model = train.torch.prepare_model(nn.Sequential(nn.Linear(96, 384), nn.GELU(), nn.Linear(384, 96)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = 0
    latest = train.get_checkpoint()
    if latest is not None:
        with latest.as_directory() as at:
            state = torch.load(Path(at) / "state.pt", weights_only=True)
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            step = int(state["step"])
    moments = Footprints(config["name"], rank=rank)
    leave_pid(config["folder"], rank)
    while True:
        x = torch.randn(64, 96)
        nn.functional.mse_loss(model(x), x).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        moments.leave(step, world_size)
        if step % SAVE_EVERY == 0:
            with tempfile.TemporaryDirectory() as at:
                checkpoint = None
                if rank == 0:
                    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                    torch.save(state, Path(at) / "state.pt")
                    checkpoint = Checkpoint.from_directory(at)
                train.report({"step": step}, checkpoint=checkpoint)
        time.sleep(PAUSE_S)


if __name__ == "__main__":
    {"torchft": torchft, "ray": ray, "nvrx": nvrx}[sys.argv[1]](*sys.argv[2:])
