"""An elastic job on plain loaders, streams and paths: killed, resumed, audited."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

import strata
from strata.data import DataError
from strata.training import ElasticOptions
from tests.training.loops import Crash

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
SAMPLES, BATCH = 42, 8


class Stream(IterableDataset[torch.Tensor]):
    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.at < SAMPLES:
            self.at += 1
            yield torch.full((4,), float(self.at))
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


def numbers() -> TensorDataset:
    return TensorDataset(torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(0)))


def train(folder: Path, data: Any, *, crash_at: int | None = None, size: int | None = None) -> torch.Tensor:
    torch.manual_seed(1)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    options = ElasticOptions(save_every=2, snapshot_every=1, unreachable_timeout_s=0.2)
    with strata.elastic(
        model=model,
        optimizer=optimizer,
        data=data,
        global_batch_size=size,
        checkpoints=folder,
        epochs=2,
        options=options,
    ) as job:
        for batch in job:
            x = batch.data[0] if isinstance(batch.data, list) else batch.data
            if isinstance(x, dict):
                x = x["x"].unsqueeze(1).expand(-1, 4).float()
            (model(x).square().mean() * batch.weight).backward()
            optimizer.step()
            optimizer.zero_grad()
            if job.step + 1 == crash_at:
                assert job._manager is not None
                assert job._manager.wait_pending(60)
                raise Crash
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def lines(folder: Path) -> list[str]:
    folder.mkdir(exist_ok=True)
    for part in range(2):
        rows = "".join(json.dumps({"x": 21 * part + i}) + "\n" for i in range(21))
        (folder / f"{part}.jsonl").write_text(rows)
    return [str(folder / "0*.jsonl"), str(folder / "1.jsonl")]


@pytest.mark.parametrize("kind", ["loader", "stateful", "stream", "paths", "dataset"])
def test_a_killed_job_continues_exactly(tmp_path: Path, kind: str) -> None:
    makes: dict[str, Callable[[], Any]] = {
        "loader": lambda: DataLoader(numbers(), batch_size=BATCH, shuffle=True, num_workers=1),
        "stateful": lambda: StatefulDataLoader(numbers(), batch_size=BATCH, shuffle=True),
        "stream": lambda: DataLoader(Stream(), batch_size=BATCH, num_workers=1),
        "paths": lambda: lines(tmp_path / "lines"),
        "dataset": numbers,
    }
    size = BATCH if kind in ("paths", "dataset") else None
    undisturbed = train(tmp_path / "a", makes[kind](), size=size)
    for at in (4, 9):  # In the first epoch and in the second.
        with pytest.raises(Crash):
            train(tmp_path / "b", makes[kind](), crash_at=at, size=size)
    assert torch.equal(train(tmp_path / "b", makes[kind](), size=size), undisturbed)
    for epoch in range(2):
        report = strata.audit(tmp_path / "b", "data", epoch)
        assert report.exact, report.reason


def test_data_that_nothing_can_be_promised_of_is_a_data_error(tmp_path: Path) -> None:
    class Stateless(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(9))

    for given in (DataLoader(Stateless(), batch_size=2), 5, numbers(), [tmp_path / "none.jsonl"]):
        with pytest.raises(DataError) as refused:
            train(tmp_path / "a", given)
        assert refused.value.message
