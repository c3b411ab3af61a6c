"""The recipe `training`: the built-in trainer on a registered dataset, with the task's settings.

The first worker that gets there prepares (text, index, configuration), once for all attempts; the others wait for it.
"""

from __future__ import annotations

import fcntl
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from strata.core.text import as_identifier
from strata.errors import StrataError
from strata.files import write_file
from strata.launch.context import TaskContext, current_task

SAMPLE = "sample-text"
SAMPLE_BYTES = 400_000
SAMPLE_STEPS = 200


def main() -> None:
    try:
        config = prepare(current_task())
    except StrataError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        sys.exit(2)
    from strata.trainer.train import main as train

    sys.exit(train(["--config", str(config)]))


def prepare(task: TaskContext) -> Path:
    """Data and configuration, where they are not there yet. Returns the configuration's file."""
    folder, data = task.task_dir / "training", task.data
    config = folder / "config.yaml"
    folder.mkdir(parents=True, exist_ok=True)
    data.mkdir(exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # Goes with the process, however it ends.
        if not config.exists():
            files = _files(task)
            # The coordinator knows the index by this name. Another task may cut the same text into other sequences.
            name = as_identifier(task.dataset.id)[:100] if task.dataset else SAMPLE
            index = data / f"{name}-{task.task_id}.index"
            _build_index(task, files, index)
            _write(config, settings(task, files, index))
    return config


def settings(task: TaskContext, files: list[str], index: Path) -> dict[str, dict[str, Any]]:
    """The trainer's configuration."""
    c: Mapping[str, Any] = task.config
    learning_rate = float(c["learning_rate"])
    steps, epochs = c.get("steps"), c.get("epochs")
    if steps is None and epochs is None:
        steps, epochs = (None, 1) if task.dataset is not None else (SAMPLE_STEPS, None)
    on_cpu = c["device"] == "cpu"
    return {
        "model": {**c.get("model", {}), "seq_length": c["seq_length"]},
        "training": {
            "lr": learning_rate,
            "batch_size": c["batch_size"],
            **({"max_steps": steps} if steps is not None else {}),
            **({"epochs": epochs} if epochs is not None else {}),
            "warmup_steps": c["warmup_steps"],
            "weight_decay": c["weight_decay"],
            "max_norm": c["max_norm"],
            "seed": c["seed"],
            "precision": c["precision"],
            "device": c["device"],
            "backend": "gloo" if on_cpu else "auto",
            "log_interval": c["log_interval"],
        },
        "data": {
            "files": files,
            "index_file": str(index),
            "tokenizer": c["tokenizer"],
            "text_key": c["text_key"],
            "seed": c["seed"],
        },
        "checkpoint": {
            "nvme_path": str(task.checkpoints),
            "checkpoint_interval": c["checkpoint_interval"],
            "memory_snapshot_interval": c["snapshot_interval"],
            "keep_last_n": c["keep_checkpoints"],
        },
        "scaling": {
            # The batch of a step stays the same whatever the number of workers.
            "strategy": "constant_batch",
            "target_global_batch_size": c["batch_size"] * task.worker_count,
            "base_world_size": task.worker_count,
            "min_lr": min(1e-7, learning_rate),
            "max_lr": max(1e-2, learning_rate),
        },
        "elastic": {
            "min_nodes": 1,
            "max_nodes": task.worker_count,
            "job_id": task.task_id,
            "hang_timeout": c["hang_timeout"],
            "shutdown_timeout": task.shutdown_s,
        },
    }


def _files(task: TaskContext) -> list[str]:
    if task.dataset is not None:
        from strata.launch.programs.indexing import dataset_files

        return dataset_files(task.dataset)
    from strata.launch.sample_job import standard_library

    text = task.data / f"{SAMPLE}.txt"
    write_file(text, b"".join(standard_library(SAMPLE_BYTES)), durable=False)
    return [str(text)]


def _build_index(task: TaskContext, files: list[str], index: Path) -> None:
    from strata.data.tokens.building.builder import BuildOptions, build_index

    options = BuildOptions(text_key=task.config["text_key"], workers=max(1, task.worker_count))
    report = build_index(files, index, tokenizer=task.config["tokenizer"], options=options)
    print("\n".join(report.lines()), flush=True)


def _write(path: Path, document: Mapping[str, Any]) -> None:
    import yaml

    write_file(path, yaml.safe_dump(document), durable=False)


if __name__ == "__main__":
    main()
