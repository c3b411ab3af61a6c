"""The Hugging Face Trainer, in a run that outlives its machines. The statements marked with `# +` are what Strata adds.

    strata torchrun --nproc-per-node=2 examples/hf_trainer.py        # or: strata run --workers 2 …, or: python …

Kill a worker while it runs, or all of them and start with another number: training continues at the exact next sample.
"""

import argparse

import torch
from torch import nn
from transformers import Trainer, TrainingArguments

import strata  # +
from strata.integrations.huggingface import StrataCallback  # +

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--checkpoints", default="runs/hf")
arguments = parser.parse_args()


class Sums(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": nn.functional.mse_loss(self.net(x), labels)}


torch.manual_seed(0)
inputs = torch.randn(10_000, 32)
dataset = [{"x": x, "labels": x.sum().reshape(1)} for x in inputs]
trainer = Trainer(
    Sums(),
    TrainingArguments(
        "runs/hf-output",
        num_train_epochs=arguments.epochs,
        per_device_train_batch_size=16,
        gradient_accumulation_steps=2,
        dataloader_num_workers=2,
        learning_rate=1e-3,
        logging_steps=50,
        save_strategy="no",  # The Trainer's own checkpoints are not needed.
        report_to=[],
        use_cpu=True,
    ),
    train_dataset=dataset,
)
StrataCallback(  # +
    arguments.checkpoints,  # + resumed from, saved to in the background, and at SIGTERM
    global_batch_size=64,  # + the same with one, two or four workers
    sinks=[strata.sinks.TensorBoard("runs/hf-metrics")],  # + beside the coordinator, where there is one
).attach(trainer)  # +
trainer.train()
if trainer.is_world_process_zero():
    print(strata.audit(arguments.checkpoints, "data", epoch=0).reason)  # +
