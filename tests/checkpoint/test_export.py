"""Copies in other formats, read back with the tools they are for."""

from __future__ import annotations

import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from strata.checkpoint import CheckpointManager, Damaged, LoadFailed, Memory, UnsupportedState
from strata.checkpoint.dcp import StrataStorageWriter
from strata.checkpoint.errors import CheckpointNotFound
from strata.checkpoint.export import InvalidExport, export
from tests.checkpoint.states import assert_same, every_kind, small_state


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        warnings.filterwarnings("ignore", category=FutureWarning, module="torch")
        yield


def training_state() -> dict[str, Any]:
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 4))
    model[1].weight = torch.nn.Parameter(model.get_parameter("0.weight").t().contiguous())
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    weights = model.state_dict()
    return {
        "step": 7,
        "model_state_dict": {**weights, "tied": weights["0.weight"], "half": torch.ones(3).bfloat16()},
        "optimizer_state_dict": optimizer.state_dict(),
        "names": ["a", "b"],
        "rate": 1e-4,
        "nothing": None,
    }


@pytest.fixture
def place(folder: Path, memory: Memory) -> str:
    with CheckpointManager(folder, memory=memory) as manager:
        manager.save(small_state(1), step=1)
        manager.save(training_state(), step=7).result(30)
    return str(folder)


def newest(place: str) -> Any:
    """What the newest image holds, opened by torch itself."""
    return torch.load(sorted(Path(place).glob("*.pt"))[-1], weights_only=True)


@pytest.fixture
def sharded_place(folder: Path) -> str:
    dcp.save(training_state(), storage_writer=StrataStorageWriter(folder, step=7))
    return str(folder)


def test_pt_opens_anywhere_and_is_the_same_bit_for_bit(tmp_path: Path, folder: Path, memory: Memory) -> None:
    state = every_kind()
    with CheckpointManager(folder, memory=memory) as manager:
        info = manager.save(state, step=3).result(30)
    to = tmp_path / "copy.pt"
    made = export(str(folder), str(to))
    assert made.size_bytes == to.stat().st_size
    with zipfile.ZipFile(to) as archive:
        assert archive.testzip() is None  # True checksums, for other tools.
        assert all(each.CRC for each in archive.infolist() if each.file_size and "data/" in each.filename)
    loaded = torch.load(to, weights_only=True)
    assert_same(loaded, torch.load(info.path, weights_only=True))
    assert_same(loaded["model"], state["model"])
    assert loaded["numpy"].tolist() == state["numpy"].tolist()  # Arrays are tensors to other tools.


def test_a_state_of_tensors_opens_with_weights_only(place: str, tmp_path: Path) -> None:
    export(place, str(tmp_path / "copy.pt"))
    loaded = torch.load(tmp_path / "copy.pt", weights_only=True)
    assert_same(loaded, newest(place))
    assert loaded["step"] == 7
    assert loaded["model_state_dict"]["tied"].data_ptr() == loaded["model_state_dict"]["0.weight"].data_ptr()


def test_safetensors_reads_every_tensor_and_the_values_beside_them(place: str, tmp_path: Path) -> None:
    to = tmp_path / "model.safetensors"
    made = export(place, str(to))
    loaded = load_file(to)
    state = newest(place)
    for name, tensor in state["model_state_dict"].items():
        assert torch.equal(loaded[f"model_state_dict.{name}"], tensor), name
    assert torch.equal(
        loaded["optimizer_state_dict.state.0.exp_avg"], state["optimizer_state_dict"]["state"][0]["exp_avg"]
    )
    assert made.tensors == len(loaded)
    assert made.left_out == ()
    with safe_open(to, "pt") as opened:
        assert '"rate": 0.0001' in opened.metadata()["strata.values"]


def test_one_part_of_the_state_keeps_its_own_names(place: str, tmp_path: Path) -> None:
    export(place, str(tmp_path / "weights.safetensors"), key="model_state_dict")
    assert set(load_file(tmp_path / "weights.safetensors")) == {
        "0.weight", "0.bias", "1.weight", "1.bias", "tied", "half",
    }  # fmt: skip
    export(place, str(tmp_path / "one.pt"), key="model_state_dict.0.bias")
    assert torch.load(tmp_path / "one.pt", weights_only=True).shape == (3,)


def test_a_dcp_folder_is_read_by_pytorch_itself(place: str, tmp_path: Path) -> None:
    export(place, str(tmp_path / "dcp"), format="dcp")
    state = newest(place)
    into: dict[str, Any] = {
        "model_state_dict": {
            name: torch.zeros_like(tensor) for name, tensor in state["model_state_dict"].items()
        },
        "step": 0,
    }
    dcp.load(into, storage_reader=dcp.FileSystemReader(tmp_path / "dcp"))
    assert into["step"] == 7
    assert_same(into["model_state_dict"], dict(state["model_state_dict"]))
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(".")) == []


