"""What scripts with Lightning's Trainer and with Fabric have before the page's blocks."""

import torch
from lightning_fabric import Fabric
from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.callbacks import ModelCheckpoint

import strata

__all__ = [
    "ModelCheckpoint",
    "Trainer",
    "criterion",
    "dataset",
    "fabric",
    "model",
    "module",
    "optimizer",
    "strata",
]


class Sums(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(8, 1)

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return torch.nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


inputs = torch.randn(320, 8)
dataset = torch.utils.data.TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))
module = Sums()
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.AdamW(model.parameters())
criterion = torch.nn.functional.mse_loss
fabric = Fabric(accelerator="cpu", devices=1)
fabric.launch()
