"""A small real training that runs anywhere: a GPT on the text of this Python's standard library.

What demonstrations, chaos runs and benchmarks train. Everything lives in one folder.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

from strata.data.tokens.building.builder import BuildOptions, build_index
from strata.launch.recipes_builtin import TRAINER
from strata.launch.torchrun import TorchrunSpec

DATASET = "text"


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleJob:
    """One job in one folder. `prepare` writes its data and configuration."""

    folder: Path
    name: str
    workers: int = 2
    """Worker processes altogether, over all agents, when none is missing."""
    agents: int = 1
    min_agents: int = 1
    """With fewer the workers refuse to train."""
    steps: int = 400
    text_bytes: int = 400_000
    save_every: int = 50
    snapshot_every: int = 10
    keep: int = 100_000
    width: int = 96
    global_batch: int = 16
    hang_timeout_s: float = 0.0
    loader_workers: int = 0
    """Processes of each worker that read ahead."""

    @property
    def checkpoints(self) -> Path:
        return self.folder / f"{self.name}-checkpoints"

    @property
    def config(self) -> Path:
        return self.folder / f"{self.name}.yaml"

    @property
    def text(self) -> Path:
        return self.folder / f"{DATASET}.txt"

    @property
    def index(self) -> Path:
        return self.folder / f"{DATASET}.index"

    def prepare(self) -> None:
        if not self.index.exists():
            self.text.write_bytes(b"".join(standard_library(self.text_bytes)))
            build_index([self.text], self.index, tokenizer="bytes", options=BuildOptions())
        self.config.write_text(yaml.safe_dump(self.settings()))

    def settings(self) -> dict[str, dict[str, object]]:
        return {
            "model": {"n_layer": 2, "n_head": 4, "n_embd": self.width, "seq_length": 96},
            "training": {
                "lr": 1e-3,
                "batch_size": max(1, self.global_batch // self.workers),
                "max_steps": self.steps,
                "warmup_steps": 20,
                "min_lr_ratio": 1.0,  # No decay: runs of different length can be compared step by step.
                "device": "cpu",
                "backend": "gloo",
                "log_interval": 5,
            },
            "data": {
                "files": [str(self.text)],
                "index_file": str(self.index),
                "tokenizer": "bytes",
                "num_workers": self.loader_workers,
            },
            "checkpoint": {
                "nvme_path": str(self.checkpoints),
                "checkpoint_interval": self.save_every,
                "memory_snapshot_interval": self.snapshot_every,
                "keep_last_n": self.keep,
            },
            "scaling": {
                "strategy": "constant_batch",
                "target_global_batch_size": self.global_batch,
                "base_world_size": self.workers,
            },
            "elastic": {
                "min_nodes": self.min_agents,
                "max_nodes": self.workers,
                "job_id": self.name,
                "hang_timeout": self.hang_timeout_s,
            },
        }

    def torchrun(self, *, rdzv_backend: str, rdzv_endpoint: str, coordinator: str | None) -> TorchrunSpec:
        return TorchrunSpec(
            run_id=self.name,
            arguments=["-m", TRAINER, "--config", str(self.config)],
            nproc=self.workers // self.agents,
            max_nodes=self.agents,
            rdzv_backend=rdzv_backend,
            rdzv_endpoint=rdzv_endpoint,
            environment={"COORDINATOR_ADDR": coordinator} if coordinator else {},
        )


def standard_library(limit_bytes: int) -> Iterator[bytes]:
    """Real text that every machine with Python has, always in the same order."""
    taken = 0
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        body = path.read_bytes()[: limit_bytes - taken]
        try:
            body.decode()
        except UnicodeDecodeError:
            continue
        taken += len(body)
        yield body
        if taken >= limit_bytes:
            return
