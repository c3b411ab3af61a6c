"""Where a training process stands among the others, and how it joins and leaves them.

Guarantees: set-up either ends with a working process group or with a `DistributedSetupError` that names the
cause and the next step; it never hangs longer than its time-out. Everything else also works in a process that
torchrun did not start, as a world of one. Does not launch anything: `to_torchrun_args` only says how.
"""

from __future__ import annotations

import datetime
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from strata.environment import nodes_wanted
from strata.rendezvous import TORCHRUN_ENVIRONMENT, rdzv_conf
from strata.trainer.errors import ConfigurationError, DistributedSetupError, TopologyChangeError
from strata.trainer.validation import validate_elastic_config

T = TypeVar("T")

REQUIRED_ENVIRONMENT = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
DEFAULT_TIMEOUT_S = 300.0

Backend = Literal["nccl", "gloo", "auto"]


@dataclass(frozen=True, slots=True)
class ElasticTrainingConfig:
    """How one elastic job is launched.

    `heartbeat_interval` and `heartbeat_timeout` (seconds) are what a worker promises the coordinator. The
    rendezvous has its own, much shorter keep-alive; `rdzv_conf` changes it.
    """

    min_nodes: int = 1
    max_nodes: int = 4
    rdzv_backend: str = "etcd-v2"
    rdzv_endpoint: str = "localhost:2379"
    rdzv_id: str = "elastic-training"
    heartbeat_interval: int = 30
    heartbeat_timeout: int = 90
    nproc_per_node: int | str = 1
    max_restarts: int = 100
    rdzv_conf: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        validate_elastic_config(
            {
                "min_nodes": self.min_nodes,
                "max_nodes": self.max_nodes,
                "rdzv_backend": self.rdzv_backend,
                "rdzv_endpoint": self.rdzv_endpoint,
                "rdzv_id": self.rdzv_id,
                "heartbeat_interval": self.heartbeat_interval,
                "heartbeat_timeout": self.heartbeat_timeout,
                "nproc_per_node": self.nproc_per_node,
                "max_restarts": self.max_restarts,
            }
        ).raise_if_invalid()

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> ElasticTrainingConfig:
        """What `NNODES` (or `MIN_NODES` and `MAX_NODES`), `NPROC_PER_NODE`, `RDZV_BACKEND`, `RDZV_ENDPOINT` and `RDZV_ID` say, and
        the defaults."""
        environ = os.environ if environ is None else environ
        given: dict[str, Any] = {
            name.lower(): environ[name]
            for name in ("RDZV_BACKEND", "RDZV_ENDPOINT", "RDZV_ID")
            if environ.get(name)
        }
        if nodes := nodes_wanted(environ):
            low, _, high = nodes.partition(":")
            given["min_nodes"], given["max_nodes"] = _count("NNODES", low), _count("NNODES", high or low)
        if workers := environ.get("NPROC_PER_NODE"):
            given["nproc_per_node"] = int(workers) if workers.isdecimal() else workers
        return cls(**given)

    def to_torchrun_args(self) -> list[str]:
        """The options for `torchrun`, to be followed by the script and its own arguments."""
        return [
            f"--nnodes={self.min_nodes}:{self.max_nodes}",
            f"--nproc-per-node={self.nproc_per_node}",
            f"--rdzv-backend={self.rdzv_backend}",
            f"--rdzv-endpoint={self.rdzv_endpoint}",
            f"--rdzv-id={self.rdzv_id}",
            f"--rdzv-conf={rdzv_conf(self.rdzv_conf)}",
            f"--max-restarts={self.max_restarts}",
        ]

    def to_torchrun_env(self) -> dict[str, str]:
        """What to add to torchrun's environment, so that restarts are clean."""
        return dict(TORCHRUN_ENVIRONMENT)

    def check_rendezvous(self, *, timeout_s: float = 2.0) -> None:
        """Raise if an etcd endpoint is unreachable. Worth doing before a launch; the others start on demand."""
        if not self.rdzv_backend.startswith("etcd"):
            return
        reasons = []
        for endpoint in self.rdzv_endpoint.split(","):
            host, _, port = endpoint.strip().rpartition(":")
            try:
                socket.create_connection((host.strip("[]"), int(port)), timeout=timeout_s).close()
            except (OSError, ValueError) as error:
                reasons.append(str(error))
            else:
                return
        raise DistributedSetupError.etcd_unreachable(self.rdzv_endpoint, reason="; ".join(reasons))


@dataclass(frozen=True, slots=True)
class WorldInfo:
    """This process's place in the present world, as torchrun has set it."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    master_addr: str
    master_port: int

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def num_nodes(self) -> int:
        """Nodes that take part, when each runs as many workers as this one."""
        return -(-self.world_size // self.local_world_size)


def get_world_info() -> WorldInfo:
    """This process's place, from the environment. Raises where torchrun has not set it."""
    missing = [name for name in REQUIRED_ENVIRONMENT if not os.environ.get(name)]
    if missing:
        raise DistributedSetupError.missing_environment(missing)
    world_size = _env_int("WORLD_SIZE", least=1)
    return WorldInfo(
        rank=_env_int("RANK", least=0, most=world_size - 1),
        local_rank=_env_int("LOCAL_RANK", least=0),
        world_size=world_size,
        local_world_size=_env_int("LOCAL_WORLD_SIZE", default=world_size, least=1),
        master_addr=os.environ.get("MASTER_ADDR") or "localhost",
        master_port=_env_int("MASTER_PORT", default=29500),
    )


