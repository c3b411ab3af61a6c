"""What a script with the Hugging Face Trainer has before the page's block."""

import torch
from transformers import Trainer, TrainingArguments

__all__ = ["Trainer", "arguments", "dataset", "model"]


class Sums(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(8, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": torch.nn.functional.mse_loss(self.net(x), labels)}


model = Sums()
dataset = [{"x": x, "labels": x.sum().reshape(1)} for x in torch.randn(256, 8)]
arguments = TrainingArguments(
    "output",
    num_train_epochs=1,
    per_device_train_batch_size=16,
    save_strategy="no",
    report_to=[],
    use_cpu=True,
)
