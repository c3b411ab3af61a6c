"""Gradients that cannot be exchanged end the step: a rank whose peer is lost does not continue with its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap

from tests.rendezvous.etcd_server import free_port

PROGRAM = textwrap.dedent("""
    import os, signal
    import torch
    from torch import distributed
    from torch.nn.parallel import DistributedDataParallel
    from strata.torch_compat.groups import settle_at_exit
    from strata.trainer.sync import SyncTimer

    settle_at_exit()

    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    model = DistributedDataParallel(torch.nn.Linear(8, 8, bias=False))
    timer = SyncTimer(model)
    for step in range(4):
        model(torch.full((1, 8), float(rank + 1))).sum().backward()
        assert torch.equal(model.module.weight.grad, torch.full((8, 8), 1.5)), "the mean of both"
        assert timer.wait_s > 0
        model.zero_grad()
        print(step, flush=True)
        if step == 1 and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
""")


def test_averages_and_does_not_continue_without_a_rank_that_was_killed() -> None:
    environment = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": "2",
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM],
            env={**environment, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    try:
        (survivor, why), (victim, _) = [rank.communicate(timeout=120) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert ranks[1].returncode == -signal.SIGKILL
    assert (victim, survivor) == ("0\n1\n", "0\n1\n"), why
    assert ranks[0].returncode == 1
    assert "AssertionError" not in why
