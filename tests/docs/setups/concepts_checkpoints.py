"""A state to save, and checkpoints to look at."""

import torch

from strata import CheckpointManager

model, step = torch.nn.Linear(8, 2), 100
state = {"model": model.state_dict()}
with CheckpointManager("runs/sums", keep_count=5) as earlier:
    for each in (300, 400, 500):
        earlier.save({"model": model.state_dict()}, step=each).result(timeout=60)
