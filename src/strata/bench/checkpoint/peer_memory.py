"""Copies of snapshots in another machine's memory: how fast they are, what they cost training, and how fast they are back.

    python -m strata.bench.checkpoint.peer_memory [--json] [--quick]

Machines are processes with memory roots of their own, and the network is loopback. A bare copy is `sendfile` from the same image to
`recv_into` of memory that is there already, without a digest, at the same priority. Bare copies and ours take turns.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import mmap
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from strata import locks
from strata.bench.checkpoint.s3 import s3_server
from strata.bench.recovery.in_process import last_lines
from strata.bench.table import Row, report
from strata.checkpoint.catalog.naming import new_id
from strata.checkpoint.image.in_place import take_from_store
from strata.checkpoint.manager import Author, CheckpointManager, Memory
from strata.checkpoint.peers import wire
from strata.checkpoint.peers.link import PeerLink
from strata.checkpoint.peers.memory import PeerMemory
from strata.core.jobs.lineage import Lineage
from strata.core.types import CheckpointId
from strata.launch.coordinator import CoordinatorProcess
from strata.launch.torchrun import Agent, TorchrunSpec
from strata.stores import open_store

RUN = "bench"
GIB = 1 << 30
PATIENCE_S = 180.0
TENSORS = 64
JOB = Path(__file__).parents[1] / "recovery" / "recoverable_job.py"


class _FileMeeting:
    """Where agents of this benchmark meet: a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def shared_value(self, name: str) -> _FileMeeting:
        return self

    def own_address(self) -> tuple[str, str]:
        return "127.0.0.1", "127.0.0.1"

    def get(self) -> tuple[bytes, str] | None:
        with locks.exclusively(self._path) as file:
            found = json.loads(os.pread(file, 1 << 20, 0) or b"null")
        return (found["value"].encode(), str(found["version"])) if found is not None else None

    def swap(self, value: bytes, token: str | None) -> bool:
        with locks.exclusively(self._path) as file:
            found = json.loads(os.pread(file, 1 << 20, 0) or b"null")
            if (str(found["version"]) if found is not None else None) != token:
                return False
            data = json.dumps({"value": value.decode(), "version": int(token or 0) + 1}).encode()
            os.pwrite(file, data, 0)
            os.ftruncate(file, len(data))
            return True


def run(*, quick: bool = False) -> Iterator[Row]:
    size_bytes = (64 << 20) if quick else GIB
    rounds = 3 if quick else 7
    nice = wire.NICE
    with tempfile.TemporaryDirectory(prefix="strata-peers-", dir=_shared_memory()) as made:
        yield from _copy_rows(Path(made), size_bytes, rounds)
    wire.NICE = nice
    with tempfile.TemporaryDirectory(prefix="strata-peers-", dir=_shared_memory()) as made:
        yield _step_row(Path(made), (64 << 20) if quick else 256 << 20, blocks=6 if quick else 40)
    yield from _loss_rows(losses=1 if quick else 5)


def _shared_memory() -> str | None:
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


# --- copies and restores ------------------------------------------------------------------------------------------


