"""What a script with Accelerate has before the page's block."""

import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device

import strata

__all__ = [
    "accelerator",
    "criterion",
    "dataset",
    "model",
    "optimizer",
    "scheduler",
    "send_to_device",
    "strata",
]

accelerator = Accelerator(cpu=True)
inputs = torch.randn(640, 32)
dataset = torch.utils.data.TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))
model = torch.nn.Linear(32, 1)
optimizer = torch.optim.AdamW(model.parameters())
scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
criterion = torch.nn.functional.mse_loss
