"""Models of other tools as the beginning of a run, and back: bit for bit, or a sentence."""

from __future__ import annotations

import io
import json
import pickle
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from typer.testing import CliRunner

from strata.checkpoint import CheckpointManager, Damaged, LoadFailed, Memory
from strata.checkpoint.catalog.listing import Catalog
from strata.checkpoint.catalog.manifest import SHARDED
from strata.checkpoint.dcp import StrataStorageReader, StrataStorageWriter
from strata.checkpoint.export import export
from strata.checkpoint.formats import reading
from strata.checkpoint.importing import DestinationTaken, InvalidImport, adopt
from strata.checkpoint.verify import verify_store
from strata.cli.checkpoint import app
from strata.stores import open_store
from strata.torch_compat.checkpoints import MemoryFormat
from tests.checkpoint.dcp_actor import run_world
from tests.checkpoint.states import random_tensor, same_bits

FORMATS = ("pt", "safetensors", "hf", "dcp")
SMALL = 4 << 20
"""A limit for buffers that makes everything above go through in several pieces."""


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        warnings.filterwarnings("ignore", category=FutureWarning, module="torch")
        yield


def weights() -> dict[str, torch.Tensor]:
    """What a model may hold, in every type that all formats have."""
    base = torch.randn(64, 48)
    dtypes = (
        torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2,
        torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool,
    )  # fmt: skip
    return {
        **{f"layers.{n}.weight": random_tensor(dtype, 7, 5, seed=n) for n, dtype in enumerate(dtypes)},
        "embedding.weight": base,
        "head.weight": base,
        "transposed": base.t(),
        "every_second": base[::2, ::3],
        "expanded": torch.ones(3, 1).expand(3, 4),
        "channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(3.5),
    }


def assert_weights(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert list(found) == list(expected) or sorted(found) == sorted(expected)
    for name, tensor in expected.items():
        assert same_bits(found[name], tensor), name


def opened(path: Path, format: str, tmp_path: Path) -> dict[str, torch.Tensor]:
    """The weights of an export, by the tools it is for."""
    if format == "safetensors":
        return load_file(path)
    if format == "hf":
        index = json.loads((path / "model.safetensors.index.json").read_text())["weight_map"]
        files = {name: load_file(path / name) for name in set(index.values())}
        assert {name for file in files.values() for name in file} == set(index)
        return {name: files[at][name] for name, at in index.items()}
    if format == "dcp":
        dcp_to_torch_save(path, tmp_path / "from_dcp.pt")
        path = tmp_path / "from_dcp.pt"
    found: dict[str, torch.Tensor] = torch.load(path, weights_only=True)
    return found


@pytest.mark.parametrize("format", FORMATS)
def test_weights_come_back_bit_for_bit_through_every_format(tmp_path: Path, format: str) -> None:
    model = weights()
    torch.save(model, tmp_path / "model.pt")
    made = adopt(str(tmp_path / "model.pt"), str(tmp_path / "first"))
    assert (made.step, made.format, made.tensors, made.has_optimizer) == (0, "pt", len(model), False)
    assert all(each.is_intact for each in verify_store(open_store(str(tmp_path / "first"))))

    out = tmp_path / f"out.{format}"
    export(str(tmp_path / "first"), str(out), format=format, key="model")
    assert_weights(opened(out, format, tmp_path), model)

    adopt(str(out), str(tmp_path / "second"))
    export(str(tmp_path / "second"), str(tmp_path / "again.pt"), key="model")
    assert_weights(torch.load(tmp_path / "again.pt", weights_only=True), model)


def test_tied_weights_are_stored_once_and_tied_again(tmp_path: Path) -> None:
    tied = torch.randn(500, 100)
    torch.save({"a": tied, "b": tied, "c": torch.ones(3)}, tmp_path / "model.pt")
    made = adopt(str(tmp_path / "model.pt"), str(tmp_path / "run"))
    assert made.tensors == 3
    assert tied.nbytes < made.size_bytes < 2 * tied.nbytes
    export(str(tmp_path / "run"), str(tmp_path / "out.pt"), key="model")
    found = torch.load(tmp_path / "out.pt", weights_only=True)
    assert found["a"].data_ptr() == found["b"].data_ptr()
    assert torch.equal(found["b"], tied)


def trained(*, buffers: bool = False) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    layers: list[nn.Module] = [nn.Linear(4, 8), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 2)]
    if buffers:
        layers.insert(1, nn.BatchNorm1d(8))
    model = nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(2):
        model(torch.randn(6, 4)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def imported(run: Path) -> dict[str, Any]:
    """The state of the first checkpoint, as PyTorch's own loader assembles it."""
    reader = StrataStorageReader(run)
    state: dict[str, Any] = {}
    for name, entry in reader.read_metadata().state_dict_metadata.items():
        state[name] = None
        if isinstance(entry, TensorStorageMetadata):
            state[name] = torch.zeros(entry.size, dtype=entry.properties.dtype)
    dcp.load(state, storage_reader=reader, no_dist=True)
    return state


@pytest.mark.parametrize("buffers", [False, True])
@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "module._orig_mod."])
def test_a_training_state_keeps_its_optimizer_under_the_names_of_parameters(
    tmp_path: Path, prefix: str, buffers: bool
) -> None:
    model, optimizer = trained(buffers=buffers)
    wrapped = {f"{prefix}{name}": value for name, value in model.state_dict().items()}
    torch.save(
        {
            "model": wrapped,
            "optimizer": optimizer.state_dict(),
            "global_step": 12,
            "epoch": 3,
            "args": {"x": 1},
        },
        tmp_path / "last.pt",
    )
    made = adopt(str(tmp_path / "last.pt"), str(tmp_path / "run"))
    assert (made.step, made.has_optimizer, made.left_out) == (12, True, ("args",))
    assert any("'model'" in note for note in made.notes)
    assert all(any(part in note for note in made.notes) for part in prefix.split(".") if part)
    state = imported(tmp_path / "run")
    assert (state["step"], state["epoch"]) == (12, 3)
    for name, value in model.state_dict().items():
        assert same_bits(state[f"model_state_dict.{name}"], value), name
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state[parameter].items():
            assert same_bits(state[f"optimizer_state_dict.state.{name}.{key}"], value), (name, key)
    assert state["optimizer_state_dict.param_groups.0.params"] == [
        name for name, _ in model.named_parameters()
    ]
    assert state["optimizer_state_dict.param_groups.0.lr"] == 0.01


