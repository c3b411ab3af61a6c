"""kill -9 of the coordinator loses nothing that it has acknowledged, and its workers come back by themselves."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest

from tests.service.fleet import Fleet
from tests.support import Coordinator, eventually

WORKERS = [f"worker-{n:02d}" for n in range(50)]
PROCESSES = 3


@pytest.fixture(scope="module")
def mortal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Coordinator]:
    server = Coordinator(tmp_path_factory.mktemp("mortal") / "coordinator").start()
    yield server
    server.stop()


@pytest.mark.parametrize("end", ["kill", "stop"])
def test_end_under_the_load_of_fifty_workers_loses_nothing_acknowledged(
    mortal: Coordinator, fleets: Callable[..., Fleet], capsys: pytest.CaptureFixture[str], end: str
) -> None:
    coordinator = mortal
    hosts = [fleets(coordinator.address) for _ in range(PROCESSES)]
    host_of = {worker: hosts[n % PROCESSES] for n, worker in enumerate(WORKERS)}
    for n, host in enumerate(hosts):
        host.register(*WORKERS[n::PROCESSES], metadata={"end": end})
    before = {w["id"]: w["incarnation"] for w in coordinator.get("/api/workers")}
    assert len(before) == 50
    for worker in WORKERS:
        host_of[worker].call(worker, "begin_load")
    saved = {c["id"] for c in coordinator.get("/api/checkpoints")}
    eventually(
        lambda: len({c["id"] for c in coordinator.get("/api/checkpoints")} - saved) >= 200,
        within_s=60,
        what="the load is under way",
    )

    getattr(coordinator, end)()  # kill: SIGKILL; stop: SIGTERM
    coordinator.start()
    serving_s = time.monotonic()
    # Two seconds is the promise on a quiet machine; this one may be busy.
    eventually(
        lambda: _sessions(coordinator) == 50, within_s=60, what="all fifty have reconnected", every_s=0.05
    )
    elapsed_s = time.monotonic() - serving_s

    loads = [host_of[worker].begin(worker, "end_load") for worker in WORKERS]
    acknowledged = [load.result(60).value for load in loads]
    assert [a["errors"] for a in acknowledged if a["errors"]] == []
    datasets = {d["id"] for d in coordinator.get("/api/datasets")}
    assert {d for a in acknowledged for d in a["datasets"]} <= datasets
    wanted = {c for a in acknowledged for c in a["checkpoints"]}
    assert wanted <= _checkpoints(coordinator), "an acknowledged checkpoint is gone"
    after = {w["id"]: (w["incarnation"], w["status"]) for w in coordinator.get("/api/workers")}
    assert after == {worker: (incarnation, "active") for worker, incarnation in before.items()}
    with capsys.disabled():
        print(
            f"\n{end}: 50 workers reconnected {elapsed_s:.2f} s after the coordinator served again", end=" "
        )
    assert "Traceback" not in "".join(coordinator.output)


def _sessions(coordinator: Coordinator) -> int:
    return sum(1 for w in coordinator.get("/api/workers") if w["connected"])


def _checkpoints(coordinator: Coordinator) -> set[str]:
    """Every checkpoint in the journal: the listing shows only the newest."""
    from strata.coordinator.journal.sqlite import read_story
    from strata.core.messages import CheckpointCompleted

    story = (entry.event for entry in read_story(coordinator.data_dir))
    return {event.checkpoint_id for event in story if isinstance(event, CheckpointCompleted)}
