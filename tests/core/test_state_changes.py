"""Nothing changes the cluster beside `Cluster.handle` and `Cluster.observe`: read from the sources of whoever holds one.

What a name may refer to is followed through assignments, loops and parameters, without regard to order: an expression
that starts at a cluster, or at one of its parts, belongs to the core, whatever it is called.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from strata.core.cluster import Cluster

ROOT = Path(__file__).parents[2]
CORE = ROOT / "src/strata/core"
HOLDERS = [
    *sorted((ROOT / "src/strata/coordinator").rglob("*.py")),
    *(ROOT / "tests/sim" / name for name in ("coordinator.py", "oracle.py", "scenario.py", "worker.py")),
]

PARTS = frozenset(vars(Cluster()))
PART_TYPES = frozenset(type(part).__name__ for part in vars(Cluster()).values())
READS = PARTS | {"compact", "compaction", "plans_are_stale"}
WAYS_IN = {"handle", "observe", "apply"}
WRITERS = ("src/strata/coordinator/engine.py", "tests/sim/coordinator.py")
MEMOS = {"_rosters", "_done", "_offsets", "_shards"}
"""What the parts only remember of what follows from the rest: reading fills them."""
CHANGES_A_CONTAINER = frozenset(
    [
        "add",
        "append",
        "appendleft",
        "clear",
        "discard",
        "extend",
        "insert",
        "pop",
        "popitem",
        "popleft",
        "remove",
        "reverse",
        "setdefault",
        "sort",
        "update",
    ]
)


def links(node: ast.expr) -> Iterator[ast.expr]:
    """A chain of attributes, items and calls, from its end to where it starts."""
    while True:
        yield node
        match node:
            case ast.Attribute(value=inner) | ast.Subscript(value=inner) | ast.Await(value=inner):
                node = inner
            case ast.Call(func=ast.Attribute() as inner):
                node = inner
            case _:
                return


def name_of(node: ast.expr) -> str:
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return ""


def bindings(tree: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """What is given a name, and the expression it comes from."""
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=targets, value=value):
                for target in targets:
                    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                        yield from zip(target.elts, value.elts, strict=False)
                    else:
                        yield target, value
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                yield target, value
            case ast.NamedExpr(target=target, value=value):
                yield target, value
            case ast.For(target=target, iter=value) | ast.comprehension(target=target, iter=value):
                yield from ((name, value) for name in ast.walk(target) if isinstance(name, ast.Name))


def follow(tree: ast.AST, names: set[str], belongs: Callable[[ast.expr, set[str]], bool]) -> set[str]:
    """These names, and all that are bound to an expression that belongs to them."""
    bound = [(name_of(target), value) for target, value in bindings(tree)]
    while True:
        found = names | {name for name, value in bound if name and belongs(value, names)}
        if found == names:
            return names
        names = found


def changed_by(tree: ast.AST, methods: frozenset[str]) -> Iterator[ast.Attribute | ast.Subscript]:
    """`x.y = …`, `del x[y]`, or `x.method` where that is called and is one of these."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(ctx=ast.Store() | ast.Del()) | ast.Subscript(ctx=ast.Store() | ast.Del()):
                yield node
            case ast.Call(func=ast.Attribute(attr=attr) as called) if attr in methods:
                yield called


# --- the core -----------------------------------------------------------------------------------------------


def changing_methods() -> frozenset[str]:
    """Methods of the core's classes that change their object, or call one that does."""
    methods = [
        (member, follow(member, {"self"}, _starts_at))
        for path in CORE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
        for member in node.body
        if isinstance(member, ast.FunctionDef) and member.name != "__init__"
    ]
    changing = frozenset[str]()
    while True:
        found = frozenset(method.name for method, names in methods if _changes(method, names, changing))
        if found == changing:
            return changing
        changing = found


def _starts_at(node: ast.expr, names: set[str]) -> bool:
    *_, start = links(node)
    return isinstance(start, ast.Name) and start.id in names


def _changes(method: ast.FunctionDef, names: set[str], changing: frozenset[str]) -> bool:
    return any(
        _starts_at(changed, names) and not any(name_of(link) in MEMOS for link in links(changed))
        for changed in changed_by(method, CHANGES_A_CONTAINER | changing)
    )


