"""A bucket with data, and what the ledger's blocks find in a training script."""

import io
import os
import tarfile
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from PIL import Image
from torch.utils.data import TensorDataset

import strata  # noqa: F401
from strata import CheckpointManager, TrainingOrchestrator
from strata.data import DataLedger, DatasetRegistry  # noqa: F401
from strata.stores import open_store


def decode(row: dict[str, Any]) -> torch.Tensor:
    return torch.tensor([row["x"]])


def criterion(output: torch.Tensor) -> torch.Tensor:
    return output.mean()


def fill(bucket: Any) -> None:
    for part in range(2):
        table = pa.table({"x": [float(n) for n in range(part * 300, part * 300 + 300)]})
        out = io.BytesIO()
        pq.write_table(table, out)
        bucket.put(f"train/{part}.parquet", out.getvalue())
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w") as archive:
            for number in range(40):
                entry = tarfile.TarInfo(f"{part}-{number:04}.txt")
                entry.size = 2
                archive.addfile(entry, io.BytesIO(b"ok"))
        bucket.put(f"train/{part}.tar", out.getvalue())
    image = io.BytesIO()
    Image.new("RGB", (8, 8)).save(image, "PNG")
    bucket.put("pictures/one.png", image.getvalue())
    bucket.put("pictures/a.jsonl", b'{"image": "one.png", "audio": "one.wav"}\n')


rank, world_size, step = 0, 1, 1
checkpoint_id = "0" * 32
texts = ["word " * n for n in range(1, 90)]
train_set, valid_set = TensorDataset(torch.rand(300, 1)), TensorDataset(torch.rand(70, 1))
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
state = {"model": model.state_dict()}
if "PAGE_IS_SET_UP" not in os.environ:  # Loader processes, which inherit it, need the functions only.
    os.environ["PAGE_IS_SET_UP"] = "1"
    fill(open_store("s3://bucket"))
    manager = CheckpointManager("s3://bucket/run-7")
    orchestrator = TrainingOrchestrator(f"http://{os.environ['TEST_COORDINATOR']}")
    orchestrator.register_worker("worker-01")
