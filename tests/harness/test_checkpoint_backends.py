"""Checkpoint files on disk: whole or absent, verified, safe to load, and errors in the guide's words."""

from __future__ import annotations

import logging
import os
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from elastic_harness.checkpoint import CheckpointLoadConfig, CheckpointState, NVMeBackend
from elastic_harness.errors import (
    CheckpointError,
    CheckpointLoadError,
    CheckpointSaveError,
    CheckpointValidationError,
)
from tests.harness.checkpoint_states import assert_is, damage, state_of
from tests.stores.mounts import small_tmpfs

TRUSTED = CheckpointLoadConfig(trusted_source=True)


@pytest.fixture
def backend(tmp_path: Path) -> Iterator[NVMeBackend]:
    with NVMeBackend(tmp_path) as backend:
        yield backend


def test_a_checkpoint_is_a_file_that_any_pytorch_opens(backend: NVMeBackend, tmp_path: Path) -> None:
    path = backend.save(state_of(3), "step_3.pt")
    assert path == str(tmp_path / "step_3.pt")
    assert torch.load(path, weights_only=True, mmap=True)["step"] == 3
    assert_is(backend.load("step_3.pt"), 3)
    assert_is(backend.load(path), 3)
    assert backend.exists("step_3.pt")
    assert backend.exists(path)
    assert not backend.exists("step_4.pt")


def test_without_a_name_the_step_names_the_file(backend: NVMeBackend) -> None:
    assert Path(backend.save(state_of(10_000))).name == "checkpoint_step_00010000.pt"


def test_saving_again_under_a_name_replaces_it(backend: NVMeBackend, tmp_path: Path) -> None:
    for step in (1, 2, 3):
        backend.save(state_of(step, elements=1000 * step), "last.pt")
        assert_is(backend.load("last.pt"), step)
    files = sorted(path.name for path in tmp_path.iterdir() if path.is_file())
    assert files == ["last.manifest.json", "last.pt"]
    assert not list(tmp_path.rglob("*tmp*/*"))


def test_an_asynchronous_save_takes_the_state_as_it_is_now(backend: NVMeBackend) -> None:
    state = state_of(1)
    futures = [backend.save_async(state, "a.pt")]
    state.model_state_dict["weight"].fill_(2)
    state.step = 2
    futures.append(backend.save_async(state, "b.pt"))
    assert [Path(future.result(30)).name for future in futures] == ["a.pt", "b.pt"]
    assert_is(backend.load("a.pt"), 1)
    assert backend.load("b.pt").step == 2


def test_names_are_listed_and_the_newest_is_the_last_saved(backend: NVMeBackend) -> None:
    assert backend.get_latest_checkpoint() is None
    for step in (3, 1, 2):
        backend.save(state_of(step), f"checkpoint_{step}.pt")
    assert backend.list_checkpoints() == ["checkpoint_1.pt", "checkpoint_2.pt", "checkpoint_3.pt"]
    assert backend.list_checkpoints("checkpoint_2") == ["checkpoint_2.pt"]
    assert backend.get_latest_checkpoint() == "checkpoint_2.pt"


def test_deleting_takes_the_manifest_too_and_twice_is_once(backend: NVMeBackend, tmp_path: Path) -> None:
    backend.save(state_of(1), "a.pt")
    backend.delete("a.pt")
    backend.delete("a.pt")
    assert not backend.exists("a.pt")
    assert not [path for path in tmp_path.iterdir() if path.is_file()]


def test_cleaning_keeps_the_newest_and_does_not_count_what_is_visibly_broken(
    backend: NVMeBackend, tmp_path: Path
) -> None:
    for step in range(5):
        backend.save(state_of(step), f"{step}.pt")
    with (tmp_path / "4.pt").open("r+b") as file:
        file.truncate(100)
    assert sorted(backend.cleanup_old_checkpoints(keep_last=2)) == ["0.pt", "1.pt"]
    assert backend.list_checkpoints() == ["2.pt", "3.pt", "4.pt"]
    assert backend.cleanup_old_checkpoints(keep_last=2) == []
    with pytest.raises(ValueError, match="keep_last"):
        backend.cleanup_old_checkpoints(keep_last=0)


