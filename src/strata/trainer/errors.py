"""What can go wrong in elastic training, each with the next steps to try.

Every error takes its facts as keyword fields and builds its own text: `message` is one line that names what
happened, `suggestions` says what to do about it, `str(error)` is both. The first positional argument is always
the reason, so an error survives pickling and PyTorch's re-raise from a data loader process; `message` is another
name for it, as `config_key`, `file_path` and `checkpoint_path` are for what their errors are about. Arguments have the
order of earlier versions. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

from strata.errors import StrataError


class ElasticTrainingError(StrataError):
    """Base of everything the harness raises on purpose."""

    code = "elastic_training"
    usual_suggestions: ClassVar[tuple[str, ...]] = ()
    opening: ClassVar[str] = "%s"
    """Of the text, where it is known what the error is about."""

    def __init__(
        self,
        reason: str = "",
        *,
        about: str | None = None,
        suggestions: Iterable[str] | None = None,
        message: str = "",
    ) -> None:
        self.reason = reason or message
        self.suggestions = self.usual_suggestions if suggestions is None else tuple(suggestions)
        super().__init__(
            self.reason if about is None else f"{self.opening % about}: {self.reason}",
            hint="\n".join(f"  - {suggestion}" for suggestion in self.suggestions),
        )

    def __str__(self) -> str:
        return f"{self.message}\n{self.hint}" if self.hint else self.message


class ConfigurationError(ElasticTrainingError):
    """A setting is missing, unknown or out of range."""

    code = "configuration"
    opening = "Configuration error in '%s'"
    usual_suggestions = ("Check the whole file at once: strata validate config.yaml",)

    def __init__(
        self,
        reason: str = "",
        section: str | None = None,
        suggestions: Iterable[str] | None = None,
        *,
        message: str = "",
        config_key: str | None = None,
    ) -> None:
        self.section = config_key if section is None else section
        super().__init__(reason, about=self.section, suggestions=suggestions, message=message)

    @property
    def config_key(self) -> str | None:
        return self.section


_TORCHRUN = (
    "Start it with torchrun, which sets them: torchrun --nproc-per-node=4 train.py --config config.yaml"
)
_MASTER_ADDR = (
    "MASTER_ADDR must be the address of the node of rank 0 (hostname -I there); "
    "on one machine: MASTER_ADDR=localhost"
)
_NCCL_DEBUG = "Ask NCCL what it tried: NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=ALL torchrun ..."
_LONGER = "Allow slow networks more time: setup_distributed_environment(timeout_s=600)"


class DistributedSetupError(ElasticTrainingError, RuntimeError):
    """This process could not join the others. Also a `RuntimeError`, as PyTorch users expect here."""

    code = "distributed_setup"
    COMMON_ISSUES: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("RANK", "LOCAL_RANK", "WORLD_SIZE"), _TORCHRUN),
        "MASTER_ADDR": _MASTER_ADDR,
        "MASTER_PORT": "MASTER_PORT must be a free port of the node of rank 0: MASTER_PORT=29500",
        "NCCL": _NCCL_DEBUG,
        "timeout": _LONGER,
    }
    """What to do about a variable that is missing, or about a word in PyTorch's message."""

    def __init__(
        self,
        reason: str = "",
        missing_vars: Sequence[str] = (),
        context: Mapping[str, Any] | None = None,
        suggestions: Iterable[str] | None = None,
        *,
        message: str = "",
    ) -> None:
        self.missing_vars = list(missing_vars)
        self.context = dict(context or {})
        if suggestions is None:
            known = (self.COMMON_ISSUES[name] for name in self.missing_vars if name in self.COMMON_ISSUES)
            suggestions = dict.fromkeys(known)
        super().__init__(reason, suggestions=suggestions, message=message)

    @classmethod
    def missing_environment(cls, names: Sequence[str]) -> DistributedSetupError:
        """The process was not started by torchrun."""
        return cls(
            f"Missing required environment variables: {list(names)}",
            missing_vars=names,
            suggestions=(
                _TORCHRUN,
                "On several nodes add: --nnodes=2 --rdzv-backend=etcd --rdzv-endpoint=HOST:2379 --rdzv-id=JOB",
            ),
        )

    @classmethod
    def invalid_environment(cls, name: str, value: str, *, limits: str = "") -> DistributedSetupError:
        """A variable that torchrun sets to a number holds something else."""
        wanted = f"a whole number {limits}".rstrip()
        return cls(
            f"Environment variable {name} must be {wanted}, not {value!r}",
            suggestions=("Unset it and let torchrun set it.",),
        )

    @classmethod
    def timed_out(
        cls, *, rank: int, world_size: int, address: str, timeout_s: float
    ) -> DistributedSetupError:
        """The other ranks did not all appear in time."""
        return cls(
            f"Distributed initialization timed out: rank {rank} of {world_size} waited {timeout_s:g} s at {address}",
            suggestions=(
                _MASTER_ADDR,
                f"Check that every node can reach it and no firewall is in between: nc -zv {address.replace(':', ' ')}",
                "With several network interfaces, choose one: GLOO_SOCKET_IFNAME=eth0 NCCL_SOCKET_IFNAME=eth0",
                _LONGER,
            ),
        )

    @classmethod
    def address_in_use(cls, *, address: str) -> DistributedSetupError:
        """Another process listens where rank 0 wanted to."""
        port = address.rpartition(":")[2]
        return cls(
            f"Address already in use: {address}",
            suggestions=(
                f"Find the process that holds the port: lsof -i :{port} (an earlier run, perhaps), and end it",
                "Or use another port: torchrun --master-port=29501 ...",
            ),
        )

    @classmethod
    def nccl_failed(cls, detail: str) -> DistributedSetupError:
        """NCCL could not set up its channels between the GPUs."""
        return cls(
            f"NCCL error in: {detail}",
            suggestions=(
                "Check that the driver answers on every node: nvidia-smi",
                _NCCL_DEBUG,
                "With several network interfaces, choose one: NCCL_SOCKET_IFNAME=eth0 torchrun ...",
                "All nodes need the same NCCL version, and port 29500 open between them.",
            ),
        )

    @classmethod
    def etcd_unreachable(cls, endpoint: str, *, reason: str = "") -> DistributedSetupError:
        """The rendezvous endpoint does not answer."""
        return cls(
            f"Failed to connect to etcd at {endpoint}" + (f": {reason}" if reason else ""),
            suggestions=(
                "Start one: ./scripts/start_etcd.sh start",
                f"Check that it is healthy: curl http://{endpoint}/health",
                "Or do without: `strata torchrun` on one machine, --rdzv-backend=strata with a running coordinator on several",
            ),
        )


