"""The trainer's configuration: one YAML file, `key=value` overrides, every problem reported before anything starts."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from strata.environment import unread
from strata.trainer.errors import ConfigurationError
from strata.trainer.validation import validate_training_config
from strata.worker.address import coordinator_address as address_of

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    vocab_size: int | None = None
    """None takes the tokenizer's, rounded up to a multiple of 64."""
    n_layer: int = 2
    n_head: int = 4
    n_embd: int = 128
    seq_length: int = 128
    dropout: float = 0.0
    gradient_checkpointing: bool = False
    compile: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingConfig:
    lr: float = 3e-4
    batch_size: int = 8
    """Sequences per worker in one forward pass."""
    max_steps: int | None = None
    epochs: int | None = None
    max_norm: float | None = 1.0
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    warmup_steps: int = 100
    min_lr_ratio: float = 0.1
    seed: int = 1234
    precision: str = "fp32"
    device: str = "auto"
    backend: str = "auto"
    log_interval: int = 10
    deterministic: bool = True
    """Make results independent of interruptions, bit by bit, at the price of one forward pass at every start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    files: tuple[str, ...] = ()
    index_file: str | None = None
    tokenizer: str = "bytes"
    text_key: str = "text"
    num_workers: int = 0
    shuffle: bool = True
    seed: int = 1234


@dataclass(frozen=True, slots=True, kw_only=True)
class SavingConfig:
    nvme_path: str | None = None
    s3_bucket: str | None = None
    s3_prefix: str = ""
    s3_region: str | None = None
    checkpoint_interval: int = 500
    memory_snapshot_interval: int = 50
    max_snapshots: int = 2
    """Snapshots kept in memory."""
    keep_last_n: int = 3
    async_save: bool = True
    """Saves continue in the background. False waits for each."""
    async_save_policy: str = "warn"
    async_save_retries: int = 3
    async_save_retry_delay: float = 5.0
    max_memory_mb: float | None = None
    unreachable_timeout: float = 60.0
    """Seconds that a destination which does not answer is waited for while training starts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingSection:
    strategy: str = "variable_batch"
    scaling_rule: str = "linear"
    base_lr: float | None = None
    """The rate that was tuned; by default `training.lr`."""
    base_batch_size: int | None = None
    """The batch of a worker it was tuned for; by default `training.batch_size`."""
    base_world_size: int = 1
    target_global_batch_size: int | None = None
    rounding_mode: str | None = None
    """How `target_global_batch_size` becomes a whole number of micro-batches for every worker; by default it is held exactly,
    with micro-batches that differ in size."""
    warmup_steps: int = 100
    min_lr: float = 1e-7
    max_lr: float = 1e-2


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticSection:
    min_nodes: int = 1
    max_nodes: int = 4
    nproc_per_node: int | str | None = None
    """What the launcher should have been given; only compared with what is there."""
    hang_timeout: float = 0.0
    shutdown_timeout: float = 25.0
    coordinator: str | None = None
    job_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelSection:
    """How the model is spread over the workers. Without this section every worker has all of it (DDP)."""

    dp: int | Literal["auto"] = "auto"
    """Groups that read different data; auto: as many as there are workers for."""
    tp: int = 1
    """Workers in a group, which share the matrices of each block and read the same data."""
    fsdp: bool = True
    """Shard parameters, gradients and the optimizer's state between the groups."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    model: ModelConfig = field(default_factory=ModelConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    data: DataConfig = field(default_factory=DataConfig)
    checkpoint: SavingConfig = field(default_factory=SavingConfig)
    scaling: ScalingSection = field(default_factory=ScalingSection)
    elastic: ElasticSection = field(default_factory=ElasticSection)
    parallel: ParallelSection | None = None


def read_train_config(path: Path, overrides: Sequence[str] = ()) -> tuple[TrainConfig, list[str]]:
    """The configuration and its warnings. Raises `ConfigurationError` with everything that is wrong."""
    document = _read(path, overrides)
    result = validate_training_config(document)
    result.raise_if_invalid()
    return _build(document), [*(str(warning) for warning in result.warnings), *unread()]


def _read(path: Path, overrides: Sequence[str]) -> dict[str, Any]:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    for override in overrides:
        if "=" not in override:
            raise ConfigurationError(f"'{override}' is no setting", suggestions=["Write section.key=value."])
    try:
        merged = OmegaConf.merge(OmegaConf.load(path), OmegaConf.from_dotlist(list(overrides)))
        document = OmegaConf.to_container(merged, resolve=True)
    except FileNotFoundError:
        raise ConfigurationError(f"The file '{path}' does not exist") from None
    except (
        YAMLError,
        OmegaConfBaseException,
        OSError,
        ValueError,
        TypeError,  # OmegaConf's own, and the next, for a document that is no mapping.
        AssertionError,
        RecursionError,
    ) as error:
        known = isinstance(error, YAMLError)
        reason = (known and _syntax_error(path)) or str(error) or "it must be a mapping of sections"
        raise ConfigurationError(
            f"'{path}' cannot be read: {reason}", suggestions=[f"Check it with: strata validate {path}"]
        ) from error
    if not isinstance(document, dict):
        raise ConfigurationError(f"'{path}' must be a mapping of sections")
    return {str(key): value for key, value in document.items()}


def _syntax_error(path: Path) -> str:
    """What the parser written in Python says, which is what people know and search for; OmegaConf uses the other."""
    import yaml

    try:
        yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        return f"{type(error).__module__}.{type(error).__name__}: {error}"
    return ""  # It is YAML, and OmegaConf accepts less: no key twice, no list in itself.


def _build(document: Mapping[str, Any]) -> TrainConfig:
    sections: dict[str, Any] = {}
    hints = get_type_hints(TrainConfig)
    for name, hint in hints.items():
        if document.get(name) is None and type(None) in get_args(hint):
            continue
        kind = next(iter(get_args(hint)), hint)  # Of a section that may be missing, its class.
        values = dict(document.get(name) or {})
        if name == "training" and "learning_rate" in values:
            values.setdefault("lr", values.pop("learning_rate"))
        if name == "data" and "data_files" in values:
            values.setdefault("files", values.pop("data_files"))
        if name == "checkpoint" and values.get("nvme_path") is None:
            values["nvme_path"] = os.environ.get("CHECKPOINT_DIR") or None
        sections[name] = _section(kind, values)
    seq_length = (document.get("data") or {}).get("seq_length")
    if seq_length and "seq_length" not in (document.get("model") or {}):
        from dataclasses import replace

        sections["model"] = replace(sections["model"], seq_length=seq_length)
    return TrainConfig(**sections)


def _section(kind: type[T], values: Mapping[str, Any]) -> T:
    """The known keys of a section; the validator has warned of the others."""
    hints = get_type_hints(kind)
    known = {f.name for f in fields(kind)}  # type: ignore[arg-type]
    chosen = {}
    for name, value in values.items():
        if name in known and value is not None:
            if get_origin(hints[name]) is tuple:
                value = tuple([value] if isinstance(value, str) else value)
            elif isinstance(value, str) and float in (hints[name], *get_args(hints[name])):
                value = float(value)  # The validator has found that it is one, and has warned.
            chosen[name] = value
    return kind(**chosen)


def coordinator_address(config: TrainConfig) -> str | None:
    """From the file, else from the environment. Raises `ConfigurationError` for what is none."""
    named = {"elastic.coordinator": config.elastic.coordinator}
    named |= {name: os.environ.get(name) for name in ("COORDINATOR_ADDR", "COORDINATOR_URL")}
    for name, address in named.items():
        if address:
            try:
                address_of(address)
            except ValueError as error:
                raise ConfigurationError(f"{name}: {error}") from None
            return address
    return None
