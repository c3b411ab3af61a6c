from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from strata.checkpoint import Memory
from strata.checkpoint.staging import job_folder, remove_tree


@pytest.fixture
def job() -> Iterator[str]:
    """A job name nobody else has; nothing of it may be left in shared memory."""
    name = f"test-{uuid.uuid4().hex[:12]}"
    yield name
    folder = job_folder(name)
    left = sorted(str(path) for path in folder.rglob("*") if path.name != "owner") if folder.exists() else []
    remove_tree(folder)
    assert not left, f"images left behind: {left}"


@pytest.fixture
def memory(job: str) -> Memory:
    return Memory(job=job)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"
