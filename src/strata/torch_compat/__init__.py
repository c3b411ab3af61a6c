"""Every private name of torch that Strata uses, in one place, checked once against the torch that is installed.

    elastic.py       torch's agent and its worker processes, with hooks that have public names
    rendezvous.py    its dynamic rendezvous: the shared state, the handler, how often it polls
    stores.py        its key-value stores
    images.py        the parts of `torch.save` and `torch.load` that lay out and check a `.pt` file
    checkpoints.py   what the files of PyTorch's distributed checkpoints are made of
    modules.py       whether a module or optimizer loads its state in torch's own way
    wrappers.py      what `torch.compile` and the like add to the names of a state
    loaders.py       the processes of a `DataLoader`
    dtensors.py      what a rank holds of a distributed tensor, and the store of its process group
    groups.py        threads of gloo that still need Python
    aborting.py      process groups that are aborted when a rank is lost
    flight_recorder.py  the last collectives, where torch keeps them
    lazy_dynamo.py   the compiler, imported when it is used

A module here calls `require` when it is imported, so a torch that has renamed something gives one error that says what is
missing, instead of an `AttributeError` in the middle of a recovery. What it does not look for is in `OPTIONAL`, with the reason.
Importing this package itself needs no torch.
"""

from __future__ import annotations

import importlib
from typing import Any, Final

from strata.errors import StrataError

OLDEST: Final = "2.7"
NEWEST: Final = "2.15"
"""The torch versions that Strata is tested with; those between them have the names below as well."""

_HOOKS = (
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
)

NAMES: Final[dict[str, tuple[str, ...]]] = {
    "elastic": (
        "torch.distributed.launcher.api:LocalElasticAgent._initialize_workers",
        "torch.distributed.launcher.api:LocalElasticAgent._monitor_workers",
        "torch.distributed.launcher.api:LocalElasticAgent._restart_workers",
        "torch.distributed.launcher.api:LocalElasticAgent._start_workers",
        "torch.distributed.launcher.api:LocalElasticAgent._shutdown",
        "torch.distributed.launcher.api:LocalElasticAgent._pcontext",
        "torch.distributed.launcher.api:LocalElasticAgent._remaining_restarts",
        "torch.distributed.elastic.agent.server.local_elastic_agent:start_processes",
        "torch.distributed.elastic.agent.server.api:SimpleElasticAgent._rendezvous",
        "torch.distributed.elastic.multiprocessing:MultiprocessContext._start",
        "torch.distributed.elastic.multiprocessing:MultiprocessContext._poll",
        "torch.distributed.elastic.multiprocessing:MultiprocessContext._close",
        "torch.distributed.elastic.multiprocessing:MultiprocessContext._pc",
        "torch.distributed.elastic.multiprocessing:MultiprocessContext._ret_vals",
        "torch.distributed.elastic.multiprocessing:MultiprocessContext._return_values",
        "torch.distributed.elastic.multiprocessing:MultiprocessContext._worker_finished_event",
        "torch.distributed.elastic.multiprocessing.api:SignalException",
        "torch.distributed.elastic.multiprocessing.api:_wrap",
    ),
    "rendezvous": (
        "torch.distributed.elastic.rendezvous.api:rendezvous_handler_registry._registry",
        *(
            f"torch.distributed.elastic.rendezvous.dynamic_rendezvous:{name}"
            for name in (
                "get_method_name",
                "DynamicRendezvousHandler._get_world",
                "DynamicRendezvousHandler._heartbeat_lock",
                "DynamicRendezvousHandler._op_executor",
                "DynamicRendezvousHandler._state_holder",
                "DynamicRendezvousHandler._this_node",
                "_Action.SYNC",
                "_BackendRendezvousStateHolder.sync",
                "_BackendRendezvousStateHolder._last_sync_time",
                "_DistributedRendezvousOpExecutor.run",
                "_DistributedRendezvousOpExecutor._node",
                "_DistributedRendezvousOpExecutor._settings",
                "_DistributedRendezvousOpExecutor._state",
                "_DistributedRendezvousOpExecutor._state_holder",
                "_NodeDesc",
                "_RendezvousContext",
                "_RendezvousState",
            )
        ),
    ),
    "stores": (
        "torch._C._distributed_c10d:HashStore",
        "torch._C._distributed_c10d:PrefixStore",
        "torch._C._distributed_c10d:Store",
        "torch._C._distributed_c10d:TCPStore",
        "torch.distributed.rendezvous:_create_c10d_store",
    ),
    "images": (
        "torch:_foreach_copy_",
        "torch._C:PyTorchFileReader.get_record_offset",
        "torch._C:PyTorchFileWriter.write_record_metadata",
        "torch._tensor:_rebuild_from_type_v2",
        "torch._utils:_rebuild_parameter",
        "torch._utils:_rebuild_tensor_v3",
        "torch._weights_only_unpickler:_get_allowed_globals",
        "torch._weights_only_unpickler:_get_user_allowed_globals",
    ),
    "checkpoints": (
        "torch.distributed.checkpoint.filesystem:_StorageInfo",
        "torch.distributed.checkpoint.metadata:_MEM_FORMAT_ENCODING",
        "torch.serialization:_get_layout",
    ),
    "modules": (
        "torch.nn:Module._load_from_state_dict",
        "torch.nn:Module._save_to_state_dict",
        "torch.nn:Module._buffers",
        "torch.nn:Module._non_persistent_buffers_set",
        "torch.nn:Module._parameters",
        *(f"torch.nn:Module.{name}" for name in _HOOKS),
        "torch.optim:Optimizer._process_value_according_to_param_policy",
        *(f"torch.optim:Optimizer._optimizer{name}" for name in _HOOKS[:2]),
        "torch.optim:Optimizer._optimizer_state_dict_pre_hooks",
        "torch.optim:Optimizer._optimizer_state_dict_post_hooks",
        "torch:Tensor._version",
    ),
    "dtensors": (
        "torch.distributed.distributed_c10d:_get_default_store",
        "torch._C._distributed_c10d:PrefixStore.underlying_store",
    ),
    "distributed_tensors": ("torch.distributed.tensor:DTensor._local_tensor",),
    "groups": (
        "torch.distributed:Reducer",
        "torch.distributed:Logger",
        "torch.distributed.distributed_c10d:_world.pg_map",
        "torch.distributed:ProcessGroup._get_backend",
        "torch.distributed:ProcessGroupGloo._Options._devices",
        "torch.distributed:ProcessGroupGloo._Options._timeout",
    ),
    "aborting": (
        "torch.distributed.distributed_c10d:_new_process_group_helper",
        "torch.distributed.distributed_c10d:_world.group_count",
        "torch.distributed.distributed_c10d:_world.pg_map",
        "torch.distributed:ProcessGroup._get_backend",
    ),
    "lazy_dynamo": ("torch._C:_set_deterministic_algorithms",),
    "loaders": ("torch.utils.data._utils.worker:_worker_loop",),
}
"""By the module that uses them: `module:name`, or `module:class.name`."""

