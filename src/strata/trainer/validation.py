"""Everything that is wrong with a configuration, found at once and before anything starts.

Errors are settings that cannot work; warnings are settings that work but probably not as meant, among them unknown keys,
with the nearest known one, and those that another program reads. Each names its key path. Nothing is
changed, nothing is contacted unless `validate_s3` asks for it. The tables below are the one list of keys the trainer knows,
as JSON Schema, and of what other programs call them; `strata.validation` compares, the texts users know are here, and so are
the rules between keys.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from strata.errors import StrataError
from strata.rendezvous import RENDEZVOUS_BACKENDS
from strata.trainer.errors import ConfigurationError
from strata.trainer.scaling import (
    ROUNDING_MODES,
    STRATEGIES,
    GradAccumulationConfig,
    ScalingRule,
    accumulation_steps,
    unknown_strategy,
)
from strata.validation import Schema, Violation, closest, violations
from strata.worker.address import coordinator_address

if TYPE_CHECKING:
    from strata.data.tokens.index import TokenIndex


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

    valid: bool = True
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


def _or_null(schema: Schema) -> Schema:
    types = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    return {**schema, "type": [*types, "null"]}


def _one_of(*names: str) -> Schema:
    return {"type": "string", "enum": list(names)}


def _integer_or(*names: str) -> Schema:
    return {
        "title": f"a whole number or {names[0] if len(names) == 1 else f'one of {list(names)}'}",
        "type": ["integer", "string"],
        "if": {"type": "string"},
        "then": {"enum": list(names)},
    }


INTEGER: Schema = {"type": "integer"}
COUNT: Schema = {"type": "integer", "minimum": 1}
POSITIVE_INT: Schema = {"type": "integer", "exclusiveMinimum": 0}
NOT_NEGATIVE_INT: Schema = {"type": "integer", "minimum": 0}
POSITIVE: Schema = {"type": "number", "exclusiveMinimum": 0}
NOT_NEGATIVE: Schema = {"type": "number", "minimum": 0}
FRACTION: Schema = {"type": "number", "minimum": 0, "maximum": 1}
FLAG: Schema = {"type": "boolean"}
TEXT: Schema = {"type": "string", "pattern": r"\S"}
OPTIONAL_TEXT = _or_null(TEXT)
NAMES: Schema = {
    "title": "a list of names",
    "type": ["string", "array"],
    "pattern": r"\S",
    "items": {"type": "string", "pattern": r"\S"},
}
SEED: Schema = {"type": "integer", "minimum": -(2**63), "maximum": 2**64 - 1}
"""What torch takes."""
BETAS: Schema = {
    "title": "two numbers, each at least 0 and below 1",
    "type": "array",
    "items": {"type": "number", "minimum": 0, "exclusiveMaximum": 1},
    "minItems": 2,
    "maxItems": 2,
}

Kind = Literal["int", "number", "str", "bool", "list", "names", "mapping", "int_or_str"]


def Key(
    *,
    kind: Kind,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    choices: tuple[str, ...] = (),
    nullable: bool = False,
) -> Schema:
    """What one setting may be, in the names that this table had before it was JSON Schema."""
    schemas: dict[Kind, Schema] = {
        "int": INTEGER,
        "number": {"type": "number"},
        "str": _one_of(*choices) if choices else TEXT,
        "bool": FLAG,
        "list": {"type": "array"},
        "names": NAMES,
        "mapping": {"type": "object", "additionalProperties": True},
        "int_or_str": _integer_or(*choices) if choices else {"type": ["integer", "string"]},
    }
    limits = {"minimum": at_least, "exclusiveMinimum": above, "maximum": at_most}
    schema = {**schemas[kind], **{name: limit for name, limit in limits.items() if limit is not None}}
    return _or_null(schema) if nullable else schema


SECTIONS: dict[str, dict[str, Schema]] = {
    "model": {
        "name": TEXT,
        "vocab_size": _or_null(COUNT),
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
        "max_norm": _or_null(POSITIVE),
        "weight_decay": NOT_NEGATIVE,
        "betas": BETAS,
        "warmup_steps": NOT_NEGATIVE_INT,
        "min_lr_ratio": FRACTION,
        "seed": SEED,
        "precision": _one_of("fp32", "bf16"),
        "device": _one_of("auto", "cpu", "cuda"),
        "backend": _one_of("auto", "gloo", "nccl"),
        "log_interval": POSITIVE_INT,
        "deterministic": FLAG,
    },
    "data": {
        "files": NAMES,
        "data_files": NAMES,
        "index_file": OPTIONAL_TEXT,
        "tokenizer": TEXT,
        "text_key": TEXT,
        "seq_length": COUNT,
        "num_workers": NOT_NEGATIVE_INT,
        "shuffle": FLAG,
        "seed": INTEGER,
    },
    "checkpoint": {
        "checkpoint_interval": POSITIVE_INT,
        "memory_snapshot_interval": NOT_NEGATIVE_INT,
        "nvme_path": OPTIONAL_TEXT,
        "s3_bucket": _or_null({"type": "string", "pattern": r"\A[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]\Z"}),
        "s3_prefix": {"type": "string"},
        "s3_region": OPTIONAL_TEXT,
        "async_save": FLAG,
        "keep_last_n": COUNT,
        "async_save_policy": _one_of("warn", "fail", "retry"),
        "async_save_retries": NOT_NEGATIVE_INT,
        "async_save_retry_delay": NOT_NEGATIVE,
        "max_snapshots": COUNT,
        "max_memory_mb": _or_null(POSITIVE),
        "unreachable_timeout": POSITIVE,
    },
    "scaling": {
        "strategy": _one_of(*STRATEGIES),
        "scaling_rule": _one_of(*(rule.value for rule in ScalingRule)),
        "base_lr": POSITIVE,
        "base_batch_size": POSITIVE_INT,
        "base_world_size": COUNT,
        "warmup_steps": NOT_NEGATIVE_INT,
        "min_lr": NOT_NEGATIVE,
        "max_lr": POSITIVE,
        "target_global_batch_size": _or_null(POSITIVE_INT),
        "rounding_mode": _one_of(*ROUNDING_MODES),
    },
    "elastic": {
        "min_nodes": COUNT,
        "max_nodes": COUNT,
        "nproc_per_node": Key(kind="int_or_str", at_least=1, choices=("auto", "gpu", "cpu")),
        "max_restarts": NOT_NEGATIVE_INT,
        "rdzv_backend": _one_of(*RENDEZVOUS_BACKENDS),
        "rdzv_endpoint": TEXT,
        "rdzv_id": TEXT,
        "rdzv_conf": {"type": "object", "additionalProperties": True},
        "heartbeat_interval": POSITIVE,
        "heartbeat_timeout": POSITIVE,
        "hang_timeout": NOT_NEGATIVE,
        "shutdown_timeout": POSITIVE,
        "coordinator": OPTIONAL_TEXT,
        "job_id": TEXT,
    },
    "parallel": {
        "dp": Key(kind="int_or_str", at_least=1, choices=("auto",)),
        "tp": COUNT,
        "fsdp": FLAG,
    },
    "chaos": {
        "enabled": FLAG,
        "interval": POSITIVE,
        "duration": POSITIVE,
        "rto_threshold": POSITIVE,
        "kinds": NAMES,
        "seed": INTEGER,
        "single_kill": FLAG,
        "output": OPTIONAL_TEXT,
    },
}

SCHEMA: Schema = {
    "type": "object",
    "properties": {name: {"type": ["object", "null"], "properties": keys} for name, keys in SECTIONS.items()},
}
"""Of a whole configuration."""


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
        "parallelism": "parallel",
        "mesh": "parallel",
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
        "nhead": "n_head",
        "num_heads": "n_head",
        "num_attention_heads": "n_head",
        "block_size": "seq_length",
        "context_length": "seq_length",
        "max_seq_len": "seq_length",
        "max_seq_length": "seq_length",
        "max_position_embeddings": "seq_length",
        "vocabulary_size": "vocab_size",
        "activation_checkpointing": "gradient_checkpointing",
    },
    "training": {
        "grad_clip": "max_norm",
        "gradient_clip": "max_norm",
        "clip_grad_norm": "max_norm",
        "max_grad_norm": "max_norm",
        "gradient_clipping": "max_norm",
        "grad_clipping": "max_norm",
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
        "base_world_size": "scaling.base_world_size",
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
    "parallel": {
        "data_parallel": "dp",
        "data_parallel_size": "dp",
        "dp_size": "dp",
        "tensor_parallel": "tp",
        "tensor_parallel_size": "tp",
        "tp_size": "tp",
        "shard": "fsdp",
        "fsdp2": "fsdp",
    },
    "chaos": {"kill_interval": "interval", "rto": "rto_threshold", "report": "output"},
}
"""What people write from habit, by section (sections themselves under ""), where spelling alone does not show it. A key of
another section is written with it."""

ALIASES = (
    ("training.learning_rate", "training.lr"),
    ("training.learning_rate", "scaling.base_lr"),
    ("training.lr", "scaling.base_lr"),
    ("data.data_files", "data.files"),
    ("data.seq_length", "model.seq_length"),
)
"""Keys that stand for others, and count where those are not given."""

_LAUNCHER = "the trainer does not read it; give it to what starts the workers: strata torchrun "
ELSEWHERE = {
    "elastic.max_restarts": _LAUNCHER + "--max-restarts={}",
    "elastic.rdzv_backend": _LAUNCHER + "--rdzv-backend={}",
    "elastic.rdzv_endpoint": _LAUNCHER + "--rdzv-endpoint={}",
    "elastic.rdzv_id": _LAUNCHER + "--rdzv-id={}",
    "elastic.rdzv_conf": _LAUNCHER + "--rdzv-conf=KEY=VALUE",
    "elastic.heartbeat_interval": "the trainer does not read it; the coordinator does: STRATA_HEARTBEAT_INTERVAL={} strata serve",
    "elastic.heartbeat_timeout": "the trainer does not read it; the coordinator does: strata serve --heartbeat-timeout={}",
    "model.name": "it changes nothing: the trainer's model is a GPT, whatever its name",
}
"""Keys that a configuration may have for other programs, and who reads them."""


def validate_config(config: Mapping[str, Any], validate_s3: bool = False) -> ValidationResult:
    """Check a whole configuration. `validate_s3` also checks access to the bucket, with the credentials of this process."""
    check = _Check(config)
    check.sections()
    for across_keys in (
        _check_aliases,
        _check_elastic,
        _check_scaling,
        _check_checkpoint,
        _check_model,
        _check_parallel,
    ):
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
        check.error("training.max_steps", "max_steps or epochs must be set")
    for path, who in ELSEWHERE.items():
        if (value := check.value_of(path)) is not None:
            check.warn(path, who.format(value))
    chaos = check.value_of("chaos")
    if isinstance(chaos, Mapping) and chaos and chaos.get("enabled", True):
        check.warn("chaos", "the trainer does not read it; faults are injected by: strata chaos")
    known = {error.path for error in result.errors}
    errors = result.errors + [error for error in check.errors if error.path not in known]
    return ValidationResult(valid=not errors, errors=errors, warnings=result.warnings + check.warnings)


def validate_elastic_config(config: Mapping[str, Any]) -> ValidationResult:
    """Check what makes a training elastic: of a whole configuration its sections `elastic`, `checkpoint`, `scaling` and
    `training`; or the settings of the `elastic` section, given by themselves."""
    given: object = config
    if isinstance(given, Mapping) and not SECTIONS.keys().isdisjoint(given):
        sections = ("elastic", "checkpoint", "scaling", "training")
        given = {name: given[name] for name in sections if name in given}
    elif given is not None:
        given = {"elastic": given}
    check = _Check(given)
    check.sections()
    for across_keys in (_check_aliases, _check_elastic, _check_scaling, _check_checkpoint):
        across_keys(check)
    return check.result()


def validate_s3_access(bucket: str, region: str | None = None) -> ValidationResult:
    """Write, read, list and remove a small object in the bucket, and say what is not allowed."""
    from strata.diagnostics import probe_s3

    path = "checkpoint.s3_bucket"
    # Where nothing is allowed, it is so for one reason.
    failures = [Finding(path, failure) for failure in dict.fromkeys(probe_s3(bucket, region=region))]
    return ValidationResult(valid=not failures, errors=failures)


def validate_index(config: Mapping[str, Any]) -> ValidationResult:
    """What the token index says against a configuration, where this machine has it. Training may have it elsewhere, so that
    it is not here is no finding; whether it fits its sources is left to the trainer."""
    from strata.data.tokens.building.tokenizers import BYTES_NAME
    from strata.data.tokens.errors import TokenDataError
    from strata.data.tokens.index import TokenIndex

    check = _Check(config)
    files = check.value_of("data.files") or check.value_of("data.data_files")
    first = files if isinstance(files, str) else next(iter(files or ()), None)
    path = check.value_of("data.index_file") or (first and Path(str(first)).with_suffix(".index"))
    if not isinstance(path, str | Path) or not os.path.exists(path):
        return check.result()
    try:
        index = TokenIndex(path)
        meta = index.meta
    except TokenDataError as error:
        check.error("data.index_file", str(error))
        return check.result()
    text_key = check.value_of("data.text_key") or "text"
    if text_key != meta.text_key:
        check.error("data.text_key", f"the index holds the texts under {meta.text_key!r}, not {text_key!r}")
    try:
        other = other_tokenizer(index, str(check.value_of("data.tokenizer") or BYTES_NAME))
    except StrataError as error:  # Its file, or the library for it, may be where training is.
        other = OtherTokenizer(f"could not be compared: {error}")
    if other.is_certain:
        check.error("data.tokenizer", f"the index {other.reason}")
    elif other.reason:
        check.warn("data.tokenizer", f"the index {other.reason}; whether it fits is not known here")
    vocab_size = check.value_of("model.vocab_size")
    if isinstance(vocab_size, int) and (problem := vocabulary_problem(index, vocab_size)):
        check.error("model.vocab_size", problem)
    return check.result()


class OtherTokenizer(NamedTuple):
    """Why a tokenizer is not, or may not be, the one of an index."""

    reason: str = ""
    is_certain: bool = False


def other_tokenizer(index: TokenIndex, tokenizer: str) -> OtherTokenizer:
    """Without downloading any: what has another name may behave alike, unless one of the two is the built-in one."""
    from strata.data.tokens.building.tokenizers import BYTES_NAME, load_tokenizer
    from strata.data.tokens.errors import StaleIndex
    from strata.data.tokens.freshness import check_tokenizer

    meta = index.meta
    reason = f"was tokenized with {meta.tokenizer}, not with {tokenizer}"
    if tokenizer == BYTES_NAME or os.path.exists(tokenizer):
        try:
            check_tokenizer(index, load_tokenizer(tokenizer), ())
        except StaleIndex:
            return OtherTokenizer(reason, is_certain=True)
        return OtherTokenizer()
    if not meta.tokenizer_named or meta.tokenizer == tokenizer:
        return OtherTokenizer()
    return OtherTokenizer(reason, is_certain=meta.tokenizer == BYTES_NAME)


def vocabulary_problem(index: TokenIndex, vocab_size: int | None) -> str:
    """Why a model with this vocabulary cannot train on an index."""
    known = index.meta.vocab_size
    if vocab_size is None or (known is not None and vocab_size >= known):
        return ""
    largest = int(index.tokens.max())
    if largest < vocab_size:
        return ""
    return f"vocab_size ({vocab_size}) is too small for '{index.path}', which has tokens up to {largest}"


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
        """Every section and key by itself."""
        reported: set[str] = set()
        for violation in violations(SCHEMA, self._as_read()):
            path = ".".join(map(str, violation.path[:2]))
            if violation.keyword == "additionalProperties":
                self.warn(path, _unknown(*violation.path))
            elif path not in reported:
                reported.add(path)  # A list has one problem, however many of its items have it.
                self.error(path, self._problem(violation))

    def _problem(self, violation: Violation) -> str:
        match violation.path:
            case ():
                return f"The configuration must be a mapping of sections, not {_type_name(self.config)}"
            case (_,):
                kind = _type_name(violation.value)
                return f"must be a mapping of settings, not {kind} ({violation.value!r})"
            case (section, key):
                return key_problem(section, key, violation)
            case (section, key, *_):
                whole, value = SECTIONS[section][key], self.config[section][key]  # type: ignore[index]
                return _mistyped(key, whole, value)
        raise AssertionError(violation)

    def _as_read(self) -> object:
        """The configuration without what OmegaConf resolves later, and with numbers where they are written as text."""
        if not isinstance(self.config, Mapping):
            return self.config
        return {
            name: self._section_as_read(name, section)
            if isinstance(section, Mapping) and name in SECTIONS
            else section
            for name, section in self.config.items()
        }

    def _section_as_read(self, name: str, section: Mapping[str, Any]) -> dict[str, Any]:
        read = {}
        for key, value in section.items():
            schema = SECTIONS[name].get(key)
            if schema is not None and isinstance(value, str):
                if value.startswith("${"):
                    continue
                if "number" in schema["type"] and (number := _number(value)) is not None:
                    doubt = f"{key} is the text '{value}', read as {number:g}; write it with a point: 1.0e-4"
                    self.warn(f"{name}.{key}", doubt)
                    value = number
            read[key] = value
        return read


def section_problems(section: str, values: Mapping[str, Any]) -> list[str]:
    """What is wrong with settings of one section, each by itself: for callers who have them as Python values."""
    schema = {"type": "object", "properties": SECTIONS[section]}
    found = violations(schema, values)
    return [key_problem(section, violation.path[0], violation) for violation in found]


def key_problem(section: str, name: str, violation: Violation) -> str:
    """What is wrong with one setting, as users know it."""
    value, limit = violation.value, violation.limit
    match violation.keyword:
        case "type":
            return _mistyped(name, violation.schema, value)
        case "enum" if (section, name) == ("scaling", "strategy"):
            return unknown_strategy(value).reason
        case "enum":
            return f"Unknown {name} '{value}'. Valid options: {limit}"
        case "pattern" if not value.strip():
            return f"{name} cannot be empty"
        case "pattern" if value.startswith("s3://"):
            return f"{name} takes the bare name; put the rest in s3_prefix"
        case "pattern":
            return f"{name} ({value!r}) is not a valid bucket name"
        case "exclusiveMinimum":
            return f"{name} ({value}) must be positive"
        case "minimum" if limit == 0:
            return f"{name} ({value}) cannot be negative"
        case "minimum":
            return f"{name} ({value}) must be at least {limit:g}"
        case "maximum":
            return f"{name} ({value}) cannot exceed {limit:g}"
        case "minItems" | "maxItems":
            return _mistyped(name, violation.schema, value)
    raise AssertionError(violation)


_WANTED = {
    "integer": "a whole number",
    "number": "a number",
    "string": "text",
    "boolean": "true or false",
    "array": "a list",
    "object": "a mapping",
}


def _mistyped(name: str, schema: Schema, value: Any) -> str:
    if value is None:
        return f"{name} has no value"
    kinds = [schema["type"]] if isinstance(schema["type"], str) else schema["type"]
    if "number" in kinds and type(value) in (int, float):
        return f"{name} ({value}) must be a finite number"
    wanted = schema.get("title") or _WANTED[kinds[0]]
    return f"{name} must be {wanted}, not {_type_name(value)} ({value!r})"


def _check_aliases(check: _Check) -> None:
    for path, instead in ALIASES:
        value, counts = check.value_of(path), check.value_of(instead)
        if (
            None in (value, counts)
            or value == counts
            or any(str(each).startswith("${") for each in (value, counts))
        ):
            continue
        check.warn(path, f"it changes nothing ({value}), because {instead} ({counts}) is given too")


def _check_elastic(check: _Check) -> None:
    address = check.value_of("elastic.coordinator")
    if isinstance(address, str) and check.fine("elastic.coordinator"):
        try:
            coordinator_address(address)
        except ValueError as error:
            check.error("elastic.coordinator", str(error))
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
                f"target_global_batch_size ({target}) is not a multiple of batch_size x base_world_size ({at_once}): "
                + _samples_per_step(check, int(target), int(at_once)),
            )


def _samples_per_step(check: _Check, target: int, at_once: int) -> str:
    mode = check.value_of("scaling.rounding_mode")
    if mode is None or not check.fine("scaling.rounding_mode"):
        return "the last micro-batches of each step are smaller"
    config = GradAccumulationConfig(target, at_once, base_world_size=1, rounding_mode=mode)
    return f"each step will take {at_once * accumulation_steps(config, 1)} samples"


def _check_checkpoint(check: _Check) -> None:
    every = check.number("checkpoint.checkpoint_interval", 500)
    snapshot = check.number("checkpoint.memory_snapshot_interval", 50)
    steps = check.number("training.max_steps")
    if every is not None and snapshot and every % snapshot:
        check.warn(
            "checkpoint.memory_snapshot_interval",
            f"checkpoint_interval ({every}) is not a multiple of memory_snapshot_interval ({snapshot}): "
            "the two do not nest, and some steps are copied twice",
        )
    if every is not None and steps is not None and every > steps:
        check.warn(
            "checkpoint.checkpoint_interval",
            f"checkpoint_interval ({every}) exceeds max_steps ({steps}): only the last step is kept",
        )


def _check_model(check: _Check) -> None:
    width, heads = check.number("model.n_embd", 128), check.number("model.n_head", 4)
    if width is not None and heads is not None and width % heads:
        check.error("model.n_embd", f"n_embd ({width}) must be a multiple of n_head ({heads})")


def _check_parallel(check: _Check) -> None:
    if check.value_of("parallel") is not None and check.number("checkpoint.max_snapshots") == 1:
        check.error(
            "checkpoint.max_snapshots",
            "max_snapshots (1) must be at least 2 where the model is spread over workers: the last complete snapshot stays "
            "until there is another",
        )
    tp, heads = check.number("parallel.tp", 1), check.number("model.n_head", 4)
    if tp is not None and heads is not None and heads % tp:
        check.error(
            "parallel.tp",
            f"n_head ({heads}) must be a multiple of tp ({tp}): heads are divided between workers",
        )
    dp, workers = check.number("parallel.dp"), check.number("elastic.nproc_per_node")
    if tp is not None and dp is not None and tp > 1 and dp > 1 and check.value_of("parallel.fsdp") is False:
        check.error(
            "parallel.fsdp", f"fsdp must be true for {dp} tensor-parallel groups: they exchange gradients"
        )
    fewest, most = check.number("elastic.min_nodes", 1), check.number("elastic.max_nodes", 4)
    if tp is None or workers is None or fewest is None or most is None:
        return
    worlds = [int(nodes * workers) for nodes in range(int(fewest), int(most) + 1)]
    unfit = [world for world in worlds if (world % tp if dp is None else world != dp * tp)]
    wanted = f"a multiple of tp ({tp})" if dp is None else f"dp x tp ({dp * tp:g})"
    if worlds and len(unfit) == len(worlds):
        found = " or ".join(map(str, worlds[:4])) + (" …" if len(worlds) > 4 else "")
        check.error(
            "parallel.tp" if dp is None else "parallel.dp", f"no world this job can have is {wanted}: {found}"
        )
    elif unfit:
        check.warn(
            "parallel.tp" if dp is None else "parallel.dp",
            f"with {' or '.join(map(str, unfit[:4]))} workers this job waits for more: only {wanted} can train",
        )


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _unknown(section: object, key: object = None) -> str:
    """A section, or a key in one, that does not exist, with the one that was probably meant."""
    if key is None:
        return "unknown section" + nearest(section, SECTIONS, OTHER_NAMES[""])
    name = str(section)
    return "unknown key, it changes nothing" + nearest(
        key, SECTIONS[name], OTHER_NAMES[name], section=f"{name}."
    )


def nearest(
    name: object, known: Collection[str], other_names: Mapping[str, str] | None = None, *, section: str = ""
) -> str:
    """How a sentence about an unknown name ends. `section` is named before the one that was meant, unless that has its own."""
    other_names = other_names or {}
    lowered = str(name).lower().replace("-", "_")
    meant = other_names.get(lowered) or closest(lowered, known)
    if meant and "." not in meant:
        meant = section + meant
    return f" (did you mean '{meant}'?)" if meant else f"; known are {', '.join(known)}"


def _type_name(value: Any) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, Mapping):
        return "a mapping"
    names = {bool: "true or false", str: "text", int: "a whole number", float: "a fraction", list: "a list"}
    return names.get(type(value), type(value).__name__)
