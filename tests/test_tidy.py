"""Style as a test: the rules that a machine can check reliably, and nothing that needs taste."""

from __future__ import annotations

import ast
import re
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_args

import pytest

from strata.core import messages, views
from tests.support_programs import programs

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
    if "node_modules" not in path.parts
    and path.suffix in {".py", ".md", ".sh", ".toml", ".txt", ".proto", ".yaml", ".html"}
    and path.is_file()
    if "egg-info" not in str(path)
]
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


def test_every_module_opens_by_saying_what_it_guarantees() -> None:
    texts = {relative(path): path.read_text() for path in SOURCES}
    assert [path for path, text in texts.items() if text and not text.startswith('"""')] == []


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


# --- external programs: declared in one table, and tests ask for them ---

STARTS = re.compile(
    r"(subprocess\.(run|Popen|call|check_call|check_output|getoutput|getstatusoutput)|os\.(system|popen|exec\w+|spawn\w+|"
    r"posix_spawnp?)|(asyncio\.)?create_subprocess_(exec|shell))"
)
LOOKS_UP = "shutil.which"
ASKS = ("program", "programs.find")
MAY_START = re.compile(
    "|".join((STARTS.pattern, *map(re.escape, (LOOKS_UP, *(f"{name}(" for name in ASKS)))))
)
"""Most modules start nothing, and reading their text is faster than parsing it."""
PYTHON = "sys.executable"
OWN_SCRIPTS = {*(path.name for path in (ROOT / "scripts").iterdir()), "strata", "python"}
"""Of this checkout, and of an environment that it was installed into: known by their paths."""
ANY = "any program"
"""Where the text does not tell what is run: it is in a parameter, or made by a call."""


def dotted(node: ast.expr) -> str:
    """A name as it is written, as `ast.unparse` would give it, which takes ten times as long."""
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=ast.Name() | ast.Attribute() as owner, attr=name):
            return f"{dotted(owner)}.{name}"
    return ast.unparse(node)


