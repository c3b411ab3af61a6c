"""Every kind of sharded state, interrupted and resumed: the same bits as if nothing had happened, under the names of DCP."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import distributed, nn
from torch._C._distributed_c10d import FileStore
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.utils.data import TensorDataset

import strata
from strata.checkpoint.catalog.naming import MODEL, OPTIMIZER
from strata.checkpoint.dcp import StrataStorageReader
from strata.checkpoint.errors import StateMismatch, UnsupportedState
from strata.checkpoint.export import export
from strata.checkpoint.image.nested import leaves
from strata.checkpoint.importing import adopt
from strata.checkpoint.sharded.parts import Span
from strata.checkpoint.sharded.plan import ShardPlan, chunks_of, flattened
from strata.checkpoint.sharded.restoring import ShardedSource
from strata.stores import open_store
from strata.stores.faulty import FaultyStore, Operation
from strata.training import ElasticJob, ElasticOptions
from strata.training.sharded.shards import ShardedState
from strata.training.state import TrainingState
from tests.training.loops import Crash, steps_in
from tests.training.shard_script import Block, Ema, full

# Of dynamo, which looks at everything.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")

SAMPLES, BATCH = 24, 4
STEPS, CRASH_AT, SAVE_EVERY = 6, 5, 3
"""The crash comes in step 5: memory has step 4, and the destination step 3."""


@pytest.fixture(scope="module", autouse=True)
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    store = FileStore(str(tmp_path_factory.mktemp("group") / "store"), 1)
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # So small are these tensors.
    yield
    torch.set_num_threads(threads)
    distributed.destroy_process_group()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm = nn.BatchNorm1d(6)
        self.last = nn.Linear(6, 1)
        self.table: torch.Tensor
        self.register_buffer("table", torch.full((2,), 0.25), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = self.last(self.norm(x)) * self.table.sum()
        return out


def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (1,), mesh_dim_names=("shard",))


M = TypeVar("M", bound=nn.Module)


def sharded(model: M, **options: Any) -> M:
    """Blocks by themselves, then the rest."""
    for block in getattr(model, "blocks", ()):
        fully_shard(block, mesh=mesh(), **options)
    fully_shard(model, mesh=mesh(), **options)
    return model


def adam(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.02, **options)


@dataclass
class Script:
    """Everything that a script makes, and one step of it."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: Any = None
    extra: dict[str, Any] = field(default_factory=dict)
    backward: Callable[[torch.Tensor], None] = torch.Tensor.backward
    step: Callable[[], object] | None = None
    """Of the optimizer."""
    after: Callable[[], None] = lambda: None

    @property
    def state(self) -> TrainingState:
        return TrainingState(
            model=self.model, optimizer=self.optimizer, scheduler=self.scheduler, extra=self.extra
        )

    def job(self, folder: Path, *, checkpoints: Any = None, **options: Any) -> ElasticJob:
        inputs = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(0))
        loader = strata.ElasticLoader(
            TensorDataset(inputs, inputs.sum(dim=1, keepdim=True)),
            strata.ElasticSampler(SAMPLES, global_batch_size=BATCH, dataset="numbers"),
        )
        settings = {
            "save_every": SAVE_EVERY,
            "snapshot_every": 1,
            "memory_root": folder / "memory",
            **options,
        }
        return strata.elastic(
            model=self.model,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            extra=self.extra,
            data=loader,
            checkpoints=folder / "run" if checkpoints is None else checkpoints,
            max_steps=STEPS,
            job="mine",
            options=ElasticOptions(**settings),
        )

    def run(
        self,
        folder: Path,
        *,
        crash_at: int = -1,
        on_step: Callable[[int], None] | None = None,
        settled_until: int = STEPS,
        **options: Any,
    ) -> ElasticJob:
        with self.job(folder, **options) as job:
            for batch in job:
                assert job._manager is not None
                if job.step < settled_until:  # Nothing is skipped, so what was saved is known.
                    assert job._manager.wait_pending(60)
                x, y = batch.data
                x = x + torch.rand(()) * 0.01  # From the generator that is saved.
                self.backward(nn.functional.mse_loss(self.model(x).float(), y) * batch.weight)
                if job.step + 1 == crash_at:
                    raise Crash
                (self.step or self.optimizer.step)()
                self.optimizer.zero_grad()
                if self.scheduler is not None:
                    self.scheduler.step()
                self.after()
                if on_step is not None:
                    on_step(job.step + 1)
        return job

    def everything(self) -> list[tuple[Any, Any]]:
        """All that the script has, with full tensors, in the order that it has them in."""
        found = {
            "model": dict(self.model.state_dict()),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict() if self.scheduler is not None else None,
            "extra": {name: item.state_dict() for name, item in self.extra.items()},
            "random": torch.get_rng_state(),
        }
        return [
            (path, full(leaf) if isinstance(leaf, torch.Tensor) else leaf)
            for path, leaf in leaves(found, leaf=torch.Tensor)
        ]