class CheckpointError(ElasticTrainingError):
    """Base of what can go wrong with a checkpoint."""

    code = "checkpoint"
    path: str | None = None

    @property
    def checkpoint_path(self) -> str | None:
        return self.path


class CheckpointSaveError(CheckpointError):
    """A checkpoint was not written. What was there before is untouched."""

    code = "checkpoint_save"

    def __init__(
        self,
        reason: str = "",
        path: str | None = None,
        tier: str | None = None,
        original_error: BaseException | None = None,
        *,
        suggestions: Iterable[str] | None = None,
        message: str = "",
        checkpoint_path: str | None = None,
    ) -> None:
        self.tier = None if tier is None else tier.upper()
        self.path = path = checkpoint_path if path is None else path
        prefix = "" if self.tier is None else f"[{self.tier}] "
        where = "" if path is None else f" to '{path}'"
        # With neither fact given the reason is already the whole text (see the module's note on pickling).
        is_bare = self.tier is None and path is None
        usual = _save_suggestions(reason or message, tier=self.tier, path=path)
        super().__init__(
            reason,
            about=None if is_bare else f"{prefix}Failed to save checkpoint{where}",
            suggestions=usual if suggestions is None else suggestions,
            message=message,
        )
        if original_error is not None:
            self.__cause__ = original_error

    @property
    def original_error(self) -> BaseException | None:
        """What the save failed of. Does not survive pickling."""
        return self.__cause__


