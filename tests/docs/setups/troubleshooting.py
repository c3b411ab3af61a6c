"""A harness's configuration and checkpoints, and the names that the page's blocks use."""

import json
import os
import shutil
from pathlib import Path

import torch

root = Path(os.environ["TEST_ROOT"])
shutil.copy(root / "examples/configs/small.yaml", "config.yaml")
Path("train.py").write_text(
    """
import argparse

parser = argparse.ArgumentParser()
parser.add_argument("--config")
parser.parse_args()
"""
)
Path("data").mkdir()
Path("data/train.jsonl").write_text(json.dumps({"text": "once upon a time"}) + "\n")

from elastic_harness.checkpoint import (  # noqa: E402
    CheckpointConfig,
    CheckpointManager,
    CheckpointTier,
    MemorySnapshotBackend,
    create_checkpoint_state,
    load_checkpoint_to_model,
)
from elastic_harness.checkpoint.storage_backends import NVMeBackend  # noqa: E402

__all__ = [
    "CheckpointTier",
    "MemorySnapshotBackend",
    "backend",
    "load_checkpoint_to_model",
    "manager",
    "model",
    "optimizer",
]

model = torch.nn.Linear(4, 2)
optimizer = torch.optim.AdamW(model.parameters())
manager = CheckpointManager(CheckpointConfig(nvme_path="/nvme/checkpoints"))
for step in (9_000, 10_000):
    manager.save_checkpoint(
        create_checkpoint_state(model=model, optimizer=optimizer, step=step), CheckpointTier.NVME
    )
manager.wait_for_pending_saves(60)
backend = NVMeBackend(".")
torch.save(torch.load("/nvme/checkpoints/checkpoint_step_00010000.pt", weights_only=True), "checkpoint.pt")
