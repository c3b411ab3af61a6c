"""The harness's manager: three tiers, fallback with a reason, policies, files of other programs."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_harness.checkpoint import (
    CheckpointConfig,
    CheckpointLoadConfig,
    CheckpointManager,
    CheckpointState,
    CheckpointTier,
)
from elastic_harness.checkpoint.checkpointing import AsyncSavePolicy
from elastic_harness.errors import CheckpointLoadError, CheckpointSaveError, ConfigurationError
from strata.checkpoint import CheckpointManager as Engine
from strata.checkpoint import Memory
from strata.checkpoint.catalog.naming import step_stem
from strata.shared_memory import job_folder, remove_tree
from tests.harness.checkpoint_states import assert_is, damage, state_of
from tests.stores.mounts import small_tmpfs
from tests.support import eventually

MEMORY, NVME, S3 = CheckpointTier.MEMORY, CheckpointTier.NVME, CheckpointTier.S3


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "nvme"


@pytest.fixture
def manager(folder: Path) -> Iterator[CheckpointManager]:
    with CheckpointManager(CheckpointConfig(nvme_path=folder)) as manager:
        yield manager


def file(folder: Path, step: int) -> Path:
    return folder / f"checkpoint_step_{step:08d}.pt"


def save(manager: CheckpointManager, *steps: int, tier: CheckpointTier = NVME) -> None:
    for step in steps:
        manager.save_checkpoint(state_of(step), tier)
    assert manager.wait_for_pending_saves(60)


# Saving and loading


def test_files_are_named_by_step_and_open_anywhere(manager: CheckpointManager, folder: Path) -> None:
    path = manager.save_checkpoint(state_of(10_000), NVME)
    assert path == str(folder / "checkpoint_step_00010000.pt")
    assert manager.nvme_backend is not None
    assert manager.nvme_backend.exists(path)  # Saves under way count as made.
    assert manager.wait_for_pending_saves(30)
    assert torch.load(path, weights_only=True)["model_state_dict"]["weight"][0] == 10_000


def test_a_save_returns_before_it_is_durable_and_takes_the_state_as_it_is(
    manager: CheckpointManager, folder: Path
) -> None:
    state = state_of(1)
    manager.save_checkpoint(state)
    state.model_state_dict["weight"].zero_()
    assert manager.wait_for_pending_saves(30)
    assert_is(manager.load_checkpoint(tier=NVME), 1)


def test_a_synchronous_save_is_durable_when_it_returns(folder: Path) -> None:
    with CheckpointManager(CheckpointConfig(nvme_path=folder, async_save=False)) as manager:
        manager.save_checkpoint(state_of(1))
        assert file(folder, 1).exists()


def test_memory_has_no_path_and_is_preferred(manager: CheckpointManager) -> None:
    save(manager, 50)
    assert manager.save_checkpoint(state_of(100), MEMORY) is None
    assert manager.memory_backend.latest_step == 100
    assert_is(manager.load_checkpoint(), 100)
    assert_is(manager.load_checkpoint(tier=NVME), 50)


def test_a_tier_is_named_by_text_or_by_member(manager: CheckpointManager, folder: Path) -> None:
    assert manager.save_checkpoint(state_of(500), "nvme") == str(file(folder, 500))
    assert manager.save_checkpoint(state_of(550), "MEMORY") is None
    assert manager.should_checkpoint(500, "nvme")
    assert not manager.should_checkpoint(500, "s3")
    assert_is(manager.load_checkpoint(tier="nvme"), 500)
    for use in (
        lambda: manager.save_checkpoint(state_of(1), "tape"),
        lambda: manager.should_checkpoint(10, "tape"),
        lambda: manager.load_checkpoint(tier="tape"),
    ):
        with pytest.raises(
            ConfigurationError, match=r"Unknown tier 'tape'. Valid options: \['memory', 'nvme', 's3'\]"
        ):
            use()


def test_clearing_memory_leaves_the_disk(manager: CheckpointManager) -> None:
    save(manager, 1)
    manager.save_checkpoint(state_of(2), MEMORY)
    assert manager.memory_backend.num_snapshots == 2
    manager.clear_memory_snapshots()
    assert manager.memory_backend.num_snapshots == 0
    assert_is(manager.load_checkpoint(), 1)


def test_an_empty_destination_has_nothing_to_load(manager: CheckpointManager) -> None:
    for tier in (None, *CheckpointTier):
        assert manager.load_checkpoint(tier=tier) is None
    assert manager.wait_for_pending_saves() is True


def test_a_checkpoint_can_be_named(manager: CheckpointManager, folder: Path, tmp_path: Path) -> None:
    save(manager, 1, 2)
    for path in ("checkpoint_step_00000001.pt", file(folder, 1)):
        assert_is(manager.load_checkpoint(path), 1)
        assert_is(manager.load_checkpoint(path=path, tier=NVME), 1)
    torch.save(state_of(9).to_dict(), tmp_path / "elsewhere.pt")
    assert_is(manager.load_checkpoint(tmp_path / "elsewhere.pt"), 9)
    with pytest.raises(CheckpointLoadError, match=r"Failed to load checkpoint from 'nothing\.pt'"):
        manager.load_checkpoint("nothing.pt")


def test_only_the_last_n_are_kept(folder: Path) -> None:
    with CheckpointManager(CheckpointConfig(nvme_path=folder, keep_last_n=2)) as manager:
        save(manager, 1, 2, 3, 4)
        assert manager.nvme_backend is not None
        assert manager.nvme_backend.list_checkpoints() == [file(folder, 3).name, file(folder, 4).name]


def test_a_step_trained_again_does_not_overwrite_the_first(manager: CheckpointManager, folder: Path) -> None:
    save(manager, 1, 2)
    assert_is(manager.load_checkpoint(file(folder, 1)), 1)
    again = manager.save_checkpoint(state_of(2))
    assert again is not None
    assert Path(again).name.startswith("checkpoint_step_00000002-")
    assert manager.wait_for_pending_saves(30)
    assert Path(again).exists()
    assert file(folder, 2).exists()


@pytest.mark.parametrize(
    ("step", "tier", "due"),
    [
        (0, MEMORY, False), (10, MEMORY, True), (15, MEMORY, False), (100, MEMORY, True),
        (0, NVME, False), (50, NVME, False), (100, NVME, True), (-100, NVME, False),
        (100, S3, False),
    ],
)  # fmt: skip
def test_when_a_checkpoint_is_due(folder: Path, step: int, tier: CheckpointTier, due: bool) -> None:
    config = CheckpointConfig(nvme_path=folder, checkpoint_interval=100, memory_snapshot_interval=10)
    with CheckpointManager(config) as manager:
        assert manager.should_checkpoint(step, tier) is due


def test_an_interval_of_zero_disables_memory_snapshots(folder: Path) -> None:
    with CheckpointManager(CheckpointConfig(nvme_path=folder, memory_snapshot_interval=0)) as manager:
        assert not any(manager.should_checkpoint(step, MEMORY) for step in range(1000))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"checkpoint_interval": 0}, "checkpoint_interval (0) must be positive"),
        ({"memory_snapshot_interval": -1}, "memory_snapshot_interval (-1)"),
        ({"keep_last_n": 0}, "keep_last_n"),
        ({"async_save_policy": "ignore"}, "Valid options: ['warn', 'fail', 'retry']"),
        ({"async_save_retries": -1}, "async_save_retries"),
        ({"async_save_retry_delay": -0.1}, "async_save_retry_delay"),
        ({"nvme_path": None}, "nvme_path or s3_bucket"),
        ({"max_memory_mb": 0}, "max_memory_mb"),
        ({"checkpoint_interval": 1.5}, "checkpoint_interval"),
    ],
)
def test_settings_that_cannot_be_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        CheckpointConfig(**options)
    assert said in caught.value.message
    assert isinstance(caught.value, ValueError)


def test_defaults_are_as_documented() -> None:
    config = CheckpointConfig()
    assert (config.checkpoint_interval, config.memory_snapshot_interval, config.keep_last_n) == (500, 50, 3)
    assert (config.s3_bucket, config.s3_prefix, config.async_save) == (None, "", True)
    assert (config.async_save_policy, config.async_save_retries, config.async_save_retry_delay) == (
        "warn",
        3,
        5.0,
    )


def test_a_tier_that_is_not_configured_says_which_setting_is_missing(manager: CheckpointManager) -> None:
    with pytest.raises(ConfigurationError, match="s3_bucket"):
        manager.save_checkpoint(state_of(1), S3)


# Falling back


def test_deleting_a_file_makes_the_next_older_resume(manager: CheckpointManager, folder: Path) -> None:
    save(manager, 100, 200)
    file(folder, 200).unlink()
    assert_is(manager.load_checkpoint(), 100)
    assert_is(manager.load_checkpoint(tier=NVME), 100)


@pytest.mark.parametrize("how", ["changed", "cut", "manifest changed", "manifest gone"])
def test_a_corrupt_newest_falls_back_and_says_why(
    manager: CheckpointManager, folder: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    save(manager, 100, 200)
    manager.clear_memory_snapshots()
    manifest = file(folder, 200).with_suffix(".manifest.json")
    if how == "changed":
        damage(file(folder, 200))
    elif how == "cut":
        os.truncate(file(folder, 200), 1000)
    elif how == "manifest changed":
        manifest.write_bytes(manifest.read_bytes().replace(b'"step":200', b'"step":201'))
    else:
        manifest.unlink()
    with caplog.at_level(logging.WARNING):
        assert_is(manager.load_checkpoint(), 100)
    assert "step 200" in caplog.text or "00000200" in caplog.text


def test_when_nothing_can_be_loaded_training_does_not_silently_start_over(
    manager: CheckpointManager, folder: Path
) -> None:
    save(manager, 100, 200)
    manager.clear_memory_snapshots()
    for step in (100, 200):
        damage(file(folder, step))
    with pytest.raises(CheckpointLoadError) as caught:
        manager.load_checkpoint()
    assert "step 200 in NVME" in caught.value.message
    assert "step 100 in NVME" in caught.value.message


def test_a_destination_that_cannot_be_read_is_not_an_empty_one(
    manager: CheckpointManager, folder: Path
) -> None:
    save(manager, 1)
    manager.clear_memory_snapshots()
    for path in folder.glob("*.manifest.json"):
        path.write_bytes(b"{}")
    with pytest.raises(CheckpointLoadError, match="manifest"):
        manager.load_checkpoint()


# Files of other programs


def test_files_of_plain_torch_save_are_resumed_from_newest_step_first(
    manager: CheckpointManager, folder: Path
) -> None:
    folder.mkdir()
    for step in (300, 100, 200):
        torch.save(state_of(step).to_dict(), file(folder, step))
    torch.save({"anything": 1}, folder / "other.pt")
    assert_is(manager.load_checkpoint(), 300)
    file(folder, 300).unlink()
    assert_is(manager.load_checkpoint(tier=NVME), 200)
    damage(file(folder, 200))
    assert_is(manager.load_checkpoint(), 100)
    save(manager, 150)  # What is saved now is newer than what was found, whatever its step.
    manager.clear_memory_snapshots()
    assert_is(manager.load_checkpoint(), 150)


def test_a_file_written_after_our_own_is_newer(manager: CheckpointManager, folder: Path) -> None:
    save(manager, 100)
    torch.save(state_of(120).to_dict(), file(folder, 120))
    os.utime(file(folder, 120), (time.time() + 5, time.time() + 5))
    assert_is(manager.load_checkpoint(), 120)


def test_an_older_file_that_needs_trust_is_passed_over_unless_trusted(
    manager: CheckpointManager, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder.mkdir()
    torch.save(state_of(1).to_dict(), file(folder, 1))
    torch.save({**state_of(2).to_dict(), "dataset_state": {"where": Path("/")}}, file(folder, 2))
    assert_is(manager.load_checkpoint(), 1)
    assert "step 2 in NVME" in caplog.text
    assert_is(manager.load_checkpoint(config=CheckpointLoadConfig(trusted_source=True)), 2)
    assert "SECURITY: Loading checkpoint with weights_only=False" in caplog.text


def test_the_engine_and_the_harness_open_each_others_files(manager: CheckpointManager, folder: Path) -> None:
    save(manager, 1)
    with Engine(folder, memory=Memory(job="test-harness-engine"), stem=step_stem) as engine:
        state = engine.load()
        assert_is(CheckpointState.from_dict(state), 1)
        engine.save({**state, "step": 2, "extra": {"scaling": {"x": 1}}}, step=2).result(30)
    loaded = manager.load_checkpoint(tier=NVME)
    assert loaded is not None
    assert (loaded.step, loaded.extra) == (2, {"scaling": {"x": 1}})


# Failures, by policy


def filled(tmp_path: Path) -> Any:
    return small_tmpfs(tmp_path / "small", size_bytes=4 << 20)


LARGE = 2_000_000


def test_warn_logs_and_training_continues(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with filled(tmp_path) as folder, CheckpointManager(CheckpointConfig(nvme_path=folder)) as manager:
        save(manager, 1)
        manager.save_checkpoint(state_of(2, elements=LARGE))
        assert manager.wait_for_pending_saves(30) is False
        assert (
            f"[NVME] Failed to save checkpoint to '{file(folder, 2)}': No space left on device" in caplog.text
        )
        assert manager.wait_for_pending_saves(30) is True  # Reported once.
        save(manager, 3)
        manager.clear_memory_snapshots()
        assert_is(manager.load_checkpoint(), 3)


def test_fail_raises_with_the_guides_text_and_older_checkpoints_stay(tmp_path: Path) -> None:
    with (
        filled(tmp_path) as folder,
        CheckpointManager(
            CheckpointConfig(nvme_path=folder, async_save_policy=AsyncSavePolicy.FAIL)
        ) as manager,
    ):
        save(manager, 1)
        manager.save_checkpoint(state_of(2, elements=LARGE))
        with pytest.raises(CheckpointSaveError) as caught:
            manager.wait_for_pending_saves(30)
        assert caught.value.message.startswith(
            f"[NVME] Failed to save checkpoint to '{file(folder, 2)}': No space left on device"
        )
        manager.save_checkpoint(state_of(3, elements=LARGE))
        manager._pending.settle()
        with pytest.raises(CheckpointSaveError):
            manager.save_checkpoint(state_of(4))
        save(manager, 4)
        manager.clear_memory_snapshots()
        assert_is(manager.load_checkpoint(), 4)


def test_retry_succeeds_once_there_is_space(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with filled(tmp_path) as folder:
        (folder / "ballast").write_bytes(bytes(3 << 20))
        config = CheckpointConfig(
            nvme_path=folder, async_save_policy="retry", async_save_retries=1_000, async_save_retry_delay=0.05
        )
        with CheckpointManager(config) as manager:
            manager.save_checkpoint(state_of(1, elements=300_000))
            eventually(lambda: "No space left on device" in caplog.text, within_s=30)
            (folder / "ballast").unlink()
            assert manager.wait_for_pending_saves(30)
            assert_is(manager.load_checkpoint(tier=NVME), 1)


def test_a_synchronous_save_raises_whatever_the_policy(tmp_path: Path) -> None:
    with filled(tmp_path) as folder:
        with CheckpointManager(CheckpointConfig(nvme_path=folder, async_save=False)) as manager:
            with pytest.raises(CheckpointSaveError, match="No space left on device"):
                manager.save_checkpoint(state_of(2, elements=LARGE))
            manager.save_checkpoint(state_of(3))
            assert file(folder, 3).exists()


def test_too_little_memory_is_reported_by_policy(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    from elastic_harness.errors import MemoryLimitExceeded

    for policy in ("warn", "fail"):
        config = CheckpointConfig(nvme_path=folder, max_memory_mb=1, async_save_policy=policy)
        with CheckpointManager(config) as manager:
            manager.save_checkpoint(state_of(1), MEMORY)
            if policy == "fail":
                with pytest.raises(MemoryLimitExceeded):
                    manager.save_checkpoint(state_of(2, elements=LARGE), MEMORY)
            else:
                manager.save_checkpoint(state_of(2, elements=LARGE), MEMORY)
                assert "Cannot save snapshot: 7.6MB required, but only 1.0MB available" in caplog.text
            assert_is(manager.load_checkpoint(), 1)


# Lives and deaths


SCRIPT = textwrap.dedent(
    """
    import os, signal, sys
    from elastic_harness.checkpoint import CheckpointConfig, CheckpointManager, CheckpointTier
    from tests.harness.checkpoint_states import assert_is, state_of
    manager = CheckpointManager(CheckpointConfig(nvme_path=sys.argv[1]), job=sys.argv[2])
    if sys.argv[3] == "die":
        manager.save_checkpoint(state_of(100))
        assert manager.wait_for_pending_saves(60)
        manager.save_checkpoint(state_of(150), CheckpointTier.MEMORY)
        assert manager.memory_backend.latest_step == 150
        os.kill(os.getpid(), signal.SIGKILL)
    assert_is(manager.load_checkpoint(), 150)
    assert_is(manager.load_checkpoint(tier=CheckpointTier.NVME), 100)
    manager.save_checkpoint(state_of(200))  # Nobody waits: it is finished before the process ends.
    """
)


def test_a_killed_process_resumes_from_memory_and_the_last_save_of_a_script_is_not_lost(folder: Path) -> None:
    job = f"test-{os.getpid()}-{time.monotonic_ns()}"

    def run(how: str) -> int:
        return subprocess.run([sys.executable, "-c", SCRIPT, folder, job, how], timeout=100).returncode

    try:
        assert run("die") == -signal.SIGKILL
        assert run("resume") == 0
        assert not job_folder(job).exists()
    finally:
        remove_tree(job_folder(job))
    with CheckpointManager(CheckpointConfig(nvme_path=folder)) as manager:
        assert_is(manager.load_checkpoint(), 200)