OPTIONAL: Final[dict[str, dict[str, str]]] = {
    "elastic": {
        "torch.distributed.launcher.api:LocalElasticAgent._rdzv_handler": "only set, for the versions that read it",
        "torch.distributed.elastic.multiprocessing:MultiprocessContext._numa_options": "without it, none are passed on",
    },
    "images": {
        "torch._C._dynamo.guards:TensorGuards": "without it, tensors are compared one by one",
        "torch.cuda:_compile_kernel": "without it, devices copy tensor by tensor",
    },
    "dtensors": {
        "torch.distributed.tensor._api:DTensor._op_dispatcher": "what is not remembered need not be forgotten",
        "torch.distributed.tensor._redistribute:_gen_transform_infos": "the same",
        "torch._C:_clear_DTensor_sharding_propagator_cache": "the same",
    },
    "wrappers": {
        "torch._dynamo.eval_frame:OptimizedModule._orig_mod": "a name in files as well; tests compare it",
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper:CheckpointWrapper._checkpoint_wrapped_module": "the same",
        "torch.distributed.fsdp:FullyShardedDataParallel._fsdp_wrapped_module": "the same",
        "torch.nn:Module._extra_state": "the same, and a key of states",
    },
    "flight_recorder": {
        "torch._C._distributed_c10d:_dump_fr_trace_json": "without it, the next is asked",
        "torch._C._distributed_c10d:_dump_nccl_trace_json": "without it, no collectives are known",
    },
    "lazy_dynamo": {"torch:_dynamo": "looking for it would load it, which the module is there to avoid"},
}
"""In the same way: what is used and not looked for, and why."""


class UnsupportedTorch(StrataError):
    """This torch does not have what Strata stands on."""

    code = "unsupported_torch"

    def __init__(self, *, version: str, missing: tuple[str, ...]) -> None:
        super().__init__(
            f"torch {version} lacks names that this version of Strata uses: {', '.join(missing)}.",
            hint=f"Strata is tested with torch {OLDEST} to {NEWEST}: install one of these, or a newer Strata.",
        )
        self.version = version
        self.missing = missing


def missing(area: str) -> tuple[str, ...]:
    """What the installed torch lacks of one area."""
    return tuple(name for name in NAMES[area] if not _is_there(name))


def require(area: str) -> None:
    """Raises `UnsupportedTorch` where something of an area is missing."""
    lacking = missing(area)
    if lacking:
        import torch

        raise UnsupportedTorch(version=torch.__version__, missing=lacking)


def torch_version() -> tuple[int, int]:
    """Of the installed torch: major and minor."""
    import torch

    major, minor, *_ = torch.__version__.split(".")
    return int(major), int(minor)


def _is_there(name: str) -> bool:
    module, _, path = name.partition(":")
    try:
        owner: Any = importlib.import_module(module)
    except ImportError:
        return False
    *parents, last = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent, None)
    return hasattr(owner, last) or any(_announces(kind, last) for kind in getattr(owner, "__mro__", ()))


def _announces(kind: type, name: str) -> bool:
    """Whether objects of a class get it when they are made."""
    code = getattr(kind.__init__, "__code__", None)  # type: ignore[misc]
    return name in getattr(kind, "__annotations__", {}) or name in getattr(code, "co_names", ())
