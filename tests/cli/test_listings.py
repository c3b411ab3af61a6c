"""`strata status|workers|…`: tables for people, JSON for programs, exit codes for scripts."""

from __future__ import annotations

import ctypes
import http.server
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlencode

import pytest

from strata.coordinator.logs.store import KEEPALIVE_S
from strata.rpc import coordinator_pb2 as pb
from tests.cli.running import strata, strata_process
from tests.service.clients import RawSession, channel, stub
from tests.support import Coordinator, eventually

LISTINGS = ("status", "workers", "datasets", "checkpoints", "barriers", "recoveries", "tasks", "logs")
SHOWN = {
    "status": ["1 active of 1", "requests", "MB/s"],
    "workers": ["worker-[bold]01", "training", "1/501", "task-7", "129"],
    "datasets": ["images", "1,281,167", "129", "/data/images"],
    "checkpoints": ["c1", "completed", "500", "5.0 MB", "10 MB/s", "memory"],
    "barriers": ["epoch", "complete", "never", "broken", "timed out"],
    "recoveries": [
        "500",
        "1.75 s",
        "1.25",
        "memory",
        "2→1",
        "1 survived in process, worker-02 lost",
        "killed by SIGKILL",
    ],
    "tasks": ["train", "pending"],
    "logs": ["serving"],
}


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "250")
    monkeypatch.delenv("STRATA_API_URL", raising=False)


@pytest.mark.parametrize("listing", LISTINGS)
def test_table_shows_what_there_is(listed: Coordinator, listing: str) -> None:
    ran = strata(listing, "--api", listed.url)
    assert (ran.code, ran.err) == (0, "")
    assert [words for words in SHOWN[listing] if words not in ran.out] == []


@pytest.mark.parametrize("listing", LISTINGS)
def test_json_is_what_the_api_says(listed: Coordinator, listing: str) -> None:
    ran = strata(listing, "--json", "--api", listed.url)
    assert (ran.code, ran.err) == (0, "")
    found = json.loads(ran.out)
    api = listed.get(f"/api/{listing}")
    if listing == "status":
        assert found["version"] == api["version"]
        assert found["metrics"]["total_workers"] == 1
    else:
        assert [set(row) for row in found] == [set(row) for row in api]
        assert found


@pytest.mark.parametrize("listing", LISTINGS)
def test_empty_coordinator_says_so(empty: Coordinator, listing: str) -> None:
    ran = strata(listing, "--api", empty.url)
    assert ran.code == 0
    assert ran.out.strip()
    assert json.loads(strata(listing, "--json", "--api", empty.url).out) is not None


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Coordinator]:
    server = Coordinator(tmp_path_factory.mktemp("empty") / "data").start()
    yield server
    server.stop()


def test_address_comes_from_the_environment_or_a_file_that_is_named(
    listed: Coordinator, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with monkeypatch.context() as env:
        env.setenv("STRATA_API_URL", listed.url)
        assert strata("workers").code == 0
    folder = tmp_path_factory.mktemp("dotenv")
    (folder / "mine.env").write_text(f"STRATA_API_URL={listed.url}\n")
    monkeypatch.chdir(folder)
    ran = strata_process("--env-file", "mine.env", "workers", "--json")
    assert (ran.code, ran.err) == (0, "")


def test_a_planted_dotenv_does_not_send_the_token_elsewhere(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.headers.get("authorization", ""))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"[]")

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        (tmp_path / ".env").write_text(f"STRATA_API_URL=http://127.0.0.1:{server.server_port}\n")
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("STRATA_TOKEN", "the-administrators-own-token")
        monkeypatch.delenv("STRATA_API_URL", raising=False)
        ran = strata_process("workers", "--json")
        server.shutdown()
    assert asked == []
    assert "STRATA_API_URL" in ran.err
    assert "--env-file" in ran.err