def test_groups_of_parameters_are_named_where_their_shapes_tell(tmp_path: Path) -> None:
    model, _ = trained()
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups: list[dict[str, Any]] = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors}]
    optimizer = torch.optim.AdamW(groups)
    model(torch.randn(6, 4)).sum().backward()
    optimizer.step()
    torch.save({"state_dict": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "m.pt")
    assert adopt(str(tmp_path / "m.pt"), str(tmp_path / "run"), step=7).has_optimizer
    state = imported(tmp_path / "run")
    assert state["optimizer_state_dict.param_groups.0.params"] == ["0.weight", "1.weight", "3.weight"]
    for name, parameter in model.named_parameters():
        found = state[f"optimizer_state_dict.state.{name}.exp_avg"]
        assert same_bits(found, optimizer.state[parameter]["exp_avg"]), name


def test_an_optimizer_that_could_belong_to_several_tensors_is_left_out_and_said_to_be(tmp_path: Path) -> None:
    parameter = torch.ones(4, requires_grad=True)
    optimizer = torch.optim.Adam([parameter])
    parameter.sum().backward()
    optimizer.step()
    state = {
        "model": {"weight": parameter.detach(), "average": torch.zeros(4)},
        "optimizer": optimizer.state_dict(),
    }
    torch.save(state, tmp_path / "m.pt")
    made = adopt(str(tmp_path / "m.pt"), str(tmp_path / "run"))
    assert not made.has_optimizer
    assert "optimizer_state_dict" in made.left_out
    assert any("could be any of 2" in note for note in made.notes)

    named = torch.optim.Adam([("weight", parameter)])
    named.step()
    torch.save(state | {"optimizer": named.state_dict()}, tmp_path / "named.pt")
    assert adopt(str(tmp_path / "named.pt"), str(tmp_path / "other")).has_optimizer
    assert "optimizer_state_dict.state.weight.exp_avg" in imported(tmp_path / "other")


@pytest.mark.parametrize("format", ["pt", "safetensors", "dcp"])
def test_a_training_state_goes_through_every_format_that_holds_one(tmp_path: Path, format: str) -> None:
    model, optimizer = trained()
    state = {
        "step": 40,
        "epoch": 1,
        "model_state_dict": model.state_dict(),
        "optimizer_state_dict": optimizer.state_dict(),
        "lr_scheduler_state_dict": {"last_epoch": 4, "base_lrs": [0.01]},
        "extra": {"ema": {"weight": torch.randn(3), "decay": 0.5}},
        "world_size": 2,
    }
    torch.save(state, tmp_path / "state.pt")
    adopt(str(tmp_path / "state.pt"), str(tmp_path / "first"))
    export(str(tmp_path / "first"), str(tmp_path / "out"), format=format)
    made = adopt(str(tmp_path / "out"), str(tmp_path / "second"))
    assert (made.step, made.has_optimizer, made.left_out) == (40, True, ())
    first, second = imported(tmp_path / "first"), imported(tmp_path / "second")
    assert sorted(first) == sorted(second)
    for name, value in first.items():
        if isinstance(value, torch.Tensor):
            assert same_bits(value, second[name]), name
        elif format == "safetensors" and isinstance(value, tuple):
            assert list(value) == second[name], name  # JSON has no tuples.
        else:
            assert value == second[name], name


@pytest.mark.parametrize("format", ["pt", "dcp"])
def test_numbers_as_keys_stay_numbers(tmp_path: Path, format: str) -> None:
    """A scheduler's milestones, and an optimizer's state that is no model's."""
    moments = {0: {"exp_avg": torch.randn(4)}, 1: {"exp_avg": torch.randn(2)}}
    state = {
        "model_state_dict": {"w": torch.ones(3)},
        "lr_scheduler_state_dict": {"milestones": Counter({30: 1, 80: 1})},
        "extra": {"second": {"state": moments}},
    }
    torch.save(state, tmp_path / "m.pt")
    adopt(str(tmp_path / "m.pt"), str(tmp_path / "first"))
    export(str(tmp_path / "first"), str(tmp_path / "out"), format=format)
    if format == "pt":
        adopt(str(tmp_path / "out"), str(tmp_path / "second"))
        loaded = imported(tmp_path / "second")
        found = loaded["extra.second.state"]
        assert all(same_bits(found[n]["exp_avg"], moments[n]["exp_avg"]) for n in moments)
    else:
        loaded = {"lr_scheduler_state_dict.milestones": None, "extra.second.state.1.exp_avg": torch.zeros(2)}
        dcp.load(loaded, storage_reader=dcp.FileSystemReader(tmp_path / "out"), no_dist=True)
        assert same_bits(loaded["extra.second.state.1.exp_avg"], moments[1]["exp_avg"])
    assert loaded["lr_scheduler_state_dict.milestones"] == Counter({30: 1, 80: 1})


def test_a_checkpoint_of_a_replicated_job_can_be_the_beginning_of_another_run(
    folder: Path, memory: Memory, tmp_path: Path
) -> None:
    model, optimizer = trained()
    with CheckpointManager(folder, memory=memory) as manager:
        state = {
            "model_state_dict": model.state_dict(),
            "optimizer_state_dict": optimizer.state_dict(),
            "step": 5,
        }
        manager.save(state, step=5).result(30)
    made = adopt(str(folder), str(tmp_path / "run"))
    assert (made.format, made.step, made.has_optimizer) == ("strata", 5, True)


@pytest.fixture(scope="module")
def three_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Saved by three processes: uneven shards, columns, fewer rows than ranks, replicated and tied tensors."""
    folder = tmp_path_factory.mktemp("three")
    assert all(run_world(3, "save", folder, steps=[4]))
    return folder


@pytest.mark.parametrize("format", FORMATS)
def test_uneven_shards_of_three_ranks_are_exported_bit_for_bit(
    three_ranks: Path, tmp_path: Path, format: str
) -> None:
    expected = imported(three_ranks)
    out = tmp_path / "out"
    found: dict[str, Any]
    export(str(three_ranks), str(out), format=format)
    if format == "hf":
        model = {k.removeprefix("model."): v for k, v in expected.items() if k.startswith("model.")}
        assert_weights(opened(out, "hf", tmp_path), model)
        adopt(str(out), str(tmp_path / "run"))
        assert_weights(
            {k: v for k, v in imported(tmp_path / "run").items() if isinstance(v, torch.Tensor)},
            {f"model_state_dict.{name}": tensor for name, tensor in model.items()},
        )
        return
    if format == "dcp":  # PyTorch's own reader, flat and in one process.
        found = {k: torch.zeros_like(v) if isinstance(v, torch.Tensor) else None for k, v in expected.items()}
        dcp.load(found, storage_reader=dcp.FileSystemReader(out), no_dist=True)
    elif format == "safetensors":
        found = load_file(out)
    else:
        nested = torch.load(out, weights_only=True)
        found = {f"model.{name}": tensor for name, tensor in nested["model"].items()}
        found |= {name: nested[name] for name in ("columns", "rows", "replicated", "empty", "scalar", "step")}
        found |= {f"plain.{n}": tensor for n, tensor in enumerate(nested["plain"])}
    for name, value in found.items():
        if isinstance(value, torch.Tensor):
            assert same_bits(value, expected[name]), name
        else:
            assert value == expected[name], name
    assert {"model.embedding.weight", "columns", "rows", "empty", "scalar"} <= set(found)


def test_a_sharded_checkpoint_of_other_names_is_adopted_with_its_optimizer(
    three_ranks: Path, tmp_path: Path
) -> None:
    export(str(three_ranks), str(tmp_path / "dcp"), format="dcp")
    made = adopt(str(tmp_path / "dcp"), str(tmp_path / "run"))
    assert made.has_optimizer
    before, after = imported(three_ranks), imported(tmp_path / "run")
    moved = {"model.": "model_state_dict.", "optimizer.": "optimizer_state_dict."}
    for old, new in moved.items():
        names = [name for name in before if name.startswith(old)]
        assert names
        for name in names:
            value = before[name]
            found = after[new + name.removeprefix(old)]
            assert same_bits(found, value) if isinstance(value, torch.Tensor) else found == value, name


@pytest.mark.parametrize("format", FORMATS)
def test_tensors_larger_than_the_memory_go_through_in_pieces(tmp_path: Path, format: str) -> None:
    wide = torch.randn(1500, 1024)
    model = {"wide": wide, "turned": torch.randn(700, 1300).t(), "bias": torch.randn(7)}
    torch.save(model, tmp_path / "model.pt")
    adopt(str(tmp_path / "model.pt"), str(tmp_path / "run"), memory_bytes=SMALL)
    export(str(tmp_path / "run"), str(tmp_path / "out"), format=format, key="model", memory_bytes=SMALL)
    assert_weights(opened(tmp_path / "out", format, tmp_path), model)


def hugging_face(folder: Path, model: dict[str, torch.Tensor]) -> None:
    """A folder as `save_pretrained` writes it."""
    folder.mkdir()
    names = sorted(model)
    weight_map: dict[str, str] = {}
    for number, some in enumerate((names[::2], names[1::2]), 1):
        file = f"model-{number:05d}-of-00002.safetensors"
        save_file({name: model[name] for name in some}, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(some, file)
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text('{"tie_word_embeddings": true}')


def llama() -> dict[str, torch.Tensor]:
    """Without `lm_head.weight`, which is tied."""
    names = ("embed_tokens", *(f"layers.{n}.self_attn.q_proj" for n in range(4)), "norm")
    return {f"model.{name}.weight": torch.randn(6, 4).bfloat16() for name in names}


def test_a_hugging_face_folder_is_adopted_and_written_back(tmp_path: Path) -> None:
    model = llama()
    hugging_face(tmp_path / "hf", model)
    made = adopt(str(tmp_path / "hf"), str(tmp_path / "run"))
    assert (made.format, made.tensors) == ("hf", len(model))
    assert any("fresh optimizer" in note for note in made.notes)
    written = export(str(tmp_path / "run"), str(tmp_path / "back"), format="hf", max_shard_bytes=100)
    assert len(list((tmp_path / "back").glob("model-*-of-00003.safetensors"))) == 3
    assert written.tensors == len(model)
    assert_weights(opened(tmp_path / "back", "hf", tmp_path), model)


def test_a_folder_with_one_file_and_one_of_pickles_are_adopted_too(tmp_path: Path) -> None:
    model = llama()
    for name in ("one", "old"):
        (tmp_path / name).mkdir()
    save_file(model, tmp_path / "one" / "model.safetensors")
    torch.save(model, tmp_path / "old" / "pytorch_model.bin")
    torch.save(model, tmp_path / "legacy.pt", _use_new_zipfile_serialization=False)
    for number, name in enumerate(("one", "old", "legacy.pt")):
        adopt(str(tmp_path / name), str(tmp_path / f"run{number}"))
        found = imported(tmp_path / f"run{number}")
        for key, tensor in model.items():
            assert same_bits(found[f"model_state_dict.{key}"], tensor), name


def test_dotted_names_of_a_training_state_are_taken_apart_as_far_as_they_can_be(tmp_path: Path) -> None:
    save_file(
        {"model_state_dict.a.weight": torch.ones(2), "optimizer_state_dict.state.0.exp_avg": torch.ones(2)},
        tmp_path / "m.safetensors",
    )
    made = adopt(str(tmp_path / "m.safetensors"), str(tmp_path / "run"))
    assert made.left_out == ("optimizer_state_dict",)
    assert "model_state_dict.a.weight" in imported(tmp_path / "run")


def test_a_folder_of_pytorchs_own_writer_is_adopted(tmp_path: Path) -> None:
    model = weights() | {"columns": torch.randn(4, 5)}
    dcp.save({"model": model, "step": 9}, storage_writer=dcp.FileSystemWriter(tmp_path / "dcp"), no_dist=True)
    made = adopt(str(tmp_path / "dcp"), str(tmp_path / "run"))
    assert (made.format, made.step, made.tensors) == ("dcp", 9, len(model))
    found = imported(tmp_path / "run")
    assert_weights({name: found[f"model_state_dict.{name}"] for name in model}, model)


def test_an_import_is_the_beginning_of_a_run_and_never_a_second_one(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(3)}, tmp_path / "m.pt")
    adopt(str(tmp_path / "m.pt"), str(tmp_path / "run"), step=5)
    (entry,) = Catalog(open_store(str(tmp_path / "run"))).list().entries
    manifest = entry.manifest
    assert (manifest.format, manifest.step, manifest.parent, manifest.data) == (SHARDED, 5, None, None)
    assert manifest.lineage == manifest.checkpoint_id
    with pytest.raises(DestinationTaken, match="step 5 is the newest"):
        adopt(str(tmp_path / "m.pt"), str(tmp_path / "run"))
    assert len(Catalog(open_store(str(tmp_path / "run"))).list().entries) == 1


def test_dcp_saves_continue_an_imported_checkpoint(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(3)}, tmp_path / "m.pt")
    first = adopt(str(tmp_path / "m.pt"), str(tmp_path / "run"), step=5)
    dcp.save(
        {"w": torch.zeros(3)}, storage_writer=StrataStorageWriter(tmp_path / "run", step=6), no_dist=True
    )
    newest = Catalog(open_store(str(tmp_path / "run"))).list().entries[0].manifest
    assert (newest.step, newest.parent, newest.lineage) == (6, first.checkpoint_id, first.checkpoint_id)


def test_a_signed_run_begins_with_a_signed_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = tmp_path / "key"
    key.write_text("0123456789abcdef" * 4 + "\n")
    key.chmod(0o600)
    monkeypatch.setenv("STRATA_SIGNING_KEY", str(key))
    torch.save({"w": torch.arange(5)}, tmp_path / "m.pt")
    adopt(str(tmp_path / "m.pt"), str(tmp_path / "run"))
    export(str(tmp_path / "run"), str(tmp_path / "out.safetensors"), key="model")
    assert load_file(tmp_path / "out.safetensors")["w"].tolist() == [0, 1, 2, 3, 4]
    other = tmp_path / "other"
    other.write_text("fedcba9876543210" * 4 + "\n")
    other.chmod(0o600)
    monkeypatch.setenv("STRATA_SIGNING_KEY", str(other))
    assert not all(each.is_intact for each in verify_store(open_store(str(tmp_path / "run"))))


# What cannot be imported


def flipped(path: Path, at: float = 0.5) -> None:
    raw = bytearray(path.read_bytes())
    raw[int(len(raw) * at)] ^= 1
    path.write_bytes(raw)


def cut(path: Path, to: float = 0.6) -> None:
    raw = path.read_bytes()
    path.write_bytes(raw[: int(len(raw) * to)])


def _pt(folder: Path) -> Path:
    torch.save({"w": torch.randn(500)}, folder / "m.pt")
    return folder / "m.pt"


def _safetensors(folder: Path) -> Path:
    save_file({"w": torch.randn(500)}, folder / "m.safetensors")
    return folder / "m.safetensors"


def _hf(folder: Path) -> Path:
    hugging_face(folder / "hf", llama())
    return folder / "hf"


def _dcp(folder: Path) -> Path:
    state = {"model": {"w": torch.randn(500)}, "option": "x"}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(folder / "dcp"), no_dist=True)
    return folder / "dcp"


class _Anything:
    def __reduce__(self) -> Any:
        return exec, ("raise SystemExit('it ran')",)


def _reindexed(folder: Path, name: str) -> None:
    index = folder / "model.safetensors.index.json"
    body = json.loads(index.read_text())
    body["weight_map"] = dict.fromkeys(body["weight_map"], name)
    index.write_text(json.dumps(body))


def _without_model(folder: Path) -> None:
    for path in folder.glob("model*"):
        path.unlink()


def _claims_to_be_huge(path: Path) -> None:
    """The zip's directory gives its first record far more bytes than the file has."""
    raw = bytearray(path.read_bytes())
    entry = raw.index(b"PK\1\2")
    raw[entry + 16 : entry + 28] = bytes(4) + (0xFFFFFF0).to_bytes(4, "little") * 2  # Without a checksum.
    path.write_bytes(raw)


def _header(path: Path, header: dict[str, Any]) -> None:
    raw = json.dumps(header).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(4))


