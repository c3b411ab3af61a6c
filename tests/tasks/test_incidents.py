"""A task that fails: its incident over the API, the red event, the line in the log, and `strata why`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.running import strata
from tests.support import eventually
from tests.tasks.conftest import Tasks

SCRIPT = """
import os, signal, sys, time
how, folder = sys.argv[1:]
first = not os.path.exists(folder)
open(folder, 'a').close()
if first and how == 'killed':
    os.kill(os.getpid(), signal.SIGKILL)
if how == 'silent':
    print('ProcessGroupNCCL: watchdog timeout', file=sys.stderr, flush=True)
    time.sleep(0.5)
    os._exit(3)
"""


@pytest.fixture
def failing(tmp_path: Path) -> Iterator[Tasks]:
    recipes = tmp_path / "recipes"
    recipes.mkdir()
    (recipes / "failing.py").write_text(SCRIPT)
    (recipes / "failing.toml").write_text(
        "script = 'failing.py'\narguments = ['{how}', '{task_dir}/seen']\nrequired = ['how']\n"
        "[config.how]\ntype = 'string'\n"
    )
    made = Tasks(tmp_path / "data", {"STRATA_RECIPES_DIR": str(recipes), "STRATA_TASK_WORKERS": "4"})
    made.server.start()
    yield made
    made.close()


def incidents(tasks: Tasks, task_id: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = tasks.server.get(f"/api/incidents?run={task_id}")
    return found


@pytest.mark.timeout(300)
def test_a_kill_that_is_recovered_at_once_leaves_an_incident_a_red_event_and_a_line(failing: Tasks) -> None:
    killed, silent = failing.submit("failing", how="killed"), failing.submit("failing", how="silent")
    assert failing.ended(killed)["status"] == "completed"
    eventually(lambda: bool(incidents(failing, killed)), within_s=30)
    (incident,) = incidents(failing, killed)
    assert (incident["rank"], incident["failure_class"], incident["decision"]) == (0, "unknown", "restart")
    assert "was killed by SIGKILL" in incident["text"]
    events = failing.server.get("/api/events/recent")
    red = [e for e in events if e["event"] == "incident_reported" and e["data"]["job_id"] == killed]
    assert [event["data"]["severity"] for event in red] == ["error"]
    lines = failing.server.get(f"/api/logs?task_id={killed}&q=killed&level=error")
    assert any("rank 0" in line["message"] for line in lines)
    told = strata("why", killed, "--api", failing.server.url)
    assert told.code == 0, told.err
    assert "rank 0" in told.out.splitlines()[0]
    assert "started again: it was killed from outside" in told.out

    assert failing.ended(silent)["status"] == "failed"
    eventually(lambda: [each["state"] for each in incidents(failing, silent)][:1] == ["stopped"], within_s=30)
    newest = incidents(failing, silent)[0]
    assert newest["failure_class"] == "network", "by what it printed last"
    assert any("watchdog" in line for line in newest["failures"][0]["last_lines"])
    unknown = strata("why", "nobody", "--api", failing.server.url)
    assert unknown.code == 1
    assert "No incident of 'nobody' is known" in unknown.err