def assert_same(one: Script, other: Script) -> None:
    mine, others = one.everything(), other.everything()
    assert [path for path, _ in mine] == [path for path, _ in others]
    different = [
        path
        for (path, a), (_, b) in zip(mine, others, strict=True)
        if not (_same(a, b) if isinstance(a, torch.Tensor) else a == b)
    ]
    assert different == []
    kinds = [(type(a), type(b)) for (_, a), (_, b) in zip(mine, others, strict=True)]
    assert [pair for pair in kinds if pair[0] is not pair[1]] == []


def _same(a: torch.Tensor, b: Any) -> bool:
    """The same type and the same bits."""
    if not isinstance(b, torch.Tensor) or (a.dtype, a.shape, a.device) != (b.dtype, b.shape, b.device):
        return False
    rows = [t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
    return torch.equal(*rows)


# --- the kinds ------------------------------------------------------------------------------------------------------


KINDS: dict[str, Callable[[], Script]] = {}


def kind(make: Callable[[], Script]) -> Callable[[], Script]:
    KINDS[make.__name__] = make
    return make


class Factored(torch.optim.Optimizer):
    """Keeps sums over rows in the place of squares, as Adafactor does (torch's own cannot step on distributed tensors)."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                grad = parameter.grad
                if grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["step"] = torch.tensor(0.0)
                    shape = [*grad.shape[:-1], 1]
                    state["row_var"] = grad.new_zeros(shape)
                state["step"] += 1
                state["row_var"].lerp_(grad.square().mean(dim=-1, keepdim=True), 0.1)
                parameter.add_(grad / (state["row_var"].sqrt() + 0.1), alpha=-group["lr"])


def with_optimizer(name: str, make: Callable[[nn.Module], torch.optim.Optimizer]) -> None:
    def build() -> Script:
        model = sharded(Net())
        return Script(model, make(model))

    KINDS[name] = build


with_optimizer("single_tensor_adamw", lambda m: adam(m, foreach=False, fused=False))
with_optimizer("foreach_adamw", lambda m: adam(m, foreach=True))
with_optimizer("fused_adamw", lambda m: adam(m, fused=True))
with_optimizer("amsgrad", lambda m: adam(m, amsgrad=True))
with_optimizer("tensor_lr", lambda m: torch.optim.AdamW(m.parameters(), lr=torch.tensor(0.02), foreach=False))
with_optimizer("sgd_with_momentum", lambda m: torch.optim.SGD(m.parameters(), lr=0.02, momentum=0.9))
with_optimizer("sgd_without_state", lambda m: torch.optim.SGD(m.parameters(), lr=0.02))
with_optimizer("factored", lambda m: Factored(m.parameters(), {"lr": 0.02}))
with_optimizer("nadam", lambda m: torch.optim.NAdam(m.parameters(), lr=0.02))
with_optimizer(
    "two_groups",
    lambda m: torch.optim.AdamW(
        [
            {"params": [p for p in m.parameters() if p.dim() > 1], "lr": 0.01, "weight_decay": 0.1},
            {"params": [p for p in m.parameters() if p.dim() == 1], "lr": 0.03},
        ]
    ),
)


@kind
def replicated_and_sharded() -> Script:
    model = Net()
    fully_shard(model.blocks[0], mesh=mesh())
    return Script(model, adam(model, foreach=False))


@kind
def adafactor() -> Script:
    """On what is not sharded: torch's cannot step on distributed tensors."""
    model = Net()
    fully_shard(model.blocks[0].requires_grad_(False), mesh=mesh())
    parameters = [p for p in model.parameters() if p.requires_grad]
    return Script(model, torch.optim.Adafactor(parameters, lr=0.02))


@kind
def cpu_offloaded() -> Script:
    model = sharded(Net(), offload_policy=CPUOffloadPolicy(pin_memory=False))
    return Script(model, adam(model))


@kind
def scheduled() -> Script:
    model = sharded(Net())
    optimizer = adam(model)
    warm = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=3)
    cool = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=6)
    scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, cool], milestones=[3])
    return Script(model, optimizer, scheduler)


