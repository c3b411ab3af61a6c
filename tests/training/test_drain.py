"""Machines that go while they train: nothing is lost where the deadline allows it, and what is lost is said where it does not."""

from __future__ import annotations

import json
import re
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from strata.rpc.cas import CoordinatorCasClient, HostRefused
from tests.cli.running import strata
from tests.support import Coordinator, eventually, may_name_machines
from tests.training.test_recoverable import Job, assert_exact, job
from tests.training.test_recoverable_faults import assert_trained_once

pytestmark = pytest.mark.timeout(600)
STEPS = 400
# As long as it is slow it does not end: its last steps take seconds.
SLOW = """
import os, time
try: slow = (folder / 'slow').read_text()
except FileNotFoundError: slow = None
if slow is not None:
    pause_s = float(slow or (0.05 if step < 350 else 1.0))
    if pause_s > 1: (folder / ('in-a-slow-step-' + os.environ.get('MACHINE', ''))).touch()
    until_s = time.monotonic() + pause_s
    while time.monotonic() < until_s and (folder / 'slow').exists(): time.sleep(0.02)
"""


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[Coordinator]:
    if not may_name_machines():
        pytest.skip("this user may not name machines")
    server = Coordinator(tmp_path / "coordinator").start()
    yield server
    server.stop()
    assert "Traceback" not in "".join(server.output)


class Machines:
    """Of one run, each with a name, one worker and memory of its own."""

    def __init__(
        self,
        stack: ExitStack,
        coordinator: Coordinator,
        folder: Path,
        *,
        nnodes: str,
        kind: str = "ddp",
        each_step: str = "",
    ) -> None:
        self._stack = stack
        self._coordinator = coordinator
        self.folder = folder / "job"
        self._root = folder
        self._nnodes = nnodes
        self._kind = kind
        self.folder.mkdir()
        self.slow = self.folder / "slow"
        self.slow.touch()
        (self.folder / "faults-0").write_text(SLOW + each_step)

    def start(self, name: str, **variables: str) -> Job:
        return self._stack.enter_context(
            job(
                self.folder,
                self._kind,
                workers=1,
                steps=STEPS,
                flags=[
                    *(f"--nnodes={self._nnodes}", f"--rdzv-endpoint={self._coordinator.address}"),
                    *("--rdzv-id=drain", "--local-addr=127.0.0.1"),
                ],
                host=name,
                memory=str(self._root / f"memory-{name}"),
                MACHINE=name,
                GLOO_SOCKET_IFNAME="lo",
                COORDINATOR_ADDR=self._coordinator.address,
                STEP_S="0",
                **variables,
            )
        )

    def processes(self, running: Job, name: str) -> set[int]:
        return {line["pid"] for line in running.log() if line["machine"] == name}


def drains(coordinator: Coordinator) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = coordinator.get("/api/drains")
    return found


def admitted(coordinator: Coordinator, host: str) -> str:
    """Empty, or why not."""
    client = CoordinatorCasClient(coordinator.address, timeout_s=30)
    try:
        client.admit(host)
    except HostRefused as refusal:
        return str(refusal)
    finally:
        client.close()
    return ""


def lost(running: Job) -> Sequence[int]:
    return [line["lost"] for line in running.log() if "resumed" in line]


