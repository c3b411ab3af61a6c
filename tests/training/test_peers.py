"""Machines that are lost with everything they have: their snapshots come back from other machines' memory.

Every machine is an agent with a memory root of its own, some in a network of their own. A lost one is killed with all its processes, its
memory deleted, and its network taken away.
"""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest

from strata.checkpoint.peers.link import HeldCopy, PeerLink
from strata.checkpoint.peers.wire import PeerError
from strata.files import write_file
from strata.launch.cleanup import is_tracker
from strata.launch.coordinator import CoordinatorProcess
from strata.processes import machine_token
from tests.support import eventually
from tests.support_network import Network, network
from tests.support_proxy import Proxy
from tests.training.test_recoverable import SNAPSHOT_EVERY, Job, assert_exact, job

T = TypeVar("T")

LIMIT_S = 240.0
APART = "bce"
"""The machines that have a network namespace of their own, where there is such a network; the others share this machine's."""

STEP_S, SLOW_STEP_S = 0.1, 0.25
PACE = f"""
import os, time
def pace(): return (folder / 'pace').read_text()
now = pace()
if now == 'hold' and step % {SNAPSHOT_EVERY} == {SNAPSHOT_EVERY // 2}:
    (folder / f"held-{{os.environ['MACHINE']}}").touch()
    while (now := pace()) == 'hold': time.sleep(0.02)
time.sleep({STEP_S} if now == 'hold' else float(now))
"""
"""Held half way between two snapshots: whoever has looked a moment before, and is a step ahead, makes none."""


class Fleet:
    """Agents that meet at one coordinator."""

    def __init__(
        self,
        folder: Path,
        stack: ExitStack,
        *,
        nnodes: str,
        steps: int,
        lan: Network | None = None,
        **variables: str,
    ) -> None:
        self.folder = folder
        self._stack = stack
        self._lan = lan
        coordinator = CoordinatorProcess(folder / "coordinator").start()
        stack.callback(coordinator.stop)
        address = coordinator.address
        if lan is not None:
            address = stack.enter_context(Proxy(coordinator.grpc_port, host=lan.here)).address
        self._flags = [
            *(f"--nnodes={nnodes}", f"--rdzv-endpoint={address}", "--rdzv-id=fleet", "--max-restarts=20"),
        ]
        self._steps = steps
        (folder / "job").mkdir()
        (folder / "job" / "faults-0").write_text(PACE)
        self.pace(STEP_S)
        self._variables = {"STEP_S": "0", "SAVE_EVERY": "1000000", "PEERS": "peer", **variables}
        self.machines: dict[str, Job] = {}

    def start(self, name: str, kind: str = "fsdp", **variables: str) -> Job:
        address, interface, namespace = self._place(name)
        running = job(
            self.folder / "job",
            kind,
            workers=1,
            steps=self._steps,
            flags=[*self._flags, f"--local-addr={address}"],
            namespace=namespace,
            memory=str(self.folder / name),
            MACHINE=name,
            GLOO_SOCKET_IFNAME=interface,
            **{**self._variables, **variables},
        )
        self.machines[name] = self._stack.enter_context(running)
        return self.machines[name]

    def _place(self, name: str) -> tuple[str, str, str | None]:
        """A machine's address, the interface that has it, and its namespace."""
        if self._lan is None:
            return "127.0.0.1", "lo", None
        if name not in APART:
            return self._lan.here, self._lan.interface, None
        number = APART.index(name)
        return self._lan.address(number), "eth0", self._lan.namespace(number)

    def held(self, name: str) -> list[HeldCopy]:
        """What a machine's agent keeps for others."""
        return [copy for copy in self._ask(name, PeerLink.own_copies) if copy.is_complete]

    def _ask(self, name: str, ask: Callable[[PeerLink], Iterable[T]]) -> list[T]:
        for path in (self.folder / name).glob("strata-peers-*/*/socket"):
            with closing(PeerLink(str(path))) as link, suppress(PeerError):
                return list(ask(link))
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
        """All processes of a machine, at once, its network and its memory. Python's resource tracker removes their semaphores, and
        ends by itself."""
        process = self.machines.pop(name).process
        if self._lan is not None and name in APART:
            self._lan.cut(APART.index(name))
        everyone = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        for each in everyone:
            with suppress(psutil.NoSuchProcess):
                if not is_tracker(each.pid):
                    each.kill()
        process.wait()
        psutil.wait_procs(everyone[1:], timeout=60)
        shutil.rmtree(self.folder / name)

    def hold_with_copies(self, *, of_step: int) -> int:
        """Everybody waits, once copies of this step, or of a later one, are on other machines: the newest snapshot there is."""
        self.await_safe(of_step)
        self._pace("hold")
        eventually(self._has_sent, within_s=LIMIT_S, what=self.output)
        return self.safe_step()

    def _has_sent(self) -> bool:
        """Everybody has stopped, and nothing is under way between machines."""
        held = [(self.folder / "job" / f"held-{name}").exists() for name in self.machines]
        return any(held) and not any(self._ask(name, PeerLink.pending) for name in self.machines)

    def pace(self, step_s: float) -> None:
        self._pace(str(step_s))

    def _pace(self, pace: str) -> None:
        for path in (self.folder / "job").glob("held-*"):
            path.unlink()
        write_file(self.folder / "job" / "pace", pace, durable=False)

    def finish(self) -> None:
        self.pace(0.0)
        for each in self.machines.values():
            each.finish()

    def resumed(self) -> list[dict[str, Any]]:
        return [line for line in next(iter(self.machines.values())).log() if "resumed" in line]

    def output(self) -> str:
        return (self.folder / "job" / "output").read_text()[-8000:]


