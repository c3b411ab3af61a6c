"""The recipes that every coordinator has: train a language model, build a token index, check a dataset shard by shard."""

from __future__ import annotations

from typing import Any

from strata.agent import PRELOAD_VARIABLE
from strata.launch.recipes import Recipe

TRAINER = "strata.trainer.train"
"""The module that `torchrun -m` runs."""


def _key(kind: str, description: str, **more: Any) -> dict[str, Any]:
    return {"type": kind, "description": description, **more}


def _schema(**properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": [], "additionalProperties": False}


_MODEL = _schema(
    n_layer=_key("integer", "Transformer blocks.", default=2, minimum=1, maximum=1_000),
    n_head=_key("integer", "Attention heads in each block.", default=4, minimum=1, maximum=1_000),
    n_embd=_key("integer", "Width; a multiple of n_head.", default=128, minimum=1, maximum=1_000_000),
    dropout=_key("number", "Dropout probability.", default=0.0, minimum=0, maximum=1),
)

TRAINING = Recipe(
    name="training",
    description="Train a GPT on a text dataset, elastically. Without a dataset: on text that ships with Python.",
    program=("-m", "strata.launch.programs.training"),
    built_in=True,
    gpus_per_worker=None,
    environment={PRELOAD_VARIABLE: TRAINER},
    schema=_schema(
        learning_rate=_key(
            "number", "Learning rate at full batch, after warm-up.", default=3e-4, exclusiveMinimum=0
        ),
        batch_size=_key("integer", "Sequences per worker and step.", default=8, minimum=1, maximum=1_000_000),
        steps=_key("integer", "Optimizer steps. Without it: `epochs`.", minimum=1, maximum=10**12),
        epochs=_key("integer", "Passes over the data; one if `steps` is not given.", minimum=1),
        seq_length=_key("integer", "Tokens in a sequence.", default=128, minimum=1, maximum=10**6),
        warmup_steps=_key("integer", "Warm-up steps to the full learning rate.", default=20, minimum=0),
        weight_decay=_key("number", "Weight decay of matrices.", default=0.1, minimum=0),
        max_norm=_key("number", "Maximum gradient norm.", default=1.0, exclusiveMinimum=0),
        seed=_key("integer", "Seed of weights and data order.", default=1234, minimum=0, maximum=2**31 - 1),
        precision=_key("string", "Precision of the forward pass.", default="fp32", enum=["fp32", "bf16"]),
        device=_key("string", "Device to train on.", default="auto", enum=["auto", "cpu", "cuda"]),
        tokenizer=_key("string", "'bytes', or the path of a tokenizer.json.", default="bytes", minLength=1),
        text_key=_key("string", "Field that holds the text.", default="text", minLength=1, maxLength=256),
        checkpoint_interval=_key("integer", "Steps between checkpoints on disk.", default=50, minimum=1),
        snapshot_interval=_key(
            "integer", "Steps between snapshots in memory; 0: none.", default=10, minimum=0
        ),
        keep_checkpoints=_key("integer", "Checkpoints kept on disk.", default=3, minimum=1, maximum=100_000),
        log_interval=_key("integer", "Steps between log lines.", default=10, minimum=1),
        hang_timeout=_key(
            "number", "Seconds without a step that count as a hang; 0: off.", default=0, minimum=0
        ),
        model={**_MODEL, "description": "Shape of the model."},
    ),
)

INDEXING = Recipe(
    name="indexing",
    description="Tokenize a text dataset (jsonl, text, parquet) once into an index that training reads.",
    program=("-m", "strata.launch.programs.indexing"),
    built_in=True,
    needs_dataset=True,
    warm=False,
    one_process=True,
    schema=_schema(
        tokenizer=_key("string", "'bytes', or the path of a tokenizer.json.", default="bytes", minLength=1),
        text_key=_key("string", "Field that holds the text.", default="text", minLength=1, maxLength=256),
        on_bad=_key("string", "What to do with a bad record.", default="raise", enum=["raise", "skip"]),
    ),
)

SHARDING = Recipe(
    name="sharding",
    description="Read a dataset of any format once, shard by shard over all workers, and record what each holds.",
    program=("-m", "strata.launch.programs.sharding"),
    built_in=True,
    needs_dataset=True,
    warm=False,
    schema=_schema(),
)

BUILT_IN = (TRAINING, INDEXING, SHARDING)
