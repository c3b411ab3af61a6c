"""Machines that are lost with everything they have: their snapshots come back from other machines' memory.

Every machine is an agent with a memory root of its own. A lost one is killed with all its processes, and its memory deleted.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from strata.checkpoint.peers.link import HeldCopy, PeerLink
from strata.checkpoint.peers.wire import PeerError
from strata.launch.coordinator import CoordinatorProcess
from tests.support import eventually
from tests.training.test_recoverable import Job, assert_exact, children, job

LIMIT_S = 120.0


class Fleet:
    """Agents that meet at one coordinator."""

    def __init__(self, folder: Path, stack: ExitStack, *, nnodes: str, steps: int, **variables: str) -> None:
        self.folder = folder
        self._stack = stack
        coordinator = CoordinatorProcess(folder / "coordinator").start()
        stack.callback(coordinator.stop)
        self._flags = [
            *(f"--nnodes={nnodes}", f"--rdzv-endpoint={coordinator.address}"),
            *("--rdzv-id=fleet", "--local-addr=127.0.0.1", "--max-restarts=20"),
        ]
        self._steps = steps
        self._variables = {"GLOO_SOCKET_IFNAME": "lo", "SAVE_EVERY": "1000000", "PEERS": "peer", **variables}
        self.machines: dict[str, Job] = {}

    def start(self, name: str, kind: str = "fsdp", **variables: str) -> Job:
        running = job(
            self.folder / "job",
            kind,
            workers=1,
            steps=self._steps,
            flags=self._flags,
            memory=str(self.folder / name),
            MACHINE=name,
            **{**self._variables, **variables},
        )
        self.machines[name] = self._stack.enter_context(running)
        return self.machines[name]

    def held(self, name: str) -> list[HeldCopy]:
        """What a machine's agent keeps for others."""
        for path in (self.folder / name).glob("strata-peers-*/*/socket"):
            link = PeerLink(str(path))
            with suppress(PeerError):
                return [copy for copy in link.own_copies() if copy.is_complete]
            link.close()
        return []

    def safe_step(self) -> int:
        """The newest step of which every part is on another machine."""
        parts: dict[int, set[str]] = {}
        wanted: set[str] = set()
        for name in self.machines:
            for copy in self.held(name):
                parts.setdefault(copy.step, set()).add(copy.part)
                wanted = set(copy.parts)
        return max((step for step, found in parts.items() if found >= wanted), default=0)

    def await_safe(self, step: int) -> int:
        def found() -> int:
            safe = self.safe_step()
            return safe if safe >= step else 0

        safe: int = eventually(found, within_s=LIMIT_S, what=self.output)
        return safe

    def lose(self, name: str) -> None:
        """All processes of a machine, at once, and its memory."""
        process = self.machines.pop(name).process
        everyone = [process.pid, *children(process.pid)]
        for pid in everyone:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()
        shutil.rmtree(self.folder / name)

    def resumed(self) -> list[dict[str, Any]]:
        return [line for line in next(iter(self.machines.values())).log() if "resumed" in line]

    def output(self) -> str:
        return (self.folder / "job" / "output").read_text()[-8000:]


@contextmanager
def fleet(folder: Path, *, nnodes: str, steps: int, **variables: str) -> Iterator[Fleet]:
    with ExitStack() as stack:
        yield Fleet(folder, stack, nnodes=nnodes, steps=steps, **variables)


@pytest.mark.timeout(300)
def test_lost_machine_costs_no_snapshot_with_fewer_and_with_a_replacement(tmp_path: Path) -> None:
    with fleet(tmp_path, nnodes="3:4", steps=100000, STEP_S="0.03") as running:
        for name in "abcd":
            running.start(name)
        safe = running.await_safe(40)
        before = len(running.resumed())
        running.lose("c")
        eventually(lambda: len(running.resumed()) >= before + 3, within_s=LIMIT_S, what=running.output)
        with_three = running.resumed()[before:][:3]
        assert {line["tier"] for line in with_three} <= {"MEMORY", "PEER"}, running.output()
        assert {line["resumed"] for line in with_three} == {with_three[0]["resumed"]}
        assert with_three[0]["resumed"] >= safe, running.output()
        assert {line["machine"] for line in with_three} == set("abd")
