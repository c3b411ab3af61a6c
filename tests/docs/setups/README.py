"""What the README's blocks find in a training script, in a folder of its own: the page's commands train in the same one."""

import os

import torch

import strata  # noqa: F401

inputs = torch.randn(640, 32)
dataset = torch.utils.data.TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))
model = torch.nn.Linear(32, 1)
optimizer = torch.optim.AdamW(model.parameters())
criterion = torch.nn.functional.mse_loss
os.mkdir("loop")
os.chdir("loop")
