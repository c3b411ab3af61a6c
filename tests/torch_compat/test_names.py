"""Torch's private names: all of them are there, one that is missing is named, and they are used in one package only."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from strata import torch_compat
from strata.torch_compat import NAMES, UnsupportedTorch, missing, require

SRC = Path(__file__).parents[2] / "src"


@pytest.mark.parametrize("area", NAMES)
def test_the_installed_torch_has_every_name(area: str) -> None:
    assert missing(area) == ()


def test_a_torch_without_a_name_is_refused_by_that_name(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = ("torch.nn:Module._no_such_hook", "torch._no_such_module:anything", "torch.nn:_NoClass.method")
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


def private_names(path: Path) -> list[str]:
    """Names with an underscore that a module reaches for in torch: imported, as attributes, and in strings."""
    tree = ast.parse(path.read_text())
    aliases = {"torch"}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name.split(".")[0] == "torch"]
            aliases |= {alias.asname for alias in node.names if alias.asname and alias.name in names}
            found += [name for name in names if "._" in name]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            aliases |= {alias.asname or alias.name for alias in node.names}
            found += [
                f"{node.module}.{alias.name}"
                for alias in node.names
                if "._" in f".{node.module}.{alias.name}" and alias.name not in ("__version__",)
            ]
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            root: ast.expr = node.value
            while isinstance(root, ast.Attribute):
                root = root.value
            if isinstance(root, ast.Name) and root.id in aliases:
                found.append(ast.unparse(node))
        elif isinstance(node, ast.Constant) and re.fullmatch(r"torch\.[\w.]*\b_[\w.]*", str(node.value)):
            found.append(repr(node.value))
    return found


def test_private_names_are_used_in_one_package_only() -> None:
    found = {
        str(path.relative_to(SRC)): names
        for path in sorted(SRC.rglob("*.py"))
        if "torch_compat" not in path.parts and (names := private_names(path))
    }
    assert found == {}


def test_the_search_finds_each_kind(tmp_path: Path) -> None:
    source = tmp_path / "module.py"
    source.write_text(
        "import torch\nimport torch._C\nfrom torch.nn import _reduction\nfrom torch import cuda as gpu\n"
        "gpu._lazy_init()\ntorch.nn.Module._version\nname = 'torch._dynamo'\n"
    )
    assert set(private_names(source)) == {
        "torch._C",
        "torch.nn._reduction",
        "gpu._lazy_init",
        "torch.nn.Module._version",
        "'torch._dynamo'",
    }


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
