"""Tasks of a coordinator that asks for client certificates: their workers have one of their own, and not its key."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from strata.launch.inherited import inherited
from tests.cli.running import strata
from tests.support import Coordinator, eventually

ENDED = ("completed", "failed", "stopped")


@pytest.fixture
def mutual(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Coordinator]:
    certs = tmp_path / "certs"
    assert strata("certs", "init", "--dir", str(certs), "--host", "127.0.0.1").code == 0
    names = {"CERT": "coordinator.pem", "KEY": "coordinator.key", "CLIENT_CA": "ca.pem"}
    env = {f"STRATA_TLS_{name}": str(certs / file) for name, file in names.items()}
    env |= {
        "STRATA_TASK_TLS_CERT": str(certs / "worker.pem"),
        "STRATA_TASK_TLS_KEY": str(certs / "worker.key"),
    }
    server = Coordinator(tmp_path / "data", env={"STRATA_LAUNCHER": "local", **env}).start()
    for name, file in {"CA": "ca.pem", "CERT": "admin.pem", "KEY": "admin.key"}.items():
        monkeypatch.setenv(f"STRATA_TLS_{name}", str(certs / file))
    yield server
    server.stop()


def test_a_task_reaches_a_coordinator_with_mutual_tls_as_its_own_job(mutual: Coordinator) -> None:
    api = ("--api", f"https://127.0.0.1:{mutual.http_port}")
    submitted = strata("submit", "steps=3", *api)
    assert submitted.code == 0, submitted.err
    task_id = submitted.out.split()[-1]

    def task() -> dict[str, str]:
        rows = json.loads(strata("tasks", "--json", *api).out)
        return next(row for row in rows if row["id"] == task_id)

    eventually(lambda: task()["status"] in ENDED, within_s=120, what=lambda: str(task()))
    assert task()["status"] == "completed", strata("logs", *api).out
    entries = [json.loads(line) for line in strata("audit-log", "--json", *api).out.splitlines()]
    joined = next(entry for entry in entries if entry["action"] == "RegisterWorker")
    assert (joined["who"], joined["role"]) == (f"task {task_id}", "worker"), "by its token, bound to its job"


def test_the_coordinators_own_key_is_not_handed_on() -> None:
    environ = {"STRATA_TLS_CERT": "c", "STRATA_TLS_KEY": "k", "STRATA_TLS_CA": "a", "PATH": "p"}
    assert inherited(environ) == {"STRATA_TLS_CA": "a", "PATH": "p"}
