"""The guide's errors and the policies for failed saves, each with a real training and a real cause."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from strata.agent.trace import last_footprint, was_saved
from strata.checkpoint.manager import CheckpointManager
from strata.launch.sample_job import SampleJob
from strata.launch.torchrun import TorchrunSpec
from strata.shared_memory import forget_jobs, job_folder, remove_tree
from strata.stores import open_store
from tests.rendezvous.etcd_server import free_port
from tests.stores.mounts import small_tmpfs
from tests.support import eventually, run_in
from tests.support_forks import ForkedProcess, ForkServer
from tests.support_programs import program, require_root
from tests.support_proxy import Proxy
from tests.support_seaweed import seaweed

pytestmark = pytest.mark.timeout(400)

LIMIT_S = 120.0
DISK_BYTES = 4 << 20
NOWHERE = {
    "AWS_ACCESS_KEY_ID": "nobody",
    "AWS_SECRET_ACCESS_KEY": "nobody",
    "AWS_ENDPOINT_URL": "http://127.0.0.1:9",
    "AWS_REGION": "us-east-1",
}

UNREACHABLE = {"s3_bucket": "nowhere", "unreachable_timeout": 1.0}
IDENTITY_BYTES = 64 << 10
"""Enough for what a run writes about itself, and not for a checkpoint."""


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> SampleJob:
    job = SampleJob(
        folder=tmp_path_factory.mktemp("errors"),
        name="errors",
        workers=1,
        steps=30,
        text_bytes=50_000,
        width=32,
        save_every=10,
        snapshot_every=5,
    )
    job.prepare()
    return job


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    status: int
    out: str
    told: str

    def assert_complete(self) -> None:
        assert self.status == 0, self.told
        assert "Training complete! 30 steps" in self.out

    def assert_failed(self, *texts: str) -> None:
        assert self.status == 1, self.told
        assert "Training complete!" not in self.out
        for text in texts:
            assert text in self.told
        assert "Traceback" not in self.told


TRAINERS = ForkServer("strata.trainer.train", "obstore")


class Training:
    """One trainer process, alone in its world."""

    def __init__(
        self,
        job: SampleJob,
        folder: Path,
        *,
        environment: Mapping[str, str],
        shared_memory: str | None = None,
    ) -> None:
        module, config = "elastic_harness.train", f"--config={folder}/config.yaml"
        self.out, self.err = folder / "out.txt", folder / "err.txt"
        place = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1}
        at = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "GLOO_SOCKET_IFNAME": "lo"}
        told = {name: str(value) for name, value in {**place, **at, "OMP_NUM_THREADS": 1}.items()}
        env = {**os.environ, **told, "AWS_EC2_METADATA_DISABLED": "true", **environment}
        self.process: ForkedProcess | subprocess.Popen[bytes]
        if shared_memory is None:
            self.process = TRAINERS.start(module, config, output=self.out, errors=self.err, env=env)
            return
        require_root("a file system is mounted")
        mount = f'{program("mount")} -t tmpfs -o size={shared_memory} tmpfs /dev/shm && exec "$@"'
        isolated = [program("unshare"), "--mount", program("sh"), "-c", mount, "sh"]
        with open(self.out, "w") as out, open(self.err, "w") as err:
            self.process = subprocess.Popen(
                [*isolated, sys.executable, "-m", module, config], env=env, stdout=out, stderr=err
            )

    @property
    def told(self) -> str:
        return self.err.read_text()

    def await_words(self, words: str) -> None:
        def said() -> bool:
            assert self.process.poll() is None, f"it ended without printing '{words}':\n{self.told}"
            return words in self.told

        eventually(said, within_s=LIMIT_S, what=words)

    def end(self) -> Ended:
        status = self.process.wait(LIMIT_S)
        return Ended(status=status, out=self.out.read_text(), told=self.told)


def configure(job: SampleJob, folder: Path, **sections: dict[str, Any]) -> Path:
    """The sample job's configuration with some settings changed, and places of its own."""
    settings = job.settings()
    settings["elastic"]["job_id"] = folder.name
    settings["checkpoint"]["nvme_path"] = str(folder / "checkpoints")
    for name, values in sections.items():
        settings[name].update(values)
    config = folder / "config.yaml"
    config.write_text(yaml.safe_dump(settings))
    return config


