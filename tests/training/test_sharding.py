"""What cannot be saved shard by shard is refused by its type, with the name of what to use instead."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import distributed, nn
from torch.utils.data import TensorDataset

import strata
from strata.training.sharded.kinds import UnsupportedSharding, refuse_unsupported

# What torch imports for FSDP1 and ZeRO uses parts of itself that it wants to remove.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:FSDP is switching:UserWarning"),
]


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("inner", [False, True])
def test_fsdp1_is_refused_wherever_it_is(inner: bool) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    sharded = FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu"))
    model = nn.Sequential(nn.Linear(4, 4), sharded) if inner else sharded
    with pytest.raises(UnsupportedSharding, match=r"FSDP1.*fully_shard") as refused:
        refuse_unsupported(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert ("its module '1'" in str(refused.value)) is inner


class Wrapper:
    def __init__(self, optimizer: object) -> None:
        self.optimizer = optimizer


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("wrapped", [False, True])
def test_zero_is_refused_also_inside_a_wrapper(wrapped: bool) -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = nn.Linear(4, 4)
    zero = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    with pytest.raises(UnsupportedSharding, match=r"ZeroRedundancyOptimizer.*fully_shard"):
        refuse_unsupported(model, Wrapper(zero) if wrapped else zero)


@pytest.mark.usefixtures("process_group")
def test_what_is_saved_beside_the_model_is_refused_on_entering_too() -> None:
    """An average in FSDP1, or a second optimizer, would make the first save hang or fail."""
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.optim import ZeroRedundancyOptimizer

    average = FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu"))
    second = ZeroRedundancyOptimizer(nn.Linear(4, 4).parameters(), torch.optim.SGD, lr=0.1)
    for item, reason in (
        (average, r"extra\['kept'\] is sharded with FSDP1.*fully_shard"),
        (second, r"extra\['kept'\] is a ZeroRedundancyOptimizer.*fully_shard"),
    ):
        model = nn.Linear(1, 1)
        loader = strata.ElasticLoader(
            TensorDataset(torch.zeros(4, 1)), strata.ElasticSampler(4, global_batch_size=2, dataset="numbers")
        )
        job = strata.elastic(
            model=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data=loader,
            extra={"kept": item},
            checkpoints=[],
            max_steps=1,
        )
        with pytest.raises(UnsupportedSharding, match=reason), job:
            raise AssertionError("it was taken")


def test_deepspeed_is_refused() -> None:
    engine = type("DeepSpeedEngine", (nn.Module,), {"__module__": "deepspeed.runtime.engine"})()
    with pytest.raises(UnsupportedSharding, match=r"DeepSpeedEngine.*FSDP2"):
        refuse_unsupported(engine, None)
    optimizer = type("DeepSpeedZeroOptimizer", (), {"__module__": "deepspeed.runtime.zero.stage3"})()
    with pytest.raises(UnsupportedSharding, match=r"DeepSpeedZeroOptimizer.*FSDP2"):
        refuse_unsupported(nn.Linear(1, 1), optimizer)


@pytest.mark.usefixtures("process_group")
def test_fsdp2_and_ddp_are_taken() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    mesh = init_device_mesh("cpu", (1,))
    sharded = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for module in [*sharded, sharded]:
        fully_shard(module, mesh=mesh)
    for model in (sharded, DistributedDataParallel(nn.Linear(4, 4))):
        refuse_unsupported(model, Wrapper(torch.optim.AdamW(model.parameters())))