def test_files_of_plain_torch_save_load_in_both_formats(backend: NVMeBackend, tmp_path: Path) -> None:
    torch.save(state_of(5).to_dict(), tmp_path / "new.pt")
    torch.save(state_of(6).to_dict(), tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    assert_is(backend.load("new.pt"), 5)
    assert_is(backend.load("old.pt"), 6)
    assert backend.list_checkpoints() == ["new.pt", "old.pt"]


def test_absolute_paths_elsewhere_load_too(
    backend: NVMeBackend, tmp_path_factory: pytest.TempPathFactory
) -> None:
    other = tmp_path_factory.mktemp("other") / "copied.pt"
    torch.save(state_of(5).to_dict(), other)
    assert_is(backend.load(other), 5)


@pytest.mark.parametrize("kind", ["image", "torch.save"])
def test_a_changed_bit_is_noticed_whoever_wrote_the_file(
    backend: NVMeBackend, tmp_path: Path, kind: str
) -> None:
    path = tmp_path / "a.pt"
    if kind == "image":
        backend.save(state_of(1), path)
    else:
        torch.save(state_of(1).to_dict(), path)
    damage(path)
    assert torch.load(path, weights_only=True)["step"] == 1  # PyTorch itself does not notice.
    with pytest.raises(
        CheckpointLoadError, match=r"Failed to load checkpoint from 'a\.pt': .*(changed|not intact)"
    ):
        backend.load("a.pt")


def test_a_file_that_lost_its_manifest_loads_by_name_with_a_warning(
    backend: NVMeBackend, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    backend.save(state_of(1), "a.pt")
    (tmp_path / "a.manifest.json").unlink()
    assert_is(backend.load("a.pt"), 1)
    assert "it cannot be verified" in caplog.text


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (
            {"step": 1, "optimizer_state_dict": {}},
            "Failed to load checkpoint from 'a.pt': Missing required keys: {'model_state_dict'}",
        ),
        ({"random": 1}, "{'model_state_dict', 'optimizer_state_dict', 'step'}"),
        ([1, 2], "it holds a list, not a dictionary"),
    ],
)
def test_what_is_no_checkpoint_is_reported_in_the_guides_words(
    backend: NVMeBackend, tmp_path: Path, content: Any, said: str
) -> None:
    torch.save(content, tmp_path / "a.pt")
    with pytest.raises(CheckpointLoadError) as caught:
        backend.load("a.pt")
    assert said in caught.value.message
    assert caught.value.suggestions


def test_validation_can_be_left_out(backend: NVMeBackend, tmp_path: Path) -> None:
    torch.save({"step": 4}, tmp_path / "a.pt")
    assert backend.load("a.pt", CheckpointLoadConfig(validate_structure=False)).step == 4


@pytest.mark.parametrize(
    "change", [{"step": -1}, {"step": 1.5}, {"step": True}, {"epoch": "x"}, {"model_state_dict": [1]}]
)
def test_impossible_contents_are_a_validation_error(
    backend: NVMeBackend, tmp_path: Path, change: dict[str, Any]
) -> None:
    torch.save({**state_of(1).to_dict(), **change}, tmp_path / "a.pt")
    with pytest.raises(CheckpointValidationError, match=next(iter(change))):
        backend.load("a.pt")


@pytest.mark.parametrize("name", ["nothing.pt", "../../etc/passwd", "a/../../b.pt", "", "a\0b.pt"])
def test_names_that_mean_nothing_are_load_errors(backend: NVMeBackend, name: str) -> None:
    with pytest.raises(CheckpointLoadError):
        backend.load(name)


def test_garbage_is_a_load_error(backend: NVMeBackend, tmp_path: Path) -> None:
    for content in (b"", b"\x80", b"PK\x03\x04", os.urandom(1000), b"PK\x05\x06" + bytes(18)):
        (tmp_path / "a.pt").write_bytes(content)
        with pytest.raises(CheckpointLoadError):
            backend.load("a.pt")


