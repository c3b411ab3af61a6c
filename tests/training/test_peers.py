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
from strata.processes import machine_token
from tests.support import eventually
from tests.training.test_recoverable import Job, assert_exact, children, job

LIMIT_S = 240.0


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


def lose_and_resume(running: Fleet, *lost: str, safe: int) -> dict[str, Any]:
    """What the machines that are left resumed with, all alike."""
    before = len(running.resumed())
    for name in lost:
        running.machines[name].process.send_signal(signal.SIGSTOP)  # All at one moment.
    for name in lost:
        running.lose(name)
    left = len(running.machines)
    eventually(lambda: len(running.resumed()) >= before + left, within_s=LIMIT_S, what=running.output)
    found = running.resumed()[before : before + left]
    assert {line["machine"] for line in found} == set(running.machines)
    assert len({(line["resumed"], line["tier"]) for line in found}) == 1, found
    return found[0]


def add_and_resume(running: Fleet, name: str) -> dict[str, Any]:
    before = len(running.resumed())
    running.start(name)
    everyone = len(running.machines)
    eventually(lambda: len(running.resumed()) >= before + everyone, within_s=LIMIT_S, what=running.output)
    found = running.resumed()[before : before + everyone]
    assert {line["machine"] for line in found} == set(running.machines)
    return found[0]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("machines", ["abc", pytest.param("abcd", marks=pytest.mark.slow)])
def test_lost_machine_costs_no_snapshot_with_fewer_and_with_a_replacement(
    tmp_path: Path, machines: str
) -> None:
    least = len(machines) - 1
    with fleet(tmp_path, nnodes=f"{least}:{len(machines)}", steps=500, STEP_S="0.03") as running:
        for name in machines:
            running.start(name)
        safe = running.await_safe(40)
        found = lose_and_resume(running, "b", safe=safe)
        assert found["tier"] == "PEER", running.output()
        assert found["resumed"] >= safe
        assert found["resumed"] % 20 == 0
        safe = running.await_safe(found["resumed"] + 20)
        assert add_and_resume(running, "e")["resumed"] >= safe
        safe = running.await_safe(safe + 20)
        found = lose_and_resume(running, "a", safe=safe)  # Rank 0 of the first world.
        assert found["tier"] == "PEER", running.output()
        assert found["resumed"] >= safe
        for each in running.machines.values():
            each.finish()
    assert_exact(tmp_path / "job")
    assert not list(tmp_path.glob("*/strata-peers-*/*/*/*/archive.pt"))


def holder_of(running: Fleet, machine: str) -> str:
    """Who keeps the part of another machine."""
    return next(
        name
        for name in running.machines
        if any(copy.slot.startswith(f"{machine_of(running, machine)}/") for copy in running.held(name))
    )


def machine_of(running: Fleet, name: str) -> str:
    return f"{machine_token()}:{running.folder / name}"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_both_holders_lost_means_the_durable_tier_and_that_is_said(tmp_path: Path) -> None:
    with fleet(tmp_path, nnodes="2:4", steps=400, STEP_S="0.03", SAVE_EVERY="40") as running:
        for name in "abcd":
            running.start(name)
        safe = running.await_safe(60)
        lost = {"c", holder_of(running, "c")}
        found = lose_and_resume(running, *sorted(lost), safe=safe)
        assert found["tier"] == "NVME", running.output()  # The folder of the job.
        # One that was due while copies were sent is made a little later.
        durable = (tmp_path / "job" / "checkpoints").glob(f"ckpt-{found['resumed']:08d}-*.manifest.json")
        assert list(durable)
        assert found["resumed"] >= 40
        assert "parts are not there" in running.output()
        for each in running.machines.values():
            each.finish()
    assert_exact(tmp_path / "job")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_flipped_bits_in_a_copy_are_refused_and_the_other_copy_is_read(tmp_path: Path) -> None:
    with fleet(tmp_path, nnodes="2:3", steps=300, STEP_S="0.1", PEERS="peer:2") as running:
        for name in "abc":
            running.start(name)
        running.await_safe(20)
        slot = f"{machine_of(running, 'c')}/"

        def with_both() -> list[HeldCopy]:
            held = [copy for name in "ab" for copy in running.held(name) if copy.slot.startswith(slot)]
            steps = [copy.step for copy in held]
            return held if len(held) == 4 and steps.count(max(steps)) == 2 else []

        held: list[HeldCopy] = eventually(with_both, within_s=LIMIT_S, what=running.output)
        newest = max(copy.step for copy in held)
        damaged = next(copy for copy in held if copy.step == newest)
        running.machines["c"].process.send_signal(signal.SIGSTOP)
        with Path(damaged.path).open("r+b") as file:
            for offset in range(0, damaged.size_bytes, 997):
                file.seek(offset)
                byte = file.read(1)[0]
                file.seek(offset)
                file.write(bytes([byte ^ 1]))
        found = lose_and_resume(running, "c", safe=newest)
        assert found["tier"] == "PEER"
        assert found["resumed"] >= newest, running.output()
        for each in running.machines.values():
            each.finish()
    assert_exact(tmp_path / "job")
