"""Copies of images in other machines' memory: real agents, real sockets, and everything that may go wrong between them."""

from __future__ import annotations

import io
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from strata.checkpoint.catalog.manifest import CheckpointId
from strata.checkpoint.catalog.naming import new_id
from strata.checkpoint.copying.staging import find_snapshots, read_snapshot
from strata.checkpoint.image.layout import FILE_NAME
from strata.checkpoint.manager import Author, CheckpointManager, Memory
from strata.checkpoint.peers import link as peer_link
from strata.checkpoint.peers import memory, sending, wire
from strata.checkpoint.peers.link import HeldCopy, PeerLink
from strata.checkpoint.peers.memory import PeerMemory
from strata.checkpoint.peers.wire import PeerError
from strata.core.jobs.lineage import Lineage
from strata.core.jobs.peers import Peer
from tests.support import eventually

RUN = "run-of-tests"


class Value:
    """One compare-and-swap value."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: tuple[bytes, str] | None = None

    def get(self) -> tuple[bytes, str] | None:
        return self._found

    def swap(self, value: bytes, token: str | None) -> bool:
        with self._lock:
            if (self._found[1] if self._found is not None else None) != token:
                return False
            self._found = (value, str(int(token or 0) + 1))
            return True


class Meeting:
    def __init__(self) -> None:
        self.value = Value()

    def shared_value(self, name: str) -> Value:
        return self.value

    def own_address(self) -> tuple[str, str]:
        return "127.0.0.1", "127.0.0.1"


class Machine:
    """An agent's peer memory, and one worker that saves images on the same machine."""

    def __init__(self, root: Path, meeting: Meeting, number: int) -> None:
        self.root = root
        self.peer_memory = PeerMemory(meeting, run=RUN, name=f"agent-{number}", root=root)
        self.peer_memory.open()
        self.link = PeerLink(str(self.peer_memory.socket_path))
        self.lineage = Lineage(run=RUN, generation=1)
        self.manager = CheckpointManager(
            [],
            memory=Memory(job=f"job-{number}", root=root),
            author=Author(run=RUN, generation=1),
            on_kept=self._kept,
        )
        self.copies = 1
        self.copied_step = -1
        self.rate_bytes = 0
        self.number = number

    def _kept(self, manifest: Any, path: str) -> None:
        self.copied_step = self.link.saved(
            slot=f"slot-{self.number}",
            folder=Path(path).parent,
            checkpoint_id=manifest.checkpoint_id,
            holders=(self.peer_memory.machine,),
            copies=self.copies,
            rate_bytes=self.rate_bytes,
        )

    def save(self, step: int, state: dict[str, Any]) -> CheckpointId:
        placement = self.lineage.place(new_id(step), now_ms=int(time.time() * 1000), durable=False)
        handle = self.manager.save(state, step, tiers=["MEMORY"], placement=placement)
        return handle.result(30).checkpoint_id

    def held(self) -> list[HeldCopy]:
        return self.link.own_copies(RUN)

    def await_step(self, step: int) -> HeldCopy:
        def found() -> HeldCopy | None:
            return next((copy for copy in self.held() if copy.is_complete and copy.step == step), None)

        copy: HeldCopy = eventually(found, within_s=60, what=f"step {step} with machine {self.number}")
        return copy

    def close(self) -> None:
        self.manager.close()
        self.link.close()
        self.peer_memory.close()


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that copy give way to all others: on a busy machine their answers take long."""
    monkeypatch.setattr(peer_link, "REPORT_S", 60.0)
    monkeypatch.setattr(wire, "CONNECT_S", 60.0)
    monkeypatch.setattr(wire, "STILL_S", 60.0)
    monkeypatch.setattr(memory, "MAKE_WAY_S", 60.0)


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Callable[[int], list[Machine]]]:
    meeting = Meeting()
    made: list[Machine] = []

    def make(count: int) -> list[Machine]:
        for _ in range(count):
            number = len(made)
            made.append(Machine(tmp_path / f"memory-{number}", meeting, number))
        return made

    yield make
    for machine in made:
        machine.close()


def state(step: int, *, size: int = 1 << 20) -> dict[str, Any]:
    return {"weights": torch.full((size,), float(step)), "frozen": torch.arange(size), "step": step}


def test_report_of_a_snapshot_says_which_step_another_machine_has_by_now(
    machines: Callable[[int], list[Machine]],
) -> None:
    first, second = machines(2)
    first.save(1, state(1))
    assert first.copied_step == -1
    second.await_step(1)
    sender = first.peer_memory._sender
    assert sender is not None
    eventually(lambda: sender.copied("slot-0") == 1, within_s=60, what="the sender knows")
    first.save(2, state(2))
    assert first.copied_step == 1


def test_snapshot_is_copied_to_the_next_machine_and_is_the_same_image(
    machines: Callable[[int], list[Machine]],
) -> None:
    first, second = machines(2)
    first.save(1, state(1))
    copy = second.await_step(1)
    mine, theirs = find_snapshots("job-0", root=first.root)[0], read_snapshot(Path(copy.path).parent)
    assert theirs is not None
    assert theirs.manifest == mine.manifest
    assert theirs.path.read_bytes() == mine.path.read_bytes()
    assert first.held() == []


def test_only_changed_chunks_are_sent_again(machines: Callable[[int], list[Machine]]) -> None:
    first, second = machines(2)
    large = 8 << 20  # Two tensors of several chunks each.
    first.save(1, state(1, size=large))
    second.await_step(1)
    first.save(2, state(2, size=large))
    copy = second.await_step(2)
    sender = first.peer_memory._sender
    assert sender is not None
    eventually(lambda: len(sender.sent) == 2, within_s=60)
    sent = [bytes_sent for _, _, bytes_sent, _ in sender.sent]
    assert sent[0] >= copy.size_bytes
    assert 0 < sent[1] < 0.6 * copy.size_bytes
    theirs = read_snapshot(Path(copy.path).parent)
    assert theirs is not None
    assert torch.load(theirs.path)["weights"].eq(2.0).all()
    assert torch.load(theirs.path)["frozen"].equal(torch.arange(large))


def test_flipped_bit_in_a_copy_is_noticed_by_whoever_reads_it(
    machines: Callable[[int], list[Machine]],
) -> None:
    first, second, third = machines(3)
    first.save(1, state(1))
    copy = second.await_step(1)
    with Path(copy.path).open("r+b") as file:
        file.seek(copy.size_bytes // 2)
        flipped = file.read(1)[0] ^ 1
        file.seek(copy.size_bytes // 2)
        file.write(bytes([flipped]))
    seen = next(each for each in third.link.copies(RUN) if each.machine == second.peer_memory.machine)
    with pytest.raises(PeerError, match="damaged"):
        third.link.pull(seen)
    assert third.held() == []


def test_copy_is_fetched_from_another_machine(machines: Callable[[int], list[Machine]]) -> None:
    first, second, third = machines(3)
    first.save(1, state(1))
    copy = second.await_step(1)
    (seen,) = third.link.copies(RUN)
    assert (seen.path, seen.machine, seen.step) == ("", second.peer_memory.machine, 1)
    assert third.link.pull(seen).read_bytes() == Path(copy.path).read_bytes()
    reader = third.link.reader(seen)
    assert reader.manifest().step == 1
    parts: dict[int, bytes] = {}
    reader.read_parts(
        "",
        lambda start, part: parts.update({start: bytes(part)}),
        size_bytes=seen.size_bytes,
        part_bytes=1 << 20,
    )
    assert b"".join(parts[start] for start in sorted(parts)) == Path(copy.path).read_bytes()


def test_earlier_generation_is_refused_and_what_was_complete_stays(
    machines: Callable[[int], list[Machine]],
) -> None:
    first, second = machines(2)
    first.save(1, state(1))
    second.await_step(1)
    second.link.fence(RUN, 2)
    first.save(2, state(2))
    assert first.peer_memory._sender is not None
    eventually(lambda: not first.link.pending(), within_s=60)
    assert [(copy.step, copy.is_complete) for copy in second.held()] == [(1, True)]
    first.lineage.generation = 2
    first.save(3, state(3))
    second.await_step(3)
    second.link.settle(RUN, 2)
    assert [copy.step for copy in second.held()] == [3]


def test_full_peer_refuses_and_another_machine_takes_the_copy(
    machines: Callable[[int], list[Machine]],
) -> None:
    first, second, third = machines(3)
    second.peer_memory._copy_table.budget_bytes = 1000
    first.save(1, state(1))
    third.await_step(1)
    assert second.held() == []


def test_lost_peer_is_left_out_and_another_machine_takes_the_copy(
    machines: Callable[[int], list[Machine]],
) -> None:
    first, second, third = machines(3)
    listener = second.peer_memory._listener
    assert listener is not None
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()  # As on a machine that was killed: nobody listens there any more.
    first.save(1, state(1))
    third.await_step(1)


def test_peer_that_is_found_silent_is_not_waited_for_any_longer(
    machines: Callable[[int], list[Machine]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a machine that has lost its power: its connections are there, and nothing comes over them any more."""
    monkeypatch.setattr(wire, "STILL_S", 600.0)
    first, second, third = machines(3)
    is_asked, is_over = threading.Event(), threading.Event()

    def stand_still(*_: object) -> None:
        is_asked.set()
        is_over.wait(60)
        raise PeerError("The machine is lost.")

    monkeypatch.setattr(second.peer_memory, "_take", stand_still)
    try:
        first.save(1, state(1))
        assert is_asked.wait(60)
        assert second.peer_memory._listener is not None
        second.peer_memory._listener.shutdown(socket.SHUT_RDWR)
        assert first.link.copies(RUN) == []  # As the next generation does.
        third.await_step(1)
    finally:
        is_over.set()


