"""One rank of a training for one epoch, which ends without a word after some step: `python -m benchmarks.trainer_peers NAME WHO FOLDER
START CRASH_AT`. `WHO` is `strata`, or `own` for what the framework's documentation says about resuming. Each optimizer step leaves a
line in FOLDER/seen: the step, and the samples that this rank gave to the model.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader, Dataset

warnings.filterwarnings("ignore")

SAMPLES, BATCH, SAVE_EVERY = 960, 4, 10
RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


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


class Recorder:
    def __init__(self, model: Line, folder: Path, start: int, crash_at: int) -> None:
        self._model, self._crash_at = model, crash_at
        (folder / "seen").mkdir(parents=True, exist_ok=True)
        self._file = (folder / "seen" / f"{start}-{RANK}").open("a", buffering=1)
        self.step: Callable[[], int] = lambda: 0
        """Steps made before this one."""
        register_optimizer_step_post_hook(self._stepped)

    def _stepped(self, *_: object) -> None:
        self._file.write(f"{self.step() + 1} {' '.join(map(str, self._model.seen))}\n")
        self._model.seen.clear()

    def crash_if_due(self, steps_made: int) -> None:
        if steps_made == self._crash_at:
            os._exit(9)


def huggingface(who: str, folder: Path, model: Line, recorder: Recorder) -> None:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Crash(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            recorder.crash_if_due(state.global_step)

    arguments = TrainingArguments(
        str(folder / "output"),
        num_train_epochs=1,
        per_device_train_batch_size=BATCH,
        save_strategy="steps" if who == "own" else "no",
        save_steps=SAVE_EVERY,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Trainer(model, arguments, train_dataset=Numbers(), callbacks=[Crash()])
    recorder.step = lambda: int(trainer.state.global_step)
    if who == "own":
        trainer.train(resume_from_checkpoint=any((folder / "output").glob("checkpoint-*")))
        return
    from strata.integrations.huggingface import StrataCallback
    from strata.training import ElasticOptions

    options = ElasticOptions(save_every=SAVE_EVERY, snapshot_every=0)
    StrataCallback(str(folder / "strata"), options=options).attach(trainer).train()


def lightning(who: str, folder: Path, model: Line, recorder: Recorder) -> None:
    import pytorch_lightning
    from pytorch_lightning.callbacks import Callback, ModelCheckpoint

    class Module(pytorch_lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.line = model

        def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
            loss: torch.Tensor = self.line(**batch)["loss"]
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=0.01)

        def on_train_batch_start(self, batch: Any, index: int) -> None:
            recorder.crash_if_due(self.trainer.global_step)

    callbacks: list[Callback] = []
    loader: Any
    if who == "own":
        callbacks = [ModelCheckpoint(folder / "output", every_n_train_steps=SAVE_EVERY, save_last=True)]
        loader = DataLoader(Numbers(), batch_size=BATCH, shuffle=True)
    else:
        from strata.integrations.lightning import StrataCallback, TrainerLoader
        from strata.training import ElasticOptions

        options = ElasticOptions(save_every=SAVE_EVERY, snapshot_every=0)
        callbacks = [StrataCallback(str(folder / "strata"), options=options)]
        loader = TrainerLoader(Numbers(), batch_size=BATCH)
    trainer = pytorch_lightning.Trainer(
        max_epochs=1,
        accelerator="cpu",
        devices=WORLD,
        strategy="ddp" if WORLD > 1 else "auto",
        callbacks=callbacks,
        enable_checkpointing=who == "own",
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
    )
    recorder.step = lambda: trainer.global_step
    trainer.fit(Module(), loader, ckpt_path="last" if who == "own" else None, weights_only=False)


def accelerate(who: str, folder: Path, model: Line, recorder: Recorder) -> None:
    from accelerate import Accelerator, skip_first_batches

    accelerator = Accelerator(cpu=True)
    wrapped, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))

    def train_on(batch: Any, weight: float = 1.0) -> None:
        accelerator.backward(wrapped(**batch)["loss"] * weight)
        optimizer.step()
        optimizer.zero_grad()

    if who == "strata":
        import strata
        from strata.training import ElasticOptions

        sampler = strata.ElasticSampler(SAMPLES, batch_size=BATCH)
        with strata.elastic(
            model=wrapped,
            optimizer=optimizer,
            data=strata.ElasticLoader(Numbers(), sampler),
            checkpoints=str(folder / "strata"),
            epochs=1,
            options=ElasticOptions(save_every=SAVE_EVERY, snapshot_every=0),
        ) as job:
            recorder.step = lambda: job.step
            for batch in job:
                recorder.crash_if_due(job.step)
                train_on(batch.data, batch.weight)
        return
    loader = accelerator.prepare(DataLoader(Numbers(), batch_size=BATCH, shuffle=True))
    made = 0
    recorder.step = lambda: made
    saved = sorted(folder.glob("state-*"))
    if saved:
        accelerator.load_state(str(saved[-1]))
        made = int(saved[-1].name.partition("-")[2])
        loader = skip_first_batches(loader, made)
    for batch in loader:
        recorder.crash_if_due(made)
        train_on(batch)
        made += 1
        if made % SAVE_EVERY == 0:
            accelerator.save_state(str(folder / f"state-{made:04d}"))


def main() -> None:
    name, who, folder, start, crash_at = sys.argv[1:]
    torch.manual_seed(0)
    model = Line()
    recorder = Recorder(model, Path(folder), int(start), int(crash_at))
    {"huggingface": huggingface, "lightning": lightning, "accelerate": accelerate}[name](
        who, Path(folder), model, recorder
    )


if __name__ == "__main__":
    main()
