"""Sharded state: saved by one world, loaded by another, complete or not there at all."""

from __future__ import annotations

import inspect
import io
import json
import math
import os
import re
import signal
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from strata.checkpoint import CheckpointManager, Damaged, InvalidSave, LoadFailed, Memory, UnsupportedState
from strata.checkpoint.catalog.listing import Catalog
from strata.checkpoint.catalog.manifest import Manifest
from strata.checkpoint.catalog.naming import manifest_key, unique_stem
from strata.checkpoint.dcp import StaleGeneration, StrataStorageReader, StrataStorageWriter, latest, steps
from strata.checkpoint.errors import CheckpointError, CheckpointNotFound, NewerFormat, SaveFailed
from strata.checkpoint.sharded.layout import decode, encode
from strata.checkpoint.sharded.parts import PartWriter
from strata.checkpoint.verify import verify_store
from strata.stores import open_store
from strata.stores.faulty import Fault, FaultyStore, scripted
from tests.checkpoint.dcp_actor import run_world
from tests.checkpoint.states import DTYPES, assert_same, random_tensor
from tests.support_seaweed import Seaweed, seaweed


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """DCP warns that it works alone, and about its own use of deprecated parts of PyTorch."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        warnings.filterwarnings("ignore", category=FutureWarning, module="torch")
        yield


def save(place: Any, state: dict[str, Any], *, step: int = 1, **options: Any) -> StrataStorageWriter:
    writer = StrataStorageWriter(place, step=step, **options)
    dcp.save(state, storage_writer=writer, no_dist=True)
    return writer


def load(place: Any, state: dict[str, Any], **options: Any) -> dict[str, Any]:
    dcp.load(state, storage_reader=StrataStorageReader(place, **options), no_dist=True)
    return state


def failure(caught: pytest.ExceptionInfo[CheckpointException], rank: int = 0) -> BaseException:
    return caught.value.failures[rank][0]


def parts(folder: Path) -> list[Path]:
    return sorted((folder / "parts").glob("*.part"))


def manifests(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.manifest.json"))


def only_manifest(folder: Path) -> Manifest:
    (entry,) = Catalog(open_store(folder)).list().entries
    return entry.manifest


# Worlds of real processes


@pytest.fixture(scope="module")
def saved_by_four(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("by-four")
    results = run_world(4, "save", folder, steps=[1])
    digests = {result["digest"] for result in results if result}
    assert len(digests) == 1
    return folder, digests.pop()


@pytest.mark.parametrize("world", [1, 2, 3])
def test_what_four_ranks_saved_any_other_number_loads_bit_for_bit(
    saved_by_four: tuple[Path, str], world: int
) -> None:
    folder, digest = saved_by_four
    assert run_world(world, "load", folder) == [{"digest": digest, "step": 1}] * world


def test_two_ranks_save_asynchronously_and_one_and_three_load(tmp_path: Path) -> None:
    results = run_world(2, "save", tmp_path, steps=[7], asynchronous=True)
    assert results[0] is not None
    assert run_world(1, "load", tmp_path) == [{"digest": results[0]["digest"], "step": 7}]
    assert run_world(3, "load", tmp_path, step=7)[2] == {"digest": results[0]["digest"], "step": 7}


def test_each_rank_writes_one_part_and_replicated_state_is_written_once_and_spread(
    saved_by_four: tuple[Path, str],
) -> None:
    manifest = only_manifest(saved_by_four[0])
    assert manifest.world_size == 4
    assert len(manifest.parts) == 4
    metadata = decode(manifest, path="")
    written: dict[str, list[int]] = {}
    for stored in metadata.storage_data.values():
        written.setdefault(stored.name, []).append(stored.span.part)
    assert all(
        len(written[name]) == 1 for name in ("plain.0", "replicated", "scalar", "step", "model.average")
    )
    assert len({written[f"plain.{number}"][0] for number in range(8)}) > 1
    # Every element of every tensor is stored exactly once.
    for name, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            assert sum(math.prod(chunk.sizes) for chunk in entry.chunks) == math.prod(entry.size), name
            offsets = [tuple(chunk.offsets) for chunk in entry.chunks if math.prod(chunk.sizes)]
            assert len(set(offsets)) == len(offsets), name


@pytest.mark.timeout(600)  # Seven worlds, one after the other.
def test_a_rank_killed_while_saving_leaves_no_checkpoint_and_the_next_world_none_of_its_files(
    tmp_path: Path,
) -> None:
    results = run_world(2, "save", tmp_path, steps=[1])
    assert results[0] is not None
    for rank, kind, at, key in (
        (1, "CRASH_MIDWAY", 3, ".part"),
        (1, "CRASH_AFTER", 20, ".part"),
        (0, "CRASH_BEFORE", 0, ".manifest.json"),
        (0, "CRASH_MIDWAY", 0, ".manifest.json"),
    ):
        fault = {"rank": rank, "kind": kind, "at": at, "key": key}
        told = run_world(2, "save", tmp_path, steps=[2], fault=fault)
        assert told[rank] is None, fault
        survivor = told[1 - rank]
        assert survivor is not None
        assert "saved" not in survivor, fault
        assert [info.step for info in steps(tmp_path)] == [1], fault
    assert run_world(1, "load", tmp_path) == [{"digest": results[0]["digest"], "step": 1}]
    assert run_world(2, "save", tmp_path, steps=[3])[0] is not None
    named = {part.key for e in Catalog(open_store(tmp_path)).list().entries for part in e.manifest.parts}
    assert {f"parts/{path.name}" for path in parts(tmp_path)} == named
    assert not list((tmp_path / ".strata" / "tmp").iterdir())


def test_a_full_disk_on_one_rank_fails_the_save_on_all_and_files_do_not_pile_up(tmp_path: Path) -> None:
    fault = {"rank": 1, "kind": "NO_SPACE", "at": 2, "key": ".part"}
    results = run_world(2, "save", tmp_path, steps=[1], fault=fault)
    for result in results:
        assert result is not None
        (error,) = result["failures"].values()
        assert isinstance(error, SaveFailed)
        assert "No space left on device" in str(error)
    assert steps(tmp_path) == []
    assert len(parts(tmp_path)) <= 1  # What rank 0 wrote; replaced by the next save.
    assert run_world(1, "save", tmp_path, steps=[2])[0] is not None
    assert len(parts(tmp_path)) == 1


def test_ranks_that_live_on_after_a_failed_save_leave_none_of_its_parts(tmp_path: Path) -> None:
    fault = {"rank": 0, "kind": "NO_SPACE", "at": 2, "key": ".part"}
    results = run_world(2, "save", tmp_path, steps=[1, 2, 3], fault=fault)
    assert [result["saved"][0] for result in results if result] == ["failed", "failed"]
    assert [info.step for info in steps(tmp_path)] == [3, 2]
    named = {part.key for e in Catalog(open_store(tmp_path)).list().entries for part in e.manifest.parts}
    assert {f"parts/{path.name}" for path in parts(tmp_path)} == named


# One process


def test_every_type_of_number_comes_back_bit_for_bit(tmp_path: Path) -> None:
    state = {str(dtype): random_tensor(dtype, 7, 3) for dtype in DTYPES}
    save(tmp_path, state)
    loaded = load(tmp_path, {name: torch.zeros_like(tensor) for name, tensor in state.items()})
    assert_same(loaded, state)


def test_a_tensor_of_many_chunks_is_loaded_at_once_by_rows_and_by_columns(tmp_path: Path) -> None:
    state = {"large": torch.arange(3 << 22, dtype=torch.float64).reshape(-1, 8), "small": torch.ones(3)}
    save(tmp_path, state)
    assert len(only_manifest(tmp_path).parts[0].digest.chunks) == 385
    assert_same(load(tmp_path, {"large": torch.zeros_like(state["large"]), "small": torch.zeros(3)}), state)
    transposed = torch.zeros(8, 3 << 19, dtype=torch.float64).t()  # A target that is not contiguous.
    assert torch.equal(load(tmp_path, {"large": transposed})["large"], state["large"])


def test_optimizer_and_tied_weights_come_back_in_place(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    wanted = model.get_parameter("0.weight").detach().clone()
    save(tmp_path, {"model": model, "optimizer": optimizer})
    with torch.no_grad():
        model.get_parameter("0.weight").zero_()
    load(tmp_path, {"model": model, "optimizer": optimizer})
    assert torch.equal(model.get_parameter("0.weight"), wanted)
    assert model[0].weight is model[1].weight


def test_steps_and_latest_list_checkpoints_in_the_order_of_fallback(tmp_path: Path) -> None:
    assert latest(tmp_path) is None
    for step in (3, 10, 7):
        writer = save(
            tmp_path, {"x": torch.full((4,), float(step))}, step=step, epoch=1, metadata={"n": step}
        )
        assert writer.info is not None
    assert [info.step for info in steps(tmp_path)] == [7, 10, 3]
    newest = latest(tmp_path)
    assert newest is not None
    assert (newest.step, newest.epoch, newest.metadata, newest.world_size) == (7, 1, {"n": 7}, 1)
    assert newest == StrataStorageReader(tmp_path).info
    assert load(tmp_path, {"x": torch.zeros(4)}, step=10)["x"][0] == 10
    assert load(tmp_path, {"x": torch.zeros(4)}, checkpoint_id=newest.checkpoint_id)["x"][0] == 7
    with pytest.raises(CheckpointNotFound, match="of step 4"):
        StrataStorageReader(tmp_path, step=4)


def test_dcp_itself_may_name_the_step(tmp_path: Path) -> None:
    writer = StrataStorageWriter(tmp_path)
    for step in (5, 6):
        dcp.save(
            {"x": torch.full((2,), float(step))}, checkpoint_id=str(step), storage_writer=writer, no_dist=True
        )
    state = {"x": torch.zeros(2)}
    dcp.load(state, checkpoint_id="5", storage_reader=StrataStorageReader(tmp_path), no_dist=True)
    assert state["x"][0] == 5
    with pytest.raises(InvalidSave, match="number of a step"):
        dcp.save(state, checkpoint_id="final", storage_writer=writer, no_dist=True)


def test_keep_count_removes_older_checkpoints_and_all_their_parts(tmp_path: Path) -> None:
    for step in range(4):
        save(tmp_path, {"x": torch.ones(4)}, step=step, keep_count=2)
    assert [info.step for info in steps(tmp_path)] == [3, 2]
    assert len(parts(tmp_path)) == len(manifests(tmp_path)) == 2


def test_an_older_generation_may_not_save_any_more(tmp_path: Path) -> None:
    save(tmp_path, {"x": torch.ones(4)}, step=1, generation=5)
    with pytest.raises(CheckpointException) as caught:
        save(tmp_path, {"x": torch.zeros(4)}, step=2, generation=4)
    error = failure(caught)
    assert isinstance(error, StaleGeneration)
    assert (error.seen, error.current) == (4, 5)
    assert [info.step for info in steps(tmp_path)] == [1]
    assert len(parts(tmp_path)) == 1
    save(tmp_path, {"x": torch.ones(4)}, step=3, generation=5)
    assert [info.step for info in steps(tmp_path)] == [3, 1]


def test_a_generation_that_passes_while_a_save_is_under_way_refuses_its_manifest(tmp_path: Path) -> None:
    class Overtaken(StrataStorageWriter):
        def write_data(self, *args: Any, **kwargs: Any) -> Any:
            save(tmp_path, {"x": torch.ones(4)}, step=9, generation=2)
            return super().write_data(*args, **kwargs)

    with pytest.raises(CheckpointException) as caught:
        dcp.save(
            {"x": torch.zeros(4)}, storage_writer=Overtaken(tmp_path, step=8, generation=1), no_dist=True
        )
    assert isinstance(failure(caught), StaleGeneration)
    assert [info.step for info in steps(tmp_path)] == [9]


def test_a_lost_reply_to_the_manifest_is_no_failure(tmp_path: Path) -> None:
    counting = FaultyStore(open_store(tmp_path / "counting"))
    save(counting, {"x": torch.ones(4)})
    store = FaultyStore(
        open_store(tmp_path / "real"), choose=scripted({counting.operations - 1: Fault.LOST_REPLY})
    )
    writer = save(store, {"x": torch.ones(4)})
    assert "lost" in store.log[0]
    assert writer.info is not None
    assert load(tmp_path / "real", {"x": torch.zeros(4)})["x"][0] == 1


def test_any_failing_operation_leaves_no_checkpoint_and_a_typed_error(tmp_path: Path) -> None:
    counting = FaultyStore(open_store(tmp_path / "counting"))
    save(counting, {"x": torch.ones(4)})
    for number in range(counting.operations):
        folder = tmp_path / str(number)
        store = FaultyStore(open_store(folder), choose=scripted({number: Fault.REFUSED}))
        with pytest.raises(CheckpointException) as caught:
            save(store, {"x": torch.ones(4)})
        assert isinstance(failure(caught), SaveFailed), store.log
        assert steps(folder) == []
        save(folder, {"x": torch.ones(4)}, step=2)
        assert len(parts(folder)) == 1


@pytest.mark.parametrize("damage", ["flipped", "short", "long", "missing"])
def test_a_damaged_part_is_named_and_nothing_of_it_is_used(tmp_path: Path, damage: str) -> None:
    save(tmp_path, {"weight": torch.ones(1000)}, step=1)
    (part,) = parts(tmp_path)
    raw = part.read_bytes()
    if damage == "missing":
        part.unlink()
    else:
        changed = {"flipped": bytes([raw[0] ^ 1]) + raw[1:], "short": raw[:-1], "long": raw + b"x"}
        part.write_bytes(changed[damage])
    target = torch.zeros(1000)
    with pytest.raises(CheckpointException) as caught:
        load(tmp_path, {"weight": target})
    error = failure(caught)
    assert isinstance(error, Damaged)
    assert part.name in str(error)
    assert damage != "flipped" or error.tensors == ("weight",)
    assert not target.any()


def test_one_changed_bit_anywhere_in_a_part_or_manifest_is_noticed(tmp_path: Path) -> None:
    save(tmp_path, {"weight": torch.ones(30), "step": 3}, step=1)
    (part,), (manifest,) = parts(tmp_path), manifests(tmp_path)
    for path in (part, manifest):
        whole = path.read_bytes()
        for offset in range(0, len(whole), 7):
            flipped = bytearray(whole)
            flipped[offset] ^= 1 << (offset % 8)
            path.write_bytes(flipped)
            with pytest.raises((CheckpointException, CheckpointNotFound, Damaged)):
                load(tmp_path, {"weight": torch.zeros(30), "step": 0})
        path.write_bytes(whole)
    assert load(tmp_path, {"weight": torch.zeros(30), "step": 0})["step"] == 3


@pytest.mark.parametrize(
    "change",
    [
        lambda layout: layout["entries"][0][5][0].__setitem__(2, [0, 0, 1 << 60]),
        lambda layout: layout["entries"][0][5][0].__setitem__(2, [9, 0, 120]),
        lambda layout: layout["entries"][0][5][0].__setitem__(2, [0, -64, 120]),
        lambda layout: layout["entries"][0][5][0].__setitem__(2, [0, 1, 119]),
        lambda layout: layout["entries"][0][5][0].__setitem__(1, [1 << 60]),
        lambda layout: layout["entries"][0].__setitem__(2, "qint8"),
        lambda layout: layout["entries"][0].__setitem__(3, [10]),
        lambda layout: layout["entries"].append(layout["entries"][0]),
        lambda layout: layout["entries"].append(["module", "x", [0, 0, 0]]),
        lambda layout: layout.__setitem__("paths", [["weight", [None]]]),
        lambda layout: layout.__setitem__("schema", "2"),
        lambda layout: layout.pop("entries"),
    ],
)
def test_a_layout_that_does_not_add_up_is_refused_before_anything_is_read(
    tmp_path: Path, change: Any
) -> None:
    save(tmp_path, {"weight": torch.ones(30)}, step=1)
    manifest = only_manifest(tmp_path)
    layout = json.loads(json.dumps(manifest.layout))
    change(layout)
    store = open_store(tmp_path)
    store.put(manifest_key(unique_stem(1, manifest.checkpoint_id)), replace(manifest, layout=layout).encode())
    with pytest.raises(Damaged, match="layout"):
        StrataStorageReader(tmp_path)


def test_a_layout_of_a_newer_version_is_refused_as_such(tmp_path: Path) -> None:
    save(tmp_path, {"weight": torch.ones(30)}, step=1)
    manifest = only_manifest(tmp_path)
    layout = {**json.loads(json.dumps(manifest.layout)), "schema": 2}
    store = open_store(tmp_path)
    store.put(manifest_key(unique_stem(1, manifest.checkpoint_id)), replace(manifest, layout=layout).encode())
    with pytest.raises(NewerFormat, match="layout schema 2, written by a newer Strata"):
        StrataStorageReader(tmp_path)


def test_what_could_not_be_loaded_safely_is_refused_when_saving(tmp_path: Path) -> None:
    with pytest.raises(CheckpointException) as caught:
        save(tmp_path, {"x": torch.ones(2), "bad": io.StringIO("x").getvalue, "path": Path("/")})
    error = failure(caught)
    assert isinstance(error, UnsupportedState)
    assert "state[" in str(error)
    assert steps(tmp_path) == []
    assert parts(tmp_path) == []


def test_metadata_of_unknown_types_is_refused_by_name() -> None:
    for metadata, name in (
        (Metadata({}, planner_data={"x.y": ("x", 1.5)}), "x.y"),
        (Metadata({}, planner_data=object()), "planner_data"),
        (Metadata({"z": object()}), "z"),  # type: ignore[dict-item]
        (Metadata({"q": TensorStorageMetadata(TensorProperties(torch.qint8), torch.Size([1]), [])}), "q"),
    ):
        with pytest.raises(UnsupportedState, match=re.escape(f"state[{name}]")):
            encode(metadata, {})
    with pytest.raises(CheckpointError, match="no rank has written it"):
        encode(Metadata({"lost": BytesStorageMetadata()}), {})


def test_a_mismatching_state_is_reported_by_name(tmp_path: Path) -> None:
    save(tmp_path, {"x": torch.ones(2)})
    with pytest.raises(CheckpointException) as caught:
        load(tmp_path, {"x": torch.zeros(3)})
    assert "x" in str(failure(caught))


def test_ranks_that_chose_different_checkpoints_are_stopped(tmp_path: Path) -> None:
    for step in (1, 2):
        save(tmp_path, {"x": torch.ones(2)}, step=step)
    readers = [StrataStorageReader(tmp_path, step=step) for step in (1, 2)]
    plans = [reader.prepare_local_plan(dcp.LoadPlan([])) for reader in readers]
    with pytest.raises(LoadFailed, match="different checkpoints"):
        readers[0].prepare_global_plan(plans)


@pytest.mark.skipif(
    "use_collectives" not in inspect.signature(dcp.save).parameters,
    reason="this torch always saves with collectives",
)
def test_saving_without_collectives_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidSave, match="use_collectives"):
        dcp.save(
            {"x": torch.ones(2)},
            storage_writer=StrataStorageWriter(tmp_path),
            no_dist=True,
            use_collectives=False,
        )
    with pytest.raises(CheckpointException) as caught:
        save(tmp_path, {})
    assert isinstance(failure(caught), InvalidSave)


@pytest.mark.parametrize(
    "options",
    [{"step": -1}, {"epoch": -1}, {"generation": -1}, {"keep_count": 0}, {"metadata": {"x": object()}}],
)
def test_impossible_options_are_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidSave):
        StrataStorageWriter(tmp_path, **options)


def test_sharded_and_unsharded_checkpoints_share_a_destination(tmp_path: Path, memory: Memory) -> None:
    with CheckpointManager(tmp_path, memory=memory) as manager:
        manager.save({"x": torch.ones(3)}, step=1).result(30)
        save(tmp_path, {"x": torch.ones(2)}, step=2)
        assert [info.step for info in manager.all_checkpoints()] == [2, 1]
        restored = manager.restore()
        assert restored.info.step == 1
        assert "sharded" in restored.reasons[0]
        manager.save({"x": torch.ones(3)}, step=3).result(30)
    assert load(tmp_path, {"x": torch.zeros(2)}, step=2)["x"].all()
    with CheckpointManager(tmp_path, memory=memory) as manager:  # Its look for orphans touches no part.
        manager.save({"x": torch.ones(3)}, step=4).result(30)
    assert load(tmp_path, {"x": torch.zeros(2)}, step=2)["x"].all()


def test_cleanup_removes_parts_of_dead_writers_only(tmp_path: Path) -> None:
    child = os.fork()
    if not child:
        try:
            writer = PartWriter(open_store(tmp_path), 1)
            writer.add(memoryview(b"x" * 100))
            writer.finish()
        finally:  # Whatever happens, it must not go on with the tests.
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert len(parts(tmp_path)) == 1
    save(tmp_path, {"x": torch.ones(2)}, step=2)
    assert len(parts(tmp_path)) == 1
    assert load(tmp_path, {"x": torch.zeros(2)})["x"].all()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seaweed]:
    with seaweed(tmp_path_factory.mktemp("seaweed")) as server:
        yield server


@pytest.mark.s3
def test_sharded_state_in_a_bucket_is_saved_loaded_and_verified(
    server: Seaweed, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)
    place = "s3://shelf/sharded"
    open_store("s3://shelf/made").put("k", b"the bucket exists now")
    state = {f"{n}.weight": torch.randn(1 << 10, 3 << 10) for n in range(3)} | {"step": 4}
    save(place, state, step=4)
    assert_same(load(place, {"1.weight": torch.zeros(1 << 10, 3 << 10)})["1.weight"], state["1.weight"])
    blank = {name: torch.zeros(1 << 10, 3 << 10) for name in state if name != "step"} | {"step": 0}
    assert_same(load(place, blank), state)
    assert all(one.is_intact for one in verify_store(open_store(place)))