def test_peer_that_stands_still_stalls_nothing_and_leaks_nothing(
    machines: Callable[[int], list[Machine]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It accepts connections, and says nothing."""
    monkeypatch.setattr(wire, "CONNECT_S", 0.5)
    monkeypatch.setattr(sending, "LEAVE_OUT_S", 600.0)
    (first,) = machines(1)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        address = f"127.0.0.1:{mute.getsockname()[1]}"
        assert first.peer_memory._roster is not None
        first.peer_memory._roster.enter(Peer(machine="mute", agent="mute", host="mute", address=address))
        for step in range(1, 6):
            first.save(step, state(step))
        eventually(lambda: not first.link.pending(), within_s=60)
        eventually(  # Those of the test before end by themselves.
            lambda: (
                sorted(t.name for t in threading.enumerate() if t.name.startswith("strata-peer"))
                == ["strata-peer", "strata-peer-sender", "strata-peers", "strata-peers-port"]
            ),
            within_s=60,
            what=lambda: f"only its own threads, not {threading.enumerate()}",
        )
        assert first.manager.snapshots()[0].step == 5


def test_image_that_is_saved_over_while_it_is_sent_is_never_a_copy(
    machines: Callable[[int], list[Machine]],
) -> None:
    first, second = machines(2)
    first.rate_bytes = 4 << 20  # Slower than the saves.
    for step in range(1, 7):
        first.save(step, state(step))
        for copy in second.held():
            if copy.is_complete:
                try:
                    data = Path(copy.path).read_bytes()
                except FileNotFoundError:
                    data = b""
                if copy in second.held():  # Else it has made way for the next one while it was read.
                    image = torch.load(io.BytesIO(data))
                    assert image["weights"].eq(float(image["step"])).all()
    first.rate_bytes = 0
    first.save(7, state(7))
    copy = second.await_step(7)
    assert torch.load(copy.path)["weights"].eq(7.0).all()


def test_two_copies_are_on_two_machines(machines: Callable[[int], list[Machine]]) -> None:
    first, second, third = machines(3)
    first.copies = 2
    first.save(1, state(1))
    second.await_step(1)
    third.await_step(1)


def test_nobody_gets_in_without_the_secret(machines: Callable[[int], list[Machine]]) -> None:
    (first,) = machines(1)
    assert first.peer_memory._sender is not None
    with pytest.raises((PeerError, OSError)):
        wire.connect(first.peer_memory._sender.me.address, "a guess")
    with socket.create_connection(
        ("127.0.0.1", int(first.peer_memory._sender.me.address.rpartition(":")[2]))
    ) as raw:
        raw.settimeout(60)
        wire.receive(raw)
        raw.sendall(b"\xff" + os.urandom(63))  # Longer than any message: nobody waits for the rest of it.
        with suppress(ConnectionResetError):
            assert raw.recv(64) == b""
    assert first.held() == []


def test_memory_of_copies_is_given_back(tmp_path: Path) -> None:
    meeting = Meeting()
    first, second = (Machine(tmp_path / f"memory-{n}", meeting, n) for n in range(2))
    first.save(1, state(1))
    second.await_step(1)
    first.link.forget(RUN, 1)
    second.link.forget(RUN, 1)
    assert second.held() == []
    assert not list(second.peer_memory.folder.rglob(FILE_NAME))
    folder = second.peer_memory.folder
    first.close()
    second.close()
    assert not folder.exists()


@pytest.mark.parametrize(
    ("text", "number"), [("2GB", 2 * 10**9), ("512MiB", 512 << 20), ("1.5gb", 1_500_000_000), ("7", 7)]
)
def test_numbers_of_bytes(text: str, number: int) -> None:
    assert wire.parse_bytes(text) == number
    assert wire.parse_rate(f"{text}/s") == number


@pytest.mark.parametrize("text", ["", "fast", "-1GB", "0", "2GB/h", "2 GB per second"])
def test_what_is_no_rate_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="write it like"):
        wire.parse_rate(text)
