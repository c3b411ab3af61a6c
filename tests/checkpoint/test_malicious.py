"""No payload runs, through any way into a checkpoint: harness, trainer, sharded state, exports, command line.

The payloads and the proof that each would run are in `malicious.py`; here they come in every container PyTorch knows, at
every place a state has, and through every call that reads one. What stops them must be a typed error or an older checkpoint.
"""

from __future__ import annotations

import contextlib
import io
import json
import pickle
import shutil
import tarfile
import uuid
import warnings
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from typer.testing import CliRunner

from elastic_harness.checkpoint import (
    CheckpointConfig,
    CheckpointManager,
    MemorySnapshotBackend,
    NVMeBackend,
)
from elastic_harness.errors import CheckpointLoadError
from strata.checkpoint import CheckpointManager as Engine
from strata.checkpoint import Memory
from strata.checkpoint.catalog.listing import Catalog
from strata.checkpoint.catalog.manifest import IMAGE, CheckpointId, Manifest, Part
from strata.checkpoint.catalog.naming import manifest_key, step_stem
from strata.checkpoint.copying.digest import digest_of
from strata.checkpoint.copying.staging import MARK_NAME
from strata.checkpoint.dcp import StrataStorageReader, StrataStorageWriter
from strata.checkpoint.errors import CheckpointError, CheckpointNotFound, LoadFailed
from strata.checkpoint.export import export
from strata.checkpoint.image.layout import FILE_NAME
from strata.cli.checkpoint import app
from strata.data.loading.loader import ElasticLoader
from strata.data.loading.sampler import ElasticSampler
from strata.errors import StrataError
from strata.shared_memory import job_folder, remove_tree
from strata.stores import open_store
from strata.training.job import ElasticJob
from tests.checkpoint.malicious import Calls, payloads, torch_file, touch
from tests.harness.checkpoint_states import assert_is, state_of


@pytest.fixture
def canary(tmp_path: Path) -> Iterator[Path]:
    """Nothing may have made it, or anything called after it, when the test ends."""
    path = tmp_path / "canary"
    yield path
    assert_quiet(path)


def assert_quiet(canary: Path, what: str = "") -> None:
    made = list(canary.parent.rglob(f"*{canary.name}*"))
    assert not made, f"{what} ran: {made}"


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def containers(canary: Path) -> dict[str, bytes]:
    """One payload in every kind of file that torch.load has ever read, and at odd places of them."""
    evil = Calls(eval, touch(canary))
    made: dict[str, bytes] = {"a bare pickle": pickle.dumps(evil)}

    def saved(state: Any, **options: Any) -> bytes:
        buffer = io.BytesIO()
        torch.save(state, buffer, **options)
        return buffer.getvalue()

    whole = state_of(1).to_dict()
    made["a zip"] = saved({**whole, "extra": evil})
    made["the old format"] = saved({**whole, "extra": evil}, _use_new_zipfile_serialization=False)
    made["protocol 5"] = saved({**whole, "extra": evil}, pickle_protocol=5)
    made["deep in the model"] = saved({**whole, "model_state_dict": {"a": {"b": [1, (2, {"c": evil})]}}})
    made["as a key of the optimizer"] = saved({**whole, "optimizer_state_dict": {"state": {evil: 1}}})
    made["in the metrics"] = saved({**whole, "metrics": {"loss": evil}})
    made["in the generators"] = saved({**whole, "rng_states": {"0": {"python": evil}}})
    made["an array of objects"] = saved({**whole, "dataset_state": {"a": np.array([evil], dtype=object)}})
    made["a whole module"] = saved({**whole, "model_state_dict": {"m": torch.nn.Linear(1, 1)}})
    made["a subclass of dict"] = saved({**whole, "extra": EvilDict(x=1)})
    made["a parameter with a hook"] = saved({**whole, "model_state_dict": {"w": evil_tensor(evil)}})
    made["a zip with other files"] = torch_file(pickle.dumps(evil)) + b"trailing"
    made["two pickles of one name"] = two_pickles(pickle.dumps(whole), pickle.dumps(evil))
    made["a tar"] = tar({"storages": pickle.dumps(evil), "tensors": b"", "pickle": pickle.dumps(evil)})
    made["torchscript's constants"] = script_archive(pickle.dumps(evil))
    made["a storage that is a call"] = torch_file(
        b"\x80\x02(X\x07\x00\x00\x00storagec__builtin__\neval\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x01tQ."
    )
    return made