def test_a_compressed_archive_is_refused_before_it_is_unpacked(backend: NVMeBackend, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(10**8))
    with pytest.raises(CheckpointLoadError, match="compressed"):
        backend.load("a.pt")


# Trust


def unsafe_file(path: Path) -> None:
    """Harmless, but more than a safe load lets through: as older programs saved it."""
    torch.save({**state_of(8).to_dict(), "rng_states": {"numpy": np.random.get_state()}}, path)


def test_more_than_tensors_needs_a_trusted_source_and_says_how(backend: NVMeBackend, tmp_path: Path) -> None:
    unsafe_file(tmp_path / "a.pt")
    with pytest.raises(CheckpointLoadError) as caught:
        backend.load("a.pt")
    assert "safely" in str(caught.value)
    assert ".multiarray._reconstruct" in caught.value.message, "with the whole name of what was refused"
    assert "Check the documentation" not in caught.value.message
    assert "trusted_source=True" in str(caught.value)


def test_a_trusted_source_loads_with_the_security_warning(
    backend: NVMeBackend, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    unsafe_file(tmp_path / "a.pt")
    with caplog.at_level(logging.WARNING):
        assert_is(backend.load("a.pt", config=TRUSTED), 8)
    assert (
        "SECURITY: Loading checkpoint with weights_only=False enables arbitrary code execution" in caplog.text
    )
    caplog.clear()
    quiet = CheckpointLoadConfig(trusted_source=True, warn_on_unsafe=False)
    assert_is(backend.load("a.pt", config=quiet), 8)
    assert "SECURITY" not in caplog.text


def test_leaving_safe_mode_alone_does_not_trust_anybody(
    backend: NVMeBackend, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    unsafe_file(tmp_path / "a.pt")
    with pytest.raises(CheckpointLoadError):
        backend.load("a.pt", config=CheckpointLoadConfig(safe_mode=False))
    assert "safe_mode=False alone changes nothing" in caplog.text


def test_loading_settings_have_safe_defaults() -> None:
    config = CheckpointLoadConfig()
    assert (config.safe_mode, config.validate_structure, config.warn_on_unsafe, config.trusted_source) == (
        True,
        True,
        True,
        False,
    )


# Failing disks


def test_a_full_disk_is_reported_in_the_guides_words_and_what_was_there_stays(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with small_tmpfs(tmp_path / "nvme", size_bytes=4 << 20) as folder, NVMeBackend(folder) as backend:
        backend.save(state_of(1), "a.pt")
        for save in (backend.save, lambda *args: backend.save_async(*args).result(30)):
            with pytest.raises(CheckpointSaveError) as caught:
                save(state_of(2, elements=2_000_000), "b.pt")
            assert caught.value.message.startswith(
                f"[NVME] Failed to save checkpoint to '{folder}/b.pt': No space left on device"
            )
            assert any("df -h" in suggestion for suggestion in caught.value.suggestions)
        assert not backend.exists("b.pt")
        assert_is(backend.load("a.pt"), 1)
        # Under a taken name too: the old file is still there, and its manifest still proves it.
        with pytest.raises(CheckpointSaveError):
            backend.save(state_of(2, elements=2_000_000), "a.pt")
        assert_is(backend.load("a.pt"), 1)
        assert "it cannot be verified" not in caplog.text


def test_a_path_that_cannot_be_written_is_a_save_error(backend: NVMeBackend, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointSaveError, match=r"\[NVME\] Failed to save checkpoint"):
        backend.save(state_of(1), "file/a.pt")
    with NVMeBackend(tmp_path / "file") as other, pytest.raises(CheckpointSaveError):
        other.save(state_of(1), "a.pt")
    with pytest.raises(CheckpointSaveError):
        backend.save(state_of(1), "../outside.pt")


def test_a_state_that_no_safe_load_could_bring_back_is_refused_by_name(backend: NVMeBackend) -> None:
    with pytest.raises(CheckpointError, match=r"metrics\.when"):
        backend.save(CheckpointState(step=1, metrics={"when": Path("/")}), "a.pt")
    assert backend.list_checkpoints() == []
