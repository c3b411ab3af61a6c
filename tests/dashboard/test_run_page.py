"""The page of a run and the comparison of several, in a real browser, with metrics logged by real workers."""

from __future__ import annotations

import csv
import os
import re
import signal
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import numpy as np
import pytest

from strata import TrainingOrchestrator
from strata.core.telemetry.histograms import PARTS, column
from strata.core.telemetry.run_details import RunDetails, packed
from strata.rpc import coordinator_pb2 as pb
from strata.training.metrics.histogram import Histogram
from strata.worker.outbox import MetricOutbox
from tests.dashboard.browser import Browser
from tests.support import Coordinator, eventually
from tests.training.test_recoverable import job

pytestmark = pytest.mark.browser

STEPS = 4_000
NAMES = ("accuracy", "eval/loss", "grad_norm", "loss", "lr")
SPIKE = 1_234
"""A step with a gradient spike."""


def rows(first: int, last: int, *, lift: float, started_s: float) -> pb.MetricRows:
    steps = np.arange(first, last + 1)
    curves = {
        "accuracy": 1 - np.exp(-steps / 2_000) - lift / 10,
        "eval/loss": 5 * np.exp(-steps / 900) + 1.1 + lift,
        "grad_norm": np.where(steps == SPIKE, 900.0, 1.0),
        "loss": 5 * np.exp(-steps / 900) + 1 + lift + 0.1 * np.sin(steps),
        "lr": np.full(len(steps), 3e-4),
    }
    values = np.column_stack(list(curves.values())).astype("<f8")
    return pb.MetricRows(names=curves, steps=steps, times=started_s + steps / 10, values=values.tobytes())


def log_run(coordinator: Coordinator, name: str, *, lr: float, back_to: int | None = None) -> None:
    """A run; with `back_to`, of two starts, the second resumed at an earlier step than the first had reached."""
    started_s = time.time() - STEPS
    reached = STEPS if back_to is None else STEPS - 500
    starts = [(1, 0, reached)] if back_to is None else [(1, 0, reached), (2, back_to, STEPS)]
    for generation, resumed, last in starts:
        details = RunDetails(
            command=f"train.py --lr {lr}",
            commit="0123456789abcdef0123456789abcdef01234567",
            branch="main",
            world_size=2,
            config={"lr": lr, "seed": 7, "model": {"width": 64}},
        )
        with TrainingOrchestrator(coordinator.address, job_id=name) as worker:
            worker.register_worker(f"{name}-rank0", run_id=f"run-of-{name}", run_generation=generation)
            outbox = MetricOutbox(
                generation=generation,
                started_ms=int(started_s * 1000) + generation,
                resumed_step=resumed,
                details=packed(details),
            )
            worker.send_metrics(outbox)
            outbox.put(rows(resumed + 1, last, lift=lr * 1_000 + generation / 10, started_s=started_s))
            for step in (1_000, 2_000):
                worker.notify_checkpoint(
                    f"{name}-{generation}-{step}", step, 0, f"/c/{step}", 1_000, tiers=["memory", "nvme"]
                )
            eventually(partial(getattr, outbox, "is_empty"), within_s=60)
            worker.deregister()


@pytest.fixture(scope="module")
def runs(watched: Coordinator) -> Coordinator:
    log_run(watched, "alpha", lr=0.0003, back_to=2_500)
    log_run(watched, "beta", lr=0.001)
    return watched


@pytest.fixture
def fresh(runs: Coordinator, page: Browser) -> Iterator[Browser]:
    """A browser without a stored layout."""
    page.open("/settings")
    page.evaluate("localStorage.clear()")
    yield page
    page.evaluate("localStorage.clear()")


def panels(page: Browser) -> list[str]:
    found: list[str] = page.evaluate(
        "[...document.querySelectorAll('[data-panel]')].map(p => p.dataset.panel)"
    )
    return found


def panel(name: str, css: str = "") -> dict[str, Any]:
    return {"css": f"[data-panel='{name}'] {css}".strip()}


def query(page: Browser) -> dict[str, str]:
    return {key: values[0] for key, values in parse_qs(urlsplit(page.url).query).items()}