class EvilDict(dict[str, Any]):
    pass


def evil_tensor(evil: Any) -> torch.Tensor:
    tensor = torch.nn.Parameter(torch.ones(2))
    tensor.evil = evil  # type: ignore[attr-defined]
    return tensor


def two_pickles(good: bytes, bad: bytes) -> bytes:
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with zipfile.ZipFile(buffer, "w") as archive:
            for pickled in (good, bad):
                archive.writestr("archive/data.pkl", pickled)
            archive.writestr("archive/version", "3\n")
    return buffer.getvalue()


def tar(members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def script_archive(pickled: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name in ("data.pkl", "constants.pkl"):
            archive.writestr(f"archive/{name}", pickled)
        archive.writestr("archive/code/__torch__.py", "import os\n")
        archive.writestr("archive/version", "3\n")
    return buffer.getvalue()


def every_file(canary: Path) -> Iterator[tuple[str, bytes]]:
    for name, pickled in payloads(canary).items():
        yield name, torch_file(pickled)
    yield from containers(canary).items()
    canary.with_name("script.py").unlink(missing_ok=True)


def plant(folder: Path, data: bytes, *, step: int = 9, with_manifest: bool) -> Path:
    """What somebody who can write to the store would put there."""
    folder.mkdir(exist_ok=True)
    path = folder / f"{step_stem(step, CheckpointId(''))}.pt"
    path.write_bytes(data)
    if with_manifest:
        path.with_name(manifest_key(path.stem)).write_bytes(forged(data, path.name, step).encode())
    return path


def forged(data: bytes, key: str, step: int) -> Manifest:
    part = Part(key=key, size_bytes=len(data), digest=digest_of(memoryview(data)))
    return Manifest(
        checkpoint_id=CheckpointId(f"evil-{uuid.uuid4().hex}"),
        step=step,
        epoch=0,
        created_at=1e10,
        format=IMAGE,
        parts=(part,),
        generation=99,
        sequence=2**60,
    )


def test_there_are_enough_of_them(canary: Path) -> None:
    assert len(payloads(canary)) >= 20
    assert len(dict(every_file(canary))) >= 45


def test_most_of_the_containers_would_run_if_they_were_trusted(canary: Path, tmp_path: Path) -> None:
    """The others are only odd: they must fail all the same."""
    ran = 0
    for data in containers(canary).values():
        (tmp_path / "x.pt").write_bytes(data)
        with contextlib.suppress(Exception), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.load(tmp_path / "x.pt", weights_only=False)
        ran += canary.exists()
        canary.unlink(missing_ok=True)
    assert ran >= 11


# The harness


def test_no_file_runs_through_a_backend(canary: Path, tmp_path: Path) -> None:
    folder = tmp_path / "nvme"
    with NVMeBackend(folder) as backend:
        for name, data in every_file(canary):
            for with_manifest in (False, True):
                path = plant(folder, data, with_manifest=with_manifest)
                with pytest.raises(CheckpointLoadError):
                    backend.load(path)
                assert_quiet(canary, name)
            path.with_name(manifest_key(path.stem)).unlink()


def test_the_managers_search_passes_over_every_one_of_them(canary: Path, tmp_path: Path) -> None:
    folder = tmp_path / "nvme"
    with CheckpointManager(CheckpointConfig(nvme_path=folder)) as manager:
        manager.save_checkpoint(state_of(5))
        assert manager.wait_for_pending_saves(30)
        manager.clear_memory_snapshots()
        for number, (name, data) in enumerate(every_file(canary)):
            path = plant(folder, data, with_manifest=number % 2 == 0)
            assert_is(manager.load_checkpoint(), 5)
            assert_quiet(canary, name)
            path.with_name(manifest_key(path.stem)).unlink(missing_ok=True)


def test_a_foreign_image_in_memory_does_not_run_code(canary: Path) -> None:
    job = f"test-{uuid.uuid4().hex}"
    try:
        for name, data in every_file(canary):
            image = job_folder(job) / f"left-{uuid.uuid4().hex}" / "0"
            image.mkdir(parents=True)
            (image / FILE_NAME).write_bytes(data)
            (image / MARK_NAME).write_bytes(forged(data, "x.pt", 9).encode())
            with MemorySnapshotBackend(job=job) as backend:
                with pytest.raises(CheckpointLoadError):
                    backend.load()
            assert_quiet(canary, name)
    finally:
        remove_tree(job_folder(job))


# The trainer


def trainer(folder: Path, job: str) -> ElasticJob:
    model = torch.nn.Linear(2, 1)
    return ElasticJob(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data=ElasticLoader(
            [torch.ones(2)] * 8,
            ElasticSampler(8, global_batch_size=4, rank=0, world_size=1),
            commit="explicit",
        ),
        checkpoints=str(folder),
        max_steps=1,
        job=job,
    )


def test_the_trainers_restore_does_not_run_them(canary: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    files = list(every_file(canary))
    for name, data in files[::4]:  # Each is a whole job; what they share is tried with all of them above.
        plant(folder, data, with_manifest=True)
        job = f"test-{uuid.uuid4().hex}"
        with pytest.raises(StrataError), trainer(folder, job):
            pass
        assert_quiet(canary, name)
        shutil.rmtree(folder)


# Sharded state


def sharded(folder: Path, data: bytes) -> None:
    """A sharded checkpoint whose one object is this, with digests that fit."""
    dcp.save({"weight": torch.ones(4), "option": 1}, storage_writer=StrataStorageWriter(folder, step=1))
    store = open_store(folder)
    (entry,) = Catalog(store).list().entries
    manifest = entry.manifest
    layout = json.loads(json.dumps(manifest.layout))
    (old,) = manifest.parts
    raw = store.read(old.key)
    raw += bytes(-len(raw) % 64)
    for each in layout["entries"]:
        if each[0] == "object":
            each[2] = [0, len(raw), len(data)]
    raw += data
    store.put(old.key, raw)
    part = Part(key=old.key, size_bytes=len(raw), digest=digest_of(memoryview(raw)))
    store.put(entry.key, replace(manifest, parts=(part,), layout=layout).encode())


def test_no_object_of_a_sharded_checkpoint_runs(canary: Path, tmp_path: Path) -> None:
    for number, (name, data) in enumerate(every_file(canary)):
        folder = tmp_path / str(number)
        sharded(folder, data)
        with pytest.raises(CheckpointException) as caught:
            dcp.load({"weight": torch.zeros(4), "option": 0}, storage_reader=StrataStorageReader(folder))
        assert isinstance(caught.value.failures[0][0], LoadFailed), name
        assert_quiet(canary, name)
        if number % 4 == 0:  # The same way in.
            with pytest.raises(LoadFailed):
                export(str(folder), str(tmp_path / "out.pt"))
            assert_quiet(canary, name)


def test_pytorchs_own_metadata_is_never_unpickled(canary: Path, tmp_path: Path) -> None:
    folder = tmp_path / "stock"
    dcp.save({"x": torch.ones(2)}, storage_writer=dcp.FileSystemWriter(folder))
    (folder / ".metadata").write_bytes(pickle.dumps(Calls(eval, touch(canary))))
    with pytest.raises(CheckpointNotFound):
        StrataStorageReader(folder)
    for words in (
        ["ls"],
        ["verify"],
        ["export", "{}", str(tmp_path / "o.pt")],
        ["import", "{}", str(tmp_path / "run")],
        ["rm", "{}", "1"],
    ):
        invoke(*[word.format(folder) for word in (words if "{}" in words else [*words, "{}"])])
        assert_quiet(canary, words[0])


def test_metadata_of_a_sharded_checkpoint_is_data(canary: Path, tmp_path: Path) -> None:
    """Whatever stands in a manifest, its own digest made to fit, is at most refused."""
    pickled = pickle.dumps(Calls(eval, touch(canary)), 0).decode("latin1")
    dcp.save({"weight": torch.ones(4)}, storage_writer=StrataStorageWriter(tmp_path / "s", step=1))
    store = open_store(tmp_path / "s")
    (entry,) = Catalog(store).list().entries
    for change in (
        {"layout": pickled},
        {"layout": {"__reduce__": ["builtins", "eval", touch(canary)]}},
        {"metadata": {"x": pickled}},
        {"data": pickled},
        {"author": pickled},
        {"format": pickled},
        {"format": "image"},
    ):
        store.put(entry.key, replace(entry.manifest, **change).encode())
        with contextlib.suppress(StrataError, CheckpointException):
            dcp.load({"weight": torch.zeros(4)}, storage_reader=StrataStorageReader(tmp_path / "s"))
        with Engine(tmp_path / "s", memory=Memory(job=f"test-{uuid.uuid4().hex}")) as engine:
            with contextlib.suppress(CheckpointError):
                engine.load()
        for words in (["ls"], ["verify"]):
            invoke(*words, str(tmp_path / "s"))
        assert_quiet(canary, str(change))


# The command line


def invoke(*words: str) -> int:
    result = CliRunner().invoke(app, [*words, "--json"])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert "Traceback" not in result.output
    return result.exit_code


@pytest.mark.parametrize("with_manifest", [False, True])
def test_no_command_runs_them(canary: Path, tmp_path: Path, with_manifest: bool) -> None:
    folder = tmp_path / "place"
    for number, (name, data) in enumerate(every_file(canary)):
        path = plant(folder, data, with_manifest=with_manifest)
        assert invoke("export", str(path), str(tmp_path / "out.pt")) in (1, 2), name
        assert not (tmp_path / "out.pt").exists()
        assert invoke("import", str(path), str(tmp_path / "run")) in (1, 2), name
        assert not (tmp_path / "run" / "parts").exists()
        if number % 6 == 0:  # These open nothing, whatever it is.
            assert invoke("ls", str(folder)) == 0
            assert invoke("verify", str(folder)) in (0, 1)
            assert invoke("rm", str(folder), path.name, "--force") == 0
        assert_quiet(canary, name)


HOSTILE: list[Callable[[dict[str, Any]], Any]] = [
    lambda body: body.update(step="9"),
    lambda body: body.update(step=-1),
    lambda body: body.update(generation=None),
    lambda body: body.update(sequence=1.5),
    lambda body: body.update(sequence=10**30),
    lambda body: body.update(created_at="now"),
    lambda body: body.update(parts=[]),
    lambda body: body.update(parts=body["parts"] * 2),
    lambda body: body.update(parent=7),
    lambda body: body.update(checkpoint_id=["x"]),
    lambda body: body.update(metadata=[1]),
    lambda body: body.update(tensors=[["x", "float32", [1], -5, 4, "tensor"]]),
    lambda body: body.update(tensors=[["x", "float32", ["1"], 0, 4, "numpy"]]),
    lambda body: body["parts"][0].update(size=-1),
    lambda body: body["parts"][0].update(size="large"),
    lambda body: body["parts"][0].update(size=2**70),
    lambda body: body["parts"][0].update(chunk_size=0),
    lambda body: body["parts"][0].update(chunks=[]),
    lambda body: body["parts"][0].update(chunks="0" * 32),
    lambda body: body["parts"][0].update(key="../outside.pt"),
    lambda body: body["parts"][0].update(key="/etc/passwd"),
    lambda body: body["parts"][0].update(key="a\0b"),
    lambda body: body["parts"][0].update(key=""),
    lambda body: body.pop("epoch"),
]


@pytest.mark.parametrize("number", range(len(HOSTILE)))
def test_a_manifest_with_impossible_values_is_skipped(tmp_path: Path, number: int) -> None:
    """Sealed with a digest that fits, beside a good checkpoint: which is what every reader continues with."""
    import xxhash

    folder = tmp_path / "place"
    with CheckpointManager(CheckpointConfig(nvme_path=folder)) as manager:
        manager.save_checkpoint(state_of(5))
        assert manager.wait_for_pending_saves(30)
        manager.clear_memory_snapshots()
        path = plant(folder, torch_file(pickle.dumps({})), with_manifest=True)
        beside = path.with_name(manifest_key(path.stem))
        body = json.loads(beside.read_bytes())["body"]
        HOSTILE[number](body)
        raw = json.dumps(body, ensure_ascii=False, sort_keys=True, separators=(",", ":")).encode()
        beside.write_bytes(b'{"body":%s,"digest":"%s"}\n' % (raw, xxhash.xxh3_128_hexdigest(raw).encode()))
        assert_is(manager.load_checkpoint(), 5)
        with pytest.raises(CheckpointLoadError):
            manager.load_checkpoint(path)
    assert invoke("ls", str(folder)) == 0
    assert invoke("verify", str(folder)) == 1
    assert invoke("export", str(folder), str(tmp_path / "out.pt")) in (0, 1)
    with Engine(folder, memory=Memory(job=f"test-{uuid.uuid4().hex}")) as engine:
        assert engine.load()["step"] == 5
