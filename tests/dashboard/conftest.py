"""One coordinator and one browser for all tests of the dashboard that do not end them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.dashboard.browser import Browser, build_dashboard
from tests.support import Coordinator


@pytest.fixture(scope="session")
def built(program: Callable[[str], str]) -> Path:
    """The folder of the build; rebuilt if out of date."""
    if not build_dashboard.is_current():
        program("npm")
        build_dashboard.build()
    return Path(build_dashboard.BUILT)


@pytest.fixture(scope="session")
def watched(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Coordinator]:
    server = Coordinator(tmp_path_factory.mktemp("watched") / "coordinator").start()
    yield server
    server.stop()


@pytest.fixture(scope="session")
def browser(watched: Coordinator) -> Iterator[Browser]:
    with Browser(watched.url) as opened:
        yield opened


@pytest.fixture
def page(browser: Browser, watched: Coordinator) -> Iterator[Browser]:
    """The browser on this coordinator; the console must have no errors at the end of the test."""
    browser.base = watched.url
    browser.size(1440, 900)
    browser.complaints()
    yield browser
    violations, complaints = browser.violations(), browser.complaints()
    browser.leave()
    assert (violations, complaints) == ([], [])
