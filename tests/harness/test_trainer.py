"""What a configuration says is what the trainer does, or refuses to."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_harness.data.index_builder import IndexBuilder
from elastic_harness.errors import ConfigurationError, DataLoadingError
from strata.agent.trace import Tracer
from strata.shared_memory import forget_jobs
from strata.trainer.config import read_train_config
from strata.trainer.distributed import WorldInfo
from strata.trainer.train import Trainer
from tests.data.tokens import bpe
from tests.rendezvous.etcd_server import free_port

CONFIG = """
model: {n_layer: 1, n_head: 1, n_embd: 8, seq_length: 8}
training: {max_steps: 4, batch_size: 4, lr: 1.0e-3, warmup_steps: 0, device: cpu, backend: gloo, deterministic: false}
data: {files: [a.jsonl], index_file: a.index, tokenizer: bytes}
checkpoint: {nvme_path: checkpoints, checkpoint_interval: 2, memory_snapshot_interval: 1}
scaling: {warmup_steps: 0}
elastic: {job_id: JOB}
"""
WORLD = WorldInfo(0, 0, 1, 1, "127.0.0.1", 29500)


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    Path("a.jsonl").write_text('{"text": "some words, and some more of them"}\n' * 40)
    IndexBuilder("bytes").build("a.jsonl", "a.index")
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG.replace("JOB", tmp_path.name))
    yield path
    forget_jobs(tmp_path.name)


def trainer(path: Path, *overrides: str, world: WorldInfo = WORLD) -> Trainer:
    return Trainer(read_train_config(path, overrides)[0], world, Tracer.begin(path.parent.name))


def lr_of(built: Trainer) -> float:
    return float(built.optimizer.param_groups[0]["lr"])


def test_the_base_of_the_rate_is_what_scaling_says(config: Path) -> None:
    assert lr_of(trainer(config)) == 1e-3
    assert lr_of(trainer(config, "scaling.base_lr=5e-4")) == 5e-4
    assert lr_of(trainer(config, "scaling.base_batch_size=16")) == 2.5e-4, "tuned for four times this batch"
    assert lr_of(trainer(config, "scaling.base_batch_size=16", "scaling.scaling_rule=none")) == 1e-3


@pytest.mark.parametrize(("mode", "samples"), [(None, 10), ("ceil", 12), ("floor", 8), ("nearest", 12)])
def test_a_step_takes_as_many_samples_as_the_rounding_says(
    config: Path, mode: str | None, samples: int
) -> None:
    rounding = [] if mode is None else [f"scaling.rounding_mode={mode}"]
    built = trainer(
        config, "scaling.strategy=constant_batch", "scaling.target_global_batch_size=10", *rounding
    )
    assert built.loader.sampler.global_batch_size == samples
    built.run()
    assert built.job.step == 4
    assert built.loader.position == 4 * samples


def test_saves_are_made_as_the_checkpoint_section_says(config: Path) -> None:
    built = trainer(
        config,
        "checkpoint.async_save=false",
        "checkpoint.max_snapshots=3",
        "checkpoint.s3_bucket=bucket",
        "checkpoint.s3_region=eu-west-1",
    )
    assert (built.job.options.wait_for_saves, built.job.options.snapshot_count) == (True, 3)
    destinations: Any = built.job._checkpoints
    assert destinations[1].url == "s3://bucket"
    assert destinations[1]._settings.config["region"] == "eu-west-1"


def test_a_vocabulary_that_the_index_exceeds_is_refused(config: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"vocab_size \(10\) is too small for 'a.index'"):
        trainer(config, "model.vocab_size=10")
    trainer(config, "model.vocab_size=128")


def test_a_tokenizer_that_is_not_that_of_the_index_is_refused_or_named(
    config: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(DataLoadingError, match="it was tokenized with bytes, not with gpt2") as caught:
        trainer(config, "data.tokenizer=gpt2")
    assert "strata index" in str(caught.value)
    assert "--tokenizer gpt2 --output a.index" in str(caught.value)
    IndexBuilder(str(bpe.train(tmp_path / "tokenizer.json"))).build("a.jsonl", "bpe.index")
    trainer(config, "data.index_file=bpe.index", "data.tokenizer=somebody/gpt2")
    assert "not with somebody/gpt2; they are not compared" in caplog.text


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_cuda_without_a_gpu_is_refused(config: Path) -> None:
    with pytest.raises(ConfigurationError, match="device is cuda, and local rank 0 has no GPU"):
        trainer(config, "training.device=cuda")


def test_what_the_launcher_was_not_given_is_named(config: Path) -> None:
    place = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1, "MASTER_PORT": free_port()}
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "elastic_harness.train",
            "--config",
            str(config),
            "elastic.nproc_per_node=4",
            "elastic.rdzv_id=mine",
        ],
        env={
            **os.environ,
            **{name: str(value) for name, value in place.items()},
            "MASTER_ADDR": "127.0.0.1",
            "LOGLEVEL": "warning",
        },
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "this machine has 1 of 4 workers" in done.stderr
    assert "strata torchrun --nproc-per-node=4" in done.stderr
    assert "elastic.rdzv_id: the trainer does not read it" in done.stderr


def test_a_log_level_that_torch_could_not_read_is_a_sentence(config: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "elastic_harness.train", "--config", str(config)],
        env={**os.environ, "LOGLEVEL": "loud"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2
    assert "LOGLEVEL must be one of CRITICAL, " in done.stderr
    assert "Traceback" not in done.stderr
