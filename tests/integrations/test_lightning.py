"""The real PyTorch Lightning, saving and resuming through Strata."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("pytorch_lightning")

import pytorch_lightning as lightning
from lightning_fabric.plugins import CheckpointIO, TorchCheckpointIO
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.plugins.io import AsyncCheckpointIO
from pytorch_lightning.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy, Strategy
from torch.utils.data import DataLoader, TensorDataset

from strata.checkpoint.manager import CheckpointManager
from strata.errors import StrataError
from strata.integrations.lightning import StrataCheckpointIO
from strata.training.sharding import UnsupportedSharding

pytestmark = pytest.mark.filterwarnings("ignore")


class Line(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        x, y = batch
        return torch.nn.functional.mse_loss(self.layer(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def _fit(folder: Path, *, epochs: int, resume: Path | None = None) -> Line:
    torch.manual_seed(0)
    x = torch.randn(64, 4)
    data = DataLoader(TensorDataset(x, x.sum(dim=1, keepdim=True)), batch_size=16)
    model = Line()
    trainer = lightning.Trainer(
        max_epochs=epochs,
        plugins=[StrataCheckpointIO()],
        callbacks=[ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1, save_last=True)],
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, data, ckpt_path=resume)
    return model


def test_lightning_saves_checkpoints_that_verify_and_load(tmp_path: Path) -> None:
    model = _fit(tmp_path, epochs=2)
    with CheckpointManager(tmp_path) as manager:
        found = manager.all_checkpoints()
        assert [(info.step, Path(info.path).name.split("-")[0].removesuffix(".pt")) for info in found] == [
            (8, "last.ckpt"),
            (8, "epoch=1.ckpt"),
            (4, "epoch=0.ckpt"),
        ]
        state = manager.load()
    assert torch.equal(state["state_dict"]["layer.weight"], model.layer.weight)


def test_lightning_resumes_to_the_same_model_as_an_undisturbed_run(tmp_path: Path) -> None:
    whole = _fit(tmp_path / "whole", epochs=4)
    _fit(tmp_path / "part", epochs=2)
    resumed = _fit(tmp_path / "part", epochs=4, resume=tmp_path / "part" / "epoch=1.ckpt")
    assert torch.equal(whole.layer.weight, resumed.layer.weight)


def test_a_missing_checkpoint_is_an_error_that_says_where_to_look(tmp_path: Path) -> None:
    with pytest.raises(StrataError, match=r"There is no checkpoint 'gone\.ckpt'"):
        StrataCheckpointIO().load_checkpoint(tmp_path / "gone.ckpt")


def _state(step: int, value: float) -> dict[str, Any]:
    return {"global_step": step, "epoch": 0, "weight": torch.full((1 << 16,), value)}


def _value(io: StrataCheckpointIO, path: Path) -> float:
    weight = io.load_checkpoint(path)["weight"]
    assert (weight == weight[0]).all()
    return float(weight[0])


def test_saves_in_a_row_keep_their_names_and_their_contents(tmp_path: Path) -> None:
    names = [f"{name}.ckpt" for name in ("a", "b", "c", "d", "e")]
    io = StrataCheckpointIO()
    for number, name in enumerate(names):
        io.save_checkpoint(_state(7, number), tmp_path / name)
    assert [_value(io, tmp_path / name) for name in names] == [0, 1, 2, 3, 4]
    io.teardown()
    anew = StrataCheckpointIO()
    assert [_value(anew, tmp_path / name) for name in names] == [0, 1, 2, 3, 4]
    anew.teardown()
    assert sorted(path.name for path in tmp_path.glob("*.pt")) == [f"{name}.pt" for name in names]


def test_a_name_that_is_used_again_is_the_newest_save_alone(tmp_path: Path) -> None:
    io = StrataCheckpointIO()
    for step in (3, 4, 2):  # A training that began again counts from the start.
        io.save_checkpoint(_state(step, step), tmp_path / "last.ckpt")
    assert _value(io, tmp_path / "last.ckpt") == 2
    io.teardown()
    anew = StrataCheckpointIO()
    assert _value(anew, tmp_path / "last.ckpt") == 2
    anew.teardown()
    assert len(list(tmp_path.glob("*.pt"))) == len(list(tmp_path.glob("*.manifest.json"))) == 1


def test_a_process_that_ends_while_it_saves_leaves_the_checkpoint_it_was_replacing(tmp_path: Path) -> None:
    script = """
import os, sys
from pathlib import Path
from tests.integrations.test_lightning import StrataCheckpointIO, _state
path, io = Path(sys.argv[1]) / "last.ckpt", StrataCheckpointIO()
io.save_checkpoint(_state(1, 1), path)
io.load_checkpoint(path)  # It is durable.
io.save_checkpoint(_state(2, 2), path)
os._exit(9)
"""
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], cwd=Path(__file__).parents[2])
    assert done.returncode == 9
    with CheckpointManager(tmp_path) as manager:
        manager.drop_snapshots()  # As after the loss of the machine.
    io = StrataCheckpointIO()
    assert _value(io, tmp_path / "last.ckpt") in (1, 2)
    io.save_checkpoint(_state(3, 3), tmp_path / "last.ckpt")
    assert _value(io, tmp_path / "last.ckpt") == 3
    io.teardown()


def test_what_was_removed_is_not_found_again_and_nothing_else_goes_with_it(tmp_path: Path) -> None:
    io = StrataCheckpointIO()
    for number, name in enumerate(("a.ckpt", "b.ckpt")):
        io.save_checkpoint(_state(1, number), tmp_path / name)
    io.remove_checkpoint(tmp_path / "a.ckpt")
    io.remove_checkpoint(tmp_path / "never.ckpt")
    with pytest.raises(StrataError, match=r"There is no checkpoint 'a\.ckpt'"):
        io.load_checkpoint(tmp_path / "a.ckpt")
    assert _value(io, tmp_path / "b.ckpt") == 1
    io.teardown()


@pytest.mark.parametrize("wrap", [lambda io: io, AsyncCheckpointIO], ids=["plain", "wrapped"])
def test_a_trainer_is_not_made_with_a_strategy_that_would_not_use_the_plugin(
    wrap: Callable[[StrataCheckpointIO], CheckpointIO],
) -> None:
    with pytest.raises(UnsupportedSharding, match=r"ModelParallelStrategy: .* Train .* with strata\.elastic"):
        lightning.Trainer(
            strategy=ModelParallelStrategy(),
            accelerator="cpu",
            devices=2,
            plugins=[wrap(StrataCheckpointIO())],
            logger=False,
        )


@pytest.mark.parametrize("strategy", [FSDPStrategy, DeepSpeedStrategy])
def test_fsdp1_and_deepspeed_refuse_the_plugin_and_name_fsdp2(strategy: type[Strategy]) -> None:
    bare = strategy.__new__(
        strategy
    )  # A Trainer makes them on GPUs alone, and hands the plugin over like this.
    with pytest.raises(UnsupportedSharding, match=f"{strategy.__name__}: .* Use FSDP2 instead"):
        bare.checkpoint_io = StrataCheckpointIO()
    bare.checkpoint_io = other = TorchCheckpointIO()
    assert bare.checkpoint_io is other
