from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from strata.checkpoint import Memory
from strata.shared_memory import job_folder, remove_tree
from strata.stores import Store, open_store
from tests.support_seaweed import Seaweed, seaweed


@pytest.fixture
def job() -> Iterator[str]:
    """A job name nobody else has; nothing of it may be left in shared memory."""
    name = f"test-{uuid.uuid4().hex[:12]}"
    yield name
    folder = job_folder(name)
    left = sorted(str(path) for path in folder.rglob("*"))
    remove_tree(folder)
    assert not left, f"images left behind: {left}"


@pytest.fixture
def memory(job: str) -> Memory:
    return Memory(job=job)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seaweed]:
    with seaweed(tmp_path_factory.mktemp("seaweed")) as server:
        yield server


@pytest.fixture
def s3(s3_server: Seaweed) -> Store:
    """A place of its own on a real S3 server."""
    options = s3_server.options(part_bytes=5 << 20)
    open_store("s3://checkpoints/made", **options).put("k", b"the bucket exists now")
    return open_store(f"s3://checkpoints/{uuid.uuid4().hex[:12]}", **options)
