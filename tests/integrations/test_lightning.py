"""The real PyTorch Lightning, saving and resuming through Strata."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("pytorch_lightning")

import pytorch_lightning as lightning
from pytorch_lightning.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

from strata.checkpoint.manager import CheckpointManager
from strata.errors import StrataError
from strata.integrations.lightning import StrataCheckpointIO

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
        callbacks=[ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)],
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
        assert [info.step for info in found] == [8, 4]
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