def _one(name: str, *shape: int) -> dict[str, Any]:
    return {name: {"dtype": "U8", "shape": shape, "data_offsets": [0, 0 if 0 in shape else 4]}}


BAD: dict[str, tuple[Callable[[Path], Path], Callable[[Path], object], type[Exception]]] = {
    "pt cut short": (_pt, cut, Damaged),
    "pt with a flipped bit": (_pt, flipped, Damaged),
    "pt of nothing": (_pt, lambda path: path.write_bytes(b""), LoadFailed),
    "pt of anything": (_pt, lambda path: path.write_bytes(b"hello" * 99), LoadFailed),
    "pt with code": (_pt, lambda path: torch.save({"w": _Anything()}, path), LoadFailed),
    "pt of a list": (_pt, lambda path: torch.save([1, 2], path), InvalidImport),
    "pt without a model": (_pt, lambda path: torch.save({"a": 1, "b": {"c": 2}}, path), InvalidImport),
    "safetensors cut short": (_safetensors, cut, Damaged),
    "safetensors with a damaged header": (_safetensors, lambda path: flipped(path, 0.02), Damaged),
    "safetensors of nothing": (_safetensors, lambda path: path.write_bytes(b""), Damaged),
    "a name that is not text": (_safetensors, lambda path: _header(path, _one("\ud800", 4)), InvalidImport),
    "a shape that cannot be": (_safetensors, lambda path: _header(path, _one("w", 0, 2**61, 2**61)), Damaged),
    "a pickle that claims to be huge": (_pt, _claims_to_be_huge, Damaged),
    "an index that names no file": (_hf, lambda path: _reindexed(path, "model-9.safetensors"), Damaged),
    "an index that leaves the folder": (_hf, lambda path: _reindexed(path, "../m.safetensors"), Damaged),
    "an index that is absolute": (_hf, lambda path: _reindexed(path, "/etc/hostname"), Damaged),
    "an index that is wrong": (_hf, lambda path: _reindexed(path, "model-00001-of-00002.safetensors"), Damaged),
    "an index of something else": (
        _hf, lambda path: (path / "model.safetensors.index.json").write_text("[1]"), Damaged,
    ),
    "a shard cut short": (_hf, lambda path: cut(path / "model-00002-of-00002.safetensors"), Damaged),
    "a folder of nothing": (_hf, _without_model, InvalidImport),
    "dcp metadata with code": (
        _dcp, lambda path: (path / ".metadata").write_bytes(pickle.dumps(_Anything())), Damaged,
    ),
    "dcp metadata of something else": (
        _dcp, lambda path: (path / ".metadata").write_bytes(pickle.dumps({"a": 1})), Damaged,
    ),
    "dcp metadata cut short": (_dcp, lambda path: cut(path / ".metadata"), Damaged),
    "dcp data cut short": (_dcp, lambda path: cut(path / "__0_0.distcp", 0.3), Damaged),
    "dcp data with a flipped bit": (_dcp, lambda path: flipped(path / "__0_0.distcp"), Damaged),
    "dcp data missing": (_dcp, lambda path: (path / "__0_0.distcp").unlink(), Damaged),
    "nothing there": (_pt, lambda path: path.unlink(), InvalidImport),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_what_is_damaged_or_foreign_gives_a_sentence_and_leaves_nothing(tmp_path: Path, name: str) -> None:
    make, spoil, kind = BAD[name]
    path = make(tmp_path)
    spoil(path)
    run = tmp_path / "run"
    with pytest.raises(kind) as caught:
        adopt(str(path), str(run))
    assert len(str(caught.value)) > 20
    result = CliRunner().invoke(app, ["import", str(path), str(run)])
    assert result.exit_code in (1, 2)
    assert isinstance(result.exception, SystemExit)
    assert "Traceback" not in result.output
    assert not [each for each in run.rglob("*") if each.is_file()]


def test_a_source_that_turns_out_damaged_half_way_leaves_nothing(
    folder: Path, memory: Memory, tmp_path: Path
) -> None:
    with CheckpointManager(folder, memory=memory) as manager:
        state = {"model": {f"w{n}": torch.randn(1 << 20) for n in range(12)}, "step": 1}
        manager.save(state, step=1).result(60)
    flipped(next(folder.glob("*.pt")), 0.9)
    with pytest.raises(Damaged, match="bytes changed"):
        adopt(str(folder), str(tmp_path / "run"))
    assert not [each for each in (tmp_path / "run").rglob("*") if each.is_file()]


def test_verification_names_the_damaged_tensor_and_part_of_an_imported_checkpoint(tmp_path: Path) -> None:
    torch.save({f"layer{n}": torch.randn(5 << 20) for n in range(3)}, tmp_path / "m.pt")
    adopt(str(tmp_path / "m.pt"), str(tmp_path / "run"))
    (part,) = (tmp_path / "run" / "parts").glob("*.part")
    flipped(part, 0.99)
    result = CliRunner().invoke(app, ["verify", str(tmp_path / "run")], env={"COLUMNS": "1000"})
    assert result.exit_code == 1
    assert part.name in result.output
    assert "model_state_dict.layer2" in result.output
    assert "layer0" not in result.output


class _ByName:
    """Pickled as Python before 3.11.4 pickles a member of an enumeration."""

    def __init__(self, owner: Any, name: Any) -> None:
        self._asked = owner, name

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, self._asked


def test_members_of_enumerations_are_known_by_name_and_nothing_else_is() -> None:
    first = next(iter(MemoryFormat))
    assert read_metadata(pickle.dumps(_ByName(MemoryFormat, first.name))) is first
    for owner, name in (
        (MemoryFormat, "__class__"),
        (MemoryFormat, []),
        (torch.Size, "count"),
        (torch.Size, "__init__"),
    ):
        with pytest.raises(pickle.UnpicklingError, match="not part of such a file"):
            read_metadata(pickle.dumps(_ByName(owner, name)))


def read_metadata(raw: bytes) -> Any:
    return reading._Metadata(io.BytesIO(raw)).load()
