"""Torch's private names: all of them are there, one that is missing is named, and they are used in one package only."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper
from torch.distributed.fsdp import _common_utils as fsdp

from strata import torch_compat
from strata.agent.careful import CarefulAgent
from strata.agent.regrouping import RegroupingAgent
from strata.agent.warm import WarmWorkers
from strata.rendezvous.handler import CasRendezvousHandler
from strata.torch_compat import NAMES, OPTIONAL, UnsupportedTorch, dtensors, missing, require
from strata.torch_compat.wrappers import COMPILED, WRAPPERS, is_extra_state, plain_name

SRC = Path(__file__).parents[2] / "src"
COMPAT = SRC / "strata/torch_compat"
PRIVATE = re.compile(r"_[A-Za-z]\w*")
OWN = ("self", "cls", "super")
NOT_TORCHS = {
    "_codecs": "a module of Python",
    "_replace": "of named tuples",
    "_distributed": "of Hugging Face's datasets",
    "_strategy": "of Lightning",
    **dict.fromkeys(("_s", "_state_dict", "_sum", "_time"), "an ending of names"),
    **dict.fromkeys(("_load", "_manager", "_pending", "_sharded"), "of our jobs, which benchmarks look into"),
}
"""Names that the sources of some torch mention as well."""
OURS = {"_fork", "_handler", "_put"}
"""The same, in `torch_compat`."""


@pytest.mark.parametrize("area", NAMES)
def test_the_installed_torch_has_every_name(area: str) -> None:
    assert missing(area) == ()


def test_a_torch_without_a_name_is_refused_by_that_name(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = (
        "torch.nn:Module._no_such_hook",
        "torch._no_such_module:anything",
        "torch.nn:_NoClass.method",
        "torch.distributed.elastic.multiprocessing:MultiprocessContext._no_such_attribute",
    )
    monkeypatch.setitem(torch_compat.NAMES, "modules", (*NAMES["modules"], *gone))
    with pytest.raises(UnsupportedTorch) as refused:
        require("modules")
    assert refused.value.missing == gone
    assert "torch.nn:Module._no_such_hook" in str(refused.value)
    assert torch_compat.OLDEST in str(refused.value)


def test_the_check_is_made_at_import() -> None:
    code = (
        "import torch.utils.data._utils.worker as worker\n"
        "del worker._worker_loop\n"
        "import strata.torch_compat.loaders"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=170)
    assert "UnsupportedTorch: torch" in done.stderr
    assert "torch.utils.data._utils.worker:_worker_loop" in done.stderr


def private_names(tree: ast.Module) -> set[str]:
    """Names with an underscore that a module reaches for in torch: imported, as attributes of what is, and in strings."""
    aliases = {"torch"}
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name.split(".")[0] == "torch"]
            aliases |= {alias.asname for alias in node.names if alias.asname and alias.name in names}
            found |= {name for name in names if "._" in name}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            aliases |= {alias.asname or alias.name for alias in node.names}
            found |= {
                f"{node.module}.{alias.name}"
                for alias in node.names
                if "._" in f".{node.module}.{alias.name}" and alias.name not in ("__version__",)
            }
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and PRIVATE.fullmatch(node.attr):
            root: ast.expr = node.value
            while isinstance(root, ast.Attribute):
                root = root.value
            if isinstance(root, ast.Name) and root.id in aliases:
                found.add(ast.unparse(node))
        elif isinstance(node, ast.Constant) and re.fullmatch(r"torch\.[\w.]*\b_[\w.]*", str(node.value)):
            found.add(repr(node.value))
    return found


def undefined_names(trees: Mapping[str, ast.Module]) -> dict[str, set[str]]:
    """By file: names with an underscore, as attributes or in strings, that nothing here defines. What an object has itself may be
    defined in any file, what another has only in the same."""
    defined = {path: definitions(tree) for path, tree in trees.items()}
    anywhere = set().union(*defined.values())
    found = {}
    for path, tree in trees.items():
        found[path] = in_strings(tree) - anywhere
        others = imported(tree)
        for of, name in attributes(tree):
            if of not in others and name not in (anywhere if of in OWN else defined[path]):
                found[path].add(name)
    return found


def definitions(tree: ast.AST) -> set[str]:
    """Functions, classes, variables, and attributes that an object gives itself."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and owner(node) in OWN:
            found.add(node.attr)
    return found


def owner(node: ast.Attribute) -> str:
    """What an attribute is of, where that has a name."""
    of = node.value.func if isinstance(node.value, ast.Call) else node.value
    return of.id if isinstance(of, ast.Name) else ""


def attributes(tree: ast.AST) -> set[tuple[str, str]]:
    """Private ones, each with what it is of."""
    return {
        (owner(node), node.attr)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and PRIVATE.fullmatch(node.attr)
    }


def in_strings(tree: ast.AST) -> set[str]:
    """Private names in strings that consist of names."""
    return {
        name
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and re.fullmatch(r"[\w.]+", str(node.value))
        for name in str(node.value).split(".")
        if PRIVATE.fullmatch(name)
    }


def imported(tree: ast.AST) -> set[str]:
    """What is imported, except from `torch_compat`: `private_names` knows what of it is torch's."""
    return {
        (alias.asname or alias.name).split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        or (isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("strata.torch_compat"))
        for alias in node.names
    }


@cache
def words_of_torch() -> frozenset[str]:
    """Everything with an underscore that its sources mention."""
    files = [path for path in Path(torch.__file__).parent.rglob("*.py*") if path.suffix in (".py", ".pyi")]
    found = {word for path in files for word in re.findall(rb"\b_[A-Za-z]\w*", path.read_bytes())}
    return frozenset(word.decode() for word in found)


