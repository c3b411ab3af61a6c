"""Names and log lines are text, whatever they look like."""

from __future__ import annotations

import logging
import re

import pytest

from strata.core.checks import NAME_LIMIT
from strata.core.telemetry.logtext import clean
from tests.dashboard.browser import Browser
from tests.dashboard.hostile import LINES, NAMES
from tests.support import Coordinator, eventually

pytestmark = pytest.mark.browser


def shown(text: str) -> str:
    """As rendered: whitespace collapsed, zero-width marks removed."""
    return re.sub(r"[\s\u2028\u2029\ufeff\u200b-\u200f\u061c]+", " ", text).strip()


@pytest.fixture(scope="module")
def filled(watched: Coordinator) -> Coordinator:
    from strata import TrainingOrchestrator

    names = [name for name in NAMES if len(name.encode()) <= NAME_LIMIT]
    assert len(names) + len(LINES) >= 150
    for number, name in enumerate(names):
        body = {
            "dataset_id": f"hostile-{number}",
            "path": f"/data/{name}",
            "format": "text",
            "total_samples": 10,
            "metadata": {"name": name},
        }
        status, answer = watched.post("/api/datasets", body)
        assert status == 201, answer
    with TrainingOrchestrator(watched.address, job_id="<b>job</b>", ship_logs=True) as worker:
        worker.register_worker(NAMES[0], metadata={NAMES[1]: NAMES[2]})
        assert worker.wait_connected(60)
        logger = logging.getLogger("strata.training.hostile")
        logger.setLevel(logging.INFO)
        for line in LINES:
            logger.info("%s", line)
        worker.flush_logs()
        eventually(
            lambda: len(watched.get(f"/api/logs?limit=1000&worker_id={_quoted(NAMES[0])}")) >= len(LINES),
            within_s=60,
        )
        worker.notify_checkpoint("c<i>1</i>", 3, 1, f"/c/{NAMES[0]}", 10, status="completed", tiers=["<u>S3"])
        worker.deregister("<b>bye</b>")
    return watched


DRAWN = (
    "Math.max(...[...{table}.querySelectorAll('[data-row]')].map(row => row.getBoundingClientRect().bottom))"
    " >= {table}.getBoundingClientRect().top + {table}.clientHeight - 1"
)
"""Rows are drawn a frame or more after scrolling to them."""


def _quoted(name: str) -> str:
    from urllib.parse import quote

    return quote(name)


@pytest.mark.timeout(900)
def test_every_hostile_log_line_is_shown_as_it_is(filled: Coordinator, page: Browser) -> None:
    stored = [
        entry["message"] for entry in filled.get("/api/logs?limit=1000") if entry["source"] != "coordinator"
    ]
    assert {clean(line) for line in LINES} <= set(stored)
    page.open("/logs?wrap=1")
    page.see(role="log")
    for line in LINES:
        words = clean(line)[:200]
        search = next((part for part in words.splitlines() if part.strip()), words)[:60]
        page.fill("Search messages", search)
        wanted = shown(clean(line))[:80]
        eventually(
            lambda wanted=wanted: wanted in shown(" ".join(page.texts(css="[role=log] [data-row]"))),  # type: ignore[misc]
            within_s=60,
            what=line,
        )
    assert page.evaluate("window.hacked") is None


def test_every_hostile_name_is_shown_as_it_is(filled: Coordinator, page: Browser) -> None:
    page.open("/data")
    names = [shown(dataset["name"]) for dataset in filled.get("/api/datasets")]
    table = "document.querySelector('[role=table][aria-label=Datasets]')"
    page.until(f"{table}?.ariaRowCount === '{len(names) + 1}'")
    seen: set[str] = set()
    more = True
    while more:
        page.until(DRAWN.format(table=table))
        seen |= {
            shown(text) for text in page.texts(css="[aria-label=Datasets] [role=row] [role=cell]:first-child")
        }
        more = page.evaluate(
            f"(() => {{ const t = {table}; const before = t.scrollTop;"
            " t.scrollTop += 200; return t.scrollTop > before; })()"
        )
    missing = {name for name in names if not any(text.startswith(name) for text in seen)}
    assert not missing, "each name is shown, before its ID"
    for view in ("/", "/workers", "/checkpoints", "/runs", "/tasks"):
        page.open(view)
        page.see(role="heading", name="", nth=0)
    assert page.evaluate("window.hacked") is None
    assert page.evaluate("document.querySelectorAll('main script, main iframe, main object').length") == 0