def choose_of(page: Browser, name: str, what: str) -> None:
    page.click("button", f"Actions for {name}", exact=True)
    page.click("menuitem", what)


def see_drawn(page: Browser, name: str) -> None:
    page.see(**panel(name, "canvas"))
    page.until(f"!document.querySelector(\"[data-panel='{name}'] [data-old]\")")


def asked(page: Browser) -> list[str]:
    """Curve requests so far."""
    found: list[str] = page.evaluate(
        "performance.getEntriesByType('resource').map(r => r.name).filter(n => n.includes('/series'))"
    )
    return found


def test_every_metric_has_a_panel_that_may_be_pinned_moved_removed_and_added(fresh: Browser) -> None:
    page = fresh
    page.open("/runs/alpha?tab=charts")
    see_drawn(page, "loss")
    assert panels(page) == ["loss", "eval/loss", "accuracy", "grad_norm", "lr"]
    page.click("button", "Pin lr", exact=True)
    page.see(role="button", name="Unpin lr")
    assert panels(page)[0] == "lr"
    choose_of(page, "eval/loss", "Remove panel")
    page.miss(**panel("eval/loss"))
    page.drag(panel("grad_norm", "[draggable]"), panel("loss"))
    page.until("document.querySelectorAll('[data-panel]')[1].dataset.panel === 'grad_norm'")
    choose_of(page, "loss", "Move right")
    page.until("document.querySelectorAll('[data-panel]')[3].dataset.panel === 'loss'")
    assert panels(page) == ["lr", "grad_norm", "accuracy", "loss"]
    # For all runs of this browser, until a run has a layout of its own.
    page.open("/runs/beta?tab=charts")
    see_drawn(page, "lr")
    assert panels(page) == ["lr", "grad_norm", "accuracy", "loss"]
    page.click("button", "Panels", exact=True)
    page.see(role="dialog", name="Panels")
    page.click("checkbox", "For this run only")
    page.click("checkbox", "eval/loss")
    page.click("button", "Done")
    page.see(**panel("eval/loss"))
    page.open("/runs/alpha?tab=charts")
    see_drawn(page, "lr")
    assert "eval/loss" not in panels(page)
    page.open("/runs/alpha")
    see_drawn(page, "lr")
    assert panels(page) == ["lr"], "pinned panels are on the overview"


def test_zoom_is_shared_by_all_charts_and_brings_finer_points(fresh: Browser) -> None:
    page = fresh
    page.open("/runs/alpha?tab=charts")
    see_drawn(page, "grad_norm")
    page.mouse((0.4, 0.5), (0.5, 0.5), held=True, **panel("grad_norm", ".u-over"))
    page.until("new URLSearchParams(location.search).has('zoom')")
    first, last = map(int, query(page)["zoom"].split("-"))
    assert 0 < first < last < STEPS
    page.until(
        "performance.getEntriesByType('resource').some(r => r.name.includes('/series') && r.name.includes('from='))"
    )
    several = [each for each in asked(page) if "from=" in each and each.count("name=") > 1]
    assert several, "panels in view share a request"
    see_drawn(page, "loss")
    page.see(f"at step {last:,}", css="[data-panel='loss'] .sr-only")
    # By the fields, on another axis, and reset.
    page.fill("First step", "1200")
    page.fill("Last step", "1300")
    page.press("Enter")
    page.until("new URLSearchParams(location.search).get('zoom') === '1200-1300'")
    page.see("1 to 900", css="[data-panel='grad_norm'] .sr-only")
    page.click("radio", "Relative")
    page.until("new URLSearchParams(location.search).get('x') === 'relative'")
    see_drawn(page, "grad_norm")
    page.mouse((0.5, 0.5), twice=True, **panel("grad_norm", ".u-over"))
    page.until("!new URLSearchParams(location.search).has('zoom')")


