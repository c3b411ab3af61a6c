"""The log over HTTP and in the terminal: searched, followed, and still there after a crash."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from strata.cli.main import app
from strata.cli.watching.logs import NotATime
from strata.rpc import coordinator_pb2 as pb
from tests.service.clients import RawSession, channel, stub
from tests.support import Coordinator, eventually


class Talker:
    """A worker that says what it is told to."""

    def __init__(self, coordinator: Coordinator, name: str) -> None:
        self._name = name
        self._channel = channel(coordinator.address)
        opened = self._channel.__enter__()
        with stub(coordinator.address) as calls:
            calls.RegisterWorker(pb.RegisterWorkerRequest(worker_id=name, job_id=name))
        self._session = RawSession(opened).hello(name)
        self._session.wait_for("welcome")

    def say(self, *lines: tuple[str, str], task_id: str = "", at_s: float | None = None) -> None:
        now_s = time.time() if at_s is None else at_s
        entries = [
            pb.LogEntry(timestamp=now_s, level=level, message=message, source="worker", task_id=task_id)
            for level, message in lines
        ]
        self._session.send(logs=pb.LogBatch(entries=entries))

    def close(self) -> None:
        self._session.close()
        self._channel.__exit__(None, None, None)


@pytest.fixture
def talker(shared: Coordinator, request: pytest.FixtureRequest) -> Iterator[Talker]:
    made = Talker(shared, request.node.name[:100])
    yield made
    made.close()


def found(coordinator: Coordinator, **query: Any) -> list[str]:
    return [e["message"] for e in coordinator.get("/api/logs?" + urllib.parse.urlencode(query))]


def on_disk(coordinator: Coordinator, message: str) -> bool:
    """Where it outlives a crash, which may cost what was said in the last moment."""
    path = coordinator.data_dir / "logs.sqlite"
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=30)) as db:
        found = db.execute("SELECT count(*) FROM entries WHERE message = ?", (message,)).fetchone()[0]
    return bool(found)


def status_of(coordinator: Coordinator, path: str) -> int:
    try:
        with urllib.request.urlopen(coordinator.url + path, timeout=30) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code


def test_entries_are_found_by_every_filter(shared: Coordinator, talker: Talker) -> None:
    talker.say(("info", "alpha 100%"), ("warning", "beta"), task_id="task-x", at_s=1_000.0)
    talker.say(("critical", "gamma\nTraceback (most recent call last):\n  File"), at_s=2_000.0)
    talker.say(("info", "password=hunter2 \x1b[31mred"), at_s=3_000.0)
    name = talker._name
    eventually(lambda: len(found(shared, worker_id=name)) == 4, within_s=30)
    assert found(shared, worker_id=name) == [
        "password=[redacted] red",
        "gamma\nTraceback (most recent call last):\n  File",
        "beta",
        "alpha 100%",
    ]
    assert found(shared, worker_id=name, limit=1) == ["password=[redacted] red"]
    assert found(shared, task_id="task-x") == [], "a sender does not choose whose lines they are"
    assert found(shared, task_id=name) == found(shared, worker_id=name), (
        "a task's workers are a job of its name"
    )
    assert found(shared, worker_id=name, level="warn")[1:] == ["beta"]
    assert found(shared, worker_id=name, q="ALPHA 100%") == ["alpha 100%"]
    assert found(shared, worker_id=name, since=1_500, until=2_500)[0].startswith("gamma")
    entries = shared.get(f"/api/logs?worker_id={name}")
    assert found(shared, worker_id=name, after=entries[1]["id"]) == [entries[0]["message"]]
    assert found(shared, worker_id=name, before=entries[1]["id"], limit=1) == ["beta"]
    assert entries[2]["level"] == "warn"
    for bad in ("level=loud", "after=7", "limit=0", "since=soon", "q=" + "x" * 300):
        assert status_of(shared, f"/api/logs?{bad}") == 422
    assert status_of(shared, "/api/tasks/nobody/logs") == 404


def test_coordinators_own_records_are_entries(shared: Coordinator) -> None:
    assert any("serving: gRPC on port" in m for m in found(shared, q="serving", limit=10_000))


def test_log_is_followed_live_and_resumed(shared: Coordinator, talker: Talker) -> None:
    events: list[dict[str, Any]] = []
    ready, enough = threading.Event(), threading.Event()
    request = urllib.request.Request(f"{shared.url}/api/logs/live?level=warn&worker_id={talker._name}")

    def listen() -> None:
        with urllib.request.urlopen(request, timeout=30) as stream:
            for raw in stream:
                line = raw.decode().rstrip("\n")
                ready.set()
                if line.startswith("data: "):
                    events.append(json.loads(line[6:]))
                    if len(events) == 2:
                        enough.set()
                        return

    listener = threading.Thread(target=listen)
    listener.start()
    assert ready.wait(30)
    talker.say(("info", "not this"), ("error", "one"), ("warn", "two"))
    assert enough.wait(30)
    listener.join(30)
    assert [e["message"] for e in events] == ["one", "two"]
    request.add_header("Last-Event-ID", events[0]["id"])
    events.clear()
    enough.clear()
    resumed = threading.Thread(target=listen)
    resumed.start()
    eventually(lambda: events, within_s=30)
    assert events[0]["message"] == "two"
    talker.say(("error", "three"))
    resumed.join(30)
    assert [e["message"] for e in events] == ["two", "three"]


def test_command_line_follows_over_a_crash_of_the_coordinator(tmp_path: Path) -> None:
    server = Coordinator(tmp_path / "coordinator").start()
    talker = Talker(server, "narrator")
    talker.say(("info", "once upon a time"), ("debug", "whisper"))
    eventually(lambda: found(server, q="once upon"), within_s=30)
    following = subprocess.Popen(
        [sys.executable, "-m", "strata.cli.main", "logs", "-f", "--worker", "narrator", "--level", "info"],
        env={**os.environ, "STRATA_API_URL": server.url},
        stdout=subprocess.PIPE,
        text=True,
    )
    lines: list[str] = []
    assert following.stdout is not None
    reader = threading.Thread(target=lambda: lines.extend(iter(following.stdout.readline, "")))  # type: ignore[union-attr]
    reader.start()
    try:
        eventually(lambda: lines, within_s=60)
        talker.say(("error", "the king died"))
        eventually(lambda: len(lines) == 2, within_s=60)
        eventually(lambda: on_disk(server, "the king died"), within_s=30)
        talker.close()
        server.kill()
        server.start()
        assert found(server, worker_id="narrator") == ["the king died", "whisper", "once upon a time"]
        talker = Talker(server, "narrator")
        talker.say(("info", "long live the king"))
        eventually(lambda: len(lines) == 3, within_s=60)
    finally:
        following.terminate()
        following.wait(30)
        reader.join(30)
        following.stdout.close()
        talker.close()
        server.stop()
    assert [line.split("narrator ")[1].strip() for line in lines] == [
        "once upon a time",
        "the king died",
        "long live the king",
    ]


def test_command_line_understands_times_and_says_what_it_does_not(
    shared: Coordinator, talker: Talker
) -> None:
    talker.say(("info", "long ago"), at_s=time.time() - 7_200)
    talker.say(("info", "just now"))
    eventually(lambda: len(found(shared, worker_id=talker._name)) == 2, within_s=30)
    command = CliRunner()
    arguments = ["logs", "--api", shared.url, "--json", "--worker", talker._name]
    for since, expected in (
        ("1h", ["just now"]),
        ("0.2d", ["just now", "long ago"]),
        ("5000", ["just now", "long ago"]),
    ):
        listed = command.invoke(app, [*arguments, "--since", since], catch_exceptions=False)
        assert [e["message"] for e in json.loads(listed.stdout)] == expected
    with pytest.raises(NotATime, match="--since 'yesterday' is not a time"):
        command.invoke(app, [*arguments, "--since", "yesterday"], catch_exceptions=False)
