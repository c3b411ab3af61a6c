"""`strata soak` for a few seconds: it loads, injects, checks, and leaves nothing."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from strata.chaos.leaks import Growth
from strata.chaos.report import Verdict
from strata.chaos.soak import Round, SoakReport
from tests.cli.running import strata


def test_a_short_soak_passes_and_writes_its_report(tmp_path: Path) -> None:
    report = tmp_path / "soak.md"
    arguments = ("--minutes", "0.2", "--round-seconds", "4", "--no-training", "--folder", str(tmp_path))
    ran = strata("soak", *arguments, "-o", str(report))
    text = report.read_text()
    assert ran.code == 0, text
    assert text.startswith("# Soak: 0.2 minutes, passed\n")
    for heading in (
        "## Faults",
        "## Load",
        "## Growth",
        "| coordinator killed | ",
        "| coordinator | memory |",
    ):
        assert heading in text
    assert [path.name for path in tmp_path.iterdir()] == ["soak.md"]
    assert not [name for name in os.listdir("/dev/shm") if name.startswith(f"strata-soak-{os.getpid()}-")]


@pytest.mark.slow
@pytest.mark.timeout(1_800)
def test_a_soak_with_a_job_that_trains(tmp_path: Path) -> None:
    report = tmp_path / "soak.json"
    ran = strata("soak", "--minutes", "2", "--folder", str(tmp_path), "-o", str(report))
    found = json.loads(report.read_text())
    assert ran.code == 0, found["verdicts"]
    assert found["steps"] > 0
    assert any(each["what"] == "agent 0" for each in found["growths"])


def test_a_report_says_what_failed() -> None:
    growth = Growth(
        what="coordinator", kind="descriptors", early=40, late=400, most=410, over_s=600, is_leak=True
    )
    report = SoakReport(
        minutes=10,
        seed=3,
        started_at_s=0.0,
        machine="2 cores",
        rounds=(
            Round(
                fault="coordinator paused",
                at_s=1.0,
                operations=5,
                unanswered=1,
                recovery_s=None,
                violations=(),
                errors=(),
            ),
        ),
        latencies_ms={"value read": (1.0, 2.5)},
        growths=(growth,),
        steps=0,
        came_and_went=1,
        pages=2,
        verdicts=(Verdict(name="no resource leaks", passed=False, found=growth.text),),
    )
    text = report.to_markdown()
    assert "# Soak: 10 minutes, FAILED" in text
    assert "| **FAIL** | no resource leaks | 40 → 400 |" in text
    assert "| coordinator paused | 1 |  |  |" in text
    assert "| coordinator | descriptors | 40 | 400 | 410 | 10.0 min | **grows** |" in text
    assert report.to_json()["passed"] is False