class CheckpointLoadError(CheckpointError):
    """A checkpoint exists but could not be restored."""

    code = "checkpoint_load"
    usual_suggestions = (
        "If the file is damaged remove it: the next older checkpoint is taken instead.",
        "If the model has changed since: load_checkpoint_to_model(state, model, optimizer, strict=False)",
        "Skip memory and take the copy on disk or in S3: manager.load_checkpoint(tier=CheckpointTier.NVME)",
        "If it needs full unpickling and you made it yourself: CheckpointLoadConfig(trusted_source=True)",
    )

    def __init__(
        self,
        reason: str = "",
        path: str | None = None,
        tier: str | None = None,
        suggestions: Iterable[str] | None = None,
        *,
        message: str = "",
        checkpoint_path: str | None = None,
    ) -> None:
        self.path = checkpoint_path if path is None else path
        self.tier = None if tier is None else tier.upper()
        prefix = "" if self.tier is None else f"[{self.tier}] "
        where = "" if self.path is None else f" from '{self.path}'"
        is_bare = self.tier is None and self.path is None
        about = None if is_bare else f"{prefix}Failed to load checkpoint{where}"
        super().__init__(reason, about=about, suggestions=suggestions, message=message)

    @classmethod
    def missing_keys(cls, path: str, keys: Iterable[str]) -> CheckpointLoadError:
        """The file opened, but is no complete checkpoint."""
        return cls(f"Missing required keys: {_braces(keys)}", path=path)


class CheckpointValidationError(CheckpointError):
    """The content of a checkpoint is not what a checkpoint must hold."""

    code = "checkpoint_validation"
    opening = "Checkpoint '%s' is not valid"
    usual_suggestions = ("Restore an older one, or another tier's copy of it.",)

    def __init__(
        self,
        reason: str = "",
        missing_keys: Iterable[str] = (),
        invalid_keys: Iterable[str] = (),
        *,
        path: str | None = None,
        suggestions: Iterable[str] | None = None,
        message: str = "",
        checkpoint_path: str | None = None,
    ) -> None:
        self.path = checkpoint_path if path is None else path
        self.missing_keys, self.invalid_keys = list(missing_keys), list(invalid_keys)
        named = {"missing": self.missing_keys, "invalid": self.invalid_keys}
        keys = "; ".join(f"{what}: {', '.join(map(repr, names))}" for what, names in named.items() if names)
        reason = f"{reason or message} ({keys})" if keys else reason
        super().__init__(reason, about=self.path, suggestions=suggestions, message=message)

    @classmethod
    def missing_state(cls, of: str, *names: str, found: Iterable[str] = ()) -> CheckpointValidationError:
        """A saved state that lacks what cannot be done without."""
        there = ", ".join(sorted(map(str, found))) or "nothing"
        error = cls(
            f"The saved state of {of} has no {', '.join(map(repr, names))}; it has {there}",
            suggestions=(
                "Add what is missing to the state before loading it, if you know it.",
                "Or leave this part out: the weights do not depend on it.",
            ),
        )
        error.missing_keys = list(names)
        return error


class MemoryLimitExceeded(CheckpointError):
    """A memory snapshot does not fit in its budget. The snapshots already held are kept."""

    code = "memory_limit_exceeded"
    usual_suggestions = (
        "Raise the limit: MemorySnapshotBackend(max_memory_mb=...)",
        "Keep fewer snapshots: MemorySnapshotBackend(max_snapshots=1)",
        "Or do without them: checkpoint.memory_snapshot_interval: 0, and a shorter checkpoint_interval",
    )

    def __init__(
        self, reason: str = "", *, required_mb: float = 0.0, available_mb: float = 0.0, message: str = ""
    ) -> None:
        self.required_mb = required_mb
        self.available_mb = available_mb
        super().__init__(reason, message=message)

    @classmethod
    def for_snapshot(cls, *, required_mb: float, available_mb: float) -> MemoryLimitExceeded:
        return cls(
            f"Cannot save snapshot: {required_mb:.1f}MB required, but only {available_mb:.1f}MB available",
            required_mb=required_mb,
            available_mb=available_mb,
        )


