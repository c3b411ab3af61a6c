"""Places for stores: real directories, real shared memory, a real S3 server."""

from __future__ import annotations

import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support_seaweed import Seaweed, seaweed


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seaweed]:
    with seaweed(tmp_path_factory.mktemp("seaweed")) as server:
        yield server


@pytest.fixture
def shm_folder() -> Iterator[Path]:
    """A directory on tmpfs, which knows no direct I/O on older kernels."""
    folder = Path(tempfile.mkdtemp(prefix="strata-test-", dir="/dev/shm"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def job_name() -> str:
    return f"test-{os.getpid()}-{uuid.uuid4().hex[:8]}"
