"""A machine is drained from the page of one of its workers, and the page says what became of its runs."""

from __future__ import annotations

import pytest

from strata import TrainingOrchestrator
from tests.dashboard.browser import Browser
from tests.support import Coordinator, eventually

pytestmark = pytest.mark.browser


@pytest.mark.timeout(300)
def test_a_machine_is_drained_and_let_back_in_by_two_clicks(watched: Coordinator, page: Browser) -> None:
    with TrainingOrchestrator(watched.address, job_id="drained") as worker:
        worker.register_worker("drained-rank0", hostname="node-7")
        page.open("/workers?worker=drained-rank0")
        page.see("Machine node-7")
        page.click("button", "Drain machine")
        page.see("None of its agents is let in again until that is cancelled.")
        page.fill("Seconds until the machine may be gone", "45")
        page.click("button", "Drain")
        page.see("no agent of it takes part in a run")
        (known,) = (one for one in watched.get("/api/drains") if one["host"] == "node-7")
        assert known["deadline"] - known["since"] == 45
        assert page.serious() == []
        page.click("button", "Let it be used again")
        page.see(role="button", name="Drain machine")
        eventually(lambda: watched.get("/api/drains") == [], within_s=30)