def _copy_rows(folder: Path, size_bytes: int, rounds: int) -> Iterator[Row]:
    meeting = _FileMeeting(folder / "meeting")
    wire.NICE = 0  # Here and there: a bare copy has no training to yield to either.
    copies: list[float] = []
    bare: list[float] = []
    restores: list[float] = []
    bare_restores: list[float] = []
    s3: list[float] = []
    with contextlib.ExitStack() as stack:
        stack.enter_context(_child("keep", folder / "b", folder / "meeting", "0"))
        port = stack.enter_context(_child("bare", folder / "bare", str(size_bytes)))
        peer_memory = PeerMemory(meeting, run=RUN, name="a", root=folder / "a")
        stack.callback(peer_memory.close)
        peer_memory.open()
        link = PeerLink(str(peer_memory.socket_path))
        stack.callback(link.close)
        saver = stack.enter_context(_Saver(folder / "a", peer_memory.machine, link))
        _await(lambda: len(link.roster()) == 2)
        state = _state(size_bytes)
        target = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
        assert peer_memory._sender is not None
        with contextlib.closing(socket.create_connection(("127.0.0.1", int(port)))) as plain:
            for number in range(1, rounds + 3):
                for tensor in state.values():
                    tensor.add_(1)
                image = saver.save(number, state)
                _await(lambda number=number: len(peer_memory._sender.sent) == number)  # type: ignore[misc]
                ours_s, bare_s = peer_memory._sender.sent[-1][3], _send_bare(plain, image)
                if number <= 2:
                    continue  # Each of the two places of a part is faulted in once.
                copies.append(ours_s)
                bare.append(bare_s)
                (copy,) = [c for c in link.copies(RUN) if c.is_complete and c.step == number]
                started_s = time.perf_counter()
                reader = link.reader(copy)
                take_from_store(reader, reader.manifest(), into=target, path=reader.url)
                restores.append(time.perf_counter() - started_s)
                assert all(torch.equal(target[name], state[name]) for name in state)
                bare_restores.append(_receive_bare(plain, size_bytes))
        s3 += _from_s3(folder, state, target, max(1, rounds // 2))
    mib = size_bytes / 2**20
    yield Row(
        name=f"a copy of {mib:,.0f} MiB to another machine's memory, all of it changed",
        measured=statistics.median(bare) / statistics.median(copies),
        unit="of a bare TCP copy",
        target=0.8,
        peer=f"bare {mib / statistics.median(bare):,.0f} MiB/s",
        note=f"{mib / statistics.median(copies):,.0f} MiB/s, verified on arrival; medians of {len(copies)}",
    )
    yield Row(
        name=f"{mib:,.0f} MiB restored from another machine's memory into live tensors",
        measured=statistics.median(restores) / statistics.median(bare_restores),
        unit="× a bare TCP copy",
        target=1.5,
        better="lower",
        peer=f"bare {statistics.median(bare_restores):.2f} s",
        note=f"{statistics.median(restores):.2f} s, verified; medians of {len(restores)}",
    )
    if s3:
        yield Row(
            name=f"the same {mib:,.0f} MiB restored from S3 (SeaweedFS on loopback)",
            measured=statistics.median(s3),
            unit="s",
            better="lower",
            peer=f"from a peer {statistics.median(restores):.2f} s",
            note=f"median of {len(s3)}",
        )


class _Saver:
    """A worker that saves images at a root, and reports them."""

    def __init__(self, root: Path, machine: str, link: PeerLink, *, rate_bytes: int = 0) -> None:
        self._lineage = Lineage(run=RUN, generation=1)
        self._link, self._machine, self._rate_bytes = link, machine, rate_bytes
        self._manager = CheckpointManager(
            [],
            memory=Memory(job=f"bench-{uuid.uuid4().hex[:8]}", root=root),
            author=Author(run=RUN, generation=1),
        )

    def save(self, step: int, state: dict[str, Any]) -> Path:
        placement = self._lineage.place(new_id(step), now_ms=int(time.time() * 1000), durable=False)
        info = self._manager.save(state, step, tiers=["MEMORY"], placement=placement).result(PATIENCE_S)
        self.report(Path(info.path), info.checkpoint_id)
        return Path(info.path)

    def report(self, image: Path, checkpoint_id: CheckpointId) -> None:
        self._link.saved(
            slot="a",
            folder=image.parent,
            checkpoint_id=checkpoint_id,
            holders=(self._machine,),
            copies=1,
            rate_bytes=self._rate_bytes,
        )

    def __enter__(self) -> _Saver:
        return self

    def __exit__(self, *_: object) -> None:
        self._manager.close()


def _state(size_bytes: int) -> dict[str, Any]:
    each = size_bytes // TENSORS // 4
    return {f"tensor {n}": torch.full((each,), float(n)) for n in range(TENSORS)}


def _send_bare(plain: socket.socket, image: Path) -> float:
    seconds: list[float] = []

    def send() -> None:
        with image.open("rb", buffering=0) as file:
            size_bytes = os.fstat(file.fileno()).st_size
            started_s = time.perf_counter()
            plain.sendall(b"p" + size_bytes.to_bytes(8, "big"))
            plain.sendfile(file, 0, size_bytes)
            plain.recv(1)
            seconds.append(time.perf_counter() - started_s)

    thread = threading.Thread(target=send)
    thread.start()
    thread.join()
    return seconds[0]


def _receive_bare(plain: socket.socket, size_bytes: int) -> float:
    view = memoryview(_warm(size_bytes))
    started_s = time.perf_counter()
    plain.sendall(b"g" + size_bytes.to_bytes(8, "big"))
    done = 0
    while done < size_bytes:
        done += plain.recv_into(view[done : done + (1 << 20)])
    return time.perf_counter() - started_s


_buffers: dict[int, bytearray] = {}


def _warm(size_bytes: int) -> bytearray:
    return _buffers.setdefault(size_bytes, bytearray(b"\1" * size_bytes))


def _from_s3(folder: Path, state: dict[str, Any], target: dict[str, Any], rounds: int) -> list[float]:
    found = []
    with s3_server(folder / "s3") as options:
        if options is None:
            return []
        for _ in range(rounds):
            url = f"s3://bench/{uuid.uuid4().hex[:12]}"
            memory = Memory(job=f"bench-{uuid.uuid4().hex[:12]}", root=folder / "a")
            with CheckpointManager(open_store(url, **options), memory=memory) as manager:
                manager.save(state, step=1).result(PATIENCE_S)
                started_s = time.perf_counter()
                manager.restore(into=target, tiers=["S3"], tear_ok=True)
                found.append(time.perf_counter() - started_s)
    return found


# --- what training notices ------------------------------------------------------------------------------------------


def _step_row(folder: Path, size_bytes: int, *, blocks: int) -> Row:
    """Blocks of steps in this process, every second one while another process, the agent, sends images at the usual rate."""
    torch.set_num_threads(1)
    weights = torch.randn(512, 512)
    meeting = folder / "meeting"
    with contextlib.ExitStack() as stack:
        stack.enter_context(_child("keep", folder / "b", meeting, wire.NICE))
        path = stack.enter_context(_child("keep", folder / "a", meeting, wire.NICE))
        link = PeerLink(path)
        stack.callback(link.close)
        machine = link.roster()[0].machine
        saver = stack.enter_context(_Saver(folder / "a", machine, link, rate_bytes=2 * 10**9))
        _await(lambda: len(link.roster()) == 2)
        state = _state(size_bytes)
        alone: list[float] = []
        beside: list[float] = []
        for block in range(blocks):
            for tensor in state.values():
                tensor.add_(1)
            saver.save(block, state)
            while_sending = block % 2 == 1
            if not while_sending:
                _await(lambda: not link.pending())
            seconds: list[float] = []
            while len(seconds) < 200 and (not while_sending or not seconds or link.pending()):
                started_s = time.perf_counter()
                product = weights
                for _ in range(4):
                    product = torch.mm(product, weights)
                seconds.append(time.perf_counter() - started_s)
            (beside if while_sending else alone).append(statistics.median(seconds))
            _await(lambda: not link.pending())
    more = statistics.median(beside) / statistics.median(alone) - 1
    return Row(
        name="step time while a snapshot is sent at 2 GB/s",
        measured=100 * more,
        unit="% more",
        target=2.0,
        better="lower",
        note=f"medians of {len(alone)} and {len(beside)} blocks of steps of {1000 * statistics.median(alone):.2f} ms, in turns",
    )


# --- a lost machine ---------------------------------------------------------------------------------------------------


def _loss_rows(*, losses: int) -> Iterator[Row]:
    """Three machines with FSDP2; one is killed with everything it has and its memory deleted, and another started in its place."""
    times: list[float] = []
    again: list[int] = []
    with tempfile.TemporaryDirectory(prefix="strata-peers-") as made:
        folder = Path(made)
        coordinator = CoordinatorProcess(folder / "coordinator").start()
        agents: dict[str, Agent] = {}

        def start(name: str) -> None:
            (folder / name).mkdir()
            spec = TorchrunSpec(
                run_id=f"peers-{os.getpid()}",
                min_nodes=2,
                max_nodes=3,
                rdzv_endpoint=coordinator.address,
                arguments=[str(JOB), RUN, str(folder), "3000000", "cpu", "gloo", "fsdp", "peer"],
                environment={"STRATA_MEMORY_ROOT": str(folder / name)},
            )
            agents[name] = Agent(spec, log=folder / f"{name}.log")

        try:
            for name in ("m0", "m1", "m2"):
                start(name)
            for number in range(losses):
                _await_training(folder, agents, 3)
                lost = sorted(agents)[number % 3]
                at_s = time.monotonic()
                agents.pop(lost).kill()
                shutil.rmtree(folder / lost, ignore_errors=True)
                took_s, repeated = _next_new_step(folder, at_s, agents)
                times.append(took_s)
                again.append(repeated)
                start(f"m{number + 3}")
        finally:
            for agent in agents.values():
                agent.kill()
            coordinator.stop()
    yield Row(
        name="lost machine of 3 (CPU, FSDP2) → next new step, restored from a peer, no durable tier, median",
        measured=statistics.median(times),
        unit="s",
        target=3.0,
        better="lower",
        note=f"{len(times)} losses, {min(times):.2f} to {max(times):.2f} s; at most {max(again)} steps made again, "
        "with a snapshot every 50",
    )


def _await_training(folder: Path, agents: dict[str, Agent], machines: int) -> None:
    """Until so many ranks have trained for a while, and a snapshot of all of them is with peers."""

    def is_calm() -> bool:
        now_s = time.monotonic()
        lines = last_lines(folder)
        began = [line for line in lines if line.what.startswith("resumed")][-machines:]
        steps = {line.pid for line in lines if line.at_s > now_s - 1 and line.what.startswith("step")}
        return len(steps) == machines == len(began) and all(
            line.step > began[-1].step + 110 for line in lines[-machines:] if line.what.startswith("step")
        )

    _await(is_calm, what=lambda: "\n".join(agent.tail() for agent in agents.values()))


def _next_new_step(folder: Path, at_s: float, agents: dict[str, Agent]) -> tuple[float, int]:
    found: list[tuple[float, int]] = []

    def look() -> bool:
        lines = last_lines(folder)
        resumed = [line for line in lines if line.at_s > at_s and line.what.startswith("resumed")]
        if not resumed:
            return False
        if "PEER" not in resumed[0].what:
            raise RuntimeError(f"it was restored from elsewhere: {resumed[0].what}")
        made = [line.step for line in lines if line.at_s < resumed[0].at_s and line.what.startswith("step")]
        new = [
            line.at_s - at_s
            for line in lines
            if line.at_s > resumed[0].at_s and line.what.startswith("step") and line.step > max(made)
        ]
        if new:
            found.append((min(new), max(made) - resumed[0].step))
        return bool(new)

    _await(look, what=lambda: "\n".join(agent.tail() for agent in agents.values()))
    return found[0]


# --- processes --------------------------------------------------------------------------------------------------------


def _await(condition: Callable[[], bool], *, what: Callable[[], str] = lambda: "") -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"not within {PATIENCE_S:g} s. {what()}")
        time.sleep(0.02)


@contextlib.contextmanager
def _child(kind: str, *words: object) -> Iterator[str]:
    """A process of this module: the line that it says when it is ready. It ends when its input does."""
    command = [sys.executable, "-m", "strata.bench.checkpoint.peer_memory", kind, *map(str, words)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip()
    finally:
        process.stdin.close()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


def _keep(root: str, meeting: str, nice: str) -> None:
    wire.NICE = int(nice)
    peer_memory = PeerMemory(_FileMeeting(Path(meeting)), run=RUN, name=Path(root).name, root=Path(root))
    peer_memory.open()
    print(peer_memory.socket_path, flush=True)
    sys.stdin.read()
    peer_memory.close()


def _bare(root: str, size_bytes: str) -> None:
    """Takes what is sent to memory that is there already, or gives it back."""
    Path(root).mkdir(parents=True, exist_ok=True)
    with open(Path(root) / "bytes", "w+b", buffering=0) as file:
        os.posix_fallocate(file.fileno(), 0, int(size_bytes) + (16 << 20))
        view = memoryview(mmap.mmap(file.fileno(), 0))
        view[:] = b"\1" * len(view)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            print(listener.getsockname()[1], flush=True)
            connection, _ = listener.accept()
            while word := connection.recv(9, socket.MSG_WAITALL):
                length, done = int.from_bytes(word[1:], "big"), 0
                if word[:1] == b"g":
                    connection.sendfile(file, 0, length)
                    continue
                while done < length:
                    done += connection.recv_into(view[done : min(done + (1 << 20), length)])
                connection.sendall(b"k")


def main() -> None:
    if sys.argv[1:2] == ["keep"]:
        _keep(*sys.argv[2:])
        return
    if sys.argv[1:2] == ["bare"]:
        _bare(*sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    report("Copies in other machines' memory", run(quick=arguments.quick), as_json=arguments.json)


if __name__ == "__main__":
    main()
