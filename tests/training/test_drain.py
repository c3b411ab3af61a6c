"""Machines that go while they train: nothing is lost where the deadline allows it, and what is lost is said where it does not."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.cli.running import strata
from tests.support import Coordinator, may_name_machines
from tests.training.test_recoverable import Job, job
from tests.training.test_recoverable_faults import assert_trained_once

pytestmark = pytest.mark.timeout(600)
STEPS = 400


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

    def __init__(self, stack: ExitStack, coordinator: Coordinator, folder: Path, *, nnodes: str) -> None:
        self._stack = stack
        self._coordinator = coordinator
        self._folder = folder / "job"
        self._root = folder
        self._nnodes = nnodes
        self._folder.mkdir()
        self.slow = self._folder / "slow"
        self.slow.touch()
        (self._folder / "faults-0").write_text(
            "import time\nif (folder / 'slow').exists(): time.sleep(float((folder / 'slow').read_text() or 0.05))"
        )

    def start(self, name: str, **variables: str) -> Job:
        return self._stack.enter_context(
            job(
                self._folder,
                "ddp",
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

        refused = machines.start("c")
        assert refused.process.wait(120) == 1
        assert "The machine 'c' is drained: rack 4" in a.output()
        assert "strata drain c --cancel" in a.output()

        coordinator.kill()
        coordinator.start()
        (known,) = drains(coordinator)
        assert (known["state"], known["handovers"][0]["lost_steps"]) == ("drained", 0)
        assert strata("drain", "c", "--cancel", "--api", coordinator.url).code == 0
        assert "No machine is drained" in strata("drain", "--api", coordinator.url).out
        back = machines.start("c")
        a.await_line(lambda line: line.get("world") == 3, count=6)
        machines.slow.unlink()
        for running in (a, b, back):
            running.finish()
    assert all(len(machines.processes(a, name)) == 1 for name in "ab"), "survivors stay"
    assert set(lost(a)) == {0}
    assert_trained_once(a, STEPS)