class TopologyChangeError(ElasticTrainingError):
    """The world changed and training cannot continue in the new one."""

    code = "topology_change"

    def __init__(
        self,
        reason: str = "",
        old_world_size: int | None = None,
        new_world_size: int | None = None,
        *,
        suggestions: Iterable[str] | None = None,
        message: str = "",
    ) -> None:
        self.old_world_size = old_world_size
        self.new_world_size = new_world_size
        is_known = old_world_size is not None and new_world_size is not None
        change = f"Topology change ({old_world_size} -> {new_world_size} workers) failed"
        super().__init__(reason, about=change if is_known else None, suggestions=suggestions, message=message)

    @classmethod
    def below_min_nodes(cls, *, old_world_size: int, new_world_size: int) -> TopologyChangeError:
        """Too few workers are left."""
        return cls(
            "World size below min_nodes",
            old_world_size=old_world_size,
            new_world_size=new_world_size,
            suggestions=(
                "Start the lost workers again, or new ones: the job continues once enough have joined.",
                "If fewer are acceptable lower elastic.min_nodes",
                "See why they left: strata logs --level error",
            ),
        )

    @classmethod
    def no_checkpoint(cls) -> TopologyChangeError:
        """Every tier is empty although training had started."""
        return cls(
            "No checkpoint available for recovery",
            suggestions=(
                "Enable checkpoints: checkpoint.checkpoint_interval: 500, checkpoint.memory_snapshot_interval: 50",
                "See what exists: strata checkpoint ls PATH (a local folder or s3://bucket/prefix)",
            ),
        )


class DataLoadingError(ElasticTrainingError):
    """Training data could not be read."""

    code = "data_loading"
    opening = "Failed to load data from '%s'"

    def __init__(
        self,
        reason: str = "",
        source: str | None = None,
        suggestions: Iterable[str] | None = None,
        *,
        message: str = "",
        file_path: str | None = None,
    ) -> None:
        self.source = file_path if source is None else source
        super().__init__(reason, about=self.source, suggestions=suggestions, message=message)

    @property
    def file_path(self) -> str | None:
        return self.source

    @classmethod
    def index_not_found(cls, source: str, *, command: str) -> DataLoadingError:
        """The data are there, their token index is not; `command` builds it."""
        return cls("Token index file not found", source=source, suggestions=(f"Build it first: {command}",))

    @classmethod
    def missing_text_key(cls, key: str, *, record: str, found: Sequence[str]) -> DataLoadingError:
        """A record has no field of the expected name."""
        return cls(
            f"KeyError: {key!r}",
            suggestions=(
                f"{record} has the available keys {', '.join(map(repr, found)) or 'no keys'}",
                f'Name the right one: data.text_key: "{found[0] if found else "content"}" '
                "(--text-key on the command line)",
                f'Or rewrite the data as {{"{key}": "..."}} on each line',
            ),
        )


def _braces(keys: Iterable[str]) -> str:
    """Keys as a set prints them, in a stable order."""
    return "{" + ", ".join(repr(key) for key in sorted(keys)) + "}"


def _save_suggestions(reason: str, *, tier: str | None, path: str | None) -> tuple[str, ...]:
    if tier == "MEMORY":
        return ("Lower checkpoint.keep_last_n, or set checkpoint.memory_snapshot_interval: 0",)
    if tier == "S3":
        return (
            "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (or run: aws configure; or attach an IAM role)",
            "The key needs s3:GetObject, s3:PutObject, s3:DeleteObject and s3:ListBucket on the bucket",
            "Check all of these at once: strata doctor --s3-bucket BUCKET",
        )
    where = path or "the checkpoint folder"
    folder = where.rpartition("/")[0] or where
    if "No space left" in reason or "quota" in reason.lower():
        return (
            f"See what is free: df -h {folder}",
            "Keep fewer checkpoints: checkpoint.keep_last_n: 3, or remove old ones",
        )
    return (f"Check that the folder exists and is writable: mkdir -p {folder} && ls -la {folder}",)
