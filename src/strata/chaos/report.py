"""What a chaos run measured, and whether it is good enough."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from strata.chaos.run import Injury, final_parameters
from strata.launch.sample_job import SampleJob

COMPARED_SEQUENCES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    name: str
    passed: bool
    found: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ChaosReport:
    injuries: tuple[Injury, ...]
    verdicts: tuple[Verdict, ...]
    steps: int
    duration_s: float

    @property
    def passed(self) -> bool:
        return all(verdict.passed for verdict in self.verdicts)

    def to_json(self) -> dict[str, Any]:
        times = [i.recovery_s for i in self.injuries if i.recovery_s is not None]
        return {
            "passed": self.passed,
            "steps": self.steps,
            "duration_s": self.duration_s,
            "recovery_s": {
                "count": len(times),
                "median": median(times) if times else None,
                "worst": max(times, default=None),
            },
            "injuries": [asdict(injury) for injury in self.injuries],
            "verdicts": [asdict(verdict) for verdict in self.verdicts],
        }


def judge_recoveries(injuries: tuple[Injury, ...], threshold_s: float) -> Verdict:
    times = [i.recovery_s for i in injuries if i.recovery_s is not None]
    slow = [t for t in times if t > threshold_s]
    failed = len(injuries) - len(times)
    worst = f"worst {max(times):.2f} s of {threshold_s:g} s allowed" if times else "no fault was injected"
    return Verdict(
        name="recovery time",
        passed=not slow and not failed and bool(injuries),
        found=f"{len(times)} recoveries, {worst}" + (f", {failed} without a new step" if failed else ""),
    )


def judge_progress(injuries: tuple[Injury, ...], steps: int) -> Verdict:
    """Whether training was further at the end than at any fault: recovering is not enough."""
    furthest = max((injury.step_before for injury in injuries), default=0)
    stuck = sum(injury.recovery_s is None for injury in injuries)
    return Verdict(
        name="progress",
        passed=bool(injuries) and not stuck and steps > furthest,
        found=f"step {steps:,} at the end, {furthest:,} at the last fault"
        + (f", {stuck} faults without a new step" if stuck else ""),
    )


def judge_ledger(checkpoints: Path, dataset: str) -> Verdict:
    from strata.data.history import audit_epochs

    reports = audit_epochs(checkpoints, dataset)
    bad = [report for report in reports if not report.clean]
    return Verdict(name="samples", passed=not bad, found=(bad or reports)[-1].reason)


def judge_checkpoints(checkpoints: Path) -> Verdict:
    """Hashes every checkpoint that is listed: what is complete must be intact."""
    from strata.checkpoint.verify import verify_store
    from strata.stores import open_store

    verified = list(verify_store(open_store(checkpoints)))
    damaged = [v for v in verified if not v.is_intact]
    return Verdict(
        name="checkpoints",
        passed=bool(verified) and not damaged,
        found="; ".join(str(v) for v in damaged) or f"{len(verified)} verified, checksums match",
    )


def judge_loss(disturbed: float, undisturbed: float, *, tolerance: float = 0.01) -> Verdict:
    off = abs(disturbed - undisturbed) / abs(undisturbed)
    return Verdict(
        name="loss",
        passed=off <= tolerance,
        found=f"{disturbed:.4f}, without faults {undisturbed:.4f} ({off:.2%} apart, {tolerance:.0%} allowed)",
    )


def loss_of(job: SampleJob) -> float:
    """Mean loss of the newest checkpoint over the first sequences of the data."""
    import numpy as np
    import torch

    from strata.data.tokens.index import TokenIndex
    from strata.data.tokens.sequences import SequenceReader
    from strata.trainer.model import GPT, GPTConfig

    settings = job.settings()["model"]
    parameters = final_parameters(job.checkpoints)
    vocabulary = parameters["tokens.weight"].shape[0]  # type: ignore[attr-defined]
    model = GPT(GPTConfig(vocab_size=vocabulary, **settings))  # type: ignore[arg-type]
    model.load_state_dict(parameters)
    model.eval()
    reader = SequenceReader(TokenIndex(job.index), int(str(settings["seq_length"])))
    inputs, labels = reader.read(np.arange(min(COMPARED_SEQUENCES, reader.full)))
    with torch.no_grad():
        return float(model(torch.from_numpy(inputs), torch.from_numpy(labels)))
