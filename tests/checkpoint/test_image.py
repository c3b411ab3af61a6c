"""The image: a valid .pt file for every kind of state, laid out once and filled again and again."""

from __future__ import annotations

import itertools
import mmap
import os
import zipfile
from collections import OrderedDict, defaultdict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from strata.checkpoint import CheckpointManager, Memory, UnsupportedState
from strata.checkpoint.copying.engine import Copier, Copying, Destination
from strata.checkpoint.image.layout import ALIGNMENT_BYTES, FILE_NAME, Placement, Plan, Prepared, prepare
from strata.checkpoint.image.state import named_leaves, scan
from tests.checkpoint.states import DTYPES, assert_same, every_kind, random_tensor, same_bits


class Image:
    """A plan's file, mapped."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE_NAME
        self.plan: Plan | None = None
        self.placement: Placement | None = None

    def save(self, state: object) -> Prepared:
        prepared = prepare(state, self.plan)
        if prepared.plan is not self.plan:
            self.plan = prepared.plan
            self.placement = prepared.plan.lay_out(str(self.path))
        placement = self.placement
        assert placement is not None
        fd = os.open(self.path, os.O_RDWR)
        with mmap.mmap(fd, placement.size_bytes) as mapped:
            os.close(fd)
            end = placement.body_offset_bytes + len(prepared.body)
            mapped[placement.body_offset_bytes : end] = prepared.body
            image = torch.frombuffer(mapped, dtype=torch.uint8)
            copying = Copying(placement.size_bytes)
            Copier().copy(copying, prepared, Destination(prepared.plan, placement, image))
            assert copying.is_complete()
            del image
        return prepared

    def load(self) -> Any:
        return torch.load(self.path, weights_only=True, mmap=True)


@pytest.fixture
def image(tmp_path: Path) -> Image:
    return Image(tmp_path)


def test_every_kind_of_value_opens_with_plain_torch_load(image: Image) -> None:
    state = every_kind()
    image.save(state)
    loaded = image.load()
    for key in [key for key in state if "numpy" in str(key)]:  # Plain torch gives tensors for these.
        assert torch.equal(
            loaded.pop(key),
            torch.as_tensor(state.pop(key).copy().astype(None if key != "numpy_big_endian" else "<i4")),
        )
    assert_same(loaded, state)


def test_tensors_that_shared_memory_share_it_again(image: Image) -> None:
    base = torch.arange(12.0)
    tied = torch.randn(3)
    state = {"a": base[2:6], "b": base.view(3, 4).t(), "tied": tied, "again": tied, "other": tied.view(3, 1)}
    image.save(state)
    loaded = image.load()
    assert loaded["tied"] is loaded["again"]
    assert loaded["other"].data_ptr() == loaded["tied"].data_ptr()
    loaded["a"][0] = 77.0
    assert loaded["b"][2, 0] == 77.0  # The same element, seen through another view.
    for name, tensor in state.items():
        assert loaded[name].stride() == tensor.stride()


def test_of_a_large_storage_only_what_is_used_is_stored(image: Image) -> None:
    large = torch.randn(1_000_000)
    image.save({"head": large[10:20], "tail": large[15:40]})
    assert image.path.stat().st_size < 200_000
    loaded = image.load()
    assert torch.equal(loaded["head"], large[10:20])
    assert torch.equal(loaded["tail"], large[15:40])


def test_views_of_one_storage_as_different_types_are_kept(image: Image) -> None:
    floats = torch.randn(8)
    image.save({"floats": floats, "bits": floats.view(torch.int32)})
    loaded = image.load()
    assert torch.equal(loaded["bits"], loaded["floats"].view(torch.int32))
    assert loaded["bits"].data_ptr() == loaded["floats"].data_ptr()


def test_records_lie_on_page_boundaries(image: Image) -> None:
    image.save({f"t{n}": torch.randn(n * 37) for n in range(20)})
    assert image.placement is not None
    assert all(offset % ALIGNMENT_BYTES == 0 for offset in image.placement.slot_offsets_bytes)


def test_the_plan_is_kept_while_only_values_change(image: Image) -> None:
    state = {"w": torch.zeros(100), "step": 0, "note": "a"}
    plan = image.save(state).plan
    for step in range(1, 30):
        state = {"w": torch.full((100,), float(step)), "step": step * 10**9, "note": "x" * step}
        assert image.save(state).plan is plan
        assert_same(image.load(), state)


def test_values_that_outgrow_their_capacity_get_a_new_plan(image: Image) -> None:
    plan = image.save({"w": torch.zeros(4), "history": []}).plan
    state = {"w": torch.ones(4), "history": list(range(300_000))}
    assert image.save(state).plan is not plan
    assert_same(image.load(), state)


@pytest.mark.parametrize(
    "changed",
    [
        {"w": torch.zeros(5)},
        {"w": torch.zeros(4, dtype=torch.float64)},
        {"w": torch.zeros(4).requires_grad_()},
        {"w": torch.zeros(8)[::2]},
        {"v": torch.zeros(4)},
        {"w": torch.zeros(4), "v": torch.zeros(1)},
        {"w": [torch.zeros(4)]},
        {"w": torch.nn.Parameter(torch.zeros(4))},
    ],
)
def test_another_structure_gets_another_plan(image: Image, changed: dict[str, Any]) -> None:
    plan = image.save({"w": torch.zeros(4)}).plan
    assert image.save(changed).plan is not plan
    assert_same(image.load(), changed)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_a_plan_holds_in_every_gradient_mode(image: Image, mode: Callable[[], Any]) -> None:
    plain, wants_grad = {"w": torch.zeros(4)}, {"w": torch.zeros(4).requires_grad_()}
    with mode():
        plan = image.save(plain).plan
        assert image.save(plain).plan is plan
    assert image.save(plain).plan is plan
    with mode():
        image.save(wants_grad)
        assert_same(image.load(), wants_grad)
        image.save(plain)
        assert_same(image.load(), plain)


def test_a_tensor_changed_in_place_is_noticed(image: Image) -> None:
    """The same object, with other memory, another shape, another type."""
    state = {"w": torch.zeros(4), "v": torch.zeros(2, 3)}
    image.save(state)
    for change in (
        lambda w: w.set_(torch.full((4,), 2.0)),
        lambda w: setattr(w, "data", torch.full((4,), 3.0)),
        lambda w: setattr(w, "data", torch.full((4,), 4.0, dtype=torch.float64)),
        lambda w: w.resize_(9).fill_(5.0),
        lambda w: state["v"].t_(),
        lambda w: w.requires_grad_(),
    ):
        change(state["w"])
        image.save(state)
        assert_same(image.load(), state)


def test_sharing_that_ends_or_begins_is_noticed(image: Image) -> None:
    shared = torch.ones(4)
    image.save({"a": shared, "b": shared.view(4)})
    apart = {"a": torch.full((4,), 2.0), "b": torch.full((4,), 3.0)}
    image.save(apart)
    assert_same(image.load(), apart)
    image.save({"a": shared, "b": shared.view(4)})
    loaded = image.load()
    assert loaded["a"].data_ptr() == loaded["b"].data_ptr()


def test_a_view_that_becomes_conjugated_is_saved_by_value(image: Image) -> None:
    base = torch.randn(6, dtype=torch.complex64)
    image.save({"a": base[:4], "b": base[2:]})
    state = {"a": base[:4].conj(), "b": base[2:]}
    image.save(state)
    loaded = image.load()
    assert same_bits(loaded["a"], state["a"])
    assert same_bits(loaded["b"], state["b"])


def test_ten_thousand_tensors_fit_one_image(image: Image) -> None:
    state = {f"layer.{n}": torch.full((n % 7,), float(n)) for n in range(10_000)}
    image.save(state)
    loaded = image.load()
    assert list(loaded) == list(state)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in state.items())


def test_records_beyond_four_gigabytes_are_found(image: Image) -> None:
    prepared = prepare({"large": torch.empty(5 << 30, dtype=torch.uint8), "after": torch.empty(3)}, None)
    placement = prepared.plan.lay_out(str(image.path))  # A file with holes: no tensor byte is touched.
    assert placement.slot_offsets_bytes[1] > 5 << 30
    with image.path.open("r+b") as file:
        file.seek(placement.body_offset_bytes)
        file.write(prepared.body)
        file.seek(placement.slot_offsets_bytes[1])
        file.write(torch.tensor([1.0, 2.0, 3.0]).numpy().tobytes())
    loaded = image.load()
    assert loaded["large"].shape == (5 << 30,)
    assert loaded["after"].tolist() == [1.0, 2.0, 3.0]


def test_a_state_without_tensors_is_an_image_too(image: Image) -> None:
    image.save({"step": 3})
    assert image.load() == {"step": 3}
    image.save(torch.arange(3))
    assert image.load().tolist() == [0, 1, 2]


def test_other_zip_tools_can_list_the_image(image: Image) -> None:
    image.save({"w": torch.zeros(3)})
    with zipfile.ZipFile(image.path) as archive:
        assert "archive/data/0" in archive.namelist()


Point = namedtuple("Point", "x y")


@dataclass
class Foreign:
    x: int = 1


@pytest.mark.parametrize(
    ("state", "name"),
    [
        ({"a": {"b": Foreign()}}, "a.b"),
        ({"f": print}, "f"),
        ({"f": [1, lambda: 0]}, "f.1"),
        ({"d": defaultdict(int)}, "d"),
        ({"s": frozenset({1})}, ""),
        ({"p": Point(1, 2)}, "p"),
        ({"sparse": torch.eye(3).to_sparse()}, "sparse"),
        ({"meta": torch.empty(3, device="meta")}, "meta"),
        ({"hidden": Foreign(torch.ones(3))}, "hidden"),  # type: ignore[arg-type]
    ],
)
def test_what_could_not_be_loaded_safely_is_refused_by_name(state: dict[str, Any], name: str) -> None:
    with pytest.raises(UnsupportedState) as caught:
        prepare(state, None)
    assert caught.value.name == name or not name


def test_a_subclass_of_tensor_is_refused_by_name() -> None:
    class Special(torch.Tensor):
        pass

    with pytest.raises(UnsupportedState, match="Special"):
        prepare({"x": torch.ones(3).as_subclass(Special)}, None)


def test_classes_the_user_has_allowed_may_pass(image: Image) -> None:
    with torch.serialization.safe_globals([Foreign]):
        image.save({"a": Foreign(5)})
        assert image.load()["a"] == Foreign(5)


def test_a_list_inside_itself_is_no_endless_walk() -> None:
    loop: list[Any] = [torch.ones(2)]
    loop.append(loop)
    assert len(scan({"loop": loop}).leaves) == 1


def test_a_model_and_its_optimizer_resume_from_an_image(image: Image) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for _ in range(3):
        model(torch.randn(5, 4)).sum().backward()
        optimizer.step()
        scheduler.step()
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "rng": torch.get_rng_state(),
    }
    image.save(state)
    loaded = image.load()
    assert_same(loaded, state)
    assert isinstance(loaded["model"], OrderedDict)
    assert vars(loaded["model"])["_metadata"] == vars(state["model"])["_metadata"]
    model.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])


shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)
leaves: st.SearchStrategy[Any] = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(max_size=5),
    st.binary(max_size=5),
    st.builds(
        lambda d, s, n: random_tensor(d, *s, seed=n), st.sampled_from(DTYPES), shapes, st.integers(0, 99)
    ),
)
states: st.SearchStrategy[Any] = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(st.one_of(st.text(max_size=4), st.integers(0, 9)), inner, max_size=4),
    ),
    max_leaves=12,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(first=states, second=states)
def test_any_nested_state_comes_back_the_same(image: Image, first: Any, second: Any) -> None:
    for state in (first, second, first):  # One file, laid out anew whenever the structure differs.
        image.save(state)
        assert_same(image.load(), state)


def tensor(value: float) -> torch.Tensor:
    return torch.full((1000,), value)


STRUCTURES: list[Any] = [
    {"a": tensor(1), "b": 1},
    {"a": 1, "b": tensor(2)},
    {"a": {"x": tensor(3)}, "b": 1},
    {"a": 1, "b": {"x": tensor(3)}},
    {"a": [tensor(1)], "b": 1},
    {"a": [tensor(1), tensor(2)]},
    {"a": tensor(1)},
    {"a": 1},
    {"a": {"b": 1}},
    {"a": [1]},
    {"a": [[1]]},
    {"a": {}},
    {"m": {"a": tensor(1)}, "n": {"a": 1}},
    {"m": {"a": 1}, "n": {"a": tensor(1)}},
    [tensor(1), 1],
    [1, tensor(1)],
    tensor(1),
    {"a": [tensor(1), {"a": tensor(2)}]},
    {"a": [{"a": tensor(2)}, tensor(1)]},
    {"a": np.float64(1)},
    {"a": [np.arange(3)]},
]


def test_a_leaf_may_become_nested_and_anything_else_from_one_save_to_the_next(
    folder: Path, memory: Memory
) -> None:
    with CheckpointManager(folder, 100, memory=memory) as manager:
        for step, (before, state) in enumerate(itertools.permutations(STRUCTURES, 2)):
            plan = prepare(before, None).plan
            fresh, again = prepare(state, None), prepare(state, plan)
            assert again.plan.names == fresh.plan.names == tuple(name for name, _ in named_leaves(state)), (
                before,
                state,
            )
            if step % 9 == 0:
                for number, each in ((2 * step, before), (2 * step + 1, state)):
                    manager.save(each, step=number).result(30)
                    for tier in ("MEMORY", "NVME"):
                        assert_same(manager.load(step=number, tiers=[tier]), each)


def test_a_state_nested_too_deeply_is_refused(folder: Path, memory: Memory) -> None:
    deep: Any = 1
    for _ in range(20_000):
        deep = [deep]
    with CheckpointManager(folder, memory=memory) as manager:
        with pytest.raises(UnsupportedState, match="nested too deeply"):
            manager.save({"deep": deep}, step=1)
        manager.save({"deep": [1]}, step=2).result(30)
