"""Machines are drained from the page of a worker or of a run; the page shows the consequences, the outcome, and why something cannot
be drained."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from strata import TrainingOrchestrator
from tests.dashboard.browser import Browser
from tests.support import Coordinator, eventually, may_name_machines
from tests.training.test_drain import Machines

pytestmark = pytest.mark.browser


@pytest.mark.timeout(300)
def test_a_machine_is_drained_and_undrained_by_two_clicks(watched: Coordinator, page: Browser) -> None:
    with TrainingOrchestrator(watched.address, job_id="drained") as worker:
        worker.register_worker("drained-rank0", hostname="node-7")
        page.open("/workers?worker=drained-rank0")
        page.see("Machine node-7")
        page.click("button", "Drain machine")
        page.see("Its agents cannot rejoin until the drain is cancelled.")
        page.fill("Deadline (seconds)", "45")
        page.click("button", "Drain")
        page.see("none of its agents is in a run")
        (known,) = (one for one in watched.get("/api/drains") if one["host"] == "node-7")
        assert known["deadline"] - known["since"] == 45
        assert page.serious() == []
        page.click("button", "Undrain")
        page.see(role="button", name="Drain machine")
        eventually(lambda: watched.get("/api/drains") == [], within_s=30)


def refusal(page: Browser) -> str:
    """Why the run cannot be drained; the button stays reachable by keyboard."""
    page.see(css="button[aria-disabled=true]:has-text('Drain')")
    page.until("!document.querySelector('button[aria-disabled=true]').title.startsWith('Checking')")
    return str(page.evaluate("document.querySelector('button[aria-disabled=true]').title"))


def test_a_run_that_cannot_be_drained_says_why(watched: Coordinator, page: Browser) -> None:
    with TrainingOrchestrator(watched.address, job_id="elsewhere") as worker:
        worker.register_worker("elsewhere-rank0", hostname="node-8")
        page.open("/runs/elsewhere")
        assert "No agent of its machines is connected to this coordinator" in refusal(page)
        page.evaluate("document.querySelector('button[aria-disabled=true]').click()")
        assert page.count(role="dialog") == 0
        worker.notify_checkpoint("elsewhere-1", 1, 0, path="/ckpt/1")
        worker.deregister()
    page.until("document.querySelector('button[aria-disabled=true]').title.startsWith('No worker')")


@pytest.mark.timeout(900)
def test_a_run_leaves_one_of_its_machines_and_continues_on_the_other(
    watched: Coordinator, page: Browser, tmp_path: Path
) -> None:
    if not may_name_machines():
        pytest.skip("this user may not name machines")
    with ExitStack() as stack:
        machines = Machines(stack, watched, tmp_path, nnodes="1:2")
        machines.slow.write_text("0.9")  # It lasts as long as it takes to drain it by hand.
        a, b = (machines.start(name, STRATA_JOB_ID="two-machines") for name in ("dock-a", "dock-b"))
        a.await_line(lambda line: line.get("world") == 2, count=2)
        a.await_line(lambda line: "resumed" in line, count=2)

        def are_known() -> bool:
            """Each worker registers in a thread of its own. The dialog selects a machine that is the only one."""
            of_run = [one for one in watched.get("/api/workers") if one["job_id"] == "two-machines"]
            hosts = {one["host"] for one in watched.get("/api/agents")}
            return {one["ip"] for one in of_run} == {"dock-a", "dock-b"} <= hosts

        eventually(are_known, within_s=60)
        page.open("/runs/two-machines")
        page.click("button", "Drain", exact=True)
        page.see(role="dialog", name="Drain machines of two-machines?")
        page.see("Select at least one machine.")
        page.click("checkbox", "dock-a")
        page.click("checkbox", "dock-b")
        page.see("All machines of two-machines are drained: it saves and ends")
        page.click("checkbox", "dock-a")
        page.see("two-machines saves, 1 worker leaves, and it continues on dock-a")
        page.fill("Deadline (seconds)", "soon")
        page.see("Enter a number of seconds.")
        page.fill("Deadline (seconds)", "100")
        assert page.serious() == []
        page.click("button", "Drain", exact=True, inside={"role": "dialog"})
        page.miss(role="dialog")
        page.see("1 agent left before the deadline", css="[aria-label='Drained machines'] li", within_s=150)
        page.see("two-machines: ", css="[aria-label='Drained machines'] li li", within_s=150)
        page.see("(0 steps lost)", css="[aria-label='Drained machines'] li li", within_s=150)
        assert b.process.wait(120) != 0
        a.await_line(lambda line: line.get("world") == 1)
        (known,) = (one for one in watched.get("/api/drains") if one["host"] == "dock-b")
        assert known["deadline"] - known["since"] == 100
        page.click("button", "Undrain")
        page.miss(css="[aria-label='Drained machines']")
        machines.slow.unlink()
        a.finish()
