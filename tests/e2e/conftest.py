"""Real jobs under torchrun, in a folder and with a coordinator of their own, and nothing left of them afterwards."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from strata.chaos.run import ChaosRun
from strata.launch.coordinator import CoordinatorProcess
from strata.launch.sample_job import SampleJob
from strata.launch.torchrun import TorchrunSpec

StartRun = Callable[..., ChaosRun]


@dataclass
class EtcdRun(ChaosRun):
    """A job whose agents find each other through etcd."""

    endpoint: str = ""

    def spec(self) -> TorchrunSpec:
        return self.job.torchrun(
            rdzv_backend="etcd", rdzv_endpoint=self.endpoint, coordinator=self.coordinator.address
        )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shared by a module's jobs: the data is the same, so the index is built once."""
    return tmp_path_factory.mktemp("jobs")


@pytest.fixture(scope="module")
def brain(folder: Path) -> Iterator[CoordinatorProcess]:
    process = CoordinatorProcess(folder / "coordinator").start()
    yield process
    process.stop()


@contextmanager
def starting(folder: Path, brain: CoordinatorProcess) -> Iterator[StartRun]:
    runs: list[ChaosRun] = []

    def start(*, etcd: str = "", **options: Any) -> ChaosRun:
        seed = options.pop("seed", 0)
        name = f"{options.pop('name', 'job')}-{secrets.token_hex(3)}"
        values = {"text_bytes": 120_000, "width": 32, "save_every": 20, "snapshot_every": 5, **options}
        job = SampleJob(folder=folder, name=name, **values)
        run = EtcdRun(job, brain, seed=seed, endpoint=etcd) if etcd else ChaosRun(job, brain, seed=seed)
        runs.append(run)
        run.start()
        return run

    yield start
    for run in runs:
        run.close()


@pytest.fixture
def start_run(folder: Path, brain: CoordinatorProcess) -> Iterator[StartRun]:
    with starting(folder, brain) as start:
        yield start


@pytest.fixture(scope="module")
def start_shared(folder: Path, brain: CoordinatorProcess) -> Iterator[StartRun]:
    """For runs that several tests of a module look at."""
    with starting(folder, brain) as start:
        yield start
