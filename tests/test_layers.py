"""Who may know whom: the imports of every module, read from its source, the names in its text, and what an import really
loads."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
import tomllib
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

SRC = Path(__file__).parent.parent / "src"

PURE = {
    "abc",
    "bisect",
    "collections",
    "contextlib",
    "dataclasses",
    "datetime",  # To read what a clock has shown; see below.
    "enum",
    "fractions",
    "functools",
    "hashlib",
    "heapq",
    "itertools",
    "json",
    "math",
    "numpy",
    "operator",
    "re",
    "typing",
}
"""What the core may import: nothing that knows the time, chance, files, threads or the network."""

ASKS_THE_CLOCK = re.compile(r"\.(now|today|utcnow)\(")
REACHES_OUT = re.compile(r"(?<![\w.])(open|print|input|breakpoint|exec|eval|__import__)\(")
"""What Python has without an import."""

GROUND_FLOOR = (
    "strata.backoff",
    "strata.core.pauses",
    "strata.errors",
    "strata.files",
    "strata.fork_server",
    "strata.leader",
    "strata.locks",
    "strata.processes",
    "strata.shared_memory",
)
"""What everybody may use."""

OPTIONAL = ("torch", "fastapi", "uvloop", "obstore", "omegaconf", "pyarrow", "tokenizers", "aetcd", "ray")
SHARDED = ("torch.distributed.checkpoint", "torch.distributed.tensor", "sympy")
"""What jobs whose state is not sharded can do without: half a second of every process."""
HEAVY = (*OPTIONAL, "grpc", "numpy", "pydantic", *SHARDED)


def module_name(path: Path) -> str:
    parts = path.relative_to(SRC).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def source_of(module: str) -> Path:
    path = SRC / Path(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def imports(path: Path) -> set[str]:
    """Every module that the source names, also inside functions and under TYPE_CHECKING."""
    name, found = module_name(path), set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            target = ".".join(filter(None, (base, node.module)))
            # `from package import module` names the module; `from module import name` names the module itself.
            found |= {
                full if (SRC / Path(*full.split("."))).with_suffix(".py").exists() else target
                for full in (f"{target}.{alias.name}" for alias in node.names)
            }
    return found


MODULES = {module_name(path): imports(path) for path in sorted(SRC.rglob("*.py")) if "_pb2" not in path.name}


def within(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def offenders(of: tuple[str, ...], knowing: tuple[str, ...]) -> list[str]:
    return [
        f"{module} imports {target}"
        for module, targets in MODULES.items()
        if within(module, *of)
        for target in sorted(targets)
        if within(target, *knowing)
    ]


def test_the_core_is_pure_and_imports_no_other_package() -> None:
    found = [
        f"{module} imports {target}"
        for module, targets in MODULES.items()
        if within(module, "strata.core")
        for target in sorted(targets)
        if target.split(".")[0] not in PURE | {"__future__"}
        and not within(target, "strata.core", "strata.errors")
    ]
    assert not found
    asking = [
        path.name
        for path in (SRC / "strata/core").rglob("*.py")
        if ASKS_THE_CLOCK.search(path.read_text()) or REACHES_OUT.search(path.read_text())
    ]
    assert not asking


def test_stores_know_only_the_ground_floor() -> None:
    others = {".".join(module.split(".")[:2]) for module in MODULES if module.startswith("strata.")}
    assert offenders(("strata.stores",), tuple(others - {"strata.stores", *GROUND_FLOOR})) == []


def test_the_ground_floor_needs_nothing_but_python() -> None:
    for module in GROUND_FLOOR:
        others = {target.split(".")[0] for target in MODULES[module] if target not in GROUND_FLOOR}
        assert others <= sys.stdlib_module_names, module


BUILT_ON_STRATA = ("elastic_harness", "dtruntime")


def test_strata_never_imports_what_is_built_on_it() -> None:
    assert offenders(("strata",), BUILT_ON_STRATA) == []


def test_strata_does_not_name_what_is_built_on_it_either() -> None:
    """A module named in a string is imported as well: by `import_module`, `python -m`, a recipe, a script it writes."""
    # What Python compiles is written, and replaced, by whoever imports a module meanwhile.
    texts = {
        path: path.read_bytes()
        for path in (SRC / "strata").rglob("*")
        if "__pycache__" not in path.parts and path.is_file()
    }
    assert len(texts) > len(MODULES) / 2
    found = [
        f"{path.relative_to(SRC)} names {name}"
        for path, text in texts.items()
        for name in BUILT_ON_STRATA
        if name.encode() in text
    ]
    assert found == []


def test_entry_points_lead_into_strata() -> None:
    """What pip installs commands and plug-ins for, and what torch loads by itself."""
    project = tomllib.loads((SRC.parent / "pyproject.toml").read_text())["project"]
    groups = {"scripts": project["scripts"], **project["entry-points"]}
    targets = {target for group in groups.values() for target in group.values()}
    assert targets
    for target in targets:
        module, _, name = target.partition(":")
        assert within(module, "strata")
        assert module in MODULES
        assert hasattr(importlib.import_module(module), name)


def test_the_harness_defines_nothing_that_the_trainer_needs() -> None:
    """Its modules hand on names of `strata.trainer`; only checkpoints and the index builder are adapted there."""
    own = [
        f"{module} defines {node.name}"
        for module in MODULES
        if within(module, "elastic_harness")
        and not within(module, "elastic_harness.checkpoint", "elastic_harness.data")
        for node in ast.parse(source_of(module).read_text()).body
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
    ]
    assert own == []


def test_no_two_packages_know_each_other() -> None:
    """Of what one package imports, directly or through others, nothing imports it."""
    known: dict[str, set[str]] = {}
    for module, targets in MODULES.items():
        package = ".".join(module.split(".")[:2])
        others = {".".join(target.split(".")[:2]) for target in targets if target.startswith("strata.")}
        known.setdefault(package, set()).update(others - {package})
    TopologicalSorter(known).prepare()  # Raises with the packages of a circle.


def test_what_runs_in_a_training_process_knows_no_coordinator() -> None:
    parts = (
        "core",
        "stores",
        "rpc",
        "checkpoint",
        "data",
        "worker",
        "training",
        "trainer",
        "agent",
        "rendezvous",
    )
    of = ("elastic_harness", "dtruntime", *(f"strata.{part}" for part in parts))
    assert offenders(of, ("strata.coordinator", "strata.cli", "fastapi", "uvicorn", "starlette")) == []


def test_the_coordinator_knows_no_worker_and_no_torch() -> None:
    assert (
        offenders(("strata.coordinator",), ("strata.worker", "strata.training", "strata.cli", "torch")) == []
    )


def test_only_commands_and_benchmarks_know_the_command_line() -> None:
    others = tuple(
        module
        for module in MODULES
        if module != "strata" and not within(module, "strata.cli", "strata.bench")
    )
    assert offenders(others, ("strata.cli",)) == []


def test_the_compatible_names_hold_no_code_of_their_own() -> None:
    assert set(MODULES) & {name for name in MODULES if within(name, "dtruntime")} == {"dtruntime"}
    assert all(within(target, "strata", "__future__") for target in MODULES["dtruntime"])


# --- what an import really loads ----------------------------------------------------------------------------


def loaded_by(statement: str) -> set[str]:
    code = f"import sys\n{statement}\nprint(' '.join(m for m in {HEAVY!r} if m in sys.modules))"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=170, check=False
    )
    assert result.returncode == 0, result.stderr
    return set(result.stdout.split())


@pytest.mark.parametrize(
    "module",
    [
        "strata",
        "strata.checkpoint",
        "strata.stores",
        "strata.data",
        "strata.trainer",
        "elastic_harness",
        "strata.errors",
    ],
)
def test_importing_a_package_loads_nothing_heavy(module: str) -> None:
    assert loaded_by(f"import {module}") == set()


@pytest.mark.parametrize(
    ("module", "unwanted"),
    [
        ("strata.worker.orchestrator", {"fastapi", "torch", "obstore"}),
        ("strata.coordinator.server", {"torch", "obstore", "pyarrow", "tokenizers"}),
        ("strata.cli.main", {"torch", "fastapi", "grpc", "obstore"}),
        ("strata.training.job", set(SHARDED)),
        ("strata.trainer.train", set(SHARDED)),
    ],
)
def test_each_process_loads_only_what_it_needs(module: str, unwanted: set[str]) -> None:
    assert not loaded_by(f"import {module}") & unwanted


def test_public_names_load_where_optional_packages_are_missing() -> None:
    """As on a machine that has none of them."""
    block = f"""
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split('.')[0] in {OPTIONAL!r}:
            raise ModuleNotFoundError(f"No module named '{{name}}'", name=name)
sys.meta_path.insert(0, Missing())
import strata, strata.checkpoint, strata.stores, strata.data
strata.CheckpointManager, strata.DatasetRegistry, strata.TrainingOrchestrator, strata.ShardManager
strata.AsyncCheckpointWriter, strata.StorageBackend
"""
    assert loaded_by(block) & set(OPTIONAL) == set()


def test_torchs_own_modules_are_imported_silently_where_strata_is_installed() -> None:
    """Torch loads the rendezvous plug-ins with them, and prints what goes wrong there. Both back ends are there."""
    code = (
        "import torch.distributed.checkpoint\n"
        "import torch.distributed.run\n"
        "from torch.distributed.elastic.rendezvous import rendezvous_handler_registry as registry\n"
        "print(*(registry._registry[name].__module__ for name in ('etcd', 'strata')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=170)
    assert (done.stdout.split(), done.stderr) == (["strata.rendezvous"] * 2, "")
