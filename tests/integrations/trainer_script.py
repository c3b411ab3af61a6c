"""One rank of a training with somebody else's trainer: `python -m tests.integrations.trainer_script FRAMEWORK FOLDER EPOCHS`.

Every optimizer step leaves a line in FOLDER/seen: epoch, step and the samples that this rank has trained in it, in a file for each
start of the run and each rank. That is a record beside the ledger's, of what the model has really been given.

While there is FOLDER/held, the steps after the first epoch are slow: what a test waits for comes before the end.
"""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import Dataset

import strata
from strata.training.job import ElasticJob, ElasticOptions

warnings.filterwarnings("ignore")

SAMPLES, BATCH, ACCUMULATE = 1003, 4, 2
OPTIONS = ElasticOptions(save_every=20, snapshot_every=5)
STEP_S = 0.01
"""What a step takes at least: kills are meant to come between the first and the last."""
HELD_STEP_S = 0.1
LOCAL_WORLD = os.environ.get("LOCAL_WORLD_SIZE")


class Numbers(Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        x = torch.randn(4, generator=torch.Generator().manual_seed(number))
        return {"x": x, "labels": x.sum().reshape(1), "number": torch.tensor(number)}


class Line(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.seen: list[int] = []

    def forward(self, x: torch.Tensor, labels: torch.Tensor, number: torch.Tensor) -> dict[str, torch.Tensor]:
        self.seen += number.tolist()
        return {"loss": nn.functional.mse_loss(self.layer(x), labels)}


def record(folder: Path, model: Line, job: Callable[[], ElasticJob | None]) -> None:
    """Write down what each step of any optimizer has learned from."""
    rank = os.environ.get("RANK", "0")
    (folder / "seen").mkdir(parents=True, exist_ok=True)

    def stepped(*_: object) -> None:
        found = job()
        if found is None:
            return
        own = folder / "seen" / f"{found.generation}-{rank}"
        numbers = " ".join(map(str, model.seen))
        with own.open("a") as file:
            file.write(f"{found._data.epoch} {found.step + 1} {numbers}\n")
        model.seen.clear()
        is_held = found._data.epoch > 0 and (folder / "held").exists()
        time.sleep(HELD_STEP_S if is_held else STEP_S)

    register_optimizer_step_post_hook(stepped)
    (folder / f"pid-{rank}").write_text(str(os.getpid()))


def huggingface(folder: Path, epochs: int, model: Line) -> None:
    from transformers import Trainer, TrainingArguments

    from strata.integrations.huggingface import StrataCallback

    arguments = TrainingArguments(
        str(folder / "output"),
        num_train_epochs=epochs,
        per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=ACCUMULATE,
        dataloader_num_workers=1,
        logging_steps=10,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    callback = StrataCallback(str(folder / "checkpoints"), options=OPTIONS)
    trainer = callback.attach(Trainer(model, arguments, train_dataset=Numbers()))
    record(folder, model, lambda: callback.job)
    trainer.train()


def lightning(folder: Path, epochs: int, model: Line) -> None:
    import pytorch_lightning

    from strata.integrations.lightning import StrataCallback, TrainerLoader

    class Module(pytorch_lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.line = model

        def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
            loss: torch.Tensor = self.line(**batch)["loss"]
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    callback = StrataCallback(str(folder / "checkpoints"), options=OPTIONS)
    trainer = pytorch_lightning.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        devices=int(LOCAL_WORLD or 1),
        strategy="ddp" if LOCAL_WORLD else "auto",
        accumulate_grad_batches=ACCUMULATE,
        callbacks=[callback],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
        log_every_n_steps=10,
    )
    record(folder, model, lambda: callback.job)
    trainer.fit(Module(), TrainerLoader(Numbers(), batch_size=BATCH, num_workers=1))


def fabric(folder: Path, epochs: int, model: Line) -> None:
    from lightning_fabric import Fabric

    own = Fabric(accelerator="cpu", devices=int(LOCAL_WORLD or 1), strategy="ddp" if LOCAL_WORLD else "auto")
    own.launch()
    wrapped, optimizer = own.setup(model, torch.optim.AdamW(model.parameters(), lr=0.01))

    _loop(
        folder,
        epochs,
        model,
        wrapped,
        optimizer,
        unsynced=lambda: own.no_backward_sync(wrapped, enabled=bool(LOCAL_WORLD)),
        backward=own.backward,
    )


def accelerate(folder: Path, epochs: int, model: Line) -> None:
    from accelerate import Accelerator

    own = Accelerator(cpu=True)
    wrapped, optimizer = own.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    _loop(
        folder,
        epochs,
        model,
        wrapped,
        optimizer,
        unsynced=lambda: own.no_sync(wrapped),
        backward=own.backward,
    )
    own.end_training()


def _loop(
    folder: Path,
    epochs: int,
    model: Line,
    wrapped: nn.Module,
    optimizer: Any,
    *,
    unsynced: Callable[[], Any],
    backward: Callable[[torch.Tensor], Any],
) -> None:
    """Of a user, with 16 samples in a step."""
    sampler = strata.ElasticSampler(SAMPLES, global_batch_size=16, micro_batch_size=BATCH)
    loader = strata.ElasticLoader(Numbers(), sampler, num_workers=1)
    with strata.elastic(
        model=wrapped,
        optimizer=optimizer,
        data=loader,
        checkpoints=str(folder / "checkpoints"),
        epochs=epochs,
        options=OPTIONS,
    ) as job:
        record(folder, model, lambda: job)
        for batch in job:
            with nullcontext() if batch.step.ends_step else unsynced():
                backward(wrapped(**batch.data)["loss"] * batch.weight)
            if not len(batch.step):
                del model.seen[-1]  # A rank that has nothing to do in a step reads a sample with weight 0.
            if batch.step.ends_step:
                optimizer.step()
                optimizer.zero_grad()


def main() -> None:
    name, folder, epochs = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    torch.manual_seed(0)
    {"huggingface": huggingface, "lightning": lightning, "fabric": fabric, "accelerate": accelerate}[name](
        folder, epochs, Line()
    )


if __name__ == "__main__":
    main()
