"""The real Hugging Face Trainer, watched by a real coordinator and saving through Strata."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from transformers import Trainer, TrainingArguments

from strata.checkpoint.manager import CheckpointManager
from strata.integrations.huggingface import StrataCallback
from tests.support import Coordinator, eventually
from tests.support_ranks import ranks

pytestmark = pytest.mark.filterwarnings("ignore")


class Line(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": torch.nn.functional.mse_loss(self.layer(x), labels)}


def test_a_trainer_reports_its_steps_and_its_checkpoints_verify(
    coordinator: Coordinator, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 4)
    data = [{"x": row, "labels": row.sum().reshape(1)} for row in x]
    model = Line()
    arguments = TrainingArguments(
        output_dir=str(tmp_path / "out"),
        max_steps=8,
        save_steps=4,
        logging_steps=1,
        per_device_train_batch_size=8,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        run_name="hf",
    )
    callback = StrataCallback(str(tmp_path / "strata"), coordinator=coordinator.address)
    Trainer(model, arguments, train_dataset=data, callbacks=[callback]).train()
    with CheckpointManager(tmp_path / "strata") as manager:
        assert [info.step for info in manager.all_checkpoints()] == [8, 4]
        state = manager.load()
    assert torch.equal(state["model_state_dict"]["layer.weight"], model.layer.weight)

    def known() -> dict[int, str]:
        return {c["step"]: c["status"] for c in coordinator.get("/api/checkpoints")}

    eventually(
        lambda: known() == {8: "completed", 4: "completed"},
        within_s=60,
        what=lambda: f"both are known to be complete, not {known()}",
    )


def test_shards_of_fsdp2_are_saved_by_their_ranks(tmp_path: Path) -> None:
    for each in ranks("tests.integrations.huggingface_script", "2", folder=tmp_path, world=2):
        assert each["steps"] == [3, 2]
        assert each["saved"] == each["weight"]


def test_fsdp1_is_refused_when_training_begins(tmp_path: Path) -> None:
    for each in ranks("tests.integrations.huggingface_script", "1", folder=tmp_path, world=2):
        assert "FSDP1" in each["refused"]
        assert "fully_shard" in each["refused"]
    assert not (tmp_path / "strata").exists()
