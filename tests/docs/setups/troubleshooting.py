"""A harness's configuration and checkpoints, and the names that the page's blocks use."""

import json
import os
import shutil
from pathlib import Path

import torch

root = Path(os.environ["TEST_ROOT"])
shutil.copy(root / "examples/configs/small.yaml", "config.yaml")
Path("data").mkdir()
Path("data/train.jsonl").write_text(json.dumps({"text": "once upon a time"}) + "\n")