def setup_distributed_environment(
    backend: Backend = "auto", init_method: str | None = None, *, timeout_s: float | None = None
) -> WorldInfo:
    """Join the process group and say where this process stands in it. Calling it again changes nothing.

    `auto` takes nccl where this machine has a GPU for every local worker, else gloo. `init_method` is PyTorch's URL of the
    place to meet at; by default MASTER_ADDR and MASTER_PORT name it. The time-out holds for joining and for every
    collective after it; it defaults to NCCL_SOCKET_TIMEOUT, or five minutes.
    """
    if backend not in ("nccl", "gloo", "auto"):
        raise ConfigurationError(
            f"Unknown backend '{backend}'. Valid options: ['nccl', 'gloo', 'auto']", section="distributed"
        )
    world = get_world_info()
    import torch
    import torch.distributed as dist

    if dist.is_initialized():
        return world
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if backend == "auto":
        backend = "nccl" if gpus >= world.local_world_size and dist.is_nccl_available() else "gloo"
    if backend == "nccl":
        if world.local_rank >= gpus:
            raise DistributedSetupError(
                f"NCCL error in: local rank {world.local_rank} has no GPU, this machine has {gpus}",
                suggestions=(
                    "Check what the driver finds: nvidia-smi",
                    "Start fewer workers per node (--nproc-per-node), or use backend='gloo' on the CPU.",
                ),
            )
        torch.cuda.set_device(world.local_rank)
    if timeout_s is None:
        timeout_s = float(_env_int("NCCL_SOCKET_TIMEOUT", default=int(DEFAULT_TIMEOUT_S)))
    os.environ.setdefault("MASTER_ADDR", world.master_addr)
    os.environ.setdefault("MASTER_PORT", str(world.master_port))
    try:
        dist.init_process_group(
            backend=backend,
            init_method=init_method,
            rank=world.rank,
            world_size=world.world_size,
            timeout=datetime.timedelta(seconds=timeout_s),
            device_id=torch.device("cuda", world.local_rank) if backend == "nccl" else None,
        )
    except (
        RuntimeError,
        OSError,
        ValueError,  # Of a URL.
    ) as error:  # DistNetworkError, DistStoreError and DistBackendError are RuntimeErrors.
        address = init_method or f"{world.master_addr}:{world.master_port}"
        raise _setup_error(error, world=world, address=address, timeout_s=timeout_s) from error
    from strata.torch_compat.groups import settle_at_exit

    settle_at_exit()
    return world


def cleanup_distributed() -> None:
    """Leave the process group. Harmless when there is none."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        from strata.torch_compat.groups import destroy_groups

        destroy_groups()


def get_rank() -> int:
    return _env_int("RANK", default=0) if _group() is None else int(_group().get_rank())


def get_world_size() -> int:
    return _env_int("WORLD_SIZE", default=1) if _group() is None else int(_group().get_world_size())


def is_main_process() -> bool:
    return get_rank() == 0


def barrier() -> None:
    """Wait for every rank; at once in a world of one."""
    if (dist := _group()) is not None:
        dist.barrier()


def broadcast_object(obj: T, src: int = 0) -> T:
    """`obj` as rank `src` has it, on every rank."""
    if (dist := _group()) is None:
        return obj
    box: list[Any] = [obj if dist.get_rank() == src else None]
    dist.broadcast_object_list(box, src=src)
    received: T = box[0]
    return received


def ensure_enough_nodes(world: WorldInfo, *, min_nodes: int, previous_world_size: int | None = None) -> None:
    """Refuse to train in a world smaller than the job was declared for."""
    if world.num_nodes < min_nodes:
        raise TopologyChangeError.below_min_nodes(
            old_world_size=world.world_size if previous_world_size is None else previous_world_size,
            new_world_size=world.world_size,
        )


def _group() -> Any:
    """`torch.distributed` where a process group exists, else None."""
    import torch.distributed as dist

    return dist if dist.is_available() and dist.is_initialized() else None


def _env_int(
    name: str, *, default: int | None = None, least: int | None = None, most: int | None = None
) -> int:
    text = os.environ.get(name, "")
    if not text and default is not None:
        return default
    number = _count(name, text)
    if (least is not None and number < least) or (most is not None and number > most):
        limits = f"from {least} to {most}" if most is not None else f"of at least {least}"
        raise DistributedSetupError.invalid_environment(name, text, limits=limits)
    return number


def _count(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise DistributedSetupError.invalid_environment(name, text) from None


def _setup_error(
    error: Exception, *, world: WorldInfo, address: str, timeout_s: float
) -> DistributedSetupError:
    """The cause of a failed `init_process_group`, in words. PyTorch distinguishes them only by text."""
    text = str(error)
    if "EADDRINUSE" in text or "ddress already in use" in text:
        return DistributedSetupError.address_in_use(address=address)
    if "timed out" in text.lower() or "timeout" in text.lower():
        return DistributedSetupError.timed_out(
            rank=world.rank, world_size=world.world_size, address=address, timeout_s=timeout_s
        )
    if "nccl" in text.lower():
        return DistributedSetupError.nccl_failed(text.splitlines()[0].removeprefix("NCCL error in: "))
    return DistributedSetupError(
        f"Rank {world.rank} of {world.world_size} could not join the others at {address}: {text.splitlines()[0]}",
        suggestions=(
            f"Check that the node of rank 0 listens there: nc -zv {world.master_addr} {world.master_port}",
            "After a restart: set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun",
        ),
    )
