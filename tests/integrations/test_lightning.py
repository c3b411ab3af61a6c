"""The real PyTorch Lightning, saving and resuming through Strata."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("pytorch_lightning")

import pytorch_lightning as lightning
from lightning_fabric.plugins import CheckpointIO, TorchCheckpointIO
from pytorch_lightning.callbacks import GradientAccumulationScheduler, ModelCheckpoint
from pytorch_lightning.plugins.io import AsyncCheckpointIO
from pytorch_lightning.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy, Strategy
from torch.utils.data import DataLoader, Dataset, TensorDataset

from strata.checkpoint.manager import CheckpointManager
from strata.data.history import audit_epochs
from strata.errors import StrataError
from strata.integrations.lightning import (
    StrataCallback,
    StrataCheckpointIO,
    TrainerLoader,
    counted_in_batches,
)
from strata.integrations.loading import CannotPromise, batches_of
from strata.sinks import Sink, SinkRows, SinkRun
from strata.training.job import ElasticOptions
from strata.training.sharded.kinds import UnsupportedSharding

pytestmark = pytest.mark.filterwarnings("ignore")


class Line(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        x, y = batch
        return torch.nn.functional.mse_loss(self.layer(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def _fit(folder: Path, *, epochs: int, resume: Path | None = None) -> Line:
    torch.manual_seed(0)
    x = torch.randn(64, 4)
    data = DataLoader(TensorDataset(x, x.sum(dim=1, keepdim=True)), batch_size=16)
    model = Line()
    trainer = lightning.Trainer(
        max_epochs=epochs,
        plugins=[StrataCheckpointIO()],
        callbacks=[ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1, save_last=True)],
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, data, ckpt_path=resume)
    return model


def test_lightning_saves_checkpoints_that_verify_and_load(tmp_path: Path) -> None:
    model = _fit(tmp_path, epochs=2)
    with CheckpointManager(tmp_path) as manager:
        found = manager.all_checkpoints()
        assert [(info.step, info.metadata["name"]) for info in found] == [
            (8, "last.ckpt"),
            (8, "epoch=1.ckpt"),
            (4, "epoch=0.ckpt"),
        ]
        state = manager.load()
    assert torch.equal(state["state_dict"]["layer.weight"], model.layer.weight)
    for name in ("last", "epoch=1", "epoch=0"):  # What other programs of Lightning's open.
        torch.load(tmp_path / f"{name}.ckpt", weights_only=False)


def test_lightning_resumes_to_the_same_model_as_an_undisturbed_run(tmp_path: Path) -> None:
    whole = _fit(tmp_path / "whole", epochs=4)
    _fit(tmp_path / "part", epochs=2)
    resumed = _fit(tmp_path / "part", epochs=4, resume=tmp_path / "part" / "epoch=1.ckpt")
    assert torch.equal(whole.layer.weight, resumed.layer.weight)


def test_a_missing_checkpoint_is_an_error_that_says_where_to_look(tmp_path: Path) -> None:
    with pytest.raises(StrataError, match=r"There is no checkpoint 'gone\.ckpt'"):
        StrataCheckpointIO().load_checkpoint(tmp_path / "gone.ckpt")


def _state(step: int, value: float) -> dict[str, Any]:
    return {"global_step": step, "epoch": 0, "weight": torch.full((1 << 16,), value)}


def _value(io: StrataCheckpointIO, path: Path) -> float:
    weight = io.load_checkpoint(path)["weight"]
    assert (weight == weight[0]).all()
    return float(weight[0])


def test_saves_in_a_row_keep_their_names_and_their_contents(tmp_path: Path) -> None:
    names = [f"{name}.ckpt" for name in ("a", "b", "c", "d", "e")]
    io = StrataCheckpointIO()
    for number, name in enumerate(names):
        io.save_checkpoint(_state(7, number), tmp_path / name)
    assert [_value(io, tmp_path / name) for name in names] == [0, 1, 2, 3, 4]
    io.teardown()
    anew = StrataCheckpointIO()
    assert [_value(anew, tmp_path / name) for name in names] == [0, 1, 2, 3, 4]
    anew.teardown()
    assert sorted(path.name for path in tmp_path.glob("*.ckpt")) == names
    assert len(list(tmp_path.glob("*.pt"))) == len(list(tmp_path.glob("*.manifest.json"))) == len(names)


def test_more_saves_in_a_row_than_there_are_images_end(tmp_path: Path) -> None:
    io = StrataCheckpointIO()
    for step in range(12):
        io.save_checkpoint(_state(step, step), tmp_path / "last.ckpt")
    assert _value(io, tmp_path / "last.ckpt") == 11
    io.teardown()
    assert len(list(tmp_path.glob("*.pt"))) == 1


def test_a_name_that_is_used_again_is_the_newest_save_alone(tmp_path: Path) -> None:
    io = StrataCheckpointIO()
    for step in (3, 4, 2):  # A training that began again counts from the start.
        io.save_checkpoint(_state(step, step), tmp_path / "last.ckpt")
    assert _value(io, tmp_path / "last.ckpt") == 2
    io.teardown()
    anew = StrataCheckpointIO()
    assert _value(anew, tmp_path / "last.ckpt") == 2
    anew.teardown()
    assert len(list(tmp_path.glob("*.pt"))) == len(list(tmp_path.glob("*.manifest.json"))) == 1


def test_a_process_that_ends_while_it_saves_leaves_the_checkpoint_it_was_replacing(tmp_path: Path) -> None:
    script = """
