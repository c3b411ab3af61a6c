"""The public API as a type checker sees it: a user's program is checked strictly, and nothing public is `Any` without a reason."""

from __future__ import annotations

import importlib
import inspect
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

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
    "what was saved comes back, whatever it was": (
        "strata.CheckpointManager.load.return",
        "strata.CheckpointManager.load_async.return",
        "strata.CheckpointManager.restore.accept",
        "strata.checkpoint.Restored.__init__.state",
        "strata.elastic.on_restored",
        "strata.training.ElasticJob.__init__.on_restored",
    ),
    "tensors to be filled, in any nesting": (
        "strata.CheckpointManager.load.into",
        "strata.CheckpointManager.restore.into",
        "strata.CheckpointManager.restore_copy.into",
    ),
    "a state, as PyTorch's own": (
        "strata.ElasticLoader.load_state_dict.state",
        "strata.ElasticLoader.state_dict.return",
        "strata.ElasticSampler.load_state_dict.state",
        "strata.ElasticSampler.state_dict.return",
        "strata.data.ElasticIterableDataset.load_state_dict.state",
        "strata.data.StreamLoader.load_state_dict.state",
        "strata.data.StreamLoader.state_dict.return",
        "strata.integrations.loading.TrainerLoader.load_state_dict.state",
        "strata.integrations.loading.TrainerLoader.state_dict.return",
        "strata.integrations.loading.batches_of.state",
        "elastic_harness.checkpoint.CheckpointState.__init__.dataset_state",
        "elastic_harness.checkpoint.CheckpointState.__init__.lr_scheduler_state_dict",
        "elastic_harness.checkpoint.CheckpointState.__init__.model_state_dict",
        "elastic_harness.checkpoint.CheckpointState.__init__.optimizer_state_dict",
        "elastic_harness.checkpoint.CheckpointState.__init__.rng_states",
        "elastic_harness.checkpoint.CheckpointState.from_dict.data",
        "elastic_harness.checkpoint.CheckpointState.to_dict.return",
        "elastic_harness.checkpoint.create_checkpoint_state.dataset_state",
        "elastic_harness.data.DatasetState.from_dict.state",
        "elastic_harness.data.ResumableDataset.load_state_dict.state",
        "elastic_harness.data.ResumableDataset.state_dict.return",
        "elastic_harness.metrics.TrainingMetrics.load_state_dict.state",
        "elastic_harness.metrics.TrainingMetrics.state_dict.return",
        "elastic_harness.scaling.ElasticScalingManager.load_state_dict.state",
        "elastic_harness.scaling.ElasticScalingManager.state_dict.return",
        "elastic_harness.scaling.GradientAccumulationManager.load_state_dict.state",
        "elastic_harness.scaling.GradientAccumulationManager.state_dict.return",
        "elastic_harness.scaling.HasParamGroups.param_groups.return",
        "elastic_harness.scaling.LRScalingManager.load_state_dict.state",
        "elastic_harness.scaling.LRScalingManager.state_dict.return",
    ),
    "a checkpoint, as Lightning's own": (
        "strata.integrations.lightning.StrataCheckpointIO.load_checkpoint.return",
        "strata.integrations.lightning.StrataCheckpointIO.save_checkpoint.checkpoint",
        "strata.integrations.lightning.counted_in_batches.loops",
        "strata.integrations.lightning.counted_in_batches.return",
    ),
    "the caller's own values, saved beside the state": (
        "elastic_harness.checkpoint.CheckpointState.__init__.extra",
        "elastic_harness.checkpoint.CheckpointState.__init__.metrics",
        "elastic_harness.checkpoint.create_checkpoint_state.metrics",
    ),
    "the caller's own values, kept with an error": (
        "elastic_harness.errors.DistributedSetupError.__init__.context",
    ),
    "a configuration, which may hold anything: the answer is what is wrong with it": (
        "elastic_harness.config_validator.validate_config.config",
        "elastic_harness.config_validator.validate_elastic_config.config",
        "elastic_harness.config_validator.validate_training_config.config",
    ),
    "a field of a record by its name, each of another type": (
        "elastic_harness.scaling.ScalingDecision.get.default",
        "elastic_harness.scaling.ScalingDecision.get.return",
    ),
    "a nested summary, as JSON": ("elastic_harness.metrics.TrainingMetrics.summary.return",),
    "samples, as the dataset has them": (
        "strata.Mixture.read.return",
        "strata.data.ElasticDataset.__init__.transform",
        "strata.data.ElasticDataset.read.return",
        "strata.data.ElasticIterableDataset.__init__.collate_fn",
        "strata.data.filtered.keep",
        "strata.data.mapped.function",
    ),
    "a ledger's commit, as JSON": (
        "dtruntime.CheckpointRecord.__init__.data",
        "strata.ShardManager.commit.data",
        "strata.TrainingOrchestrator.notify_checkpoint.data",
        "strata.data.DataLedger.commit.return",
        "strata.data.DataLedger.commit_alone.return",
        "strata.data.DataLedger.restore.data",
    ),
    "JSON that the run, or its recipe, describes": (
        "strata.Client.submit.config",
        "strata.elastic.config",
        "strata.training.ElasticJob.__init__.config",
    ),
}
"""By reason: parameters and results that the API passes on without knowing what they are."""

DOCS = runpy.run_path(str(ROOT / "scripts" / "docs_reference.py"))
PUBLIC = (
    "strata",
    *DOCS["FACES"],
    *DOCS["INTEGRATIONS"],
    "dtruntime",
    "elastic_harness.checkpoint",
    "elastic_harness.data",
    *(f"elastic_harness.{name}" for name in ("agent", "config_validator", "errors", "metrics", "model")),
    *(f"elastic_harness.{name}" for name in ("scaling", "sequences", "sync", "train", "train_config")),
)
OWN = ("strata", "dtruntime", "elastic_harness")


def public() -> Iterator[tuple[str, inspect.Signature]]:
    """Every public function and method, once, under the first of its names."""
    seen: set[object] = set()
    for module in map(importlib.import_module, PUBLIC):
        for name in DOCS["public_names"](module):
            value = getattr(module, name)
            members = inspect.getmembers_static(value) if inspect.isclass(value) else [("", value)]
            for member, each in members:
                function = getattr(each, "fget", None) or getattr(each, "__func__", each)
                is_own = inspect.isfunction(function) and function.__module__.startswith(OWN)
                if is_own and function not in seen and (member == "__init__" or not member.startswith("_")):
                    seen.add(function)
                    yield ".".join(filter(None, (module.__name__, name, member))), inspect.signature(function)


def test_nothing_public_is_any_without_a_reason() -> None:
    annotations = {
        f"{name}.{parameter.name}": parameter.annotation
        for name, signature in public()
        for parameter in signature.parameters.values()
        if parameter.name not in ("self", "cls")
    } | {f"{name}.return": signature.return_annotation for name, signature in public()}
    assert [name for name, annotation in annotations.items() if annotation is inspect.Signature.empty] == []
    loose = {name for name, annotation in annotations.items() if re.search(r"\bAny\b", str(annotation))}
    assert loose == {name for names in MAY_BE_ANY.values() for name in names}
