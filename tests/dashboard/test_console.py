"""The dashboard against real runs: failures stay visible, slow workers, work at risk, and nothing untrue while disconnected."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from strata import TrainingOrchestrator
from strata.bench.coordinator.fleet import Fleet, beating
from strata.bench.coordinator.serving import HOST, served_coordinator
from strata.launch.cleanup import end_processes
from strata.shared_memory import forget_jobs
from tests.dashboard.browser import Browser
from tests.support import Coordinator, eventually
from tests.training.test_recoverable import Job, job

pytestmark = pytest.mark.browser

PHONE = (390, 844)
DESK = (1440, 900)
SEEN = "/^(\\(\\d+\\) )?seen: /"
"""The page title of the run, with or without incidents."""
NOTE_STATUSES = (
    "window.statuses = new Set();"
    " new MutationObserver(() => document.querySelectorAll('main [role=status]')"
    ".forEach((each) => window.statuses.add(each.textContent)))"
    ".observe(document.querySelector('main'), { childList: true, characterData: true, subtree: true })"
)
"""From now on, also those that are there for a moment."""


@pytest.fixture
def own(tmp_path: Path, built: Path) -> Iterator[Coordinator]:
    server = Coordinator(tmp_path / "coordinator", env={"STRATA_LAUNCHER": "local"}).start()
    yield server
    server.stop()
    # A failing test leaves its task, which outlives the coordinator.
    for run in tmp_path.glob("coordinator/tasks/task-*/run-*"):
        end_processes(f"{run.parent.name}-{run.name.removeprefix('run-')}")
        forget_jobs(run.parent.name)


@pytest.mark.timeout(900)
def test_a_failure_stays_in_sight_until_it_is_dismissed(
    own: Coordinator, page: Browser, tmp_path: Path
) -> None:
    page.base = own.url
    options = {"COORDINATOR_ADDR": own.address, "STRATA_JOB_ID": "seen"}
    with job(tmp_path / "job", "ddp", workers=3, steps=100_000, **options) as running:
        running.await_line(lambda line: "resumed" in line, count=3)
        page.open("/")
        see_the_run(page, own)
        number = kill_a_rank(page, own, running)
        follow_the_card(page, number)
        dismiss_it(page, number)
        see_who_is_slow(page)
        use_a_phone(page)


def see_the_run(page: Browser, own: Coordinator) -> None:
    """Loss, step, goodput, throughput and risk come first; a copy on the machine does not count for its loss."""
    for label in ("Loss", "Step", "Goodput", "Throughput", "Work at risk"):
        page.see(label, css="[aria-label='Run seen'] dt", exact=True)
    eventually(lambda: any("snapshot_step" in w["metrics"] for w in own.get("/api/workers")), within_s=90)
    risk = "[aria-label='Work at risk of seen'] li"
    page.until(
        f"/^Process dies\\s*[\\d,]+ steps?$/.test(document.querySelector(\"{risk}\")?.innerText.trim() ?? '')"
    )
    page.see("everything, no copy off the machine", css=risk)
    page.see("everything, no bucket copy", css=risk)
    page.until(f"{SEEN}.test(document.title)")
    assert (
        page.evaluate("document.querySelector('link[rel=icon]').getAttribute('href')") != "/favicon-bad.svg"
    )


def failures(own: Coordinator) -> list[dict[str, Any]]:
    """On a busy machine a rank may be slow as well, which is an incident of its own."""
    return [incident for incident in own.get("/api/incidents") if incident["subject"] == "run"]


def kill_a_rank(page: Browser, own: Coordinator, running: Job) -> int:
    """Returns the number of its incident."""
    os.kill(running.living()[1], signal.SIGKILL)
    eventually(lambda: [each["state"] for each in failures(own)] == ["recovered"], within_s=240)
    # The agent says how the process ended in a thread of its own; the recovery does not wait for it.
    (line,) = eventually(lambda: own.get("/api/logs?level=error&q=rank%201"), within_s=60)
    (incident,) = failures(own)
    page.see(role="article", name=f"Incident {incident['id']}", within_s=90)
    card = f"[aria-label='Incident {incident['id']}'] *"
    assert incident["rank"] == 1
    assert "was killed by SIGKILL" in line["message"], "one error for one failure, whoever noticed it first"
    page.see("rank 1 on", css=card)
    page.see(incident["text"][1:], css=card)
    page.see("recovered", css=card, within_s=60)
    page.see("Next:", css=card)
    page.see("error: ", css="[aria-label=Events] li")  # An error event, however fast the recovery was.
    page.until("/^\\(\\d+\\) seen: /.test(document.title)")
    page.until("document.querySelector('link[rel=icon]').getAttribute('href') === '/favicon-bad.svg'")
    return int(incident["id"])


def follow_the_card(page: Browser, number: int) -> None:
    page.open("/workers")  # On every view, also after a reload.
    page.see("rank 1", css="[aria-label='Latest incident'] *")
    page.open("/")
    page.click("link", f"Details of incident {number}")
    page.see(role="dialog", name=f"incident {number}")
    for section in ("Decision", "Cost", "Recovery phases"):
        page.see(css=f"[role=dialog] [aria-label='{section}']")
    page.see("rank 1", css="[role=dialog] [aria-label^=Evidence] article *")
    page.press("Escape")
    page.miss(role="dialog")
    page.choose("State", "open")
    page.miss(css="[role=row]:has-text('recovered')")
    page.choose("State", "")
    page.fill("Search incidents", "rank 1")
    page.see(css="[role=row]:has-text('rank 1')")
    page.open(f"/incidents?incident={number}")
    page.click("link", "Search logs")
    page.see(css="[role=log] [data-row]:has-text('rank 1')")
    page.until("new URLSearchParams(location.search).get('task') === 'seen'")


def dismiss_it(page: Browser, number: int) -> None:
    page.open("/")
    page.click("button", f"Dismiss incident {number}")
    page.miss(role="article", name=f"Incident {number}")
    page.until("document.querySelector('link[rel=icon]').getAttribute('href') !== '/favicon-bad.svg'")
    page.open("/")
    page.see(css="[aria-label='Run seen']")
    assert page.count(role="article", name=f"Incident {number}") == 0


def see_who_is_slow(page: Browser) -> None:
    page.see(css="[aria-label='Slowest workers'] li", nth=1, within_s=60)
    page.see("busy", css="[aria-label='Slowest workers'] li span")
    page.open("/workers")
    page.see(css="main [data-id]:has-text('busy')")
    page.open("/workers?worker=seen-rank0")
    page.see(css="[role=dialog] figure[aria-label='Step time over the last hour']")
    page.see("Wait time per step", css="[role=dialog] dt")
    page.press("Escape")


def use_a_phone(page: Browser) -> None:
    """Nothing is wider than the page, the headline is not cut off, and log messages are readable."""
    page.size(*PHONE)
    try:
        for path in ("/", "/runs", "/runs/seen", "/incidents", "/logs", "/workers", "/checkpoints"):
            page.open(path)
            page.see(role="heading", nth=0)
            page.until("document.querySelectorAll('main .skeleton').length === 0")
            wide = "document.documentElement.scrollWidth > innerWidth || document.querySelector('main').scrollWidth > innerWidth"
            assert not page.evaluate(wide), f"{path} scrolls sideways"
        page.open("/")
        page.see(css="[aria-label=Health] h2")
        headline = "document.querySelector('[aria-label=Health] h2')"
        assert page.evaluate(f"{headline}.scrollWidth <= {headline}.clientWidth")
        page.click("link", "Logs", inside={"css": "[aria-label='Main views']"})
        page.see(css="[role=log] [data-row]")
        page.until(
            "[...document.querySelectorAll('[role=log] [data-row]')].some(row => {"
            " const box = row.lastElementChild.lastElementChild.getBoundingClientRect();"
            " return box.width > 150 && box.left >= 0 && box.right <= innerWidth; })"
        )
        page.open("/runs/seen")
        page.see(css="canvas[aria-label*='workers up']")
        assert (
            page.evaluate("getComputedStyle(document.querySelector('canvas[role=img]')).touchAction")
            == "pan-y"
        )
        page.click("button", "More", inside={"css": "[aria-label='Main views']"})
        page.see(role="dialog", name="Views")
        page.click("link", "Coordinator", inside={"role": "dialog"})
        page.see(role="heading", name="Coordinator")
    finally:
        page.size(*DESK)


@pytest.mark.timeout(600)
def test_a_first_page_starts_a_sample_and_its_run_is_stopped_there(own: Coordinator, page: Browser) -> None:
    page.base = own.url
    page.open("/")
    page.see(f"COORDINATOR_ADDR={own.address} strata torchrun --nproc-per-node=2 train.py", css="main code")
    page.allow("clipboard-write")
    page.evaluate(NOTE_STATUSES)
    page.click("button", "Copy on one machine")
    page.until("window.statuses.has('Copied')")
    page.click("button", "Run sample")
    page.until("location.pathname.startsWith('/runs/task-')")
    task = page.url.rpartition("/")[2]
    eventually(lambda: own.get(f"/api/tasks/{task}")["status"] == "running", within_s=120)
    page.open(f"/tasks?task={task}")  # An old URL.
    page.until(f"location.pathname === '/runs/{task}'")
    page.see(role="dialog", name="sample")  # Before it is there, the page behind it has such a button too.
    page.click("button", "Stop", exact=True)
    page.see(role="dialog", name="Stop sample?")
    title = "[...document.querySelectorAll('[role=dialog] h2')].at(-1)"
    assert page.evaluate(f"{title}.scrollWidth <= {title}.clientWidth"), "the name is not cut off"
    page.click("button", "Stop task")
    eventually(lambda: own.get(f"/api/tasks/{task}")["status"] == "stopped", within_s=150)
    page.open("/")
    page.see("stopped", css="[aria-label='Run sample'] *")
    assert page.text(css="[aria-label='Run sample'] dd", nth=1) != "0", "it keeps its last values"
    page.open("/tasks")
    page.until("location.pathname === '/runs'")
    page.see(css="[role=row]:has-text('sample'):has-text('stopped')")
    page.open(f"/runs/{task}")
    page.click("button", "Restart", exact=True)
    eventually(lambda: own.get(f"/api/tasks/{task}")["status"] in ("pending", "running"), within_s=120)
    page.see(role="button", name="Stop", exact=True)
    own.post(f"/api/tasks/{task}/stop", {})
    eventually(lambda: own.get(f"/api/tasks/{task}")["status"] == "stopped", within_s=150)


def test_normal_states_leave_no_refusal_in_the_console(own: Coordinator, page: Browser) -> None:
    """A job without reports and a dataset without readers cause no error responses."""
    page.base = own.url
    page.refusals()
    with TrainingOrchestrator(own.address, job_id="quiet") as worker:
        worker.register_worker("quiet-rank0")
        own.post(
            "/api/datasets",
            {"dataset_id": "unread", "path": "/nothing", "format": "jsonl", "total_samples": 100},
        )
        for path in (
            "/",
            "/runs/quiet",
            "/data?dataset=unread",
            "/workers?worker=quiet-rank0",
            "/coordinator",
        ):
            page.open(path)
            page.see(role="heading", nth=0)
            page.until("document.querySelectorAll('main .skeleton').length === 0")
            page.until(
                "performance.getEntriesByType('resource').some(r => r.name.includes('/api/incidents'))"
            )
            if path.startswith("/data"):
                page.see("No readers yet")
        # Samples of a missing file cannot be shown: the only error response.
        assert [text for text in page.refusals() if "/preview" not in text] == []


def test_a_dataset_is_shown_by_worker_only_where_workers_read_shards(own: Coordinator, page: Browser) -> None:
    page.base = own.url
    with TrainingOrchestrator(own.address, job_id="reader") as worker:
        worker.register_worker("reader-rank0")
        worker.register_dataset("d", "/data", "parquet", 400, 10)
        page.open("/data?dataset=d")
        page.see("No readers yet")  # It may; so far it has requested nothing.
        assert page.count(css="[aria-label='Shards by worker']") == 0
        worker.get_shards("d")
        page.see(css="[aria-label='Shards by worker'] [role=listitem]:has-text('rank0')")


def test_an_unknown_address_shows_a_page(page: Browser) -> None:
    page.open("/no/such/page")
    page.see(role="heading", name="Page not found")
    page.see("/no/such/page", css="main *")
    page.until("/^(\\(\\d+\\) )?Page not found · Strata$/.test(document.title)")
    page.click("link", "Open overview")
    page.see(role="heading", name="Overview")


def test_while_disconnected_nothing_is_invented_and_nothing_spins(own: Coordinator, page: Browser) -> None:
    page.base = own.url
    worker = TrainingOrchestrator(own.address, job_id="away")
    try:
        worker.register_worker("away-rank0")
        worker.heartbeat(7, 0, state="training", metrics={"loss": 2.5})
        page.open("/")
        page.see("2.5", css="[aria-label='Run away'] dd *")
        page.until("performance.getEntriesByType('resource').some(r => r.name.includes('/assets/demo-'))")
        own.kill()
        page.see("Disconnected.", css="[role=alert]")
        headline = page.text(css="[aria-label=Health] h2")
        assert headline.startswith("Last known: ")
        # Longer than it takes a heartbeat to become late, by the banner's clock, which continues.
        page.until("/Data is (1[4-9]|[2-9]\\d) s old/.test(document.querySelector('[role=alert]').innerText)")
        assert page.text(css="[aria-label=Health] h2") == headline
        page.click("link", "Runs", exact=True)
        page.click("button", "Start task")
        page.see("Not connected", css="[role=dialog] *")
        assert page.count(css="[role=dialog] .skeleton") == 0
    finally:
        worker.close()


@pytest.mark.timeout(600)
async def test_hundreds_of_workers_are_counted_and_the_exceptions_named(page: Browser) -> None:
    with served_coordinator() as coordinator:
        page.base = f"http://{HOST}:{coordinator.http_port}"
        # Whoever is silent for a while is an exception.
        async with Fleet(coordinator, 300, connections=20) as fleet, beating(fleet):
            await asyncio.to_thread(page.open, "/workers")
            await asyncio.to_thread(page.see, css="main [role=img][aria-label*='300']")
            await asyncio.to_thread(page.see, css="[aria-label=Exceptions]")
            await asyncio.to_thread(page.until, "document.querySelectorAll('main [data-id]').length < 100")
        await asyncio.to_thread(page.leave)


@pytest.mark.timeout(300)
def test_notifications_report_failures_and_stops(own: Coordinator, page: Browser) -> None:
    page.base = own.url
    page.allow("notifications")
    page.open("/settings")
    page.click("radio", "On", inside={"role": "radiogroup", "name": "Desktop notifications"})
    page.see("This browser notifies")
    page.open("/")
    page.see(role="heading", name="Overview")
    page.until("document.title === 'Strata'")
    page.see("Live", css="nav *")  # What was there before that is not new.
    page.evaluate(
        "window.notified = []; window.Notification = class extends Notification"
        " { constructor(title, more) { super(title, more); window.notified.push(title); } }"
    )
    task = own.post("/api/tasks", {"name": "notified", "type": "training", "config": {"device": "cpu"}})[1][
        "task_id"
    ]
    page.see(css="[aria-label='Run notified']")
    own.post(f"/api/tasks/{task}/stop", {})
    page.until("window.notified.includes('notified stopped')", within_s=120)
    page.evaluate("localStorage.setItem('strata.notify', '0')")


def test_nothing_of_a_wide_page_is_cut_off(page: Browser) -> None:
    """The last column of the runs, and the tooltip of the timeline."""
    page.size(*DESK)
    page.open("/runs?demo")
    page.see("Last logged", css="[role=columnheader] *")
    assert page.evaluate(
        "(t => t.scrollWidth <= t.clientWidth)(document.querySelector('[role=table][aria-label=Runs]'))"
    )
    page.open("/runs/gpt-small?demo")
    page.see(css="canvas[aria-label*='workers up']")
    for right, bottom in ((4, 40), (600, 40)):
        page.evaluate(
            "(canvas => { canvas.scrollIntoView({block: 'end'}); const box = canvas.getBoundingClientRect();"
            " canvas.dispatchEvent(new PointerEvent('pointermove', {bubbles: true,"
            f" clientX: box.right - 30 - {right}, clientY: Math.min(box.bottom, innerHeight) - {bottom}}})); }})"
            "(document.querySelector('canvas[role=img]'))"
        )
        page.see(role="tooltip")
        inside = "b.top >= 0 && b.left >= 0 && b.right <= innerWidth && b.bottom <= innerHeight"
        page.until(f"(b => {inside})(document.querySelector('[role=tooltip]').getBoundingClientRect())")