def test_a_zoom_into_what_was_looked_at_is_drawn_from_points_that_are_there(fresh: Browser) -> None:
    page = fresh
    page.open("/runs/alpha?tab=charts")
    see_drawn(page, "loss")
    # Panels may have asked in several requests: all that are drawn have their answer.
    page.until(
        "((ahead) => [...document.querySelectorAll('[data-panel]:has([data-plot])')].every(each => ahead.has(each.dataset.panel)))"
        "(new Set(performance.getEntriesByType('resource').filter(r => r.name.includes('points=2500') && r.responseEnd > 0)"
        ".flatMap(r => new URL(r.name).searchParams.getAll('name'))))"
    )
    # Further requests hang: what is drawn was prefetched.
    page.evaluate(
        "window.fetch = ((before) => (...args) => (args[0].url ?? String(args[0])).includes('from=')"
        " ? new Promise(() => {}) : before(...args))(window.fetch)"
    )
    # In the first frame, before the URL follows: every chart, from more points than it had of this range.
    page.evaluate(
        "document.addEventListener('mouseup', () => requestAnimationFrame(() => {"
        " window.atOnce = [location.search, ...document.querySelectorAll('[data-plot]')].map((each) => each.dataset?.points ?? each);"
        " }), { once: true })"
    )
    before = page.evaluate(
        "[...document.querySelectorAll('[data-plot]')].map((each) => Number(each.dataset.points))"
    )
    page.mouse((0.2, 0.5), (0.7, 0.5), held=True, **panel("loss", ".u-over"))
    page.until("new URLSearchParams(location.search).has('zoom')")
    search, *points = page.evaluate("window.atOnce")
    assert "zoom" not in search
    of_loss = panels(page).index("loss")
    assert before[of_loss] * 0.6 < int(points[of_loss])
    assert all(int(now) != then for now, then in zip(points, before, strict=True)), "they are drawn together"
    first, last = map(int, query(page)["zoom"].split("-"))
    see_drawn(page, "loss")
    page.until(
        "/at step ([0-9,]+), [^,]+ at step ([0-9,]+)/.test(document.querySelector(\"[data-panel='loss'] .sr-only\").textContent)"
    )
    summary = page.text(**panel("loss", ".sr-only"))
    begin, end = (int(each.replace(",", "")) for each in re.findall(r"at step ([0-9,]+)", summary))
    assert first <= begin < end <= last
    page.open("/runs")  # Restores fetch with a page load.


def test_a_histogram_is_one_panel_with_its_distribution(fresh: Browser, runs: Coordinator) -> None:
    page = fresh
    log_histograms(runs, "gamma")
    page.open("/runs/gamma?tab=charts")
    see_drawn(page, "grads#")
    assert panels(page) == ["loss", "grads#"]
    page.see(role="heading", name="grads", exact=True)
    page.see("Median of grads", css="[data-panel='grads#'] .sr-only")
    bars = "document.querySelector(\"[data-panel='grads#'] [data-shape] path\").getAttribute('d')"
    page.until(f"{bars}.length > 100")
    page.see("(90 %: -", css="[data-panel='grads#'] [data-value]")
    at_the_end = page.evaluate(bars)
    page.mouse((0.1, 0.5), (0.12, 0.5), **panel("grads#", ".u-over"))
    page.until(f"{bars} !== {at_the_end!r}")
    page.click("button", "Panels", exact=True)
    page.see("histogram", css="[role=dialog] li")
    page.click("button", "Done")
    page.open("/runs/gamma?tab=details")
    page.see("grads (median)", css="th")
    page.open("/compare?runs=gamma,alpha")
    page.see("grads (median)", css="th")
    see_drawn(page, "grads#")


def log_histograms(coordinator: Coordinator, name: str) -> None:
    """A distribution whose tails grow with every step."""
    steps = np.arange(1, 201)
    shape = np.array(
        [float(part) for part in Histogram(np.random.default_rng(1).normal(size=9_999)).parts("")]
    )
    grads = np.sign(shape) * np.abs(shape) ** (1 + steps[:, None] / 200)
    grads[:, PARTS.index("count")] = 9_999
    values = np.column_stack([grads, 5 / steps]).astype("<f8")
    names = [*(column("grads", part) for part in PARTS), "loss"]
    with TrainingOrchestrator(coordinator.address, job_id=name) as worker:
        worker.register_worker(f"{name}-rank0", run_id=f"run-of-{name}", run_generation=1)
        outbox = MetricOutbox(generation=1, started_ms=int(time.time() * 1000), resumed_step=0)
        worker.send_metrics(outbox)
        times = time.time() - 200 + steps
        outbox.put(pb.MetricRows(names=names, steps=steps, times=times, values=values.tobytes()))
        eventually(partial(getattr, outbox, "is_empty"), within_s=60)
        worker.deregister()


