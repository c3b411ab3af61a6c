"""Style as a test: the rules that a machine can check reliably, and nothing that needs taste."""

from __future__ import annotations

import ast
import re
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_args

import pytest

from strata.core import messages, views

ROOT = Path(__file__).parent.parent
SOURCES = sorted(path for path in (ROOT / "src").rglob("*.py") if "_pb2" not in path.name)
PROSE = [
    path
    for pattern in (
        "src/**/*",
        "tests/**/*",
        "docs/**/*",
        "examples/**/*",
        "scripts/*",
        "benchmarks/**/*",
        "*.md",
    )
    for path in sorted(ROOT.glob(pattern))
    if path.suffix in {".py", ".md", ".sh", ".toml", ".txt", ".proto", ".yaml", ".html"} and path.is_file()
    if "egg-info" not in str(path)
]
LINES_LIMIT = 500
UNFINISHED = re.compile(r"\b(TODO|FIXME|XXX|HACK|raise NotImplementedError|breakpoint\(\)|pdb\.set_trace)")
MACHINE_PATHS = re.compile(r"(?<![\w.])/(work|root|Users|home/(?!user\b|you\b)\w+)/")


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def matching(paths: list[Path], pattern: re.Pattern[str]) -> list[str]:
    return [
        f"{relative(path)}:{number}: {line.strip()}"
        for path in paths
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1)
        if pattern.search(line)
    ]


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), filename=str(path))


def test_every_module_opens_by_saying_what_it_guarantees() -> None:
    modules = {relative(path): parsed(path) for path in SOURCES}
    assert [path for path, module in modules.items() if module.body and not ast.get_docstring(module)] == []


def test_every_module_can_be_read_in_one_sitting() -> None:
    """One that cannot holds a second idea."""
    lines = {relative(path): len(path.read_text().splitlines()) for path in SOURCES}
    assert {path: count for path, count in lines.items() if count > LINES_LIMIT} == {}


def test_nothing_is_left_for_later() -> None:
    assert matching(SOURCES, UNFINISHED) == []


def test_no_file_knows_the_machine_it_was_written_on() -> None:
    assert matching([path for path in PROSE if path != Path(__file__)], MACHINE_PATHS) == []


def vocabulary() -> list[type[Any]]:
    unions = (messages.Event, messages.Command, messages.Reply)
    shared = (
        messages.Instant,
        messages.WorkerSpec,
        messages.DatasetSpec,
        messages.TaskSpec,
        messages.FileSpan,
    )
    shown = [
        kind for kind in vars(views).values() if is_dataclass(kind) and kind.__module__ == views.__name__
    ]
    return [*(kind for union in unions for kind in get_args(union)), *shared, *shown]


@pytest.mark.parametrize("kind", vocabulary(), ids=lambda kind: kind.__name__)
def test_messages_and_views_are_frozen_and_named_field_by_field(kind: type[Any]) -> None:
    assert kind.__dataclass_params__.frozen
    assert all(field.kw_only for field in fields(kind))
    assert "__slots__" in vars(kind)


@pytest.mark.parametrize("kind", get_args(messages.Event), ids=lambda kind: kind.__name__)
def test_a_fact_is_in_the_past_tense(kind: type[Any]) -> None:
    irregular = ("Left", "Broken", "Forgotten")
    assert kind.__name__.endswith(("ed", *irregular))


def test_refusals_have_codes_of_their_own() -> None:
    kinds: list[type[messages.Refused]] = [messages.Refused, *messages.Refused.__subclasses__()]
    assert len({kind.code for kind in kinds}) == len(kinds)


def test_no_test_has_the_name_of_another_in_its_file() -> None:
    """The second would silently replace the first."""
    seen: dict[tuple[str, str], int] = {}
    for path in sorted((ROOT / "tests").rglob("*.py")):
        for scope in ast.walk(parsed(path)):
            if isinstance(scope, ast.Module | ast.ClassDef):
                for node in scope.body:
                    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith(
                        "test_"
                    ):
                        key = (f"{relative(path)}:{getattr(scope, 'name', '')}", node.name)
                        seen[key] = seen.get(key, 0) + 1
    assert [key for key, count in seen.items() if count > 1] == []
