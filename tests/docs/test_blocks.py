"""Every block and every command of the documentation is executed, or parsed with a reason why not. None is skipped.

What is executed is in `test_tutorials`, `test_concepts`, `test_operating` and `test_other_pages`: four, because they take long."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import tomllib
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import yaml

from strata.cli.launching.validate import find_problems
from strata.coordinator.notify.settings import read_notify
from strata.coordinator.settings import read_settings
from strata.diagnostics import health
from strata.launch.recipes import read_recipes
from tests.docs import commands
from tests.docs.blocks import PAGES, ROOT, Block, Unclassified, blocks, every
from tests.docs.session import console

Program = Callable[[str], str]
BASE_CONFIG = ROOT / "examples" / "configs" / "small.yaml"
INLINE = re.compile(r"(?<!`)`(strata (?!\w+:)[^`]+)`(?!`)")
NAMED_TEST = re.compile(r"\btests/[\w/]+\.py\b")


def parse_all(shell: str) -> None:
    for words in commands.command_lines(shell):
        commands.parse(words)


def of_class(*names: str) -> list[Block]:
    return [block for block in every() if block.name in names]


@pytest.mark.parametrize("block", of_class("file"), ids=str)
def test_a_file_that_is_shown_is_used_by_what_follows(block: Block) -> None:
    assert any(
        block.about in other.text for other in every() if other.page == block.page and other.name == "run"
    )


@pytest.mark.parametrize("block", of_class("parse"), ids=str)
def test_what_is_not_executed_is_accepted_by_the_programs_it_calls(block: Block, program: Program) -> None:
    if block.language == "python":
        compile(block.text, block.where, "exec")
        return
    text = console(block.text)[0] if block.language == "console" else block.text
    checked = subprocess.run([program("bash"), "-n"], input=text, text=True, capture_output=True, check=False)
    assert checked.returncode == 0, f"{block.where}: {checked.stderr}"
    parse_all(text)


def named_tests(block: Block) -> str:
    """The text of those that its reason names."""
    return "\n".join((ROOT / named).read_text() for named in NAMED_TEST.findall(block.about))


@pytest.mark.parametrize("block", [each for each in of_class("parse") if named_tests(each)], ids=str)
def test_a_test_that_is_said_to_run_a_command_has_its_words(block: Block) -> None:
    """Each command of Strata's has a word of its own there, in quotes or as an option or a file; of others one does."""
    tests = named_tests(block)

    def is_there(words: list[str]) -> bool:
        return any(
            f'"{word}"' in tests if word.isalnum() else re.split("[/=]", word)[-1] in tests for word in words
        )

    lines = list(commands.command_lines(block.text))
    missing = [words for words in lines if words[0] == "strata" and not is_there(words[1:])]
    assert missing == []
    assert any(is_there(words) for words in lines)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_tests_that_a_page_names_exist(page: Path) -> None:
    assert [name for name in NAMED_TEST.findall(page.read_text()) if not (ROOT / name).is_file()] == []


@pytest.mark.parametrize("block", of_class("valid", "rejected"), ids=str)
def test_a_configuration_that_is_shown_is_what_its_reader_accepts(block: Block, tmp_path: Path) -> None:
    problem = READERS[block.about](block.text, tmp_path)
    if block.name == "valid":
        assert problem is None, f"{block.where}: {problem}"
    else:
        assert problem is not None, f"{block.where} is shown as wrong, and is accepted"


def inline_commands() -> list[tuple[str, str]]:
    return [
        (page.relative_to(ROOT).as_posix(), " ".join(found.split()))
        for page in PAGES
        for found in INLINE.findall(re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.S | re.M))
    ]


@pytest.mark.parametrize(("page", "command"), inline_commands())
def test_a_command_named_in_a_sentence_exists_and_takes_these_arguments(page: str, command: str) -> None:
    _, *words = shlex.split(command)
    if set(words) & set(commands.ELLIPSES):  # What stands for something else takes what follows with it.
        words = words[: min(words.index(each) for each in commands.ELLIPSES if each in words)]
    if not commands.is_command(words):
        commands.parse(["strata", *words])


@pytest.mark.parametrize("sample", of_class("sample"), ids=str)
def test_a_sample_names_a_test_that_looks_for_some_of_it(sample: Block) -> None:
    tests = named_tests(sample)
    assert any(words in tests for words in re.findall(r"(?=\b([a-z]{2,}\W+[a-z]{2,})\b)", sample.text))