@contextmanager
def answering(body: bytes, *, status: int = 200) -> Iterator[str]:
    """Something else that speaks HTTP."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(30)


@pytest.mark.parametrize(
    "api",
    [
        "http://127.0.0.1:1",
        "http://no-such-host.invalid:3000",
        "http://127.0.0.1:notaport",
        "http://127.0.0.1:99999",
        "127.0.0.1:3000",
        "ftp://127.0.0.1",
        "file:///etc/passwd",
        "http://",
        "http://[::1",
        "",
        "nonsense",
    ],
)
def test_coordinator_out_of_reach_is_exit_3_and_a_sentence(api: str) -> None:
    ran = strata("workers", "--api", api)
    assert ran.code == 3, ran
    assert "error: No coordinator answers at" in ran.err
    assert "strata serve" in ran.err
    assert ran.out == ""


def test_port_of_something_else_is_exit_3(listed: Coordinator) -> None:
    for api in (f"http://127.0.0.1:{listed.grpc_port}",):
        ran = strata("workers", "--api", api)
        assert ran.code == 3, ran
    for body in (b"<html>hello</html>", b"", b'{"some": "thing"}', b"[1, 2]", b"\xff\xfe"):
        with answering(body) as api:
            for listing in ("workers", "status"):
                ran = strata(listing, "--api", api)
                assert ran.code == 3, (body, ran)
                assert "not a coordinator" in ran.err or "No coordinator answers" in ran.err


def test_silent_port_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("strata.api.TIMEOUT_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        ran = strata("workers", "--api", f"http://127.0.0.1:{silent.getsockname()[1]}")
    assert ran.code == 3


def test_refusal_of_the_coordinator_is_exit_1_with_its_message(listed: Coordinator) -> None:
    ran = strata("logs", "--level", "loud", "--api", listed.url)
    assert ran.code == 1
    assert "level" in ran.err
    with answering(b'{"code": "x", "message": "no way", "hint": "ask nicely"}', status=403) as api:
        ran = strata("workers", "--api", api)
        assert ran.code == 1
        assert "no way" in ran.err
        assert "ask nicely" in ran.err
    with answering(b"oops", status=500) as api:
        ran = strata("workers", "--api", api)
        assert ran.code == 1
        assert "500" in ran.err


@pytest.mark.parametrize(
    "arguments",
    [
        ("workers", "--nonsense"),
        ("nonsense",),
        ("logs", "--limit", "0"),
        ("logs", "--limit", "many"),
        ("serve", "--grpc-port", "abc"),
        ("serve", "--grpc-port", "70000"),
        ("serve", "--host", "0.0.0.0"),
        ("replay", "--last", "0"),
    ],
)
def test_wrong_call_is_exit_2_and_no_traceback(
    arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("STRATA_TOKEN", raising=False)
    ran = strata(*arguments)
    assert ran.code == 2, ran
    assert ran.err.strip()


def test_help_is_exit_0() -> None:
    for arguments in (("--help",), ("-h",), ("workers", "--help"), ("serve", "-h")):
        ran = strata(*arguments)
        assert ran.code == 0
        assert "Usage" in ran.out


def test_logs_can_be_narrowed_down(listed: Coordinator) -> None:
    with stub(listed.address) as calls, channel(listed.address) as own:
        calls.RegisterWorker(pb.RegisterWorkerRequest(worker_id="teller", job_id="tales"))
        session = RawSession(own).hello("teller")
        for level, text, task in (
            ("info", "once upon a time", "another's"),
            ("error", "the dragon came", ""),
        ):
            entry = pb.LogEntry(timestamp=1e9, level=level, message=text, task_id=task)
            session.send(logs=pb.LogBatch(entries=[entry]))
        eventually(lambda: len(listed.get("/api/logs?worker_id=teller")) == 2, within_s=30)

        def shown(*options: str) -> list[str]:
            ran = strata("logs", "--worker", "teller", *options, "--json", "--api", listed.url)
            return [entry["message"] for entry in json.loads(ran.out)]

        assert shown() == ["the dragon came", "once upon a time"]
        assert shown("--level", "error") == ["the dragon came"]
        assert shown("--task", "tales") == ["the dragon came", "once upon a time"]
        assert shown("--task", "another's") == []
        assert shown("--grep", "DRAGON") == ["the dragon came"]
        assert shown("-n", "1") == ["the dragon came"]
        ran = strata("logs", "--worker", "teller", "--api", listed.url)
        assert ran.out.index("once upon") < ran.out.index("the dragon"), "tables are oldest first"
        calls.DeregisterWorker(pb.DeregisterWorkerRequest(worker_id="teller"))
        session.close()


def test_logs_follow_until_a_signal_and_over_a_restart(empty: Coordinator) -> None:
    server = empty
    command = [sys.executable, "-u", "-m", "strata.cli.main", "logs", "-f", "--json", "--api", server.url]
    follower = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert follower.stdout is not None
        assert "serving" in json.loads(follower.stdout.readline())["message"]
        say(server, "first words")
        assert json.loads(follower.stdout.readline())["message"] == "first words"
        server.kill()
        server.start()
        assert "serving" in json.loads(follower.stdout.readline())["message"]
        say(server, "words of another life")
        assert json.loads(follower.stdout.readline())["message"] == "words of another life"
        follower.send_signal(signal.SIGINT)
        assert follower.wait(30) == 130
        assert follower.stderr is not None
        assert "Traceback" not in follower.stderr.read()
    finally:
        follower.kill()
        follower.wait(30)
        for pipe in (follower.stdout, follower.stderr):
            assert pipe is not None
            pipe.close()


WITH_ANOTHER_THREAD = """
import threading, time
from strata.cli.main import main
other = threading.Thread(target=time.sleep, args=(600,), daemon=True)
other.start()
print(other.native_id)
main()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_logs_follow_ends_whichever_thread_is_handed_the_signal(
    empty: Coordinator, number: signal.Signals
) -> None:
    words = ["logs", "-f", "--json", "--api", empty.url]
    with subprocess.Popen(
        [sys.executable, "-u", "-c", WITH_ANOTHER_THREAD, *words], stdout=subprocess.PIPE, text=True
    ) as follower:
        try:
            assert follower.stdout is not None
            other = int(follower.stdout.readline())
            assert follower.stdout.readline(), "what there was; the rest comes while it follows"
            say(empty, f"{number.name} comes next")
            assert any(f"{number.name} comes next" in line for line in follower.stdout)
            assert ctypes.CDLL(None).tgkill(follower.pid, other, int(number)) == 0
            # Not only when the coordinator's next sign of life wakes the main thread.
            assert follower.wait(KEEPALIVE_S - 5) == 130
        finally:
            follower.kill()


