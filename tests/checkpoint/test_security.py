"""Nothing that is loaded runs code, whoever wrote it, unless the caller says that the source is trusted."""

from __future__ import annotations

import logging
import pickle
from pathlib import Path
from typing import Any

import pytest

from strata.checkpoint import CheckpointManager, LoadFailed, Memory
from strata.checkpoint.catalog.listing import Catalog
from strata.checkpoint.catalog.manifest import IMAGE, CheckpointId, Manifest, Part
from strata.checkpoint.copying.digest import digest_of
from strata.checkpoint.copying.staging import MARK_NAME
from strata.checkpoint.image.layout import FILE_NAME
from strata.checkpoint.image.reading import open_image
from strata.shared_memory import job_folder
from tests.checkpoint.malicious import payloads, torch_file


@pytest.fixture
def canary(tmp_path: Path) -> Path:
    return tmp_path / "canary"


def was_made(canary: Path) -> bool:
    """Any trace of it: some payloads make a name of their own from it."""
    found = list(canary.parent.glob(f"*{canary.name}*"))
    for path in found:
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
    return bool(found)


def manifest_for(data: bytes, key: str) -> Manifest:
    """What somebody who can write to the store would put there: a manifest that fits."""
    part = Part(key=key, size_bytes=len(data), digest=digest_of(memoryview(data)))
    return Manifest(
        checkpoint_id=CheckpointId("evil"),
        step=1,
        epoch=0,
        created_at=0.0,
        format=IMAGE,
        parts=(part,),
        sequence=1,
    )


def test_the_payloads_are_as_bad_as_they_look(canary: Path) -> None:
    bad = payloads(canary)
    assert len(bad) >= 20
    for name, pickled in bad.items():
        pickle.loads(pickled)
        assert was_made(canary), name


def test_no_payload_runs_from_a_file(canary: Path, tmp_path: Path) -> None:
    for name, pickled in payloads(canary).items():
        path = tmp_path / "evil.pt"
        path.write_bytes(torch_file(pickled))
        with pytest.raises(LoadFailed, match="could not be opened safely"):
            open_image(path)
        assert not was_made(canary), name


def test_what_was_refused_is_named_in_full(tmp_path: Path) -> None:
    path = tmp_path / "evil.pt"
    path.write_bytes(torch_file(b"\x80\x02cposix\nsystem\nX\x04\x00\x00\x00true\x85R."))
    with pytest.raises(LoadFailed) as caught:
        open_image(path)
    assert "GLOBAL posix.system" in caught.value.message
    assert "\n" not in caught.value.message


def test_no_payload_runs_from_a_store_or_from_memory(
    canary: Path, folder: Path, memory: Memory, job: str
) -> None:
    for name, pickled in payloads(canary).items():
        data = torch_file(pickled)
        for into in (None, dict[str, Any]()):
            with CheckpointManager(folder, memory=memory) as manager:
                store = manager._catalogs[0].store
                store.put("evil.pt", data)
                store.put("evil.manifest.json", manifest_for(data, "evil.pt").encode())
                image = job_folder(job) / "left-evil" / "0"
                image.mkdir(parents=True)
                (image / FILE_NAME).write_bytes(data)
                (image / MARK_NAME).write_bytes(manifest_for(data, "evil.pt").encode())
                with pytest.raises(LoadFailed) as caught:
                    manager.load(into=into)
                assert len(caught.value.reasons) == 2, name  # Both copies were tried and refused.
            assert not was_made(canary), name


def test_a_trusted_source_is_loaded_with_a_warning(
    canary: Path, folder: Path, memory: Memory, caplog: pytest.LogCaptureFixture
) -> None:
    data = torch_file(payloads(canary)["eval"])
    with CheckpointManager(folder, memory=memory) as manager, caplog.at_level(logging.WARNING):
        store = manager._catalogs[0].store
        store.put("mine.pt", data)
        store.put("mine.manifest.json", manifest_for(data, "mine.pt").encode())
        assert manager.load(trusted_source=True) is None
    assert was_made(canary)
    assert (
        "SECURITY: Loading checkpoint with weights_only=False enables arbitrary code execution" in caplog.text
    )


@pytest.mark.parametrize(
    "change", [{"key": "../../etc/passwd"}, {"key": "/etc/passwd"}, {"key": "a/../../b"}]
)
def test_a_manifest_cannot_point_outside_its_store(
    folder: Path, memory: Memory, change: dict[str, Any]
) -> None:
    with CheckpointManager(folder, memory=memory) as manager:
        store = manager._catalogs[0].store
        store.put("evil.manifest.json", manifest_for(b"x", change["key"]).encode())
        assert len(Catalog(store).list().problems) == 1
        with pytest.raises(LoadFailed):
            manager.load()