# --- what reads configurations ---


def _json(text: str, folder: Path) -> str | None:
    return _problem(lambda: json.loads(text))


def _prometheus(text: str, folder: Path) -> str | None:
    """Its two parts that are ours: rules that exist, and targets as Prometheus wants them."""

    def read() -> None:
        found = yaml.safe_load(text)
        assert set(found) == {"rule_files", "scrape_configs"}
        assert all((ROOT / "deploy" / "prometheus" / name).is_file() for name in found["rule_files"])
        assert all(job["job_name"] and job["static_configs"][0]["targets"] for job in found["scrape_configs"])

    return _problem(read)


def _harness(text: str, folder: Path) -> str | None:
    """A whole configuration with these sections in it, read as `strata validate` does."""

    def read() -> None:
        base = yaml.safe_load(BASE_CONFIG.read_text())
        for section, values in yaml.safe_load(text).items():
            base[section] = {**base.get(section, {}), **values}
        errors = [
            each for each in find_problems(yaml.safe_dump(base), [], try_s3=False) if each.severity == "error"
        ]
        assert not errors, errors

    return _problem(read)


def _coordinator(text: str, folder: Path) -> str | None:
    file = folder / "strata.toml"
    file.write_text(text)
    return _problem(lambda: read_settings(file=file, environ={}))


def _notify(text: str, folder: Path) -> str | None:
    file = folder / "strata.toml"
    file.write_text(text)
    named = dict.fromkeys(re.findall(r'"\$(\w+)"', text), "https://hooks.example.org/x")
    return _problem(lambda: read_notify(file=file, environ=named))


def _recipe(text: str, folder: Path) -> str | None:
    (folder / "finetune.toml").write_text(text)
    (folder / "finetune.py").write_text("")
    return _problem(lambda: read_recipes(folder))


def _entry_points(text: str, folder: Path) -> str | None:
    """A package's own `pyproject.toml`: its groups are among those that are read."""

    def read() -> None:
        groups = tomllib.loads(text)["project"]["entry-points"]
        points = [EntryPoint(n, v, g) for g, named in groups.items() for n, v in named.items()]
        assert points
        assert {point.group for point in points} <= {health.GROUP}
        assert all(point.module and point.attr for point in points)

    return _problem(read)


def _problem(read: Callable[[], Any]) -> str | None:
    try:
        read()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


READERS = {
    "json": _json,
    "prometheus": _prometheus,
    "harness": _harness,
    "coordinator": _coordinator,
    "notify": _notify,
    "recipe": _recipe,
    "entry points": _entry_points,
}


# --- the classes themselves ---


@pytest.mark.parametrize("block", every(), ids=str)
def test_every_block_has_a_class(block: Block) -> None:
    """The list of what is done with each block: `pytest --collect-only -q tests/docs`."""
    if block.language == "toml":
        tomllib.loads(block.text)


@pytest.mark.parametrize(
    "text",
    [
        "```\nno language\n```\n",
        "```text\nwithout a class\n```\n",
        "```yaml\na: 1\n```\n",
        "<!-- parse -->\n```bash\nwithout a reason\n```\n",
        "<!-- run: 2 → 1 -->\n```bash\nls\n```\n",
        "<!-- skip: because -->\n```bash\nls\n```\n",
        "<!-- output -->\n```python\nprint(1)\n```\n",
        "```bash\nwithout an end\n",
    ],
)
def test_a_block_without_a_class_is_an_error(text: str) -> None:
    with pytest.raises(Unclassified):
        [block.executed for block in blocks("page.md", text)]


@pytest.mark.parametrize(
    "line",
    [
        "strata sevre",
        "strata serve --prot 3",
        "strata checkpoint lst runs",
        "strata stop",
        "strata torchrun --workers=2 train.py",
        "torchrun --nnode-count=2 train.py",
        "make demonstration",
        "pip install 'strata-runtime[torch,s4]'",
        "./scripts/launch.sh",
        "export A=1 && strata worker",
        "STRATA_LOG=debug strata serve --verbose",
    ],
)
def test_a_wrong_command_is_refused(line: str) -> None:
    with pytest.raises(commands.Refused):
        parse_all(line)