def say(server: Coordinator, text: str) -> None:
    with stub(server.address) as calls, channel(server.address) as own:
        request = pb.RegisterWorkerRequest(worker_id="speaker")
        calls.RegisterWorker(request, wait_for_ready=True, timeout=30)
        session = RawSession(own).hello("speaker")
        session.send(logs=pb.LogBatch(entries=[pb.LogEntry(timestamp=1e9, message=text)]))
        eventually(lambda: server.get("/api/logs?" + urlencode({"q": text})), within_s=30)
        calls.DeregisterWorker(pb.DeregisterWorkerRequest(worker_id="speaker"))
        session.close()  # After the goodbye: without one a worker is failed half a second later.


def test_reader_that_stops_reading_is_no_error(listed: Coordinator, program: Callable[[str], str]) -> None:
    command = f"{sys.executable} -m strata.cli.main workers --json --api {listed.url} | head -c 1"
    shell = [program("bash"), "-c", command]
    done = subprocess.run(shell, capture_output=True, text=True, timeout=60, env=os.environ)
    assert done.stdout == "["
    assert "Traceback" not in done.stderr


def test_real_process_has_the_same_exit_codes(listed: Coordinator) -> None:
    assert strata_process("workers", "--api", listed.url).code == 0
    assert strata_process("workers", STRATA_API_URL="http://127.0.0.1:1").code == 3