@kind
def scheduled_tensor_lr() -> Script:
    model = sharded(Net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.02), foreach=False)
    return Script(model, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9))


@kind
def average_in_a_dictionary() -> Script:
    model = sharded(Net())
    ema = Ema(model)
    return Script(model, adam(model), extra={"ema": ema}, after=lambda: ema.update(model))


@kind
def average_in_a_module() -> Script:
    model, average = sharded(Net()), sharded(Net())
    average.requires_grad_(False)

    @torch.no_grad()
    def update() -> None:
        for mine, other in zip(average.parameters(), model.parameters(), strict=True):
            mine.lerp_(other, 0.1)

    return Script(model, adam(model), extra={"average": average}, after=update)


@kind
def second_optimizer() -> Script:
    """Another model with an optimizer of its own, as an adversary has."""
    model, other = sharded(Net()), sharded(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1)))
    second = torch.optim.Adagrad(other.parameters(), lr=0.1, foreach=False)

    def after() -> None:
        other(torch.full((2, 4), 0.5)).sum().backward()
        second.step()
        second.zero_grad()

    return Script(model, adam(model), extra={"other": other, "second": second}, after=after)


@kind
def frozen() -> Script:
    """Some parameters are frozen and not in the optimizer; others are in it."""
    model = Net()
    model.first.weight.requires_grad_(False)
    cast(Block, model.blocks[0]).up.bias.requires_grad_(False)
    model = sharded(model)
    parameters = [p for name, p in model.named_parameters() if name != "first.weight"]
    return Script(model, torch.optim.AdamW(parameters, lr=0.02))


@kind
def unused_parameter() -> Script:
    model = Net()
    model.idle = nn.Linear(3, 3)
    model = sharded(model)
    return Script(model, adam(model))


@kind
def tied() -> Script:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Block()])
            self.one = nn.Linear(4, 4)
            self.two = nn.Linear(4, 4)
            self.out = nn.Linear(6, 1)
            self.widen = nn.Linear(4, 6)
            self.two.weight = self.one.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.out(self.blocks[0](self.widen(self.two(torch.tanh(self.one(x))))))
            return out

    model = sharded(Tied())
    return Script(model, adam(model))


@kind
def mixed_precision() -> Script:
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32
    )
    model = Net()
    for block in model.blocks:
        fully_shard(block, mesh=mesh(), mp_policy=policy)
    fully_shard(model, mesh=mesh())
    return Script(model, adam(model))


