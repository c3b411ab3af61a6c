"""The Grafana dashboard and the alert rules name only series and labels that a real coordinator shows."""

from __future__ import annotations

import json
import re
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from strata import TrainingOrchestrator
from tests.support import Coordinator, eventually

DEPLOY = Path(__file__).parents[2] / "deploy"
WORD = re.compile(r"[A-Za-z_:][\w:]*")
KEYWORDS = {
    "by",
    "without",
    "on",
    "ignoring",
    "group_left",
    "group_right",
    "and",
    "or",
    "unless",
    "bool",
    "offset",
}


def page(coordinator: Coordinator) -> dict[str, set[str]]:
    """Labels of every series on /metrics."""
    with urllib.request.urlopen(coordinator.url + "/metrics", timeout=30) as answer:
        text = answer.read().decode()
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


@pytest.fixture(scope="module")
def series(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """What there is once one job has trained, saved and recovered."""
    folder = tmp_path_factory.mktemp("deploy")
    server = Coordinator(folder / "coordinator", "--archive", str(folder / "archive")).start()
    try:
        with TrainingOrchestrator(server.address, job_id="job") as worker:
            worker.register_worker("w")
            figures = {"loss": 1.0, "tokens_per_second": 2.0, "samples_per_second": 3.0, "step_time_s": 0.1}
            times = {
                "account_began_s": 1.0,
                "training_total_s": 9.0,
                "waiting_total_s": 1.0,
                "sync_wait_s": 0.01,
            }
            worker.heartbeat(1, 0, state="training", metrics={**figures, **times})
            worker.notify_checkpoint("c", 1, path="/c", size_bytes=100, duration_s=0.5, tiers=["NVME"])
            worker.report_recovery(
                {"detect": 1.0, "load": 0.5},
                resumed_step=1,
                lost_steps=2,
                tier="MEMORY",
                world_before=1,
                world_after=1,
                reason="",
            )
            worker.barrier("b", participants=1)
            eventually(lambda: "strata_job_loss" in page(server), within_s=60)
            return page(server)
    finally:
        server.stop()


def used(expression: str) -> dict[str, set[str]]:
    """Series of a PromQL expression, each with the labels it is asked for."""
    assert expression.count("(") == expression.count(")")
    found: dict[str, set[str]] = {}
    rest = re.sub(r"\b(?:by|without|ignoring|on)\s*\([^)]*\)", " ", expression)
    rest = re.sub(r"\[[0-9a-z]+\]", " ", rest)
    for match in re.finditer(r"([A-Za-z_:][\w:]*)\s*(\{[^}]*\}|\(|)", rest):
        name, after = match[1], match[2]
        inside_braces = rest.rfind("{", 0, match.start()) > rest.rfind("}", 0, match.start())
        if after == "(" or name in KEYWORDS or inside_braces:
            continue
        labels = {WORD.match(part.strip())[0] for part in after.strip("{}").split(",") if part.strip()}  # type: ignore[index]
        found.setdefault(name, set()).update(labels)
    grouped = re.findall(r"\b(?:by|ignoring)\s*\(([^)]*)\)", expression)
    for name in found:
        found[name] |= {label.strip() for group in grouped for label in group.split(",")} - {"le"}
    return found


def check(expression: str, series: dict[str, set[str]]) -> None:
    names = used(expression)
    assert names, f"no series in {expression}"
    for name, labels in names.items():
        assert name in series, f"{name} does not exist ({expression})"
        assert labels <= series[name], f"{name} has no {labels - series[name]}"


def targets(panels: list[dict[str, Any]]) -> list[str]:
    return [target["expr"] for panel in panels for target in panel.get("targets", ())]


def test_dashboard_shows_only_what_there_is(series: dict[str, set[str]]) -> None:
    dashboard = json.loads((DEPLOY / "grafana" / "strata.json").read_text())
    expressions = targets(dashboard["panels"])
    assert len(expressions) > 30
    for expression in expressions:
        check(expression, series)
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(ids) == len(set(ids))
    own = {name for name in series if name.startswith("strata_")}
    own = {re.sub(r"_(bucket|sum|count|created)$", "", name) for name in own if not name.endswith("_created")}
    shown = {
        re.sub(r"_(bucket|sum|count)$", "", name) for expression in expressions for name in used(expression)
    }
    assert own - shown == set(), "every series of ours is on the dashboard"


def test_alert_rules_are_rules_about_what_there_is(series: dict[str, set[str]]) -> None:
    document = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yml").read_text())
    assert set(document) == {"groups"}
    names = []
    for group in document["groups"]:
        assert set(group) == {"name", "rules"}
        for rule in group["rules"]:
            assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
            assert re.fullmatch(r"\d+[smhd]", rule.get("for", "1m"))
            assert rule["labels"]["severity"] in ("info", "warning", "critical")
            assert set(rule["annotations"]) == {"summary", "description"}
            check(rule["expr"], series)
            names.append(rule["alert"])
    assert len(names) == len(set(names)) >= 8


def test_a_series_that_does_not_exist_would_be_noticed(series: dict[str, set[str]]) -> None:
    for wrong in (
        "rate(strata_nothing_total[5m])",
        'strata_workers{nothing="x"}',
        "sum by (nothing) (strata_workers)",
    ):
        with pytest.raises(AssertionError):
            check(wrong, series)
