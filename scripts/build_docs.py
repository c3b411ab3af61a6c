"""Build the documentation site into build/site: `make docs`.

The pages in docs/ are written so that their links work in the repository. They are gathered in build/docs together with what is
made from the code (docs_reference.py), and what they link to outside of docs/ becomes a page too: ARCHITECTURE.md and CHANGELOG.md
as they are, every other file as its text. Then the site is built strictly: a link or an anchor that leads nowhere, or a page
that is not in the navigation, is an error.
"""

from __future__ import annotations

import os.path
import re
import shutil
import subprocess
import sys
from pathlib import Path, PurePosixPath

import docs_reference
import make_figures

ROOT = Path(__file__).resolve().parent.parent
GATHERED = ROOT / "build" / "docs"
SITE = ROOT / "build" / "site"
PAGES = {"ARCHITECTURE.md": "architecture.md", "CHANGELOG.md": "changelog.md", "README.md": "index.md"}
"""Files of the repository's root that are pages of the site."""
GENERATED = {
    "Command line": "cli.md",
    "Python": "python/strata.md",
    "HTTP API": "http.md",
    "gRPC": "grpc.md",
}
"""Pages that only the site has, by how the index of the references begins their lines."""
LINK = re.compile(r"(?<!`)\]\((?!https?:|#|mailto:)([^)\s#]+)(#[^)\s]*)?\)")
LANGUAGES = {
    ".py": "python",
    ".sh": "bash",
    ".yaml": "yaml",
    ".yml": "yaml",
    ".toml": "toml",
    ".json": "json",
}


def main() -> int:
    if make_figures.main([]) != 0:
        return 1
    gather()
    shutil.rmtree(SITE, ignore_errors=True)
    status = subprocess.run([sys.executable, "-m", *BUILD], cwd=ROOT, check=False).returncode
    if status == 0:
        print("build/site is built. To look at it: python3 -m http.server --directory build/site")
    return status


BUILD = ("zensical", "build", "--strict", "--config-file", "mkdocs.yml")


def gather() -> None:
    """Everything the site is made of, in one folder, with links that lead to pages of the site."""
    shutil.rmtree(GATHERED, ignore_errors=True)
    shutil.copytree(ROOT / "docs", GATHERED)
    for path in GATHERED.rglob("*.md"):
        name = path.relative_to(GATHERED).as_posix()
        path.write_text(with_links(path.read_text(), of=f"docs/{name}"))
    index = GATHERED / "reference" / "index.md"
    index.write_text(with_generated_pages(index.read_text()))
    pages = docs_reference.pages()
    for name in ("ARCHITECTURE.md", "CHANGELOG.md"):
        pages[PAGES[name]] = with_links((ROOT / name).read_text(), of=name)
    for name in sorted(linked_sources()):
        pages[source_page(name)] = source_text(name)
    for uri, text in pages.items():
        (GATHERED / uri).parent.mkdir(parents=True, exist_ok=True)
        (GATHERED / uri).write_text(text)


def linked_sources() -> set[str]:
    """Files that pages link to and that are no pages themselves."""
    found: set[str] = set()
    for path in [*(ROOT / "docs").rglob("*.md"), ROOT / "ARCHITECTURE.md", ROOT / "CHANGELOG.md"]:
        name = path.relative_to(ROOT).as_posix()
        found |= {file for link in LINK.finditer(path.read_text()) if (file := in_repository(name, link[1]))}
    return {path for path in found if path not in PAGES and not path.startswith("docs/")}


def in_repository(page: str, link: str) -> str | None:
    """The file a link of a page leads to, as a path from the repository's root."""
    target = os.path.normpath(PurePosixPath(page).parent / link)
    return target if not target.startswith("..") and (ROOT / target).is_file() else None


def with_links(markdown: str, *, of: str) -> str:
    """The page's text with its links leading to pages of the site. One that leads nowhere is left for the build to name."""
    here = PAGES.get(of) or of.removeprefix("docs/")

    def rewritten(link: re.Match[str]) -> str:
        target = in_repository(of, link[1])
        if target is None or (of.startswith("docs/") and target.startswith("docs/")):
            return link[0]
        there = PAGES.get(target) or (
            target.removeprefix("docs/") if target.startswith("docs/") else source_page(target)
        )
        return f"]({os.path.relpath(there, PurePosixPath(here).parent)}{link[2] or ''})"

    return LINK.sub(rewritten, markdown)


def with_generated_pages(index: str) -> str:
    """The index of the references, whose lines lead to pages that a repository cannot have."""
    for name, page in GENERATED.items():
        index, count = re.subn(rf"^- {name}:", f"- [{name}]({page}):", index, flags=re.M)
        if count != 1:
            raise ValueError(f"docs/reference/index.md has {count} lines that begin with '- {name}:'")
    return index


def source_page(path: str) -> str:
    return f"source/{path}.md"


def source_text(path: str) -> str:
    language = LANGUAGES.get(Path(path).suffix, "text")
    return f"# {path}\n\n`````{language}\n{(ROOT / path).read_text()}`````\n"


if __name__ == "__main__":
    sys.exit(main())