def parsed(paths: Iterable[Path]) -> dict[str, ast.Module]:
    return {str(path.relative_to(SRC)): ast.parse(path.read_text()) for path in sorted(paths)}


def test_private_names_are_used_in_one_package_only() -> None:
    trees = parsed(path for path in SRC.rglob("*.py") if COMPAT not in path.parents)
    undefined = undefined_names(trees)
    found = {
        path: private_names(tree) | (undefined[path] & words_of_torch() - NOT_TORCHS.keys())
        for path, tree in trees.items()
    }
    assert {path: names for path, names in found.items() if names} == {}


def test_the_search_finds_each_kind() -> None:
    source = ast.parse(
        "import torch\nimport torch._C\nfrom torch.nn import _reduction\nfrom torch import cuda as gpu\n"
        "gpu._lazy_init()\ntorch.nn.Module._version\nname = 'torch._dynamo'\n"
    )
    assert private_names(source) == {
        "torch._C",
        "torch.nn._reduction",
        "gpu._lazy_init",
        "torch.nn.Module._version",
        "'torch._dynamo'",
    }


def test_the_search_finds_names_that_are_nobody_elses() -> None:
    source = ast.parse(
        "import os\nfrom strata.torch_compat.elastic import Agent\n"
        "class Ours(Agent):\n"
        "    def meet(self, context):\n"
        "        self._ours = self._worker_group\n"
        "        context._pc = os._exit\n"
        "        Agent._rendezvous(self)\n"
        "        getattr(context, '_ret_vals')\n"
        "        return self._ours, self._theirs, 'model._orig_mod.', ('torch.serialization', '_get_layout')\n"
    )
    others = ast.parse("def _theirs(): ...\ndef _pc(): ...\n")
    found = undefined_names({"ours": source, "others": others})
    names = {"_worker_group", "_pc", "_rendezvous", "_ret_vals", "_orig_mod", "_get_layout"}
    assert found == {"ours": names, "others": set()}
    assert names <= words_of_torch()


@pytest.mark.parametrize("path", sorted(COMPAT.glob("[!_]*.py")), ids=lambda path: path.stem)
def test_each_name_that_is_used_is_looked_for_or_optional(path: Path) -> None:
    tree = ast.parse(path.read_text())
    areas = re.findall(r'^ *require\("(\w+)"\)', path.read_text(), re.MULTILINE)
    declared = [*(name for area in areas for name in NAMES[area]), *OPTIONAL.get(path.stem, ())]
    used = {name for _, name in attributes(tree)} | in_strings(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            used |= {name for alias in node.names for name in f"{node.module}.{alias.name}".split(".")}
        elif isinstance(node, ast.ClassDef):
            used |= definitions(node)
    ours = (definitions(tree) - words_of_torch()) | OURS
    known = set(re.split(r"\W", " ".join(declared)))
    assert {name for name in used - ours - known if PRIVATE.fullmatch(name)} == set()


def test_every_area_is_looked_for() -> None:
    sources = "".join(path.read_text() for path in COMPAT.glob("*.py"))
    assert set(re.findall(r'^ *require\("(\w+)"\)', sources, re.MULTILINE)) == NAMES.keys()


def test_what_distributed_tensors_have_is_looked_for_with_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    class DTensor(torch.Tensor): ...

    monkeypatch.setitem(
        torch_compat.NAMES, "distributed_tensors", ("torch.distributed.tensor:DTensor._gone",)
    )
    dtensors._require_local_tensors.cache_clear()
    with pytest.raises(UnsupportedTorch, match=r"DTensor\._gone"):
        dtensors.local_of(torch.zeros(1).as_subclass(DTensor))


@pytest.mark.parametrize("kind", [CarefulAgent, RegroupingAgent, WarmWorkers, CasRendezvousHandler])
def test_subclasses_override_no_private_method_of_torch(kind: type) -> None:
    theirs = [base for base in kind.__mro__ if base.__module__.startswith("torch.")]
    ours = {name for name, value in vars(kind).items() if callable(value) and PRIVATE.fullmatch(name)}
    assert theirs
    assert {name for name in ours if any(hasattr(base, name) for base in theirs)} == set()


def test_wrappers_are_called_as_by_the_installed_torch() -> None:
    class Module(torch.nn.Linear):
        def get_extra_state(self) -> str:
            return "more"

    model = torch.nn.Sequential(Module(1, 1))
    compiled: Any = torch.compile(model, backend="eager")
    assert getattr(compiled, COMPILED) is model
    names = [plain_name(name) for name in torch.nn.Sequential(compiled).state_dict()]
    assert names == ["0.0.weight", "0.0.bias", "0.0._extra_state"]
    assert [is_extra_state(name) for name in names] == [False, False, True]
    assert {checkpoint_wrapper._CHECKPOINT_WRAPPED_MODULE, fsdp.FSDP_WRAPPED_MODULE} <= set(WRAPPERS)
    assert plain_name("my_orig_mod.weight") == "my_orig_mod.weight"


def test_the_versions_that_are_declared_are_those_that_are_tested() -> None:
    oldest, newest = torch_compat.OLDEST, torch_compat.NEWEST
    major, minor = map(int, newest.split("."))
    project = tomllib.loads((SRC.parent / "pyproject.toml").read_text())["project"]
    assert project["optional-dependencies"]["torch"] == [f"torch>={oldest},<{major}.{minor + 1}"]
    jobs = yaml.safe_load((SRC.parent / ".github/workflows/ci.yml").read_text())["jobs"]
    first, *_, last = jobs["torch"]["strategy"]["matrix"]["torch"]
    assert (first, last) == (f"{oldest}.0", f"{newest}.0")
    for page in ("README.md", "docs/quick-start.md"):
        assert f"PyTorch {oldest} to {newest}" in (SRC.parent / page).read_text()
