"""The real Hugging Face Trainer, driven by an elastic job: resumed, watched, refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from torch.utils.data import IterableDataset
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback, TrainingArguments

from strata.data.history import audit_epochs
from strata.integrations.huggingface import StrataCallback
from strata.integrations.loading import CannotPromise
from strata.training.job import ElasticOptions
from tests.support import Coordinator, eventually
from tests.support_forks import ForkServer
from tests.support_ranks import ranks

pytestmark = pytest.mark.filterwarnings("ignore")


class Line(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": torch.nn.functional.mse_loss(self.layer(x), labels)}


_DIVERGING = {"optim": "sgd", "learning_rate": 5.0, "lr_scheduler_type": "constant", "max_grad_norm": 0.0}
"""The first model is the best."""


class Crash(Exception):
    pass


class CrashAt(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            raise Crash


def samples(count: int = 67) -> list[dict[str, torch.Tensor]]:
    x = torch.randn(count, 4, generator=torch.Generator().manual_seed(1))
    return [{"x": row, "labels": row.sum().reshape(1)} for row in x]


def _trainer(folder: Path, **arguments: Any) -> Any:
    torch.manual_seed(0)
    given = {
        "num_train_epochs": 3,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "logging_steps": 2,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
    }
    return Trainer(
        Line(),
        TrainingArguments(output_dir=str(folder / "out"), **{**given, **arguments}),
        train_dataset=samples(),
        eval_dataset=samples(8),
    )


def _callback(folder: Path, **options: Any) -> StrataCallback:
    return StrataCallback(
        str(folder / "strata"), options=ElasticOptions(save_every=4, snapshot_every=0), **options
    )


def test_a_run_that_crashes_twice_ends_with_the_model_and_the_history_of_one_that_never_did(
    tmp_path: Path,
) -> None:
    undisturbed = _callback(tmp_path / "whole").attach(_trainer(tmp_path / "whole"))
    undisturbed.train()
    for step in (7, 18):
        crashing = _callback(tmp_path / "torn").attach(_trainer(tmp_path / "torn", dataloader_num_workers=1))
        crashing.add_callback(CrashAt(step))
        with pytest.raises(Crash):
            crashing.train()
    resumed = _callback(tmp_path / "torn").attach(_trainer(tmp_path / "torn"))
    resumed.train()
    assert torch.equal(resumed.model.layer.weight, undisturbed.model.layer.weight)
    assert resumed.state.global_step == undisturbed.state.global_step == 24
    assert resumed.state.epoch == 3.0
    steps = [(entry["step"], entry["epoch"]) for entry in resumed.state.log_history if "loss" in entry]
    assert steps == [
        (entry["step"], entry["epoch"]) for entry in undisturbed.state.log_history if "loss" in entry
    ]
    reports = audit_epochs(tmp_path / "torn" / "strata", "data")
    assert [(report.exact, report.dropped.size) for report in reports] == [(True, 67 % 8)] * 3


def test_how_many_checkpoints_are_kept_is_also_said_without_options(tmp_path: Path) -> None:
    _callback(tmp_path, keep_count=1).attach(_trainer(tmp_path, num_train_epochs=1)).train()
    assert len(list((tmp_path / "strata").glob("*.manifest.json"))) == 1


def test_a_finished_run_trains_nothing_more(tmp_path: Path) -> None:
    first = _callback(tmp_path).attach(_trainer(tmp_path, num_train_epochs=1))
    first.train()
    again = _callback(tmp_path).attach(_trainer(tmp_path, num_train_epochs=1))
    again.train()
    assert again.state.global_step == 8
    assert torch.equal(again.model.layer.weight, first.model.layer.weight)
    longer = _callback(tmp_path).attach(_trainer(tmp_path, num_train_epochs=2))
    longer.train()
    assert longer.state.global_step == 16


def test_the_final_save_is_of_the_last_step_not_of_the_best_model(tmp_path: Path) -> None:
    trainer = _trainer(
        tmp_path,
        num_train_epochs=1,
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="steps",
        save_steps=2,
        load_best_model_at_end=True,
        **_DIVERGING,
    )
    trainer.add_callback(EarlyStoppingCallback(2))
    _callback(tmp_path).attach(trainer).train()
    assert trainer.state.global_step == 6
    again = _trainer(tmp_path, num_train_epochs=2, **_DIVERGING)
    callback = _callback(tmp_path).attach(again)
    callback.add_callback(CrashAt(7))
    with pytest.raises(Crash):
        callback.train()
    assert again._initial_global_step == 6


def test_a_trainer_reports_its_steps_its_checkpoints_and_its_metrics(
    coordinator: Coordinator, tmp_path: Path
) -> None:
    trainer = _trainer(tmp_path, max_steps=8)
    _callback(tmp_path, coordinator=coordinator.address).attach(trainer).train()

    def known() -> dict[int, str]:
        return {c["step"]: c["status"] for c in coordinator.get("/api/checkpoints")}

    eventually(
        lambda: known() == {8: "completed", 4: "completed"},
        within_s=60,
        what=lambda: f"both are known to be complete, not {known()}",
    )
    run = eventually(lambda: coordinator.get("/api/runs"), within_s=60, what="its run")[0]

    def metrics() -> set[str]:
        found = coordinator.get(f"/api/runs/{run['run']}/metrics")
        return {each["name"] for each in found["metrics"]}

    eventually(
        lambda: {"loss", "learning_rate", "grad_norm", "step_time_s"} <= metrics(),
        within_s=60,
        what=lambda: f"its metrics, not {metrics()}",
    )


class Stream(IterableDataset[dict[str, torch.Tensor]]):
    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        yield from samples()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"auto_find_batch_size": True}, "auto_find_batch_size"),
        ({"train_sampling_strategy": "group_by_length"}, "order of a LengthGroupedSampler"),
    ],
)
def test_what_cannot_be_resumed_exactly_is_refused_before_training(
    arguments: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    trainer = _trainer(tmp_path, **arguments)
    if "train_sampling_strategy" in arguments:
        trainer.train_dataset = [{**each, "input_ids": [1, 2]} for each in samples()]
    with pytest.raises(CannotPromise, match=expected):
        _callback(tmp_path).attach(trainer).train()
    assert not (tmp_path / "strata").exists()


def test_streams_own_checkpoints_and_batches_that_do_not_divide_are_refused(tmp_path: Path) -> None:
    trainer = _trainer(tmp_path, max_steps=4)
    trainer.train_dataset = Stream()
    with pytest.raises(CannotPromise, match="map-style dataset"):
        _callback(tmp_path).attach(trainer).train()
    with pytest.raises(CannotPromise, match="Remove it"):
        _callback(tmp_path).attach(_trainer(tmp_path)).train(resume_from_checkpoint=True)
    with pytest.raises(CannotPromise, match=r"global batch of 10 .* batches of 4 on 1 rank"):
        _callback(tmp_path, global_batch_size=10).attach(_trainer(tmp_path)).train()
    alone = _trainer(tmp_path)
    alone.add_callback(_callback(tmp_path))
    with pytest.raises(CannotPromise, match=r"StrataCallback\(\.\.\.\)\.attach\(trainer\)"):
        alone.train()


TRAINERS = ForkServer(
    "strata.integrations.huggingface", "transformers.trainer", "tests.support_ranks", "torch._dynamo"
)


def on_two_ranks(folder: Path, *arguments: str) -> list[Any]:
    return ranks("tests.integrations.huggingface_script", *arguments, folder=folder, world=2, server=TRAINERS)


@pytest.mark.timeout(600)
def test_shards_of_fsdp2_are_saved_by_their_ranks_and_resumed(tmp_path: Path) -> None:
    for each in on_two_ranks(tmp_path, "2", "3"):
        assert (each["began"], each["steps"]) == (0, [3, 2])
        assert each["saved"] == each["weight"]
    for each in on_two_ranks(tmp_path, "2", "5"):
        assert (each["began"], each["steps"]) == (3, [5, 4])
        assert each["saved"] == each["weight"]


@pytest.mark.timeout(600)
def test_fsdp1_is_refused_when_training_begins(tmp_path: Path) -> None:
    for each in on_two_ranks(tmp_path, "1", "3"):
        assert "FSDP1" in each["refused"]
        assert "fully_shard" in each["refused"]