@kind
def mixed_dtypes() -> Script:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Block()])
            self.narrow = nn.Linear(4, 6, dtype=torch.bfloat16)
            self.out = nn.Linear(6, 1)
            self.eight: torch.Tensor
            self.count: torch.Tensor
            self.register_buffer("eight", torch.randn(3, 5).to(torch.float8_e4m3fn))
            self.register_buffer("count", torch.zeros((), dtype=torch.int64))
            self.register_buffer("mask", torch.tensor([True, False]))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count += 1
            out: torch.Tensor = self.out(self.blocks[0](self.narrow(x.to(torch.bfloat16)).float()))
            return out + self.eight.float().mean()

    model = Mixed()
    fully_shard(model.narrow, mesh=mesh())
    model = sharded(model)
    return Script(model, adam(model, foreach=False))


@kind
def empty_parameters() -> Script:
    class Empty(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Block()])
            self.nothing = nn.Parameter(torch.empty(0, 3))
            self.frozen = nn.Parameter(torch.empty(2, 0), requires_grad=False)
            self.register_buffer("none", torch.empty(0))
            self.widen, self.out = nn.Linear(4, 6), nn.Linear(6, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.out(self.blocks[0](self.widen(x)))
            return out + self.nothing.sum()

    model = Empty()
    # Torch reduces no gradients of nothing, so the one that is trained is not sharded.
    fully_shard(model, mesh=mesh(), ignored_params={model.nothing})
    return Script(model, adam(model, foreach=False))


def in_dynamo(module: nn.Module) -> nn.Module:
    """A real wrapper, without the time that generating code takes."""
    return cast(nn.Module, torch.compile(module, backend="eager"))


@kind
def compiled() -> Script:
    model = sharded(Net())
    return Script(in_dynamo(model), adam(model))


@kind
def compiled_blocks() -> Script:
    model = Net()
    for number, block in enumerate(model.blocks):
        model.blocks[number] = in_dynamo(block)
    model = sharded(model)
    return Script(model, adam(model))


@kind
def checkpointed_activations() -> Script:
    model = Net()
    for number, block in enumerate(model.blocks):
        model.blocks[number] = checkpoint_wrapper(block)
    model = sharded(model)
    return Script(model, adam(model))


@kind
def scaled_gradients() -> Script:
    model = sharded(Net())
    optimizer = adam(model, foreach=False, fused=False)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=3)

    def step() -> None:
        scaler.step(optimizer)
        scaler.update()

    return Script(
        model,
        optimizer,
        extra={"scaler": scaler},
        backward=lambda loss: scaler.scale(loss).backward(),
        step=step,
    )


class Kept:
    """Anything with a state."""

    def __init__(self, **state: Any) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


@kind
def odd_extra() -> Script:
    """Keys that are no text, tensors in tuples, empty containers, things that are in several places, and some of it changed in place."""
    model = sharded(Net())
    shared, inner = torch.rand(3), {"x": torch.rand(2)}
    kept = Kept(
        by_number={0: torch.zeros(2), 7: {"deep": 1}},
        pair=(torch.zeros(1), "text"),
        nothing={},
        no_list=[],
        rows=[{"a": torch.zeros(2)}, {"a": torch.zeros(1)}],
        one=shared,
        two=shared,
        left=inner,
        right=inner,
        none=None,
        history=[],
    )

    def after() -> None:
        state = kept.state
        for tensor in (state["by_number"][0], state["pair"][0], state["rows"][1]["a"]):
            tensor.add_(1)
        state["by_number"][7]["deep"] += 1
        state["history"].append(state["by_number"][7]["deep"])

    return Script(model, adam(model), extra={"kept": kept}, after=after)


