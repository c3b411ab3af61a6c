"""Everything that is wrong with a configuration, found at once and before anything starts.

Errors are settings that cannot work; warnings are settings that work but probably not as meant, among them
unknown keys, with the nearest known one. Each names its key path. Nothing is changed, nothing is contacted
unless `validate_s3` asks for it. The tables below are the one list of keys the trainer knows, and of what other
programs call them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, Literal

from strata.rendezvous import RENDEZVOUS_BACKENDS
from strata.trainer.errors import ConfigurationError
from strata.trainer.scaling import ROUNDING_MODES, STRATEGIES, ScalingRule, unknown_strategy

Kind = Literal["int", "number", "str", "bool", "list", "names", "mapping", "int_or_str"]


class Finding(str):
    """One problem as a line of text, `section.key: problem`, that also knows its parts."""

    __slots__ = ("path", "problem")
    path: str
    problem: str

    def __new__(cls, path: str, problem: str) -> Finding:
        finding = super().__new__(cls, f"{path}: {problem}" if path else problem)
        finding.path = path
        finding.problem = problem
        return finding


@dataclass(frozen=True, slots=True)
class ValidationResult:
    """`valid` means no errors; warnings do not count."""

    valid: bool
    errors: list[Finding] = field(default_factory=list)
    warnings: list[Finding] = field(default_factory=list)

    def raise_if_invalid(self) -> None:
        """Raise the first error as a `ConfigurationError` whose suggestions list all of them."""
        if self.valid:
            return
        first = self.errors[0]
        section = first.path.partition(".")[0] or None
        raise ConfigurationError(
            first.problem, section=section, suggestions=[f"Fix {error}" for error in self.errors[1:]] or None
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """What one setting may be."""

    kind: Kind
    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    choices: tuple[str, ...] = ()
    nullable: bool = False


COUNT = Key(kind="int", at_least=1)
POSITIVE_INT = Key(kind="int", above=0)
NOT_NEGATIVE_INT = Key(kind="int", at_least=0)
POSITIVE = Key(kind="number", above=0)
NOT_NEGATIVE = Key(kind="number", at_least=0)
FRACTION = Key(kind="number", at_least=0, at_most=1)
FLAG = Key(kind="bool")
TEXT = Key(kind="str")
OPTIONAL_TEXT = Key(kind="str", nullable=True)

SECTIONS: dict[str, dict[str, Key]] = {
    "model": {
        "name": TEXT,
        "vocab_size": Key(kind="int", at_least=1, nullable=True),
        "n_layer": COUNT,
        "n_head": COUNT,
        "n_embd": COUNT,
        "seq_length": COUNT,
        "dropout": FRACTION,
        "gradient_checkpointing": FLAG,
        "compile": FLAG,
    },
    "training": {
        "lr": POSITIVE,
        "learning_rate": POSITIVE,
        "batch_size": POSITIVE_INT,
        "max_steps": POSITIVE_INT,
        "epochs": POSITIVE_INT,
        "max_norm": Key(kind="number", above=0, nullable=True),
        "weight_decay": NOT_NEGATIVE,
        "betas": Key(kind="list"),
        "warmup_steps": NOT_NEGATIVE_INT,
        "min_lr_ratio": FRACTION,
        "seed": Key(kind="int"),
        "precision": Key(kind="str", choices=("fp32", "bf16")),
        "device": Key(kind="str", choices=("auto", "cpu", "cuda")),
        "backend": Key(kind="str", choices=("auto", "gloo", "nccl")),
        "log_interval": POSITIVE_INT,
        "deterministic": FLAG,
    },
    "data": {
        "files": Key(kind="names"),
        "data_files": Key(kind="names"),
        "index_file": OPTIONAL_TEXT,
        "tokenizer": TEXT,
        "text_key": TEXT,
        "seq_length": COUNT,
        "num_workers": NOT_NEGATIVE_INT,
        "shuffle": FLAG,
        "seed": Key(kind="int"),
    },
    "checkpoint": {
        "checkpoint_interval": POSITIVE_INT,
        "memory_snapshot_interval": NOT_NEGATIVE_INT,
        "nvme_path": OPTIONAL_TEXT,
        "s3_bucket": OPTIONAL_TEXT,
        "s3_prefix": TEXT,
        "s3_region": OPTIONAL_TEXT,
        "async_save": FLAG,
        "keep_last_n": COUNT,
        "async_save_policy": Key(kind="str", choices=("warn", "fail", "retry")),
        "async_save_retries": NOT_NEGATIVE_INT,
        "async_save_retry_delay": NOT_NEGATIVE,
        "max_snapshots": COUNT,
        "max_memory_mb": Key(kind="number", above=0, nullable=True),
        "unreachable_timeout": Key(kind="number", above=0),
    },
    "scaling": {
        "strategy": Key(kind="str", choices=STRATEGIES),
        "scaling_rule": Key(kind="str", choices=tuple(rule.value for rule in ScalingRule)),
        "base_lr": POSITIVE,
        "base_batch_size": POSITIVE_INT,
        "base_world_size": COUNT,
        "warmup_steps": NOT_NEGATIVE_INT,
        "min_lr": NOT_NEGATIVE,
        "max_lr": POSITIVE,
        "target_global_batch_size": Key(kind="int", above=0, nullable=True),
        "rounding_mode": Key(kind="str", choices=ROUNDING_MODES),
    },
    "elastic": {
        "min_nodes": COUNT,
        "max_nodes": COUNT,
        "nproc_per_node": Key(kind="int_or_str", at_least=1, choices=("auto", "gpu", "cpu")),
        "max_restarts": NOT_NEGATIVE_INT,
        "rdzv_backend": Key(kind="str", choices=RENDEZVOUS_BACKENDS),
        "rdzv_endpoint": TEXT,
        "rdzv_id": TEXT,
        "rdzv_conf": Key(kind="mapping"),
        "heartbeat_interval": POSITIVE,
        "heartbeat_timeout": POSITIVE,
        "hang_timeout": NOT_NEGATIVE,
        "shutdown_timeout": POSITIVE,
        "coordinator": OPTIONAL_TEXT,
        "job_id": TEXT,
    },
    "chaos": {
        "enabled": FLAG,
        "interval": POSITIVE,
        "duration": POSITIVE,
        "rto_threshold": POSITIVE,
        "kinds": Key(kind="names"),
        "seed": Key(kind="int"),
        "single_kill": FLAG,
        "output": OPTIONAL_TEXT,
    },
}


OTHER_NAMES: dict[str, dict[str, str]] = {
    "": {
        "optimizer": "training",
        "optim": "training",
        "train": "training",
        "dataset": "data",
        "checkpoints": "checkpoint",
        "checkpointing": "checkpoint",
        "distributed": "elastic",
        "launch": "elastic",
    },
    "model": {
        "d_model": "n_embd",
        "dim": "n_embd",
        "hidden_dim": "n_embd",
        "hidden_size": "n_embd",
        "embed_dim": "n_embd",
        "embedding_dim": "n_embd",
        "num_layers": "n_layer",
        "num_hidden_layers": "n_layer",
        "depth": "n_layer",
        "num_heads": "n_head",
        "num_attention_heads": "n_head",
        "block_size": "seq_length",
        "context_length": "seq_length",
        "max_seq_len": "seq_length",
        "max_position_embeddings": "seq_length",
        "vocabulary_size": "vocab_size",
        "activation_checkpointing": "gradient_checkpointing",
    },
    "training": {
        "grad_clip": "max_norm",
        "gradient_clip": "max_norm",
        "clip_grad_norm": "max_norm",
        "max_grad_norm": "max_norm",
        "steps": "max_steps",
        "total_steps": "max_steps",
        "num_steps": "max_steps",
        "num_epochs": "epochs",
        "micro_batch_size": "batch_size",
        "local_batch_size": "batch_size",
        "dtype": "precision",
        "mixed_precision": "precision",
        "logging_steps": "log_interval",
        "log_every": "log_interval",
    },
    "data": {
        "path": "files",
        "paths": "files",
        "data_path": "files",
        "train_path": "files",
        "train_files": "files",
        "index": "index_file",
        "index_path": "index_file",
        "text_column": "text_key",
        "text_field": "text_key",
        "workers": "num_workers",
        "max_length": "seq_length",
    },
    "checkpoint": {
        "dir": "nvme_path",
        "path": "nvme_path",
        "checkpoint_dir": "nvme_path",
        "save_dir": "nvme_path",
        "local_path": "nvme_path",
        "interval": "checkpoint_interval",
        "save_interval": "checkpoint_interval",
        "save_every": "checkpoint_interval",
        "snapshot_interval": "memory_snapshot_interval",
        "bucket": "s3_bucket",
        "prefix": "s3_prefix",
        "region": "s3_region",
        "keep": "keep_last_n",
        "keep_count": "keep_last_n",
        "max_to_keep": "keep_last_n",
    },
    "scaling": {
        "rule": "scaling_rule",
        "lr_scaling": "scaling_rule",
        "global_batch_size": "target_global_batch_size",
        "target_batch_size": "target_global_batch_size",
        "lr": "base_lr",
        "rounding": "rounding_mode",
    },
    "elastic": {
        "nproc": "nproc_per_node",
        "gpus_per_node": "nproc_per_node",
        "backend": "rdzv_backend",
        "endpoint": "rdzv_endpoint",
        "etcd_endpoint": "rdzv_endpoint",
        "rendezvous_endpoint": "rdzv_endpoint",
        "rendezvous_backend": "rdzv_backend",
        "id": "rdzv_id",
        "run_id": "rdzv_id",
        "coordinator_url": "coordinator",
        "coordinator_addr": "coordinator",
        "job": "job_id",
    },
    "chaos": {"kill_interval": "interval", "rto": "rto_threshold", "report": "output"},
}
"""What people write from habit, by section (sections themselves under ""), where spelling alone does not show it."""


def validate_config(config: Mapping[str, Any], validate_s3: bool = False) -> ValidationResult:
    """Check a whole configuration. `validate_s3` also tries the bucket, with the credentials of this process."""
    check = _Check(config)
    check.sections()
    for across_keys in (_check_elastic, _check_scaling, _check_checkpoint, _check_model):
        across_keys(check)
    bucket = check.value_of("checkpoint.s3_bucket")
    if validate_s3 and isinstance(bucket, str) and check.fine("checkpoint.s3_bucket"):
        access = validate_s3_access(bucket, check.value_of("checkpoint.s3_region"))
        check.errors += access.errors
    return check.result()


def validate_training_config(config: Mapping[str, Any], validate_s3: bool = False) -> ValidationResult:
    """`validate_config`, and what a training cannot do without: what passes here the trainer begins with."""
    result = validate_config(config, validate_s3)
    check = _Check(config)
    if not (check.value_of("data.files") or check.value_of("data.data_files")):
        check.error("data.files", "files must name the training data")
    if check.value_of("training.max_steps") is None and check.value_of("training.epochs") is None:
        check.error("training.max_steps", "max_steps must say when training ends (or epochs)")
    known = {error.path for error in result.errors}
    errors = result.errors + [error for error in check.errors if error.path not in known]
    return ValidationResult(valid=not errors, errors=errors, warnings=result.warnings)


def validate_elastic_config(config: Mapping[str, Any]) -> ValidationResult:
    """Check the `elastic` section alone: of a whole configuration, or given by itself."""
    elastic: object = config
    if isinstance(elastic, Mapping) and not SECTIONS.keys().isdisjoint(elastic):
        elastic = elastic.get("elastic")
    check = _Check({"elastic": elastic})
    check.sections()
    _check_elastic(check)
    return check.result()


def validate_s3_access(bucket: str, region: str | None = None) -> ValidationResult:
    """Write, read, list and remove a small object in the bucket, and say what is not allowed."""
    from strata.diagnostics import probe_s3

    path = "checkpoint.s3_bucket"
    failures = [Finding(path, failure) for failure in probe_s3(bucket, region=region)]
    return ValidationResult(valid=not failures, errors=failures)


class _Check:
    """Collects findings. A key that already has an error takes no part in the checks across keys."""

    def __init__(self, config: object) -> None:
        self.config = config
        self.errors: list[Finding] = []
        self.warnings: list[Finding] = []

    def error(self, path: str, problem: str) -> None:
        self.errors.append(Finding(path, problem))

    def warn(self, path: str, problem: str) -> None:
        self.warnings.append(Finding(path, problem))

    def fine(self, path: str) -> bool:
        return not any(error.path == path for error in self.errors)

    def value_of(self, path: str) -> Any:
        value: Any = self.config
        for name in path.split("."):
            value = value.get(name) if isinstance(value, Mapping) else None
        return value

    def number(self, path: str, default: float | None = None) -> float | None:
        """The number at `path`, or None where there is none to reckon with."""
        value = self.value_of(path)
        if value is None:
            return default
        usable = isinstance(value, int | float) and not isinstance(value, bool) and self.fine(path)
        return value if usable else None

    def result(self) -> ValidationResult:
        return ValidationResult(valid=not self.errors, errors=self.errors, warnings=self.warnings)

    def sections(self) -> None:
        if not isinstance(self.config, Mapping):
            self.error("", f"The configuration must be a mapping of sections, not {_type_name(self.config)}")
            return
        for name, section in self.config.items():
            if name not in SECTIONS:
                self.warn(str(name), "unknown section" + _nearest(name, SECTIONS, OTHER_NAMES[""]))
            elif section is not None:
                self.section(str(name), section)

    def section(self, name: str, section: Any) -> None:
        if not isinstance(section, Mapping):
            self.error(name, f"must be a mapping of settings, not {_type_name(section)} ({section!r})")
            return
        keys = SECTIONS[name]
        for key, value in section.items():
            path = f"{name}.{key}"
            if key not in keys:
                self.warn(path, "unknown key, it changes nothing" + _nearest(key, keys, OTHER_NAMES[name]))
            elif not (isinstance(value, str) and value.startswith("${")):  # Resolved later, by OmegaConf.
                self.value(path, str(key), keys[key], value)

    def value(self, path: str, name: str, key: Key, value: Any) -> None:
        if value is None:
            if not key.nullable:
                self.error(path, f"{name} has no value")
            return
        value = self.typed(path, name, key, value)
        if value is None:
            return
        if isinstance(value, str):
            if key.choices and value not in key.choices:
                if path == "scaling.strategy":
                    self.error(path, unknown_strategy(value).reason)
                else:
                    self.error(path, f"Unknown {name} '{value}'. Valid options: {list(key.choices)}")
            elif not value.strip() and not path.endswith("prefix"):
                self.error(path, f"{name} cannot be empty")
        elif isinstance(value, int | float):
            if not math.isfinite(value):
                self.error(path, f"{name} ({value}) must be a finite number")
            elif key.above is not None and value <= key.above:
                self.error(path, f"{name} ({value}) must be positive")
            elif key.at_least is not None and value < key.at_least:
                bound = "cannot be negative" if key.at_least == 0 else f"must be at least {key.at_least:g}"
                self.error(path, f"{name} ({value}) {bound}")
            elif key.at_most is not None and value > key.at_most:
                self.error(path, f"{name} ({value}) cannot exceed {key.at_most:g}")

    def typed(self, path: str, name: str, key: Key, value: Any) -> Any:
        """The value if it has the right type; else an error is recorded and there is none."""
        wanted = {
            "int": "a whole number",
            "number": "a number",
            "str": "text",
            "bool": "true or false",
            "list": "a list",
            "names": "a list of names",
            "mapping": "a mapping",
            "int_or_str": f"a whole number or one of {list(key.choices)}",
        }[key.kind]
        is_int = isinstance(value, int) and not isinstance(value, bool)
        is_number = is_int or isinstance(value, float)
        right = {
            "int": is_int,
            "number": is_number,
            "str": isinstance(value, str),
            "bool": isinstance(value, bool),
            "list": isinstance(value, list | tuple),
            "names": isinstance(value, str)
            or (isinstance(value, list | tuple) and all(map(_is_name, value))),
            "mapping": isinstance(value, Mapping),
            "int_or_str": is_int or isinstance(value, str),
        }[key.kind]
        if right:
            return value
        if key.kind == "number" and isinstance(value, str) and (number := _number(value)) is not None:
            self.warn(
                path, f"{name} is the text '{value}', read as {number:g}; write it with a point: 1.0e-4"
            )
            return number
        self.error(path, f"{name} must be {wanted}, not {_type_name(value)} ({value!r})")
        return None


def _check_elastic(check: _Check) -> None:
    low, high = check.number("elastic.min_nodes", 1), check.number("elastic.max_nodes", 4)
    if low is not None and high is not None and low > high:
        check.error("elastic.min_nodes", f"min_nodes ({low}) cannot exceed max_nodes ({high})")
    interval, timeout = (
        check.number("elastic.heartbeat_interval", 30),
        check.number("elastic.heartbeat_timeout", 90),
    )
    if interval is not None and timeout is not None:
        if timeout <= interval:
            check.error(
                "elastic.heartbeat_timeout",
                f"heartbeat_timeout ({timeout}) must exceed heartbeat_interval ({interval})",
            )
        elif timeout < 2 * interval:
            check.warn(
                "elastic.heartbeat_timeout",
                f"one late heartbeat is enough to fail a worker: use {2 * interval:g} or more",
            )


def _check_scaling(check: _Check) -> None:
    target, batch = check.number("scaling.target_global_batch_size"), check.number("training.batch_size")
    if check.value_of("scaling.strategy") == "constant_batch" and (
        check.value_of("scaling.target_global_batch_size") is None
    ):
        check.error(
            "scaling.target_global_batch_size",
            "target_global_batch_size is required for constant_batch strategy",
        )
    low, high = check.number("scaling.min_lr", 1e-7), check.number("scaling.max_lr", 1e-2)
    rate = check.number("scaling.base_lr")
    if low is not None and high is not None:
        if low > high:
            check.error("scaling.min_lr", f"min_lr ({low:g}) cannot exceed max_lr ({high:g})")
        elif rate is not None and not low <= rate <= high:
            check.warn(
                "scaling.base_lr",
                f"base_lr ({rate:g}) lies outside min_lr..max_lr ({low:g}..{high:g}) and will be clamped",
            )
    base, workers = check.number("scaling.base_world_size"), check.number("elastic.nproc_per_node", 1)
    fewest, most = check.number("elastic.min_nodes", 1), check.number("elastic.max_nodes", 4)
    if base is not None and workers is not None and fewest is not None and most is not None:
        least, most = fewest * workers, most * workers
        if not least <= base <= most:
            check.warn(
                "scaling.base_world_size",
                f"base_world_size ({base}) is outside the worlds this job can have ({least} to {most})",
            )
    if target is not None and batch is not None:
        at_once = batch * (base or 1)
        if target % at_once:
            check.warn(
                "scaling.target_global_batch_size",
                f"target_global_batch_size ({target}) is no multiple of batch_size x base_world_size ({at_once}): "
                f"each step will take {-(-target // at_once) * at_once} samples",
            )


def _check_checkpoint(check: _Check) -> None:
    every = check.number("checkpoint.checkpoint_interval", 500)
    snapshot = check.number("checkpoint.memory_snapshot_interval", 50)
    steps = check.number("training.max_steps")
    if every is not None and snapshot and every % snapshot:
        check.warn(
            "checkpoint.memory_snapshot_interval",
            f"checkpoint_interval ({every}) is no multiple of memory_snapshot_interval ({snapshot}): "
            "the two do not nest, and some steps are copied twice",
        )
    if every is not None and steps is not None and every > steps:
        check.warn(
            "checkpoint.checkpoint_interval",
            f"checkpoint_interval ({every}) exceeds max_steps ({steps}): only the last step is kept",
        )
    bucket = check.value_of("checkpoint.s3_bucket")
    if isinstance(bucket, str) and not bucket.startswith("${"):
        if bucket.startswith("s3://"):
            check.error("checkpoint.s3_bucket", "s3_bucket takes the bare name; put the rest in s3_prefix")
        elif bucket and not re.fullmatch(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]", bucket):
            check.error("checkpoint.s3_bucket", f"s3_bucket ({bucket!r}) is no valid bucket name")


def _check_model(check: _Check) -> None:
    width, heads = check.number("model.n_embd", 128), check.number("model.n_head", 4)
    if width is not None and heads is not None and width % heads:
        check.error("model.n_embd", f"n_embd ({width}) must be a multiple of n_head ({heads})")


def _is_name(value: Any) -> bool:
    return isinstance(value, str)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _nearest(name: object, known: Mapping[str, Any], other_names: Mapping[str, str]) -> str:
    lowered = str(name).lower().replace("-", "_")
    matches = [other_names[lowered]] if lowered in other_names else get_close_matches(lowered, known, n=1)
    return f" (did you mean '{matches[0]}'?)" if matches else f"; known are {', '.join(known)}"


def _type_name(value: Any) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, Mapping):
        return "a mapping"
    names = {bool: "true or false", str: "text", int: "a whole number", float: "a fraction", list: "a list"}
    return names.get(type(value), type(value).__name__)
