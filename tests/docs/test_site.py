"""The site: it builds strictly, its figures are current, its links lead somewhere, and it asks nobody else for anything."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from html.parser import HTMLParser
from pathlib import Path

import pytest

from strata.config import documented
from strata.coordinator.settings import CoordinatorSettings
from tests.docs.blocks import PAGES, ROOT

LINK = re.compile(r"(?<!`)\]\((?!https?:|mailto:)([^)\s#]*)(#[^)\s]*)?\)")
DOCS_PATH = re.compile(r"\bdocs/[\w/.-]+\.(?:md|svg|png)\b")
LOADS = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href"}
"""What a browser fetches by itself. Links that a reader may follow are not among them."""


def test_every_figure_is_current() -> None:
    checked = subprocess.run(
        [sys.executable, ROOT / "scripts" / "make_figures.py", "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_a_figure_shows_what_its_table_says(tmp_path: Path) -> None:
    """A number that changes in a table changes the plot."""
    plotting = [ROOT / "scripts" / "make_figures.py", *(ROOT / "benchmarks").glob("*.py")]
    for path in (*plotting, *(ROOT / "docs" / "benchmarks").glob("*.md")):
        target = tmp_path / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(path.read_text())
    page = tmp_path / "docs" / "benchmarks" / "recovery.md"
    assert "| 0.85 s (" in page.read_text()
    page.write_text(page.read_text().replace("| 0.85 s (", "| 0.77 s ("))
    subprocess.run([sys.executable, tmp_path / "scripts" / "make_figures.py"], check=True)
    assert "0.77 s" in (tmp_path / "docs" / "figures" / "recovery.svg").read_text()
    page.write_text(page.read_text().replace("process crash", "crash of a process"))
    refused = subprocess.run(
        [sys.executable, tmp_path / "scripts" / "make_figures.py"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert refused.returncode == 1
    assert "error: 0 rows begin with 'process crash" in refused.stderr


@pytest.mark.parametrize(
    "page",
    [*PAGES, ROOT / "CHANGELOG.md"],
    ids=lambda page: page.relative_to(ROOT).as_posix(),
)
def test_links_of_a_page_work_in_the_repository(page: Path) -> None:
    """On the site the build checks them, anchors included."""
    missing = [target for target, _ in LINK.findall(page.read_text()) if not (page.parent / target).exists()]
    assert missing == []


def test_code_and_messages_name_pages_that_exist() -> None:
    files = [
        path
        for folder in ("src", "scripts", "deploy", "examples", "tests", "dashboard/src")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".sh", ".yaml", ".yml", ".toml", ".json", ".ts", ".tsx")
    ]
    missing = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in files
        for name in DOCS_PATH.findall(path.read_text(errors="replace"))
        if not (ROOT / name).exists()
    ]
    assert missing == []


def test_the_table_of_settings_is_that_of_the_code() -> None:
    shown = re.findall(
        r"^\| `(\w+)` \| `([^`]*)` \| (?:`(\w+)`)? *\| (.*) \|$",
        (ROOT / "docs" / "operating" / "configuration.md").read_text(),
        re.MULTILINE,
    )
    home = str(Path.home())
    expected = [
        tuple(str(cell).replace(home, "~") for cell in row) for row in documented(CoordinatorSettings)
    ]
    assert shown == expected, "\n".join("| `{}` | `{}` | `{}` | {} |".format(*row) for row in expected)


def test_the_table_of_extras_is_that_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    rows = re.findall(r"^\| (`.*?) \|", (ROOT / "docs" / "quick-start.md").read_text(), re.MULTILINE)
    shown = re.findall(r"`(\w+)`", " ".join(rows))
    assert sorted(shown) == sorted(set(project["optional-dependencies"]) - {"docs", "dev"})


class Loads(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        if tag == "link" and attributes.get("rel") in ("canonical", "next", "prev"):
            return
        if tag in LOADS and (address := attributes.get(LOADS[tag])):
            self.found.append(address)


@pytest.mark.timeout(600)
def test_the_site_builds_strictly_and_loads_nothing_from_elsewhere() -> None:
    built = subprocess.run(
        [sys.executable, ROOT / "scripts" / "build_docs.py"], capture_output=True, text=True, check=False
    )
    assert built.returncode == 0, built.stdout + built.stderr
    site = ROOT / "build" / "site"
    pages = list(site.rglob("*.html"))
    assert len(pages) > 40
    foreign = []
    for page in pages:
        loads = Loads()
        loads.feed(page.read_text())
        assert any(address.endswith(".css") for address in loads.found), page
        foreign += [f"{page}: {each}" for each in loads.found if re.match(r"(https?:)?//", each)]
    for style in site.rglob("*.css"):
        foreign += [
            f"{style}: {each}" for each in re.findall(r"url\(['\"]?((?:https?:)?//[^)]*)", style.read_text())
        ]
    assert foreign == []
    for expected, words in {
        "reference": 'href="cli/"',
        "reference/cli": "strata checkpoint verify",
        "reference/http": "/api/dashboard",
        "reference/grpc": "RegisterWorkerRequest",
        "reference/python/strata.training": "ElasticOptions",
    }.items():
        assert words in (site / expected / "index.html").read_text(), expected
