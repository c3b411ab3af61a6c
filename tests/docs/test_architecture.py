"""ARCHITECTURE.md follows things through the code: every hop is there, and each is reached from one before it."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass

import pytest

from tests.docs.blocks import ROOT

SOURCES = ROOT / "src" / "strata"
TEXT = (ROOT / "ARCHITECTURE.md").read_text()
HOP = re.compile(r"^(?P<apart>[~ ]) (?P<module>[\w/]+\.py) +(?P<name>[\w.]+)")
NAMED_FILE = re.compile(r"\b(?:tests|scripts|docs|src)/[\w/]+\.(?:py|md)\b")


@dataclass(frozen=True, kw_only=True)
class Hop:
    module: str
    name: str
    is_apart: bool
    """Another thread, another process or torch comes between it and the one above."""

    def __str__(self) -> str:
        return f"{self.module} {self.name}"

    def function(self) -> ast.AST | None:
        scope: ast.AST | None = ast.parse((SOURCES / self.module).read_text())
        for part in self.name.split("."):
            scope = next(
                (
                    node
                    for node in (ast.iter_child_nodes(scope) if scope is not None else ())
                    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
                    and node.name == part
                ),
                None,
            )
        return scope

    def mentions(self) -> set[str]:
        function = self.function()
        assert function is not None
        return {
            node.attr if isinstance(node, ast.Attribute) else node.id
            for node in ast.walk(function)
            if isinstance(node, ast.Attribute | ast.Name)
        }


def journeys() -> dict[str, list[Hop]]:
    _, _, block = TEXT.partition("## Four journeys")[2].partition("```text\n")
    found: dict[str, list[Hop]] = {}
    name = ""
    for line in block.partition("```")[0].splitlines():
        if hop := HOP.match(line):
            found[name].append(Hop(module=hop["module"], name=hop["name"], is_apart=hop["apart"] == "~"))
        elif line:
            name = line
            found[name] = []
    return found


def test_a_heartbeat_a_tensor_a_sample_and_a_task_are_followed() -> None:
    assert list(journeys()) == [
        "a heartbeat",
        "and by way of its machine's agent",
        "a tensor, saved",
        "and of a sharded state",
        "and loaded",
        "and loaded, of a sharded state",
        "a sample",
        "a task",
    ]


@pytest.mark.parametrize("journey", journeys())
def test_every_hop_exists_and_is_reached_from_one_before_it(journey: str) -> None:
    hops = journeys()[journey]
    assert [str(hop) for hop in hops if hop.function() is None] == []
    known: set[str] = set()
    for number, hop in enumerate(hops):
        if not number or hop.is_apart:
            known = set()  # What is above another thread or process does not call what is below.
        else:
            assert hop.name.rpartition(".")[2] in known, f"nothing above {hop} names it"
        known |= hop.mentions()


def called_at_once(tree: ast.AST) -> set[str]:
    """The names of functions and own methods that a module calls in its functions, unless it hands the call to somebody: in a
    `lambda`, or as a task."""
    found: set[str] = set()
    handed = {
        id(argument)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        if node.func.attr == "create_task"
        for argument in node.args
    }

    def visit(node: ast.AST, *, inside: bool) -> None:
        if isinstance(node, ast.Lambda) or id(node) in handed:
            return
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id="self"), attr=name) | ast.Name(id=name)):
                found.update({name} if inside else ())
        is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for child in ast.iter_child_nodes(node):
            visit(child, inside=inside or is_function)

    visit(tree, inside=False)
    return found


@pytest.mark.parametrize(
    "hop", {str(hop): hop for hops in journeys().values() for hop in hops if hop.is_apart}.values(), ids=str
)
def test_nothing_is_left_out_behind_another_thread_or_process(hop: Hop) -> None:
    """What has come from there comes out where somebody waits for it, in a loop, or in a function that is called from there."""
    function = hop.function()
    assert function is not None
    waits = any(isinstance(node, ast.While) for node in ast.walk(function))
    called = called_at_once(ast.parse((SOURCES / hop.module).read_text()))
    assert waits or hop.name.rpartition(".")[2] not in called


def test_every_file_that_is_named_exists() -> None:
    assert [name for name in NAMED_FILE.findall(TEXT) if not (ROOT / name).is_file()] == []


def packages() -> dict[str, str]:
    """What is said of each package and module directly below src/strata."""
    block = TEXT.partition("src/strata/\n")[2].partition("src/elastic_harness/")[0]
    found = re.split(r"^  (?=\w)", block, flags=re.MULTILINE)[1:]
    return {re.match(r"\w+", text)[0]: text for text in found}  # type: ignore[index]


def test_every_package_is_described() -> None:
    there = {
        path.stem for path in SOURCES.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()
    }
    described = set(re.findall(r"\w+", " ".join(packages().values())))
    assert there - described - {"__init__", "errors"} == set()
    assert set(packages()) <= there


@pytest.mark.parametrize("package", ["core", "training", "torch_compat"])
def test_every_module_that_is_listed_exists(package: str) -> None:
    lists = [line.rpartition(":")[2] for line in packages()[package].splitlines() if "·" in line]
    listed = set(re.findall(r"\w+", " ".join(lists)))
    assert listed
    assert listed - {path.stem for path in (SOURCES / package).rglob("*.py")} == set()
