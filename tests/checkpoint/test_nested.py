"""One walk over nested state: in order, with paths, and it ends."""

from __future__ import annotations

from collections import OrderedDict
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from strata.checkpoint.image.nested import Missing, beside, dotted, leaves, mapped, nodes, replaced


class Pair(NamedTuple):
    left: Any
    right: Any


STATE: dict[Any, Any] = {"a": [1, (2, torch.Size([3]))], 7: MappingProxyType({"x": None}), "empty": {}}


def test_leaves_come_in_the_order_of_their_containers_with_their_paths() -> None:
    assert leaves(STATE) == [
        (("a", 0), 1),
        (("a", 1, 0), 2),
        (("a", 1, 1), torch.Size([3])),
        ((7, "x"), None),
    ]
    assert leaves(5) == [((), 5)]


def test_containers_come_before_what_is_in_them() -> None:
    assert [path for path, _ in nodes(STATE)] == [
        (),
        ("a",),
        ("a", 0),
        ("a", 1),
        ("a", 1, 0),
        ("a", 1, 1),
        (7,),
        (7, "x"),
        ("empty",),
    ]


def test_a_name_is_what_a_person_would_write() -> None:
    assert (dotted(("a", 1, "x.y")), dotted(())) == ("a.1.x.y", "state")


def test_a_tuple_is_a_leaf_where_its_type_is_one() -> None:
    state = [Pair(1, 2)]
    assert [path for path, _ in leaves(state)] == [(0, 0), (0, 1)]
    assert leaves(state, leaf=Pair) == [((0,), Pair(1, 2))]


def test_what_is_in_two_places_is_met_twice_unless_once_is_enough() -> None:
    shared = {"x": 1}
    state = {"a": shared, "b": shared}
    assert [path for path, _ in leaves(state)] == [("a", "x"), ("b", "x")]
    assert [path for path, _ in leaves(state, once=True)] == [("a", "x")]


def test_a_state_that_contains_itself_ends() -> None:
    state: dict[str, Any] = {"x": 1}
    state["self"] = [state]
    assert leaves(state) == [(("x",), 1)]
    assert [(path, leaf) for path, leaf, _ in beside(state, state)] == [(("x",), 1)]
    made = mapped(state, lambda _, leaf: leaf + 1)
    assert made["x"] == 2
    assert made["self"][0] is made


def test_each_leaf_stands_beside_what_the_other_has_there() -> None:
    state = {"a": [1, 2], "b": {"c": 3}, "d": {"e": 4}, "f": (5,)}
    other = {"a": [10], "b": 30, "f": Pair(50, 60), "more": 0}
    assert beside(state, other) == [
        (("a", 0), 1, 10),
        (("a", 1), 2, Missing.UNLIKE),
        (("b",), {"c": 3}, Missing.UNLIKE),
        (("d",), {"e": 4}, Missing.NO_SUCH_KEY),
        (("f", 0), 5, 50),
    ]
    assert beside({"f": (5,)}, other, leaf=Pair) == [(("f",), (5,), Missing.UNLIKE)]


def test_a_map_makes_new_containers_of_the_same_kinds() -> None:
    state = {"a": OrderedDict(x=1), "b": [2, (3, Pair(4, 5))]}
    made = mapped(state, lambda path, leaf: (dotted(path), leaf))
    assert made == {
        "a": {"x": ("a.x", 1)},
        "b": [("b.0", 2), (("b.1.0", 3), Pair(("b.1.1.0", 4), ("b.1.1.1", 5)))],
    }
    assert isinstance(made["b"][1][1], Pair)
    assert state == {"a": {"x": 1}, "b": [2, (3, Pair(4, 5))]}


def test_containers_in_two_places_stay_one() -> None:
    shared = [1]
    made = mapped({"a": shared, "b": (shared,)}, lambda _, leaf: leaf + 1)
    assert made["a"] is made["b"][0]
    assert made["a"] == [2]


def test_replacing_numbers_each_leaf_once_and_changes_containers_in_place() -> None:
    tied = torch.ones(1)
    inner = [tied, 5]
    state = {"a": inner, "b": (tied, torch.zeros(1))}
    found = replaced(state, lambda number, _: f"leaf {number}", leaf=torch.Tensor)
    assert found is state
    assert state["a"] is inner
    assert found == {"a": ["leaf 0", 5], "b": ("leaf 0", "leaf 1")}
