"""Loader workers end with their trainer, so that its peers see at once that it is lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.rendezvous.etcd_server import free_port
from tests.support import eventually

LOOKS_EVERY_S = 60.0
"""How often torch's workers look whether their trainer is alive, here: 5 s otherwise, which a busy machine may need anyway."""

RANK = """
import os, sys, time
import torch
from torch import distributed
from torch.utils.data import DataLoader
from torch.utils.data._utils import worker
worker.MP_STATUS_CHECK_INTERVAL = float(sys.argv[2])

class Samples:
    def __len__(self): return 10**9
    def __getitem__(self, index): return index

if __name__ == "__main__":
    from strata.data.loading.workers import end_with_trainer
    end_with_trainer()
    distributed.init_process_group("gloo")
    method = sys.argv[1]
    batches = iter(DataLoader(Samples(), batch_size=4, num_workers=2, multiprocessing_context=method))
    for number in range(10**9):
        next(batches)
        try:
            distributed.all_reduce(torch.ones(1))
        except RuntimeError:
            print("lost", time.monotonic(), flush=True)
            os._exit(0)
        if number == 3:
            print("training", flush=True)
"""


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_lost_rank_is_seen_at_once_though_it_had_loader_workers(tmp_path: Path, method: str) -> None:
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    port = str(free_port())
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), method, str(LOOKS_EVERY_S)],
            env={
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                "GLOO_SOCKET_IFNAME": "lo",
                "OMP_NUM_THREADS": "1",
            },
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        survivor, victim = ranks
        for rank in ranks:
            assert rank.stdout is not None
            assert rank.stdout.readline() == "training\n"
        loaders = psutil.Process(victim.pid).children(recursive=True)
        assert len(loaders) >= 2
        killed_s = time.monotonic()
        victim.send_signal(signal.SIGKILL)
        assert survivor.stdout is not None
        word, seen_s = survivor.stdout.readline().split()
        assert word == "lost"
        assert float(seen_s) - killed_s < LOOKS_EVERY_S
        eventually(lambda: not any(map(_runs, loaders)), within_s=60, what="the loader workers to end")
    finally:
        for rank in ranks:
            for process in (
                [*psutil.Process(rank.pid).children(recursive=True)] if rank.poll() is None else []
            ):
                with suppress(psutil.NoSuchProcess):  # It has ended with its rank, just now.
                    process.kill()
            rank.kill()
            rank.communicate()


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


THREAD = """
import sys, threading
from torch.utils.data import DataLoader

class Samples:
    def __len__(self): return 100
    def __getitem__(self, index): return index

if __name__ == "__main__":
    from strata.data.loading.workers import end_with_trainer
    end_with_trainer()
    batches = []
    starting = threading.Thread(
        target=lambda: batches.append(iter(DataLoader(Samples(), num_workers=1, multiprocessing_context="fork")))
    )
    starting.start()
    starting.join()
    print(len(list(batches[0])))
"""


def test_workers_that_a_short_lived_thread_started_live_on(tmp_path: Path) -> None:
    script = tmp_path / "thread.py"
    script.write_text(THREAD)
    ran = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=120, check=False
    )
    assert (ran.returncode, ran.stdout) == (0, "100\n"), ran.stderr
