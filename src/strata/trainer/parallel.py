"""How the trainer's model is spread over the workers: sharded along `dp` (FSDP2), tensor parallel along `tp`.

The mesh is built from the world as it is, so after a resize it is another one; only `dp` changes with `auto`. Names and shapes
of parameters are those of the plain model, whatever the mesh. Every parameter is a DTensor of the same mesh, which is what
PyTorch's clipping of gradients asks for.
"""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from strata.core.text import counted
from strata.trainer.config import ParallelSection
from strata.trainer.errors import TopologyChangeError
from strata.trainer.model import GPT, Block


def sizes(section: ParallelSection, world_size: int) -> tuple[int, int]:
    """Data-parallel and tensor-parallel size in a world. Raises `TopologyChangeError` where they do not fill it."""
    tp = section.tp
    if world_size % tp:
        raise TopologyChangeError(
            f"{counted(world_size, 'worker')} cannot be divided into tensor-parallel groups of {tp}",
            suggestions=(f"Start a multiple of {tp} workers, or change parallel.tp",),
        )
    dp = world_size // tp if section.dp == "auto" else section.dp
    if dp * tp != world_size:
        raise TopologyChangeError(
            f"parallel.dp ({dp}) x parallel.tp ({tp}) is {counted(dp * tp, 'worker')}, and there are {world_size}",
            suggestions=(
                "Leave dp at auto: it follows the number of workers",
                f"Start {counted(dp * tp, 'worker')}",
            ),
        )
    if dp > 1 and tp > 1 and not section.fsdp:
        raise TopologyChangeError(
            f"parallel.fsdp is false, and {dp} tensor-parallel groups must exchange their gradients",
            suggestions=(
                "Set parallel.fsdp: true, which shards the model between the groups",
                f"Start {tp} workers",
            ),
        )
    return dp, tp


def build_mesh(section: ParallelSection | None, world_size: int, device: str) -> DeviceMesh | None:
    """The mesh of this world; None for plain DDP. Collective."""
    if section is None:
        return None
    dp, tp = sizes(section, world_size)
    if tp == 1 and not section.fsdp:
        return None
    return init_device_mesh(device, (dp, tp), mesh_dim_names=("dp", "tp"))


def spread(model: GPT, mesh: DeviceMesh, *, fsdp: bool, compiled: bool) -> None:
    """Shard the model in place, block by block: no device ever holds more of it than one block and its own shards."""
    if mesh["tp"].size() > 1:
        _split_tensors(model, mesh["tp"])
    if compiled:
        for block in model.blocks:
            block.compile()
    if fsdp:
        from torch.distributed.fsdp import fully_shard

        for block in model.blocks:
            fully_shard(block, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])


def _split_tensors(model: GPT, mesh: DeviceMesh) -> None:
    """Each rank of a group has some of the heads and of the feed-forward layer's columns.

    The queries, keys and values of a head are apart in one matrix, whose columns are divided as they come: what each rank has
    computed is gathered, and it continues with its own heads.
    """
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        PrepareModuleOutput,
        RowwiseParallel,
        parallelize_module,
    )

    for block in cast("list[Block]", model.blocks):
        gather = PrepareModuleInput(
            input_layouts=Shard(-1), desired_input_layouts=Replicate(), use_local_output=False
        )
        own_heads = PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(3))
        parallelize_module(
            block,
            mesh,
            {
                "qkv": ColwiseParallel(use_local_output=False),
                "by_head": gather,
                "attention_out": RowwiseParallel(),
                "mlp_in": ColwiseParallel(),
                "mlp_out": RowwiseParallel(),
            },
        )
        parallelize_module(block, mesh, {"by_head": own_heads})
        _replicate(block.before_attention, mesh)
        _replicate(block.before_mlp, mesh)
    for module in (model.tokens, model.positions, model.norm, model.head):
        _replicate(module, mesh)
    model.head.weight = model.tokens.weight  # Tied as before; each was made a tensor of the mesh by itself.


def _replicate(module: nn.Module, mesh: DeviceMesh) -> None:
    """All ranks of a group compute the same with the same parameters, which are tensors of the mesh like the others."""
    from torch.distributed.tensor import DTensor, Replicate, distribute_module

    def enter(_: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
        return tuple(DTensor.from_local(x, mesh, [Replicate()], run_check=False) for x in inputs)

    def leave(_: nn.Module, output: Any, mesh: DeviceMesh) -> Any:
        return output.to_local()

    distribute_module(module, mesh, input_fn=enter, output_fn=leave)


def clip(model: nn.Module, limit: float) -> float:
    """Scale the gradients down to this norm over all shards; the norm they had. Collective where they are sharded."""
    parameters = list(model.parameters())
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = nn.utils.get_total_norm(gradients)
    whole: Tensor = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    nn.utils.clip_grads_with_norm_(parameters, limit, whole)
    return float(whole)


def exchange_gradients(model: nn.Module, *, wanted: bool) -> None:
    """Whether the next backward pass of a model that FSDP2 shards exchanges its gradients; others are left alone."""
    if (switch := getattr(model, "set_requires_gradient_sync", None)) is not None:
        switch(wanted)