def test_a_pointer_is_on_all_charts_and_settings_are_in_the_address(fresh: Browser) -> None:
    page = fresh
    page.open("/runs/alpha?tab=charts&smooth=0.6&log=1")
    see_drawn(page, "loss")
    see_drawn(page, "accuracy")
    assert page.evaluate("document.querySelector('input[type=range]').value") == "0.6"
    last = page.text(**panel("accuracy", "[data-value]"))
    page.mouse((0.1, 0.5), (0.12, 0.5), **panel("loss", ".u-over"))
    page.until(f"document.querySelector(\"[data-panel='accuracy'] [data-value]\").textContent !== {last!r}")
    page.see("step ", css="[data-panel='accuracy'] p")
    page.click("checkbox", "Log scale")
    page.until("!new URLSearchParams(location.search).has('log')")
    page.fill("Filter metrics", "loss")
    page.miss(**panel("lr"))
    assert panels(page) == ["loss", "eval/loss"]
    assert query(page) == {"tab": "charts", "smooth": "0.6", "q": "loss"}


def test_what_was_abandoned_is_kept_and_a_panel_is_exported(fresh: Browser, tmp_path: Path) -> None:
    page = fresh
    page.open("/runs/alpha?tab=charts&q=loss")
    see_drawn(page, "loss")
    page.see("1 abandoned branch.", css="[data-panel='loss'] .sr-only")
    page.see("Markers: 0 failures, 4 checkpoints.", css="[data-panel='loss'] .sr-only")
    page.click("button", "Actions for loss", exact=True)
    assert page.download(tmp_path / "loss.csv", "menuitem", "Export CSV") == "alpha-loss.csv"
    with (tmp_path / "loss.csv").open() as file:
        lines = list(csv.DictReader(file))
    committed = [int(line["step"]) for line in lines if line["branch"] == "committed"]
    abandoned = [int(line["step"]) for line in lines if line["branch"] == "abandoned, generation 1"]
    assert committed == list(range(1, STEPS + 1))
    assert (abandoned[0], abandoned[-1]) == (2_501, 3_500)
    page.click("button", "Actions for loss", exact=True)
    assert page.download(tmp_path / "loss.png", "menuitem", "Export PNG") == "alpha-loss.png"
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    choose_of(page, "loss", "Enlarge")
    page.see(css="[role=dialog] canvas")


def test_a_run_says_how_it_was_started_and_keeps_tags_and_notes(fresh: Browser, runs: Coordinator) -> None:
    page = fresh
    page.open("/runs/alpha?tab=details")
    page.see("train.py --lr 0.0003", css="pre")
    page.see("0123456789ab", css="dd span", exact=True)
    page.see("model.width", css="dt")
    page.see("2,500", css="[aria-label=Starts] td")
    page.fill("New tag", "baseline")
    page.click("button", "Add tag")
    page.see("baseline", css="[aria-label=Tags] li")
    page.fill("Notes", "Warm-up was too short.")
    page.click("button", "Save notes")
    page.miss(role="button", name="Save notes")
    info = runs.get("/api/runs/alpha")
    assert (info["run"], info["tags"], info["notes"]) == (
        "run-of-alpha",
        ["baseline"],
        "Warm-up was too short.",
    )
    page.open("/runs?q=baseline")
    page.see("alpha", css="[role=row] *")
    page.miss("beta", css="[role=row] *")
    page.open("/runs/alpha?tab=details")
    page.click("button", "Remove tag baseline")
    page.miss(role="button", name="Remove tag baseline")


