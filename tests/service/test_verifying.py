"""A registered checkpoint is verified over the API: intact, damaged, removed, or not readable for the coordinator."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from strata import CheckpointManager, TrainingOrchestrator
from strata.stores.keys import RESERVED
from tests.support import Coordinator, eventually


@pytest.fixture
def worker(coordinator: Coordinator) -> Iterator[TrainingOrchestrator]:
    with TrainingOrchestrator(coordinator.address) as registered:
        registered.register_worker("author")
        yield registered


def saved(worker: TrainingOrchestrator, folder: Path, step: int) -> tuple[str, Path]:
    manager = CheckpointManager(path=str(folder))
    handle = manager.save({"weights": torch.arange(100_000, dtype=torch.float32)}, step=step)
    info = handle.result(60)
    manager.close()
    worker.notify_checkpoint(
        info.checkpoint_id, step, 0, info.path, info.size_bytes, status="completed", tiers=["LOCAL"]
    )
    return info.checkpoint_id, Path(info.path)


def verified(coordinator: Coordinator, name: str) -> tuple[int, dict[str, Any]]:
    """The outcome: on a busy machine it is there only after the caller has been told to ask again."""

    def asked() -> tuple[int, dict[str, Any]] | None:
        status, answer = coordinator.post(f"/api/checkpoints/{name}/verify", {})
        return None if answer.get("status") == "verifying" else (status, answer)

    outcome: tuple[int, dict[str, Any]] = eventually(asked, within_s=60, what=f"{name} is verified")
    return outcome


def test_what_is_stored_is_compared_byte_by_byte(
    coordinator: Coordinator, worker: TrainingOrchestrator, tmp_path: Path
) -> None:
    name, path = saved(worker, tmp_path / "checkpoints", 5)
    status, answer = verified(coordinator, name)
    assert (status, answer["status"], answer["damages"]) == (200, "whole", [])

    body = bytearray(path.read_bytes())
    body[len(body) // 2] ^= 1
    path.write_bytes(body)
    status, answer = verified(coordinator, name)
    assert (status, answer["status"]) == (200, "damaged")
    assert [damage["tensors"] for damage in answer["damages"]] == [["weights"]]

    for file in path.parent.glob("*.manifest.json"):
        file.unlink()
    status, answer = verified(coordinator, name)
    assert (status, answer["status"]) == (200, "damaged")
    assert "manifest is missing" in answer["damages"][0]["reason"]


def test_verifying_removes_nothing_from_a_folder_that_others_named(
    coordinator: Coordinator, worker: TrainingOrchestrator, tmp_path: Path
) -> None:
    name, path = saved(worker, tmp_path / "checkpoints", 5)
    unfinished = path.parent / RESERVED / "tmp" / "of-a-writer-that-has-ended"
    unfinished.parent.mkdir(parents=True, exist_ok=True)
    unfinished.write_bytes(b"left")
    assert verified(coordinator, name)[1]["status"] == "whole"
    assert unfinished.exists()


def test_what_cannot_be_verified_is_refused_with_a_reason(
    coordinator: Coordinator, worker: TrainingOrchestrator
) -> None:
    assert coordinator.post("/api/checkpoints/nobody/verify", {})[0] == 404
    for name, path, done in (
        ("begun", "/somewhere/a.pt", "in_progress"),
        ("relative", "a.pt", "completed"),
        ("strange", "gopher://there/a.pt", "completed"),
    ):
        worker.notify_checkpoint(name, 1, 0, path, 10, status=done)  # type: ignore[arg-type]
        status, answer = verified(coordinator, name)
        assert (status, answer["code"]) == (422, "invalid_argument"), name
        assert answer["hint"]