class Starts(ast.NodeVisitor):
    """Which programs a module starts or looks up: line, name, and whether it got the path from `program` or `find`."""

    def __init__(self, text: str) -> None:
        self.found: list[tuple[int, str, bool]] = []
        self._scopes: list[dict[str, list[ast.expr]]] = []
        """What names stand for, from the module to the function at hand."""
        if MAY_START.search(text):
            self._enter(ast.parse(text))

    def _enter(self, scope: ast.AST) -> None:
        values: dict[str, list[ast.expr]] = {}

        def assign(target: ast.expr, value: ast.expr) -> None:
            if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                for each, its in zip(target.elts, value.elts, strict=False):
                    assign(each, its)
            elif isinstance(target, ast.Name | ast.Attribute):
                values.setdefault(dotted(target), []).append(value)

        for node in ast.walk(scope):
            if isinstance(node, ast.arg):
                values.setdefault(node.arg, [])
            elif isinstance(node, ast.Assign):
                for target in node.targets:
                    assign(target, node.value)
            elif isinstance(node, ast.AnnAssign | ast.NamedExpr) and node.value is not None:
                assign(node.target, node.value)
            elif isinstance(node, ast.For) and isinstance(node.iter, ast.Tuple | ast.List):
                for each in node.iter.elts:
                    assign(node.target, each)
        self._scopes.append(values)
        self.generic_visit(scope)
        self._scopes.pop()

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._enter(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self._enter(node)

    def visit_Call(self, node: ast.Call) -> None:
        name = dotted(node.func) if isinstance(node.func, ast.Name | ast.Attribute) else ""
        if node.args and (STARTS.fullmatch(name) or name == LOOKS_UP):
            first = node.args[1] if "spawn" in name and "posix" not in name else node.args[0]
            for program, was_asked_for in sorted(self._programs(first, set())):
                self.found.append((node.lineno, program, was_asked_for))
        elif name in ASKS:
            self.found += [(node.lineno, program, True) for program, _ in self._programs(node.args[0], set())]
        self.generic_visit(node)

    def _programs(self, node: ast.expr, seen: set[str]) -> set[tuple[str, bool]]:
        match node:
            case ast.Constant(value=str(text)):
                return {(text.split()[0].rpartition("/")[2] if text.split() else "", False)}
            case ast.List(elts=[first, *_]) | ast.Tuple(elts=[first, *_]):
                return self._programs(first, seen)
            case ast.Starred(value=inner) | ast.BinOp(left=inner, op=ast.Add()):
                return self._programs(inner, seen)
            case ast.BinOp(op=ast.Div(), right=inner):  # Of a path its last part.
                return {(name, was or name in OWN_SCRIPTS) for name, was in self._programs(inner, seen)}
            case ast.IfExp(body=one, orelse=other):
                return self._programs(one, seen) | self._programs(other, seen)
            case ast.BoolOp(values=values):
                return set().union(*(self._programs(value, seen) for value in values))
            case ast.Call(func=ast.Name(id="str"), args=[inner]):
                return self._programs(inner, seen)
            case ast.Call(func=ast.Name() | ast.Attribute() as func, args=[asked_for, *_]) if (
                dotted(func) in ASKS
            ):
                return {(program, True) for program, _ in self._programs(asked_for, seen)}
            case ast.Name() | ast.Attribute():
                name = dotted(node)
                if name == PYTHON:
                    return {("python", True)}
                known = next((scope[name] for scope in reversed(self._scopes) if name in scope), None)
                if known and name not in seen:
                    return set().union(*(self._programs(value, {*seen, name}) for value in known))
        return {(ANY, False)}


def undeclared(text: str, *, is_test: bool) -> list[str]:
    """What is wrong with how a module gets its programs. A test must ask for each, so that it is skipped where there is
    none; other code may run what its callers name, and look for what is declared."""
    allowed = {*programs.DECLARED, *OWN_SCRIPTS, "python", ANY}
    return [
        f"{line}: {name} is run without asking for it: program(NAME)"
        if name in allowed
        else f"{line}: {name} is not in scripts/programs.py"
        for line, name, was_asked_for in Starts(text).found
        if name not in allowed or (is_test and not was_asked_for)
    ]


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("subprocess.run(['jq', '.'])", ["1: jq is not in scripts/programs.py"]),
        ("subprocess.run([program('jq'), '.'])", ["1: jq is not in scripts/programs.py"] * 2),
        ("os.system('/usr/bin/jq . < file')", ["1: jq is not in scripts/programs.py"]),
        ("await asyncio.create_subprocess_exec('jq')", ["1: jq is not in scripts/programs.py"]),
        ("command = ['jq']\nsubprocess.Popen([*command, '.'])", ["2: jq is not in scripts/programs.py"]),
        ("for tool in ['jq'], ['etcd']:\n  subprocess.run(tool)", ["2: etcd", "2: jq is not in"]),
        ("subprocess.run(['etcdctl', 'get'])", ["1: etcdctl is run without asking for it"]),
        ("shutil.which('etcdctl')", ["1: etcdctl is run without asking for it"]),
        ("def test(command):\n  subprocess.run(command)", ["2: any program is run without asking"]),
        ("def one():\n  tool = ['jq']\ndef two(tool):\n  subprocess.run(tool)", ["4: any program is run"]),
        ("subprocess.run([program('etcdctl'), 'get'])", []),
        ("def start(name):\n  subprocess.run([program(name)])", []),
        ("etcd = program('etcd')\nsubprocess.run([etcd, 'get'])", []),
        ("subprocess.run([sys.executable, '-c', 'pass'])", []),
        ("subprocess.run([str(SCRIPTS / 'start_etcd.sh')])", []),
    ],
)
def test_a_test_that_runs_what_it_did_not_ask_for_is_noticed(text: str, wrong: list[str]) -> None:
    found = undeclared(text, is_test=True)
    assert len(found) == len(wrong)
    assert all(each.startswith(start) for each, start in zip(found, wrong, strict=True)), found


def test_code_may_run_what_its_callers_name_and_what_is_declared() -> None:
    assert undeclared("def launch(command):\n  subprocess.run(command)", is_test=False) == []
    assert undeclared("subprocess.run([shutil.which('chromium')])", is_test=False) == []
    assert undeclared("shutil.which('jq')", is_test=False) == ["1: jq is not in scripts/programs.py"]


@pytest.mark.parametrize("folder", ["tests", "src", "scripts", "examples"])
def test_every_program_that_is_run_is_declared(folder: str) -> None:
    assert [
        f"{relative(path)}:{problem}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        if "node_modules" not in path.parts
        for problem in undeclared(path.read_text(), is_test=folder == "tests")
    ] == []