@pytest.mark.parametrize("format", ["pt", "safetensors", "dcp"])
def test_a_sharded_checkpoint_exports_like_an_unsharded_one(
    sharded_place: str, tmp_path: Path, format: str
) -> None:
    to = tmp_path / f"copy.{format}"
    made = export(sharded_place, str(to), format=format)
    assert made.tensors == 6 + 12
    if format == "dcp":
        dcp_to_torch_save(to, tmp_path / "as.pt")
        loaded = torch.load(tmp_path / "as.pt", weights_only=True)
    elif format == "pt":
        loaded = torch.load(to, weights_only=True)
        assert loaded["step"] == 7
        assert loaded["names"] == ["a", "b"]
        assert loaded["optimizer_state_dict"]["param_groups"][0]["betas"] == (0.9, 0.999)
    else:
        loaded = {"model_state_dict": {"half": load_file(to)["model_state_dict.half"]}}
    assert torch.equal(loaded["model_state_dict"]["half"], torch.ones(3).bfloat16())


def test_a_file_of_torch_save_exports_too(tmp_path: Path) -> None:
    torch.save(small_state(4), tmp_path / "old.pt")
    made = export(str(tmp_path / "old.pt"), str(tmp_path / "new.safetensors"))
    assert made.tensors == 4
    assert load_file(tmp_path / "new.safetensors")["model.layer1.weight"][0] == 401


def test_any_step_and_any_file_can_be_chosen(place: str, folder: Path, tmp_path: Path) -> None:
    export(place, str(tmp_path / "one.pt"), step=1)
    assert torch.load(tmp_path / "one.pt", weights_only=True)["step"] == 1
    payload = sorted(folder.glob("*.pt"))[0]
    export(str(payload), str(tmp_path / "two.pt"))
    assert torch.load(tmp_path / "two.pt", weights_only=True)["step"] == 1
    with pytest.raises(CheckpointNotFound, match="of step 99"):
        export(place, str(tmp_path / "x.pt"), step=99)


def test_what_is_there_is_replaced_only_when_asked(place: str, tmp_path: Path) -> None:
    for name, format in (("copy.pt", None), ("copy", "dcp")):
        to = tmp_path / name
        export(place, str(to), format=format, step=1)
        with pytest.raises(InvalidExport, match="already exists"):
            export(place, str(to), format=format)
        export(place, str(to), format=format, overwrite=True)
    assert torch.load(tmp_path / "copy.pt", weights_only=True)["step"] == 7


@pytest.mark.parametrize(
    ("to", "options", "said"),
    [
        ("copy.onnx", {}, "format"),
        ("copy", {}, "format"),
        ("copy.pt", {"format": "zip"}, "not a format"),
        ("copy.pt", {"key": "weights"}, "no 'weights'"),
        ("copy.pt", {"key": "step.x"}, "no 'x'"),
        ("copy", {"format": "dcp", "key": "step"}, "dictionary"),
        ("copy", {"format": "hf", "key": "step"}, "dictionary"),
    ],
)
def test_what_cannot_be_done_is_said_and_leaves_nothing(
    place: str, tmp_path: Path, to: str, options: dict[str, Any], said: str
) -> None:
    before = sorted(tmp_path.iterdir())
    with pytest.raises(InvalidExport, match=said):
        export(place, str(tmp_path / to), **options)
    assert sorted(tmp_path.iterdir()) == before


def test_a_damaged_checkpoint_is_not_exported(place: str, folder: Path, tmp_path: Path) -> None:
    payload = sorted(folder.glob("*.pt"))[-1]
    raw = bytearray(payload.read_bytes())
    raw[len(raw) // 2] ^= 1
    payload.write_bytes(raw)
    with pytest.raises(Damaged):
        export(place, str(tmp_path / "copy.pt"))
    assert not (tmp_path / "copy.pt").exists()


def test_numbers_that_safetensors_does_not_have_are_refused_by_name(
    folder: Path, memory: Memory, tmp_path: Path
) -> None:
    with CheckpointManager(folder, memory=memory) as manager:
        manager.save({"z": torch.ones(2, dtype=torch.complex128)}, step=1).result(30)
    with pytest.raises(UnsupportedState, match=r"state\[z\]"):
        export(str(folder), str(tmp_path / "copy.safetensors"))
    assert not (tmp_path / "copy.safetensors").exists()


def test_bytes_are_no_state(folder: Path, memory: Memory, tmp_path: Path) -> None:
    with CheckpointManager(folder, memory=memory) as manager:
        manager.save(b"anything", step=1).result(30)
    with pytest.raises(LoadFailed, match="holds raw bytes"):
        export(str(folder), str(tmp_path / "copy.pt"))


def test_values_that_safetensors_cannot_hold_are_reported(
    folder: Path, memory: Memory, tmp_path: Path
) -> None:
    with CheckpointManager(folder, memory=memory) as manager:
        manager.save({"a": np.arange(6.0)[::-1], "n": np.float64(2.5), "raw": b"x"}, step=1).result(30)
    made = export(str(folder), str(tmp_path / "copy.safetensors"))
    assert load_file(tmp_path / "copy.safetensors")["a"].tolist() == [5.0, 4.0, 3.0, 2.0, 1.0, 0.0]
    assert made.left_out == ("raw",)