import os, sys
from pathlib import Path
from tests.integrations.test_lightning import StrataCheckpointIO, _state
path, io = Path(sys.argv[1]) / "last.ckpt", StrataCheckpointIO()
io.save_checkpoint(_state(1, 1), path)
io.load_checkpoint(path)  # It is durable.
io.save_checkpoint(_state(2, 2), path)
os._exit(9)
"""
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], cwd=Path(__file__).parents[2])
    assert done.returncode == 9
    with CheckpointManager(tmp_path) as manager:
        manager.drop_snapshots()  # As after the loss of the machine.
    io = StrataCheckpointIO()
    assert _value(io, tmp_path / "last.ckpt") in (1, 2)
    io.save_checkpoint(_state(3, 3), tmp_path / "last.ckpt")
    assert _value(io, tmp_path / "last.ckpt") == 3
    io.teardown()


def test_what_was_removed_is_not_found_again_and_nothing_else_goes_with_it(tmp_path: Path) -> None:
    io = StrataCheckpointIO()
    for number, name in enumerate(("a.ckpt", "b.ckpt")):
        io.save_checkpoint(_state(1, number), tmp_path / name)
    io.remove_checkpoint(tmp_path / "a.ckpt")
    io.remove_checkpoint(tmp_path / "never.ckpt")
    with pytest.raises(StrataError, match=r"There is no checkpoint 'a\.ckpt'"):
        io.load_checkpoint(tmp_path / "a.ckpt")
    assert _value(io, tmp_path / "b.ckpt") == 1
    io.teardown()


class Numbered(Dataset[tuple[torch.Tensor, torch.Tensor, int]]):
    def __len__(self) -> int:
        return 203

    def __getitem__(self, number: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        x = torch.randn(4, generator=torch.Generator().manual_seed(number))
        return x, x.sum().reshape(1), number


class Crash(Exception):
    pass


class Recorded(Line):
    """Keeps what it is given in each step, and crashes after one."""

    def __init__(self, crash_at: int | None = None) -> None:
        super().__init__()
        self.crash_at = crash_at
        self.seen: list[list[int]] = []

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        x, y, numbers = batch
        self.seen.append(numbers.tolist())
        loss = torch.nn.functional.mse_loss(self.layer(x), y)
        self.log("loss", loss)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
        if self.trainer.global_step == self.crash_at:
            raise Crash


def _trainer(**options: Any) -> lightning.Trainer:
    return lightning.Trainer(
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=1,
        **{"max_epochs": 2, "accumulate_grad_batches": 2, **options},
    )


def _model(crash_at: int | None = None) -> Recorded:
    torch.manual_seed(0)
    return Recorded(crash_at)


def _fit_last(folder: Path, crash_at: int | None = None) -> Recorded:
    """With Lightning's own checkpoints, and the position in them."""
    model = _model(crash_at)
    saving = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=5, save_top_k=1, save_last=True)
    trainer = _trainer(plugins=[StrataCheckpointIO()], callbacks=[saving])
    with nullcontext() if crash_at is None else pytest.raises(Crash):
        trainer.fit(model, TrainerLoader(Numbered(), batch_size=4, num_workers=1), ckpt_path="last")
    trainer.strategy.checkpoint_io.teardown()
    return model