def test_runs_are_compared_and_the_address_shows_it_to_others(fresh: Browser, tmp_path: Path) -> None:
    page = fresh
    page.open("/runs")
    page.see(role="checkbox", name="Compare alpha")
    page.see(role="checkbox", name="Compare beta")
    # In one moment: the second choice is added to the first one before that is shown.
    page.evaluate(
        "['alpha', 'beta'].forEach(name => document.querySelector(`input[aria-label='Compare ${name}']`).click())"
    )
    page.click("button", "Compare 2")
    page.see(role="heading", name="Compare runs")
    see_drawn(page, "loss")
    page.see("beta", css="[data-panel='loss'] p")
    page.see("1 of 3 settings differ")
    page.click("checkbox", "Differences only")
    page.see("seed", css="[aria-label=Configuration] th")
    page.choose("Add a metric", "lr")
    page.miss(**panel("loss"))
    page.click("radio", "Time")
    page.until("new URLSearchParams(location.search).get('x') === 'wall'")
    address = urlsplit(page.url)
    assert query(page) == {"runs": "alpha,beta", "m": "lr", "x": "wall", "config": "all"}
    page.leave()
    page.open(f"{address.path}?{address.query}")
    see_drawn(page, "lr")
    assert panels(page) == ["lr"]
    page.see("seed", css="[aria-label=Configuration] th")
    assert page.download(tmp_path / "values.csv", "button", "Export CSV") == "final-values-alpha-beta.csv"
    with (tmp_path / "values.csv").open() as file:
        found = {(line["metric"], line["run"]): float(line["last"]) for line in csv.DictReader(file)}
    assert found["eval/loss", "alpha"] < found["eval/loss", "beta"]
    page.click("button", "Remove beta")
    page.until("new URLSearchParams(location.search).get('runs') === 'alpha'")


def test_a_run_that_logs_nothing_says_so_and_asks_for_nothing(runs: Coordinator, page: Browser) -> None:
    with TrainingOrchestrator(runs.address, job_id="silent") as worker:
        worker.register_worker("silent-rank0")
        page.open("/runs/silent?tab=charts")
        page.see("No metrics logged")
        page.click("radio", "Details")
        page.see("No launch command reported", css="p")
        asked_for = (
            "performance.getEntriesByType('resource').filter(r => r.name.includes('/api/runs/')).length"
        )
        assert page.evaluate(asked_for) == 0
        page.open("/runs/nobody")
        page.see("Run not found")
        worker.deregister()


@pytest.mark.timeout(900)
def test_no_part_of_a_run_has_a_serious_violation_on_a_screen_or_a_phone(fresh: Browser) -> None:
    page, found = fresh, {}
    views = [f"/runs/alpha?tab={tab}" for tab in ("overview", "charts", "details", "logs")]
    for view in (*views, "/compare?runs=alpha,beta", "/runs"):
        for width in (1440, 390):
            page.size(width, 900)
            page.theme(dark=True)
            page.open(view)
            page.see(role="heading", nth=0)
            page.until("document.querySelectorAll('main .skeleton').length === 0")
            serious = page.serious()
            page.theme(dark=False)
            serious += page.serious(["color-contrast", "link-in-text-block"])
            if serious:
                found[f"{view} at {width}"] = serious
            wide = page.evaluate(
                "document.querySelector('main').scrollWidth - document.querySelector('main').clientWidth"
            )
            assert wide <= 0, f"{view} at {width} is {wide} px too wide"
    page.size(1440, 900)
    assert found == {}


@pytest.mark.timeout(600)
def test_a_failure_and_the_log_of_a_run_are_on_its_page(
    watched: Coordinator, page: Browser, tmp_path: Path
) -> None:
    options = {"COORDINATOR_ADDR": watched.address, "STRATA_JOB_ID": "marked"}
    with job(tmp_path / "job", "ddp", workers=2, steps=100_000, **options) as running:
        running.await_line(lambda line: "resumed" in line, count=2)
        os.kill(running.living()[1], signal.SIGKILL)
        eventually(lambda: watched.get("/api/incidents?run=marked"), within_s=240)
        page.open("/runs/marked?tab=charts")
        page.see("Markers: 1 failure", css="[data-panel='lr'] .sr-only", within_s=90)
        page.click("radio", "Details")
        page.see("recoverable_script.py", css="pre")
        page.see("snapshot_every", css="dt")
        page.click("radio", "Logs")
        page.fill("Search messages", "rank 1")
        page.see("rank 1", css="[aria-label='Log lines'] li", within_s=90)
