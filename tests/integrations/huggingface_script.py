"""One rank of a sharded training with the real Trainer: `python -m tests.integrations.huggingface_script FOLDER VERSION STEPS`.

Accelerate shards on GPUs alone, so the model is sharded here as it would do it (`VERSION` of FSDP), and Accelerate leaves it as it
is. The rank says at which step it began and what was saved, with which parameters; or why it was refused.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch.distributed import checkpoint as dcp
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from transformers import Trainer, TrainingArguments

from strata.checkpoint.dcp import StrataStorageReader, steps
from strata.errors import StrataError
from strata.integrations.huggingface import StrataCallback
from strata.training.job import ElasticOptions
from tests.integrations.test_huggingface import Line, samples
from tests.support_ranks import join, say


def prepare(*items: Any) -> Any:
    """What Accelerate does beside sharding."""
    made = [AcceleratedOptimizer(i) if isinstance(i, torch.optim.Optimizer) else i for i in items]
    return made[0] if len(made) == 1 else tuple(made)


def train(folder: Path, version: int, last: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model: Any = Line()
    if version == 2:
        fully_shard(model)
    else:
        model = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    arguments = TrainingArguments(
        output_dir=str(folder / "out"),
        max_steps=last,
        per_device_train_batch_size=4,
        max_grad_norm=0.0,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Trainer(model, arguments, train_dataset=samples())
    trainer.accelerator.prepare = prepare
    place = str(folder / "strata")
    callback = StrataCallback(place, options=ElasticOptions(save_every=2, snapshot_every=0, keep_count=2))
    callback.attach(trainer).train()
    saved: dict[str, Any] = {"model_state_dict": {"layer.weight": torch.zeros(1, 4)}}
    dcp.load(saved, storage_reader=StrataStorageReader(place))
    weight: Any = model.get_parameter("layer.weight")
    return {
        "began": trainer._initial_global_step,
        "steps": [info.step for info in steps(place)],
        "weight": weight.full_tensor().tolist(),
        "saved": saved["model_state_dict"]["layer.weight"].tolist(),
    }


def main() -> None:
    folder = Path(sys.argv[1])
    join(folder)
    try:
        found = train(folder, int(sys.argv[2]), int(sys.argv[3]))
    except StrataError as error:
        found = {"refused": str(error)}
    say(folder, found)


if __name__ == "__main__":
    main()
