"""The public API as a type checker sees it: a user's program is checked strictly, and nothing public is `Any` without a reason."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import strata
import strata.checkpoint
import strata.checkpoint.dcp
import strata.data
import strata.stores
import strata.training

ROOT = Path(__file__).parent.parent

PROGRAM = """
import torch

import strata
from strata import CheckpointManager, ElasticLoader, ElasticSampler
from strata.checkpoint import CheckpointInfo, SaveHandle
from strata.training import ElasticOptions

model = torch.nn.Linear(4, 1)
optimizer = torch.optim.AdamW(model.parameters())
loader = ElasticLoader(range(100), ElasticSampler(100, global_batch_size=10), num_workers=2, pin_memory=False)
options = ElasticOptions(save_every=10)

with strata.elastic(
    model=model, optimizer=optimizer, data=loader, checkpoints=["runs/a", "s3://bucket/a"], epochs=3, options=options
) as job:
    for batch in job:
        loss = model(batch.data).mean() * batch.weight
        loss.backward()
        optimizer.step()
        job.report(loss=float(loss))
    steps: int = job.step
    continued: bool = job.restored

manager = CheckpointManager("runs/b")
handle: SaveHandle = manager.save({"model": model.state_dict()}, step=1, must_arrive=True)
saved: CheckpointInfo = handle.result(60)
newest: CheckpointInfo | None = manager.get_latest()
state = manager.load(into={"model": model.state_dict()})
"""

MISTAKES = {
    "strata.elastic(modle=model, optimizer=optimizer, data=loader)": 'Unexpected keyword argument "modle"',
    "strata.elastic(model=model, optimizer=optimizer, data=loader, epochs='3')": 'Argument "epochs"',
    "ElasticOptions(save_every='often')": 'Argument "save_every"',
    "ElasticLoader(range(3), num_worker=2)": 'Unexpected keyword argument "num_worker"',
    "ElasticLoader(7)": 'Argument 1 to "ElasticLoader"',
    "manager.save(b'', step='one')": 'Argument "step"',
    "manager.save_async(b'', 1, tier=['NVME'])": 'Unexpected keyword argument "tier"',
    "manager.load(stap=1)": 'Unexpected keyword argument "stap"',
}


def check(program: str, folder: Path) -> str:
    source = folder / "program.py"
    source.write_text(program)
    done = subprocess.run(
        # Strict by the project's own settings, so that what is known of torch need not be worked out again.
        [sys.executable, "-m", "mypy", "--no-error-summary", str(source)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode in (0, 1), done.stderr
    return done.stdout


@pytest.mark.timeout(900)
def test_a_users_program_is_clean_and_its_mistakes_are_found(tmp_path: Path) -> None:
    lines = [f"x{number} = {mistake}" for number, mistake in enumerate(MISTAKES)]
    first = PROGRAM.count("\n") + 1
    found = check(PROGRAM + "\n".join(lines) + "\n", tmp_path).splitlines()
    by_line = {
        number: "\n".join(f for f in found if f"program.py:{number}:" in f)
        for number in range(1, first + len(lines))
    }
    assert {number: text for number, text in by_line.items() if number < first and text} == {}
    for number, (mistake, expected) in enumerate(MISTAKES.items(), start=first):
        assert expected in by_line[number], f"{mistake}: {by_line[number] or 'nothing found'}"


MAY_BE_ANY = {
    "load": "what was saved comes back, whatever it was",
    "load_async": "the same",
    "restore": "the same",
    "state": "what was saved, whatever it was",
    "into": "tensors to be filled, in any nesting",
    "on_restored": "the state is as it was saved",
    "state_dict": "as PyTorch's own",
    "load_state_dict": "as PyTorch's own",
    "transform": "makes of a sample what training wants",
    "keep": "decides on a sample, whatever it is",
    "function": "makes samples of one, whatever they are",
    "collate_fn": "makes of samples what training wants",
    "data": "a ledger's commit, as JSON",
    "config": "JSON that a recipe describes",
    "tasks": "JSON of the API",
    "task": "JSON of the API",
    "stop": "JSON of the API",
    "restart": "JSON of the API",
    "logs": "JSON of the API",
    "wait": "JSON of the API",
    "submit": "JSON of the API",
    "recipes": "JSON of the API",
    "restore_copy": "tensors to be filled, in any nesting",
    "commit": "a ledger's commit, as JSON",
    "commit_alone": "the same",
    "read": "samples, as the dataset has them",
    "options": "of the store that the URL names: every kind has its own",
    "read_metadata": "as PyTorch's own",
    "set_up_storage_reader": "as PyTorch's own",
    "set_up_storage_writer": "as PyTorch's own",
}
"""Parameters and functions whose values the API passes on without knowing what they are."""


PUBLIC = (strata, strata.checkpoint, strata.checkpoint.dcp, strata.data, strata.stores, strata.training)


def public() -> list[tuple[str, object]]:
    found: list[tuple[str, object]] = []
    values = {
        each: name for module in PUBLIC for name in module.__all__ if callable(each := getattr(module, name))
    }
    for value, name in values.items():
        if inspect.isclass(value):
            found += [
                (f"{name}.{method}", each)
                for method, each in vars(value).items()
                if inspect.isfunction(each)
                and (not method.startswith("_") or method == "__init__")
                and each.__module__.startswith("strata")  # A protocol's `__init__` is Python's own.
            ]
        else:
            found.append((name, value))
    return found


@pytest.mark.parametrize(
    ("name", "function"), public(), ids=lambda value: value if isinstance(value, str) else ""
)
def test_nothing_public_is_any_without_a_reason(name: str, function: object) -> None:
    assert callable(function)
    signature = inspect.signature(function)
    own = name.rpartition(".")[2]
    untyped = [
        p.name
        for p in signature.parameters.values()
        if p.annotation is p.empty and p.name not in ("self", "cls")
    ]
    assert untyped == []
    loose = [
        p.name
        for p in signature.parameters.values()
        if "Any" in str(p.annotation) and p.name not in MAY_BE_ANY
    ]
    assert own in MAY_BE_ANY or loose == []
    assert own in MAY_BE_ANY or "Any" not in str(signature.return_annotation)
