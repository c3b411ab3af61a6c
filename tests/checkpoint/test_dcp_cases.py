"""What PyTorch documents of its planners and of resharding holds with Strata's reader and writer too: each case is done with
both, side by side, and has the same outcome."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.planner import ReadItem, SavePlan, WriteItem

from strata.checkpoint.dcp import StrataStorageReader, StrataStorageWriter
from strata.checkpoint.sharded import reader as reader_module
from tests.checkpoint.dcp_actor import run_world
from tests.checkpoint.dcp_meshes import (
    LAYOUTS,
    SHAPES,
    SMALLER,
    load_each,
    load_models,
    save_each,
    save_models,
    values,
)
from tests.checkpoint.states import assert_same


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        warnings.filterwarnings("ignore", category=FutureWarning, module="torch")
        yield


# Meshes, with real ranks


@pytest.fixture(scope="module")
def saved_by_four(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("layouts")
    assert run_world(4, save_each, folder, layouts=list(LAYOUTS)) == [{}] * 4
    return folder


def _assert_all_right(results: list[dict[str, Any] | None], pairs: int) -> None:
    for result in results:
        assert result == {"wrong": [], "pairs": pairs}


@pytest.mark.timeout(600)  # A hundred loads on four ranks.
def test_every_mesh_loads_what_every_other_mesh_saved(saved_by_four: Path) -> None:
    results = run_world(4, load_each, saved_by_four, saved=list(LAYOUTS), layouts=list(LAYOUTS))
    _assert_all_right(results, len(LAYOUTS) ** 2)


@pytest.mark.timeout(600)
def test_two_ranks_load_what_four_saved(saved_by_four: Path) -> None:
    results = run_world(2, load_each, saved_by_four, saved=list(LAYOUTS), layouts=list(SMALLER))
    _assert_all_right(results, len(LAYOUTS) * len(SMALLER))


@pytest.mark.timeout(600)
def test_four_ranks_load_what_two_saved(tmp_path: Path) -> None:
    assert run_world(2, save_each, tmp_path, layouts=list(SMALLER)) == [{}] * 2
    results = run_world(4, load_each, tmp_path, saved=list(SMALLER), layouts=list(LAYOUTS))
    _assert_all_right(results, len(LAYOUTS) * len(SMALLER))


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_one_process_without_a_group_loads_what_four_ranks_saved(saved_by_four: Path, layout: str) -> None:
    state: dict[str, Any] = {name: torch.full_like(value, -1) for name, value in values().items()}
    reader = StrataStorageReader(saved_by_four / "strata" / layout)
    dcp.load(state, storage_reader=reader, no_dist=True)
    assert_same(state, values())
    assert set(state) == set(SHAPES)


@pytest.mark.timeout(600)
def test_tensor_parallel_with_fsdp_is_resharded_as_dcp_does_it(tmp_path: Path) -> None:
    saved = run_world(4, save_models, tmp_path)
    assert saved[0] is not None
    full = saved[0]["full"]
    for world, mesh in ((4, (2, 2)), (2, (1, 2)), (2, (2, 1)), (2, (2,)), (4, (4,))):
        for result in run_world(world, load_models, tmp_path, mesh=mesh):
            assert result == {"strata": full, "dcp": full}, mesh


# Planners and mismatches, in one process


class Both:
    """One state, saved by both."""

    def __init__(
        self, folder: Path, state: dict[str, Any], *, planner: Callable[[], Any] = DefaultSavePlanner
    ):
        self.folder = folder
        for writer in (
            StrataStorageWriter(folder / "strata", step=1),
            dcp.FileSystemWriter(folder / "dcp"),
        ):
            dcp.save(copy.deepcopy(state), storage_writer=writer, planner=planner(), no_dist=True)

    def load(self, state: dict[str, Any], *, planner: Callable[[], Any] = DefaultLoadPlanner) -> Any:
        """What both load; it must be the same."""
        mine, theirs = copy.deepcopy(state), copy.deepcopy(state)
        dcp.load(theirs, storage_reader=self._dcp(), planner=planner(), no_dist=True)
        dcp.load(mine, storage_reader=self._strata(), planner=planner(), no_dist=True)
        assert_same(mine, theirs)
        return mine

    def refuse(self, state: dict[str, Any], *, planner: Callable[[], Any] = DefaultLoadPlanner) -> str:
        """What Strata says when both refuse; the state stays as it was."""
        with pytest.raises(CheckpointException):
            dcp.load(copy.deepcopy(state), storage_reader=self._dcp(), planner=planner(), no_dist=True)
        mine = copy.deepcopy(state)
        with pytest.raises(CheckpointException) as caught:
            dcp.load(mine, storage_reader=self._strata(), planner=planner(), no_dist=True)
        assert_same(mine, state)
        return str(caught.value.failures[0][0])

    def _strata(self) -> StrataStorageReader:
        return StrataStorageReader(self.folder / "strata")

    def _dcp(self) -> dcp.FileSystemReader:
        return dcp.FileSystemReader(self.folder / "dcp")


def _state() -> dict[str, Any]:
    torch.manual_seed(1)
    return {
        "model": {"weight": torch.randn(6, 4), "bias": torch.randn(4)},
        "optimizer": {"state": [{"step": torch.tensor(3.0)}, {"step": torch.tensor(4.0)}], "lr": 0.1},
        "step": 7,
        "name": "run",
        "nothing": None,
        "mixed": [1, torch.arange(3), {"deep": [torch.ones(2, 2), "text"]}],
        "pair": (1, 2.5),
    }


def _blank() -> dict[str, Any]:
    return {
        "model": {"weight": torch.zeros(6, 4), "bias": torch.zeros(4)},
        "optimizer": {"state": [{"step": torch.tensor(0.0)}, {"step": torch.tensor(0.0)}], "lr": 0.0},
        "step": 0,
        "name": "",
        "nothing": 1,
        "mixed": [0, torch.zeros(3, dtype=torch.int64), {"deep": [torch.zeros(2, 2), ""]}],
        "pair": (),
    }


def test_nested_dictionaries_lists_and_objects_come_back(tmp_path: Path) -> None:
    assert_same(Both(tmp_path, _state()).load(_blank()), _state())


def test_a_subset_of_the_keys_is_loaded_and_the_rest_is_not_asked_for(tmp_path: Path) -> None:
    both = Both(tmp_path, _state())
    assert_same(
        both.load({"model": {"bias": torch.zeros(4)}, "step": 0}),
        {"model": {"bias": _state()["model"]["bias"]}, "step": 7},
    )


def test_a_key_that_was_not_saved_is_named_and_nothing_is_loaded(tmp_path: Path) -> None:
    both = Both(tmp_path, _state())
    state = {"model": {"weight": torch.zeros(6, 4), "scale": torch.zeros(4)}}
    assert "model.scale" in both.refuse(state)


def test_a_partial_load_leaves_what_was_not_saved(tmp_path: Path) -> None:
    both = Both(tmp_path, _state())
    state = {"model": {"weight": torch.zeros(6, 4), "scale": torch.full((4,), 9.0)}, "epoch": 2}
    loaded = both.load(state, planner=lambda: DefaultLoadPlanner(allow_partial_load=True))
    assert_same(loaded["model"]["weight"], _state()["model"]["weight"])
    assert_same(loaded["model"]["scale"], torch.full((4,), 9.0))
    assert loaded["epoch"] == 2


@pytest.mark.parametrize("shape", [(4, 6), (6, 5), (6,), (6, 4, 1), (0, 4)])
def test_a_tensor_of_another_size_is_refused_by_name(tmp_path: Path, shape: tuple[int, ...]) -> None:
    said = Both(tmp_path, _state()).refuse({"model": {"weight": torch.zeros(shape)}})
    assert "model.weight" in said
    assert "6, 4" in said


@pytest.mark.parametrize(
    ("saved", "wanted"),
    [
        (torch.float32, torch.float64),
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.int64),
        (torch.int64, torch.float16),
        (torch.bool, torch.float32),
    ],
)
def test_another_type_of_number_is_converted(tmp_path: Path, saved: torch.dtype, wanted: torch.dtype) -> None:
    value = torch.tensor([[0.0, 1.5, -2.25], [3.0, 100.0, 7.0]]).to(saved)
    loaded = Both(tmp_path, {"x": value}).load({"x": torch.zeros(2, 3, dtype=wanted)})
    assert_same(loaded["x"], value.to(wanted))


def test_an_object_where_the_state_has_a_tensor_replaces_it(tmp_path: Path) -> None:
    assert Both(tmp_path, {"x": 5}).load({"x": torch.zeros(2)})["x"] == 5


def test_a_tensor_where_the_state_has_an_object_is_refused(tmp_path: Path) -> None:
    assert "Invalid" in Both(tmp_path, {"x": torch.ones(2)}).refuse({"x": 5})


def test_states_that_are_not_flattened_keep_their_dictionaries_as_objects(tmp_path: Path) -> None:
    state = {"model": {"weight": torch.ones(2, 3)}, "x": torch.arange(4.0), "step": 2}
    both = Both(tmp_path, state, planner=lambda: DefaultSavePlanner(flatten_state_dict=False))
    blank = {"model": {"weight": torch.zeros(2, 3)}, "x": torch.zeros(4), "step": 0}

    def planner(*, flatten_tensors: bool) -> DefaultLoadPlanner:
        return DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=flatten_tensors)

    assert_same(both.load(blank, planner=lambda: planner(flatten_tensors=False)), state)
    # Then the planner keeps objects to itself, whoever reads them.
    assert_same(both.load(blank, planner=lambda: planner(flatten_tensors=True)), {**blank, "x": state["x"]})


def test_targets_of_any_arrangement_in_memory_are_filled(tmp_path: Path) -> None:
    value = torch.randn(6, 8, 10)
    both = Both(tmp_path, {"x": value})
    for target in (
        torch.zeros(6, 8, 10),
        torch.zeros(10, 8, 6).permute(2, 1, 0),
        torch.zeros(12, 8, 10)[::2],
        torch.zeros(6, 16, 10)[:, ::2],
        torch.zeros(6, 8, 20)[:, :, ::2],
        torch.zeros(8, 6, 10).transpose(0, 1),
        torch.zeros(6, 8, 11)[:, :, 1:],
    ):
        state = {"x": target}
        dcp.load(state, storage_reader=StrataStorageReader(tmp_path / "strata"), no_dist=True)
        assert state["x"] is target
        assert_same(target.contiguous(), value)
    both.load({"x": torch.zeros(6, 8, 10, requires_grad=True)})


def test_a_large_tensor_arranged_otherwise_is_filled_some_rows_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    value = torch.randn(7, 3, 5)
    Both(tmp_path, {"x": value, "y": torch.ones(3)})
    for limit_bytes in (1, 130, 200):
        monkeypatch.setattr(reader_module, "_BATCH_BYTES", limit_bytes)
        for target in (torch.zeros(7, 3, 5, dtype=torch.float64), torch.zeros(5, 3, 7).permute(2, 1, 0)):
            state = {"x": target, "y": torch.zeros(3)}
            dcp.load(state, storage_reader=StrataStorageReader(tmp_path / "strata"), no_dist=True)
            assert_same(target.float().contiguous(), value)
            assert state["y"].all()


def test_modules_and_optimizers_are_loaded_through_their_own_methods(tmp_path: Path) -> None:
    def trained(seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        model = nn.Linear(4, 3)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.randn(2, 4)).sum().backward()
        optimizer.step()
        return {"model": model, "optimizer": optimizer}

    saved = trained(1)
    both = Both(tmp_path, saved)
    for reader in (both._strata(), both._dcp()):
        loaded = trained(2)
        dcp.load(loaded, storage_reader=reader, no_dist=True)
        assert_same(loaded["model"].state_dict(), saved["model"].state_dict())
        assert_same(loaded["optimizer"].state_dict(), saved["optimizer"].state_dict())


class HalfPrecision(DefaultSavePlanner):
    """Writes other values than the state has, as the documentation shows it."""

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        items = [
            replace(
                item,
                tensor_data=replace(
                    item.tensor_data, properties=replace(item.tensor_data.properties, dtype=torch.float16)
                ),
            )
            if item.tensor_data is not None
            else item
            for item in plan.items
        ]
        return replace(plan, items=items)

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        data = super().resolve_data(write_item)
        return data if isinstance(data, io.BytesIO) else data.to(torch.float16)


class Renaming(DefaultLoadPlanner):
    """Finds the keys of the state under other names in the checkpoint."""

    def set_up_planner(self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False) -> None:
        renamed = {f"old_{name}": value for name, value in state_dict.items()}
        super().set_up_planner(renamed, metadata, is_coordinator)


class Materializing(DefaultLoadPlanner):
    """Loads into tensors of its own, and hands them over when they are complete."""

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        return torch.empty_like(super().resolve_tensor(read_item), device="cpu")

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        self.original_state_dict[read_item.dest_index.fqn] = tensor


def test_a_save_planner_may_transform_what_is_written(tmp_path: Path) -> None:
    both = Both(tmp_path, {"x": torch.arange(5.0) / 3, "step": 1}, planner=HalfPrecision)
    expected = (torch.arange(5.0) / 3).half()
    assert_same(both.load({"x": torch.zeros(5, dtype=torch.float16)})["x"], expected)


def test_a_load_planner_may_rename_keys(tmp_path: Path) -> None:
    loaded = Both(tmp_path, {"old_x": torch.arange(5.0)}).load({"x": torch.zeros(5)}, planner=Renaming)
    assert_same(loaded["x"], torch.arange(5.0))


def test_a_load_planner_may_bring_its_own_tensors(tmp_path: Path) -> None:
    both = Both(tmp_path, {"x": torch.arange(5.0), "y": torch.ones(2, 2)})
    loaded = both.load({"x": torch.zeros(5), "y": torch.zeros(2, 2)}, planner=Materializing)
    assert_same(loaded["y"], torch.ones(2, 2))
