"""One rank of a sharded training with `StrataCallback`: `python -m tests.integrations.huggingface_script FOLDER VERSION`.

Accelerate shards on GPUs alone, so the model is sharded here as it would do it (`VERSION` of FSDP), and the callback gets what
the Trainer would hand to it. The rank says which steps were saved and with which parameters, or why it was refused.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch.distributed import checkpoint as dcp
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from transformers import TrainerControl, TrainerState, TrainingArguments

from strata.checkpoint.dcp import StrataStorageReader, steps
from strata.errors import StrataError
from strata.integrations.huggingface import StrataCallback
from tests.integrations.test_huggingface import Line
from tests.support_ranks import join, say


def train(folder: Path, version: int, rank: int) -> dict[str, Any]:
    torch.manual_seed(0)
    arguments = TrainingArguments(output_dir=str(folder / "out"), report_to=[], use_cpu=True)
    Accelerator(cpu=True)  # Its optimizers need its state.
    model: Any = Line()
    if version == 2:
        fully_shard(model)
    else:
        model = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    optimizer = AcceleratedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.1))
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer.optimizer)
    parts = {"model": model, "optimizer": optimizer, "lr_scheduler": scheduler}
    state, control = TrainerState(is_world_process_zero=rank == 0), TrainerControl()
    callback = StrataCallback(str(folder / "strata"), keep_count=2)
    callback.on_train_begin(arguments, state, control, **parts)
    for state.global_step in range(1, 4):
        x = torch.randn(8, 4)
        model(x, x.sum(dim=1, keepdim=True))["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
        callback.on_step_end(arguments, state, control, **parts)
        callback.on_save(arguments, state, control, **parts)
    callback.on_train_end(arguments, state, control, **parts)
    place = str(folder / "strata")
    saved: dict[str, Any] = {"model_state_dict": {"layer.weight": torch.zeros(1, 4)}}
    dcp.load(saved, storage_reader=StrataStorageReader(place))
    weight: Any = model.get_parameter("layer.weight")
    return {
        "steps": [info.step for info in steps(place)],
        "weight": weight.full_tensor().tolist(),
        "saved": saved["model_state_dict"]["layer.weight"].tolist(),
    }


def main() -> None:
    folder = Path(sys.argv[1])
    rank, _ = join(folder)
    try:
        found = train(folder, int(sys.argv[2]), rank)
    except StrataError as error:
        found = {"refused": str(error)}
    say(folder, found)


if __name__ == "__main__":
    main()
