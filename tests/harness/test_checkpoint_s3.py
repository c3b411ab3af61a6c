"""The harness's manager over a real S3 server, and without any credentials for one."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elastic_harness.checkpoint import (
    CheckpointConfig,
    CheckpointManager,
    CheckpointTier,
    S3Backend,
    S3Config,
)
from elastic_harness.errors import CheckpointSaveError, ConfigurationError
from tests.harness.checkpoint_states import assert_is, damage, state_of
from tests.harness.test_checkpoint_manager import file, save
from tests.support_seaweed import READER_KEY, Seaweed, seaweed

NVME, S3 = CheckpointTier.NVME, CheckpointTier.S3


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "nvme"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seaweed]:
    with seaweed(tmp_path_factory.mktemp("seaweed")) as server:
        yield server


@pytest.fixture
def s3_manager(
    server: Seaweed, folder: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[CheckpointManager]:
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)
    bucket = f"b{abs(hash(request.node.name)) % 10**9}"
    config = CheckpointConfig(nvme_path=folder, s3_bucket=bucket, s3_prefix="runs/a/")
    with CheckpointManager(config) as manager:
        yield manager


@pytest.mark.s3
def test_s3_is_the_last_resort_and_the_nearest_copy_of_a_step_wins(
    s3_manager: CheckpointManager, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manager = s3_manager
    save(manager, 100)
    path = manager.save_checkpoint(state_of(100), S3)
    assert manager.wait_for_pending_saves(60)
    assert path is not None
    assert path.startswith("s3://")
    assert path.endswith("/runs/a/checkpoint_step_00000100.pt")
    assert manager.should_checkpoint(500, S3)
    with caplog.at_level(logging.INFO):
        assert_is(manager.load_checkpoint(tier=NVME), 100)
        assert "loaded step 100 in NVME" in caplog.text
        assert_is(manager.load_checkpoint(tier=S3), 100)
        assert "loaded step 100 in S3" in caplog.text
        assert_is(manager.load_checkpoint(path), 100)
        damage(file(folder, 100))
        manager.clear_memory_snapshots()
        assert_is(manager.load_checkpoint(), 100)
        assert "could not load step 100 in NVME" in caplog.text
    assert manager.s3_backend is not None
    assert manager.s3_backend.list_checkpoints() == ["checkpoint_step_00000100.pt"]
    manager.s3_backend.save(state_of(5), "named.pt")
    assert_is(manager.s3_backend.load("named.pt"), 5)
    assert manager.s3_backend.get_latest_checkpoint() == "named.pt"
    manager.s3_backend.delete("named.pt")
    assert not manager.s3_backend.exists("named.pt")


@pytest.mark.s3
def test_missing_permissions_are_named(
    server: Seaweed, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {**server.environment(), "AWS_ACCESS_KEY_ID": READER_KEY}.items():
        monkeypatch.setenv(name, value)
    config = CheckpointConfig(nvme_path=folder, s3_bucket="ready", async_save_policy="fail")
    with CheckpointManager(config) as manager:
        manager.save_checkpoint(state_of(1), S3)
        with pytest.raises(CheckpointSaveError) as caught:
            manager.wait_for_pending_saves(60)
    assert caught.value.message.startswith("[S3] Failed to save checkpoint")
    assert "AccessDenied" in caught.value.message
    assert "s3:PutObject" in caught.value.message


def test_missing_credentials_are_reported_in_the_guides_words_and_leave_the_disk_usable(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    config = CheckpointConfig(nvme_path=folder, s3_bucket="bucket", async_save_policy="fail")
    with CheckpointManager(config) as manager:
        manager.save_checkpoint(state_of(1), S3)
        with pytest.raises(CheckpointSaveError) as caught:
            manager.wait_for_pending_saves(60)
        assert caught.value.message == "[S3] Failed to save checkpoint: NoCredentialsError"
        assert any("AWS_ACCESS_KEY_ID" in suggestion for suggestion in caught.value.suggestions)
        save(manager, 2)
        assert_is(manager.load_checkpoint(), 2)


def test_options_reach_the_client_under_the_names_of_boto(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "k")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
    endpoint = "http://127.0.0.1:9"
    options: dict[str, Any] = {
        "endpoint_url": endpoint,
        "connect_timeout": 1.0,
        "read_timeout": 7.0,
        "max_retries": 2,
    }
    config = S3Config("bucket", "runs", **options)
    for backend in (S3Backend("bucket", "runs", **options), S3Backend(config)):
        with backend:
            assert backend.url == backend.store.url == "s3://bucket/runs"
            settings = backend.store._settings  # type: ignore[attr-defined]
            assert (settings.connect_timeout_s, settings.request_timeout_s, settings.max_retries) == (
                1.0,
                7.0,
                2,
            )
            assert settings.config["endpoint"] == endpoint


def test_a_configuration_has_the_defaults_of_earlier_versions() -> None:
    config = S3Config("bucket")
    assert (config.connect_timeout, config.read_timeout) == (10.0, 60.0)
    assert (config.max_retries, config.retry_mode) == (3, "adaptive")


def test_a_backend_is_made_as_in_earlier_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "k")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
    config = S3Config("bucket", "runs", "us-west-2", 1.0, 7.0, 2, "adaptive")
    assert config == S3Config(
        bucket="bucket", prefix="runs", region="us-west-2", connect_timeout=1.0, read_timeout=7.0,
        max_retries=2, retry_mode="adaptive",
    )  # fmt: skip
    for backend in (
        S3Backend.from_config(config),
        S3Backend("bucket", "runs", "us-west-2", 1.0, 7.0, 2, "adaptive"),
        S3Backend(
            "bucket",
            "runs",
            "us-west-2",
            retry_mode="legacy",
            connect_timeout=1,
            read_timeout=7,
            max_retries=2,
        ),
    ):
        with backend:
            settings = backend.store._settings  # type: ignore[attr-defined]
            assert (settings.connect_timeout_s, settings.request_timeout_s, settings.max_retries) == (1, 7, 2)
            assert settings.config["region"] == "us-west-2"
            assert "retry_mode" not in settings.config


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"conect_timeout": 1.0}, r"unknown S3 option 'conect_timeout' \(did you mean 'connect_timeout'\?\)"),
        ({"zzz": 1}, "unknown S3 option 'zzz'; known are access_key_id, "),
        ({"connect_timeout": -1}, r"connect_timeout \(-1\) must be positive"),
        ({"read_timeout": 0}, r"read_timeout \(0\) must be positive"),
        ({"connect_timeout": "soon"}, r"connect_timeout must be a number, not text \('soon'\)"),
        ({"max_retries": -1}, r"max_retries \(-1\) cannot be negative"),
        ({"max_retries": 1.5}, "max_retries must be a whole number"),
        ({"retry_mode": "sometimes"}, "Unknown retry_mode 'sometimes'. Valid options: "),
    ],
)
def test_options_that_cannot_be_are_refused_when_the_backend_is_made(
    options: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigurationError, match=said):
        S3Backend("bucket", **options)