class WithExtraState(nn.Module):
    """Keeps something beside its tensors, as layers that calibrate themselves do."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block()])
        self.widen, self.out = nn.Linear(4, 6), nn.Linear(6, 1)
        self.seen: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(len(self.seen))
        out: torch.Tensor = self.out(self.blocks[0](self.widen(x)))
        return out


class WithTensorState(WithExtraState):
    def get_extra_state(self) -> torch.Tensor:
        return torch.tensor(self.seen)

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.seen = state.tolist()


class WithObjectState(WithExtraState):
    def get_extra_state(self) -> dict[str, Any]:
        return {"seen": list(self.seen)}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.seen = list(state["seen"])


@kind
def tensor_as_extra_state() -> Script:
    model = sharded(WithTensorState())
    return Script(model, adam(model))


@kind
def object_as_extra_state() -> Script:
    model = sharded(WithObjectState())
    return Script(model, adam(model))


def assert_named_like_dcp(script: Script) -> None:
    captured = ShardedState(script.state).capture(step=2, epoch=0, rank=0, world_size=1)
    model, optimizer = get_state_dict(script.model, script.optimizer)
    for mine, theirs in ((captured[MODEL], model), (captured[OPTIMIZER], optimizer)):
        names = [{path: type(value) for path, value in flattened(state)} for state in (mine, theirs)]
        assert names[0] == names[1]


def built(name: str, seed: int) -> Script:
    torch.manual_seed(seed)
    return KINDS[name]()


@pytest.mark.parametrize("name", KINDS)
def test_an_interrupted_run_ends_with_the_bits_of_an_undisturbed_one(name: str, tmp_path: Path) -> None:
    undisturbed = built(name, 1)
    undisturbed.run(tmp_path / "undisturbed")
    folder, without_memory = tmp_path / "job", tmp_path / "other"
    crashed = built(name, 1)
    with pytest.raises(Crash):
        crashed.run(folder, crash_at=CRASH_AT)
    assert_named_like_dcp(crashed)
    shutil.copytree(folder / "run", without_memory / "run")
    for where, step, tier in ((folder, 4, "MEMORY"), (without_memory, 3, "NVME")):
        anew = built(name, 2)
        job = anew.run(where)
        assert job.recovery is not None
        assert (job.recovery.resumed_step, job.recovery.tier) == (step, tier), job.recovery.reasons
        assert_same(anew, undisturbed)


def test_the_same_ranks_map_their_own_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is planned and read slice by slice where an image holds just what its rank is to hold."""

    def refuse(*_: object) -> None:
        raise AssertionError("slices were read")

    with pytest.raises(Crash):
        built("foreach_adamw", 1).run(tmp_path, crash_at=CRASH_AT)
    monkeypatch.setattr(ShardedSource, "plan", refuse)
    assert built("foreach_adamw", 2).run(tmp_path).restored


def test_a_distributed_tensor_where_it_has_no_name_is_refused(tmp_path: Path) -> None:
    """Every rank would write its part as if it were all there is."""
    script = built("foreach_adamw", 1)
    weight = next(script.model.parameters()).detach()
    for odd in ({3: weight}, (weight,)):
        script.extra = {"kept": Kept(inner=odd)}
        with pytest.raises(
            UnsupportedState, match=r"extra\.kept\.inner.*distributed tensor in a tuple or under a key"
        ):
            script.run(tmp_path / "job")


# --- in and out -----------------------------------------------------------------------------------------------------


def weights(script: Script) -> dict[str, torch.Tensor]:
    return {name: full(value).detach().clone() for name, value in script.model.state_dict().items()}


def assert_weights(script: Script, wanted: dict[str, torch.Tensor]) -> None:
    found = weights(script)
    assert found.keys() == wanted.keys()
    assert [name for name, value in found.items() if not _same(value, wanted[name])] == []


def plain(seed: int) -> Script:
    torch.manual_seed(seed)
    model = Net()
    return Script(model, adam(model))


def moments(script: Script) -> dict[tuple[int, str], torch.Tensor]:
    state = script.optimizer.state_dict()["state"]
    return {
        (number, key): full(value).detach().clone()
        for number, entry in state.items()
        for key, value in entry.items()
    }


def assert_moments(script: Script, wanted: dict[tuple[int, str], torch.Tensor]) -> None:
    found = moments(script)
    assert found.keys() == wanted.keys()
    assert [key for key, value in found.items() if not _same(value, wanted[key])] == []


@pytest.fixture
def finished(tmp_path: Path) -> Script:
    """A sharded job that has ended, in `job`."""
    script = built("foreach_adamw", 1)
    script.run(tmp_path / "job")
    return script