def test_the_last_checkpoint_is_found_and_resumed_at_the_exact_next_sample(tmp_path: Path) -> None:
    whole = _fit_last(tmp_path / "whole")
    first, second = _fit_last(tmp_path / "torn", 13), _fit_last(tmp_path / "torn", 34)
    third = _fit_last(tmp_path / "torn")
    assert first.seen[:20] + second.seen[:40] + third.seen == whole.seen  # They resumed at steps 10 and 30.
    assert torch.equal(third.layer.weight, whole.layer.weight)
    reports = audit_epochs(tmp_path / "torn", "data")
    assert [report.exact for report in reports] == [True, True], [report.reason for report in reports]
    names = {path.name for path in (tmp_path / "torn").glob("*.ckpt")}
    assert names == {"last.ckpt", "step=50.ckpt"}
    assert len(list((tmp_path / "torn").glob("*.pt"))) == 2


def test_an_earlier_checkpoint_by_its_path_goes_back_to_its_own_samples(tmp_path: Path) -> None:
    model = _model()
    saving = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=10, save_top_k=-1)
    trainer = _trainer(plugins=[StrataCheckpointIO()], callbacks=[saving])
    trainer.fit(model, TrainerLoader(Numbered(), batch_size=4))
    again = _model()
    trainer = _trainer(plugins=[StrataCheckpointIO()], callbacks=[saving])
    trainer.fit(again, TrainerLoader(Numbered(), batch_size=4), ckpt_path=tmp_path / "step=30.ckpt")
    trainer.strategy.checkpoint_io.teardown()
    assert again.seen == model.seen[60:]
    assert [report.exact for report in audit_epochs(tmp_path, "data")] == [True, True]


def test_progress_is_counted_in_the_batches_of_another_number_of_ranks() -> None:
    saved = {"total": 96, "position": 48, "epoch": 0, "batch_size": 4, "world_size": 2}
    current = {"ready": 6, "started": 6, "processed": 6, "completed": 5}
    loops = {"epoch_loop.batch_progress": {"current": current, "is_last_batch": False}}
    for world_size, done in ((1, 12), (2, 6), (3, 4)):
        whole, left = batches_of(saved, world_size=world_size)
        found = counted_in_batches(loops, whole=whole, left=left)["epoch_loop.batch_progress"]["current"]
        assert found == {"ready": done, "started": done, "processed": done, "completed": done - 1}
        assert whole - done == left
    ended = {"epoch_loop.batch_progress": {"current": current, "is_last_batch": True}}
    assert counted_in_batches(ended, whole=8, left=8)["epoch_loop.batch_progress"]["current"]["ready"] == 8


def _fit_elastic(folder: Path, crash_at: int | None = None, **options: Any) -> Recorded:
    model = _model(crash_at)
    callback = StrataCallback(folder, options=ElasticOptions(save_every=5, snapshot_every=0), **options)
    trainer = _trainer(callbacks=[callback], enable_checkpointing=False)
    with nullcontext() if crash_at is None else pytest.raises(Crash):
        trainer.fit(model, TrainerLoader(Numbered(), batch_size=4, num_workers=1))
    return model


