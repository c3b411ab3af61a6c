"""A rank that makes no step is an incident with its stacks, also where nobody ends it; it is over with the next step."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.running import strata
from tests.support import Coordinator, eventually
from tests.training.loops import Loop


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[Coordinator]:
    server = Coordinator(tmp_path / "coordinator").start()
    yield server
    assert server.stop() == 0
    assert "Traceback" not in "".join(server.output), "".join(server.output)


@pytest.mark.timeout(400)
def test_a_hang_that_ends_nobody_is_an_incident_with_stacks_until_the_next_step(
    coordinator: Coordinator, tmp_path: Path
) -> None:
    def incidents(state: str) -> list[dict[str, Any]]:
        found = [each for each in coordinator.get("/api/incidents") if each["failure_class"] == "hang"]
        return [each for each in found if each["state"] == state]

    def stand_still() -> dict[str, Any]:
        """On a busy machine, another step may have been taken for a hang before."""

        def own() -> list[dict[str, Any]]:
            return [
                each
                for each in incidents("open")
                if "stand_still" in each["failures"][0]["error"]["traceback"]
            ]

        made: list[dict[str, Any]] = eventually(
            own, within_s=60, what="the hang is an incident, with its stacks"
        )
        return made[0]

    loop = Loop(
        str(tmp_path / "checkpoints"),
        coordinator=coordinator.address,
        epochs=None,
        max_steps=1_000_000,
        hang_timeout_s=0.5,
    )
    found: dict[str, Any] = {}
    until_s = math.inf
    with loop.job as job:
        for batch in job:
            if job.step == 3:
                found = stand_still()
                until_s = time.monotonic() + 120
            loop.train(batch)
            if any(each["id"] == found.get("id") for each in incidents("recovered")):
                break  # By the steps that were made since.
            assert time.monotonic() < until_s, "steps are made, and it is still open"
            # The coordinator looks now and then, more rarely the busier it is.
            time.sleep(0.02)
    assert (found["failure_class"], found["rank"], found["decision"]) == ("hang", 0, "continue")
    lines = coordinator.get("/api/logs?level=error&q=hung")
    assert lines
    assert all("rank 0" in line["message"] for line in lines)
    assert all(over["lost_s"] > 0 for over in incidents("recovered"))
    assert "hung: has completed no step" in strata("why", job.name, "--api", coordinator.url).out