@contextmanager
def fleet(
    folder: Path, *, nnodes: str, steps: int, lan: Network | None = None, **variables: str
) -> Iterator[Fleet]:
    with ExitStack() as stack:
        yield Fleet(folder, stack, nnodes=nnodes, steps=steps, lan=lan, **variables)


def lose_and_resume(running: Fleet, *lost: str) -> dict[str, Any]:
    """What the machines that are left resumed with, all alike. Where they are held, that is until the others are lost."""
    before = len(running.resumed())
    for name in lost:
        running.machines[name].process.send_signal(signal.SIGSTOP)  # All at one moment.
    for name in lost:
        running.lose(name)
    running.pace(STEP_S)
    left = len(running.machines)
    eventually(lambda: len(running.resumed()) >= before + left, within_s=LIMIT_S, what=running.output)
    found = running.resumed()[before : before + left]
    assert {line["machine"] for line in found} == set(running.machines)
    assert len({(line["resumed"], line["tier"]) for line in found}) == 1, found
    return found[0]


def add_and_resume(running: Fleet, name: str) -> dict[str, Any]:
    before = len(running.resumed())
    running.start(name)
    running.pace(SLOW_STEP_S)  # It takes its time to start.
    everyone = len(running.machines)
    eventually(lambda: len(running.resumed()) >= before + everyone, within_s=LIMIT_S, what=running.output)
    running.pace(STEP_S)
    found = running.resumed()[before : before + everyone]
    assert {line["machine"] for line in found} == set(running.machines)
    return found[0]


@pytest.mark.timeout(600)
def test_machine_that_vanishes_costs_nothing_beyond_the_last_snapshot_at_4_to_3_and_3_to_4(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of the four, and the replacement, have a network of their own: the lost one says no farewell."""
    monkeypatch.setenv("STRATA_HEARTBEAT_TIMEOUT", "5")
    with (
        network(len(APART)) as lan,
        fleet(tmp_path, nnodes="3:4", steps=500, lan=lan) as running,
    ):
        for name in "abcd":
            running.start(name)
        safe = running.hold_with_copies(of_step=20)
        found = lose_and_resume(running, "b")
        assert (found["tier"], found["resumed"]) == ("PEER", safe), running.output()
        safe = running.hold_with_copies(of_step=safe + 20)
        found = add_and_resume(running, "e")
        assert found["resumed"] >= safe, running.output()
        running.pace(SLOW_STEP_S)
        running.await_safe(found["resumed"] + 20)  # The replacement keeps copies too.
        running.finish()
    assert_exact(tmp_path / "job")
    assert not list(tmp_path.glob("*/strata-peers-*/*/*/*/archive.pt"))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_lost_machine_costs_no_snapshot_with_fewer_and_with_a_replacement(tmp_path: Path) -> None:
    with fleet(tmp_path, nnodes="3:4", steps=500) as running:
        for name in "abcd":
            running.start(name)
        safe = running.await_safe(40)
        found = lose_and_resume(running, "b")
        assert found["tier"] == "PEER", running.output()
        assert found["resumed"] >= safe
        assert found["resumed"] % 20 == 0
        safe = running.await_safe(found["resumed"] + 20)
        assert add_and_resume(running, "e")["resumed"] >= safe
        safe = running.await_safe(safe + 20)
        found = lose_and_resume(running, "a")  # Rank 0 of the first world.
        assert found["tier"] == "PEER", running.output()
        assert found["resumed"] >= safe
        running.finish()
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
    with fleet(tmp_path, nnodes="2:4", steps=400, SAVE_EVERY="40") as running:
        for name in "abcd":
            running.start(name)
        running.await_safe(60)
        lost = {"c", holder_of(running, "c")}
        found = lose_and_resume(running, *sorted(lost))
        assert found["tier"] == "NVME", running.output()  # The folder of the job.
        # One that was due while copies were sent is made a little later.
        durable = (tmp_path / "job" / "checkpoints").glob(f"ckpt-{found['resumed']:08d}-*.manifest.json")
        assert list(durable)
        assert found["resumed"] >= 40
        assert "parts are missing" in running.output()
        running.finish()
    assert_exact(tmp_path / "job")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_flipped_bits_in_a_copy_are_refused_and_the_other_copy_is_read(tmp_path: Path) -> None:
    with fleet(tmp_path, nnodes="2:3", steps=300, PEERS="peer:2") as running:
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
        found = lose_and_resume(running, "c")
        assert found["tier"] == "PEER"
        assert found["resumed"] >= newest, running.output()
        running.finish()
    assert_exact(tmp_path / "job")
