"""The one walk over a nested state: mappings, lists and tuples are entered, everything else is a leaf.

A node's path is the tuple of keys and positions that leads to it, in the order of the containers. `leaf` names types that are
leaves although they are tuples. A state that contains itself ends: a container is never entered from within itself.

Three walks do not go through here, all of the training thread. At every save: `strata.checkpoint.image.state.scan`, which takes a
quarter of the time, because it looks at the types of a container's nodes instead of at each node; and that of
`strata.training.sharded.shards.Locals`, which keeps what it found of a part that is still the same. At every step: the outline of
`strata.training.live`, which enters objects by their attributes, and is given up where they are nested too deep.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum
from typing import Any, TypeAlias

import torch

Path: TypeAlias = tuple[Any, ...]
Leaf: TypeAlias = type | tuple[type, ...]

PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes, torch.Size, torch.dtype, torch.device})
"""Leaves that hold nothing else; known by their exact type, which is quick to look at."""


class Missing(Enum):
    """Why a node has no counterpart in another state."""

    NO_SUCH_KEY = "the mapping has no such key"
    UNLIKE = "there is no such container, or it is too short"


def dotted(path: Path) -> str:
    """A path as a person would write it."""
    return ".".join(map(str, path)) or "state"


def nodes(state: Any, *, leaf: Leaf = (), once: bool = False) -> list[tuple[Path, Any]]:
    """Every node with its path, containers before what is in them. With `once`, a container that is in several places is
    entered at the first of them only."""
    return _collect(state, leaf, once, containers=True)


def leaves(state: Any, *, leaf: Leaf = (), once: bool = False) -> list[tuple[Path, Any]]:
    """The same without the containers."""
    return _collect(state, leaf, once, containers=False)


def leaves_by(
    state: Any, inner: Callable[[Path, Any], Iterable[tuple[Any, Any]] | None]
) -> Iterator[tuple[Path, Any]]:
    """The leaves by a rule of the caller's: `inner(path, node)` is what is in a node, with keys, or None for a leaf."""

    def visit(path: Path, node: Any) -> Iterator[tuple[Path, Any]]:
        pairs = inner(path, node)
        if pairs is None:
            yield path, node
            return
        for key, value in pairs:
            yield from visit((*path, key), value)

    return visit((), state)


def _collect(state: Any, leaf: Leaf, once: bool, *, containers: bool) -> list[tuple[Path, Any]]:
    found: list[tuple[Path, Any]] = []
    inside: set[int] = set()

    def visit(path: Path, node: Any) -> None:
        pairs = _inner(node)
        if pairs is None or containers:
            found.append((path, node))
        if pairs is None or id(node) in inside:
            return
        inside.add(id(node))
        for key, value in pairs:
            if type(value) in PLAIN or isinstance(value, leaf):
                found.append(((*path, key), value))
            else:
                visit((*path, key), value)
        if not once:
            inside.discard(id(node))

    if isinstance(state, leaf):
        return [((), state)]
    visit((), state)
    return found


def _inner(node: Any) -> Iterable[tuple[Any, Any]] | None:
    """What is in a container, with keys; None for a leaf."""
    if isinstance(node, Mapping):
        return node.items()
    if isinstance(node, list | tuple) and type(node) not in PLAIN:
        return enumerate(node)
    return None


def beside(state: Any, other: Any, *, leaf: Leaf = ()) -> list[tuple[Path, Any, Any]]:
    """Each leaf of a state, and the node at the same path of another. Where the other has none, what is there in the state, leaf
    or container, and the reason."""
    together: list[tuple[Path, Any, Any]] = []
    inside: set[int] = set()

    def visit(path: Path, node: Any, found: Any) -> None:
        pairs = _inner(node)
        if pairs is None:
            together.append((path, node, found))
            return
        is_mapping = isinstance(node, Mapping)
        if isinstance(found, leaf) or not isinstance(found, Mapping if is_mapping else list | tuple):
            together.append((path, node, Missing.UNLIKE))
            return
        if id(node) in inside:
            return
        inside.add(id(node))
        for key, value in pairs:
            if not (key in found if is_mapping else key < len(found)):
                reason = Missing.NO_SUCH_KEY if is_mapping else Missing.UNLIKE
                together.append(((*path, key), value, reason))
            elif type(value) in PLAIN or isinstance(value, leaf):
                together.append(((*path, key), value, found[key]))
            else:
                visit((*path, key), value, found[key])
        inside.discard(id(node))

    if isinstance(state, leaf):
        return [((), state, other)]
    visit((), state, other)
    return together


def mapped(state: Any, make: Callable[[Path, Any], Any], *, leaf: Leaf = ()) -> Any:
    """A new nesting like this one, with `make(path, leaf)` in the place of each leaf. Mappings become dictionaries. What is in
    several places is made once, as far as it is a container."""
    made: dict[int, Any] = {}

    def visit(path: Path, node: Any) -> Any:
        if type(node) in PLAIN or isinstance(node, leaf):
            return make(path, node)
        is_mapping = isinstance(node, Mapping)
        if not is_mapping and not isinstance(node, list | tuple):
            return make(path, node)
        if id(node) in made:
            return made[id(node)]
        if is_mapping:
            mapping = made[id(node)] = {}
            for key, value in node.items():
                mapping[key] = visit((*path, key), value)
            return mapping
        if isinstance(node, list):
            items = made[id(node)] = []
            items.extend(visit((*path, number), value) for number, value in enumerate(node))
            return items
        row = [visit((*path, number), value) for number, value in enumerate(node)]
        made[id(node)] = type(node)(*row) if hasattr(node, "_fields") else tuple(row)
        return made[id(node)]

    return visit((), state)


def replaced(state: Any, replace: Callable[[int, Any], object], *, leaf: Leaf) -> Any:
    """The state itself with leaf number n replaced by `replace(n, leaf)`, wherever it is; only nodes of the types in `leaf`
    count. Containers are changed in place where they can be."""
    done: dict[int, Any] = {}
    keep: list[object] = []  # Ids stay unique while their objects live.
    numbers = itertools.count()

    def visit(node: Any) -> Any:
        if type(node) in PLAIN:
            return node
        if id(node) in done:
            return done[id(node)]
        keep.append(node)
        if isinstance(node, leaf):
            done[id(node)] = replace(next(numbers), node)
        elif isinstance(node, dict):
            done[id(node)] = node
            for key, value in node.items():
                if type(value) not in PLAIN:
                    node[key] = visit(value)
        elif isinstance(node, list):
            done[id(node)] = node
            node[:] = [value if type(value) in PLAIN else visit(value) for value in node]
        elif isinstance(node, tuple):
            done[id(node)] = tuple(visit(value) for value in node)
        else:
            return node
        return done[id(node)]

    return visit(state)
