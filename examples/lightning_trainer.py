"""PyTorch Lightning, in a run that outlives its machines. The statements marked with `# +` are what Strata adds.

    strata torchrun --nproc-per-node=2 examples/lightning_trainer.py        # or: strata run --workers 2 …, or: python …

Kill a worker while it runs, or all of them and start with another number: training continues at the exact next sample.
"""

import argparse
import os

import pytorch_lightning as lightning
import torch
from torch import nn
from torch.utils.data import TensorDataset

import strata  # +
from strata.integrations.lightning import StrataCallback, TrainerLoader  # +

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--checkpoints", default="runs/lightning")
arguments = parser.parse_args()


class Sums(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1))

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


torch.manual_seed(0)
inputs = torch.randn(10_000, 32)
dataset = TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))
loader = TrainerLoader(dataset, batch_size=16, global_batch_size=64, num_workers=2)  # +
trainer = lightning.Trainer(
    max_epochs=arguments.epochs,
    accelerator="cpu",
    devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
    strategy="ddp" if "LOCAL_WORLD_SIZE" in os.environ else "auto",
    enable_checkpointing=False,  # Lightning's own checkpoints are not needed.
    callbacks=[
        StrataCallback(  # +
            arguments.checkpoints,  # + resumed from, saved to in the background, and at SIGTERM
            sinks=[
                strata.sinks.TensorBoard("runs/lightning-metrics")
            ],  # + beside the coordinator, where there is one
        )
    ],
)
trainer.fit(Sums(), loader)
if trainer.is_global_zero:
    print(strata.audit(arguments.checkpoints, "data", epoch=0).reason)  # +