def test_an_elastic_fit_that_crashes_twice_ends_with_the_model_of_one_that_never_did(tmp_path: Path) -> None:
    whole = _fit_elastic(tmp_path / "whole")
    _fit_elastic(tmp_path / "torn", 13)
    _fit_elastic(tmp_path / "torn", 25)  # The last step of the first epoch.
    third = _fit_elastic(tmp_path / "torn")
    assert third.trainer.current_epoch == whole.trainer.current_epoch == 2
    assert third.trainer.global_step == whole.trainer.global_step == 50
    assert torch.equal(third.layer.weight, whole.layer.weight)
    reports = audit_epochs(tmp_path / "torn", "data")
    assert [(report.exact, report.dropped.size) for report in reports] == [(True, 3), (True, 3)]


class Kept(Sink):
    takes_uncommitted = True

    def __init__(self) -> None:
        self.names: set[str] = set()

    def open(self, run: SinkRun) -> None:
        pass

    def write(self, rows: SinkRows) -> None:
        self.names |= set(rows.names)

    def close(self) -> None:
        pass


def test_what_the_module_logs_reaches_sinks(tmp_path: Path) -> None:
    sink = Kept()
    _fit_elastic(tmp_path, sinks=[sink])
    assert {"loss", "step_time_s"} <= sink.names


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"limit_train_batches": 3}, "limit_train_batches"),
        (
            {"callbacks": [GradientAccumulationScheduler({0: 1, 1: 2})], "accumulate_grad_batches": 1},
            "how many",
        ),
        ({"reload_dataloaders_every_n_epochs": 1}, "reload_dataloaders_every_n_epochs"),
    ],
    ids=["limit", "accumulation", "reload"],
)
def test_what_cannot_be_resumed_exactly_is_refused_before_training(
    options: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    callbacks = [StrataCallback(tmp_path / "run"), *options.pop("callbacks", [])]
    trainer = _trainer(callbacks=callbacks, enable_checkpointing=False, **options)
    with pytest.raises(CannotPromise, match=expected):
        trainer.fit(_model(), TrainerLoader(Numbered(), batch_size=4))
    assert not (tmp_path / "run").exists()


def test_other_loaders_and_checkpoints_beside_the_run_are_refused(tmp_path: Path) -> None:
    plain: Any = DataLoader(Numbered(), batch_size=4)
    trainer = _trainer(callbacks=[StrataCallback(tmp_path / "run")], enable_checkpointing=False)
    with pytest.raises(CannotPromise, match=r"position of a DataLoader exactly\. .*TrainerLoader"):
        trainer.fit(_model(), plain)
    _fit(tmp_path / "own", epochs=1)
    trainer = _trainer(
        callbacks=[StrataCallback(tmp_path / "run")],
        plugins=[StrataCheckpointIO()],
        enable_checkpointing=False,
    )
    with pytest.raises(CannotPromise, match="Remove it"):
        trainer.fit(
            _model(), TrainerLoader(Numbered(), batch_size=4), ckpt_path=tmp_path / "own" / "last.ckpt"
        )
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("wrap", [lambda io: io, AsyncCheckpointIO], ids=["plain", "wrapped"])
def test_a_trainer_is_not_made_with_a_strategy_that_would_not_use_the_plugin(
    wrap: Callable[[StrataCheckpointIO], CheckpointIO],
) -> None:
    with pytest.raises(UnsupportedSharding, match=r"ModelParallelStrategy: .* Train .* with strata\.elastic"):
        lightning.Trainer(
            strategy=ModelParallelStrategy(),
            accelerator="cpu",
            devices=2,
            plugins=[wrap(StrataCheckpointIO())],
            logger=False,
        )


@pytest.mark.parametrize("strategy", [FSDPStrategy, DeepSpeedStrategy])
def test_fsdp1_and_deepspeed_refuse_the_plugin_and_name_fsdp2(strategy: type[Strategy]) -> None:
    bare = strategy.__new__(
        strategy
    )  # A Trainer makes them on GPUs alone, and hands the plugin over like this.
    with pytest.raises(UnsupportedSharding, match=f"{strategy.__name__}: .* Use FSDP2 instead"):
        bare.checkpoint_io = StrataCheckpointIO()
    bare.checkpoint_io = other = TorchCheckpointIO()
    assert bare.checkpoint_io is other