def test_dcp_loads_the_checkpoint_of_a_job(tmp_path: Path, finished: Script) -> None:
    anew = built("foreach_adamw", 2)
    model, optimizer = get_state_dict(anew.model, anew.optimizer)
    dcp.load(
        {MODEL: model, OPTIMIZER: optimizer}, storage_reader=StrataStorageReader(tmp_path / "job" / "run")
    )
    set_state_dict(anew.model, anew.optimizer, model_state_dict=model, optim_state_dict=optimizer)
    assert_weights(anew, weights(finished))
    assert_moments(anew, moments(finished))


@pytest.mark.parametrize("format", ["pt", "safetensors", "hf", "dcp"])
@pytest.mark.parametrize("make", [plain, lambda seed: built("foreach_adamw", seed)], ids=["plain", "sharded"])
def test_a_job_starts_from_what_another_has_exported(
    tmp_path: Path, finished: Script, format: str, make: Callable[[int], Script]
) -> None:
    out = tmp_path / f"exported.{format}"
    export(str(tmp_path / "job" / "run"), str(out), format=format)
    imported = adopt(str(out), str(tmp_path / "next" / "run"), step=5)
    assert imported.has_optimizer is (format != "hf")
    script = make(2)
    with script.job(tmp_path / "next") as job:
        assert job.restored
        assert job.step == 5
        assert_weights(script, weights(finished))
        assert_moments(script, moments(finished) if imported.has_optimizer else {})


def test_an_unsharded_job_continues_from_a_sharded_one(tmp_path: Path) -> None:
    before, then = built("foreach_adamw", 1), []

    def note(step: int) -> None:
        if step == SAVE_EVERY:
            then.append((weights(before), moments(before)))

    with pytest.raises(Crash):
        before.run(tmp_path / "job", crash_at=CRASH_AT, on_step=note)
    script = plain(2)
    with script.job(tmp_path / "job") as job:
        assert job.step == SAVE_EVERY
        assert_weights(script, then[0][0])
        assert_moments(script, then[0][1])
    plain(3).run(tmp_path / "job")
    assert steps_in(tmp_path / "job" / "run")[0] == STEPS


def test_a_sharded_job_says_how_to_continue_from_an_unsharded_one(tmp_path: Path) -> None:
    before = plain(1)
    before.run(tmp_path / "job")
    with (
        pytest.raises(StateMismatch, match=r"checkpoint export --format dcp.*checkpoint import"),
        built("foreach_adamw", 2).job(tmp_path / "job"),
    ):
        pass
    export(str(tmp_path / "job" / "run"), str(tmp_path / "exported"), format="dcp")
    adopt(str(tmp_path / "exported"), str(tmp_path / "next" / "run"))
    script = built("foreach_adamw", 2)
    with script.job(tmp_path / "next") as job:
        assert job.step == STEPS
        assert_weights(script, weights(before))
        assert_moments(script, moments(before))


# --- how it is saved ------------------------------------------------------------------------------------------------


def test_state_that_appears_late_is_saved_from_then_on(tmp_path: Path) -> None:
    """A block that is trained from the fourth step on only, and something that is kept beside from then on."""

    def late() -> tuple[Script, Callable[[int], None]]:
        script = built("odd_extra", 1)
        kept = script.extra["kept"]
        held = list(cast(Net, script.model).blocks[1].parameters())
        for parameter in held:
            parameter.requires_grad_(False)

        def on_step(step: int) -> None:
            if step >= 3:
                for parameter in held:
                    parameter.requires_grad_(True)
                kept.state.setdefault("found", {"at": [], "weight": held[0].detach().clone()})["at"].append(
                    step
                )

        script.optimizer = torch.optim.AdamW(script.model.parameters(), lr=0.02)
        return script, on_step

    undisturbed, on_step = late()
    undisturbed.run(tmp_path / "undisturbed", on_step=on_step)
    for crash_at in (3, 4, 5):  # Before, with what is kept, and with the optimizer's.
        folder = tmp_path / f"job-{crash_at}"
        script, on_step = late()
        with pytest.raises(Crash):
            script.run(folder, crash_at=crash_at, on_step=on_step, save_every=1)
        shutil.rmtree(folder / "memory")
        anew, on_step = late()
        if crash_at > 3:
            on_step(3)
            anew.extra["kept"].state["found"]["at"].clear()
        job = anew.run(folder, on_step=on_step)
        assert job.recovery is not None
        assert (job.recovery.resumed_step, job.recovery.tier) == (crash_at - 1, "NVME")
        assert_same(anew, undisturbed)