def test_drained_machine_leaves_and_the_others_continue_in_their_processes(
    coordinator: Coordinator, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        machines = Machines(stack, coordinator, tmp_path, nnodes="1:3")
        a, b, c = (machines.start(name) for name in "abc")
        a.await_line(lambda line: line.get("world") == 3, count=3)
        a.await_line(lambda line: "resumed" in line, count=3)
        said = strata("drain", "c", "--within", "120s", "--reason", "rack 4", "--api", coordinator.url)
        assert said.code == 0, said.err + a.output()
        assert "c is drained: 1 agent left before the deadline" in said.out
        assert ": 0 steps lost" in said.out, said.out + a.output()
        assert c.process.wait(60) == 128 + signal.SIGTERM
        a.await_line(lambda line: line.get("world") == 2, count=2)

        assert "is drained: rack 4" in admitted(coordinator, "c")
        coordinator.kill()
        coordinator.start()
        (known,) = drains(coordinator)
        assert (known["state"], known["handovers"][0]["lost_steps"]) == ("drained", 0)
        assert "strata drain c --cancel" in admitted(coordinator, "c")
        assert strata("drain", "c", "--cancel", "--api", coordinator.url).code == 0
        assert admitted(coordinator, "c") == ""
        assert "No machine is drained" in strata("drain", "--api", coordinator.url).out
        machines.slow.unlink()
        a.finish()
        b.finish()
    assert all(len(machines.processes(a, name)) == 1 for name in "ab"), "survivors stay"
    assert set(lost(a)) == {0}
    assert_trained_once(a, STEPS)


@pytest.mark.parametrize(("kind", "plain"), [("ddp", {"PLAIN": "1"}), ("fsdp", {})], ids=["plain", "sharded"])
def test_thirty_seconds_are_enough_to_lose_nothing(
    coordinator: Coordinator, tmp_path: Path, kind: str, plain: dict[str, str]
) -> None:
    """Also where workers do not recover in their process, and where each machine has only its part of the state."""
    with ExitStack() as stack:
        machines = Machines(stack, coordinator, tmp_path, nnodes="1:2", kind=kind)
        a, b = (machines.start(name, **plain) for name in "ab")
        a.await_line(lambda line: line.get("world") == 2, count=2)
        a.await_line(lambda line: "resumed" in line, count=2)
        said = strata("drain", "b", "--within", "30s", "--api", coordinator.url)
        assert said.code == 0, said.err + a.output()
        assert ": 0 steps lost" in said.out, said.out + a.output()
        assert b.process.wait(60) == 128 + signal.SIGTERM
        a.await_line(lambda line: line.get("world") == 1)
        machines.slow.unlink()
        a.finish()
    (known,) = drains(coordinator)
    assert (known["state"], known["handovers"][0]["lost_steps"]) == ("drained", 0)
    assert set(lost(a)) == {0}, a.output()
    assert_exact(a.folder)


class Metadata(HTTPServer):
    """The metadata service of a spot instance, which is taken back once `action` is set."""

    action = ""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.asked: list[str] = []
        self._thread = threading.Thread(target=self.serve_forever, args=(0.05,))
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def close(self) -> None:
        self.shutdown()
        self._thread.join()
        self.server_close()


class _Answer(BaseHTTPRequestHandler):
    server: Metadata

    def do_PUT(self) -> None:
        self._say(200, "token-1")

    def do_GET(self) -> None:
        self.server.asked.append(self.headers.get("X-aws-ec2-metadata-token", ""))
        action = self.server.action
        self._say(200 if action else 404, action)

    def _say(self, status: int, text: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        pass


def test_spot_instance_that_is_taken_back_hands_over_to_a_machine_that_stands_by(
    coordinator: Coordinator, tmp_path: Path
) -> None:
    metadata = Metadata()
    with ExitStack() as stack:
        stack.callback(metadata.close)
        machines = Machines(stack, coordinator, tmp_path, nnodes="1:2")
        a = machines.start("a")
        b = machines.start("b", STRATA_NOTICES="aws", STRATA_METADATA_URL=metadata.url)
        a.await_line(lambda line: line.get("world") == 2, count=2)
        c = machines.start("c")
        a.await_line(lambda line: "wait" in line)  # It stands by, at the entrance of its function.
        eventually(lambda: "token-1" in metadata.asked, within_s=60)
        time = (datetime.now(UTC) + timedelta(seconds=30)).strftime("%Y-%m-%dT%H:%M:%SZ")
        metadata.action = json.dumps({"action": "terminate", "time": time})
        assert b.process.wait(60) == 128 + signal.SIGTERM, a.output()
        a.await_line(lambda line: line.get("world") == 2 and line["machine"] == "c")
        eventually(lambda: _settled(coordinator), within_s=60, what=lambda: str(drains(coordinator)))
        (known,) = drains(coordinator)
        assert (known["host"], known["by"]) == ("b", "aws")
        assert known["reason"] == "AWS reclaims this spot instance (terminate)"
        assert [one["lost_steps"] for one in known["handovers"]] == [0]
        machines.slow.unlink()
        a.finish()
        c.finish()
    assert len(machines.processes(a, "a")) == 1
    assert set(lost(a)) == {0}
    assert_trained_once(a, STEPS)


def _settled(coordinator: Coordinator) -> bool:
    known = drains(coordinator)
    return bool(known) and all(
        one["state"] == "drained" and one["handovers"] and one["handovers"][0]["lost_steps"] is not None
        for one in known
    )


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_one_second_is_too_short_for_a_slow_step_and_what_it_cost_is_said(
    coordinator: Coordinator, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("strata.cli.operating.drain.SETTLE_S", 240.0)
    with ExitStack() as stack:
        machines = Machines(stack, coordinator, tmp_path, nnodes="1:2", kind=kind)
        a, b = machines.start("a"), machines.start("b")
        a.await_line(lambda line: line.get("world") == 2, count=2)
        a.await_line(lambda line: "resumed" in line, count=2)
        machines.slow.write_text("5")
        # A worker that still waits for the other's last step cannot hear that it is asked to leave.
        eventually(lambda: (a.folder / "in-a-slow-step-b").exists(), within_s=60)
        said = strata("drain", "b", "--within", "1s", "--api", coordinator.url)
        assert b.process.wait(60) == 128 + signal.SIGTERM
        assert "the run continued at step" in said.out, said.out + a.output()
        assert re.search(r"; \d+ steps? lost", said.out), said.out
        assert re.search(r"step \d+ could not be saved before the deadline", a.output()), a.output()
        machines.slow.unlink()
        a.finish()
    (known,) = drains(coordinator)
    reported = known["handovers"][0]["lost_steps"]
    assert reported == lost(a)[-1]
    assert_exact(a.folder)
    if kind == "ddp":
        assert_trained_once(a, STEPS)


@pytest.mark.parametrize(("grace", "slow"), [("30", "0.05"), ("1", "60")])
def test_agent_that_gets_sigterm_says_what_was_saved_before_its_grace_is_over(
    tmp_path: Path, grace: str, slow: str
) -> None:
    folder = tmp_path / "job"
    folder.mkdir()
    (folder / "faults-0").write_text(SLOW)
    (folder / "slow").write_text(slow)
    with job(folder, "ddp", workers=2, steps=STEPS, STEP_S="0", STRATA_GRACE_S=grace) as running:
        running.await_line(lambda line: "resumed" in line, count=2)
        eventually(lambda: list((folder / "checkpoints").glob("**/*")) != [], within_s=60)
        if grace == "1":
            # In its first step: it has no snapshot that it could leave in memory.
            eventually(lambda: (folder / "in-a-slow-step-").exists(), within_s=60)
        running.process.terminate()
        assert running.process.wait(60) == 128 + signal.SIGTERM
        said = running.output()
    if grace == "30":
        assert re.search(r"this machine has left the run: step \d+ is durable: 0 steps lost", said), said
    else:
        assert "could not be saved before the deadline" in said or "nothing was saved" in said, said
        assert "Traceback" not in said