@contextmanager
def training(
    job: SampleJob,
    folder: Path,
    *,
    environment: Mapping[str, str] | None = None,
    shared_memory: str | None = None,
    **sections: dict[str, Any],
) -> Iterator[Training]:
    configure(job, folder, **sections)
    started = Training(job, folder, environment=environment or {}, shared_memory=shared_memory)
    try:
        yield started
    finally:
        started.process.kill()
        started.process.wait(60)
        forget_jobs(folder.name)


def train(job: SampleJob, folder: Path, **options: Any) -> Ended:
    with training(job, folder, **options) as started:
        return started.end()


def await_step(name: str, step: int) -> None:
    eventually(
        lambda: (found := last_footprint(name)) is not None and found.step >= step,
        within_s=LIMIT_S,
        what=f"step {step}",
    )


def saved_steps(place: Path | str) -> list[int]:
    """Newest first."""
    with CheckpointManager(place) as manager:
        return [info.step for info in manager.all_checkpoints()]


def test_training_under_torchrun_ends_with_the_promised_line(job: SampleJob, tmp_path: Path) -> None:
    spec = TorchrunSpec(
        run_id=tmp_path.name,
        arguments=["-m", "elastic_harness.train", "--config", str(configure(job, tmp_path))],
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        max_restarts=0,
        nproc=2,
        environment={"LOGLEVEL": "WARNING", "TORCH_DISTRIBUTED_DEBUG": "INFO"},
    )
    done = subprocess.run(
        [sys.executable, *spec.command()[1:]],
        env=spec.variables(),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr
    assert "Training complete! 30 steps" in done.stdout
    assert "INFO strata.trainer" not in done.stderr, "LOGLEVEL decides how much is told"
    assert (tmp_path / "checkpoints" / "checkpoint_step_00000030.pt").exists()


def test_a_missing_index_is_named_with_the_command_that_builds_it(job: SampleJob, tmp_path: Path) -> None:
    train(job, tmp_path, data={"index_file": str(tmp_path / "none.index")}).assert_failed(
        f"DataLoadingError: Failed to load data from '{job.text}': Token index file not found",
        f"Build it first: strata index {job.text}",
    )


def test_an_unknown_strategy_is_refused_before_anything_starts(job: SampleJob, tmp_path: Path) -> None:
    done = train(job, tmp_path, scaling={"strategy": "invalid"})
    assert done.status == 2
    assert (
        "ConfigurationError: Configuration error in 'scaling': Unknown scaling strategy 'invalid'. "
        "Valid options: ['variable_batch', 'constant_batch']" in done.told
    )


def test_without_torchrun_the_missing_variables_are_named(job: SampleJob, tmp_path: Path) -> None:
    train(job, tmp_path, environment=dict.fromkeys(("RANK", "LOCAL_RANK", "WORLD_SIZE"), "")).assert_failed(
        "Missing required environment variables: ['RANK', 'LOCAL_RANK', 'WORLD_SIZE']", "torchrun"
    )


def test_a_job_whose_every_checkpoint_is_lost_does_not_silently_start_over(
    job: SampleJob, tmp_path: Path
) -> None:
    forever = {"max_steps": 1_000_000}
    with training(job, tmp_path, training=forever) as first:
        eventually(
            lambda: (
                was_saved(run_in(tmp_path / "checkpoints")) and any((tmp_path / "checkpoints").glob("*.pt"))
            ),
            within_s=LIMIT_S,
            what="a snapshot, and a checkpoint on disk",
        )
        first.process.kill()
        first.process.wait(60)
        # The checkpoints and the shared memory are lost; that the run had been training is still known.
        for kept in (tmp_path / "checkpoints").glob("checkpoint_step_*"):
            kept.unlink()
        remove_tree(job_folder(f"job-{run_in(tmp_path / 'checkpoints')}"))
        second = Training(job, tmp_path, environment={})
        try:
            second.end().assert_failed("TopologyChangeError: No checkpoint available for recovery")
        finally:
            second.process.kill()


def test_a_job_that_was_killed_before_anything_was_saved_begins_again(job: SampleJob, tmp_path: Path) -> None:
    nothing = {"max_memory_mb": 0.1, "checkpoint_interval": 1_000_000}
    with training(job, tmp_path, training={"max_steps": 1_000_000}, checkpoint=nothing) as first:
        await_step(tmp_path.name, 11)
        first.process.kill()
        first.process.wait(60)
        train(job, tmp_path).assert_complete()


# --- what a failed save does ----------------------------------------------------------------------------------


def fill(disk: Path, size_bytes: int) -> Path:
    ballast = disk / "ballast"
    ballast.write_bytes(bytes(size_bytes - IDENTITY_BYTES))
    return ballast


def test_warn_trains_on_without_a_disk_and_says_at_the_end_what_is_missing(
    job: SampleJob, tmp_path: Path
) -> None:
    checkpoint = {"async_save_policy": "warn", "max_memory_mb": 0.1}
    with small_tmpfs(tmp_path / "checkpoints", size_bytes=DISK_BYTES) as disk:
        fill(disk, DISK_BYTES)
        done = train(job, tmp_path, checkpoint=checkpoint)
    done.assert_failed(
        "FinalSaveFailed: Training has ended at step 30, and its final state is not in every destination",
        f"[NVME] Failed to save checkpoint to '{disk}/",
        "No space left on device",
        "Cannot save snapshot: ",
    )


@pytest.mark.parametrize("policy", ["warn", "fail"])
def test_a_bucket_that_is_out_of_reach_ends_training_before_it_begins(
    job: SampleJob, tmp_path: Path, policy: str
) -> None:
    checkpoint = {**UNREACHABLE, "async_save_policy": policy}
    train(job, tmp_path, environment=NOWHERE, checkpoint=checkpoint).assert_failed(
        "A destination of this job does not answer", "s3://nowhere"
    )
    assert not list((tmp_path / "checkpoints").glob("*.pt"))


def test_fail_ends_training_when_the_disk_is_full(job: SampleJob, tmp_path: Path) -> None:
    with small_tmpfs(tmp_path / "checkpoints", size_bytes=DISK_BYTES) as disk:
        fill(disk, DISK_BYTES)
        done = train(job, tmp_path, checkpoint={"async_save_policy": "fail"})
    done.assert_failed(
        f"CheckpointSaveError: [NVME] Failed to save checkpoint to '{disk}/checkpoint_step_00000010.pt': "
        "No space left on device",
        f"df -h {disk}",
    )


def test_snapshots_that_shared_memory_cannot_hold_are_kept_on_disk(job: SampleJob, tmp_path: Path) -> None:
    done = train(job, tmp_path, shared_memory="512k", checkpoint={"async_save_policy": "fail"})
    done.assert_complete()
    assert done.told.count("STRATA_MEMORY_ROOT") == 1
    assert saved_steps(tmp_path / "checkpoints")[0] == 30


@pytest.mark.parametrize("policy", ["warn", "fail"])
def test_a_snapshot_that_the_named_root_cannot_hold_follows_the_policy(
    job: SampleJob, tmp_path: Path, policy: str
) -> None:
    done = train(
        job,
        tmp_path,
        shared_memory="512k",
        environment={"STRATA_MEMORY_ROOT": "/dev/shm"},
        checkpoint={"async_save_policy": policy},
    )
    if policy == "warn":
        done.assert_complete()
        assert "MB required, but only" in done.told
    else:
        done.assert_failed("MemoryLimitExceeded: Cannot save snapshot: ", "MB required, but only")


def retrying(**checkpoint: Any) -> dict[str, Any]:
    return {
        "async_save_policy": "retry",
        "async_save_retries": 1_000,
        "async_save_retry_delay": 0.1,
        **checkpoint,
    }


def test_retry_saves_as_soon_as_the_disk_has_space(job: SampleJob, tmp_path: Path) -> None:
    with small_tmpfs(tmp_path / "checkpoints", size_bytes=16 << 20) as disk:
        ballast = fill(disk, 16 << 20)
        with training(job, tmp_path, checkpoint=retrying()) as started:
            started.await_words("Retrying in 0.1 s")
            assert "No space left on device" in started.told
            ballast.unlink()
            started.end().assert_complete()
        assert saved_steps(disk)[0] == 30


@pytest.mark.s3
def test_retry_saves_as_soon_as_the_bucket_can_be_reached(
    job: SampleJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with seaweed(tmp_path / "weed") as server, Proxy(int(server.endpoint.rpartition(":")[2])) as proxy:
        for name, value in server.environment().items():
            monkeypatch.setenv(name, value)
        open_store("s3://runs").put("made", b"the bucket")
        proxy.refusing = True
        environment = {**server.environment(), "AWS_ENDPOINT_URL": f"http://{proxy.address}"}
        with training(
            job, tmp_path, environment=environment, checkpoint=retrying(s3_bucket="runs")
        ) as started:
            started.await_words("does not answer, retrying")
            proxy.refusing = False
            started.end().assert_complete()
        assert saved_steps("s3://runs")[0] == 30