def test_a_part_that_is_too_large_makes_no_snapshots(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    script = built("foreach_adamw", 1)
    with pytest.raises(Crash):
        script.run(tmp_path / "job", crash_at=CRASH_AT, snapshot_limit_bytes=100)
    assert "only durable checkpoints are written" in caplog.text
    assert steps_in(tmp_path / "job" / "run") == [SAVE_EVERY]
    anew = built("foreach_adamw", 2)
    with anew.job(tmp_path / "job") as job:
        assert job.step == SAVE_EVERY


def test_a_run_in_memory_alone_resumes(tmp_path: Path) -> None:
    undisturbed = built("average_in_a_dictionary", 1)
    undisturbed.run(tmp_path / "undisturbed", checkpoints=[])
    script = built("average_in_a_dictionary", 1)
    with pytest.raises(Crash):
        script.run(tmp_path / "job", checkpoints=[], crash_at=CRASH_AT)
    anew = built("average_in_a_dictionary", 2)
    job = anew.run(tmp_path / "job", checkpoints=[])
    assert job.recovery is not None
    assert (job.recovery.resumed_step, job.recovery.tier) == (CRASH_AT - 1, "MEMORY")
    assert_same(anew, undisturbed)


def test_what_is_saved_stays_as_it_was_while_training_continues(tmp_path: Path) -> None:
    """The destination takes a part only when two more steps are made."""
    may_write = threading.Event()

    def choose(operation: Operation, _: object) -> None:
        if operation.name == "write" and operation.key.endswith(".part"):
            assert may_write.wait(60)

    script, then = built("odd_extra", 1), []

    def on_step(step: int) -> None:
        if step == SAVE_EVERY:
            then.append(deepcopy(script.extra["kept"].state))
        if step == SAVE_EVERY + 2:
            may_write.set()

    slow = FaultyStore(open_store(tmp_path / "job" / "run"), choose=choose)
    script.run(tmp_path / "job", checkpoints=slow, on_step=on_step, settled_until=SAVE_EVERY)
    state: dict[str, Any] = {f"extra.kept.{name}": None for name in ("by_number", "pair", "history")}
    dcp.load(state, storage_reader=StrataStorageReader(tmp_path / "job" / "run", step=SAVE_EVERY))
    assert torch.equal(state["extra.kept.by_number"][0], then[0]["by_number"][0])
    assert torch.equal(state["extra.kept.pair"][0], then[0]["pair"][0])
    assert state["extra.kept.history"] == then[0]["history"]


def test_a_container_that_is_empty_on_one_rank_is_filled_by_the_others() -> None:
    filled = {"state": {"b": torch.zeros(2), "a": torch.zeros(1), "text": "t"}, "none": {}}
    plan = ShardPlan(tables=(chunks_of({"state": {}, "none": {}}), chunks_of(filled)), rank=0)
    assert [chunk.name for chunk in plan.written_by(0)] == ["none"]
    assert [chunk.name for chunk in plan.written_by(1)] == ["state.b", "state.a", "state.text"]
    spans = {name: Span(part=0, offset_bytes=0, size_bytes=1) for name in ("none", "state.text")}
    layout: Any = plan.layout({0: 0, 1: 1}, spans)
    assert [name for name, _ in layout["paths"]] == ["none", "state.b", "state.a", "state.text"]