CHANGING = changing_methods()


# --- whoever holds a cluster --------------------------------------------------------------------------------


class Module:
    """What of a module's names refers to a cluster, and what to something within one."""

    def __init__(self, source: str, name: str) -> None:
        self.tree, self.name = ast.parse(source), name
        clusters, parts = {"cluster", "_cluster"}, set[str]()
        for node in ast.walk(self.tree):
            if isinstance(node, ast.arg) and node.annotation is not None:
                types = {n.id for n in ast.walk(node.annotation) if isinstance(n, ast.Name)}
                clusters |= {node.arg} if "Cluster" in types else set()
                parts |= {node.arg} if types & PART_TYPES else set()
        self.clusters = follow(self.tree, clusters, self._is_cluster)
        self.parts = follow(self.tree, parts, self._is_within)

    @staticmethod
    def _is_cluster(node: ast.expr, names: set[str]) -> bool:
        while isinstance(node, ast.Await):
            node = node.value
        if isinstance(node, ast.Call):
            return name_of(node.func) in ("settled", "Cluster")
        return name_of(node) in names

    def _is_within(self, node: ast.expr, names: set[str]) -> bool:
        return any(name_of(link) in names or self._is_part(link) for link in links(node))

    def _is_part(self, node: ast.expr) -> bool:
        return (
            isinstance(node, ast.Attribute)
            and node.attr in PARTS
            and self._is_cluster(node.value, self.clusters)
        )

    def offences(self) -> Iterator[str]:
        for changed in changed_by(self.tree, CHANGES_A_CONTAINER | CHANGING):
            if self._is_within(changed.value, self.parts):
                yield f"{self.name}:{changed.lineno} changes {ast.unparse(changed)}"
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Attribute) and self._is_cluster(node.value, self.clusters):
                used = f"{self.name}:{node.lineno} uses {ast.unparse(node)}"
                if (
                    isinstance(node.ctx, ast.Store | ast.Del)
                    or node.attr not in READS | WAYS_IN
                    or (node.attr in WAYS_IN and self.name not in WRITERS)
                ):
                    yield used


def test_the_core_says_which_of_its_methods_change_it() -> None:
    assert {"apply", "take_heartbeat", "take_progress", "credit_stall", "resume_clock", "forget"} <= CHANGING
    assert not {"admit", "roster", "get", "done", "shards_of", "latest", "files_of", "jobs"} & CHANGING


def test_a_coordinator_changes_its_cluster_through_the_one_writer_alone() -> None:
    found = [
        offence
        for path in HOLDERS
        for offence in Module(path.read_text(), str(path.relative_to(ROOT))).offences()
    ]
    assert not found


@pytest.mark.parametrize(
    "source",
    [
        "cluster.membership.slow = {}",
        "self._engine.cluster.membership.pulses['a'].connected = True",
        "del engine.cluster.tasks.tasks['t']",
        "engine.cluster.datasets.dirty_jobs.add('j')",
        "membership = (await engine.settled()).membership\nmembership.reports['a'] = report",
        "members = (await engine.settled()).membership\nmembers.take_heartbeat(beat, now)",
        "for pulse in cluster.membership.pulses.values():\n    pulse.connected = False",
        "def f(known: Checkpoints):\n    known.records.clear()",
        "def f(state: Cluster):\n    parts = state.values\n    parts.version += 1",
        "cluster.membership = other",
        "cluster.handle(command, now)",
        "cluster.resume_clock(now)",
    ],
)
def test_a_change_beside_the_engine_is_found(source: str) -> None:
    assert list(Module(source, "some.py").offences())


@pytest.mark.parametrize(
    "source",
    [
        "job = cluster.membership.members['a'].spec.job_id",
        "self._checkpoints = cluster.checkpoints",
        "jobs = sorted(cluster.membership.jobs())\njobs.append('another')",
        "runtime.tasks.stop()",
    ],
)
def test_reading_and_other_objects_are_no_offence(source: str) -> None:
    assert not list(Module(source, "some.py").offences())
