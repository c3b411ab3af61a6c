"""One coordinator with something to list, for all tests of the command line that only look."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from strata import TrainingOrchestrator
from strata.worker.errors import BarrierBroken
from tests.support import Coordinator, eventually


@pytest.fixture(scope="session")
def listed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Coordinator]:
    server = Coordinator(tmp_path_factory.mktemp("listed") / "data").start()
    worker = TrainingOrchestrator(server.address, ship_logs=False)
    worker.register_worker("worker-[bold]01", gpu_count=2)
    worker.register_dataset("images", "/data/images", "parquet", 1_281_167, 10_000, shuffle=True)
    worker.notify_checkpoint("c1", 500, 1, "/ckpt/1", 5_000_000, tiers=["memory"], duration_s=0.5)
    worker.heartbeat(501, 1, state="training", task="task-7")
    worker.barrier("epoch", 1, participants=1)
    with pytest.raises(BarrierBroken):
        worker.barrier("never", 2, participants=3, timeout_s=0.1)
    worker.report_recovery(
        {"detect": 0.5, "load": 1.25},
        resumed_step=500,
        lost_steps=1,
        tier="memory",
        world_before=2,
        world_after=1,
        reason="a test",
        survived=1,
        lost=["worker-02"],
        cause="rank 1 (here, pid 812) was killed by SIGKILL",
    )
    assert server.post("/api/tasks", {"name": "train", "type": "training", "dataset_id": "images"})[0] == 201
    eventually(lambda: server.get("/api/workers")[0]["status"] == "training", within_s=30)
    yield server
    worker.deregister()
    worker.close()
    server.stop()
