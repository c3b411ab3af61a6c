"""A machine that is quarantined leaves its run, which continues without it, and is refused until it is cleared."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from strata.rpc.cas import CoordinatorCasClient, HostRefused
from tests.cli.running import strata
from tests.service.clients import EventStream
from tests.support import Coordinator, as_machine, eventually, may_name_machines

PROGRAM = """
import os, socket, sys, time
import torch.distributed as dist
dist.init_process_group('gloo')
print('MET', socket.gethostname(), dist.get_rank(), dist.get_world_size(), flush=True)
folder = sys.argv[1]
while not os.path.exists(folder + '/done'):
    if os.path.exists(f'{folder}/fail-{socket.gethostname()}'):
        raise RuntimeError('CUDA error: uncorrectable ECC error encountered')
    time.sleep(0.05)
"""


@pytest.fixture(scope="module")
def coordinator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Coordinator]:
    server = Coordinator(tmp_path_factory.mktemp("quarantine") / "coordinator").start()
    yield server
    assert server.stop() == 0
    assert "Traceback" not in "".join(server.output)


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


def test_the_command_line_adds_shows_and_clears_and_a_restart_forgets_nothing(
    coordinator: Coordinator,
) -> None:
    api = ("--api", coordinator.url)
    assert "No machine is quarantined" in strata("quarantine", "ls", *api).out
    with EventStream(coordinator.http_port) as events:
        added = strata("quarantine", "add", "node-7", "--reason", "GPU 3 has ECC errors", *api)
        assert (added.code, added.out) == (0, "node-7 is quarantined: GPU 3 has ECC errors\n")
        assert events.wait_for("host_quarantined").data["severity"] == "error"
        # Of the coordinator's disk, which is everybody's, there may be one before.
        told = events.wait_for("notification", lambda notice: notice["rule"] == "quarantine").data
        assert told["title"] == "the machine node-7 is quarantined"
    coordinator.kill()
    coordinator.start()
    refusal = "The machine 'node-7' is quarantined: GPU 3 has ECC errors. When it is fixed: strata quarantine clear node-7"
    assert admitted(coordinator, "node-7") == refusal
    assert admitted(coordinator, "node-8") == ""
    (shown,) = coordinator.get("/api/quarantine")
    assert (shown["host"], shown["run"]) == ("node-7", "")
    assert shown["by"]
    assert "GPU 3 has ECC errors" in strata("quarantine", "ls", *api).out
    (incident,) = (one for one in coordinator.get("/api/incidents") if one["subject"] == "quarantine")
    assert incident["state"] == "open"
    assert "quarantine: the machine node-7 is quarantined" in strata("why", "--all", *api).out
    assert strata("quarantine", "clear", "node-7", *api).code == 0
    assert admitted(coordinator, "node-7") == ""
    again = strata("quarantine", "clear", "node-7", *api)
    assert again.code == 1
    assert "Quarantined machines: none." in again.err


@pytest.mark.parametrize("body", [{}, {"host": "a"}, {"host": "", "reason": "r"}, {"host": "a", "reason": 3}])
def test_what_is_no_machine_or_no_reason_is_refused(coordinator: Coordinator, body: object) -> None:
    assert coordinator.post("/api/quarantine", body)[0] == 422
    assert "a" not in {one["host"] for one in coordinator.get("/api/quarantine")}


# --- real machines, as far as one can be several ---------------------------------------------------------------


class Machine:
    """An agent under a host name of its own."""

    def __init__(self, name: str, coordinator: Coordinator, folder: Path) -> None:
        self.output: list[str] = []
        self._changed = threading.Condition()
        program = folder / "program.py"
        if not program.exists():  # A worker of another machine may be reading it.
            program.write_text(PROGRAM)
        command = [
            sys.executable,
            "-m",
            "strata.launch.agent",
            "--nnodes=1:2",
            "--nproc-per-node=1",
            "--rdzv-id=quarantine",
        ]
        command += [
            f"--rdzv-endpoint={coordinator.address}",
            "--rdzv-backend=strata",
            "--local-addr=127.0.0.1",
        ]
        env = {
            **os.environ,
            "STRATA_POLICY": "gpu=quarantine",
            "STRATA_MEMORY_ROOT": str(folder / name),
            "STRATA_TOKEN": "",
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        self.process = subprocess.Popen(
            [*command, str(program), str(folder)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=env,
            preexec_fn=as_machine(name),
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._changed:
                self.output.append(line)
                self._changed.notify_all()

    def wait_for(self, words: str) -> None:
        with self._changed:
            found = self._changed.wait_for(lambda: any(words in line for line in self.output), 120)
        assert found, f"no '{words}' in\n" + "".join(self.output)

    def ended(self) -> int:
        code = self.process.wait(120)
        self._reader.join(30)
        return code

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait(60)
        self._reader.join(30)
        if self.process.stdout is not None:
            self.process.stdout.close()


@pytest.mark.timeout(600)
def test_a_machine_whose_gpu_fails_leaves_and_the_run_continues_without_it(
    coordinator: Coordinator, tmp_path: Path
) -> None:
    if not may_name_machines():
        pytest.skip("this user may not name machines")
    machines: list[Machine] = []

    def start(name: str) -> Machine:
        machines.append(Machine(name, coordinator, tmp_path))
        return machines[-1]

    try:
        good, bad = start("good"), start("bad")
        bad.wait_for(" 2\n")
        (tmp_path / "fail-bad").touch()
        assert bad.ended() == 128 + 15
        said = "".join(bad.output)
        assert "this machine leaves the run: the policy of this run quarantines a machine" in said
        good.wait_for("MET good 0 1")
        (shown,) = coordinator.get("/api/quarantine")
        assert (shown["host"], shown["by"], shown["run"]) == ("bad", "the policy of quarantine", "quarantine")
        assert "uncorrectable ECC error" in shown["reason"]

        refused = start("bad")
        assert refused.ended() == 1
        assert "The machine 'bad' is quarantined" in "".join(refused.output)
        assert "strata quarantine clear bad" in "".join(refused.output)
        assert good.process.poll() is None

        (tmp_path / "fail-bad").unlink()
        assert strata("quarantine", "clear", "bad", "--api", coordinator.url).code == 0
        back = start("bad")
        back.wait_for(" 2\n")

        # And one that a person takes out of use leaves as well.
        assert (
            strata("quarantine", "add", "bad", "--reason", "maintenance", "--api", coordinator.url).code == 0
        )
        assert back.ended() == 128 + 15
        assert "was quarantined (maintenance): it leaves the run" in "".join(back.output)
        eventually(lambda: sum("MET good 0 1" in line for line in good.output) >= 2, within_s=120)
        (tmp_path / "done").touch()
        assert good.ended() == 0
    finally:
        for machine in machines:
            machine.close()
        strata("quarantine", "clear", "bad", "--api", coordinator.url)
